# SPDX-License-Identifier: Apache-2.0
"""Models on a CUDA device compute what the CPU computes, in every mode; without a device these are skipped.

CPU and device round the same numbers to the same bits, and both sum in float32. Rows of float32 are computed in float32
on both, so results differ by the order of sums; beside rows of 16 bits or less the device multiplies in 16 bits: each
of a layer's products may then be off by a unit of that type, which errors of many products only add up to in squares.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import gguf
import numpy as np
import pytest

import chronos2_models
import no_cache
import slimrt
import v_heads
from conftest import CUDA_MISSING, GOLDEN, GREEDY, decode, derived, open_engine, product_unit, relative
from folds import as_converted
from gguf_shapes import Shape, write_random
from no_cache import cla, mlkv
from scored import capped, with_sinks
from seq2seq_models import MODELS, N_PROMPT, source, tokens
from seq2seq_models import decode as decode_seq2seq
from slimrt import _core
from slimrt.errors import ModelFormatError, UnsupportedError, WontFitError
from tiny_model import write_tiny

needs_device = pytest.mark.skipif(bool(CUDA_MISSING), reason=f"no CUDA device: {CUDA_MISSING}")
slow = pytest.mark.slow_emulated
IDS = np.random.default_rng(5).integers(3, 100, 40)
N_PREFILL = 36
FLOAT32 = 1e-5  # of the largest logit; inverses of W_K in modes k and v lose up to two digits
INVERTED = 1e-3
UNIT = {"f16": 2.0**-11, "bf16": 2.0**-8, "q8": 1 / 254, "fp8_e4m3": 2.0**-4, "q4": 1 / 30, "q3": 1 / 14, "q2": 1 / 6}
CASES = [
    ("llama_mha", "kv"),
    ("llama_gqa_tied", "kv"),
    ("mistral_window", "kv"),
    ("gpt2_tanh", "kv"),
    ("olmo2_gqa", "kv"),
    ("qwen3_gqa", "kv"),
    ("gemma_mqa", "kv"),
    ("gemma2", "kv"),
    ("granite_gqa", "kv"),
    ("bitnet", "kv"),
    ("openlm", "kv"),
    ("olmo_clipped", "kv"),
    ("minimax_m2", "kv"),  # experts by sigmoids
    ("gpt_oss_plain", "kv"),  # sinks, windows, experts with biases
    ("gemma3_mha", "kv"),  # windows, which turn otherwise
    ("gemma4", "kv"),  # V is K in some layers
    ("gemma4_small", "kv"),  # embeddings in each layer
    ("phimoe_plain", "kv"),  # a router by SparseMixer
    ("gemma4_experts", "kv"),  # experts beside each layer's network, gate and up in one tensor
    ("olmo3", "k"),
    ("cohere2", "k"),  # layers that know no positions
    ("smollm3", "k+r"),
    ("exaone4", "kv"),
    ("granitemoe", "kv"),  # experts; of others what a GPU rounds makes a token take another one
    ("qwen2moe", "k"),  # beside one that all tokens take
    ("llama_mha", "k"),
    ("cohere", "k"),
    ("qwen2_mha", "k"),  # K bias and RoPE
    ("gptneox", "k"),  # a part of each head rotates
    ("olmo2", "k"),  # QK-norm
    ("qwen3", "k"),  # of each head
    ("mistral_mha", "k"),
    ("llama_mha", "k+r"),
    ("llama_gqa_tied", "k+r"),
    ("olmo2", "k+r"),
    ("qwen3_gqa", "k+r"),
    ("gpt2_tanh", "v"),
    ("gpt2_tanh", "x"),
    ("bloom", "k"),  # ALiBi
    ("bloom", "v"),
    ("mpt", "x"),
    ("stablelm", "xr"),
    ("glm4", "xr"),
    ("gptneox", "xr"),
    ("phi2", "xr"),
    ("minicpm3", "latent"),
    ("mistral4", "latent"),  # q grow in all columns
]
each_case = pytest.mark.parametrize(("name", "mode"), CASES, ids=[f"{name}-{mode}" for name, mode in CASES])


# Of the other factor where a CPU multiplies rows of q8 as integers: its last digit (BlockAttention, csrc/kernels/cpu).
INTEGER_UNIT = {"q8": 2.0**-15} if _core.ops.backends()[0].startswith(("amx", "avx512")) else {}


def bound(mode: str, dtype: str, path=None) -> float:
    """Four standard deviations of what four products and two layers make of half a unit each, beside what float32 does.
    The unit is that of products, which a device computes in bf16 beside bf16, in f16 beside other rows and weights of
    16 bits or less. Rows get the same bits unless products put them off by a unit: a share `product / row` of the codes
    is then another one, off by a unit of the rows, in squares `product * row`."""
    exact = INVERTED if mode in ("k", "v") else FLOAT32
    types = {type_name for type_name, _ in _core.GgufFile(str(path)).tensors().values()} if path else set()
    product = max(product_unit("cuda", name.lower()) for name in {dtype, *types})
    return exact + 4 * np.sqrt(8 * product * max(product, UNIT.get(dtype, 0))) / 2


def case_of_type(i: int, dtype: str):
    """Without a GPU a case has rows of f32, and the cases of a mode f16 or q8 in turn, the first also q4: kernels meet
    every type in test_kernels*.py and tests/cpp."""
    name, mode = CASES[i]
    turn = [other for _, other in CASES[:i]].count(mode)
    often = ("f32", ("f16", "q8")[turn % 2], *(["q4"] if turn == 0 else []))
    marks = [] if dtype in often else [slow]
    return pytest.param(name, mode, dtype, marks=marks, id=f"{name}-{mode}-{dtype}")


@needs_device
@pytest.mark.parametrize(
    ("name", "mode", "dtype"),
    [case_of_type(i, t) for i in range(len(CASES)) for t in ("f32", "f16", "q8", "bf16", "fp8_e4m3")],
)
def test_every_mode(name, mode, dtype, convert):
    """A prompt, then token by token: recorded steps are played again."""
    path = convert(GOLDEN / name)
    on_cpu, on_device = (decode(open_engine(path, mode, dtype, device=d), IDS, N_PREFILL) for d in ("cpu", "cuda"))
    assert relative(on_device, on_cpu) < bound(mode, dtype, path)


@needs_device
@pytest.mark.parametrize(
    ("name", "mode", "dtype"), [case_of_type(i, t) for i in range(len(CASES)) for t in ("q4", "q3", "q2")]
)
def test_every_mode_with_few_bits(name, mode, dtype, convert):
    """As above, but each token goes on from the very rows that the CPU has: one code that is another, in all rows of a
    text, may change logits by a tenth. The token's own row has some such, which only layers that share rows read in the
    same step; where it has none, products of f16 are all that differs. A prompt reads no codes of its own."""
    path, devices = convert(GOLDEN / name), ("cpu", "cuda")
    engines = {device: open_engine(path, mode, dtype, device=device) for device in devices}
    sequences = {device: engine.new_sequence() for device, engine in engines.items()}
    on_cpu, on_device = (decode(engines[d], IDS[:N_PREFILL], N_PREFILL, sequences[d]) for d in devices)
    assert relative(on_device, on_cpu) < bound(mode, "f16", path)
    for token in IDS[N_PREFILL:]:
        rows = engines["cpu"].save_sequence(sequences["cpu"])
        engines["cuda"].free_sequence(sequences["cuda"])
        sequences["cuda"] = engines["cuda"].load_sequence(rows)
        on_cpu, on_device = (decode(engines[d], np.array([token]), 0, sequences[d]) for d in devices)
        after, found = (np.frombuffer(engines[d].save_sequence(sequences[d]), np.uint8) for d in devices)
        changed = np.count_nonzero(found != after)
        assert changed < len(after) / len(IDS) / 4
        assert relative(on_device, on_cpu) < (bound(mode, dtype, path) if changed else bound(mode, "f16"))


@needs_device
@pytest.mark.parametrize("dtype", ["f32", "q8"])
@pytest.mark.parametrize(
    ("name", "mode", "how"),
    [("mistral_window", "kv", capped), ("llama_mha", "k", capped), ("qwen2_tied", "kv", with_sinks)],
)
def test_capped_scores_and_sinks(name, mode, how, dtype, convert, tmp_path):
    path = how(convert(GOLDEN / name), tmp_path / "model.gguf")
    on_cpu, on_device = (decode(open_engine(path, mode, dtype, device=d), IDS, N_PREFILL) for d in ("cpu", "cuda"))
    assert relative(on_device, on_cpu) < bound(mode, dtype, path)


@needs_device
@pytest.mark.parametrize(
    ("stored", "mode"),
    [
        *product(["Q4_1", "Q5_0", "Q5_1", "Q5_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS", "MXFP4", "TQ1_0"], ["kv"]),
        *product(["IQ2_XXS", "IQ3_XXS", "IQ3_S"], ["kv"]),
        ("Q5_K", "k"),
    ],
)
def test_types_of_weights(stored, mode, tmp_path):
    """As the CPU multiplies their values in float32; few tokens, as many are rounded to 16 bits. Where a model makes
    more of rounding, 8 times what the device's floats make of it: x has 22 bits of 24, and tensor cores cut sums off.
    A plan counts what a file holds, or the codes and scales that TQ1_0, IQ2 and IQ3 become."""
    path = write_tiny(tmp_path / "stored.gguf", d=256, d_ff=256, stored=stored)
    values = write_tiny(tmp_path / "values.gguf", d=256, d_ff=256, stored=stored, dequantised=True)
    found = decode(open_engine(path, mode, "f32", device="cuda"), IDS[:12], 8)
    wanted, floats = (decode(open_engine(values, mode, "f32", device=d), IDS[:12], 8) for d in ("cpu", "cuda"))
    assert relative(found, wanted) < (INVERTED if mode == "k" else max(FLOAT32, 8 * relative(floats, wanted)))
    planned = _core.plan(str(path), n_ctx=64, cache=mode, device="cuda")
    held = {"TQ1_0": 66 / 54, "IQ2_XXS": 146 / 66, "IQ3_XXS": 146 / 98, "IQ3_S": 146 / 110}.get(stored, 1)
    matrices = sum(t.n_bytes for t in gguf.GGUFReader(path).tensors if t.tensor_type.name == stored)
    assert 0 <= planned["weights"] - matrices * held < 0.05 * matrices


@needs_device
@pytest.mark.parametrize("dtype", ["f32", "f16", "q8"])
@pytest.mark.parametrize(("name", "mode"), [("llama_mha", "k"), ("gptneox", "k"), ("llama_gqa_tied", "k+r")])
def test_heads_that_keep_v(name, mode, dtype, convert, tmp_path):
    """Three planes are values of the other heads, in k+r."""
    path = v_heads.write(convert(GOLDEN / name), tmp_path / "v.gguf", mode)
    derived = v_heads.folds(path, mode, dtype, 4)
    given = {"rank": 4, "residual_type": "q8"} if mode == "k+r" else {}
    on_cpu, on_device = (
        decode(open_engine(path, mode, dtype, device=d, derived=derived, **given), IDS, N_PREFILL)
        for d in ("cpu", "cuda")
    )
    assert relative(on_device, on_cpu) < bound(mode, dtype, path)


@needs_device
@pytest.mark.parametrize("dtype", ["f32", "q8"])
@pytest.mark.parametrize("config", [mlkv(2, 2, rotary_pct=1.0), cla(2)], ids=["mlkv", "cla"])
def test_layers_that_share_rows(config, dtype, tmp_path):
    """MLKV's owner rotates keys as it reads them, its readers do not."""
    directory = no_cache.write(tmp_path / "model", config, no_cache.tensors_of(config))
    slimrt.convert(directory, tmp_path / "model.gguf", progress=False)
    ids = IDS % config["vocab_size"]
    on_cpu, on_device = (
        decode(open_engine(tmp_path / "model.gguf", "kv", dtype, n_ctx=64, device=device), ids, N_PREFILL)
        for device in ("cpu", "cuda")
    )
    assert relative(on_device, on_cpu) < bound("kv", dtype, tmp_path / "model.gguf")


