"""The documented table of what is exact: made from measured rows, sound, and measured again here for plain torch."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from deltarefit.cli.conformance import __main__ as main
from deltarefit.cli.conformance import run
from deltarefit.cli.conformance.judge import GroupLeftOutError
from deltarefit.cli.conformance.rows import PAGE, TABLE, LeftOut, Measured, Row, page_of, read_table, write_table
from deltarefit.cli.conformance.run import run_engine
from deltarefit.errors import DeadlineError, RejectedError

DOCS = Path(__file__).parents[2] / "docs"
ROW = Row(engine="e", model="m", quantisation="none", exact_bytes_fraction=1.0, rerun=0.0, dense=0.0, bit_equal=True)


def test_the_documented_page_is_made_from_the_table():
    assert (DOCS / PAGE).read_text() == page_of(read_table(DOCS / TABLE)), "run make conformance"


def test_every_documented_row_is_exact_or_refused_with_a_reason():
    rows = read_table(DOCS / TABLE)
    assert [row for row in rows if not row.is_sound] == []
    for row in rows:
        shares = row.exact_bytes_fraction + row.rerun + row.dense + row.skipped
        assert shares == pytest.approx(0.0 if row.refused else 1.0, abs=1e-6), row
    assert {row.engine.partition(" ")[0] for row in rows} == {"vLLM", "SGLang", "torch"}


def test_the_table_has_the_documented_fields():
    row = json.loads((DOCS / TABLE).read_bytes())["rows"][0]
    assert {"engine", "model", "quantisation", "exact_bytes_fraction", "rerun", "dense", "refused", "bit_equal"} <= set(row)


@pytest.mark.parametrize(
    ("changes", "is_sound"),
    [
        ({}, True),
        ({"bit_equal": False}, False),
        ({"bit_equal": False, "refused": "packed"}, True),
        ({"bit_equal": True, "refused": "packed"}, False),
    ],
)
def test_a_row_is_sound_if_it_is_exact_or_refused(changes: dict, is_sound: bool):
    assert msgspec.structs.replace(ROW, **changes).is_sound is is_sound


def test_a_page_never_rounds_to_all_or_nothing(tmp_path):
    row = msgspec.structs.replace(ROW, exact_bytes_fraction=0.9999999, rerun=0.0000001)
    write_table(tmp_path, [row, ROW])
    first, second = (tmp_path / PAGE).read_text().splitlines()[-2:]
    assert "| 99.99% | 0.01% | - | - | bit-equal |" in first
    assert "| all | - | - | - | bit-equal |" in second
    assert read_table(tmp_path / TABLE) == (row, ROW)


def test_a_file_that_is_no_table_is_named(tmp_path):
    (tmp_path / TABLE).write_text("{}")
    with pytest.raises(RejectedError, match=r"no conformance table: .*make conformance"):
        read_table(tmp_path / TABLE)


@pytest.mark.torch
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_doctor_measures_the_rows_of_the_engine_at_hand():
    program = "from deltarefit.cli import main; main()"
    command = [sys.executable, "-c", program, "doctor", "--engine", "torch", "--json"]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    measured = msgspec.convert(json.loads(done.stdout)["rows"], tuple[Row, ...])
    assert measured == tuple(row for row in read_table(DOCS / TABLE) if row.engine.startswith("torch "))
    assert "qwen3_moe, none: bit-equal" in done.stderr.decode()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "names", "expected"),
    [
        pytest.param("vllm", ("gptq-dense",), [("qwen3", "gptq", "")], marks=pytest.mark.vllm),
        pytest.param("sglang", ("qwen3_next",), [("qwen3_next", "none", "")], marks=pytest.mark.sglang),
    ],
)
def test_documented_rows_are_what_is_measured_here(engine: str, names: tuple, expected: list):
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"needs {engine}")
    measured = run_engine(engine, lambda row: None, names).rows
    assert [(row.model, row.quantisation, row.kernels) for row in measured] == expected
    documented = read_table(DOCS / TABLE)
    assert [row for row in measured if row not in documented] == []


def test_a_group_that_does_not_end_is_told_with_what_it_wrote(monkeypatch):
    def stuck(command, *, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout, output=b"", stderr=b"waiting for a lock")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(subprocess, "run", stuck)
    with pytest.raises(DeadlineError, match=r"conformance of torch, qwen3: not done after 900 s:\nwaiting for a lock"):
        run_engine("torch", lambda row: None, ("qwen3",))


@pytest.mark.torch
def test_a_refit_that_is_not_exact_is_said_to_be_so():
    """The judge must be able to say no: a receiver that leaves one tensor out, and one that spoils another."""
    torch = pytest.importorskip("torch")
    from deltarefit.cli.conformance.judge import Subject, judge
    from deltarefit.receiver import RankReceiver
    from deltarefit.testing.loaders import LOADERS, random_weights
    from deltarefit.testing.oracle import raw_state

    case = LOADERS["fused qkv"]()

    def served(weights):
        model = case.build()
        with torch.no_grad():
            model.load_weights(weights.items())
        return model

    class Forgetful(RankReceiver):
        def apply(self, payload):
            return super().apply(type(payload)(payload.header, payload.items[1:], payload.nbytes, payload.digest))

    class Careless(RankReceiver):
        def prewarm(self, catalog):
            report = super().prewarm(catalog)
            next(iter(self._model.parameters())).data.view(torch.uint8).view(-1)[0] ^= 1
            return report

    def verdict(kind):
        return judge(
            Subject(
                engine="toy", model="fused", quantisation="none",
                versions=[random_weights(case.catalog, seed) for seed in (1, 2, 3)],
                served=served, receiver=lambda model: kind(model, model.load_weights), state=raw_state,
            )
        )  # fmt: skip

    assert verdict(RankReceiver).is_sound
    assert not verdict(Forgetful).is_sound
    assert not verdict(Careless).is_sound


@pytest.mark.torch
def test_a_model_that_prewarm_refuses_is_refused_with_the_tensor_and_the_reason():
    from deltarefit.cli.conformance.judge import Subject, judge
    from deltarefit.receiver import RankReceiver
    from deltarefit.testing.loaders import LOADERS, random_weights
    from deltarefit.testing.oracle import raw_state

    case = LOADERS["writes from a thread"]()
    versions = [random_weights(case.catalog, seed, finite=True) for seed in (1, 2, 3)]

    def served(weights):
        model = case.build()
        model.load_weights(weights.items())
        return model

    row = judge(
        Subject(
            engine="toy", model="threads", quantisation="none", versions=versions, served=served,
            receiver=lambda model: RankReceiver(model, model.load_weights), state=raw_state,
        )
    )  # fmt: skip
    assert row.is_sound
    assert not row.bit_equal
    assert "behind the dispatch hook" in row.refused


def test_a_group_that_this_machine_cannot_build_says_why(monkeypatch, tmp_path):
    def subjects(*_):
        raise GroupLeftOutError("no such processor")

    monkeypatch.setattr(run, "_cases", lambda engine: SimpleNamespace(subjects=subjects))
    out = io.BytesIO()
    run.judge_group("vllm", "AMX", tmp_path, ["one"], out)

    def answer(command, **_):
        return subprocess.CompletedProcess(command, 0, b"a library greets\n" + out.getvalue(), b"")

    monkeypatch.setattr(subprocess, "run", answer)
    found = run._run_group("vllm", "AMX", tmp_path / "work", ["one", "two"], print)
    assert found == Measured((), (LeftOut(engine="vllm", kernels="AMX", models=("one", "two"), reason="no such processor"),))


def test_a_table_without_the_rows_of_this_machine_is_not_documented(monkeypatch, tmp_path, capsys):
    """A maintainer whose processor lacks AMX must not lose its rows by making the page anew."""
    left_out = LeftOut(engine="vllm", kernels="AMX", models=("qwen3", "gpt_oss"), reason="no such processor")
    monkeypatch.setattr(main, "run_engine", lambda engine, say: Measured((ROW,), (left_out,)))
    (tmp_path / PAGE).write_text("as before")
    for arguments in (["run", "vllm", str(tmp_path / "vllm.json")], ["join", str(tmp_path), str(tmp_path / "vllm.json")]):
        assert main.main(arguments) == 1
        said = capsys.readouterr().err
        assert "vllm, AMX kernels, qwen3, gpt_oss: left out here: no such processor" in said
        assert "run 'make conformance' on a machine that can build them" in said
    assert (tmp_path / PAGE).read_text() == "as before"
    assert not (tmp_path / TABLE).exists()


def test_what_was_measured_in_full_is_documented(monkeypatch, tmp_path):
    monkeypatch.setattr(main, "run_engine", lambda engine, say: Measured((ROW,)))
    assert main.main(["run", "vllm", str(tmp_path / "vllm.json")]) == 0
    assert main.main(["join", str(tmp_path), str(tmp_path / "vllm.json")]) == 0
    assert read_table(tmp_path / TABLE) == (ROW,)
