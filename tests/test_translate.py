# SPDX-License-Identifier: Apache-2.0
"""Translation from text to text beside transformers: tokenizer, languages, model, search; tiny random models."""

from __future__ import annotations

import re

import numpy as np
import pytest

import slimrt
from slimrt.cli import main
from slimrt.errors import UnsupportedError
from test_tokenizer_pieces import m2m100_directory, marian_directory
from test_tokenizer_seq2seq import theirs

pytestmark = [pytest.mark.unsanitized, pytest.mark.filterwarnings("ignore")]  # Python: the core is tested by others

TEXTS = ["We hold these truths.", "All men, and", "Gr\u00f6\u00dfe \u4f60"]
SIZES = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 96, "init_std": 0.2,
    "forced_eos_token_id": None,
}  # fmt: skip
CASES = {  # the model's class, the languages of text and translation, as users name them and as transformers does
    "bart": ("Bart", None, None),
    "mbart": ("MBart", ("en_XX", "ro"), ("en_XX", "ro_RO")),
    "mbart50": ("MBart", ("en_XX", "de_DE"), ("en_XX", "de_DE")),
    "nllb": ("M2M100", ("eng", "deu_Latn"), ("eng_Latn", "deu_Latn")),
    "nllb-legacy": ("M2M100", ("eng_Latn", "fra_Latn"), ("eng_Latn", "fra_Latn")),
    "m2m100": ("M2M100", ("en", "de"), ("en", "de")),
    "marian": ("Marian", None, None),
    "pegasus": ("Pegasus", None, None),
}
N = 12


def saved(name: str, directory):
    """A model and its tokenizer in a directory; both as transformers loads them."""
    torch, transformers = (pytest.importorskip(one) for one in ("torch", "transformers"))
    if name == "marian":
        marian_directory(directory)
        oracle = transformers.MarianTokenizer.from_pretrained(directory)
    elif name == "m2m100":
        m2m100_directory(directory)
        oracle = transformers.M2M100Tokenizer.from_pretrained(directory)
    else:
        oracle, _ = theirs(name, directory)
        oracle.save_pretrained(directory)
    family = CASES[name][0]
    kind = getattr(transformers, "MarianMTModel" if family == "Marian" else f"{family}ForConditionalGeneration")
    ids = {"pad_token_id": oracle.pad_token_id, "eos_token_id": oracle.eos_token_id}
    start = oracle.pad_token_id if family in ("Marian", "Pegasus") else oracle.eos_token_id
    if name == "mbart":
        start = None  # whoever translates says it
    config = kind.config_class(vocab_size=len(oracle) + 3, decoder_start_token_id=start, **ids | SIZES)
    torch.manual_seed(5)
    model = kind(config).eval()
    if name == "bart":
        model.generation_config.forced_bos_token_id = 0
    if name == "marian":
        model.generation_config.bad_words_ids = [[oracle.pad_token_id]]
        model.generation_config.renormalize_logits = True
        model.final_logits_bias[0, oracle.pad_token_id] = 50  # so that it would be chosen
    model.save_pretrained(directory)
    return model, oracle


@pytest.mark.parametrize("name", CASES)
def test_texts_are_those_of_transformers(name, tmp_path):
    """Greedy and by beams, one by one there and together here."""
    model, oracle = saved(name, tmp_path)
    _, named, theirs_ = CASES[name]
    options = {}
    if theirs_:
        oracle.src_lang, code = theirs_
        target = oracle.convert_tokens_to_ids(f"__{code}__" if name == "m2m100" else code)
        options = {"decoder_start_token_id": target} if name == "mbart" else {"forced_bos_token_id": target}
    n_first = 2 if "forced_bos_token_id" in options or name == "bart" else 1
    languages = dict(zip(("source", "target"), named, strict=True)) if named else {}
    with slimrt.Model(tmp_path, n_seqs=8, n_ctx=64, cache_type="f32", cross_type="f32", progress=False) as ours:
        for beams in (1, 3):
            results = ours.translate(TEXTS, **languages, max_tokens=N, num_beams=beams)
            for text, mine in zip(TEXTS, results, strict=True):
                ids = model.generate(
                    **oracle(text, return_tensors="pt"), **options, num_beams=beams, do_sample=False,
                    max_new_tokens=N + n_first - 1, early_stopping=False,
                )[0].tolist()  # fmt: skip
                wanted = [id for id in ids[n_first:] if id not in (oracle.eos_token_id, oracle.pad_token_id)]
                assert list(mine.tokens) == wanted, (beams, text)
                assert mine.text == oracle.decode(ids, skip_special_tokens=True)


