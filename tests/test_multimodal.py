# SPDX-License-Identifier: Apache-2.0
"""Directories of models that also read images or sound: their text part, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import slimrt
from conftest import GOLDEN, PROMPT, relative
from slimrt import core
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import read_gguf, string, write_gguf
from slimrt.modelfile.hf.directory import read_hf
from slimrt.modelfile.hf.multimodal import _USUAL, WRAPPERS
from tiny_model import write_tiny

IDS = [3, 40, 41, 50, 7, 9, 2, 88]
TEXT = dict(
    hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    vocab_size=101, max_position_embeddings=128, rms_norm_eps=1e-5,
)  # fmt: skip
SIGHT = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
SOUND = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_mel_bins=16)
CLIP = dict(SIGHT, model_type="clip_vision_model", projection_dim=16)
MROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 2, 2]))
# Model type -> its class but for "ForConditionalGeneration" and "Config", the text model's type, its config's rest.
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "smolvlm": ("SmolVLM", "llama", dict(vision_config=SIGHT, image_token_id=99)),
    "idefics3": ("Idefics3", "llama", dict(vision_config=SIGHT, image_token_id=99)),
    "llava": ("Llava", "mistral", dict(vision_config=CLIP)),
    "vipllava": ("VipLlava", "llama", dict(vision_config=CLIP, vision_feature_layers=[-1])),
    "llava_next": ("LlavaNext", "llama", dict(vision_config=CLIP)),
    "llava_next_video": ("LlavaNextVideo", "llama", dict(vision_config=CLIP)),
    "llava_onevision": (
        "LlavaOnevision", "qwen2",
        dict(vision_config=dict(SIGHT, model_type="siglip_vision_model"), vision_feature_layer=-1),
    ),
    "video_llava": ("VideoLlava", "llama", dict(vision_config=CLIP)),
    "mistral3": ("Mistral3", "mistral", dict(vision_config=dict(SIGHT, model_type="pixtral", head_dim=16))),
    "gemma3": ("Gemma3", "gemma3_text", dict(vision_config=SIGHT, mm_tokens_per_image=4)),
    "gemma4": (
        "Gemma4", "gemma4_text",
        dict(vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                                num_key_value_heads=2, head_dim=16, patch_size=4, position_embedding_size=16),
             audio_config=dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=32),
             image_token_id=90, video_token_id=91, audio_token_id=92),
    ),
    "gemma4_unified": (
        "Gemma4Unified", "gemma4_unified_text",
        dict(vision_config=dict(patch_size=4, mm_embed_dim=32, mm_posemb_size=16, output_proj_dims=32),
             audio_config=dict(audio_embed_dim=32), image_token_id=90, video_token_id=91, audio_token_id=92),
    ),
    "internvl": ("InternVL", "qwen2", dict(vision_config=dict(SIGHT, image_size=[28, 28], patch_size=[14, 14]))),
    "got_ocr2": (
        "GotOcr2", "qwen2",
        dict(vision_config=dict(hidden_size=32, output_channels=16, num_hidden_layers=1, num_attention_heads=2,
                                image_size=32, patch_size=16, mlp_dim=48, global_attn_indexes=[0], window_size=2)),
    ),
    "qwen2_vl": (
        "Qwen2VL", "qwen2_vl_text",
        dict(vision_config=dict(depth=1, embed_dim=32, hidden_size=48, num_heads=2, mlp_ratio=2)),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL", "qwen2_5_vl_text",
        dict(vision_config=dict(depth=1, hidden_size=32, out_hidden_size=48, num_heads=2, intermediate_size=48)),
    ),
    "qwen2_audio": (
        "Qwen2Audio", "qwen2",
        dict(audio_config=dict(model_type="qwen2_audio_encoder", d_model=32, encoder_layers=1,
                               encoder_attention_heads=2, encoder_ffn_dim=48, num_mel_bins=16)),
    ),
    "voxtral": ("Voxtral", "llama", dict(audio_config=dict(SOUND, model_type="voxtral_encoder"))),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIMRT_CACHE_DIR", str(tmp_path / "cache"))


def logits(path: Path) -> np.ndarray:
    with slimrt.Model(path, n_ctx=64, cache_type="f32", progress=False) as model:
        return model.logits(IDS)


def wrapped(directory: Path, model_type: str, place: str, more: dict[str, np.ndarray], name: str = "llama_mha") -> Path:
    """A golden text model inside a wrapper: its tensors under `place`, the head beside or in it."""
    directory.mkdir()
    config = json.loads((GOLDEN / name / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, "text_config": config}))
    tensors = load_file(GOLDEN / name / "model.safetensors")
    under = {place + key.removeprefix("model.") if key.startswith("model.") else key: t for key, t in tensors.items()}
    save_file(under | more, directory / "model.safetensors")
    return directory


# ---------------------------------------------------------------- each wrapper, as transformers saves it
def test_every_wrapper_is_tried():
    assert set(CLASSES) == set(WRAPPERS)


@pytest.mark.oracle
@pytest.mark.parametrize("name", CLASSES)
def test_the_text_part_computes_what_transformers_does(name, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    stem, kind, rest = CLASSES[name]
    text = dict(TEXT, model_type=kind, bos_token_id=1, eos_token_id=2, pad_token_id=0) | (
        MROPE if "vl_" in kind else {"hidden_size_per_layer_input": 0} if name == "gemma4" else {}
    )
    config = getattr(transformers, f"{stem}Config")(text_config=text, **rest)
    model = getattr(transformers, f"{stem}ForConditionalGeneration")(config).eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.copy_(0.2 * torch.randn(value.shape, generator=random) + (1 if "norm" in key else 0))
        wanted = model(input_ids=torch.tensor([IDS])).logits[0].numpy()
    model.save_pretrained(tmp_path / "hf")
    assert relative(logits(tmp_path / "hf"), wanted) < 1e-5
    note = read_hf(tmp_path / "hf")[1][-1]
    assert f"the text part of a '{name}' model: " in note and WRAPPERS[name].unread in note
    assert all(f"{module} (" in note for module in WRAPPERS[name].left_out)


@pytest.mark.oracle
def test_sizes_that_a_text_config_leaves_out_are_those_of_transformers():
    """Early configs hold what differs from its defaults alone."""
    transformers = pytest.importorskip("transformers")
    for kind, sizes in _USUAL.items():
        config = transformers.AutoConfig.for_model(kind)
        values = {**config.rope_parameters, **config.to_dict()}
        assert sizes == {key: values[key] for key in sizes}, kind


# ---------------------------------------------------------------- what is said, and what is refused
SEEN = {"model.vision_tower.conv.weight": np.ones((2, 2), np.float32), "image_newline": np.ones(48, np.float32)}


def test_the_text_part_is_the_text_model(tmp_path):
    """Under the names that transformers used before version 5, and those it uses in memory."""
    for i, place in enumerate(("language_model.model.", "model.language_model.", "model.text_model.")):
        made = wrapped(tmp_path / str(i), "llava_next", place, SEEN)
        assert np.array_equal(logits(made), logits(GOLDEN / "llama_mha"))
        assert read_hf(made)[1][-1] == (
            "the text part of a 'llava_next' model: images are not read; tensors left out: image_newline (1), "
            "vision_tower (1)"
        )


def test_it_is_said_whenever_the_model_is_used(tmp_path, run):
    made, out = wrapped(tmp_path / "hf", "qwen2_audio", "language_model.model.", {}), tmp_path / "out.gguf"
    note = "the text part of a 'qwen2_audio' model: sound is not read; tensors left out: none"
    assert note in run("convert", made, "-o", out)[1]
    assert read_gguf(out).value("slimrt.text_part") == note
    again = tmp_path / "again.gguf"
    slimrt.convert(out, again, outtype="q8_0", progress=False)
    for path in (made, out, again, made):
        code, shown, err = run("inspect", path)
        assert code == 0 and err.count(note) == 1 and "slimrt.text_part = " in shown


def test_a_tensor_that_is_not_listed_is_refused(tmp_path):
    more = SEEN | {"language_model.gate.weight": np.ones((2, 2), np.float32)}
    with pytest.raises(UnsupportedError, match=r"tensor 'gate.weight' has no place in model type 'llama'"):
        read_hf(wrapped(tmp_path / "a", "llava_next", "language_model.model.", more))
    more = {"vision_tower_2.weight": np.ones((2, 2), np.float32)}
    with pytest.raises(UnsupportedError, match=r"tensor 'vision_tower_2.weight' has no place"):
        read_hf(wrapped(tmp_path / "b", "llava_next", "language_model.model.", more))
    with pytest.raises(UnsupportedError, match=r"tensor 'image_newline' has no place"):
        read_hf(wrapped(tmp_path / "c", "llava", "language_model.model.", SEEN))


def change(directory: Path, **values: Any) -> Path:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | values))
    return directory


def test_configs_of_wrappers_that_are_refused(tmp_path):
    made = wrapped(tmp_path / "hf", "llava", "language_model.model.", {})
    text = json.loads((made / "config.json").read_text())["text_config"]
    with pytest.raises(ModelFormatError, match="no text_config, which a model of type 'llava' has"):
        read_hf(change(made, text_config=None))
    with pytest.raises(
        UnsupportedError, match="model type 'mamba' is not supported.*the text part of: idefics3, smolv"
    ):
        read_hf(change(made, text_config=text | {"model_type": "mamba"}))
    with pytest.raises(UnsupportedError, match="weights quantised by 'awq'"):
        read_hf(change(made, text_config=text, quantization_config={"quant_method": "awq"}))
    with pytest.raises(UnsupportedError, match="weights quantised by 'mlx'"):
        read_hf(change(made, quantization_config=None, quantization={"group_size": 64, "bits": 4}))


def test_a_head_that_neither_config_ties_must_be_there(tmp_path):
    made = wrapped(tmp_path / "hf", "llava", "language_model.model.", {})
    tensors = load_file(made / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, made / "model.safetensors")
    with pytest.raises(ModelFormatError, match="tensor 'lm_head.weight' is missing"):
        read_hf(made)
    model, _ = read_hf(change(made, tie_word_embeddings=True))
    assert "output.weight" not in model.tensors


def test_a_head_that_neither_config_names_is_as_the_text_model_has_it(tmp_path):
    """The published configs of Gemma 3 do not say that it is the embedding."""
    made = wrapped(tmp_path / "hf", "gemma3", "language_model.model.", {}, "gemma3_mha")
    text = json.loads((made / "config.json").read_text())["text_config"]
    for ties in ({}, {"tie_word_embeddings": None}):
        text = {key: value for key, value in text.items() if key != "tie_word_embeddings"} | ties
        model, _ = read_hf(change(made, text_config=text))
        assert "output.weight" not in model.tensors


def test_a_flat_config_of_qwen2_vl(tmp_path):
    """As the first ones are: no text_config, and three positions a token, which in a text are one."""
    made = wrapped(tmp_path / "hf", "qwen2_vl", "model.", {"visual.merger.weight": SEEN["image_newline"]}, "qwen2_mha")
    config = json.loads((made / "config.json").read_text())
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}
    flat = config["text_config"] | {"model_type": "qwen2_vl", "vision_config": {"depth": 1}} | rope
    (made / "config.json").write_text(json.dumps(flat))
    assert np.array_equal(logits(made), logits(GOLDEN / "qwen2_mha"))
    del flat["rms_norm_eps"], flat["rope_parameters"]
    (made / "config.json").write_text(json.dumps(flat))
    model, _ = read_hf(made)
    assert model.value("qwen2.attention.layer_norm_rms_epsilon") == np.float32(1e-5)
    assert model.value("qwen2.rope.freq_base") == 1e6
    assert core.plan(str(next((tmp_path / "cache").glob("*.gguf"))))["architecture"] == "qwen2"


def test_generation_says_it_beside_the_text(tmp_path, run):
    plain, part = write_tiny(tmp_path / "plain.gguf"), tmp_path / "part.gguf"
    write_gguf(part, read_gguf(plain).with_metadata({"slimrt.text_part": string("a part")}), show_progress=False)
    shown = [run("generate", file, "-p", PROMPT, "-n", 2, "--temp", 0) for file in (plain, part)]
    assert shown[0][:2] == shown[1][:2]
    assert "a part" not in shown[0][2] and "slimrt: a part\n" in shown[1][2]
