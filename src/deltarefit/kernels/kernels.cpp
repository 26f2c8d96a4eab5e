// The compiled half of deltarefit.kernels: hot loops over stored bits, loaded with ctypes (so the interpreter lock is free).
//
//   scan.inc    compare a shard with its baseline (detect.inc), emit locations and value planes of what differs (emit.inc)
//   scan_many.inc  many shards, into common output memory
//   apply.inc   decode an item and change storage through pieces
//   shorten.inc make gap bytes of one escape those of another
//   digest.inc  the position-keyed digest over pieces
//   copy.inc    candidate to baseline, past the caches, counting NaNs
//   common.h    types, digest keys, walkers over tables of pieces, the structures of each call
//
// The .inc files are included once per instruction set and chosen at run time; the numpy twins in twins.py give the same bits.
// Python validates sizes, bounds and overflow before it calls; the checks here are those that need the payload's bytes.
// Build: `python hatch_build.py`, or g++ -O3 -std=c++17 -shared -fPIC kernels.cpp. -DDELTAREFIT_NO_X86 leaves intrinsics out.

#include "common.h"

#if !defined(DELTAREFIT_NO_X86) && (defined(__x86_64__) || defined(__amd64__))
#define DELTAREFIT_X86 1
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 says both of its own intrinsics (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#endif

#define API extern "C" __attribute__((visibility("default")))

#define ISA_LEVEL 1
#define TARGET
namespace deltarefit {
namespace portable {
#include "digest.inc"
#include "scan.inc"
#include "apply.inc"
#include "shorten.inc"
#include "scan_many.inc"
#include "copy.inc"
}  // namespace portable
}  // namespace deltarefit
#undef TARGET
#undef ISA_LEVEL

#ifdef DELTAREFIT_X86

#define ISA_LEVEL 2
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))
namespace deltarefit {
namespace avx2 {
#include "digest.inc"
#include "scan.inc"
#include "apply.inc"
#include "shorten.inc"
#include "scan_many.inc"
#include "copy.inc"
}  // namespace avx2
}  // namespace deltarefit
#undef TARGET
#undef ISA_LEVEL

#define ISA_LEVEL 3
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,avx2,bmi,bmi2,popcnt,lzcnt")))
namespace deltarefit {
namespace avx512 {
#include "digest.inc"
#include "scan.inc"
#include "apply.inc"
#include "shorten.inc"
#include "scan_many.inc"
#include "copy.inc"
}  // namespace avx512
}  // namespace deltarefit
#undef TARGET
#undef ISA_LEVEL

#endif

namespace deltarefit {

template <class U>
static void digest_elements(const i64* index, const u8* bits, i64 n, Sums& sums) {
  for (i64 i = 0; i < n; i++) portable::add_stretch<U>(bits + i * i64(sizeof(U)), index[i], 1, sums);
}

}  // namespace deltarefit

using namespace deltarefit;

// Changes whenever a structure or the meaning of a call does; library.py refuses a library of another number.
API i64 deltarefit_abi() { return 12; }

API i64 deltarefit_call_nbytes(i64 which) {
  const i64 sizes[] = {sizeof(ScanCall), sizeof(ScanCalls), sizeof(ApplyCall), sizeof(DigestCall), sizeof(CopyCall),
                       sizeof(PlaneTotals)};
  return which >= 0 && which < i64(sizeof sizes / sizeof *sizes) ? sizes[which] : -1;
}

// The best instruction set here: 1 portable, 2 AVX2, 3 AVX-512.
API i64 deltarefit_best_isa() {
#ifdef DELTAREFIT_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("popcnt");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vbmi2");
  return avx2 && avx512 ? 3 : avx2 ? 2 : 1;
#else
  return 1;
#endif
}

API i64 deltarefit_panel_nbytes() { return PANEL_NBYTES; }

// Of a shard of so many elements; `strided`: not every run of it is contiguous.
API i64 deltarefit_scan_scratch_nbytes(i64 width, i64 elements, i64 strided) {
  switch (width) {
    case 1: return portable::scan_scratch_nbytes<u8>(elements, strided);
    case 2: return portable::scan_scratch_nbytes<u16>(elements, strided);
    case 4: return portable::scan_scratch_nbytes<u32>(elements, strided);
    default: return portable::scan_scratch_nbytes<u64>(elements, strided);
  }
}

API i64 deltarefit_scan(ScanCall* call, i64 isa) {
#ifdef DELTAREFIT_X86
  if (isa == 3) return avx512::scan(*call);
  if (isa == 2) return avx2::scan(*call);
#endif
  (void)isa;
  return portable::scan(*call);
}