@needs_device
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        *product(["kivi", "lowrank"], ["q8", "q4", "q3", "q2@0.5+q4*0.1", "none+q8*64+sinks=4"]),
        ("lowrank", "q2@0.5+q8@0.75*0.2+q8*0.2+predict"),
        *(pytest.param(mode, "fp8_e4m3", marks=slow) for mode in ("kivi", "lowrank")),
    ],
)
def test_rows_age(mode, dtype, convert):
    """Beyond what is recent in a prompt and after it; then a text that is cut where rows have aged. A device that gave
    a channel another scale, or read another row's, would be off by what such rows lose: 1 % and more."""
    path, ids = convert(GOLDEN / "llama_gqa_tied"), np.random.default_rng(2).integers(3, 100, 210).astype(np.int32)
    logits = []
    for device in ("cpu", "cuda"):
        engine = open_engine(path, mode, dtype, n_ctx=256, n_batch=48, device=device)
        sequence = engine.new_sequence()
        logits.append(decode(engine, ids, 190, sequence))
        engine.truncate(sequence, 70 if engine.can_truncate(sequence, 70) else 0)
        logits[-1] = np.concatenate([logits[-1], decode(engine, ids[:3], 0, sequence)])
    assert relative(*logits) < bound("kv", "f16", path) < 5e-3


