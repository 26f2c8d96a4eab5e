// Shared by all instruction sets: plain types, unaligned loads, the digest's keys, tables of pieces and their walkers.
// Nothing here allocates, throws or writes outside what its caller handed in.
#ifndef DELTAREFIT_COMMON_H
#define DELTAREFIT_COMMON_H

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "stored words are little-endian; a big-endian build needs byte swaps that nobody has written"
#endif

namespace deltarefit {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i64 = int64_t;

constexpr u32 ESCAPE = 255;  // a byte of GAPS that means: add 255 and go on
constexpr u32 SHORT_ESCAPE = 85;  // the same in SHORT_GAPS, where no byte is above it

enum Encoding { OVERWRITE = 0, DIFFERENCE = 1, XOR = 2 };
enum Form { RUN = 0, GAPS = 1, SHORT_GAPS = 3 };  // 2, 4 and 8 are the widths of wide gaps

// Words may start at any byte (a memory-mapped file's tensor does), so every access goes through memcpy.
template <class U>
static inline U load(const u8* from) {
  U word;
  memcpy(&word, from, sizeof word);
  return word;
}
template <class U>
static inline void store(u8* to, U word) {
  memcpy(to, &word, sizeof word);
}

// --- the digest's keys (design note 0004; mix.py states the same in numpy) --------------------------------------------------

// One lane of the digest: the hash that gives a digit its key, and what an element adds for its place alone.
struct Lane {
  u32 first, second;    // multipliers of the two rounds
  int shift, last_shift;
  u64 seed, step, base;
};
constexpr Lane LANE0 = {0x7FEB352D, 0x846CA68B, 15, 16, 0x64656C7461726566ull, 0xA0761D6478BD642Full, 0x8EBC6AF09C88C6E3ull};
constexpr Lane LANE1 = {0x21F0AAAD, 0xD35A2D97, 15, 15, 0x69742D6469676974ull, 0xE7037ED1A0B428DBull, 0x589965CC75374CC3ull};

// Digits whose numbers agree above the lower 32 bits share this start of their hash.
static inline u32 digit_seed(const Lane& lane, u64 digit) {
  u64 z = lane.seed + ((digit >> 32) + 1) * 0x9E3779B97F4A7C15ull;  // splitmix64
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return u32((z ^ (z >> 31)) >> 32);
}

// `start` is (lower half of the digit's number) * first + seed.
static inline u32 scramble(const Lane& lane, u32 start) {
  u32 h = start;
  h = (h ^ (h >> lane.shift)) * lane.second;
  return (h ^ (h >> lane.last_shift)) | 1;
}

static inline u32 start_of(const Lane& lane, u64 digit) { return u32(digit) * lane.first + digit_seed(lane, digit); }

// What n elements from flat index `first` on add for their places alone.
static inline u64 places(const Lane& lane, u64 first, u64 n) {
  const u64 end = first + n - 1;  // the sum of the indices is n * (first + end) / 2; one of the factors is even
  const u64 sum = n % 2 ? n * (first + (end - first) / 2) : n / 2 * (first + end);
  return sum * lane.step + n * lane.base;
}

struct Sums {
  u64 lane0 = 0, lane1 = 0;
};

template <class U>
struct DigitLayout {
  static constexpr i64 PER_DIGIT = sizeof(U) < 4 ? 4 / sizeof(U) : 1;  // elements in a digit
  static constexpr i64 DIGITS = sizeof(U) == 8 ? 2 : 1;                // digits of an element
  static constexpr i64 SEED_ELEMENTS = (i64(1) << 32) * PER_DIGIT / DIGITS;  // elements whose digits share their seeds
};

// --- pieces -----------------------------------------------------------------------------------------------------------------

constexpr int MAX_AXES = 64;

// A table of normalised pieces: for each [axes, canonical offset, storage offset, then (length, canonical stride, storage
// stride) per axis], all in elements. Python checked it: no piece is empty and every position lies inside its storage.
struct PieceView {
  i64 naxes = 0, canonical = 0, storage = 0;
  const i64* axes = nullptr;
  i64 length(i64 axis) const { return axes[3 * axis]; }
  i64 canonical_stride(i64 axis) const { return axes[3 * axis + 1]; }
  i64 storage_stride(i64 axis) const { return axes[3 * axis + 2]; }
  i64 last() const {
    i64 at = canonical;
    for (i64 axis = 0; axis < naxes; axis++) at += (length(axis) - 1) * canonical_stride(axis);
    return at;
  }
  i64 num_elements() const {
    i64 n = 1;
    for (i64 axis = 0; axis < naxes; axis++) n *= length(axis);
    return n;
  }
};

static inline const i64* read_piece(const i64* table, PieceView& piece) {
  piece.naxes = table[0];
  piece.canonical = table[1];
  piece.storage = table[2];
  piece.axes = table + 3;
  return table + 3 + 3 * table[0];
}

// Walks the runs of one piece. A run is a stretch of consecutive flat indices: the innermost axis if its canonical stride is 1,
// else a single element.
struct RunCursor {
  PieceView piece{};
  i64 outer = 0;                   // axes that are stepped from run to run
  i64 length = 0, stride = 0;      // elements of a run and their step in storage
  i64 index[MAX_AXES];
  i64 canonical = 0, storage = 0;  // of the current run's first element

