# SPDX-License-Identifier: Apache-2.0
"""A model's own generation settings and the options of the same names, beside transformers' generate()."""

from __future__ import annotations

import json
import warnings
from collections import Counter

import numpy as np
import pytest
from gguf import GGUFValueType

import slimrt
from slimrt.cli import main
from slimrt.errors import ModelFormatError
from slimrt.generation.options import Options
from slimrt.modelfile.gguf import array, read_gguf, string, uint32, write_gguf
from slimrt.modelfile.hf.directory import read_hf

pytestmark = [pytest.mark.oracle, pytest.mark.unsanitized, pytest.mark.filterwarnings("ignore")]  # Python alone

N_VOCAB, PAD, BOS, END, START = 40, 1, 0, 2, 3
BART = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64, "init_std": 0.3,
}  # fmt: skip
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
         "max_position_embeddings": 64, "initializer_range": 0.3}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "initializer_range": 0.3}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "initializer_factor": 2.0,
      "tie_word_embeddings": False}  # fmt: skip
FAMILIES = {
    "Bart": ("BartForConditionalGeneration", BART),
    "MBart": ("MBartForConditionalGeneration", BART),
    "M2M100": ("M2M100ForConditionalGeneration", BART),
    "Marian": ("MarianMTModel", BART),
    "Pegasus": ("PegasusForConditionalGeneration", BART),
    "T5": ("T5ForConditionalGeneration", T5),
    "Llama": ("LlamaForCausalLM", LLAMA),
    "GPT2": ("GPT2LMHeadModel", GPT2),
}
SEQ2SEQ = list(FAMILIES)[:6]
SOURCES = [[*ids, END] for ids in np.random.default_rng(1).integers(4, 12, (5, 8)).tolist()]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", *LETTERS, *("\u2581" + one for one in LETTERS[: N_VOCAB - 31])]
PLAIN = {"do_sample": False, "num_beams": 1, "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": BOS}


class Pair:
    """A model of transformers, and what slimrt makes of it.

    Args:
        settings: of generation_config.json; a callable is given the model, and returns them.
    """

    def __init__(self, family: str, directory, **settings):
        import torch
        import transformers

        name, sizes = FAMILIES[family]
        kind = getattr(transformers, name)
        torch.manual_seed(4)
        ids = {"pad_token_id": PAD, "eos_token_id": END, "bos_token_id": BOS}
        start = {"decoder_start_token_id": START} if family in SEQ2SEQ else {}
        self.theirs = kind(kind.config_class(vocab_size=N_VOCAB, **ids, **start, **sizes)).eval()
        if family == "T5":  # whose logits are large, and all else as likely as nothing
            self.theirs.lm_head.weight.data.normal_(0, 0.3)
        self.directory, self.encoder = directory, family in SEQ2SEQ
        self.theirs.generation_config = transformers.GenerationConfig(**PLAIN | start | settings)
        self._said = PLAIN | start | settings

    def wanted(self, source, **options) -> list[int]:
        """transformers' text, without what its settings begin it with and without its end."""
        import torch

        given, forced = torch.tensor([source]), self._said.get("forced_bos_token_id") is not None
        with torch.no_grad():
            ids = self.theirs.generate(given, attention_mask=torch.ones_like(given), **options)[0].tolist()
        ids = ids[1 + forced :] if self.encoder else ids[len(source) :]
        return ids[: ids.index(END)] if END in ids else ids

    def saved(self, **changes):
        """The GGUF file, with a vocabulary that says what ends a text."""
        self.theirs.save_pretrained(self.directory)  # makes the directory
        tokens = {
            "model": string("llama"), "tokens": array(TOKENS, GGUFValueType.STRING), "unknown_token_id": uint32(3),
            "scores": array([0.0] * N_VOCAB, GGUFValueType.FLOAT32), "eos_token_id": uint32(END),
            "token_type": array([3 if id < 4 else 1 for id in range(N_VOCAB)], GGUFValueType.INT32),
        }  # fmt: skip
        model, self.warnings = read_hf(self.directory)
        path = self.directory / "model.gguf"
        vocabulary = {f"tokenizer.ggml.{name}": value for name, value in tokens.items()}
        write_gguf(path, model.with_metadata(vocabulary | changes), show_progress=False)
        return path

    def open(self, **options):
        cross = {"cross_type": "f32"} if self.encoder else {}
        return slimrt.Model(self.saved(), **{"n_ctx": 64, "cache_type": "f32", "progress": False} | cross | options)

    def often(self, n: int) -> list[int]:
        """Ids that its texts have most often, and others."""
        said = Counter(id for source in SOURCES for id in self.wanted(source, max_new_tokens=16))
        return [*(id for id, _ in said.most_common(n)), *(id for id in range(4, 4 + 2 * n) if id not in said)][:n]


