"""Writes small valid GGUF files as seeds for model_fuzz: of each thing the parser knows, of each architecture."""

import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

QUANTIZED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
QUANTIZED += ["IQ4_NL", "IQ4_XS", "MXFP4", "TQ1_0", "TQ2_0", "IQ2_XXS", "IQ3_S"]


OPTIONS = bytes(14)  # what model_fuzz takes off the end of its input: each of its options is the first


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(path: Path, fill: Callable[[gguf.GGUFWriter], None], arch: str = "llama") -> None:
    writer = gguf.GGUFWriter(path, arch)
    fill(writer)
    finish(writer)
    with path.open("ab") as file:
        file.write(OPTIONS)


def values(writer: gguf.GGUFWriter) -> None:
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"a.{kind}", 7)
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", -1e300)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "text")
    writer.add_array("a.strings", ["a", "bc", ""])
    writer.add_array("a.integers", [1, -2, 3])
    writer.add_array("a.floats", [1.0, 2.5])
    writer.add_array("a.bools", [True, False])


def tensors(writer: gguf.GGUFWriter) -> None:
    for n_dims in range(1, 5):
        writer.add_tensor(f"f32.{n_dims}d", np.zeros((2,) * n_dims, np.float32))
    writer.add_tensor("f16", np.zeros((2, 3), np.float16))
    writer.add_tensor("bf16", np.zeros((2, 3), np.uint16), raw_dtype=gguf.GGMLQuantizationType.BF16)


def quantized(writer: gguf.GGUFWriter) -> None:
    for name in QUANTIZED:
        kind = gguf.GGMLQuantizationType[name]
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        writer.add_tensor(name, np.zeros((1, block_bytes), np.uint8), raw_dtype=kind)


def aligned(writer: gguf.GGUFWriter) -> None:
    writer.add_custom_alignment(64)
    tensors(writer)


# ---------------------------------------------------------------- whole models, as small as they can be
D, HEADS, FF, VOCAB, ROWS = 4, 2, 4, 3, 8  # ROWS: of context, of a source, of buckets
SPEECH = ("whisper", "moonshine")
ENCODERS = (*SPEECH, "t5", "bart", "mbart", "chronos2")
BIASED = ("bart", "bloom", "gpt2", "gptneox", "mbart", "opt", "phi2", "whisper")
LAYER_NORM = ("phimoe", *BIASED, "cohere2", "command-r", "moonshine", "mpt", "olmo", "openlm", "stablelm")
UNGATED = (*BIASED, "chronos2", "moonshine", "mpt", "openlm", "phi3", "glm4")
CONVOLUTIONS = {
    "whisper": {"conv1": (D, 3), "conv2": (D, 3 * D)},
    "moonshine": {"conv1": (D, 127), "conv2": (2 * D, 7 * D), "conv3": (D, 3 * 2 * D)},
}
EXPERTS = ("deepseek", "deepseek2", "gpt-oss", "granitemoe", "minimax-m2", "mistral4", "olmoe", "phimoe", "qwen2moe",
           "qwen3moe")  # fmt: skip
ARCHITECTURES = ("bart", "bitnet", "bloom", "chronos2", "cohere2", "command-r", "exaone4", "gemma", "gemma2", "gemma3",
                 "gemma4", "glm4", "gpt2", "gptneox", "granite", "llama", "mbart", "minicpm", "minicpm3", "mistral3",
                 "moonshine", "mpt", "olmo", "olmo2", "openlm", "opt", "phi2", "phi3", "qwen2", "qwen3", "smollm3",
                 "stablelm", "t5", "whisper", *EXPERTS)  # fmt: skip
Shapes = dict[str, tuple[int, ...]]
# Latent attention: of a head of K so many columns that do not rotate and that do, of one of V; the latents.
PLAIN, ROTATING, V, LATENT, Q_LATENT = 2, 2, 2, 3, 2
MLA = {"attention.kv_lora_rank": LATENT, "rope.dimension_count": ROTATING}
OF_HEADS = {"attention.key_length": PLAIN + ROTATING, "attention.value_length": V, "attention.q_lora_rank": Q_LATENT}
OF_ROWS = {"attention.key_length": LATENT + ROTATING, "attention.value_length": LATENT, "attention.head_count_kv": 1,
           "attention.key_length_mla": PLAIN + ROTATING, "attention.value_length_mla": V}  # fmt: skip


