"""Settings: frozen, validated, unknown keys refused; from Python, TOML or the environment."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from deltarefit.errors import RejectedError
from deltarefit.units import parse_nbytes

__all__ = ["ObservationSettings", "PublisherSettings", "ReceiverAgentSettings", "RelayServiceSettings"]

_MAX_RETAINED = 1000


class _Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Settings from plain values; sizes (names ending in ``nbytes``) may be texts such as ``256MiB``."""
        plain = {key: parse_nbytes(value) if key.endswith("nbytes") else value for key, value in values.items()}
        try:
            return msgspec.convert(plain, cls, strict=False)
        except msgspec.ValidationError as error:
            known = ", ".join(cls.__struct_fields__)
            raise RejectedError(f"{cls.__name__}: {error}; known settings: {known}") from error

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], table: str) -> Self:
        """Settings from one table of a TOML file; a missing table means the defaults."""
        text = Path(path).read_text(encoding="utf-8")
        try:
            return cls.from_mapping(tomllib.loads(text).get(table, {}))
        except tomllib.TOMLDecodeError as error:
            raise RejectedError(f"{path}: not TOML: {error}") from error

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], prefix: str) -> Self:
        """Settings from variables ``<prefix><NAME>``; other variables with that prefix are refused."""
        values = {key[len(prefix) :].lower(): value for key, value in environment.items() if key.startswith(prefix)}
        return cls.from_mapping(values)


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
    max_nbytes: int = 8 * 2**30
    """Most payload bytes kept there; when they are used up, owners wait."""
    lease_s: float = 10.0
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

    min_receivers: int = 1
    """A refit, and each retry, waits until so many live receivers are ready; all that are ready take part. 0: it never waits,
    so a run may begin before its rollout does."""
    join_timeout_s: float = 600.0
    """How long a refit waits for ``min_receivers``, then it is refused; loading a large engine takes minutes."""
    reply_timeout_s: float = 120.0
    """How long any receiver may take to answer one call. Applying what is left once the owners have sent everything, and
    proving it, is one. Receivers show signs of life meanwhile: a dead one is noticed after ``lease_s`` all the same."""
    request_timeout_s: float = 60.0
    """Added to ``reply_timeout_s`` for calls in which a request gate closes: at least the receivers' own."""
    group_timeout_s: float = 1800.0
    """How long training ranks wait for each other inside a refit before they take one for dead. Rank 0 may be waiting for
    receivers meanwhile, so it is longer than ``join_timeout_s``."""
    lease_s: float = 10.0
    """A coordinator or receiver that showed no sign of life for so long counts as dead. Receivers and relays get the same."""
    max_attempts: int = 5
    """Attempts of one refit before it ends in ``OperatorRequiredError``."""
    retry_pause_s: float = 0.2
    """Pause before the first retry; doubles each time, up to 30 s."""
    difference: Literal["difference", "xor", "overwrite"] = "difference"
    """The encoding used wherever every receiver can take it; retries send overwrites."""
    audit_every: int = 1
    """Receivers prove the whole policy's digest from what they hold at a Publisher's first refit and at every n-th; 0: at the
    first only. It costs them one read of the weights."""
    bucket_nbytes: int = 0
    """Input bytes per payload. 0: 512 MiB (paper C), or a 16th of a rank's share if that is less, but at least 4 MiB, so that
    comparing, sending and applying overlap for small models, too."""
    chunk_nbytes: int = 0
    """Input bytes per scan. 0: 64 MiB (paper C, object storage), or a quarter of a bucket if that is less."""
    scan_threads: int = 0
    """Threads that compare and encode; 0 means one per core that this process may use, at most 16."""
    transport: Literal["auto", "object_store", "relay"] = "auto"
    """How payloads travel. ``auto``: by the relay tree where relays serve every required receiver's node, otherwise, and for
    every retry, over the object store."""
    relay_fan_out: int = 2
    """Children of each relay in the tree, 1 to 64."""
    relay_retained_nbytes: int = 2**30
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
    retained_versions: int = 0
    """How many committed versions' payloads stay in the run's store. A receiver that comes with the weights of a version from
    which they lead on catches up by itself, without a refit. What went by relay, or whole, is not retained, and nothing
    before it."""
    retained_nbytes: int = 0
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
        """Refuse what cannot work together."""
        if self.group_timeout_s <= max(self.join_timeout_s, self.reply_timeout_s):
            raise RejectedError(
                f"group_timeout_s {self.group_timeout_s:g}: expected more than join_timeout_s ({self.join_timeout_s:g}) and "
                f"reply_timeout_s ({self.reply_timeout_s:g}), as the other ranks wait while rank 0 waits for receivers"
            )
        if self.lease_s <= 0 or self.max_attempts < 1 or self.min_receivers < 0:
            raise RejectedError(
                f"lease_s {self.lease_s:g}, max_attempts {self.max_attempts}, min_receivers {self.min_receivers}"
                ": expected a lease longer than 0, at least one attempt, and no negative number of receivers"
            )
        if not 0 <= self.retained_versions <= _MAX_RETAINED or self.retained_nbytes < 0:
            raise RejectedError(
                f"retained_versions {self.retained_versions}, retained_nbytes {self.retained_nbytes}: expected 0 to "
                f"{_MAX_RETAINED} versions (the control record names each), and no negative number of bytes"
            )


class ReceiverAgentSettings(ObservationSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rollout side."""

    join_timeout_s: float = 600.0
    """Without effect so far: a receiver waits for its run without end. See ``Receiver.wait_joined``."""
    lease_s: float = 10.0
    """A receiver that could not show a sign of life for so long stops by itself. Never longer than the publisher's, which is
    checked; give it the same."""
    poll_s: float = 0.05
    """Longest pause of the receiver's loop while it has nothing to do."""
    request_timeout_s: float = 60.0
    """How long running requests may keep the request gate from closing; then the attempt fails."""
    max_payload_nbytes: int = 8 * 2**30
    """Without effect so far."""
    shared_directory: str = "/dev/shm"
    """Where the engines of a node share downloads, and where its relay keeps payloads; the same for all of them. Empty: nothing
    is shared."""
    shared_nbytes: int = 8 * 2**30
    """Most bytes of downloads kept there for the node's other engines; 0: each engine downloads for itself."""
    ahead_nbytes: int = 2**30
    """Payload bytes fetched ahead of their application, beside the payload that is applied next."""
    fetch_threads: int = 6
    """Payloads on their way at the same time. Small ones cost a round trip each, so over a long link several must be asked for
    at once to fill it: 6 of 256 KiB fill 200 Mbit/s at 60 ms. Large ones come in several parts anyway."""
    decode_threads: int = 0
    """Threads that decompress and check payloads; 0 means one per core that this process may use, at most 4."""
    decode_ahead: int = 8
    """Payloads decoded ahead of their application (paper C: one group)."""
    decoded_nbytes: int = 2**30
    """Bytes of payloads that asynchronous delivery decodes while the engine serves, so that the pause is shorter and damage is
    found before it; 0: none. Engines whose ranks decode for themselves have none either."""
    queue_slots: int = 264
    """Payloads accepted ahead of their application in synchronous delivery (paper C: 32 groups of 8, and 8)."""
    staging_nbytes: int = 8 * 2**30
    """Compressed bytes that asynchronous delivery stages in memory; what comes on top goes to ``spill_directory``. Also the
    longest chain of retained payloads that is taken by an engine that comes back."""
    spill_directory: str = ""
    """Where staged payloads go past that limit; empty: the system's directory for temporary files."""