def written(model, sources, **options):
    write = model.generate if model.info().get("encoder") is None else model.text2text
    return write(sources, **options)


SETTINGS = {
    "lengths": {"min_length": 9, "max_length": 14, "forced_eos_token_id": END},
    "new tokens": {"min_new_tokens": 7, "min_length": 9, "max_new_tokens": 10, "forced_bos_token_id": BOS},
    "n-grams": {"no_repeat_ngram_size": 2, "max_length": 24},
    "no token twice": {"no_repeat_ngram_size": 1, "max_length": 24},
    "n-grams of the source": {"encoder_no_repeat_ngram_size": 1, "max_length": 16},
    "a summary": {"no_repeat_ngram_size": 3, "min_length": 12, "max_length": 21, "length_penalty": 2.0,
                  "early_stopping": True, "forced_eos_token_id": END, "forced_bos_token_id": BOS},
    "a short one": {"no_repeat_ngram_size": 2, "max_length": 12, "length_penalty": 0.6, "forced_eos_token_id": END},
}  # fmt: skip


@pytest.mark.parametrize("family", SEQ2SEQ)
@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("beams", [1, 4])
def test_texts_of_encoder_decoders_are_those_of_transformers(family, case, beams, tmp_path):
    settings = PLAIN | SETTINGS[case] | {"num_beams": beams}
    if beams == 1:  # which transformers refuses beside these
        settings = {key: value for key, value in settings.items() if key not in ("length_penalty", "early_stopping")}
    pair = Pair(family, tmp_path, **settings)
    with pair.open(n_seqs=2 * beams) as model:
        ours = [list(one.tokens) for one in written(model, SOURCES)]
    assert ours == [pair.wanted(source) for source in SOURCES]


def words(pair: Pair) -> dict:
    """Settings that rule out what the model would say most."""
    first, second, third, fourth, fifth, *_ = pair.often(8)
    return {"suppress_tokens": [first], "begin_suppress_tokens": [second, third],
            "bad_words_ids": [[fourth], [second, second], [third, fifth], [END]]}  # fmt: skip


