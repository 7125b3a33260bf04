# SPDX-License-Identifier: Apache-2.0
"""Every combination of caches of a decoder's two attentions says what kv with kv says; what would not is refused.

Self-attention: kv, k, k+r, v, x, xr. Cross-attention: kv, k, e, e1. The models are those of seq2seq_models.py; modes
that need a fold are folded while loading, by slimrt.Model as a user would.
"""

from __future__ import annotations

from math import log, sqrt

import numpy as np
import pytest

import slimrt
from conftest import relative
from reference_seq2seq import Seq2Seq
from seq2seq_models import MODELS, N_DECODE, N_PROMPT, committed, decode, source, tokens
from slimrt import _core, core
from slimrt.errors import CacheUnsupportedError, UnsupportedError
from slimrt.folding.attention import Attention
from slimrt.folding.cross import folds
from slimrt.folding.gate import CROSS, SELF, Lossy, check, predicted
from slimrt.folding.planes import Plane
from slimrt.folding.report import TOO_LARGE
from slimrt.folding.weights import LayerWeights, projections
from slimrt.modelfile.gguf import Tensor, read_gguf, write_gguf
from slimrt.modelfile.source import ModelSource

EXACT = 1e-5  # float32 against float32, relative to the largest logit
OWN = [name for name, tiny in MODELS.items() if not tiny.fixture]
SELF_MODES, CROSS_MODES = ("kv", "k", "k+r", "v", "x", "xr"), ("kv", "k", "e", "e1")
INVERTS = {(SELF, "k"), (SELF, "v"), (CROSS, "k"), (CROSS, "e1")}
UNIT = {"f16": 2.0**-11, "bf16": 2.0**-8, "q8": 1 / 254}  # half a step: of an element, of a row's largest
each = pytest.mark.parametrize("name", OWN)


@pytest.fixture
def gguf(seq2seq, convert):
    """gguf(name) -> a plain file of a model of seq2seq_models."""
    return lambda name: convert(seq2seq(name))


def opened(path, mode: str = "auto", cross: str = "auto", type_name: str = "f32", **options) -> slimrt.Model:
    types = {"cache_type": type_name, "cross_type": type_name}
    return slimrt.Model(path, **({"n_ctx": 32, "progress": False} | types | options), cache=mode, cross=cross)


def logits(path, name: str, mode: str, cross: str, type_name: str = "f32") -> np.ndarray:
    with opened(path, mode, cross, type_name) as model, model._runtime.use() as engine:
        sequence = engine.new_sequence()
        engine.encode([(sequence, source(name))])
        return decode(engine, sequence, tokens(name))


def legal(path) -> tuple[list[str], list[str]]:
    """The modes of self-attention and of cross-attention that the core takes for a model."""
    modes = [mode for mode in core.modes(str(path)) if mode.legal]
    own = [mode.name for mode in modes if not mode.cross and mode.name in SELF_MODES]
    return own, [mode.name for mode in modes if mode.cross]


def amplified(path, mode: str, cross: str) -> float:
    """What the inverses of two modes may add in float32: the predicted errors of all layers, one after another."""
    parts = [part for part in ((SELF, mode), (CROSS, cross)) if part in INVERTS]
    return sum(error for part, one in parts for _, error in predicted(read_gguf(path), Lossy(part, one, "f32")))


# ---------------------------------------------------------------- exactness
@each
def test_every_legal_combination_is_kv(name, gguf):
    """A relative error of V (or K) in a layer moves attention's output by as much, at most the residual's size; the
    largest of thousands of differences is some four standard deviations, and so is the largest logit. So errors of
    layers add up in the logits, as far as they are more than float32's own."""
    path = gguf(name)
    own, cross = legal(path)
    wide = Attention.of(read_gguf(path)).kv_width >= read_gguf(path).size("embedding_length")
    assert set(cross) == (set(CROSS_MODES) if wide else {"kv", "e"})
    assert ("x" in own) == (MODELS[name].family != "moonshine") and ("k" in own) == wide
    wanted = logits(path, name, "kv", "kv")
    for mode in own:
        if mode == "k+r" and not wide:
            continue  # K knows a part of V, and a residual of the default rank holds a part of the rest
        for other in cross:
            bound = max(EXACT, amplified(path, mode, other))
            assert relative(logits(path, name, mode, other), wanted) < bound, (mode, other)


