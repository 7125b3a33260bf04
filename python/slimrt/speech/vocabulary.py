"""Whisper's special tokens, found by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from slimrt.errors import UnsupportedError
from slimrt.plumbing.arguments import unknown
from slimrt.speech.languages import LANGUAGES
from slimrt.tokenizer.tokenizer import Tokenizer

TASKS = ("transcribe", "translate")
_ENGLISH_ONLY = 51864  # vocabulary size of the English-only models, whose language tokens were never trained
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")  # the second is the older name


@dataclass(frozen=True)
class WhisperTokens:
    """The ids of Whisper's special tokens.

    Attributes:
        tokenizer: of the model.
        end: <|endoftext|>; all text tokens have smaller ids.
        start: <|startoftranscript|>. previous: <|startofprev|>, before the text of the previous window; None: missing.
        no_speech: its probability after `start` is that of silence; None: missing.
        no_timestamps: <|notimestamps|>; None: missing.
        timestamps: <|0.00|>, the first timestamp; all later ids are timestamps. None: missing.
        languages: code -> id; empty for English-only models.
        tasks: "transcribe" and "translate" -> id.

    Raises:
        UnsupportedError: a vocabulary that is not Whisper's.
    """

    tokenizer: Tokenizer
    end: int
    start: int
    previous: int | None
    no_speech: int | None
    no_timestamps: int | None
    timestamps: int | None
    languages: dict[str, int]
    tasks: dict[str, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, n_vocab: int) -> WhisperTokens:
        """From a tokenizer. n_vocab: width of the logits, which may exceed the tokens that the tokenizer names."""
        named = tokenizer.special_tokens
        for name in ("<|endoftext|>", "<|startoftranscript|>"):
            if name not in named or named[name] >= n_vocab:
                raise UnsupportedError(f"the vocabulary has no {name}: it is not Whisper's; convert the model again")
        end, no_timestamps = named["<|endoftext|>"], named.get("<|notimestamps|>")
        timestamps = named.get("<|0.00|>")
        if timestamps is None and no_timestamps is not None and no_timestamps + 1 < n_vocab:
            timestamps = no_timestamps + 1  # older files do not name the timestamps
        between = [id for id in named.values() if id != end]
        if min(between) < end or (timestamps is not None and any(named.get(f"<|{x}|>", 0) > timestamps for x in TASKS)):
            raise UnsupportedError(
                "the vocabulary is not in Whisper's order: text, <|endoftext|>, controls, timestamps"
            )
        english_only = n_vocab == _ENGLISH_ONLY
        return cls(
            tokenizer,
            end,
            named["<|startoftranscript|>"],
            named.get("<|startofprev|>"),
            next((named[name] for name in _NO_SPEECH if name in named), None),
            no_timestamps,
            timestamps,
            {} if english_only else {x: named[f"<|{x}|>"] for x in LANGUAGES if f"<|{x}|>" in named},
            {} if english_only else {task: named[f"<|{task}|>"] for task in TASKS if f"<|{task}|>" in named},
        )

    def instructions(self, language: str, task: str, timestamps: bool) -> list[int]:
        """The tokens after `start`: language, task, and <|notimestamps|> unless timestamps are wanted."""
        ids = [*([self.languages[language]] if self.languages else []), *([self.tasks[task]] if self.tasks else [])]
        return ids if timestamps or self.no_timestamps is None else [*ids, self.no_timestamps]

    def check(self, language: str | None, task: str) -> None:
        """ValueError: an unknown language or task. UnsupportedError: one that this model lacks."""
        if task not in TASKS:
            raise ValueError(unknown("task", task, TASKS))
        if language is not None and language not in LANGUAGES:
            raise ValueError(unknown("language", language, self.known))
        if language is not None and language not in (self.languages or ("en",)):
            raise UnsupportedError(f"language '{language}' is none that this model knows: {', '.join(self.known)}")
        if task == "translate" and task not in self.tasks:
            raise UnsupportedError("this model only transcribes, it cannot translate")

    @property
    def known(self) -> list[str]:
        """Codes of the model's languages."""
        return list(self.languages) or ["en"]

    @cached_property
    def blank(self) -> list[int]:
        """The tokens of a lone space, with which a text must not begin."""
        return self.tokenizer.encode(" ", add_special_tokens=False)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without timestamps and control tokens."""
        return self.tokenizer.decode([token for token in tokens if token < self.end])

    def encode(self, text: str) -> list[int]:
        """The ids of a text; names of control tokens in it are plain text."""
        return self.tokenizer.encode(text, add_special_tokens=False, parse_special=False)
