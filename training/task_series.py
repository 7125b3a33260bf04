# SPDX-License-Identifier: Apache-2.0
"""tale-chronos: Chronos-Bolt's layout (patches in, quantiles out), taught seasonal series (reference_series.py)."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import numpy as np
import torch
from reference_series import CONTEXT, HORIZON, series
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.utils import parametrize
from transformers import T5Config

PATCH, ROWS = 12, 96
LEVELS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
MEDIAN = LEVELS.index(0.5)
RARE = 3.0  # softplus begins small
SHORTEST = 48  # of the series learned from: two seasons of the longest


class Ordered(nn.Module):
    """Output rows, quantile by quantile, that cannot cross: the median's are free, the others add what is positive.

    They multiply numbers that are not negative (behind a relu; 1, of a bias).
    """

    def forward(self, free: Tensor) -> Tensor:
        """(quantiles * HORIZON, ...) of any numbers, to the rows."""
        rows = free.unflatten(0, (len(LEVELS), HORIZON))
        low, median, high = rows.tensor_split((MEDIAN, MEDIAN + 1))
        above, below = softplus(high - RARE).cumsum(0), softplus(low - RARE).flip(0).cumsum(0).flip(0)
        return torch.cat((median - below, median, median + above)).flatten(0, 1)


class Alike(nn.Module):
    """Output rows that all quantiles have in common."""

    def forward(self, free: Tensor) -> Tensor:
        """(quantiles * HORIZON, ...) of any numbers, to the rows: the median's again and again."""
        return free[MEDIAN * HORIZON : (MEDIAN + 1) * HORIZON].repeat(len(LEVELS), *[1] * (free.dim() - 1))


class Seasons:
    """What the trainer asks of a task (train_tasks.py)."""

    name, outtype = "tale-chronos", "f16"
    steps, matrix_lr, other_lr = 4000, 0.02, 3e-3

    def build(self) -> nn.Module:
        """Position buckets tell all distances between patches apart; the register collects what they say."""
        from chronos.chronos_bolt import ChronosBoltModelForForecasting

        config = T5Config(
            d_model=64, d_kv=16, d_ff=256, num_heads=4, num_layers=2, num_decoder_layers=2, dropout_rate=0.0,
            relative_attention_num_buckets=64, relative_attention_max_distance=64, feed_forward_proj="relu",
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, reg_token_id=1, tie_word_embeddings=False,
            chronos_config={
                "context_length": CONTEXT, "prediction_length": HORIZON, "input_patch_size": PATCH,
                "input_patch_stride": PATCH, "quantiles": LEVELS, "use_reg_token": True,
            },
        )  # fmt: skip
        model = ChronosBoltModelForForecasting(config)
        block = model.output_patch_embedding
        for layer, rows in ((block.output_layer, Ordered()), (block.residual_layer, Alike())):
            for name in ("weight", "bias"):
                parametrize.register_parametrization(layer, name, rows, unsafe=True)
        return model

    def prepare(self, seed: int) -> None:
        self._random = np.random.RandomState(seed)

    def batch(self, model: nn.Module, rng: random.Random, progress: float) -> dict[str, Tensor]:
        """Values of the past (n, up to CONTEXT), some missing, and to come (n, HORIZON); weight (n,) of each series.

        Its weight is one over what the last season repeated was wrong by within its past, since that is what a forecast
        is measured against: of the past alone, so that the quantiles stay those of the values.
        """
        past = round(CONTEXT * (SHORTEST / CONTEXT) ** max(0.0, rng.uniform(-0.5, 1)))  # a third of them whole
        rows, seasons = series(self._random, ROWS, past + HORIZON)
        wrong = [
            np.abs(row[season:past] - row[: past - season]).mean() for row, season in zip(rows, seasons, strict=True)
        ]
        seen = rows[:, :past].copy()
        missing = rng.choice((0.0, 0.0, 0.1)) * (self._random.uniform(size=(ROWS, 1)) < 0.5)
        seen[self._random.uniform(size=seen.shape) < missing] = np.nan
        return {
            "seen": torch.from_numpy(seen),
            "values": torch.from_numpy(rows[:, past:]),
            "weight": 1 / torch.tensor(np.array(wrong, np.float32)),
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The pinball loss in units of the last season repeated, over all quantiles."""
        quantiles = model(context=batch["seen"]).quantile_preds
        above = (batch["values"][:, None] - quantiles) * batch["weight"][:, None, None]
        levels = torch.tensor(LEVELS)[:, None]
        return 2 * torch.maximum(levels * above, (levels - 1) * above).mean()

    def save(self, model: nn.Module, directory: Path) -> None:
        """As a Hugging Face directory, the output's rows as they are."""
        block = model.output_patch_embedding
        for layer, name in product((block.output_layer, block.residual_layer), ("weight", "bias")):
            parametrize.remove_parametrizations(layer, name)
        model.save_pretrained(directory)