  void open(const PieceView& view) {
    piece = view;
    const i64 inner = view.naxes - 1;
    const bool runs = view.canonical_stride(inner) == 1;
    outer = runs ? inner : view.naxes;
    length = runs ? view.length(inner) : 1;
    stride = runs ? view.storage_stride(inner) : 1;
    canonical = view.canonical;
    storage = view.storage;
    for (i64 axis = 0; axis < outer; axis++) index[axis] = 0;
  }

  bool next() { return bump(outer - 1); }

  // Step axis `axis` once, carrying outwards; inner axes are expected to stand at 0. False at the piece's end.
  bool bump(i64 axis) {
    for (; axis >= 0; axis--) {
      canonical += piece.canonical_stride(axis);
      storage += piece.storage_stride(axis);
      if (++index[axis] < piece.length(axis)) return true;
      rewind(axis);
    }
    return false;
  }

  void rewind(i64 axis) {
    canonical -= index[axis] * piece.canonical_stride(axis);
    storage -= index[axis] * piece.storage_stride(axis);
    index[axis] = 0;
  }

  // Stand on the run that holds the piece's element number `element`; returns the place inside it.
  i64 seek_element(i64 element) {
    open(piece);
    i64 run = element / length;
    for (i64 axis = outer - 1; axis >= 0; axis--) {
      index[axis] = run % piece.length(axis);
      run /= piece.length(axis);
      canonical += index[axis] * piece.canonical_stride(axis);
      storage += index[axis] * piece.storage_stride(axis);
    }
    return element % length;
  }

  // Stand on the first run that ends after `position` (which no earlier run of the cursor's past does). The piece ascends, so
  // axis by axis division finds it. False if there is none.
  bool seek_position(i64 position) {
    open(piece);
    i64 rest = position - canonical;
    if (rest <= 0) return true;
    for (i64 axis = 0; axis < outer; axis++) {
      const i64 step = rest / piece.canonical_stride(axis);
      if (step >= piece.length(axis)) return bump(axis - 1);
      index[axis] = step;
      canonical += step * piece.canonical_stride(axis);
      storage += step * piece.storage_stride(axis);
      rest -= step * piece.canonical_stride(axis);
    }
    return rest < length || next();
  }
};

// Walks the runs of all pieces of a table, piece after piece.
struct TableWalker {
  const i64* after;               // the rest of the table
  i64 left;                       // pieces not opened yet
  bool done = false;
  RunCursor run;
  i64 place = 0;                  // elements of the current run already taken

  TableWalker(const i64* table, i64 pieces, i64 element = 0) : after(table), left(pieces) {
    while (open_next()) {
      const i64 size = run.piece.num_elements();
      if (element < size) {
        place = element ? run.seek_element(element) : 0;
        return;
      }
      element -= size;
    }
  }
  bool open_next() {
    if (!left) {
      done = true;
      return false;
    }
    PieceView piece;
    after = read_piece(after, piece);
    left--;
    run.open(piece);
    return true;
  }
  i64 position() const { return run.canonical + place; }
  i64 address() const { return run.storage + place * run.stride; }
  i64 left_in_run() const { return run.length - place; }
  void take(i64 elements) {
    place += elements;
    if (place < run.length) return;
    place = 0;
    if (!run.next()) open_next();
  }
};

// --- strided runs ------------------------------------------------------------------------------------------------------------

constexpr i64 PANEL_NBYTES = 256 * 1024;  // of a reader's buffer; twice and four times as much were slower (Zen 4, rows of 16 KiB)

// Makes stretches of the walker's runs contiguous. Runs that lie side by side in storage (a transposed matrix) are read a cache
// line's width at a time: element by element each line would be fetched once for every element in it.
template <class U>
struct StretchReader {
  static constexpr i64 W = sizeof(U);
  static constexpr i64 LINE = 64 / W;  // elements of a cache line
  const u8* storage;
  u8* buffer;       // buffer_nbytes(); not used where every run is contiguous
  i64 capacity;     // its bytes
  i64 first = 0, runs = 0, length = 0, stride = 0;  // of the panel in the buffer: runs from these storage positions on
  i64 pitch = 0;    // bytes from one run of the panel to the next

  // The walker's next n elements, at consecutive addresses. n is at most what the buffer holds.
  const u8* read(const TableWalker& walker, i64 n) {
    const u8* from = storage + walker.address() * W;
    if (walker.run.stride == 1) return from;
    if (holds(walker.run) || fill(walker.run)) return buffer + (walker.run.storage - first) * pitch + walker.place * W;
    for (i64 i = 0; i < n; i++) store<U>(buffer + i * W, load<U>(from + i * walker.run.stride * W));
    return buffer;
  }

