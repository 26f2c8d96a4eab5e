"""Coverage-guided fuzzing of the payload decoder. By hand, with atheris: ``pip install atheris``, then

``python tests/fuzz/fuzz_decode.py -max_total_time=300 -max_len=8192 SEEDS/`` with the ``tests/vectors/*.bin`` copied to SEEDS/.

Every input is tried in three ways, because digest and zstd would keep mutations from reaching what is behind them: as
it is; with length and digest made to fit; and as the *content* of an item table and planes that are then packed correctly.
"""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "payload"))

try:
    import atheris
except ImportError:
    atheris = None

# Coverage of this package alone: numpy's and Hypothesis's own branches would drown it.
with atheris.instrument_imports(include=["deltarefit"]) if atheris else contextlib.nullcontext():
    from payload_cases import Draft, decode_soundly, sample, sealed

_TEMPLATE = sample()


def check(data: bytes) -> None:
    """Raise anything but a refusal, or leave something unsound: found a bug."""
    decode_soundly(data)
    decode_soundly(data, key=bytes(16))
    if len(data) >= 164:
        decode_soundly(sealed(data[:136] + len(data).to_bytes(8, "little") + data[144:]))
    if data:
        decode_soundly(_packed(data))


def _packed(data: bytes) -> bytes:
    """A sample payload whose parts are overwritten with bytes of ``data``, where and how its first bytes say."""
    draft = Draft.of(_TEMPLATE)
    names = sorted(draft.columns)
    at = 0
    while at + 3 <= len(data):
        kind, where, value = data[at : at + 3]
        at += 3
        if kind % 4 == 0:
            column = draft.columns[names[where % len(names)]]
            column[value % len(column)] = data[at] if at < len(data) else 0
            at += 1
        elif kind % 4 == 1:
            nbytes = 1 + value % 32
            draft.replace_plane(where % len(draft.rows), data[at : at + nbytes] or b"\xff")
            at += nbytes
        elif kind % 4 == 2:
            draft.dimensions[where % len(draft.dimensions)] = int.from_bytes(data[at : at + 1 + value % 8], "little")
            at += 1 + value % 8
        else:
            draft.rows[where % len(draft.rows)][value % 5] = data[at] if at < len(data) else 0
            at += 1
    draft.fields["num_changed"] = min(sum(draft.columns["count"]), 2**64 - 1)
    return draft.build()


def main() -> None:
    if atheris is None:
        sys.exit("fuzz_decode: atheris is not installed; run 'pip install atheris' in an environment of your own")
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
