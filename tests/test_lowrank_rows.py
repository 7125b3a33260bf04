# SPDX-License-Identifier: Apache-2.0
"""Mode lowrank: what is stored of old rows, to the bit; the latent's fold; how levels are written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, ids_of, rms
from gguf_shapes import Shape, write_random
from reference_formats import half_above
from reference_modes import BLOCK, CACHE_MODES, Level, lowrank_levels
from slimrt import _core, core
from slimrt.folding.attention import Attention
from slimrt.folding.gate import white_sample
from slimrt.folding.lowrank import factors, second_moments
from slimrt.modelfile.gguf import read_gguf
from test_lowrank import USUAL, engine_of
from test_windows import appended


# ---------------------------------------------------------------- what is stored, to the bit
class Saved:
    """What save_sequence() gives of a model of one layer whose latent is 64 wide: [regions][planes] -> bytes."""

    def __init__(self, engine: _core.Engine, sequence: int, levels: str):
        data, self.length = engine.save_sequence(sequence).tobytes(), engine.length(sequence)
        of = core.levels("lowrank", levels)
        at = 16 + int.from_bytes(data[:8], "little")
        self.ends = np.frombuffer(data, np.int64, len(of.of), at).tolist()  # of class 1, 2 ...
        at += 8 * len(of.of)
        sinks = min(of.sinks, self.length)
        edges = [of.sinks, *self.ends[::-1], max(self.length, self.ends[0])]
        counts = [sinks, *np.diff(edges).tolist()]
        written = core.Level("f16", "f16", 1, 0)
        self.rows = []
        for count, level in zip(counts, [written, *of.of, written], strict=True):
            planes = []
            k = count // BLOCK * core.plane_bytes(level.type_k, BLOCK, 1) * 64  # a channel's codes and scales together
            k = count * 64 * 2 if level is written else k
            for size in (k, count * core.plane_bytes(level.type_v, round(64 * level.part), 1)):
                planes.append(np.frombuffer(data, np.uint8, size, at))
                at += size
            self.rows.append(planes)
        assert at == len(data)


def codes(plane: np.ndarray, width: int, type_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Of a plane of one head in whole blocks: elements and scales, a row each."""
    elements = width * {"f16": 16, "q8": 8, "q4": 4, "q3": 3, "q2": 2}[type_name] // 8
    block = core.plane_bytes(type_name, width, 1) * BLOCK
    blocks = plane.reshape(-1, block)
    cut = elements * BLOCK
    return blocks[:, :cut].reshape(-1, elements), blocks[:, cut:].reshape(len(blocks) * BLOCK, -1)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """One layer with four heads of 16, so that half a latent is a group of 32 columns."""
    return write_random(tmp_path_factory.mktemp("wide") / "model.gguf", Shape(64, 1, 4, 320, n_vocab=100))


@pytest.mark.parametrize("dtype", ["f16", "q8", "q4", "q3", "q2"])
@pytest.mark.parametrize("steps", [1, 300])
def test_demotion_keeps_the_first_columns_to_the_bit(dtype, steps, wide):
    """Old rows hold what all columns in this type hold, less the last half: K the same, of V each row's first codes
    (q8 has one scale for all columns, so that other codes are right), whether they were f16 rows before or not."""
    ids, old = ids_of(0, 300), {}
    for part in ("", "@0.5"):
        levels = f"{dtype}{part}+f16*0.3"
        engine = engine_of(wide, levels)
        sequence = engine.new_sequence()
        for piece in np.array_split(ids, steps):
            engine.append([(sequence, piece)])
        old[part] = Saved(engine, sequence, levels).rows[1]
    assert len(old[""][0]) > 0 and np.array_equal(old[""][0], old["@0.5"][0])
    every, half = codes(old[""][1], 64, dtype), codes(old["@0.5"][1], 32, dtype)
    if dtype != "q8":
        assert np.array_equal(every[0][:, : half[0].shape[1]], half[0])
        assert np.array_equal(every[1][:, : half[1].shape[1]], half[1])