WIDE = Shape(d=128, n_layers=2, n_heads=4, n_ctx=256, n_vocab=120)  # heads that whole tiles of matrices fit


@needs_device
@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(
    ("arch", "mode"),
    [
        ("llama", "kv"),
        ("llama", "k"),
        ("llama", "k+r"),
        ("llama", "lowrank"),
        ("gpt2", "x"),
        ("olmo2", "k"),
        ("qwen3", "k"),
    ],
)
def test_wide_heads(arch, mode, dtype, tmp_path):
    """Tokens alone over more than a tile of rows, in the kernels that are fast: RoPE on read, whole rows, a residual.
    They go on from the very rows that the CPU has. Mode kv then multiplies two numbers of 16 bits for one, the others
    one: less than what rounding of the rows makes, by which a device is off that does not round them or reads others
    (of f16 rows as much as that, at most)."""
    changes = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0} if arch == "llama" else {}
    changes |= {"llama.rope.scaling.original_context_length": 64} if arch == "llama" else {}
    path = write_random(tmp_path / "wide.gguf", replace(WIDE, arch=arch), changes)
    ids = np.random.default_rng(1).integers(3, 100, 84)
    engines = {device: open_engine(path, mode, dtype, device=device) for device in ("cpu", "cuda")}
    sequences = {device: engine.new_sequence() for device, engine in engines.items()}
    on_cpu, on_device = (decode(engines[d], ids[:80], 80, sequences[d]) for d in engines)
    assert relative(on_device, on_cpu) < 1e-2  # of fresh rows, so of any type; weights of random models amplify
    sequences["cuda"] = engines["cuda"].load_sequence(engines["cpu"].save_sequence(sequences["cpu"]))
    on_cpu, on_device = (decode(engines[d], ids[80:], 0, sequences[d]) for d in engines)
    rounded = relative(on_cpu, decode(open_engine(path, mode, "f32"), ids, 80)[80:])
    exact = FLOAT32 + 4 * np.sqrt(8) * (product_unit("cuda", dtype) ** 2 + INTEGER_UNIT.get(dtype, 0))
    off = relative(on_device, on_cpu)
    assert off < (exact if mode == "kv" else rounded if dtype == "f16" else rounded / 2)


