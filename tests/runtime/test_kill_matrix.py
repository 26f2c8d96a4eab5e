"""Real processes killed and frozen in the middle of refits; all cases: ``python -m deltarefit.testing.kill_matrix``."""

from __future__ import annotations

import msgspec
import pytest

from deltarefit.testing.kill_matrix import CASES, REDUCED, run_matrix
from deltarefit.testing.kill_matrix.matrix import table
from deltarefit.testing.kill_matrix.outcome import check_served
from deltarefit.testing.s3_server import find_server

pytestmark = [pytest.mark.torch]


@pytest.mark.process
@pytest.mark.slow
def test_whatever_is_killed_the_run_ends_bit_equal_and_clean():
    cases = [case for case in REDUCED if case.store == "file" or find_server() is not None]
    done = run_matrix(cases)
    assert done.ok, table(done.cases)
    assert (done.kills, done.stops, done.replacements) == tuple(
        sum(case.action == action for case in cases) for action in ("kill", "stop", "replace")
    )
    assert msgspec.json.decode(msgspec.json.encode(done), type=type(done)) == done


def test_the_matrix_names_each_case_once_and_the_reduced_one_is_part_of_it():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(REDUCED) <= set(CASES)
    assert {case.action for case in REDUCED} == {"kill", "stop", "replace"}


def test_an_answer_under_other_weights_than_those_of_its_version_is_a_problem(tmp_path):
    (tmp_path / "served-rollout-0-1.txt").write_text("0 aa\n1 bb\n1 xx\n2 bb\n")
    problems, served = check_served(tmp_path, {0: "aa", 1: "bb", 2: "cc"})
    assert served == 4
    assert problems == [
        "served-rollout-0-1 answered as version 1 with weights of no committed version",
        "served-rollout-0-1 answered as version 2 with weights those of version 1",
    ]