def test_codes_are_of_the_rows_that_were_written(wide):
    """Each row that has aged since it was written has the scale and minimum of its first columns in f16."""
    ids, saved = ids_of(1, 300), {}
    for levels in ("f16", "q4@0.5"):
        engine = engine_of(wide, levels)
        sequence = engine.new_sequence()
        appended(engine, sequence, ids, 1)
        saved[levels] = Saved(engine, sequence, levels).rows[1]
    rows = codes(saved["f16"][1], 64, "f16")[0].view(np.float16)[:, :32].astype(np.float32)
    low = -half_above(-rows.min(axis=1))
    scale = half_above((rows.max(axis=1) - low) / np.float32(15))
    found = codes(saved["q4@0.5"][1], 32, "q4")[1].view(np.float16)
    assert len(found) == 288 and {*map(tuple, found.T.tolist())} == {tuple(low.tolist()), tuple(scale.tolist())}


def grown(engine: _core.Engine, ids: np.ndarray, lengths: list[int], levels: str) -> Saved:
    sequence, at = engine.new_sequence(), 0
    before = [0]
    while at < len(ids):
        n = lengths[at % len(lengths)]
        engine.append([(sequence, ids[at : at + n])])
        at += n
        ends = Saved(engine, sequence, levels).ends
        assert all(new >= old for new, old in zip(ends, before, strict=False))  # levels never rise
        before = ends
    return Saved(engine, sequence, levels)


@pytest.mark.parametrize("levels", [USUAL, "q2@0.25+q4@0.5*0.2+q8*0.3+sinks=37", "q4@0.5+q4*0.9+sinks=0"])
def test_regions_follow_from_the_length_alone(levels, wide):
    """They add up to it, whatever pieces the text came in; those of the mode's definition."""
    ids, found = ids_of(2, 320), []
    for lengths in ([320], [1], [3, 50, 7], [64]):
        engine = engine_of(wide, levels, n_batch=48)
        saved = grown(engine, ids, lengths, levels)
        regions = lowrank_levels((levels, levels))
        assert saved.ends == [max(regions.sinks, regions.begin(c, 320)) for c in range(regions.last)]
        held = core.plan(str(wide), cache="lowrank", cache_type_k=levels, cache_type_v=levels, n_ctx=320)["layers"][0]
        assert held["bytes_held"] == sum(plane.size for region in saved.rows for plane in region)
        found.append(saved.ends)
    assert all(ends == found[0] for ends in found)


def test_no_group_spans_two_sequences(wide):
    """Sequences that share blocks' pools, growing in turn, hold what they hold alone."""
    texts = [ids_of(seed, n) for seed, n in ((3, 150), (4, 71), (5, 230))]
    together = engine_of(wide, USUAL, n_seqs=3, n_batch=24)
    sequences = [together.new_sequence() for _ in texts]
    pieces = [np.array_split(text, 20) for text in texts]
    for turn in range(20):
        for sequence, text in zip(sequences, pieces, strict=True):
            together.append([(sequence, text[turn])])
    for sequence, text in zip(sequences, pieces, strict=True):
        engine = engine_of(wide, USUAL, n_batch=24)
        alone = engine.new_sequence()
        for piece in text:
            engine.append([(alone, piece)])
        shared, own = (Saved(e, s, USUAL) for e, s in ((together, sequence), (engine, alone)))
        assert shared.ends == own.ends
        assert all(np.array_equal(a, b) for x, y in zip(shared.rows, own.rows, strict=True)
                   for a, b in zip(x, y, strict=True))  # fmt: skip