@needs_device
def test_aged_rows_that_rotate_from_another_position(tmp_path):
    """Sinks lie apart from the rows that age: where these begin their positions do not."""
    shape = Shape(d=128, n_layers=1, n_heads=2, n_ctx=256, d_ff=96, n_vocab=120, arch="qwen3")
    path = write_random(tmp_path / "aged.gguf", shape, {})
    ids = np.random.default_rng(2).integers(3, 100, 126)
    on_cpu, on_device = (
        decode(open_engine(path, "lowrank", "q4", n_ctx=256, device=d), ids, 120)[120:] for d in ("cpu", "cuda")
    )
    assert relative(on_device, on_cpu) < 0.05  # rows that round to another code; rotated wrongly it is 1


@needs_device
def test_inputs_that_layers_share_are_kept_as_kernels_keep_them(tmp_path):
    """A step of one token is recorded from the second time on: nothing in it may come from the host."""
    none = {f"blk.1.attn_{name}": None for name in ("k.weight", "v.weight", "k.bias", "v.bias")}
    shape = Shape(d=64, n_layers=2, n_heads=4, n_ctx=64, n_vocab=120, arch="gpt2")
    path = write_random(tmp_path / "shared.gguf", shape, {"slimrt.cache.owners": [0, 0]}, none)
    ids = np.random.default_rng(2).integers(3, 100, 20)
    on_cpu, on_device = (decode(open_engine(path, "x", "f16", device=d), ids, 14) for d in ("cpu", "cuda"))
    assert relative(on_device, on_cpu) < 1e-2


