"""Settings: frozen, validated, unknown keys refused; from Python, TOML or the environment."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec

from deltarefit.checked import (
    Count,
    Nbytes,
    Range,
    Seconds,
    SomeNbytes,
    SomeSeconds,
    Threads,
    base_kind,
    check_fields,
    fields_of,
    shown,
)
from deltarefit.errors import RejectedError
from deltarefit.transport import MAX_PAYLOAD_NBYTES
from deltarefit.units import parse_nbytes

__all__ = ["ObservationSettings", "PublisherSettings", "ReceiverAgentSettings", "RelayServiceSettings"]

_MAX_RETAINED = 1000
_MAX_FILE_NBYTES = 2**20
_Lease = Annotated[float, Range(0.01, 86400)]
_SomeCount = Annotated[int, Range(1, 10**6)]


class _Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    def __post_init__(self) -> None:
        """Refuse what a field cannot be."""
        check_fields(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, source: str = "") -> Self:
        """Settings from plain values; sizes (names ending in ``nbytes``) may be texts such as ``256MiB``.

        ``source`` says in errors where the values come from.

        Raises:
            RejectedError: a setting is unknown, or cannot have that value; the text names both, and what was expected.
        """
        where = f"{source}: " if source else ""
        if not isinstance(values, Mapping):
            raise RejectedError(f"{where}{cls.__name__}: expected names and values, got {shown(values)}")
        if unknown := sorted(shown(name) for name in values if name not in cls.__struct_fields__):
            known = ", ".join(cls.__struct_fields__)
            raise RejectedError(f"{where}{cls.__name__}: {', '.join(unknown)[:200]}: no such setting; known settings: {known}")
        try:
            return cls(**{name: cls._read(name, value) for name, value in values.items()})
        except RejectedError as error:
            raise RejectedError(f"{where}{error}") from error

    @classmethod
    def _read(cls, name: str, value: Any) -> Any:
        """What a text spells, where the setting is a number or a switch; else the value as it is."""
        if not isinstance(value, str):
            return value
        if name.endswith("_nbytes"):
            try:
                return parse_nbytes(value)
            except RejectedError as error:
                raise RejectedError(f"{cls.__name__}: {name}: {error}") from error
        kind = base_kind(fields_of(cls)[name])
        try:
            return msgspec.convert(value, kind, strict=False) if kind in (int, float, bool) else value
        except msgspec.ValidationError:
            return value  # refused with the others that do not fit

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], table: str) -> Self:
        """Settings from one table of a TOML file; a missing table means the defaults.

        Raises:
            RejectedError: the file cannot be read, is no TOML, or as in ``from_mapping``.
        """
        values = read_toml(path).get(table, {})
        if not isinstance(values, dict):
            raise RejectedError(f"{path}: {table}: expected a table [{table}], got {shown(values)}")
        return cls.from_mapping(values, source=f"{path}, table [{table}]")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], prefix: str) -> Self:
        """Settings from variables ``<prefix><NAME>``; other variables with that prefix are refused.

        Raises:
            RejectedError: as in ``from_mapping``.
        """
        return cls.from_mapping(read_environment(environment, prefix), source=f"environment, {prefix}...")


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A TOML file's content.

    Raises:
        RejectedError: it cannot be read, or is no TOML.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_FILE_NBYTES + 1)
        if len(data) > _MAX_FILE_NBYTES:
            raise RejectedError(f"{path}: expected a TOML file of at most {_MAX_FILE_NBYTES} bytes")
        return tomllib.loads(data.decode("utf-8"))
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, no TOML, or no path
        raise RejectedError(f"{path}: expected a TOML file: {error}") from error


def read_environment(environment: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Values of the variables with that prefix, by what follows it in small letters."""
    return {name[len(prefix) :].lower(): value for name, value in environment.items() if name.startswith(prefix)}