# ---------------------------------------------------------------- the fold
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_columns_of_the_latent_fall_in_weight(heads, convert):
    """TALE's: E[latent_i latent_j] = sigma_i where i = j, else 0. What the first r columns lose of V is as little as
    any r columns can."""
    model = read_gguf(convert(GOLDEN / "llama_mha"))
    attention = Attention.of(model)
    random = np.random.default_rng(0)
    x = random.normal(size=(4 * attention.d, attention.d)) @ random.normal(size=(attention.d, attention.d))
    moment = x.T @ x
    weights = white_sample(model, attention, 0).weights
    into, out = factors(weights, second_moments(weights, moment, heads), heads, weighed=False)
    assert np.allclose(into @ out, np.eye(into.shape[1]), atol=1e-9)
    v = (x @ weights.w_v).reshape(len(x), len(into), -1)
    for group in range(len(into)):
        latent = v[:, group] @ into[group]
        sigma = np.linalg.svd(v[:, group], compute_uv=False)
        assert np.allclose(latent.T @ latent, np.diag(sigma), atol=1e-9 * sigma[0])
        for r in (1, len(sigma) // 2):
            lost = v[:, group] - latent[:, :r] @ out[group][:r]
            assert np.isclose(np.sum(lost**2), np.sum(sigma[r:] ** 2))


def test_weighed_columns_keep_more_of_the_output(convert):
    """With W_O's metric the first half of the latent loses less of what W_O makes of each head."""
    model = read_gguf(convert(GOLDEN / "llama_gqa_tied"))
    attention = Attention.of(model)
    weights = white_sample(model, attention, 0).weights
    moment, lost = np.eye(attention.d), {}
    heads = weights.w_o.reshape(attention.d, attention.n_kv_heads, -1, attention.head_dim)
    for weighed in (True, False):
        into, out = factors(weights, second_moments(weights, moment, 2), 2, weighed=weighed)
        assert np.allclose(into @ out, np.eye(into.shape[1]), atol=1e-9)
        r = into.shape[1] // 2
        left = weights.w_v @ (np.eye(into.shape[1]) - into[0][:, :r] @ out[0][:r])  # [d, kv width]
        of_heads = np.einsum("xki,dkgi->xkgd", left.reshape(attention.d, attention.n_kv_heads, -1), heads)
        lost[weighed] = rms(of_heads)
    assert lost[True] < 0.999 * lost[False]


# ---------------------------------------------------------------- the text of levels
FORM = "; levels are such as q2@0.5+q4*0.1+sinks=4 (TYPE_K/TYPE_V@PART*SHARE or *ROWS, oldest first)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", USUAL), ("q8", "q8"), ("q2@0.50+q4*.1+sinks=4+recent=0", USUAL), ("sinks=4", USUAL),
        ("q4/q2+q8", "q4/q2+q8*0.1"), ("recent=7+q3@0.125", "q3@0.125+recent=7"),
        ("sinks=0+q2+q2*1", "q2+q2*1+sinks=0"), ("f16@1+f32*0", "f16+f32*0"),
        ("none+q8*064+sinks=4", "none+q8*64"), ("q2@0.5+eager+q4*64", "q2@0.5+q4*64+eager"), ("none", "none"),
        ("q2@5E-1+q4*.00005", "q2@0.5+q4*5e-05"), ("q2@1.+q4*00.025e1", "q2+q4*0.25"),
    ],
)  # fmt: skip
def test_levels_as_text(text, said):
    found = core.levels("lowrank", text)
    assert found.text == said and core.levels("lowrank", found.text) == found