  bool holds(const RunCursor& run) const {
    return run.storage >= first && run.storage < first + runs && run.length == length && run.stride == stride;
  }

  bool fill(const RunCursor& run) {
    runs = 0;
    const i64 axis = run.outer - 1;
    if (axis < 0 || run.piece.storage_stride(axis) != 1 || run.stride < LINE) return false;
    const i64 row = run.length * W + 64;  // not a power of two, or all runs would share a set of the cache
    i64 abreast = LINE;  // runs that share each line; as many as fit, and whole parts of a line
    while (abreast * row > capacity) abreast /= 2;
    if (abreast < 4) return false;
    i64 count = abreast - i64(reinterpret_cast<uintptr_t>(storage + run.storage * W) % 64) / W % abreast;
    if (run.piece.length(axis) - run.index[axis] < count) count = run.piece.length(axis) - run.index[axis];
    const u8* from = storage + run.storage * W;
    for (i64 i = 0; i < run.length; i++)
      for (i64 r = 0; r < count; r++) store<U>(buffer + r * row + i * W, load<U>(from + (i * run.stride + r) * W));
    first = run.storage;
    runs = count;
    length = run.length;
    stride = run.stride;
    pitch = row;
    return true;
  }
};

// --- calls (mirrored by ctypes structures in library.py; sizes are compared at load time) ------------------------------------

enum ScanStatus : i64 { SCAN_DONE = 0, SCAN_FULL = 1, SCAN_WIDEN_GAPS = 2, SCAN_UNSETTLED = 3 };

struct ScanCall {
  const u8* candidate;
  const u8* baseline;
  const i64* table;
  u8* scratch;            // deltarefit_scan_scratch_nbytes()
  u8* locations[8];
  u8* values[8];
  i64 pieces;
  i64 elements;           // of all pieces
  i64 width;              // bytes of an element
  i64 encoding;
  i64 form;               // of the emitted locations: RUN (none are emitted), GAPS or a wide form
  i64 everything;         // emit unchanged elements too
  i64 may_be_dense;       // the shard can be sent whole, without locations
  i64 escape_allowance;   // escapes beyond one per element that are suffered before gaps are widened
  i64 location_capacity;  // bytes in each location plane
  i64 value_capacity;     // bytes in each value plane
  // progress, kept from call to call
  i64 scanned;            // elements, in piece order
  i64 count;              // elements emitted
  i64 location_nbytes;    // bytes emitted in each location plane
  i64 first;              // flat index of the first emitted element
  i64 last;               // of the last one
  i64 escapes;            // sum of gap / 255
  i64 max_gap;
  i64 pending_gap;        // on SCAN_WIDEN_GAPS: the largest gap of the chunk that did not fit
  i64 pending_count;      // on SCAN_FULL: elements of the chunk that did not fit
  i64 pending_nbytes;     // and the bytes of each location plane that they need
  u64 lane0, lane1;       // digest change
};

// Shards of one width that are scanned one after the other; what they emit lies one behind another in common planes.
struct ScanCalls {
  ScanCall* calls;        // each with a form of GAPS at first
  u8* locations;
  u8* values[8];
  i64 num_calls;
  i64 location_capacity;  // bytes of the plane of locations
  i64 value_capacity;     // bytes of each value plane
  i64 short_count;        // when GAPS become SHORT_GAPS: at least so many elements,
  i64 short_mean;         // gaps that are shorter on average,
  i64 short_escapes;      // and at least so many elements for each escape
  // progress
  i64 next;               // the call that runs, or is for the caller to settle
  i64 location_nbytes;    // used, by the calls before it
  i64 count;              // bytes of each value plane used by them
};

struct PlaneTotals {
  i64 sum;                // of a plane's bytes
  i64 escapes;            // bytes that are the escape
  i64 highest;            // byte; 0 if there is none
};

struct ApplyCall {
  u8* storage;
  const i64* table;
  const i64* positions;   // null: the item's columns below
  const u8* words;        // values that go with positions
  const u8* locations[8];
  const u8* values[8];
  i64 pieces;
  i64 width;              // bytes of a value
  i64 widen;              // storage words are twice as wide and take the value in their upper half
  i64 encoding;
  i64 form;
  i64 start;
  i64 count;
  i64 location_nbytes;
  i64 num_elements;       // of the canonical tensor
};

struct DigestCall {
  const u8* storage;
  const i64* table;
  u8* scratch;            // PANEL_NBYTES; null where every run is contiguous
  i64 pieces;
  i64 width;              // bytes of a canonical element
  i64 widen;
  i64 offender;           // flat index of a widened element with low bits, or -1
  u64 lane0, lane1;
};

struct CopyCall {
  u8* to;                 // consecutive elements
  const u8* storage;
  const i64* table;
  i64 pieces;
  i64 width;              // bytes of an element
  i64 counts;             // count elements of which (x + rule[0]) & rule[1] exceeds rule[2]
  u64 rule[3];
  i64 counted;
};

}  // namespace deltarefit

#endif
