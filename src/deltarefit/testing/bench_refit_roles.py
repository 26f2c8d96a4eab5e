"""The processes of ``bench refit``: each does one thing, told by lines of JSON on its standard input, until that ends.

``python -m deltarefit.testing.bench_refit_roles ROLE OPTIONS``, OPTIONS being JSON. Every role first prints one line of JSON
when it is ready; trainer and reference then answer each line with one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from deltarefit.runtime.clock import SystemClock
from deltarefit.transport import RunStore, open_run

__all__ = ["main"]

_SHARD_NBYTES = 256 << 20
"""Checkpoints come in files of a few hundred MiB; here each is one object."""

Say = Callable[[dict[str, Any]], None]


def _commands() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield msgspec.json.decode(line)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


def store(options: dict[str, Any], say: Say) -> None:
    """A real S3 server."""
    from deltarefit.testing.s3_server import running_s3_server

    with running_s3_server(options["host"]) as server:
        say({"url": server.run_url(options["name"]), "environment": server.environment})
        for _ in _commands():
            pass


def relay(options: dict[str, Any], say: Say) -> None:
    """One relay on one node."""
    from deltarefit.runtime.relay_service import RelayService
    from deltarefit.runtime.settings import RelayServiceSettings

    settings = RelayServiceSettings.from_mapping(options.get("settings", {}))
    with RelayService(options["run"], listen=options["listen"], settings=settings) as service:
        say({"name": service.name})
        for _ in _commands():
            say({"received_nbytes": service.received_nbytes, "forwarded_nbytes": service.forwarded_nbytes})


def receiver(options: dict[str, Any], say: Say) -> None:
    """One engine with its receiver."""
    import torch

    import deltarefit
    from deltarefit.testing.bench_refit_model import SyntheticEngine, shapes_of

    torch.set_num_threads(1)
    model = SyntheticEngine(shapes_of(options["model_nbytes"]))
    settings = deltarefit.ReceiverAgentSettings.from_mapping(options.get("settings", {}))
    attached = deltarefit.Receiver.attach(
        model, load_weights=model.load_weights, run=options["run"], name=options["name"], settings=settings
    )
    with attached as joined:
        say({"ready": True})
        for command in _commands():
            if command["do"] == "join":
                joined.wait_joined(command["timeout_s"])
            say({"policy_version": joined.policy_version})


def trainer(options: dict[str, Any], say: Say) -> None:
    """One rank that changes its model and refits."""
    import torch

    import deltarefit
    from deltarefit.testing.bench_refit_model import SyntheticPolicy, change, shapes_of

    torch.set_num_threads(2)
    policy = SyntheticPolicy(shapes_of(options["model_nbytes"]))
    settings = deltarefit.PublisherSettings.from_mapping(options.get("settings", {}))
    with deltarefit.Publisher(policy, run=options["run"], settings=settings) as publisher:
        say({"ready": True})
        for command in _commands():
            change(policy, command["rate"], command["seed"])
            report = publisher.publish().wait() if command["do"] == "asynchronous" else publisher.refit()
            say({"report": msgspec.to_builtins(report)})


def reference(options: dict[str, Any], say: Say) -> None:
    """Carries a checkpoint's bytes to the store, or from it; transport only."""
    clock = SystemClock()
    run = open_run(options["url"], clock=clock)
    nbytes = options["nbytes"]
    say({"ready": True})
    for command in _commands():
        start_s = clock.monotonic_s()
        carry = _upload if command["do"] == "upload" else _download
        carried = carry(run, nbytes)
        say({"seconds": clock.monotonic_s() - start_s, "nbytes": carried})


def _shards(nbytes: int) -> list[tuple[str, int]]:
    return [
        (f"reference/shard-{number:04d}", min(_SHARD_NBYTES, nbytes - start))
        for number, start in enumerate(range(0, nbytes, _SHARD_NBYTES))
    ]


def _upload(run: RunStore, nbytes: int) -> int:
    """Write the shards, each in parts, several at a time."""
    import numpy as np

    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, min(nbytes, _SHARD_NBYTES), dtype=np.uint8).tobytes()
    for key, length in _shards(nbytes):
        run.put(key, memoryview(data)[:length])
    return nbytes


def _download(run: RunStore, nbytes: int) -> int:
    """Read the shards in ranges, as many at a time as a refit's payloads are read in, and drop what comes."""
    part, width = run.settings.part_nbytes, run.settings.concurrency
    ranges = [(key, start, min(part, length - start)) for key, length in _shards(nbytes) for start in range(0, length, part)]
    with ThreadPoolExecutor(width, thread_name_prefix="reference") as pool:
        return sum(pool.map(lambda one: len(run.get_range(*one)), ranges))


_ROLES: dict[str, Callable[[dict[str, Any], Say], None]] = {
    "store": store,
    "relay": relay,
    "receiver": receiver,
    "trainer": trainer,
    "reference": reference,
}


def main(arguments: list[str]) -> int:
    """See the module."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    role, options = arguments
    try:
        _ROLES[role](msgspec.json.decode(options), _say)
    except Exception as error:
        _say({"error": f"{type(error).__name__}: {error}"})
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