class ObservationSettings(_Settings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a process tells what it does, beside the report. All of it is off by default."""

    event_directory: str = ""
    """Where to append every stage that ran as a JSON line, in a file named after the process. Rank 0's file gets the events of
    all processes of a refit; ``deltarefit trace`` makes a trace for Perfetto of it."""
    metrics_address: str = ""
    """``host:port`` on which to answer ``GET /metrics`` in Prometheus' format. On training ranks, only the first serves it."""
    opentelemetry: bool = False
    """Write every stage as a span of the application's tracer; needs ``deltarefit[otel]``."""


class RelayServiceSettings(_Settings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A relay on a rollout node."""

    shared_directory: str = "/dev/shm"
    """The same as that of the node's receivers."""
    max_nbytes: SomeNbytes = 8 * 2**30
    """Most payload bytes kept there; when they are used up, owners wait."""
    lease_s: _Lease = 10.0
    """A relay that showed no sign of life for so long is left out of new attempts."""
    relay_tls_authority: str = ""
    """TLS 1.3 between owners and relays, with certificates on both sides: all three files, or none. This one holds certificates
    of the authority that signed every participant's, PEM."""
    relay_tls_certificate: str = ""
    """This participant's own certificate, with its chain, PEM."""
    relay_tls_key: str = ""
    """Its private key, PEM, without a password."""


class PublisherSettings(ObservationSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The training side. All ranks must be given the same."""

    min_receivers: Count = 1
    """A refit, and each retry, waits until so many live receivers are ready; all that are ready take part. 0: it never waits,
    so a run may begin before its rollout does."""
    join_timeout_s: Seconds = 600.0
    """How long a refit waits for ``min_receivers``, then it is refused; loading a large engine takes minutes."""
    reply_timeout_s: SomeSeconds = 120.0
    """How long any receiver may take to answer one call. Applying what is left once the owners have sent everything, and
    proving it, is one. Receivers show signs of life meanwhile: a dead one is noticed after ``lease_s`` all the same."""
    request_timeout_s: Seconds = 60.0
    """Added to ``reply_timeout_s`` for calls in which a request gate closes: at least the receivers' own."""
    group_timeout_s: SomeSeconds = 1800.0
    """How long training ranks wait for each other inside a refit before they take one for dead. Rank 0 may be waiting for
    receivers meanwhile, so it is longer than ``join_timeout_s``."""
    lease_s: _Lease = 10.0
    """A coordinator or receiver that showed no sign of life for so long counts as dead. Receivers and relays get the same."""
    max_attempts: _SomeCount = 5
    """Attempts of one refit before it ends in ``OperatorRequiredError``."""
    retry_pause_s: Seconds = 0.2
    """Pause before the first retry; doubles each time, up to 30 s."""
    difference: Literal["difference", "xor", "overwrite"] = "difference"
    """The encoding used wherever every receiver can take it; retries send overwrites."""
    audit_every: Count = 1
    """Receivers prove the whole policy's digest from what they hold at a Publisher's first refit and at every n-th; 0: at the
    first only. It costs them one read of the weights."""
    bucket_nbytes: Nbytes = 0
    """Input bytes per payload. 0: 512 MiB (paper C), or a 16th of a rank's share if that is less, but at least 4 MiB, so that
    comparing, sending and applying overlap for small models, too. The first and the last buckets are smaller, down to an
    eighth."""
    chunk_nbytes: Nbytes = 0
    """Input bytes per scan. 0: 64 MiB (paper C, object storage), or a quarter of a bucket if that is less."""
    scan_threads: Threads = 0
    """Threads that compare and encode; 0 means one per core that this process may use, at most 16."""
    transport: Literal["auto", "object_store", "relay"] = "auto"
    """How payloads travel. ``auto``: by the relay tree where relays serve every required receiver's node, otherwise, and for
    every retry, over the object store."""
    relay_fan_out: Annotated[int, Range(1, 64)] = 2
    """Children of each relay in the tree, 1 to 64."""
    relay_retained_nbytes: SomeNbytes = 2**30
    """Most payload bytes that an owner keeps until every relay has them; then building waits."""
    relay_tls_authority: str = ""
    """TLS 1.3 between owners and relays, with certificates on both sides: all three files, or none. This one holds certificates
    of the authority that signed every participant's, PEM."""
    relay_tls_certificate: str = ""
    """This participant's own certificate, with its chain, PEM."""
    relay_tls_key: str = ""
    """Its private key, PEM, without a password."""
    control: str = ""
    """Where a new run keeps its control record: ``etcd://host:2379/key``, or ``etcds://`` for TLS. Empty: beside the payloads,
    or wherever the run has it. Receivers and commands find it by themselves."""
    retained_versions: Annotated[int, Range(0, _MAX_RETAINED)] = 0
    """How many committed versions' payloads stay in the run's store. A receiver that comes with the weights of a version from
    which they lead on catches up by itself, without a refit. What went by relay, or whole, is not retained, and nothing
    before it."""
    retained_nbytes: Nbytes = 0
    """Most bytes of these payloads together. 0: as many as the policy itself has, as a longer chain costs more than all of
    it."""
    baseline_directory: str = ""
    """Where to memory-map the baseline; empty keeps it in memory."""
    check_replicas: bool = True
    """Whether copies of a shard on different ranks are compared bit for bit at the start, which reads all weights of each
    rank."""
    verify_candidate: bool = True
    """Whether owners prove before the commit, by one more scan beside the transfer, that the weights are still those that were
    sent. Without it, writes to them during a refit go unnoticed until an audit."""

    def __post_init__(self) -> None:
        """Refuse what cannot be, or cannot work together."""
        super().__post_init__()
        if self.group_timeout_s <= max(self.join_timeout_s, self.reply_timeout_s):
            raise RejectedError(
                f"group_timeout_s {self.group_timeout_s:g}: expected more than join_timeout_s ({self.join_timeout_s:g}) and "
                f"reply_timeout_s ({self.reply_timeout_s:g}), as the other ranks wait while rank 0 waits for receivers"
            )


class ReceiverAgentSettings(ObservationSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rollout side."""

    join_timeout_s: Seconds = 600.0
    """How long ``Receiver.wait_joined`` waits unless told otherwise. The receiver itself waits for its run without end."""
    lease_s: _Lease = 10.0
    """A receiver that could not show a sign of life for so long stops by itself. Never longer than the publisher's, which is
    checked; give it the same."""
    poll_s: SomeSeconds = 0.05
    """Longest pause of the receiver's loop while it has nothing to do."""
    request_timeout_s: Seconds = 60.0
    """How long running requests may keep the request gate from closing; then the attempt fails."""
    max_payload_nbytes: Annotated[int, Range(1, MAX_PAYLOAD_NBYTES)] = 8 * 2**30
    """Larger payloads are refused before anything of them is fetched or room is made for them, and the attempt fails. A payload
    exceeds the trainer's ``bucket_nbytes`` by one part of a tensor at most."""
    shared_directory: str = "/dev/shm"
    """Where the engines of a node share downloads, and where its relay keeps payloads; the same for all of them. Empty: nothing
    is shared."""
    shared_nbytes: Nbytes = 8 * 2**30
    """Most bytes of downloads kept there for the node's other engines; 0: each engine downloads for itself."""
    ahead_nbytes: Nbytes = 2**30
    """Payload bytes fetched ahead of their application, beside the payload that is applied next."""
    fetch_threads: Annotated[int, Range(1, 1024)] = 6
    """Payloads on their way at the same time. Small ones cost a round trip each, so over a long link several must be asked for
    at once to fill it: 6 of 256 KiB fill 200 Mbit/s at 60 ms. Large ones come in several parts anyway."""
    decode_threads: Threads = 0
    """Threads that decompress and check payloads; 0 means one per core that this process may use, at most 4."""
    decode_ahead: _SomeCount = 8
    """Payloads decoded ahead of their application (paper C: one group)."""
    decoded_nbytes: Nbytes = 2**30
    """Bytes of payloads that asynchronous delivery decodes while the engine serves, so that the pause is shorter and damage is
    found before it; 0: none. Engines whose ranks decode for themselves have none either."""
    queue_slots: _SomeCount = 264
    """Payloads accepted ahead of their application in synchronous delivery (paper C: 32 groups of 8, and 8)."""
    staging_nbytes: Nbytes = 8 * 2**30
    """Compressed bytes that asynchronous delivery stages in memory; what comes on top goes to ``spill_directory``. Also the
    longest chain of retained payloads that is taken by an engine that comes back."""
    spill_directory: str = ""
    """Where staged payloads go past that limit; empty: the system's directory for temporary files."""