// Goes on until all calls are done (0), or `next` needs the caller (another ScanStatus).
API i64 deltarefit_scan_many(ScanCalls* batch, i64 isa) {
#ifdef DELTAREFIT_X86
  if (isa == 3) return avx512::scan_many(*batch);
  if (isa == 2) return avx2::scan_many(*batch);
#endif
  (void)isa;
  return portable::scan_many(*batch);
}

API u64 deltarefit_read_both(const u8* x, const u8* y, i64 nbytes, i64 isa) {
#ifdef DELTAREFIT_X86
  if (isa == 3) return avx512::read_both(x, y, nbytes);
  if (isa == 2) return avx2::read_both(x, y, nbytes);
#endif
  (void)isa;
  return portable::read_both(x, y, nbytes);
}

// A plane's PlaneTotals.
API void deltarefit_plane_totals(const u8* plane, i64 n, i64 escape, i64 isa, PlaneTotals* totals) {
#ifdef DELTAREFIT_X86
  if (isa == 3) return void(*totals = avx512::plane_totals(plane, n, u8(escape)));
  if (isa == 2) return void(*totals = avx2::plane_totals(plane, n, u8(escape)));
#endif
  (void)isa;
  *totals = portable::plane_totals(plane, n, u8(escape));
}

// The same of n parts of a plane: part i has nbytes[i] bytes from start[i] on.
API void deltarefit_totals_of_parts(const u8* plane, const i64* start, const i64* nbytes, i64 n, i64 escape, i64 isa,
                                    PlaneTotals* totals) {
  for (i64 i = 0; i < n; i++) deltarefit_plane_totals(plane + start[i], nbytes[i], escape, isa, totals + i);
}

// Bytes that n bytes of GAPS take as SHORT_GAPS.
API i64 deltarefit_shortened_nbytes(const u8* plane, i64 n, i64 isa) {
#ifdef DELTAREFIT_X86
  if (isa == 3) return avx512::shortened_nbytes(plane, n);
  if (isa == 2) return avx2::shortened_nbytes(plane, n);
#endif
  (void)isa;
  return portable::shortened_nbytes(plane, n);
}

// Makes them SHORT_GAPS in place; `nbytes` is what the call above gives.
API void deltarefit_shorten_gaps(u8* plane, i64 n, i64 nbytes, i64 isa) {
#ifdef DELTAREFIT_X86
  if (isa == 3) return avx512::shorten_gaps(plane, n, nbytes);
  if (isa == 2) return avx2::shorten_gaps(plane, n, nbytes);
#endif
  (void)isa;
  portable::shorten_gaps(plane, n, nbytes);
}

// Elements changed, or a negative ApplyStatus, in which case nothing was written.
API i64 deltarefit_apply(const ApplyCall* call, i64 isa) {
#ifdef DELTAREFIT_X86
  if (isa == 3) return avx512::apply(*call);
  if (isa == 2) return avx2::apply(*call);
#endif
  (void)isa;
  return portable::apply(*call);
}

API void deltarefit_digest(DigestCall* call, i64 isa) {
#ifdef DELTAREFIT_X86
  if (isa == 3) return avx512::digest(*call);
  if (isa == 2) return avx2::digest(*call);
#endif
  (void)isa;
  portable::digest(*call);
}

// Several calls in one, so that threads do not meet in the interpreter. changed[i]: what deltarefit_apply gives for calls[i].
API void deltarefit_apply_many(const ApplyCall* calls, i64 n, i64* changed, i64 isa) {
  for (i64 i = 0; i < n; i++) changed[i] = deltarefit_apply(calls + i, isa);
}

// `scratch` as in DigestCall, for all of them in turn.
API void deltarefit_digest_many(DigestCall* calls, i64 n, u8* scratch, i64 isa) {
  for (i64 i = 0; i < n; i++) {
    calls[i].scratch = scratch;
    deltarefit_digest(calls + i, isa);
  }
}

// Digest of n single elements: lanes[0] and lanes[1].
API void deltarefit_digest_elements(const i64* index, const u8* bits, i64 n, i64 width, u64* lanes) {
  Sums sums;
  switch (width) {
    case 1: digest_elements<u8>(index, bits, n, sums); break;
    case 2: digest_elements<u16>(index, bits, n, sums); break;
    case 4: digest_elements<u32>(index, bits, n, sums); break;
    default: digest_elements<u64>(index, bits, n, sums); break;
  }
  lanes[0] = sums.lane0;
  lanes[1] = sums.lane1;
}

// `scratch` as in DigestCall, for all of them in turn.
API void deltarefit_copy_many(CopyCall* calls, i64 n, u8* scratch, i64 isa) {
#ifdef DELTAREFIT_X86
  if (isa == 3) return avx512::copy_many(calls, n, scratch);
  if (isa == 2) return avx2::copy_many(calls, n, scratch);
#endif
  (void)isa;
  portable::copy_many(calls, n, scratch);
}
