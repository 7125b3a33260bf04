# SPDX-License-Identifier: Apache-2.0
"""Whisper's and Moonshine's front ends over tiny random models of transformers, against its generate()."""

from __future__ import annotations

import numpy as np
import pytest

from scripted import (
    DE,
    EN,
    END,
    N_VOCAB,
    NO_TIMES,
    PREVIOUS,
    START,
    TIME,
    TRANSCRIBE,
    TRANSLATE,
    scripted_model,
    whisper_fields,
    whisper_file,
    write_gguf,
)
from slimrt.errors import UnsupportedError
from slimrt.speech.mel import log_mel
from test_transcribe import sound

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def torch():
    """Not imported before it is needed: that takes 11 s under sanitizers, where no test here runs."""
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tiny_whisper(torch, transformers):
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=N_VOCAB, num_mel_bins=80, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=END, bos_token_id=END,
        eos_token_id=END, decoder_start_token_id=START, init_std=0.3,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    facts = {
        "lang_to_id": {"<|en|>": EN, "<|de|>": DE}, "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        "is_multilingual": True, "no_timestamps_token_id": NO_TIMES, "max_initial_timestamp_index": 50,
        "begin_suppress_tokens": [ord(" "), END], "prev_sot_token_id": PREVIOUS, "max_length": None,
    }  # fmt: skip
    for name, value in facts.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_whisper_says_what_hugging_face_says(tmp_path, torch, tiny_whisper, timestamps, task):
    """A full window, greedily, 30 tokens: prompt and rules. Both hear our spectrogram: a random model is not sure of
    much, and theirs differs by 5e-5."""
    from hf_engine import HfEngine

    samples = np.concatenate([sound((1.0, 0.1 * (i % 7))) for i in range(30)])
    mel = torch.tensor(log_mel(samples, 80, padding=480000)[:3000].T[None])
    tiny_whisper.generation_config.suppress_tokens = [ord("#"), *range(END + 1, TIME if timestamps else N_VOCAB)]
    theirs = tiny_whisper.generate(
        mel, language="de", task=task, return_timestamps=timestamps, max_new_tokens=30, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    wanted = (theirs["segments"][0][0]["result"]["sequences"] if timestamps else theirs["sequences"][0]).flatten()
    engine = HfEngine(
        tiny_whisper, lambda window: tiny_whisper.model.encoder(torch.tensor(window.T[None])).last_hidden_state,
        architecture="whisper", encoder={"n_source": 1500, "inputs": "mel", "n_inputs": 80},
    )  # fmt: skip
    engine.info()["n_ctx"] = 60  # half of it is for the text
    model = scripted_model(whisper_file(tmp_path / "whisper.gguf"), engine)
    segments, info = model.transcribe(
        samples, language="de", task=task, timestamps=timestamps, temperature=0.0, compression_ratio_threshold=None,
        logprob_threshold=None, no_speech_threshold=None,
    )  # fmt: skip
    prompt = 3 if timestamps else 4
    said = [token for segment in segments for token in segment.tokens]
    wanted = wanted[prompt:].tolist()
    assert info.language == "de" and len(said) > 3 and len(wanted) == 30
    first = len(segments[0].tokens)
    assert list(segments[0].tokens) == wanted[:first]
    assert timestamps or first == 30


def test_whisper_detects_the_language_hugging_face_detects(tmp_path, torch, transformers, tiny_whisper):
    from hf_engine import HfEngine

    samples = sound((30.0, 0.2))
    mel = transformers.WhisperFeatureExtractor()(samples, sampling_rate=16000, return_tensors="pt").input_features
    theirs = int(tiny_whisper.detect_language(mel)[0])
    engine = HfEngine(
        tiny_whisper, lambda window: tiny_whisper.model.encoder(torch.tensor(window.T[None])).last_hidden_state,
        architecture="whisper", encoder={"n_source": 1500, "inputs": "mel", "n_inputs": 80},
    )  # fmt: skip
    engine.info()["n_ctx"] = 20
    _, info = scripted_model(whisper_file(tmp_path / "w.gguf"), engine).transcribe(samples, temperature=0.0)
    assert info.language == {EN: "en", DE: "de"}[theirs]


def test_moonshine_says_what_hugging_face_says(tmp_path, torch, transformers):
    from hf_engine import HfEngine

    torch.manual_seed(2)
    config = transformers.MoonshineConfig(
        vocab_size=N_VOCAB, hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=2, encoder_num_attention_heads=2, decoder_num_attention_heads=2,
        initializer_range=0.3, bos_token_id=START, eos_token_id=END, decoder_start_token_id=START,
    )  # fmt: skip
    theirs = transformers.MoonshineForConditionalGeneration(config).eval()
    engine = HfEngine(
        theirs, lambda samples: theirs.model.encoder(torch.tensor(samples.T.copy())),
        architecture="moonshine", decoder_start_token_id=START, n_ctx=194,
        encoder={"n_source": 1248, "inputs": "audio", "n_inputs": 1},
    )  # fmt: skip
    model = scripted_model(write_gguf(tmp_path / "m.gguf", "moonshine", whisper_fields()), engine)
    samples = sound((2.0, 0.3), (1.0, 0.0))
    segments, info = model.transcribe(samples)
    limit = round(3.0 * 6.5)
    wanted = theirs.generate(torch.tensor(samples)[None], max_new_tokens=limit, do_sample=False)[0, 1:].tolist()
    assert list(segments[0].tokens) == (wanted[: wanted.index(END)] if END in wanted else wanted)
    assert (segments[0].start, segments[0].end, info.language) == (0.0, 3.0, None)
    assert not engine.live
    with pytest.raises(UnsupportedError, match="Moonshine has no word times"):
        model.transcribe(samples, word_timestamps=True)
    with pytest.raises(UnsupportedError, match="Moonshine transcribes English"):
        model.transcribe(samples, language="de")