@needs_device
@pytest.mark.parametrize("n_batch", [pytest.param(1, marks=slow), 7, 16])
@pytest.mark.parametrize(("name", "mode"), [("llama_mha", "kv"), ("llama_mha", "k"), ("gpt2_tanh", "x")])
def test_prompts_in_chunks(name, mode, n_batch, convert):
    path = convert(GOLDEN / name)
    on_cpu, on_device = (
        decode(open_engine(path, mode, "f32", device=d, n_batch=n_batch), IDS, len(IDS)) for d in ("cpu", "cuda")
    )
    assert relative(on_device, on_cpu) < bound(mode, "f32", path)


@pytest.fixture(scope="module")
def amplification(tmp_path_factory) -> float:
    """How much larger an error of the logits of write_tiny's model is than that of its weights."""
    folder = tmp_path_factory.mktemp("amplification")
    exact, rounded = (logits_in_float32(write_tiny(folder / stored, d=64, stored=stored)) for stored in ("F32", "F16"))
    return relative(rounded, exact) / UNIT["f16"]


def logits_in_float32(path, device: str = "cpu", n_prefill: int = 24) -> np.ndarray:
    return decode(
        _core.Engine(str(path), device=device, cache_type_k="f32", cache_type_v="f32", n_ctx=64), IDS[:26], n_prefill
    )


