"""Channels, in which gpt-oss writes its thoughts, calls of tools and answers (its format, Harmony): how they are known.

slimrt.openai.harmony tells them apart.
"""

from __future__ import annotations

from slimrt.tokenizer.tokenizer import Tokenizer

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
"""The control tokens by which the parts of an answer are told; with <|call|> and <|return|> it ends."""

ANALYSIS = "<|channel|>analysis<|message|>"
"""What thoughts begin with."""


def has_channels(template: str) -> bool:
    """Whether a chat template (its text) has this format."""
    return ANALYSIS in template


def mark_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of the marks that are control tokens, which texts leave out unless they are asked for (show_tokens)."""
    return frozenset(tokenizer.special_tokens[one] for one in MARKS if one in tokenizer.special_tokens)
