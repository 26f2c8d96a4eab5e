"""Catalogs of large models from public numbers (and, where marked, from the paper's shares)."""

from deltarefit.canonical import Catalog, TensorSpec


def bf16(shapes):
    return Catalog(TensorSpec(name, "BF16", shape) for name, shape in shapes.items())


def qwen3_30b_a3b():
    """config.json of Qwen/Qwen3-30B-A3B: 48 layers, hidden 2048, 32 heads and 4 groups of 128, 128 experts of 768."""
    shapes = {"model.embed_tokens.weight": (151936, 2048), "lm_head.weight": (151936, 2048), "model.norm.weight": (2048,)}
    for layer in range(48):
        at = f"model.layers.{layer}."
        shapes |= {at + "self_attn.q_proj.weight": (4096, 2048), at + "self_attn.o_proj.weight": (2048, 4096)}
        shapes |= {at + f"self_attn.{part}_proj.weight": (512, 2048) for part in "kv"}
        shapes |= {at + f"self_attn.{part}_norm.weight": (128,) for part in "qk"}
        shapes |= {at + "input_layernorm.weight": (2048,), at + "post_attention_layernorm.weight": (2048,)}
        shapes[at + "mlp.gate.weight"] = (128, 2048)
        for expert in range(128):
            shapes |= {at + f"mlp.experts.{expert}.{part}_proj.weight": (768, 2048) for part in ("gate", "up")}
            shapes[at + f"mlp.experts.{expert}.down_proj.weight"] = (2048, 768)
    return bf16(shapes)


def nemotron(pattern, *, hidden, vocabulary, heads, groups, experts, expert, shared, latent, mamba_heads):
    """A hybrid of Mamba (M), experts (E) and attention (*) blocks, and one more attention and expert block to predict ahead.

    Head size 128, Mamba heads of 64 with 8 groups of 128 states and kernels of 4.
    """
    inner, state = mamba_heads * 64, 2 * 8 * 128
    shapes = {"backbone.embeddings.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    shapes["backbone.norm_f.weight"] = (hidden,)
    shapes |= {"mtp.layers.0.eh_proj.weight": (hidden, 2 * hidden)}
    shapes |= {f"mtp.layers.0.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "final_layernorm")}
    blocks = [(f"backbone.layers.{place}.", kind) for place, kind in enumerate(pattern)]
    for at, kind in [*blocks, ("mtp.layers.0.", "*"), ("mtp.layers.1.", "E")]:
        shapes[at + "norm.weight"] = (hidden,)
        mixer = at + "mixer."
        if kind == "M":
            shapes |= {
                mixer + "in_proj.weight": (2 * inner + state + mamba_heads, hidden),
                mixer + "out_proj.weight": (hidden, inner),
            }
            shapes |= {mixer + "conv1d.weight": (inner + state, 1, 4), mixer + "conv1d.bias": (inner + state,)}
            shapes |= {mixer + name: (mamba_heads,) for name in ("A_log", "D", "dt_bias")} | {mixer + "norm.weight": (inner,)}
        elif kind == "*":
            shapes |= {mixer + "q_proj.weight": (heads * 128, hidden), mixer + "o_proj.weight": (hidden, heads * 128)}
            shapes |= {mixer + f"{part}_proj.weight": (groups * 128, hidden) for part in "kv"}
        else:
            shapes |= {mixer + "gate.weight": (experts, hidden), mixer + "gate.e_score_correction_bias": (experts,)}
            shapes[mixer + "fc1_latent_proj.weight"] = (latent, hidden)
            shapes[mixer + "fc2_latent_proj.weight"] = (hidden, latent)
            shapes |= {
                mixer + "shared_experts.up_proj.weight": (shared, hidden),
                mixer + "shared_experts.down_proj.weight": (hidden, shared),
            }
            for number in range(experts):
                name = f"{mixer}experts.{number}."
                shapes |= {name + "up_proj.weight": (expert, latent), name + "down_proj.weight": (latent, expert)}
    return bf16(shapes)


def nemotron_super_120b():
    """config.json of NVIDIA-Nemotron-3-Super-120B-A12B."""
    pattern = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    return nemotron(
        pattern,
        hidden=4096,
        vocabulary=131072,
        heads=32,
        groups=2,
        experts=512,
        expert=2688,
        shared=5376,
        latent=1024,
        mamba_heads=128,
    )


def nemotron_ultra_550b():
    """Public: 48 Mamba, 48 expert and 12 attention blocks, hidden 8192, 512 experts, latent 2048, 64 heads in 2 groups.

    Its config.json was not found. Derived from the paper's 1,121 GB and its shares (Table D.1): experts of 5120 inside, shared
    experts of 10240, 256 Mamba heads, a vocabulary of 131,072.
    """
    return nemotron(
        "ME" * 48 + "*" * 12,
        hidden=8192, vocabulary=131072, heads=64, groups=2,
        experts=512, expert=5120, shared=10240, latent=2048, mamba_heads=256,
    )  # fmt: skip
