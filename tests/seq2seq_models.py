# SPDX-License-Identifier: Apache-2.0
"""Tiny random encoder-decoders, one for each thing that may go wrong, and what Hugging Face computes with them.

Committed are config.json, the names and shapes of the tensors, and golden.npz; the weights come from a seed, in NumPy,
so that no test needs torch to have them. Only what makes goldens needs torch and transformers.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parent / "golden_seq2seq"
N_PROMPT, N_DECODE, N_BEAMS = 6, 16, 4
N_SAMPLES = 8000  # of audio for Moonshine: half a second, 18 rows

T5_TINY = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_heads": 2,
    "num_layers": 3,
    "num_decoder_layers": 2,  # fewer: transformers makes no cache for more
    "vocab_size": 101,
    "relative_attention_num_buckets": 32,
    "decoder_start_token_id": 0,
}
WHISPER_TINY = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 131,
    "num_mel_bins": 80,
    "max_source_positions": 50,
    "max_target_positions": 40,
    "decoder_start_token_id": 3,
    "pad_token_id": 2,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
MOONSHINE_TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 3,
    "encoder_num_attention_heads": 4,  # 12 wide, of which 10 rotate
    "decoder_num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
BART_TINY = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": 109,
    "max_position_embeddings": 40,
    "decoder_start_token_id": 3,
    "forced_eos_token_id": None,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
BASES = {"t5": T5_TINY, "mt5": T5_TINY, "umt5": T5_TINY, "whisper": WHISPER_TINY, "moonshine": MOONSHINE_TINY}
BASES |= dict.fromkeys(("bart", "mbart", "m2m_100", "marian", "pegasus"), BART_TINY)
CLASSES = {
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "moonshine": "MoonshineForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
    "marian": "MarianMTModel",
    "pegasus": "PegasusForConditionalGeneration",
}
# Tables that no training changes, which Hugging Face computes where a file lacks them.
COMPUTED = {"marian": ".embed_positions.weight", "pegasus": ".embed_positions.weight"}


@dataclass(frozen=True)
class Tiny:
    """How to make one model.

    Attributes:
        own_head: it has an output matrix of its own.
        n_source: tokens of the text it reads.
        fixture: a directory of third-party weights, in place of the seed.
    """

    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    own_head: bool = False
    n_source: int = 24
    seed: int = 0  # chosen where no token leads by little
    fixture: str = ""


MODELS = {
    "t5": Tiny("t5", seed=5),  # inner width 32 of 64; the head's input is scaled
    "t5_v11": Tiny(  # inner width 64 of 32, few buckets that reach less far than the text
        "t5",
        {"d_model": 32, "num_heads": 4, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
        | {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
        own_head=True,
        n_source=48,
        seed=4,
    ),
    "mt5": Tiny("mt5", {"d_ff": 64, "num_decoder_layers": 1}, seed=6),  # tied, not scaled
    "umt5": Tiny("umt5", {"num_heads": 4}, seed=11),  # a bias in every layer
    "whisper": Tiny("whisper", seed=8),
    "whisper_turbo": Tiny("whisper", {"decoder_layers": 1, "num_mel_bins": 128, "max_source_positions": 21}, seed=4),
    "moonshine": Tiny("moonshine", seed=9),
    "bart": Tiny("bart", seed=2),
    "mbart": Tiny("mbart", {"scale_embedding": True, "activation_function": "relu"}, seed=8),
    "m2m_100": Tiny("m2m_100", {"decoder_layers": 1}, seed=9),  # as NLLB
    "marian": Tiny(
        "marian", {"scale_embedding": True, "activation_function": "swish", "decoder_vocab_size": 109}, seed=1
    ),
    "pegasus": Tiny("pegasus", {"scale_embedding": True, "activation_function": "relu", "pad_token_id": 0}, seed=11),
    "chronos": Tiny("t5", n_source=40, fixture="models/dummy-chronos-model"),
}
BOLT = "models/dummy-chronos-bolt-model"  # d 8, inner width 16


def weight(name: str, shape: tuple[int, ...], seed: int, embedding: float = 0.3) -> np.ndarray:
    """A tensor's values by its name, so that every part of a layer matters and no softmax is a step.

    embedding: size of an embedding's elements; small, or a tied head would repeat the last token for ever.

    NumPy guarantees the stream of RandomState.
    """
    random = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
    noise = random.standard_normal(shape)
    if "norm" in name:
        noise = 0.2 * noise + (0 if name.endswith("bias") else 1)
    elif name.endswith("bias"):
        noise = 0.3 * noise
    elif "embed" in name or "shared" in name:
        noise = (0.3 if "positions" in name else embedding) * noise
    elif len(shape) > 1 and "relative_attention_bias" not in name:
        noise = noise * 1.2 / np.sqrt(np.prod(shape[1:]))
        if name.endswith(("Attention.q.weight", "Attention.k.weight")):
            noise = noise * 16**-0.25  # T5 does not divide scores by the square root of a head's width
    return np.ascontiguousarray(noise, np.float32)


def write(name: str, directory: Path) -> Path:
    """The model as a Hugging Face directory, without torch."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text((GOLDEN / name / "config.json").read_text())
    shapes = json.loads((GOLDEN / name / "tensors.json").read_text())
    tiny = MODELS[name]
    values = BASES[tiny.family] | tiny.changes
    scaled = values.get("scale_embedding", tiny.family == "m2m_100")
    embedding = 0.3 / np.sqrt(values["d_model"]) if scaled else 0.3
    tensors = {key: weight(key, tuple(shape), tiny.seed, embedding) for key, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def source(name: str) -> np.ndarray:
    """What the encoder reads: int32 [n] ids, float32 [frames, n_mel] mel frames or [samples, 1] audio."""
    tiny, random = MODELS[name], np.random.RandomState(7)
    values = BASES[tiny.family] | tiny.changes
    if tiny.family == "whisper":
        frames = 2 * values["max_source_positions"]
        return random.standard_normal((frames, values["num_mel_bins"])).astype(np.float32)
    if tiny.family == "moonshine":
        return 0.1 * random.standard_normal((N_SAMPLES, 1)).astype(np.float32)
    return random.randint(3, 32 if tiny.fixture else values["vocab_size"], tiny.n_source).astype(np.int32)


def tokens(name: str) -> np.ndarray:
    """What the decoder is given, int32 [N_PROMPT + N_DECODE]: the start, then arbitrary ones."""
    tiny = MODELS[name]
    values = {"decoder_start_token_id": 1} | BASES[tiny.family] | tiny.changes
    n_vocab = 32 if tiny.fixture else values["vocab_size"]
    more = np.random.RandomState(8).randint(4, n_vocab, N_PROMPT + N_DECODE - 1)
    return np.concatenate([[values["decoder_start_token_id"]], more]).astype(np.int32)


def patches() -> np.ndarray:
    """What Chronos-Bolt's encoder reads: embeddings of patches, float32 [33, 8]."""
    return np.random.RandomState(9).standard_normal((33, 8)).astype(np.float32)


def committed(name: str) -> dict[str, np.ndarray]:
    """What golden() computed (golden_bolt() of "chronos_bolt"), from the file."""
    with np.load(GOLDEN / name / "golden.npz") as data:
        return dict(data)


def decode(engine: Any, sequence: int, ids: np.ndarray) -> np.ndarray:
    """Logits [len(ids), n_vocab] of a prompt, then of one token at a time over stored rows."""
    rows = [engine.append([(sequence, ids[:N_PROMPT])], all_logits=True)]
    rows += [engine.append([(sequence, ids[at : at + 1])]) for at in range(N_PROMPT, len(ids))]
    return np.concatenate(rows)


# ---------------------------------------------------------------- with torch and transformers
def describe(name: str) -> None:
    """Writes config.json and tensors.json as transformers saves the model."""
    import tempfile

    import torch
    import transformers
    from safetensors.numpy import load_file

    tiny = MODELS[name]
    kind = getattr(transformers, CLASSES[tiny.family])
    model = kind(kind.config_class(**(BASES[tiny.family] | tiny.changes)))
    if tiny.own_head:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = sorted(load_file(f"{folder}/model.safetensors").items())
        computed = COMPUTED.get(tiny.family, " ")
        shapes = {key: list(tensor.shape) for key, tensor in saved if not key.endswith(computed)}
        config = json.loads(Path(folder, "config.json").read_text())
    if "tie_word_embeddings" in tiny.changes:
        config["tie_word_embeddings"] = tiny.changes["tie_word_embeddings"]  # as transformers 4 writes it
        del config["scale_decoder_outputs"]
    (GOLDEN / name).mkdir(parents=True, exist_ok=True)
    (GOLDEN / name / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    lines = ",\n".join(f'"{key}": {shape}' for key, shape in shapes.items())
    (GOLDEN / name / "tensors.json").write_text(f"{{\n{lines}\n}}\n")


def golden(name: str, directory: Path) -> dict[str, np.ndarray]:
    """What Hugging Face computes in float32.

    states: the encoder's [rows, d]. logits: of `tokens` [N_PROMPT + N_DECODE, n_vocab]. greedy: the N_DECODE likeliest
    tokens one after another from the start token, no end. beams: the best of N_BEAMS beams of up to N_DECODE tokens,
    after the start token, and its `score`; not of third-party weights, which are untrained and lead nowhere.
    """
    import torch
    import transformers

    tiny = MODELS[name]
    model = getattr(transformers, CLASSES[tiny.family]).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    model = model.eval()
    read = source(name)
    read = read.T if tiny.family == "whisper" else read[:, 0] if tiny.family == "moonshine" else read.astype(np.int64)
    read = torch.from_numpy(np.ascontiguousarray(read))[None]
    key = {"whisper": "input_features", "moonshine": "input_values"}.get(tiny.family, "input_ids")
    first = torch.from_numpy(tokens(name).astype(np.int64))[None]
    with torch.no_grad():
        encoded = model.get_encoder()(read)
        states = encoded.last_hidden_state
        logits = model(encoder_outputs=encoded, decoder_input_ids=first).logits[0]
        ids = [int(first[0, 0])]
        for _ in range(N_DECODE):
            row = model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
            best = row.topk(2)
            assert best.values[0] - best.values[1] > 0.01 * row.std(), "too close: another seed"
            ids.append(int(best.indices[0]))
        made = {"states": states[0].numpy(), "logits": logits.numpy(), "greedy": np.array(ids[1:], np.int32)}
        if tiny.fixture:
            return made
        # Not Whisper's own generate, which is about timestamps and languages.
        found = transformers.GenerationMixin.generate(
            model, **{key: read}, decoder_input_ids=first[:, :1], num_beams=N_BEAMS, max_new_tokens=N_DECODE,
            do_sample=False, num_return_sequences=2, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        assert found.sequences_scores[0] - found.sequences_scores[1] > 1e-4, "too close: another seed"
    best = found.sequences[0, 1:].numpy().astype(np.int32)
    return made | {"beams": best, "score": np.float32(found.sequences_scores[0])}


def golden_bolt(directory: Path) -> dict[str, np.ndarray]:
    """states: the encoder's of `patches` [33, 8]. decoded: the decoder's of its start token [1, 8], both normed."""
    import torch
    from safetensors.torch import load_file
    from transformers import T5Config, T5Model

    values = json.loads((directory / "config.json").read_text())
    model = T5Model(T5Config(**values)).eval()
    weights = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "patch_embedding" not in name}
    missing = model.load_state_dict(kept, strict=False)
    assert not missing.unexpected_keys and all("embed_tokens" in name for name in missing.missing_keys)
    with torch.no_grad():
        states = model.encoder(inputs_embeds=torch.from_numpy(patches())[None]).last_hidden_state
        start = torch.tensor([[values["decoder_start_token_id"]]])
        decoded = model.decoder(input_ids=start, encoder_hidden_states=states).last_hidden_state
    return {"states": states[0].numpy(), "decoded": decoded[0].numpy()}
