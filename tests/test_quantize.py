# SPDX-License-Identifier: Apache-2.0
"""The quantisers of Q2_K to Q6_K, judged by gguf's dequantize, and the types that convert gives each matrix."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

import slimrt
from conftest import ISAS, TESTS, decode, rms
from slimrt import _core
from slimrt.converter import quantize
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import ModelData, Tensor, read_gguf, string, uint32

TYPES = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]
LEVELS = {"q2_k": 3, "q4_k": 15, "q5_k": 31}  # steps from the lowest to the highest code
REACH = {"q3_k": 4, "q6_k": 32}  # steps from 0 to the lowest code
SIZE = {"q4_k": 32, "q5_k": 32} | dict.fromkeys(["q2_k", "q3_k", "q6_k"], 16)  # of a group
WEIGHTED = ["q4_0", *TYPES]
SAME_BYTES = {  # how their hash begins
    "q4_0": "a2dbfe50",
    "q2_k": "38357ed1",
    "q3_k": "03f93d1d",
    "q4_k": "5ea31852",
    "q5_k": "da995ddc",
    "q6_k": "6ee88eab",
}
MODELS = TESTS.parent / "models"


def there_and_back(x: np.ndarray, kind: str, n_threads: int = 1) -> np.ndarray:
    stored = _core.quantize(kind, x, n_threads)
    values = quants.dequantize(stored, GGMLQuantizationType[kind.upper()])
    assert values.shape == x.shape and np.isfinite(values).all()
    return values.astype(np.float64)


def steps(x: np.ndarray, kind: str) -> np.ndarray:
    """Of each group, the step of a uniform quantiser that reaches from its lowest to its highest value [n]."""
    groups = x.reshape(-1, SIZE[kind]).astype(np.float64)
    if kind in REACH:
        return np.abs(groups).max(axis=1) / REACH[kind]
    return (np.maximum(groups.max(axis=1), 0) - np.minimum(groups.min(axis=1), 0)) / LEVELS[kind]


def weights(name: str, shape: tuple[int, int] = (64, 512)) -> np.ndarray:
    random = np.random.default_rng(1)
    x = {
        "gaussian": lambda: random.normal(size=shape),
        "uniform": lambda: random.uniform(-1, 1, shape),
        "heavy": lambda: random.standard_t(3, shape),
        "negative": lambda: -random.uniform(0.5, 1.5, shape),
        "positive": lambda: random.uniform(0, 1, shape),
        "groups": lambda: random.normal(size=shape) * 10 ** np.repeat(random.uniform(-3, 0, shape[1] // 16), 16),
    }[name]()
    return x.astype(np.float32)


# ---------------------------------------------------------------- the bytes
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", TYPES)
def test_our_kernels_unpack_what_gguf_unpacks(kind, isa):
    x = weights("heavy")
    stored = _core.quantize(kind, x)
    ours = _core.ops.unpack(kind, stored.reshape(-1), x.size, isa).reshape(x.shape)
    judge = quants.dequantize(stored, GGMLQuantizationType[kind.upper()])
    assert np.abs(ours - judge).max() <= 2**-23 * np.abs(judge).max()


@pytest.mark.parametrize("kind", TYPES)
def test_bytes_do_not_depend_on_threads_or_neighbours(kind):
    x = weights("gaussian", (67, 768))  # 201 blocks: the last work item is not full
    stored = _core.quantize(kind, x, 1)
    assert np.array_equal(stored, _core.quantize(kind, x, 2))
    assert np.array_equal(stored, _core.quantize(kind, x, 5))
    assert np.array_equal(stored[3:4], _core.quantize(kind, x[3:4], 1))
    assert _core.quantize(kind, x[:0]).shape == (0, stored.shape[1])


# ---------------------------------------------------------------- the error
@pytest.mark.parametrize("name", ["gaussian", "uniform", "heavy", "groups"])
@pytest.mark.parametrize("kind", TYPES)
def test_error_is_below_that_of_uniform_steps(kind, name):
    """Steps from end to end, errors spread evenly over each, no cost for the scales' own bits: step / sqrt(12). Where
    values are spread evenly, too, a few codes on either side of 0 cannot gain on that."""
    x = weights(name)
    uniform = rms(steps(x, kind)) / np.sqrt(12)
    assert rms(there_and_back(x, kind) - x) <= (1.01 if (kind, name) == ("q3_k", "uniform") else 0.96) * uniform


@pytest.mark.parametrize("kind", TYPES)
def test_error_on_gaussians(kind):
    """Measured figures: 0.2585, 0.1435, 0.0699, 0.0346, 0.0172."""
    most = {"q2_k": 0.2615, "q3_k": 0.145, "q4_k": 0.0707, "q5_k": 0.0352, "q6_k": 0.0174}
    x = weights("gaussian", (256, 1024))
    assert rms(there_and_back(x, kind) - x) <= most[kind]


@pytest.mark.parametrize("name", ["gaussian", "uniform", "heavy", "negative", "positive", "groups"])
@pytest.mark.parametrize("kind", TYPES)
def test_no_element_is_far_off(kind, name):
    """The search keeps a group's squared error below that of uniform steps, so one element can take it all: sqrt(n)
    / 2 steps; the scale's rounding moves it by half a code of 63 (or 127) at the widest group's end."""
    x, size = weights(name), SIZE[kind]
    off = np.abs(there_and_back(x, kind) - x).reshape(-1, 256 // size, size).max(axis=2)
    step = steps(x, kind).reshape(off.shape)
    widest = step.max(axis=1, keepdims=True)
    assert (
        off <= np.sqrt(size) / 2 * step + (LEVELS | REACH)[kind] / {"q2_k": 15, "q3_k": 31}.get(kind, 63) * widest
    ).all()


@pytest.mark.parametrize("name", ["gaussian", "heavy", "negative"])
@pytest.mark.parametrize("kind", TYPES)
def test_what_is_quantised_already_hardly_changes(kind, name):
    x = weights(name)
    once = there_and_back(x, kind)
    twice = there_and_back(once.astype(np.float32), kind)
    assert rms(twice - once) <= 0.45 * rms(once - x)


@pytest.mark.parametrize("kind", TYPES)
def test_scaling_by_a_power_of_two_scales_the_result(kind):
    x = weights("gaussian")
    assert np.array_equal(there_and_back(x * 32, kind), 32 * there_and_back(x, kind))


# ---------------------------------------------------------------- columns that count more or less
def importance(n: int, seed: int = 4) -> np.ndarray:
    """What each of n columns counts: most little, a few much."""
    w = np.exp(1.5 * np.random.default_rng(seed).normal(size=n))
    return (w / w.mean()).astype(np.float32)


def weighted(x: np.ndarray, kind: str, w: np.ndarray | None, judge: np.ndarray) -> float:
    """The squared error of x [rows, columns] quantised with importance w, where that of a column counts judge."""
    stored = _core.quantize(kind, x, 1, w)
    return float((judge * (quants.dequantize(stored, GGMLQuantizationType[kind.upper()]) - x) ** 2).sum())


@pytest.mark.parametrize("name", ["gaussian", "heavy", "negative", "groups"])
@pytest.mark.parametrize("kind", WEIGHTED)
def test_columns_that_count_more_get_less_error(kind, name):
    """On Gaussians the weighted error falls to 0.56 (q2_k) to 0.76 (q4_0) of itself, on the others to 0.81 at most. It
    is 0.65 to 0.99 of what ggml_quantize_chunk makes of the same importance (llama-cpp-python 0.3.36)."""
    x = weights(name)
    w = importance(x.shape[1])
    most = {"q4_0": 0.78, "q2_k": 0.58, "q3_k": 0.71, "q4_k": 0.68, "q5_k": 0.71, "q6_k": 0.77}[kind]
    assert weighted(x, kind, w, w) <= (most if name == "gaussian" else 0.83) * weighted(x, kind, None, w)


@pytest.mark.parametrize("kind", WEIGHTED)
def test_columns_that_count_alike_are_those_without_importance(kind):
    x, ones = weights("heavy"), np.ones(512, np.float32)
    assert np.array_equal(_core.quantize(kind, x, 1, ones), _core.quantize(kind, x))
    for factor in (2.0**-20, 2.0**20):  # the ends of what is taken; powers of two, so that nothing rounds
        assert np.array_equal(_core.quantize(kind, x, 1, ones * np.float32(factor)), _core.quantize(kind, x))


@pytest.mark.parametrize("kind", WEIGHTED)
def test_weighted_bytes_do_not_depend_on_threads_or_neighbours(kind):
    columns = 96 if kind == "q4_0" else 768  # of q4_0 rows that do not end with 256 weights
    x, w = weights("gaussian", (67, columns)), importance(columns)
    stored = _core.quantize(kind, x, 1, w)
    assert np.array_equal(stored, _core.quantize(kind, x, 5, w))
    assert np.array_equal(stored[3:4], _core.quantize(kind, x[3:4], 1, w))
    assert np.array_equal(stored[1:], _core.quantize(kind, x[1:], 1, w))


@pytest.mark.parametrize("kind", WEIGHTED)
def test_weighted_bytes_are_the_same_on_every_machine(kind):
    random = np.random.default_rng(1)
    x = (random.integers(-4096, 4097, (8, 512)) / 1024).astype(np.float32)
    w = (random.integers(1, 4096, 512) / 1024).astype(np.float32)
    assert hashlib.sha256(_core.quantize(kind, x, 1, w).tobytes()).hexdigest()[:8] == SAME_BYTES[kind]


@pytest.mark.parametrize(
    "w, said",
    [
        (np.ones(511), "importance has 511 numbers for 512 columns"),
        (np.full(512, 0.0), "importance must be from"),
        (np.full(512, np.nan), "importance must be from"),
        (np.full(512, 2e6), "importance must be from"),
    ],
)
def test_importance_out_of_range_is_refused(w, said):
    with pytest.raises(ValueError, match=said):
        _core.quantize("q4_k", weights("gaussian"), 1, w.astype(np.float32))


# ---------------------------------------------------------------- what is not like weights
@pytest.mark.parametrize("kind", TYPES)
def test_zeros_stay_zero(kind):
    assert not there_and_back(np.zeros((2, 512), np.float32), kind).any()
    x = weights("gaussian")
    x[:, 96:160] = 0
    assert not there_and_back(x, kind)[:, 96:160].any()


@pytest.mark.parametrize("value", [1.0, -1.0, 0.3, -0.3, 1e-3, -1e-3, 1e5, -1e5])
@pytest.mark.parametrize("kind", TYPES)
def test_a_constant_is_as_exact_as_an_f16_scale(kind, value):
    got = there_and_back(np.full((1, 256), value, np.float32), kind)
    precision = 2**-8 if abs(value) == 1e-3 else 2**-11  # 1e-3 / 31 / 63 is subnormal in f16: fewer bits
    assert np.abs(got - value).max() <= precision * abs(value)


@pytest.mark.parametrize("kind", TYPES)
def test_one_outlier_costs_only_its_block(kind):
    x = weights("gaussian")
    plain = there_and_back(x, kind)
    x[5, 300] = 1e4
    got = there_and_back(x, kind)
    assert abs(got[5, 300] - 1e4) <= 100
    others = np.ones(x.shape, bool)
    others[5, 256:] = False
    assert np.array_equal(got[others], plain[others])


@pytest.mark.parametrize("scale", [1e-30, 1e-38, 1e-44])
@pytest.mark.parametrize("kind", TYPES)
def test_what_is_below_f16_becomes_zero(kind, scale):
    assert not there_and_back(weights("gaussian") * np.float32(scale), kind).any()


@pytest.mark.parametrize("scale", [1e-4, 1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("kind", TYPES)
def test_scales_that_are_subnormal_in_f16(kind, scale):
    """Such a scale is a multiple of 2^-24, and so is each step: at worst as wide as that, or as usual."""
    x = weights("gaussian") * np.float32(scale)
    off = there_and_back(x, kind) - x
    assert rms(off) <= {"q2_k": 0.268, "q3_k": 0.149}.get(kind, 0.0725) * scale + 2**-24 / np.sqrt(12)


@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize("name", ["negative", "positive", "gaussian"])
def test_what_is_subtracted_is_not_negative(kind, name):
    stored = _core.quantize(kind, weights(name)).reshape(-1, {"q2_k": 84, "q4_k": 144, "q5_k": 176}[kind])
    scales = (stored[:, -4:] if kind == "q2_k" else stored[:, :4]).copy().view(np.float16)
    assert (scales >= 0).all() and np.isfinite(scales).all()


@pytest.mark.parametrize("kind", TYPES)
def test_values_near_the_largest_are_held_or_refused(kind):
    reach = 65504 * {"q2_k": 15 * 3, "q3_k": 32 * 4, "q4_k": 63 * 15, "q5_k": 63 * 31, "q6_k": 128 * 32}[kind]
    x = weights("positive")
    x /= x.max()
    x[:, ::16] = 1  # in every group
    held, most = {"q2_k": (0.6, 0.1), "q3_k": (0.7, 0.07)}.get(kind, (0.9, 0.03))  # few codes may reach beyond x
    assert rms(there_and_back(x * np.float32(held * reach), kind) / reach - held * x) < most
    for factor in (1.2, 1e4, 1e20):
        with pytest.raises(UnsupportedError, match=f"values reach .*more than the f16 scales of {kind}"):
            _core.quantize(kind, x * np.float32(factor * reach))
    for value in (np.nan, np.inf, -np.inf):
        x[7, 300] = value
        with pytest.raises(UnsupportedError, match="not finite"):
            _core.quantize(kind, x)


def test_what_is_no_row_or_no_type_of_ours():
    x = weights("gaussian")
    with pytest.raises(ValueError, match="rows of 100 do not divide into blocks of 256"):
        _core.quantize("q4_k", np.ascontiguousarray(x[:, :100]))
    with pytest.raises(ValueError, match="to q4_0, q2_k, q3_k, q4_k, q5_k and q6_k, not to q8_0"):
        _core.quantize("q8_0", x)
    with pytest.raises(ValueError, match="unknown element type 'q4_k_m'"):
        _core.quantize("q4_k_m", x)
    with pytest.raises(ValueError, match="n_threads"):
        _core.quantize("q4_k", x, -1)


# ---------------------------------------------------------------- which matrix gets which type
def named(n_layers: int, shapes: dict[str, tuple[int, int]]) -> ModelData:
    """A model of zeros; a name without a layer stands for all layers."""
    metadata = {"general.architecture": string("llama"), "llama.block_count": uint32(n_layers)}
    tensors = {}
    for name, shape in shapes.items():
        ends = name in ("token_embd", "output")
        for full in [f"{name}.weight"] if ends else [f"blk.{i}.{name}.weight" for i in range(n_layers)]:
            tensors[full] = Tensor.of(full, np.zeros(shape))
    return ModelData(metadata, tensors)


def layers(model: ModelData, name: str, kind: str) -> list[int]:
    found = [(key.split("."), tensor.type.name.lower()) for key, tensor in model.tensors.items()]
    return [int(key[1]) for key, its in found if key[0] == "blk" and key[2] == name and its == kind]


# From files that llama_model_quantize (llama-cpp-python 0.3.36) wrote as Q4_K_M.
WITH_MORE_BITS = {
    1: [0],
    4: [2, 3],
    8: [0, 3, 6, 7],
    10: [0, 3, 6, 8, 9],
    24: [0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23],
}


@pytest.mark.parametrize("n_layers", WITH_MORE_BITS)
def test_q4_k_m_gives_more_bits_where_llama_cpp_does(n_layers):
    square = (256, 256)
    matrices = ["attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    shapes = {"token_embd": square, "output": square} | dict.fromkeys(matrices, square)
    model, warnings = quantize.requantise(named(n_layers, shapes), "q4_k_m")
    assert not warnings
    for name in matrices:
        more = WITH_MORE_BITS[n_layers] if name in ("attn_v", "attn_qkv", "ffn_down") else []
        assert layers(model, name, "q6_k") == more
        assert layers(model, name, "q4_k") == [i for i in range(n_layers) if i not in more]
    assert model.tensor("output.weight").type.name == "Q6_K"
    assert model.tensor("token_embd.weight").type.name == "Q4_K"
    assert model.value("general.file_type") == 15 and model.value("general.quantization_version") == 2


@pytest.mark.parametrize("outtype, file_type", [("q2_k", 21), ("q3_k", 11), ("q4_k", 14), ("q5_k", 16), ("q6_k", 18)])
def test_plain_types(outtype, file_type):
    shapes = {"token_embd": (256, 256), "attn_v": (256, 256), "ffn_down": (256, 512)}
    model, warnings = quantize.requantise(named(8, shapes), outtype)
    assert not warnings
    assert model.tensor("token_embd.weight").type.name == "Q6_K"  # it is the output matrix as well
    assert layers(model, "attn_v", outtype) == layers(model, "ffn_down", outtype) == list(range(8))
    assert model.value("general.file_type") == file_type


def test_rows_that_do_not_divide_are_named():
    shapes = {"token_embd": (256, 256), "output": (4, 256), "ffn_down": (256, 640), "attn_v": (256, 100)}
    model, warnings = quantize.requantise(named(1, shapes), "q4_k")
    assert [model.tensor(f"blk.0.{name}.weight").type.name for name in ("ffn_down", "attn_v")] == ["Q8_0", "F16"]
    assert warnings == [
        "blk.0.ffn_down.weight becomes q8_0, not q4_k: its rows of 640 are no multiple of 256",
        "blk.0.attn_v.weight becomes f16, not q4_k: its rows of 100 are no multiple of 32",
    ]


@pytest.mark.parametrize(
    "outtype, value, message",
    [
        ("q4_k", 1e9, "tensor 'blk.0.attn_v.weight': values reach 1e\\+09, more than the f16 scales of q4_k"),
        ("q6_k", 1e9, "tensor 'blk.0.attn_v.weight': values reach 1e\\+09, more than the f16 scales of q6_k"),
        ("q8_0", 1e7, "tensor 'blk.0.attn_v.weight' reaches 1e\\+07, q8_0 only 8.31901e\\+06"),
        ("q4_0", 1e6, "tensor 'blk.0.attn_v.weight' reaches 1e\\+06, q4_0 only 524032"),
        ("f16", 1e5, "tensor 'blk.0.attn_v.weight' reaches 1e\\+05, f16 only 65504"),
    ],
)
def test_values_too_large_are_refused_by_name(outtype, value, message):
    model = named(1, {"token_embd": (256, 256), "attn_v": (256, 256)})
    big = Tensor.of("blk.0.attn_v.weight", np.full((256, 256), value))
    changed, _ = quantize.requantise(model.with_tensors(big), outtype)
    with pytest.raises(UnsupportedError, match=message):
        changed.tensor(big.name).load()
    bad = Tensor.of(big.name, np.full((256, 256), np.nan))
    changed, _ = quantize.requantise(model.with_tensors(bad), outtype)
    with pytest.raises(ModelFormatError, match="tensor 'blk.0.attn_v.weight' holds values that are not finite"):
        changed.tensor(big.name).load()


@pytest.mark.parametrize("outtype", ["q4_k_m", "q8_0", "f16"])
def test_rows_in_parts_give_the_same_bytes(outtype, monkeypatch):
    source = read_gguf(MODELS / "tale-llama.gguf")
    name = "blk.2.attn_v.weight"
    whole = quantize.requantise(source, outtype)[0].tensor(name).load()
    monkeypatch.setattr(quantize, "_AT_ONCE", 7 * 256)
    assert np.array_equal(quantize.requantise(source, outtype)[0].tensor(name).load(), whole)
    tensor = replace(
        source.tensor(name), shape=(2, 128, 256), load=lambda: source.tensor(name).load().reshape(2, 128, -1)
    )
    parts = quantize.requantise(source.with_tensors(tensor), outtype)[0].tensor(name)
    assert parts.load().shape == parts.byte_shape and np.array_equal(parts.load().reshape(whole.shape), whole)


# ---------------------------------------------------------------- a trained model
@pytest.fixture(scope="module")
def tale_q4(tmp_path_factory):
    """tale-llama as q4_k_m, folded for mode k."""
    out = tmp_path_factory.mktemp("gguf") / "tale.gguf"
    report = slimrt.convert(MODELS / "tale-llama.gguf", out, outtype="q4_k_m", cache="k", cache_type="f32")
    assert [line.partition(":")[0] for line in report.warnings] == [
        f"blk.{i}.ffn_down.weight and 1 more become q8_0, not {kind}" for i, kind in ((0, "q4_k"), (2, "q6_k"))
    ]
    return out


@pytest.mark.unsanitized  # quality
def test_a_trained_model_keeps_its_perplexity(tale_q4):
    """Measured on all of the text: 1.724 beside 1.731 in f16."""
    text = (MODELS / "heldout.txt").read_text()[:12000]
    with slimrt.Model(MODELS / "tale-llama.gguf", n_ctx=1024) as model:
        plain = model.perplexity(text)
    with slimrt.Model(tale_q4, n_ctx=1024, cache="kv") as model:
        assert model.perplexity(text) <= 1.02 * plain


@pytest.mark.unsanitized  # quantises a whole model for a minute there; smaller ones are in test_families.py
def test_the_fold_is_of_the_weights_that_run(tale_q4):
    """Mode k answers as mode kv of the same file does, closer than the file's quantisation moved it."""
    stored = read_gguf(tale_q4)
    assert stored.tensor("blk.0.attn_q.weight").type.name == "Q4_K"
    assert stored.tensor("blk.0.attn_kv.weight").type.name == "F32"
    ids = np.arange(3, 67, dtype=np.int32)

    def logits(path, cache):
        engine = _core.Engine(str(path), cache=cache, cache_type_k="f32", cache_type_v="f32", n_ctx=128)
        return decode(engine, ids, 48)  # the last 16 with the others in the cache

    folded, plain = logits(tale_q4, "k"), logits(tale_q4, "kv")
    moved = rms(plain - logits(MODELS / "tale-llama.gguf", "kv"))
    assert 0 < rms(folded - plain) <= 0.2 * moved