def latent(arch: str) -> Shapes:
    shapes: Shapes = {
        "attn_kv_a_mqa": (LATENT + ROTATING, D),
        "attn_kv_a_norm": (LATENT,),
        "attn_output": (D, HEADS * V),
    }
    q = HEADS * (PLAIN + ROTATING)
    if arch in ("deepseek2", "mistral4"):
        shapes |= {"attn_q": (q, D), "attn_k_b": (HEADS, LATENT, PLAIN), "attn_v_b": (HEADS, V, LATENT)}
    else:
        shapes |= {"attn_q_a": (Q_LATENT, D), "attn_q_a_norm": (Q_LATENT,), "attn_q_b": (q, Q_LATENT)}
        shapes["attn_kv_b"] = (HEADS * (PLAIN + V), LATENT)
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def attention(arch: str, prefix: str, out: str) -> Shapes:
    if arch in ("deepseek2", "minicpm3", "mistral4"):
        return latent(arch)
    fused = arch in ("bloom", "gpt2", "gptneox", "mpt", "openlm", "phi3")
    made = {f"{prefix}_qkv": (3 * D, D)} if fused else {f"{prefix}_{name}": (D, D) for name in "qkv"}
    shapes: Shapes = {f"{name}.weight": shape for name, shape in made.items()} | {f"{out}.weight": (D, D)}
    if arch in BIASED or arch in ("gpt-oss", "qwen2", "qwen2moe"):
        shapes |= {f"{name}.bias": shape[:1] for name, shape in made.items() if (arch, name[-2:]) != ("whisper", "_k")}
    if arch in BIASED or arch == "gpt-oss":
        shapes[f"{out}.bias"] = (D,)
    if arch == "gpt-oss":
        shapes[f"{prefix}_sinks.weight"] = (HEADS,)
    norms = {"olmo2": D, "olmoe": D, "minimax-m2": D, "openlm": D}
    norms |= {name: D // HEADS for name in ("exaone4", "gemma3", "gemma4", "qwen3", "qwen3moe")}
    return shapes | ({f"{prefix}_{name}_norm.weight": (norms[arch],) for name in "qk"} if arch in norms else {})


def norm(arch: str, name: str) -> Shapes:
    if arch == "olmo":
        return {}
    return {f"{name}.weight": (D,)} | ({f"{name}.bias": (D,)} if arch in (*BIASED, "phimoe", "stablelm") else {})


def experts(arch: str, n: int = 2) -> Shapes:
    network = {"gate": (FF, D), "up": (FF, D), "down": (D, FF)}
    shapes: Shapes = {f"ffn_{name}_exps.weight": (n, *shape) for name, shape in network.items()}
    shapes["ffn_gate_inp.weight"] = (n, D)
    if arch in ("deepseek", "deepseek2", "mistral4", "qwen2moe"):
        shapes |= {f"ffn_{name}_shexp.weight": shape for name, shape in network.items()}
    if arch == "qwen2moe":
        shapes["ffn_gate_inp_shexp.weight"] = (D,)
    if arch == "minimax-m2":
        shapes["exp_probs_b.bias"] = (n,)
    if arch == "gpt-oss":
        shapes |= {name.replace("weight", "bias"): shape[:-1] for name, shape in shapes.items()}
    return shapes


def layer(arch: str, cross: bool, out: str) -> Shapes:
    after = ["post_attention_norm", "post_ffw_norm"]
    one = ["attn_norm"]
    sums = ["attn_output_norm", "layer_output_norm"]
    few = {"bart": sums, "exaone4": after, "olmo2": after, "phi2": one, "cohere2": one, "command-r": one}
    names = few.get(arch, ["attn_norm", "ffn_norm"])
    if arch in ("gemma2", "gemma3", "gemma4", "glm4"):
        names += after
    if arch == "gpt-oss":
        names = ["attn_norm", "post_attention_norm"]
    shapes = attention(arch, "attn", f"attn{out}")
    if cross:
        shapes |= attention(arch, "cross_attn", f"cross_attn{out}")
        names.append("cross_attn_output_norm" if arch == "bart" else "cross_attn_norm")
    if arch == "chronos2":
        shapes |= attention(arch, "group_attn", "group_attn_o")
        names = [*names, "group_attn_norm"]
    for name in names:
        shapes |= norm(arch, name)
    if arch in EXPERTS:
        return shapes | experts(arch)
    shapes |= {"ffn_up.weight": (2 * FF if arch in ("phi3", "glm4", "openlm") else FF, D), "ffn_down.weight": (D, FF)}
    if arch in BIASED or arch == "moonshine":
        shapes |= {"ffn_up.bias": (FF,), "ffn_down.bias": (D,)}
    if arch not in UNGATED:
        shapes["ffn_gate.weight"] = (FF, D)
    if arch == "bitnet":
        shapes |= {"attn_sub_norm.weight": (D,), "ffn_sub_norm.weight": (FF,)}
    return shapes | ({"attn_rel_b.weight": (ROWS, HEADS)} if arch == "t5" else {})


def shapes_of(arch: str, n_layers: int) -> Shapes:
    encoder = arch in ENCODERS
    shapes: Shapes = {"token_embd.weight": (VOCAB, D)}
    parts = ("enc.",) if arch == "chronos2" else ("enc.", "dec.") if encoder else ("",)
    for part in parts:
        of_layer = layer(arch, part == "dec.", "_o" if encoder else "_output")
        shapes |= {f"{part}blk.{i}.{name}": shape for i in range(n_layers) for name, shape in of_layer.items()}
        shapes |= norm(arch, f"{part}token_embd_norm" if arch == "bart" else f"{part}output_norm")
        if arch in ("bart", "gpt2", "mbart", "opt", "whisper"):
            shapes[f"{part}position_embd.weight"] = (ROWS, D)
    if arch == "bloom":
        shapes |= norm(arch, "token_embd_norm")
    for name, shape in CONVOLUTIONS.get(arch, {}).items():
        shapes[f"enc.{name}.weight"] = shape
        if (arch, name) != ("moonshine", "conv1"):
            shapes[f"enc.{name}.bias"] = shape[:1]
    if arch == "moonshine":
        shapes |= {"enc.conv_norm.weight": (D,), "enc.conv_norm.bias": (D,)}
    return shapes | ({"output.weight": (VOCAB, D), "output.bias": (VOCAB,)} if arch == "phi2" else {})


# Seeds that have more than an architecture needs: name -> architecture, metadata, tensors.
VARIANTS: dict[str, tuple[str, dict[str, object], Shapes]] = {
    "window": ("llama", {"llama.attention.sliding_window": 4}, {"rope_freqs.weight": (1,)}),
    "sized": ("gpt2", {"gpt2.attention.key_length": D // HEADS, "gpt2.attention.value_length": D // HEADS}, {}),
    "linear": ("llama", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, {}),
    "yarn": (
        "qwen2",
        {
            "qwen2.rope.dimension_count": 2,
            "qwen2.rope.freq_base": 1e6,
            "qwen2.rope.scaling.type": "yarn",
            "qwen2.rope.scaling.factor": 2.0,
            "qwen2.rope.scaling.original_context_length": 4,
        },
        {},
    ),
    "longrope": (
        "phi3",
        {"phi3.rope.scaling.type": "longrope", "phi3.rope.scaling.original_context_length": 4},
        {f"rope_factors_{name}.weight": (1,) for name in ("long", "short")},
    ),
    "stored": (
        "olmo2",
        {
            "slimrt.cache.modes": ["k"],
            "slimrt.cache.types": ["q8"],
            "slimrt.cache.residual_types": [""],
            "slimrt.cache.owners": [0],
        },
        {},
    ),
    "groups": (
        "olmoe",
        {
            "olmoe.expert_count": 4,
            "olmoe.expert_gating_func": 2,
            "olmoe.expert_group_count": 2,
            "olmoe.expert_group_used_count": 1,
        },
        {"blk.0.exp_probs_b.bias": (4,), **{f"blk.0.{name}": shape for name, shape in experts("olmoe", 4).items()}},
    ),
    "beside": (
        "gemma4",
        {"gemma4.expert_count": 2, "gemma4.expert_used_count": 1},
        {
            "blk.0.ffn_gate_inp.weight": (2, D),
            "blk.0.ffn_gate_inp.scale": (D,),
            "blk.0.ffn_gate_up_exps.weight": (2, 2 * FF, D),
            "blk.0.ffn_down_exps.weight": (2, D, FF),
            "blk.0.ffn_down_exps.scale": (2,),
            **{f"blk.0.{name}.weight": (D,) for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")},
        },
    ),
    "crossed": ("t5", {"slimrt.cache.cross": "k", "slimrt.cache.cross_type": "q8", "t5.decoder_block_count": 1}, {}),
}


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    kinds = {int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def model(writer: gguf.GGUFWriter, changes: dict[str, object], more: Shapes, n_layers: int = 1) -> None:
    arch = writer.arch
    epsilon = "layer_norm_epsilon" if arch in LAYER_NORM else "layer_norm_rms_epsilon"
    sizes = {f"attention.{epsilon}": 1e-5, "block_count": n_layers, "embedding_length": D, "feed_forward_length": FF}
    sizes |= {"context_length": ROWS, "attention.head_count": HEADS, "attention.head_count_kv": HEADS}
    if arch in ENCODERS:
        sizes["encoder.context_length"] = ROWS
    if arch == "t5":
        sizes |= {"attention.relative_buckets_count": ROWS, "attention.relative_max_distance": 16}
    if arch == "whisper":
        sizes["mel_bins"] = 1
    sizes |= {
        "mpt": {"attention.max_alibi_bias": 8.0},
        "command-r": {"logit_scale": 0.5},
        "cohere2": {"logit_scale": 0.5},
        "deepseek2": {**MLA, **OF_ROWS},
        "mistral4": {**MLA, **OF_ROWS, "attention.temperature_scale": 0.1, "attention.temperature_length": 4},
        "minicpm3": {**MLA, **OF_HEADS},
    }.get(arch, {})
    if arch == "gemma2":
        caps = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 4.0}
        sizes |= {"attention.sliding_window": 4, **caps}
    if arch in EXPERTS:
        sizes |= {"expert_count": 2, "expert_used_count": 1}
    if arch in ("deepseek", "deepseek2", "mistral4"):
        sizes["expert_shared_count"] = 1
    if arch == "qwen2moe":
        sizes["expert_shared_feed_forward_length"] = FF
    for key, value in ({f"{arch}.{name}": size for name, size in sizes.items()} | changes).items():
        add(writer, key, value)
    for name, shape in (shapes_of(arch, n_layers) | more).items():
        writer.add_tensor(name, np.ones(shape, np.float32 if len(shape) == 1 else np.float16))


def shards(folder: Path, n: int = 3) -> None:
    """A model in n shards, one after the other, and what each but the first holds alone."""
    writer = gguf.GGUFWriter(folder / "shards.gguf", "llama", split_max_tensors=-(-len(shapes_of("llama", 1)) // n))
    model(writer, {}, {})
    finish(writer)
    paths = [folder / f"shards-{i:05}-of-{n:05}.gguf" for i in range(1, n + 1)]
    whole = b"".join(path.read_bytes().ljust(-(-path.stat().st_size // 32) * 32, b"\0") for path in paths)
    (folder / "shards.gguf").write_bytes(whole + OPTIONS)
    for path in paths:
        path.unlink()


def write_all(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for fill in (values, tensors, quantized, aligned):
        write(folder / f"{fill.__name__}.gguf", fill)
    for arch in ARCHITECTURES:
        write(folder / f"{arch}.gguf", lambda writer: model(writer, {}, {}), arch)
    for name, (arch, changes, more) in VARIANTS.items():
        write(folder / f"{name}.gguf", lambda writer, c=changes, m=more: model(writer, c, m), arch)
    shards(folder)
    owners = {"slimrt.cache.owners": [0, 0], "slimrt.cache.modes": ["k", "k"]}
    write(folder / "owners.gguf", lambda writer: model(writer, owners, {}, n_layers=2))


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