@each
def test_predictions_know_what_an_attention_reads(name, gguf):
    """Of norms of inputs the layer's own; of norms of sums the last one before, which is the encoder's for cross."""
    model = read_gguf(gguf(name))
    sums = MODELS[name].family in ("bart", "marian")
    assert core.architectures()[model.arch].norms == ("sums" if sums else "before")
    last = f"enc.blk.{model.size('block_count') - 1}.layer_output_norm"
    wanted = {
        (SELF, 0): "dec.token_embd_norm" if sums else "dec.blk.0.attn_norm",
        (SELF, 1): "dec.blk.0.layer_output_norm" if sums else "dec.blk.1.attn_norm",
        (CROSS, 1): last if sums else "enc.output_norm",
    }
    for (part, layer), norm in wanted.items():
        attention = Attention.of(model) if part == SELF else Attention.cross(model)
        if layer >= attention.n_layers:
            continue
        gain, shift = LayerWeights(model, attention, layer).input_norm()
        tensors = (model.tensors.get(f"{norm}.{kind}") for kind in ("weight", "bias"))
        for values, tensor, without in zip((gain, shift), tensors, (1, 0), strict=True):
            assert np.array_equal(values, np.full(attention.d, without) if tensor is None else tensor.values())


def error_of(path, name: str, type_name: str) -> float:
    """Of the logits with rows of a type in modes x, where it is legal, and e."""
    mode = "x" if "x" in legal(path)[0] else "kv"
    return relative(logits(path, name, mode, "e", type_name), logits(path, name, "kv", "kv"))


@each
@pytest.mark.parametrize("type_name", ["f16", "bf16"])
def test_e_and_x_are_off_by_the_rounding_of_their_rows(type_name, name, gguf):
    """Each of a layer's two attentions passes the relative error of its rows on, through V and through the scores;
    these errors are independent of each other and add up in squares: sqrt(4 layers) of a unit."""
    n_layers = ModelSource(gguf(name)).defaults["n_layers"]
    assert 0 < error_of(gguf(name), name, type_name) < sqrt(4 * n_layers) * UNIT[type_name]


@each
def test_q8_is_off_by_its_step(name, gguf):
    """To first order errors grow with those of rows. A float's is sqrt(1 / (8 ln 2)) units of itself, root mean square;
    q8's a step over sqrt(12), with 127 steps to a peak of 3 deviations. Products with q8 round queries too (twice the
    variance), and the largest of the differences is a draw that may be twice another: 2 sqrt(2) times."""
    of_rows = (3 / 127 / sqrt(12)) / (sqrt(1 / (8 * log(2))) * UNIT["f16"])
    assert error_of(gguf(name), name, "q8") < 2 * sqrt(2) * of_rows * error_of(gguf(name), name, "f16")


@each
@pytest.mark.parametrize("type_name", ["f16", "bf16"])
def test_e_is_the_model_with_a_rounded_encoder_output(type_name, name, gguf):
    """Nothing else is rounded: the reference in float64 reads the engine's own states, rounded to the type."""
    path = gguf(name)
    with opened(path, "kv", "e", cross_type=type_name) as model, model._runtime.use() as engine:
        sequence = engine.new_sequence()
        (states,) = engine.encode([(sequence, source(name))], states=True)
        got = decode(engine, sequence, tokens(name))
    rounded = Plane(states.shape[1], 1, type_name).round(states).astype(np.float64)
    assert relative(got, Seq2Seq(path).logits(tokens(name), rounded)) < EXACT


@pytest.mark.parametrize("name", ["umt5", "whisper"])
def test_a_fold_is_what_it_says(name, gguf):
    """K_1 W = K_N and V_N, in float64 from the file's projections; of layer 0 in mode e1 K is the row itself."""
    model = read_gguf(gguf(name))
    attention = Attention.cross(model)
    first = projections(model, attention, 0)[0]
    for kept in folds(model, "k"):
        w_k, w_v = projections(model, attention, kept.layer)
        assert relative(w_k @ kept.tensors[f"dec.blk.{kept.layer}.cross_attn_kv.weight"].T, w_v) < EXACT
    for kept in folds(model, "e1"):
        reads_k, reads_v = (kept.tensors[f"dec.blk.{kept.layer}.cross_attn_k1_{part}.weight"] for part in "kv")
        w_k, w_v = projections(model, attention, kept.layer)
        assert relative(first @ reads_k.T, w_k) < EXACT and relative(first @ reads_v.T, w_v) < EXACT
        assert (kept.layer == 0) == np.array_equal(reads_k, np.eye(len(reads_k)))


# ---------------------------------------------------------------- sequences
COMBINED = pytest.mark.parametrize(("mode", "cross"), [("x", "e"), ("k", "k"), ("v", "e1"), ("kv", "e")])


