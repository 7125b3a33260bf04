"""Models for speed: random weights in real shapes, seeded, written once into a folder.

python benchmarks/models.py smollm2-1.7b q8_0 q4_k_m
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import blocks
import converted
import gguf
import numpy as np
from numpy.typing import NDArray

Type = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class Shape:
    """A Llama-layout model; with `latent` in the layout of DeepSeek-V3, dense layers alone."""

    name: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    n_vocab: int
    n_ctx: int
    tied: bool
    rope_base: float = 10000.0
    window: int = 0  # positions that a query sees; 0: all
    experts: int = 0  # networks d_ff wide, of which a token takes `taken`; 0: one that all take
    taken: int = 1
    latent: int = 0  # columns of the latent of K and V; heads are then as DeepSeek-V3's

    @property
    def kv_width(self) -> int:
        """Half of what a token leaves in a layer."""
        return (self.latent + ROTATING) // 2 if self.latent else self.d_model // self.n_heads * self.n_kv_heads


PLAIN, ROTATING, VALUE, Q_LATENT = 128, 64, 128, 1536  # DeepSeek-V3's: columns of a head of K and V, latent of q

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("smollm2-1.7b", 24, 2048, 32, 32, 8192, 49152, 8192, True, 130000.0),
        Shape("llama-2-7b-2layers", 2, 4096, 32, 32, 11008, 32000, 131072, False),
        Shape("codellama-7b-4layers", 4, 4096, 32, 32, 11008, 32016, 16384, False, 1e6),
        Shape("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, 131072, True, 500000.0),
        Shape("mistral-7b-2layers", 2, 4096, 32, 8, 14336, 32000, 32768, False, window=4096),
        Shape("moe-64-4layers", 4, 2048, 32, 4, 768, 32000, 32768, False, experts=64, taken=8),
        Shape("as-moe-64-4layers", 4, 2048, 32, 4, 8 * 768, 32000, 32768, False),
        Shape("v3-heads-2layers", 2, 2048, 128, 1, 2048, 32000, 131072, False, latent=512),
        Shape("smollm2-135m", 30, 576, 9, 3, 1536, 49152, 8192, True, 100000.0),
        Shape("tiny", 2, 256, 4, 4, 512, 1024, 2048, True),
    )
}

# The file's name for a mixture, and the type of the tensors that it does not treat apart.
WEIGHTS = {
    "q8_0": (gguf.LlamaFileType.MOSTLY_Q8_0, Type.Q8_0),
    "q4_0": (gguf.LlamaFileType.MOSTLY_Q4_0, Type.Q4_0),
    "q5_0": (gguf.LlamaFileType.MOSTLY_Q5_0, Type.Q5_0),
    "q4_1": (gguf.LlamaFileType.MOSTLY_Q4_1, Type.Q4_1),
    "q2_k": (gguf.LlamaFileType.MOSTLY_Q2_K, Type.Q2_K),
    "q3_k": (gguf.LlamaFileType.MOSTLY_Q3_K_S, Type.Q3_K),
    "q4_k_m": (gguf.LlamaFileType.MOSTLY_Q4_K_M, Type.Q4_K),
    "f16": (gguf.LlamaFileType.MOSTLY_F16, Type.F16),
    "bf16": (gguf.LlamaFileType.MOSTLY_BF16, Type.BF16),
}


def folder() -> Path:
    """Where models are kept: $SLIMRT_BENCH_MODELS, else benchmarks/models (ignored by git)."""
    return Path(os.environ.get("SLIMRT_BENCH_MODELS", Path(__file__).parent / "models"))


CYCLE = 256  # tokens that follow one another in a model that copies


def make(
    shape: Shape,
    weights: str = "q8_0",
    *,
    seed: int = 0,
    words: bool = False,
    copies: bool = False,
    cache: converted.Cache | None = None,
) -> Path:
    """The GGUF of a shape; written when it is not there yet, beside its name and then renamed.

    words: with a vocabulary, which servers want. cache: with what it needs, as converted for it.
    copies: what it says next is the next token of the last one's cycle (`follows`), with logits of standard deviation 1
        around 0 for the others and d_model ** 0.5 for that one. All is computed as ever, but the output matrix (never
        tied) has the embedding's rows, each a token on, and the gains of the layers' norms are so small that the states
        stay near the embedding.
    """
    folded = cache.file_name if cache else ""
    path = folder() / f"{shape.name}.{weights}{folded}{'.words' * words}{'.copies' * copies}.gguf"
    if path.exists():
        return path
    if copies:
        shape = replace(shape, tied=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    writer = gguf.GGUFWriter(part, "deepseek2" if shape.latent else "llama")
    add_metadata(writer, shape, weights)
    if words:
        _vocabulary(writer, shape.n_vocab)
    else:
        writer.add_tokenizer_model("no_vocab")
    layout = tensors(shape, weights)
    if cache and folded:
        layout |= converted.tensors(shape, cache)
        converted.write_fields(writer, shape, cache)
    for name, (type, rows, cols) in layout.items():
        if rows:
            row = gguf.quant_shape_to_byte_shape((cols,), type)[0]
            stacked = shape.experts if "_exps" in name else shape.n_heads if name.endswith("_b.weight") else 0
            sizes = (stacked, rows // stacked) if stacked and "attn_q_b" not in name else (rows,)
            writer.add_tensor_info(name, (*sizes, row), np.dtype(np.uint8), rows * row, type)
        else:
            writer.add_tensor_info(name, (cols,), np.dtype(np.float32), cols * 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for name, (type, rows, cols) in layout.items():
        if not rows:
            writer.write_tensor_data(
                np.full(cols, shape.d_model**-0.5 / 8 if copies and "blk." in name else 1.0, np.float32)
            )
            continue
        data = blocks.random_rows(type, rng, rows, cols)
        if name == "token_embd.weight":
            embedding = data
        elif copies and name == "output.weight":
            data[follows(np.arange(rows))] = embedding
        writer.write_tensor_data(data)
    writer.close()
    part.rename(path)
    return path


def follows(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The tokens that follow these in a model that copies: a permutation of the vocabulary in cycles."""
    return ids - ids % CYCLE + (ids + 1) % CYCLE


