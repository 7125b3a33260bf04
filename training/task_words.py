# SPDX-License-Identifier: Apache-2.0
"""tale-t5: T5 v1.1's layout (relative positions, gated GELU, an output matrix of its own), taught to reverse a word."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

PAD, END, UNKNOWN = range(3)
LONGEST = 14  # letters


def tokenizer() -> Tokenizer:
    """A letter a token, behind one that marks where a word begins, as T5's unigram vocabularies do."""
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *string.ascii_lowercase]
    made = Tokenizer(models.Unigram([(piece, 0.0 if i < 3 else -3.0) for i, piece in enumerate(pieces)], UNKNOWN))
    made.add_special_tokens(pieces[:3])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return made


def word(rng: random.Random, letters: int) -> str:
    """Half like a word, half any letters."""
    if rng.random() < 0.5:
        return "".join(rng.choices(string.ascii_lowercase, k=letters))
    return "".join(rng.choice("aeiou" if i % 2 else "bcdfghklmnprstvw") for i in range(letters))


class Words:
    """What the trainer asks of a task (train_tasks.py)."""

    name, outtype = "tale-t5", "f16"
    steps, matrix_lr, other_lr = 1500, 0.02, 3e-3

    def __init__(self) -> None:
        self.tokenizer = tokenizer()

    def build(self) -> nn.Module:
        """2 x 32 position buckets tell all distances within a word apart."""
        model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=self.tokenizer.get_vocab_size(), d_model=64, d_kv=16, d_ff=128, num_heads=4, num_layers=2,
                num_decoder_layers=2, relative_attention_num_buckets=64, relative_attention_max_distance=64,
                feed_forward_proj="gated-gelu", dropout_rate=0.0, decoder_start_token_id=PAD, tie_word_embeddings=False,
            )
        )  # fmt: skip
        nn.init.normal_(model.lm_head.weight, std=0.02)
        return model

    def prepare(self, seed: int) -> None:
        """Words are made as they are needed."""

    def batch(self, model: nn.Module, rng: random.Random, progress: float) -> dict[str, Tensor]:
        """Words of one length, short ones first: source (n, letters + 2), decoder tokens and what follows them."""
        letters = rng.randint(1, min(LONGEST, 4 + round(progress * 40)))
        words = [word(rng, letters) for _ in range(96)]
        source = torch.tensor([self.tokenizer.encode(one).ids for one in words])
        wanted = torch.cat((source[:, 1:-1].flip(1), source[:, -1:]), 1)
        return {"source": source, "tokens": F.pad(wanted[:, :-1], (1, 0), value=PAD), "labels": wanted}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["source"], decoder_input_ids=batch["tokens"]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def save(self, model: nn.Module, directory: Path) -> None:
        """As a Hugging Face directory."""
        model.save_pretrained(directory)
        self.tokenizer.save(str(directory / "tokenizer.json"))
        names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