@pytest.mark.parametrize("family", ["Bart", "Marian", "T5", "Llama"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("renormalize", [False, True])
def test_words_that_never_come(family, beams, renormalize, tmp_path):
    """With renormalize_logits, as Marian's models have it, scores of beams do not count what may not come."""
    pair = Pair(family, tmp_path)
    for name, ids in words(pair).items():
        setattr(pair.theirs.generation_config, name, ids)
    pair.theirs.generation_config.renormalize_logits = renormalize
    with pair.open(n_seqs=2 * beams) as model:
        ours = [list(one.tokens) for one in written(model, SOURCES, num_beams=beams, max_tokens=14, temperature=0.0)]
    assert ours == [pair.wanted(source, num_beams=beams, max_new_tokens=14) for source in SOURCES]


PROMPTED = {  # settings of models that continue texts: a prompt counts in lengths and sequences
    "n-grams of prompt and text": {"no_repeat_ngram_size": 2},
    "length with its prompt": {"min_length": 19},
    "length without it": {"min_new_tokens": 6, "min_length": 18, "forced_eos_token_id": END},
    "all": {"no_repeat_ngram_size": 3, "min_length": 17, "forced_eos_token_id": END, "suppress_tokens": [5, 6]},
}


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
@pytest.mark.parametrize("case", PROMPTED)
@pytest.mark.parametrize("beams", [1, 3])
def test_texts_of_language_models_are_those_of_transformers(family, case, beams, tmp_path):
    pair = Pair(family, tmp_path, **PROMPTED[case])
    with pair.open(n_seqs=2 * beams) as model:
        ours = model.generate(SOURCES, num_beams=beams, max_tokens=12, temperature=0.0)
        if beams == 1:
            with model.stream(SOURCES[0], max_tokens=12, temperature=0.0) as stream:
                assert "".join(stream) == ours[0].text and stream.result.tokens == ours[0].tokens
            twice = model.generate(SOURCES[0], n=2, max_tokens=12, temperature=0.0)  # which share the prompt's rows
            looked_up = model.generate(SOURCES[0], lookup=True, max_tokens=12, temperature=0.0)
            assert {one.tokens for one in (*twice, looked_up)} == {ours[0].tokens}
        answer = model.create_completion(SOURCES[0], num_beams=beams, max_tokens=12, temperature=0.0)
        assert answer["choices"][0]["text"] == ours[0].text
    wanted = [pair.wanted(source, num_beams=beams, max_new_tokens=12) for source in SOURCES]
    assert [list(one.tokens) for one in ours] == wanted
    forced = "forced_eos_token_id" in PROMPTED[case]
    for one in ours:  # a text that had to end where it did was cut off
        assert len(one.tokens) <= 12 - forced
        assert one.finish_reason == ("length" if len(one.tokens) == 12 - forced else "stop")


@pytest.mark.parametrize("family", ["Bart", "T5", "Llama"])
@pytest.mark.parametrize("beams", [1, 3])
def test_options_count_before_settings(family, beams, tmp_path):
    settings = {
        "no_repeat_ngram_size": 1,
        "min_length": 30,
        "suppress_tokens": [7, 8],
        "num_beams": 2,
        "max_length": 40,
    }
    pair = Pair(family, tmp_path, **settings)
    never = pair.often(1)
    with pair.open(n_seqs=2 * beams) as model:
        for ours, theirs in (
            ({"no_repeat_ngram_size": 0, "min_tokens": 0}, {"no_repeat_ngram_size": 0, "min_length": 0}),
            ({"no_repeat_ngram_size": 2, "min_tokens": 9}, {"no_repeat_ngram_size": 2, "min_new_tokens": 9}),
            ({"suppress_tokens": [], "min_tokens": 2}, {"suppress_tokens": [], "min_length": 0, "min_new_tokens": 2}),
            ({"suppress_tokens": never, "min_tokens": 0, "no_repeat_ngram_size": 3},
             {"suppress_tokens": never, "min_length": 0, "no_repeat_ngram_size": 3}),
        ):  # fmt: skip
            made = written(model, SOURCES, num_beams=beams, max_tokens=14, temperature=0.0, **ours)
            wanted = [pair.wanted(source, num_beams=beams, max_new_tokens=14, **theirs) for source in SOURCES]
            assert [list(one.tokens) for one in made] == wanted, ours


def test_sampled_texts_keep_to_them_too(tmp_path):
    """At a high temperature everything comes, but for what may not; a seed gives the same alone and together."""
    pair = Pair("Llama", tmp_path)
    options = {"no_repeat_ngram_size": 1, "suppress_tokens": [9, 11], "min_tokens": 6, "temperature": 5.0, "top_k": 0,
               "top_p": 1.0, "min_p": 0.0, "max_tokens": 12}  # fmt: skip
    prompts = [source[:-1] for source in SOURCES[:4]]  # an end in a prompt would not come twice either
    with pair.open(n_seqs=4) as model:
        texts = [one for i in range(12) for one in model.generate(prompts, seed=4 * i, **options)]
        assert model.generate(prompts, seed=0, **options | {"no_repeat_ngram_size": True})[0].tokens == texts[0].tokens
        assert {len(one.tokens) for one in texts} > {12} and min(len(one.tokens) for one in texts) >= 6
        for i, one in enumerate(texts):
            assert len({*prompts[i % 4], *one.tokens}) == len(set(prompts[i % 4])) + len(one.tokens)
            assert {9, 11}.isdisjoint(one.tokens)
        assert model.generate(prompts[1], seed=1, **options).tokens == texts[1].tokens
        run = model._run(SOURCES[0], Options(temperature=0.0), 0, None, 0.0)
        assert run.bans is None and run._sampler.n_deciding(100) == 1  # nothing asked for: a device finds the token


def test_settings_go_with_a_file(tmp_path, capsys):
    """inspect shows them; a file that is converted again keeps them, and the token that outputs begin with."""
    settings = SETTINGS["a summary"] | {"num_beams": 3, "bad_words_ids": [[5, 6], [7]], "repetition_penalty": 1.2}
    pair = Pair("Bart", tmp_path, **settings)
    path = pair.saved()
    assert pair.warnings[-1].endswith("not applied, so that texts may differ: repetition_penalty")
    assert main(["convert", str(path), "-o", str(tmp_path / "again.gguf"), "-q"]) == 0
    for file in (path, tmp_path / "again.gguf"):
        assert main(["inspect", str(file)]) == 0
        shown = capsys.readouterr().out
        lines = ("no_repeat_ngram_size = 3", "min_length = 12", "max_length = 21", "forced_eos_token_id = 2",
                 "length_penalty = 2.0", "early_stopping = True", "num_beams = 3",
                 "bad_words_ids = [5, 6, -1, 7, -1]")  # fmt: skip
        for line in lines:
            assert f"slimrt.generation.{line}\n" in shown
        assert "slimrt.text2text.forced_bos_token_id = 0" in shown
        found = slimrt.ModelSource(file).settings
        assert (found.bad_words_ids, found.num_beams, found.min_length) == (((5, 6), (7,)), 3, 12)
    assert slimrt.ModelSource(Pair("GPT2", tmp_path / "gpt2", **PROMPTED["all"]).saved()).settings.num_beams == 0


@pytest.mark.parametrize("beams", [1, 2])
def test_true_among_suppressed_tokens_is_token_1(tiny, beams):
    """A list of it is a mask to NumPy: a server answered 500."""
    with slimrt.Model(tiny, n_ctx=64, n_seqs=2) as model:
        texts = [
            model.generate([1, 30], max_tokens=9, temperature=0.0, num_beams=beams, suppress_tokens=never).tokens
            for never in ([True], [1])
        ]
    assert texts[0] == texts[1] and 1 not in texts[0]


def test_tokens_that_llama_cpp_suppresses_never_come(tiny, tmp_path):
    """Its converter writes them into files of Gemma 4; ids beyond the vocabulary say nothing there either."""
    with slimrt.Model(tiny) as model:
        plain = model.generate("hello", max_tokens=3, temperature=0.0).tokens
    never = {"tokenizer.ggml.suppress_tokens": array([plain[0], 1 << 20, -1], GGUFValueType.INT32)}
    write_gguf(tmp_path / "m.gguf", read_gguf(tiny).with_metadata(never), show_progress=False)
    with slimrt.Model(tmp_path / "m.gguf") as model:
        assert plain[0] not in model.generate("hello", max_tokens=3, temperature=0.0).tokens
        assert model.generate("hello", max_tokens=3, temperature=0.0, suppress_tokens=[]).tokens == plain


def test_beams_find_their_sequences(tmp_path, capsys):
    """A model is loaded with as many as its own settings take; with fewer a warning says what that means."""
    pair = Pair("Bart", tmp_path, **SETTINGS["a summary"] | {"num_beams": 3})
    wanted = [pair.wanted(source) for source in SOURCES[:2]]
    with pair.open() as model:
        assert model.info()["n_seqs"] == 3
        assert [list(one.tokens) for one in model.text2text(SOURCES[:2])] == wanted
        sampled = model.text2text(SOURCES[0], temperature=1.0, seed=1)  # goes with no beams: the others still count
        assert len(sampled.tokens) <= 19
        alone = model.text2text(SOURCES[0], num_beams=1)
        assert list(alone.tokens) == pair.wanted(SOURCES[0], num_beams=1, early_stopping=False, length_penalty=1.0)
    with pair.open(n_seqs=1) as model:
        with pytest.warns(UserWarning, match="num_beams=3.* 1 beams are what it has: load it with n_seqs=3"):
            assert model.text2text(SOURCES[0]).tokens == alone.tokens
        with warnings.catch_warnings(action="error"):
            assert model.text2text(SOURCES[0], num_beams=1).tokens == alone.tokens
    flags = ["-p", "a bad cab", "--json", "--ctx", "64", "--cache-type", "f32", "-q"]
    for more, beams in ([], 3), (["--num-beams", "1"], 1), (["--temp", "0.5", "-s", "1"], 1):
        assert main(["text2text", str(tmp_path / "model.gguf"), *flags, *more]) == 0
        with slimrt.Model(tmp_path / "model.gguf", n_ctx=64, cache_type="f32") as model:
            options = {"temperature": 0.5, "seed": 1} if "--temp" in more else {}
            wanted = model.text2text("a bad cab", num_beams=beams, **options)
        assert json.loads(capsys.readouterr().out)["tokens"] == list(wanted.tokens)


def test_a_length_of_20_is_one_where_the_model_says_it(tmp_path):
    """In config.json it is what transformers used to write into every file."""
    pair = Pair("Bart", tmp_path, max_length=20, min_length=20)
    with pair.open() as model:
        assert list(model.text2text(SOURCES[0]).tokens) == pair.wanted(SOURCES[0])


def test_what_is_not_applied_is_named(tmp_path):
    Pair("Bart", tmp_path).saved()
    path = tmp_path / "generation_config.json"
    plain = json.loads(path.read_text())
    left_out = {"early_stopping": "never", "stop_strings": ["x"], "force_words_ids": [[5]], "max_time": 9.0}
    path.write_text(json.dumps(plain | left_out))
    assert [name for name in left_out if name in read_hf(tmp_path)[1][-1]] == list(left_out)
    path.write_text(json.dumps(plain | {"stop_strings": [], "token_healing": False, "early_stopping": None}))
    assert not [warning for warning in read_hf(tmp_path)[1] if "not applied" in warning]


def test_config_json_counts_where_there_is_nothing_else(tmp_path):
    """As in transformers: also what the model type begins with, and no usual length."""
    pair = Pair("Pegasus", tmp_path)
    pair.saved()
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("forced_eos_token_id")
    config |= {"num_beams": 2, "max_length": 20, "min_length": 0, "suppress_tokens": [5, N_VOCAB]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = {key: one.value for key, one in read_hf(tmp_path)[0].metadata.items() if "generation." in key}
    wanted = {"num_beams": 2, "forced_eos_token_id": 1, "suppress_tokens": [5]}  # no other id ever comes
    assert found == {f"slimrt.generation.{name}": value for name, value in wanted.items()}


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_length", -1), ("num_beams", "4"), ("length_penalty", "2"), ("suppress_tokens", ["5"]),
     ("suppress_tokens", 5), ("length_penalty", 41), ("forced_eos_token_id", N_VOCAB), ("bad_words_ids", [[3, -1]]),
     ("no_repeat_ngram_size", True), ("bad_words_ids", [[]]), ("early_stopping", 1), ("early_stopping", "yes")],
)  # fmt: skip
def test_settings_that_are_none_are_refused(name, value, tmp_path):
    Pair("T5", tmp_path).saved()
    said = json.loads((tmp_path / "generation_config.json").read_text()) | {name: value}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(ModelFormatError, match=f"generation_config.json: {name} is .*not such a setting"):
        read_hf(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_length", string("5")), ("forced_eos_token_id", uint32(N_VOCAB)), ("early_stopping", uint32(1)),
     ("suppress_tokens", array([-1], GGUFValueType.INT32)), ("bad_words_ids", array([N_VOCAB], GGUFValueType.INT32)),
     ("length_penalty", string("x"))],
)  # fmt: skip
def test_broken_settings_of_a_file_are_refused(name, value, tmp_path):
    path = Pair("T5", tmp_path).saved(**{f"slimrt.generation.{name}": value})
    with pytest.raises(ModelFormatError, match=rf"slimrt\.generation\.{name} is .*which is not such a setting"):
        slimrt.Model(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is more than max_tokens=8"),
        ({"min_tokens": -1}, "min_tokens must not be negative"),
        ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size must not be negative"),
        ({"suppress_tokens": [N_VOCAB]}, f"suppress_tokens names token {N_VOCAB}, the vocabulary has {N_VOCAB}"),
        ({"suppress_tokens": [-1]}, "suppress_tokens names token -1"),
        ({"min_tokens": 2, "choice": ["a"]}, "min_tokens does not go with choice"),
        ({"suppress_tokens": list(range(N_VOCAB))}, "every logit is -infinity|no token is left"),
    ],
)
def test_options_that_are_wrong(options, message, tmp_path):
    with Pair("Llama", tmp_path).open() as model:
        with pytest.raises(ValueError, match=message):
            model.generate(SOURCES[0], **options)
        for name, value in (("min_tokens", "2"), ("no_repeat_ngram_size", 1.5), ("suppress_tokens", "5")):
            with pytest.raises(TypeError, match=name):
                model.generate(SOURCES[0], **{name: value})
        with pytest.raises(TypeError, match="no min_new_tokens: here it is called min_tokens"):
            model.generate(SOURCES[0], min_new_tokens=2)
        with pytest.raises(TypeError, match="no forced_eos_token_id: the model's own generation settings say it"):
            model.generate(SOURCES[0], forced_eos_token_id=2)


def test_more_beams_than_any_memory_holds(tmp_path):
    path = Pair("T5", tmp_path).saved(**{"slimrt.generation.num_beams": uint32(2**31 - 1)})
    with pytest.raises((slimrt.WontFitError, ValueError)):
        slimrt.Model(path, progress=False)
    with slimrt.Model(path, n_seqs=1, n_ctx=64, progress=False) as model:
        assert model.text2text(SOURCES[0], num_beams=1, max_tokens=3).tokens
