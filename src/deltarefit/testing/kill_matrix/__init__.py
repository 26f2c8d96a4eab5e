"""Real processes, killed and frozen at every stage of a refit: does it end bit-equal, in time, and with nothing left behind?

``python -m deltarefit.testing.kill_matrix`` prints a table, ``--json`` the same for scripts. Two trainer ranks and two
rollout processes, in some cases with a relay each, share a run under ``file://`` or on a real S3 server. In the second of
three refits one process is held at a chosen point and then killed with SIGKILL, or stopped with SIGSTOP for longer than its
lease. All along, every rollout process serves: it hashes all its weights whenever its request gate lets it, so that a mixture
would show. What the run retains for receivers that come back must be whole in the end.
"""

from deltarefit.testing.kill_matrix.cases import CASES, REDUCED, Case
from deltarefit.testing.kill_matrix.matrix import MatrixResult, run_matrix
from deltarefit.testing.kill_matrix.outcome import CaseResult

__all__ = ["CASES", "REDUCED", "Case", "CaseResult", "MatrixResult", "run_matrix"]
