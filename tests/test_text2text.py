# SPDX-License-Identifier: Apache-2.0
"""Text to text: against transformers' generate() on a tiny random T5, and what is promised beyond the numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import slimrt
from scripted import ScriptedEngine, scripted_model, write_gguf
from slimrt.cli import main
from slimrt.errors import ContextOverflowError, UnsupportedError
from vocabularies import ggml

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

SHIPPED = Path(__file__).parent.parent / "models"
PAD, EOS, N_VOCAB = 0, 1, 40
INFO = {"architecture": "t5", "decoder_start_token_id": 0, "n_vocab": N_VOCAB,
        "encoder": {"n_source": 512, "inputs": "tokens", "n_inputs": 0}}  # fmt: skip


def t5_file(directory: Path, **more) -> Path:
    letters = ["\u2581" + c for c in "abcdefghijklmnopqr"] + list("abcdefghijklmnopqr")
    tokens = ["<pad>", "</s>", "<unk>", "\u2581", *letters]
    fields = ggml(model="t5", tokens=tokens, token_type=[3, 3, 2, *[1] * (len(tokens) - 3)],
                  scores=[0.0, 0.0, 0.0, *[-float(i) for i in range(len(tokens) - 3)]],
                  eos_token_id=EOS, padding_token_id=PAD, unknown_token_id=2, add_eos_token=True, add_bos_token=False,
                  add_space_prefix=True, remove_extra_whitespaces=True)  # fmt: skip
    return write_gguf(directory / "t5.gguf", "t5", fields | more)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return t5_file(tmp_path_factory.mktemp("t5"))


def reversing(source, tokens):
    """The source backwards, without its end token."""
    row = np.zeros(N_VOCAB, np.float32)
    wanted = [*source[-2::-1].tolist(), EOS]
    row[wanted[min(len(tokens) - 1, len(wanted) - 1)]] = 20
    return row


def test_a_text_and_a_list(path):
    engine = ScriptedEngine(reversing, n_seqs=3, **INFO)
    model = scripted_model(path, engine)
    result = model.text2text("a b c d")
    assert result.text == "d c b a" and result.finish_reason == "stop" and not result.truncated
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 4)
    assert result.timings.ttft > 0 and result.timings.prefill_tok_s > 0
    results = model.text2text(["a b", "c d e", "f g", "h"])
    assert [one.text for one in results] == ["b a", "e d c", "g f", "h"]
    assert engine.encodes == [1, 3, 1]
    assert model.text2text([]) == [] and model.text2text([5, 4, EOS]).tokens == (4, 5)
    assert model.text2text("a b c d", max_tokens=2).finish_reason == "length"
    assert model.text2text("a b c d", stop=" b").text == "d c"


def test_beams(path):
    engine = ScriptedEngine(reversing, n_seqs=4, **INFO)
    model = scripted_model(path, engine)
    results = model.text2text(["a b", "c d e"], num_beams=4)
    assert [one.text for one in results] == ["b a", "e d c"] and not engine.live
    assert [one.usage.completion_tokens for one in results] == [2, 3] and results[0].finish_reason == "stop"
    with pytest.raises(ValueError, match="num_beams or best_of 5.*n_seqs=5"):
        model.text2text("a", num_beams=5)
    banned = ScriptedEngine(reversing, n_seqs=4, **INFO)
    assert "b" not in scripted_model(path, banned).text2text("a b", num_beams=2, logit_bias={5: -np.inf}).text
    for bad in ({"temperature": 0.5}, {"stop": "x"}, {"logprobs": 2}, {"presence_penalty": 0.5}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}=.*does not go with num_beams=2"):
            model.text2text("a", num_beams=2, **bad)


def test_beams_where_the_cache_has_fewer_rows_than_full_contexts():
    """Searches wait for each other, since none can give up rows for another; one that may lack rows does not begin."""
    texts = ["The fox ran", "a b c", "one two three four five six seven eight"]
    asked = {"num_beams": 4, "max_tokens": 40}  # two blocks of 32 tokens for each beam
    with slimrt.Model(SHIPPED / "tale-t5.gguf", n_seqs=12, n_ctx=64) as model:
        expected = [one.text for one in model.text2text(texts, **asked)]
    with slimrt.Model(SHIPPED / "tale-t5.gguf", n_seqs=12, n_ctx=64, cache_tokens=8 * 32) as model:
        assert [one.text for one in model.text2text(texts, **asked)] == expected
        told = []
        with pytest.raises(
            ContextOverflowError, match="5 texts at once of up to 40 tokens take 10 blocks.*cache_tokens"
        ):
            model.text2text(texts, num_beams=5, max_tokens=40, on_progress=lambda *all: told.append(all))
        assert not told
    with slimrt.Model(SHIPPED / "tale-gqa.gguf", n_seqs=3, n_ctx=256, cache_tokens=256) as model:
        prompt = [5] * 70  # two blocks that the beams share
        assert len(model.generate(prompt, num_beams=3, max_tokens=20).tokens) == 20  # and one for each
        with pytest.raises(ContextOverflowError, match="3 texts at once of up to 129 tokens take 11 blocks"):
            model.generate(prompt, num_beams=3, max_tokens=60)


@pytest.mark.parametrize("beams", [1, 2])
def test_results_are_told_as_soon_as_they_are_done(path, beams):
    """The shortest first; what is told is what is returned. An exception ends the work, and nothing is left of it."""
    engine = ScriptedEngine(reversing, n_seqs=3 * beams, **INFO)
    model, told = scripted_model(path, engine), []

    def left():
        with model._runtime.use():  # what was dropped is freed at the next use
            return engine.live

    four = ["a b c", "d", "e f", "g"]
    results = model.text2text(four, num_beams=beams, on_result=lambda i, one: told.append((i, one)))
    assert [i for i, _ in told] == [1, 2, 0, 3] and not left()
    assert [one.text for _, one in sorted(told, key=lambda pair: pair[0])] == [one.text for one in results]
    assert [one.seed - results[0].seed for one in results] == [0, 1, 2, 3]

    def stop(index, one):
        raise RuntimeError(f"{index}: {one.text}")

    with pytest.raises(RuntimeError, match="1: d"):
        model.translate(["a b c", "d"], num_beams=beams, on_result=stop)
    assert not left()
    with pytest.raises(TypeError, match="on_result must be"):
        model.text2text("a", on_result=3)


def test_translate_puts_the_languages_in_front(path):
    model = scripted_model(path, ScriptedEngine(lambda source, tokens: reversing(source, tokens), **INFO))
    plain = model.translate("a b")
    told = model.translate("a b", source="aa", target="bb")
    assert plain.text == "b a" and told.usage.prompt_tokens > plain.usage.prompt_tokens
    with pytest.raises(ValueError, match="both languages"):
        model.translate("a b", source="aa")


def test_what_does_not_fit_or_is_not_for_it(path):
    model = scripted_model(path, ScriptedEngine(reversing, **INFO))
    with pytest.raises(ContextOverflowError, match="513 tokens, the encoder takes 512"):
        model.text2text([5] * 513)
    with pytest.raises(ValueError, match="not in the vocabulary"):
        model.text2text([5, N_VOCAB])
    with pytest.raises(ValueError, match="no tokens"):
        model.text2text([[]])
    with pytest.raises(
        UnsupportedError, match="is an encoder-decoder of texts .*cannot transcribe.*Whisper.*use slimrt text2text"
    ):
        model.transcribe(np.zeros(16000, np.float32))
    with pytest.raises(UnsupportedError, match="cannot continue a text.*use slimrt text2text"):
        model.stream("a")


@pytest.fixture(scope="module")
def tiny_t5():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.T5Config(
        vocab_size=N_VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, initializer_factor=2.0,
        decoder_start_token_id=0, pad_token_id=PAD, eos_token_id=EOS, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():  # the end is nearly as likely as tokens that come often
        model.lm_head.weight.normal_(0, 0.5)
        said = model.generate(torch.arange(3, 35).reshape(8, 4), max_new_tokens=12, do_sample=False)
        often = torch.bincount(said[:, 2:].flatten(), minlength=N_VOCAB).argmax()
        model.lm_head.weight[EOS] = 0.9 * model.lm_head.weight[often]
    return model


@pytest.mark.oracle
@pytest.mark.parametrize("beams", [1, 2, 4])
@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("forced", [None, 7])
def test_results_are_those_of_hugging_face(tmp_path, tiny_t5, beams, penalty, early, forced):
    """A forced token is no part of the result, but of the length that a score is divided by."""
    if beams == 1 and (penalty != 1.0 or early):
        pytest.skip("greedy search has neither")
    torch = pytest.importorskip("torch")
    from hf_engine import t5_engine

    first = {} if forced is None else {"slimrt.text2text.forced_bos_token_id": forced}
    model = scripted_model(t5_file(tmp_path, **first), t5_engine(tiny_t5, n_seqs=2 * beams))
    rng = np.random.default_rng(0)
    ended = 0
    for _ in range(8):
        source = [*rng.integers(3, N_VOCAB, 6).tolist(), EOS]
        ours = model.text2text(source, num_beams=beams, length_penalty=penalty, early_stopping=early, max_tokens=12)
        with torch.no_grad():
            options = {"length_penalty": penalty, "early_stopping": early} if beams > 1 else {}
            theirs = tiny_t5.generate(
                torch.tensor([source]), num_beams=beams, max_new_tokens=12 + len(first), do_sample=False,
                forced_bos_token_id=forced, **options,
            )[0].tolist()[1 + len(first) :]  # fmt: skip
        wanted = theirs[: theirs.index(EOS)] if EOS in theirs else theirs
        assert list(ours.tokens) == wanted, source
        ended += ours.finish_reason == "stop"
    assert ended > 0 or beams == 1 or (penalty >= 1 and not early)  # then longer ones win


def test_what_continues_texts_is_refused_with_what_to_use(capsys, tmp_path):
    """Sessions, too: a file of rows says nothing of the source they belong to."""
    path = SHIPPED / "tale-t5.gguf"
    with slimrt.Model(path) as model:
        calls = [model.session, lambda: model.load_session(tmp_path / "s"), lambda: model.logits([1]),
                 lambda: model.score("ab"), lambda: model.perplexity("ab"), lambda: model.generate("ab"),
                 lambda: list(model.stream("ab")), lambda: model.chat([{"role": "user", "content": "a"}]),
                 lambda: slimrt.compare_caches(path, "ab", ["kv:q8"])]  # fmt: skip
        for call in calls:
            with pytest.raises(
                UnsupportedError, match="encoder-decoder.* cannot continue a text .*use slimrt text2text"
            ):
                call()
    for verb in (["generate", "-p", "a"], ["chat"], ["bench", "-p", "8"], ["perplexity", "-p", "a b"]):
        assert main([verb[0], str(path), *verb[1:]]) == 1
        assert "cannot continue a text by itself: use slimrt text2text or translate" in capsys.readouterr().err