@pytest.mark.parametrize("part", ["0.3", "0.1234567", ".7e-03", "0.12345678901234", "4.9e-9", "123456e-6"])
def test_parts_are_the_nearest_doubles(part):
    assert core.levels("lowrank", f"q2@{part}+q4*{part}").of[1].share == float(part)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("q2@0.5x+q4", "'q2@0.5x': '0.5x' is not a number from 0 to 1"),
        ("q2@1.5", "'q2@1.5': '1.5' is not a number from 0 to 1"),
        ("q2@0", "'q2@0': V keeps no column"),
        ("q2@0.5/q4", "'q2@0.5/q4': '0.5/q4' is not a number from 0 to 1"),
        ("q2@", "'q2@': '?' is not a number from 0 to 1"),
        ("q2+q4*nan", "'q4*nan': 'nan' is not a number from 0 to 1"),
        ("q2+q4*-0.1", "'q4*-0.1': '-0.1' is not a number from 0 to 1"),
        ("q2*0.5+q4", "'q2*0.5': the first level, the oldest, has the share that others leave"),
        ("q2+q4*0.6+q8*0.5", "'q2+q4*0.6+q8*0.5': the shares add up to more than 1"),
        ("q2@0.5+q4@0.4*0.1", "'q2@0.5+q4@0.4*0.1': newer rows keep fewer columns of V than older ones"),
        ("q4+q2*0.1", "'q4+q2*0.1': newer rows have fewer bits than older ones"),
        ("q2/q4+q8/q3*64", "'q2/q4+q8/q3*64': newer rows have fewer bits than older ones"),
        ("+".join(["q2", *["q4*0.1"] * 8]), "there are 9 levels, and at most 8 are possible"),
        ("q2+sinks=-1", "'sinks=-1': '-1' is not a number from 0 to 268435456"),
        ("q2+q4*40", "'q4*40': rows age in blocks of 32, and 40 rows are no whole ones"),
        ("q2+q4*64.5", "'q4*64.5': '64.5' is not a number from 0 to 1"),
        ("q2+none", "'q2+none': only the oldest rows can be forgotten, so 'none' comes first"),
        ("q2+recent=few", "'recent=few': 'few' is not a number from 0 to 268435456"),
    ],
)
def test_texts_that_are_no_levels(text, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said + FORM)}$"):
        core.levels("lowrank", text)


@pytest.mark.parametrize(
    "part", [".", "e-1", "1e", "1e-", "0.5.", ".5e-1.0", " 0.5", "0,5", "0x1p-1", "1e999", "1e-999", "0e9999999999"]
)
def test_parts_that_are_no_decimals(part):
    said = f"'q2@{part}': '{part}' is not a number from 0 to 1{FORM}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        core.levels("lowrank", f"q2@{part}")


@pytest.mark.unsanitized  # a Python of its own
def test_a_decimal_comma_of_the_program_around_is_in_no_text(tmp_path):
    """What a file says of levels is read wherever it was written."""
    if shutil.which("localedef") is None:
        pytest.skip("localedef is missing")
    (tmp_path / "comma").write_text('LC_NUMERIC\ndecimal_point ","\nthousands_sep ""\ngrouping -1\nEND LC_NUMERIC\n')
    subprocess.run(["localedef", "-c", "-i", tmp_path / "comma", tmp_path / "xx_XX"], capture_output=True, check=False)
    program = """import locale
from slimrt import core
locale.setlocale(locale.LC_NUMERIC, "xx_XX")
assert locale.str(0.5) == "0,5"
found = core.levels("lowrank", "q2@0.5+q4*5e-05")
assert found.text == "q2@0.5+q4*5e-05" and core.levels("lowrank", found.text) == found, found"""
    told = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"LOCPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize("text", ["q5", "q2/q5@0.5", "q2++q4", "Q2", "sink=4"])
def test_types_of_levels_that_there_are_not(text):
    with pytest.raises(slimrt.UnsupportedError, match="type"):
        core.levels("lowrank", text)


def test_modes_without_levels():
    with pytest.raises(ValueError, match="^rows of cache mode 'kv' do not age: it has no levels$"):
        core.levels("kv", "q2")
    with pytest.raises(slimrt.UnsupportedError, match="type"):
        slimrt.CacheConfig("kv", "q2+q4")
    assert CACHE_MODES["lowrank"].levels((None, None)).of == (Level(None, None),)
