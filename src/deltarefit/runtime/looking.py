"""How commands that only look, while a person waits, open a run: they give up after seconds where refits try on for minutes."""

from __future__ import annotations

from deltarefit.control import ControlPlane, ControlSettings
from deltarefit.runtime.clock import Clock, IdSource
from deltarefit.runtime.session import control_plane
from deltarefit.transport import RetryPolicy, RunStore, StoreSettings, open_run

__all__ = ["control_to_look", "open_to_look"]

# They multiply: a store that takes connections and never answers is waited for 2 x 2 x 3 seconds before the record is given up.
_STORE = StoreSettings(
    retry=RetryPolicy(attempts=2), request_retries=0, request_timeout_s=30.0, read_timeout_s=3.0, connect_timeout_s=3.0
)
_CONTROL = ControlSettings(max_tries=2)


def open_to_look(run: str, *, clock: Clock, may_be_new: bool = False) -> RunStore:
    """The run's store, for small reads: a request is repeated once, and waits three seconds for a byte.

    Raises:
        RejectedError: ``run`` is no URL of a run, or names a directory that is not there; ``may_be_new`` makes that.
    """
    return open_run(run, clock=clock, settings=_STORE, may_be_new=may_be_new)


def control_to_look(store: RunStore, clock: Clock, ids: IdSource) -> ControlPlane:
    """The run's record, for reading."""
    return control_plane(store, clock, ids, _CONTROL)
