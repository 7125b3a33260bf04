"""Channels of gpt-oss' format (Harmony): thoughts, tool calls and answers are messages in named channels.

slimrt.openai.harmony parses them; this module only recognises the format.
"""

from __future__ import annotations

from slimrt.tokenizer.tokenizer import Tokenizer

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
"""The control tokens around the parts of an answer, which ends with <|call|> or <|return|>."""

ANALYSIS = "<|channel|>analysis<|message|>"
"""The beginning of thoughts."""


def has_channels(template: str) -> bool:
    """Whether a chat template (its text) writes this format."""
    return ANALYSIS in template


def mark_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of those MARKS that are control tokens; texts omit control tokens unless show_tokens names them."""
    return frozenset(tokenizer.special_tokens[one] for one in MARKS if one in tokenizer.special_tokens)
