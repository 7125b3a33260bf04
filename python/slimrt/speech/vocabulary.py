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
_ENGLISH_ONLY = 51864  # tokens of the English-only models, whose language tokens were never trained
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")  # the second is its older name


@dataclass(frozen=True)
class WhisperTokens:
    """The ids by which Whisper is told what to do, and tells when.

    Attributes:
        tokenizer: of the model.
        end: <|endoftext|>; all text has smaller ids.
        start: <|startoftranscript|>. previous: <|startofprev|>, before the text of the window before; None: without.
        no_speech: its probability after `start` is that of silence; None: without.
        no_timestamps: <|notimestamps|>, None: without.
        timestamps: <|0.00|>, the first of those that tell a time; all later ids do. None: without.
        languages: code to id; empty of an English-only model.
        tasks: "transcribe" and "translate" to id.

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
        """From a tokenizer; n_vocab: tokens that the model knows, which may be more than the tokenizer names."""
        named = tokenizer.special_tokens
        for name in ("<|endoftext|>", "<|startoftranscript|>"):
            if name not in named or named[name] >= n_vocab:
                raise UnsupportedError(f"the vocabulary has no {name}: it is not Whisper's; convert the model again")
        end, no_timestamps = named["<|endoftext|>"], named.get("<|notimestamps|>")
        timestamps = named.get("<|0.00|>")
        if timestamps is None and no_timestamps is not None and no_timestamps + 1 < n_vocab:
            timestamps = no_timestamps + 1  # older files name none of them
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
        """What follows `start`: language, task, and whether to tell times."""
        ids = [*([self.languages[language]] if self.languages else []), *([self.tasks[task]] if self.tasks else [])]
        return ids if timestamps or self.no_timestamps is None else [*ids, self.no_timestamps]

    def check(self, language: str | None, task: str, timestamps: bool) -> None:
        """Raises ValueError for a language or task that is not known, UnsupportedError for one this model lacks."""
        if task not in TASKS:
            raise ValueError(unknown("task", task, TASKS))
        if language is not None and language not in LANGUAGES:
            raise ValueError(unknown("language", language, self.known))
        if language is not None and language not in (self.languages or ("en",)):
            raise UnsupportedError(f"this model does not know language '{language}', only {', '.join(self.known)}")
        if task == "translate" and task not in self.tasks:
            raise UnsupportedError("this model only transcribes, it cannot translate")

    @property
    def known(self) -> list[str]:
        """Codes of the languages it knows."""
        return list(self.languages) or ["en"]

    @cached_property
    def blank(self) -> list[int]:
        """Tokens that a text must not begin with: a lone space."""
        return self.tokenizer.encode(" ", add_special_tokens=False)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without times and controls."""
        return self.tokenizer.decode([token for token in tokens if token < self.end])

    def encode(self, text: str) -> list[int]:
        """The ids of a text; what looks like a control in it is text."""
        return self.tokenizer.encode(text, add_special_tokens=False, parse_special=False)
