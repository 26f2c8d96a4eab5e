"""Messages between the demo's parent and its processes: msgspec structs over one local socket per process."""

from __future__ import annotations

import os
from multiprocessing.connection import Client, Connection, Listener
from typing import TypeVar

import msgspec

from deltarefit.errors import AttemptFailedError, DeadlineError

__all__ = [
    "Armed", "AwaitJoined", "DieInRefit", "Failed", "Generate", "Generated", "Hello", "Inspect", "Inspected", "Joined", "Link",
    "Stop", "Stopped", "Train", "Trained", "connect", "listen",
]  # fmt: skip

_MAX_NBYTES = 64 * 2**20
StructT = TypeVar("StructT", bound=msgspec.Struct)


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Hello(_Message, frozen=True, forbid_unknown_fields=True):
    """A process is ready."""

    role: str
    note: str


class Completion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: list[int]
    tokens: list[int]
    reward: float
    advantage: float


class Generate(_Message, frozen=True, forbid_unknown_fields=True):
    """Sample a group of completions for each prompt."""

    prompts: list[list[int]]
    group: int
    seed: int


class Generated(_Message, frozen=True, forbid_unknown_fields=True):
    completions: list[list[list[int]]]
    policy_version: int


class Inspect(_Message, frozen=True, forbid_unknown_fields=True):
    """Write the raw bytes of every parameter and buffer to a directory, and complete prompts greedily.

    The oracle first loads ``checkpoint`` afresh; rollout engines ignore it and show what they hold.
    """

    checkpoint: str
    directory: str
    prompts: list[list[int]]


class Inspected(_Message, frozen=True, forbid_unknown_fields=True):
    tokens: list[list[int]]
    logprobs: list[list[float]]
    policy_version: int
    seconds: float


class Train(_Message, frozen=True, forbid_unknown_fields=True):
    """Take one optimizer step on these completions and refit the engines."""

    completions: list[Completion]
    corrupt: bool
    """Flip a byte of one payload in transit, in this refit's first attempt."""
    candidate_directory: str
    """Where rank 0 writes the candidate as an ordinary checkpoint, for the oracle."""


class Trained(_Message, frozen=True, forbid_unknown_fields=True):
    report: bytes
    """A RefitReport as JSON."""
    loss: float
    faults_fired: int


class DieInRefit(_Message, frozen=True, forbid_unknown_fields=True):
    """Kill yourself with SIGKILL in the middle of the next refit, when a payload has been applied."""


class Armed(_Message, frozen=True, forbid_unknown_fields=True):
    pass


class AwaitJoined(_Message, frozen=True, forbid_unknown_fields=True):
    """Answer once the engine is ready for refits."""


class Joined(_Message, frozen=True, forbid_unknown_fields=True):
    pass


class Failed(_Message, frozen=True, forbid_unknown_fields=True):
    kind: str
    text: str


class Stop(_Message, frozen=True, forbid_unknown_fields=True):
    pass


class Stopped(_Message, frozen=True, forbid_unknown_fields=True):
    pass


Any = (
    Hello
    | Generate
    | Generated
    | Inspect
    | Inspected
    | Train
    | Trained
    | DieInRefit
    | Armed
    | AwaitJoined
    | Joined
    | Failed
    | Stop
    | Stopped
)


class Link:
    """One end of a connection."""

    def __init__(self, connection: Connection, peer: str) -> None:
        self._connection = connection
        self.peer = peer

    def send(self, message: Any) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(message))

    def receive(self, timeout_s: float) -> Any:
        """The next message.

        Raises:
            DeadlineError: nothing came in time.
            AttemptFailedError: the peer's process ended.
        """
        try:
            if not self._connection.poll(timeout_s):
                raise DeadlineError(f"{self.peer} did not answer within {timeout_s:.0f} s")
            return msgspec.msgpack.decode(self._connection.recv_bytes(_MAX_NBYTES), type=Any)
        except (EOFError, ConnectionError) as error:
            raise AttemptFailedError(f"{self.peer}: its process ended; see its log") from error

    def expect(self, kind: type[StructT], timeout_s: float) -> StructT:
        """The next message, which must be of this kind."""
        message = self.receive(timeout_s)
        if isinstance(message, Failed):
            raise AttemptFailedError(f"{self.peer}: {message.kind}: {message.text}")
        if not isinstance(message, kind):
            raise AttemptFailedError(f"{self.peer}: expected {kind.__name__}, got {type(message).__name__}")
        return message

    def close(self) -> None:
        self._connection.close()


def listen(address: str, secret: str) -> Listener:
    return Listener(address, family="AF_UNIX", authkey=secret.encode())


def connect(peer: str) -> Link:
    """Connect to the parent named by the environment that it started this process with."""
    address, secret = os.environ["DELTAREFIT_DEMO_SOCKET"], os.environ["DELTAREFIT_DEMO_SECRET"]
    return Link(Client(address, family="AF_UNIX", authkey=secret.encode()), peer)