@needs_device
@pytest.mark.parametrize("stored", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_0"])
@pytest.mark.parametrize("n_prefill", [0, 24])
def test_weights_of_every_type(stored, n_prefill, amplification, tmp_path):
    """Against float32 values of the same weights on the CPU. A device rounds what it multiplies to 16 bits in prompts,
    to two halves of 16 bits with tokens alone (of bf16 these hold fewer bits); Q5_0 is kept as f16. The largest of
    thousands of errors is some four times another's."""
    path = write_tiny(tmp_path / "stored", d=64, n_kv_heads=2, stored=stored)
    exact = write_tiny(tmp_path / "exact", d=64, n_kv_heads=2, stored=stored, dequantised=True)
    got, wanted = logits_in_float32(path, "cuda", n_prefill), logits_in_float32(exact)
    halves = UNIT["bf16" if stored == "BF16" else "f16"] ** 2
    rounded = stored == "Q5_0" or (n_prefill and stored != "F32")
    unit = (UNIT["bf16"] if stored == "BF16" else UNIT["f16"]) if rounded else halves
    assert relative(got, wanted) < FLOAT32 + 4 * amplification * unit


@needs_device
@pytest.mark.parametrize("mode", [pytest.param("kv", marks=slow), "k"])
def test_sequences_of_unequal_length_in_one_step(mode, convert):
    """Created, forked, truncated and released between steps; each says what it says alone."""
    path = convert(GOLDEN / "llama_mha")
    engine = open_engine(path, mode, "f16", device="cuda", n_ctx=96, n_seqs=8)
    alone = open_engine(path, mode, "f16", device="cuda", n_ctx=96)
    texts = {engine.new_sequence(): list(IDS[:n]) for n in (1, 9, 33)}
    engine.append([(s, np.array(ids, np.int32)) for s, ids in texts.items()])
    for step in range(6):
        if step == 2:
            first = next(iter(texts))
            texts[engine.fork(first)] = list(texts[first])
        if step == 3:
            engine.truncate(first, 2)
            texts[first] = texts[first][:2]
        if step == 5:
            engine.free_sequence(first)
            del texts[first]
        token = int(IDS[step])
        got = engine.append([(s, np.array([token], np.int32)) for s in texts])
        for ids in texts.values():
            ids.append(token)
        for row, ids in zip(got, texts.values(), strict=True):
            sequence = alone.new_sequence()
            wanted = decode(alone, np.array(ids), len(ids) - 1, sequence)[-1]
            alone.free_sequence(sequence)
            assert relative(row, wanted) < bound(mode, "f16")


@needs_device
@pytest.mark.parametrize(("name", "mode"), [("llama_mha", "k"), ("gpt2_tanh", "v"), ("gpt2_tanh", "x")])
def test_first_tokens_are_not_recorded_for_later_ones(name, mode, convert):
    """A token alone comes first in its sequence, computed as a prompt, just when a step of one token is to be recorded:
    the first sequence's second token has made the block tables grow, after which recordings begin anew."""
    path = convert(GOLDEN / name)
    on_cpu, on_device = [], []
    for device, logits in (("cpu", on_cpu), ("cuda", on_device)):
        engine = open_engine(path, mode, "f32", device=device, n_ctx=32, n_seqs=2)
        for ids in (IDS[:2], IDS[2:8]):
            logits.append(decode(engine, ids, 0))
    assert relative(np.concatenate(on_device), np.concatenate(on_cpu)) < bound(mode, "f32", path)


@needs_device
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8", "fp8_e4m3", "fp8_e5m2", "q4", "q3", "q2"])
def test_saved_sequences_move_between_devices(dtype, convert):
    path = convert(GOLDEN / "llama_mha")
    engines = {device: open_engine(path, "kv", dtype, device=device) for device in ("cpu", "cuda")}
    for there, back in (("cpu", "cuda"), ("cuda", "cpu")):
        sequence = engines[there].new_sequence()
        engines[there].append([(sequence, IDS[:35].astype(np.int32))])
        saved = engines[there].save_sequence(sequence)
        moved = engines[back].load_sequence(saved)
        assert np.array_equal(engines[back].save_sequence(moved), saved)
        got, wanted = (
            engine.append([(s, IDS[35:36].astype(np.int32))])
            for engine, s in ((engines[back], moved), (engines[there], sequence))
        )
        assert relative(got, wanted) < FLOAT32 + 4 * np.sqrt(8) * INTEGER_UNIT.get(dtype, 0)  # of the same rows


@needs_device
@pytest.mark.parametrize("name", [name for name, tiny in MODELS.items() if not tiny.fixture])
@pytest.mark.parametrize("cross", [pytest.param("kv", marks=slow), "e"])
def test_encoders_and_their_decoders(name, cross, seq2seq, convert):
    path = convert(seq2seq(name))
    results = []
    for device in ("cpu", "cuda"):
        engine = _core.Engine(
            str(path), n_ctx=32, cross=cross, cross_type="f32", cache_type_k="f32", cache_type_v="f32", device=device
        )
        sequence = engine.new_sequence()
        (states,) = engine.encode([(sequence, source(name))], states=True)
        results.append((states, decode_seq2seq(engine, sequence, tokens(name)[: N_PROMPT + 4])))
    for on_cpu, on_device in zip(*results, strict=True):
        assert relative(on_device, on_cpu) < FLOAT32


@needs_device
@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_prompts_of_several_texts_over_their_encoders_rows(name, seq2seq, convert):
    """More tokens in a step than a part takes: one of the texts is cut, and those after it see their own rows."""
    path, random, rows = convert(seq2seq(name)), np.random.default_rng(3), source(name)
    sources = [random.permutation(rows) for _ in range(3)]
    prompts = [random.integers(4, 90, 10).astype(np.int32) for _ in range(3)]
    results = []
    for device in ("cpu", "cuda"):
        engine = _core.Engine(str(path), n_ctx=40, n_seqs=3, cross="e", cross_type="f16", cache="kv",
                              cache_type_k="f32", cache_type_v="f32", device=device)  # fmt: skip
        sequences = [engine.new_sequence() for _ in prompts]
        engine.encode(list(zip(sequences, sources, strict=True)))
        results.append(engine.append(list(zip(sequences, prompts, strict=True)), all_logits=True))
    assert relative(results[1], results[0]) < 5e-3


@needs_device
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_an_encoder_with_gaps(name, seq2seq, convert):
    """Rows at positions: attention of runs of queries and rows, biases by true distance, merged."""
    path, rows = convert(seq2seq(name)), source(name)[:14]
    positions = np.array([2, 3, 4, 5, 9, 10, 11, 12, 13, 14, 15, 20, 22, 23], np.int32)
    states = []
    for device in ("cpu", "cuda"):
        engine = _core.Engine(str(path), n_ctx=32, cross="e", cross_type="f32", device=device)
        states += engine.encode([(engine.new_sequence(), rows, positions)], states=True)
        states += engine.encode([(engine.new_sequence(), rows)], states=True) if device == "cpu" else []
    with_gaps, without, on_device = states
    assert relative(on_device, with_gaps) < FLOAT32 < relative(without, with_gaps)


@needs_device
def test_a_group_of_series(tmp_path, convert):
    """Chronos-2: attention in time and, of rows that are brought together, among series."""
    path = convert(chronos2_models.write(tmp_path / "hf"))
    at = np.array([0, 1, 2, 5, 6, 1, 2, 5, 6, 6], np.int32)
    rows = np.random.RandomState(1).standard_normal((len(at), 48)).astype(np.float32)
    states = []
    for device in ("cpu", "cuda"):
        engine = _core.Engine(str(path), device=device)
        states += engine.encode([(engine.new_sequence(), rows, at)], states=True)
    assert relative(states[1], states[0]) < FLOAT32


@needs_device
@each_case
def test_the_plan_is_what_is_allocated(name, mode, convert):
    """To the byte where nothing is supposed of a fold: k+r and xr may have scales of rows or not."""
    path = convert(GOLDEN / name)
    made = as_converted(derived(path, mode, "f16"), "f16", "f16")
    engine = open_engine(path, mode, "f16", device="cuda", n_ctx=64, n_seqs=2, derived=made)
    options = {"cache": mode, "cache_type_k": "f16", "cache_type_v": "f16", "n_ctx": 64, "n_seqs": 2}
    if mode == "k+r":
        options |= {"rank": 24, "residual_type": "f16"}
    plan, memory = _core.plan(str(path), device="cuda", **options), engine.memory()
    sequence = engine.new_sequence()
    engine.append([(sequence, IDS.astype(np.int32))], all_logits=True)
    assert engine.memory() == memory  # nothing grows later
    assert {key: plan[key] for key in memory} == memory and memory["mapped"] == 0


@needs_device
def test_a_residual_of_float16_matrices(convert):
    """R, which multiplies rows of k to terms that cancel, is in float32: products of many rows would round them."""
    path = convert(GOLDEN / "llama_mha")
    types = {"cache_type_k": "q8", "cache_type_v": "q8", "rank": 8, "residual_type": "q4", "n_ctx": 64}
    made = as_converted(derived(path, "k+r", "q8", 8), "q8", "q4")
    halves = sum(t.size for t in made.values() if t.dtype == np.float16)
    engines = {d: open_engine(path, "k+r", "q8", derived=made, device=d, **types) for d in ("cpu", "cuda")}
    memory = engines["cuda"].memory()
    planned = _core.plan(str(path), cache="k+r", device="cuda", **types)
    assert {key: planned[key] for key in memory} == memory
    of_r = 2 * sum(t.size for name, t in made.items() if name.endswith("attn_kr_k.weight"))
    assert memory["derived"] - engines["cpu"].memory()["derived"] == of_r < halves
    found, wanted = (decode(engine, IDS, 32) for engine in engines.values())
    assert relative(found, wanted) < 0.02  # what few codes that are rounded to another side make of it


@needs_device
def test_a_model_on_a_device(tiny):
    with slimrt.Model(tiny, device="cuda", n_ctx=64) as model, slimrt.Model(tiny, n_ctx=64) as on_cpu:
        assert model.info()["device"].startswith("cuda 0, ")
        texts = [m.generate("the cat sat", max_tokens=12, **GREEDY).text for m in (model, on_cpu)]
        assert texts[0] == texts[1]


@needs_device
def test_too_little_memory_is_said_before_anything_is_lost(tiny, tmp_path):
    deep = write_tiny(tmp_path / "deep.gguf", n_layers=12)  # whose cache would take 400 GB
    with pytest.raises(WontFitError, match="allowed"):
        slimrt.Model(tiny, device="cuda", memory_limit="100KiB")
    with pytest.raises(WontFitError, match="free") as error:
        slimrt.Model(deep, device="cuda", n_ctx=256, n_seqs=2**19, cache_type="f32")
    assert error.value.needed > error.value.available > 0
    with slimrt.Model(tiny, device="cuda", n_ctx=64) as model:
        assert model.generate("a", max_tokens=2, **GREEDY).tokens


def test_devices_that_are_not_there(tiny, run):
    for device in ("gpu", "cuda:", "cuda:-1", "CUDA", ""):
        with pytest.raises(UnsupportedError, match="device"):
            slimrt.Model(tiny, device=device)
    with pytest.raises(UnsupportedError, match="device 99"):
        slimrt.Model(tiny, device="cuda:99")
    if CUDA_MISSING:
        with pytest.raises(UnsupportedError, match="CUDA"):
            slimrt.Model(tiny, device="cuda")
    code, out, err = run("generate", tiny, "-p", "a", "--device", "cuda:99")
    assert code == 1 and not out and "cuda" in err.lower()


def test_doctor_says_what_there_is(run):
    code, out, _ = run("doctor", "-t", "1")
    assert code == 0 and (CUDA_MISSING or _core.cuda_devices()[0][0]) in out
    assert _core.available_memory() > 0


@needs_device
def test_a_broken_file_is_one_on_a_device_too(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFormatError, match="broken.gguf.*needs .* bytes"):
        slimrt.Model(tmp_path / "broken.gguf", device="cuda")