def add_metadata(writer: gguf.GGUFWriter, shape: Shape, weights: str) -> None:
    writer.add_name(shape.name)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.d_model)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.d_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(ROTATING if shape.latent else shape.d_model // shape.n_heads)
    if shape.latent:
        _latent_metadata(writer, shape)
    writer.add_rope_freq_base(shape.rope_base)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.taken)
    if shape.window:
        writer.add_sliding_window(shape.window)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_file_type(WEIGHTS[weights][0])


def word(id: int) -> str:
    """The text of a token of a model with words, but for the two control tokens 1 and 2: five letters."""
    return "".join(chr(ord("a") + id // 26**place % 26) for place in range(5))


def _vocabulary(writer: gguf.GGUFWriter, n: int) -> None:
    """SentencePiece's, every token a word of its own: whole characters, so that each is shown at once, and the ids of
    a text can be told."""
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<s>" if id == 1 else "</s>" if id == 2 else f"\u2581{word(id)}" for id in range(n)])
    writer.add_token_scores([-float(id) for id in range(n)])
    writer.add_token_types([kinds.CONTROL if id in (1, 2) else kinds.NORMAL for id in range(n)])
    writer.add_unk_token_id(0)  # it is a word too: nothing that a model draws goes unseen but <s>
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _latent_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_q_lora_rank(Q_LATENT)
    writer.add_kv_lora_rank(shape.latent)
    writer.add_key_length(shape.latent + ROTATING)
    writer.add_value_length(shape.latent)
    writer.add_key_length_mla(PLAIN + ROTATING)
    writer.add_value_length_mla(VALUE)
    writer.add_leading_dense_block_count(shape.n_layers)
    writer.add_expert_feed_forward_length(shape.d_ff)
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(1.0)


def _attention(shape: Shape, plain: Type, some: Type) -> dict[str, tuple[Type, int, int]]:
    d, kv, heads = shape.d_model, shape.kv_width, shape.n_heads
    if not shape.latent:
        projections = {"q": (plain, d, d), "k": (plain, kv, d), "v": (some, kv, d), "output": (plain, d, d)}
        return {f"attn_{name}.weight": tensor for name, tensor in projections.items()}
    return {
        "attn_q_a.weight": (plain, Q_LATENT, d),
        "attn_q_a_norm.weight": (plain, 0, Q_LATENT),
        "attn_q_b.weight": (plain, heads * (PLAIN + ROTATING), Q_LATENT),
        "attn_kv_a_mqa.weight": (plain, shape.latent + ROTATING, d),
        "attn_kv_a_norm.weight": (plain, 0, shape.latent),
        "attn_k_b.weight": (Type.Q8_0, heads * shape.latent, PLAIN),  # too narrow for 4 bits in blocks of 256
        "attn_v_b.weight": (plain, heads * VALUE, shape.latent),
        "attn_output.weight": (plain, d, heads * VALUE),
    }


def tensors(shape: Shape, weights: str) -> dict[str, tuple[Type, int, int]]:
    """name -> (type, rows, cols); rows 0: a float32 vector. Experts lie one upon the other."""
    plain = WEIGHTS[weights][1]
    more = Type.Q6_K if weights == "q4_k_m" else plain  # what the mixture spends more bits on
    d, ff, n = shape.d_model, shape.d_ff, shape.n_layers
    out = {"token_embd.weight": (more if shape.tied else plain, shape.n_vocab, d), "output_norm.weight": (plain, 0, d)}
    if not shape.tied:
        out["output.weight"] = (more, shape.n_vocab, d)
    for i in range(n):
        p = f"blk.{i}."
        # llama.cpp's choice for Q4_K_M: the first and last eighth of the layers, and every third between
        some = more if i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2 else plain
        out |= {p + "attn_norm.weight": (plain, 0, d), p + "ffn_norm.weight": (plain, 0, d)}
        out |= {p + name: tensor for name, tensor in _attention(shape, plain, some).items()}
        many, e = max(shape.experts, 1), "_exps" if shape.experts else ""
        if shape.experts:
            out[p + "ffn_gate_inp.weight"] = (Type.F32, shape.experts, d)
        out |= {p + f"ffn_gate{e}.weight": (plain, many * ff, d), p + f"ffn_up{e}.weight": (plain, many * ff, d)}
        out[p + f"ffn_down{e}.weight"] = (some, many * d, ff)
    return out


def bytes_read(shape: Shape, weights: str) -> int:
    """Bytes of weights that a decode step reads: all matrices but an untied embedding."""
    sizes = {
        name: rows
        * gguf.quant_shape_to_byte_shape((cols,), type)[0]
        * (shape.taken if "_exps" in name else 1)
        // (shape.experts if "_exps" in name else 1)
        for name, (type, rows, cols) in tensors(shape, weights).items()
        if rows
    }
    return sum(sizes.values()) - (0 if shape.tied else sizes["token_embd.weight"])


def multiply_adds(shape: Shape, tokens: int, depth: int) -> int:
    """Of a causal prefill of so many tokens after `depth` others: the layers, attention, and logits of the last one."""
    layer = 2 * shape.d_model * (shape.d_model + shape.kv_width) + 3 * shape.d_model * shape.d_ff * shape.taken
    attention = 2 * shape.d_model * (tokens * depth + tokens * (tokens + 1) // 2)
    return shape.n_layers * (tokens * layer + attention) + shape.n_vocab * shape.d_model


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("weights", nargs="*", choices=sorted(WEIGHTS), default="q8_0")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for weights in [args.weights] if isinstance(args.weights, str) else args.weights:
        print(make(SHAPES[args.shape], weights, seed=args.seed))