@COMBINED
@pytest.mark.parametrize("name", ["umt5", "whisper"])
def test_a_batch_is_as_one_by_one(name, mode, cross, gguf):
    """Up to the order of sums, whose rounding of K passes the inverse of W_K as any other does."""
    ids, one = tokens(name), source(name)
    several = [one, one[::-1].copy(), one if one.ndim > 1 else one[: len(one) // 2].copy()]
    with opened(gguf(name), mode, cross, n_seqs=3) as model, model._runtime.use() as engine:
        alone = []
        for text in several:
            sequence = engine.new_sequence()
            engine.encode([(sequence, text)])
            alone.append(decode(engine, sequence, ids))
            engine.free_sequence(sequence)
        held = [engine.new_sequence() for _ in several]
        engine.encode(list(zip(held, several, strict=True)))
        rows = [engine.append([(sequence, ids[:N_PROMPT]) for sequence in held], all_logits=True)]
        rows = [rows[0].reshape(3, N_PROMPT, -1)]
        for at in range(N_PROMPT, len(ids)):
            rows.append(engine.append([(sequence, ids[at : at + 1]) for sequence in held])[:, None])
        together = np.concatenate(rows, axis=1)
    bound = max(EXACT, amplified(gguf(name), mode, cross))
    assert all(relative(got, wanted) < bound for got, wanted in zip(together, alone, strict=True))


@COMBINED
@pytest.mark.parametrize("name", ["umt5", "whisper"])
def test_forks_share_the_source_and_truncating_keeps_it(name, mode, cross, gguf):
    """Nine beams beside room for the rows of two sources; the source outlives the sequence that read it."""
    ids = tokens(name)
    with opened(gguf(name), mode, cross, n_seqs=2) as model, model._runtime.use() as engine:
        first = engine.new_sequence()
        engine.encode([(first, source(name))])
        wanted = decode(engine, first, ids)
        engine.truncate(first, 0)
        assert relative(decode(engine, first, ids), wanted) == 0
        engine.truncate(first, N_PROMPT)
        beams = [engine.fork(first) for _ in range(8)]
        engine.free_sequence(first)
        for beam in beams:
            assert np.array_equal(engine.append([(beam, ids[N_PROMPT : N_PROMPT + 1])])[0], wanted[N_PROMPT])
            engine.free_sequence(beam)


# ---------------------------------------------------------------- precision
@pytest.fixture
def doubtful(gguf, tmp_path):
    """A Whisper whose second layer has projections with singular values down to 1e-5 of the largest."""
    model = read_gguf(gguf("whisper"))
    bad = []
    for name in ("dec.blk.1.attn_k.weight", "dec.blk.1.attn_v.weight", "dec.blk.1.cross_attn_k.weight"):
        u, s, v = np.linalg.svd(model.tensor(name).values().astype(np.float64))
        bad.append(Tensor.of(name, u * (s[0] * np.geomspace(1, 1e-5, len(s))) @ v))
    path = tmp_path / "doubtful.gguf"
    write_gguf(path, model.with_tensors(*bad), show_progress=False)
    return path


@pytest.mark.parametrize("type_name", UNIT)
@pytest.mark.parametrize(
    ("mode", "cross", "what", "instead"),
    [("x", "k", "V", "--cross e"), ("k", "e", "V", "--cache x"), ("v", "e", "K", "--cache x")],
)
def test_an_inverse_that_breaks_is_refused(mode, cross, what, instead, type_name, doubtful, tmp_path):
    layers = "[01]" if type_name == "q8" else "1"  # which breaks random weights too
    pattern = rf"predicted error of {what} is [\d.]+% in layer {layers} .*{instead}"
    with pytest.raises(CacheUnsupportedError, match=pattern):
        opened(doubtful, mode, cross, type_name)
    options = {"cache": mode, "cache_type": type_name} if mode != "x" else {"cross": cross, "cross_type": type_name}
    with pytest.raises(CacheUnsupportedError, match=pattern):
        slimrt.convert(doubtful, tmp_path / "out.gguf", progress=False, **options)
    assert not (tmp_path / "out.gguf").exists()
    with opened(doubtful, mode, cross, "f32") as model:
        assert model.info()["cross"]["mode"] == cross


def test_a_file_folded_in_f32_is_still_refused_in_f16(doubtful, tmp_path):
    made = tmp_path / "folded.gguf"
    report = slimrt.convert(doubtful, made, cross="e1", cross_type="f32", cache="x", progress=False)
    assert [one.layer for one in report.cross] == [0, 1] and all(one.errors["f16"] < TOO_LARGE for one in report.cross)
    report = slimrt.convert(doubtful, made, cross="k", cross_type="f32", progress=False)
    assert report.cross[1].errors["f16"] > TOO_LARGE and "cross-attention's V" in report.table()
    with opened(made, type_name="auto") as model:
        cross = model.info()["cross"]
        assert (cross["mode"], cross["type"], cross["reason"]) == ("k", "f32", "what the file was converted for")
    with pytest.raises(CacheUnsupportedError, match="layer 1"):
        opened(made, type_name="f16")


def test_the_prediction_is_what_happens(gguf):
    """V from real rounded rows of the model's own encoder states, against the prediction from white ones: within a
    factor of four either way, as states are not white."""
    path = gguf("whisper")
    engine = _core.Engine(str(path), n_ctx=8, cross="kv", cross_type="f32")
    (states,) = engine.encode([(engine.new_sequence(), source("whisper"))], states=True)
    for fold, (layer, expected) in zip(
        folds(read_gguf(path), "k"), predicted(read_gguf(path), Lossy(CROSS, "k", "f16")), strict=True
    ):
        assert layer == fold.layer
        row = (states @ fold.w_in.astype(np.float32)).astype(np.float16).astype(np.float64)
        wanted = states.astype(np.float64) @ fold.products[0].w_out
        error = np.linalg.norm(row @ fold.products[0].weight - wanted) / np.linalg.norm(wanted)
        assert expected / 4 < error < 4 * expected


@each
def test_a_residual_must_hold_what_k_does_not_tell(name, gguf, tmp_path):
    """With W_K narrower than d, K tells a part of V: a residual of the default rank is refused, a full one is not."""
    path = gguf(name)
    if "k+r" not in legal(path)[0]:
        pytest.skip("k+r is not legal here")
    attention = Attention.of(read_gguf(path))
    wide = attention.kv_width >= read_gguf(path).size("embedding_length")
    full = f"k+r:f16:{attention.kv_width}:f16"
    if wide:
        opened(path, "k+r", "kv", "f16").close()
    else:
        with pytest.raises(CacheUnsupportedError, match=r"k\+r.*residual.*layer 0.*use "):
            opened(path, "k+r", "kv", "f16")
        with pytest.raises(CacheUnsupportedError, match=r"k\+r.*residual.*layer 0.*use "):
            slimrt.convert(path, tmp_path / "made.gguf", cache="k+r", cache_type="f16", progress=False)
        assert not (tmp_path / "made.gguf").exists()
    opened(path, full, "kv", "auto").close()


# ---------------------------------------------------------------- what is said of it
def test_a_converted_file_loads_as_it_says(gguf, tmp_path):
    made, path = tmp_path / "made.gguf", gguf("whisper")
    slimrt.convert(path, made, cache="k", cache_type="f32", cross="e1", cross_type="f32", progress=False)
    assert check(read_gguf(made), Lossy(CROSS, "e1", "f32")) == []
    with opened(made, type_name="auto") as model:
        assert {layer["mode"] for layer in model.info()["layers"]} == {"k"} and model.info()["cross"]["mode"] == "e1"
    assert np.array_equal(logits(made, "whisper", "auto", "auto"), logits(path, "whisper", "k", "e1"))


@pytest.mark.usefixtures("clean_environment")
def test_inspect_says_which_modes_and_why_not(run, gguf, doubtful):
    code, out, _ = run("inspect", doubtful)
    lines = {line.split()[1]: line for line in out.splitlines() if line.startswith("  cross ")}
    assert code == 0 and list(lines) == list(CROSS_MODES)
    assert "yes, bytes a row" in lines["e"] and "not in f16, bf16, q8" in lines["k"] and "in layer 1" in lines["k"]
    code, out, _ = run("inspect", gguf("t5"))
    assert "  cross e1  no: K is 32 wide and the encoder's output 64" in out


def test_what_was_chosen_is_told(gguf, capsys):
    with opened(gguf("t5_v11"), type_name="auto", verbose=True) as model:
        said = capsys.readouterr().err
        assert "cache x f16" in said and "cross e f16 (64 bytes a row: a row of 32 serves all 2 layers" in said
        used = model.text2text([5, 6, 7], max_tokens=2).cache
        assert set(used.modes) == {"x"} and used.cross["mode"] == "e"


def test_names_are_checked(gguf):
    with pytest.raises(UnsupportedError, match=r"cross-attention cache mode 'x' is not supported"):
        opened(gguf("t5"), cross="x")
    with pytest.raises(UnsupportedError, match=r"cross-attention cache type 'f8'"):
        slimrt.Model(gguf("t5"), cross_type="f8")
    with pytest.raises(CacheUnsupportedError, match="Modes that work here: kv, e"):
        opened(gguf("t5"), cross="k")
    with pytest.raises(ValueError, match="n_source must not be negative"):
        slimrt.Model(gguf("t5"), n_source=-1)


def greedy(path, mode: str, cross: str, name: str) -> list[int]:
    with opened(path, mode, cross) as model, model._runtime.use() as engine:
        sequence, ids = engine.new_sequence(), [int(tokens(name)[0])]
        engine.encode([(sequence, source(name))])
        for _ in range(N_DECODE):
            ids.append(int(engine.append([(sequence, np.array(ids[-1:], np.int32))])[0].argmax()))
    return ids[1:]


@each
def test_the_default_says_the_same_words(name, gguf):
    path = gguf(name)
    assert greedy(path, "auto", "auto", name) == committed(name)["greedy"].tolist()