def test_languages_that_a_model_needs(tmp_path, capsys):
    saved("nllb", tmp_path)
    with slimrt.Model(tmp_path, n_seqs=4, n_ctx=64, progress=False) as model:
        several = sorted(one for one in ("zho_Hans", "zho_Hant"))
        wrong = [
            ({}, "name both languages, source and target: this model needs them, such as ace_Arab"),
            ({"source": "eng_Latn"}, "name both languages"),
            ({"source": "eng_Latn", "target": "deu_Lat"}, "no language 'deu_Lat'; of the 202 that it knows: deu_Latn"),
            ({"source": "eng", "target": "zho"}, f"no language 'zho'.*{', '.join(several)}"),
        ]
        for languages, match in wrong:
            with pytest.raises(ValueError, match=match):
                model.translate("We hold", **languages)
        with pytest.raises(ValueError, match="a text of this model is in a language, which has to be named"):
            model.text2text("We hold")
        with pytest.raises(ValueError, match="a text of this model is in a language, which has to be named"):
            model.create_embedding("We hold")
        with pytest.raises(UnsupportedError, match="is an encoder-decoder of texts .*use slimrt text2text or trans"):
            model.generate("We hold")
        ids = model.tokenize("We hold")
        by_hand = [model.tokenize("eng_Latn")[0], *ids]  # without the target's token in front
        assert model.text2text(by_hand, max_tokens=3).usage.prompt_tokens == len(by_hand)
        assert model.embed(by_hand).shape == (32,)
    flags = ["-n", "4", "--num-beams", "1", "-q"]
    assert main(["translate", str(tmp_path), "-p", "We hold", "--source", "eng", "--target", "deu", *flags]) == 0
    assert main(["translate", str(tmp_path), "-p", "We hold", *flags]) == 1
    assert re.search("error: name both languages", capsys.readouterr().err)
    with pytest.raises(SystemExit, match="2"):  # before a model is loaded
        main(["translate", "none.gguf", "-p", "We hold", "--source", "eng"])
    assert "--source needs --target" in capsys.readouterr().err


def test_languages_in_front_of_a_text(tmp_path):
    """Marian's models of several target languages; of one language none is taken, BART takes none."""
    torch, transformers = (pytest.importorskip(one) for one in ("torch", "transformers"))
    marian_directory(tmp_path, more=(">>fra<<", ">>deu<<"))
    oracle = transformers.MarianTokenizer.from_pretrained(tmp_path)
    config = transformers.MarianConfig(
        vocab_size=len(oracle), decoder_start_token_id=oracle.pad_token_id, pad_token_id=oracle.pad_token_id,
        eos_token_id=oracle.eos_token_id, **SIZES,
    )  # fmt: skip
    torch.manual_seed(5)
    transformers.MarianMTModel(config).save_pretrained(tmp_path)
    with slimrt.Model(tmp_path, n_ctx=64, progress=False) as model:
        said = model.translate(">>fra<< We hold", max_tokens=6)
        assert model.translate("We hold", target="fra", max_tokens=6).tokens == said.tokens
        assert model.translate("\n >>fra<< We hold", max_tokens=6).usage.prompt_tokens == said.usage.prompt_tokens
        assert said.usage.prompt_tokens == len(oracle(">>fra<< We hold").input_ids)
        for languages, match in (
            ({}, "name the target language, such as fra, deu"),
            ({"target": "ita"}, "knows no language 'ita'"),
            ({"source": "eng", "target": "fra"}, "sees by itself which language a text is in"),
        ):
            with pytest.raises(ValueError, match=match):
                model.translate("We hold", **languages)
        assert model.text2text(">>fra<< We hold", max_tokens=6).tokens == said.tokens
        with pytest.raises(ValueError, match=r"name the target language.*in front of the text: >>fra<< We hold$"):
            model.text2text("We hold")


def test_tokens_that_never_come(tmp_path):
    """bad_words_ids of one token, if scores are normalised without them, become a logit that is never the largest."""
    model, oracle = saved("marian", tmp_path)
    with slimrt.Model(tmp_path, n_ctx=64, progress=False) as ours, ours._runtime.use() as engine:
        sequence = engine.new_sequence()
        engine.encode([(sequence, np.array([5, 6, 0], np.int32))])
        logits = engine.append([(sequence, np.array([oracle.pad_token_id], np.int32))])[0]
    assert logits[oracle.pad_token_id] < -9000 and np.isfinite(logits).all()


def test_a_full_context_is_answered_with_what_is_possible(tmp_path, capsys):
    """A table of positions does not grow; more tokens do not help either."""
    _, oracle = saved("bart", tmp_path)
    call = ["text2text", str(tmp_path), "-p", "We hold", "-n", "-1", "--logit-bias", f"{oracle.eos_token_id}=-1000"]
    for more, advice in (
        (["-n", "4"], "1 of 1 texts are cut off at 4 tokens; -n makes room\n"),
        (["-c", "32"], "1 of 1 texts are cut off at a full context; a larger context (n_ctx, --ctx) makes room, up to"),
        ([], "1 of 1 texts are cut off at a full context; the model has positions for no more\n"),
    ):
        assert main([*call, *more]) == 0
        assert advice in capsys.readouterr().err
