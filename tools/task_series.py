# SPDX-License-Identifier: Apache-2.0
"""tale-chronos: Chronos' layout (T5 v1.0 over bins of scaled values), taught series of months (reference_series.py)."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from reference_series import series
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from slimrt.forecast.chronos import Chronos

CONTEXT, HORIZON = 96, 24
PAD, END, SPECIAL, TOKENS, LIMIT = 0, 1, 2, 514, 4.0
CHRONOS = {
    "context_length": CONTEXT, "prediction_length": HORIZON, "n_special_tokens": SPECIAL, "n_tokens": TOKENS,
    "num_samples": 20, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "use_eos_token": True, "eos_token_id": END,
    "pad_token_id": PAD,
}  # fmt: skip


class Months:
    """What the trainer asks of a task (train_tasks.py)."""

    name, outtype = "tale-chronos", "f16"
    steps, matrix_lr, other_lr = 1000, 0.02, 3e-3

    def __init__(self) -> None:
        self.chronos = Chronos(**CHRONOS, low_limit=-LIMIT, high_limit=LIMIT)
        self._centers = torch.from_numpy(self.chronos.centers)

    def build(self) -> nn.Module:
        """Bins start as waves of their value, so that neighbours mean about the same; buckets keep two years apart."""
        chronos = CHRONOS | {
            "tokenizer_class": "MeanScaleUniformBins", "model_type": "seq2seq",
            "tokenizer_kwargs": {"low_limit": -LIMIT, "high_limit": LIMIT},
        }  # fmt: skip
        config = T5Config(
            vocab_size=TOKENS, d_model=64, d_kv=16, d_ff=192, num_heads=4, num_layers=2, num_decoder_layers=2,
            relative_attention_num_buckets=128, relative_attention_max_distance=128, feed_forward_proj="relu",
            dropout_rate=0.0, decoder_start_token_id=PAD, tie_word_embeddings=False, n_positions=512,
            pad_token_id=PAD, eos_token_id=END, chronos_config=chronos,
        )  # fmt: skip
        model = T5ForConditionalGeneration(config)
        angles = self._centers[:, None] * 2 ** torch.linspace(-2, 4, 32)
        nn.init.normal_(model.lm_head.weight, std=0.02)
        with torch.no_grad():
            waves = torch.cat((angles.sin(), angles.cos()), 1)
            model.shared.weight[SPECIAL + 1 :] = waves[: TOKENS - SPECIAL - 1]
            model.lm_head.weight[SPECIAL + 1 :] = 0.1 * waves[: TOKENS - SPECIAL - 1]
        return model

    def prepare(self, seed: int) -> None:
        self._random = np.random.RandomState(seed)

    def batch(self, model: nn.Module, rng: random.Random, progress: float) -> dict[str, Tensor]:
        """Tokens of the past (n, past + 1), decoder tokens and scaled values to come (n, HORIZON)."""
        past = rng.randrange(2 * HORIZON, CONTEXT + 1)
        rows = series(self._random, 48, past + HORIZON)
        source, tokens, wanted = [], [], []
        for row in rows:
            ids, scale = self.chronos.encode(row[:past])
            values = torch.from_numpy(row[past:] / np.float32(scale))
            nearest = torch.bucketize(values, (self._centers[1:] + self._centers[:-1]) / 2) + SPECIAL + 1
            source.append(torch.from_numpy(ids).long())
            tokens.append(F.pad(nearest[:-1], (1, 0), value=PAD))
            wanted.append(values)
        return {"source": torch.stack(source), "tokens": torch.stack(tokens), "values": torch.stack(wanted)}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Cross-entropy with a bell of about three bins around the value, so that a bin teaches its neighbours."""
        logits = model(input_ids=batch["source"], decoder_input_ids=batch["tokens"]).logits
        width = 1.2 * float(self._centers[1] - self._centers[0])
        distance = (batch["values"].clamp(-LIMIT, LIMIT)[..., None] - self._centers) / width
        bell = F.pad(torch.softmax(-0.5 * distance.square(), -1), (SPECIAL + 1, 0))
        return F.cross_entropy(logits.flatten(0, 1), bell.flatten(0, 1))

    def save(self, model: nn.Module, directory: Path) -> None:
        """As a Hugging Face directory."""
        model.save_pretrained(directory)
