"""Transformers models: the catalog and every canonical bit are those that ``save_pretrained`` writes."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors import safe_open  # noqa: E402

from deltarefit import kernels  # noqa: E402
from deltarefit.bits import logical_words  # noqa: E402
from deltarefit.canonical import Catalog, TensorSpec  # noqa: E402
from deltarefit.errors import RejectedError  # noqa: E402
from deltarefit.ids import EncodingMode  # noqa: E402
from deltarefit.integrations.torch import catalog_of_config, tasks, torch_adapter  # noqa: E402
from deltarefit.pieces import Piece, whole  # noqa: E402
from deltarefit.plan import RefitPlan  # noqa: E402
from deltarefit.records import Encoding  # noqa: E402
from deltarefit.source import LocalCollective, SourceSettings, open_source  # noqa: E402
from deltarefit.testing.checkpoints import ARCHITECTURES, load_tensors, tiny_model  # noqa: E402
from deltarefit.testing.collective import run_ranks  # noqa: E402

pytestmark = pytest.mark.torch
ONE_THREAD = SourceSettings(scan_threads=1)


def saved(model, directory):
    """Manifest and words of the checkpoint that save_pretrained writes."""
    model.save_pretrained(directory)
    with safe_open(directory / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        manifest = Catalog(TensorSpec(name, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items())
    return manifest, {name: logical_words(tensor) for name, tensor in load_tensors(directory).items()}


def rebuild(sources):
    """Canonical words scattered from the committed baselines of all owners, with how often each element was written."""
    words, counts = {}, {}
    for source in sources:
        for tracker in source.owner.baseline.trackers:
            spec = tracker.task.spec
            held = words.setdefault(spec.name, np.zeros(spec.num_elements, spec.word_dtype))
            count = counts.setdefault(spec.name, np.zeros(spec.num_elements, np.uint8))
            for pieces, committed in zip(tracker.groups, tracker.words, strict=True):
                positions = [index_of(piece.canonical) for piece in pieces]
                held[np.concatenate(positions)] = committed
                np.add.at(count, np.concatenate(positions), 1)
    return words, counts


def index_of(view):
    index = np.full((), view.offset)
    for length, stride in zip(view.shape, view.stride, strict=True):
        index = np.add.outer(index, np.arange(length) * stride)
    return index.reshape(-1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_catalog_and_bits_are_those_of_save_pretrained(architecture, tmp_path):
    model = tiny_model(architecture)
    manifest, expected = saved(model, tmp_path)
    adapter = torch_adapter(model, manifest=manifest)
    assert adapter.catalog() == manifest
    words, counts = rebuild([open_source(adapter, LocalCollective(), ONE_THREAD)])
    assert {name: (count == 1).all() for name, count in counts.items()} == dict.fromkeys(manifest, True)
    assert all(np.array_equal(words[name], expected[name]) for name in manifest)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "nemotron_h_moe"])
def test_a_model_that_was_loaded_gives_back_the_names_it_was_loaded_from(architecture, tmp_path):
    """transformers remembers in the model how its checkpoint was converted."""
    import transformers

    manifest, expected = saved(tiny_model(architecture), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    words, _ = rebuild([open_source(torch_adapter(model, manifest=manifest), LocalCollective(), ONE_THREAD)])
    assert all(np.array_equal(words[name], expected[name]) for name in manifest)


@pytest.mark.parametrize("world_size", [2, 4])
def test_data_parallel_ranks_own_every_element_once(world_size, tmp_path):
    models = [tiny_model("qwen3_moe") for _ in range(world_size)]
    manifest, expected = saved(models[0], tmp_path)

    def work(collective):
        return open_source(torch_adapter(models[collective.rank], collective=collective), collective, ONE_THREAD)

    sources = run_ranks(world_size, work)
    words, counts = rebuild(sources)
    assert {name: (count == 1).all() for name, count in counts.items()} == dict.fromkeys(manifest, True)
    assert all(np.array_equal(words[name], expected[name]) for name in manifest)
    held = [source.owner.baseline.nbytes for source in sources]
    assert max(held) <= 1.1 * sum(held) / world_size
    assert len({source.fingerprint for source in sources}) == 1


@pytest.mark.parametrize("mode", EncodingMode)
def test_an_optimizer_step_reaches_a_receiver_that_holds_the_checkpoint(mode, tmp_path):
    model = tiny_model("qwen3_moe")
    _, held = saved(model, tmp_path / "before")
    source = open_source(torch_adapter(model), LocalCollective(), ONE_THREAD)
    plan = RefitPlan(source.catalog, dict.fromkeys(source.catalog, Encoding.DIFFERENCE), 1)
    for step in range(2):
        train(model, seed=step)
        for bucket in source.owner.build(plan, mode):
            for item in bucket.items:
                view = whole(item.spec.shape)
                kernels.apply_item(held[item.spec.name], [Piece(view, view)], item)
        source.owner.commit()
        _, expected = saved(model, tmp_path / f"after{step}")
        assert all(np.array_equal(held[name], expected[name]) for name in expected)
        assert 0 < source.owner.stats.num_changed < source.owner.stats.num_owned


def train(model, seed):
    tokens = torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_tied_head_is_declared_once_and_sent_once():
    """One row of the embedding changes, one item is sent."""
    model = tiny_model("qwen3_tied")
    source = open_source(torch_adapter(model), LocalCollective(), ONE_THREAD)
    assert "lm_head.weight" not in source.catalog
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1
    plan = RefitPlan(source.catalog, dict.fromkeys(source.catalog, Encoding.DIFFERENCE), 1)
    (bucket,) = source.owner.build(plan, EncodingMode.MIXED)
    (item,) = bucket.items
    assert (item.spec.name, kernels.decode_positions(item).tolist()) == ("model.embed_tokens.weight", [3 * 64 + 5])


def test_a_tied_checkpoint_that_lists_the_head_too_gets_both_names(tmp_path):
    """Tuned checkpoints of tied models contain head and embedding."""
    model = tiny_model("qwen3_tied")
    manifest, _ = saved(model, tmp_path)
    head = TensorSpec("lm_head.weight", "BF16", (250, 64))
    both = Catalog([*manifest.values(), head])
    adapter = torch_adapter(model, manifest=both)
    assert adapter.catalog() == both
    only_head = Catalog([head, *(spec for name, spec in manifest.items() if "embed" not in name)])
    assert torch_adapter(model, manifest=only_head).catalog() == only_head


def test_a_checkpoint_with_other_names_or_padding_is_refused_with_names(tmp_path):
    model = tiny_model("qwen3")
    manifest, _ = saved(model, tmp_path)
    specs = dict(manifest)
    del specs["model.norm.weight"]
    specs["model.final_norm.weight"] = TensorSpec("model.final_norm.weight", "BF16", (64,))
    specs["lm_head.weight"] = TensorSpec("lm_head.weight", "BF16", (256, 64))
    with pytest.raises(RejectedError) as refused:
        torch_adapter(model, manifest=Catalog(specs.values())).catalog()
    text = str(refused.value)
    assert "model.final_norm.weight: the checkpoint has it" in text
    assert "model.norm.weight: the model gives it" in text
    assert "lm_head.weight: the checkpoint has lm_head.weight BF16[256, 64]" in text


def test_ranks_whose_copies_diverged_are_refused_naming_the_tensor():
    models = [tiny_model("qwen3") for _ in range(3)]
    with torch.no_grad():
        models[2].model.layers[1].mlp.up_proj.weight[4, 4] += 0.125

    def work(collective):
        return open_source(torch_adapter(models[collective.rank], collective=collective), collective, ONE_THREAD)

    for result in run_ranks(3, work):
        assert isinstance(result, RejectedError)
        assert "1 place: model.layers.1.mlp.up_proj.weight: ranks [0, 1] hold" in str(result)


def test_master_weights_in_float32_are_published_in_the_checkpoints_dtype(tmp_path):
    """Compared after the cast, so a step that rounds away sends nothing."""
    model = tiny_model("qwen3_moe").float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0003)
    rounded = tiny_model("qwen3_moe")
    rounded.load_state_dict(model.state_dict())
    _, expected = saved(rounded, tmp_path / "checkpoint")
    source = open_source(torch_adapter(model, manifest=tmp_path / "checkpoint"), LocalCollective(), ONE_THREAD)
    words, _ = rebuild([source])
    assert all(np.array_equal(words[name], expected[name]) for name in expected)
    assert torch_adapter(model, dtype=torch.bfloat16).catalog() == source.catalog
    with torch.no_grad():
        model.model.norm.weight += 1e-7
    plan = RefitPlan(source.catalog, dict.fromkeys(source.catalog, Encoding.DIFFERENCE), 1)
    assert list(source.owner.build(plan, EncodingMode.MIXED)) == []


def test_parts_of_a_large_master_are_cast_one_by_one(monkeypatch, tmp_path):
    """A cast copies what it reads: never more than a part, however large the tensor."""
    monkeypatch.setattr(tasks, "cut_into_parts", functools.partial(tasks.cut_into_parts, target_nbytes=2048))
    model = tiny_model("qwen3").float()
    manifest, expected = saved(tiny_model("qwen3"), tmp_path)
    adapter = torch_adapter(model, manifest=manifest)
    assert all(task.words().nbytes <= 2048 for task in adapter.tasks())
    words, counts = rebuild([open_source(adapter, LocalCollective(), ONE_THREAD)])
    assert all((count == 1).all() for count in counts.values())
    assert all(np.array_equal(words[name], expected[name]) for name in expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_configuration_alone_gives_the_catalog_of_its_checkpoint(architecture, tmp_path):
    manifest, _ = saved(tiny_model(architecture), tmp_path)
    assert catalog_of_config(tmp_path) == manifest


def test_a_configuration_of_30b_parameters_needs_no_memory_for_them(tmp_path):
    """Public numbers of Qwen/Qwen3-30B-A3B; 61,064,245,248 bytes in 18,867 tensors (paper, Table D.2)."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, tie_word_embeddings=False,
        dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    catalog = catalog_of_config(tmp_path / "config.json")
    assert (len(catalog), catalog.nbytes) == (18867, 61_064_245_248)


def test_a_directory_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(RejectedError, match="transformers cannot build a model from it"):
        catalog_of_config(tmp_path)
