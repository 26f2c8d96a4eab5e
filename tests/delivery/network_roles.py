"""Processes of the network tests: a trainer and a receiver with a small model; told by lines of JSON (``RoleProcess``)."""

from __future__ import annotations

import hashlib
import sys

import msgspec
import torch

import deltarefit
from deltarefit.testing.bench_refit_model import SyntheticEngine, SyntheticPolicy, change, shapes_of

MODEL_NBYTES = 4 << 20


def say(answer):
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


def digest_of(model):
    found = hashlib.blake2b(digest_size=16)
    for _, tensor in sorted(model.state_dict().items()):
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trainer(run, settings):
    policy = SyntheticPolicy(shapes_of(MODEL_NBYTES))
    with deltarefit.Publisher(policy, run=run, settings=deltarefit.PublisherSettings.from_mapping(settings)) as publisher:
        say({"ready": True})
        for line in sys.stdin:
            command = msgspec.json.decode(line)
            change(policy, command["rate"], command["seed"])
            try:
                report = publisher.publish().wait() if command.get("asynchronous") else publisher.refit()
            except deltarefit.RefitError as error:
                say({"failed": f"{type(error).__name__}: {error}"})
                continue
            expected = SyntheticEngine(shapes_of(MODEL_NBYTES))
            expected.load_weights(policy.state_dict().items())
            say({"report": msgspec.to_builtins(report), "digest": digest_of(expected)})


def receiver(run, settings):
    model = SyntheticEngine(shapes_of(MODEL_NBYTES))
    name = settings.pop("name")
    chosen = deltarefit.ReceiverAgentSettings.from_mapping(settings)
    attached = deltarefit.Receiver.attach(model, load_weights=model.load_weights, run=run, name=name, settings=chosen)
    with attached as joined:
        say({"ready": True})
        for _ in sys.stdin:
            with joined.serving(60.0):
                say({"policy_version": joined.policy_version, "digest": digest_of(model)})


def main(role, options):
    torch.set_num_threads(1)
    chosen = msgspec.json.decode(options)
    {"trainer": trainer, "receiver": receiver}[role](chosen["run"], chosen["settings"])


if __name__ == "__main__":
    main(*sys.argv[1:])
