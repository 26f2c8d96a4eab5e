"""Following operations without data gives the placements that probes give."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from deltarefit import placement  # noqa: E402
from deltarefit.canonical import TensorSpec  # noqa: E402
from deltarefit.integrations.torch.export import _layers, exporter_of  # noqa: E402
from deltarefit.integrations.torch.local import local_tensors  # noqa: E402
from deltarefit.integrations.torch.watch import follow  # noqa: E402
from deltarefit.testing.checkpoints import ARCHITECTURES, tiny_model  # noqa: E402

pytestmark = pytest.mark.torch


def index_of(view):
    index = np.full((), view.offset)
    for length, stride in zip(view.shape, view.stride, strict=True):
        index = np.add.outer(index, np.arange(length) * stride)
    return index.reshape(-1)


def as_map(spec, parts):
    """Per canonical element (input, flat index there)."""
    found = np.full(spec.num_elements, None, object)
    for source, pieces in parts:
        for piece in pieces:
            for k, s in zip(index_of(piece.canonical).tolist(), index_of(piece.storage).tolist(), strict=True):
                assert found[k] is None
                found[k] = (source, s)
    return found.tolist()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "nemotron_h_moe", "jamba"])
def test_what_is_followed_is_what_probes_find(architecture):
    tensors = local_tensors(model := tiny_model(architecture))
    exporter = exporter_of(model, tensors)
    shapes = {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for name in exporter.kept}
    followed = follow(exporter.convert, shapes)
    assert sorted(followed.placements) == sorted(followed.specs)
    batch = next(batch for batch in _layers(exporter.kept) if any("experts" in name for name in batch))
    batch = [name for name in batch if "expert" in name or "down" in name]
    traced = placement.trace_conversion(exporter.convert, {name: shapes[name] for name in batch})
    assert traced.placements
    for name, parts in traced.placements.items():
        if traced.specs[name].num_elements <= 4096:
            assert as_map(followed.specs[name], followed.placements[name]) == as_map(traced.specs[name], parts)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_known_architecture_needs_probes(architecture):
    tensors = local_tensors(model := tiny_model(architecture))
    exporter = exporter_of(model, tensors)
    followed = follow(
        exporter.convert,
        {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for name in exporter.kept},
    )
    assert set(followed.placements) == set(followed.specs)


CASES = {
    "split": lambda t: t["a"].split(2)[1],
    "transpose": lambda t: t["a"].t(),
    "copied transpose": lambda t: t["a"].t().contiguous(),
    "view of a copy": lambda t: t["a"][:, 1:3].contiguous().unbind(1)[1],
    "copy of a copy": lambda t: t["a"].t().contiguous()[1:].contiguous(),
    "reshape that copies": lambda t: t["a"].t().reshape(-1)[:8],
    "step": lambda t: t["a"][::2, 1::2],
}


@pytest.mark.parametrize("case", CASES)
def test_rearrangements_are_followed(case):
    shapes = {"a": torch.empty(6, 4, dtype=torch.bfloat16, device="meta")}

    def convert(tensors):
        return {"out": CASES[case](tensors)}

    followed = follow(convert, shapes)
    values = torch.arange(24, dtype=torch.bfloat16).reshape(6, 4)
    assert as_map(followed.specs["out"], followed.placements["out"]) == [
        ("a", int(value)) for value in convert({"a": values})["out"].reshape(-1)
    ]
    assert placement.verify_placements(convert, [TensorSpec("a", "BF16", (6, 4))], followed.placements) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a * 1,
        lambda a: a.float(),
        lambda a: a.mul_(2),
        lambda a: a[:2].zero_(),
        lambda a: a.clone().add_(1),
        lambda a: a.clone()[0].fill_(3),
        lambda a: a.expand(2, 6, 4).contiguous(),
        lambda a: a.view(torch.int16),
    ],
)
def test_whatever_may_change_bits_is_unknown(change):
    followed = follow(lambda t: {"out": change(t["a"])}, {"a": torch.empty(6, 4, dtype=torch.bfloat16, device="meta")})
    assert followed.placements == {}


def test_an_input_that_is_written_to_is_not_untouched():
    def convert(tensors):
        tensors["a"][0].add_(1)
        return tensors

    followed = follow(convert, {name: torch.empty(3, device="meta") for name in "ab"})
    assert followed.untouched == {"b"}


def test_random_bits_find_a_placement_that_is_wrong():
    shapes = {"a": torch.empty(6, 4, dtype=torch.bfloat16, device="meta")}
    placements = follow(lambda t: {"out": t["a"][:3]}, shapes).placements
    assert placement.verify_placements(lambda t: {"out": t["a"][3:]}, [TensorSpec("a", "BF16", (6, 4))], placements) == "out"
