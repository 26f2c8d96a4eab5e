"""The result is what transformers loads, bit for bit."""

import numpy as np
import pytest
from checkpoints import files_of

from deltarefit import offline

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


def model_of(seed: int):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def bits_of(model) -> dict[str, np.ndarray]:
    return {name: tensor.detach().view(torch.int16).numpy().copy() for name, tensor in model.state_dict().items()}


def test_rebuilt_checkpoint_loads_in_transformers(tmp_path):
    model = model_of(0)
    model.save_pretrained(tmp_path / "old", max_shard_size="9KB")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)
        model.lm_head.weight[0, 0] = float("nan")
        model.lm_head.weight[0, 1] = -0.0
    model.save_pretrained(tmp_path / "new", max_shard_size="15KB")
    assert len(list((tmp_path / "old").glob("*.safetensors"))) != len(list((tmp_path / "new").glob("*.safetensors"))) > 1
    offline.diff_checkpoints(tmp_path / "old", tmp_path / "new", tmp_path / "d")
    offline.apply_deltas(tmp_path / "old", [tmp_path / "d"], tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "new")
    loaded = bits_of(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16))
    expected = bits_of(model)
    assert loaded.keys() == expected.keys()
    for name, bits in expected.items():
        np.testing.assert_array_equal(loaded[name], bits, err_msg=name)
