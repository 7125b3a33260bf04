"""Sequence to sequence: a text from another text, with T5, BART and their kin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slimrt import core
from slimrt.errors import ContextOverflowError, UnsupportedError
from slimrt.generation.bans import Bans
from slimrt.generation.beams import beam_places, search_beams
from slimrt.generation.generate import Run, run_texts
from slimrt.generation.loop import loop_of
from slimrt.generation.options import NOT_WITH_BEAMS, GenerateOptions, Options
from slimrt.generation.search import Encode, Task
from slimrt.generation.sequences import Sequences
from slimrt.info import encoder_of
from slimrt.modelfile.settings import SEARCH
from slimrt.plumbing.arguments import check_function
from slimrt.plumbing.notes import tell
from slimrt.results import Generation
from slimrt.runtime.runtime import Runtime
from slimrt.tokenizer.detokenizer import IncrementalDetokenizer
from slimrt.tokenizer.tokenizer import Tokenizer

OnResult = Callable[[int, Generation], object]


class Text2TextOptions(GenerateOptions, total=False):
    """The keywords of text2text and translate. See Model.text2text."""

    on_result: OnResult | None


@dataclass(frozen=True)
class Text2Text(Options):
    """The keywords of Text2TextOptions with their defaults, checked; greedy by default.

    Raises:
        UnsupportedError: lookup, cache_prompt or on_overflow="shift".
        ValueError, TypeError: as Options.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    on_result: OnResult | None = None

    def _check_kinds(self) -> None:
        super()._check_kinds()
        check_function("on_result", self.on_result)

    def _check_ranges(self) -> None:
        super()._check_ranges()
        if self.lookup or self.cache_prompt:
            name = "lookup" if self.lookup else "cache_prompt"
            raise UnsupportedError(
                f"{name} must be left out: an encoder-decoder drafts nothing from its text and reuses no prefixes"
            )
        if self.on_overflow != "error":
            raise UnsupportedError(
                "on_overflow is for language models: the context of an encoder-decoder cannot be shifted"
            )


def with_own(runtime: Runtime, given: Mapping[str, Any], n_first: int, *, search: bool = True) -> Text2Text:
    """The options of a call, with the model's own settings for what it leaves out. Errors as Text2Text.

    Args:
        given: keywords of Text2TextOptions.
        n_first: ids that outputs begin with, which a model's max_length counts.
        search: beam search counts among the settings, if nothing that it does not go with is given; it has at most as
            many beams as the model has sequences, with a warning if its own were more.
    """
    settings, own = runtime.source.settings, dict[str, Any]()
    if most := settings.max_new_tokens or settings.max_length:
        own["max_tokens"] = max(most - n_first + (settings.max_new_tokens > 0), 1)
    num_beams = given["num_beams"] if "num_beams" in given else _own_beams(runtime, given) if search else 1
    if num_beams != 1:
        own |= {name: getattr(settings, name) for name in SEARCH} | {"num_beams": num_beams}
    return Text2Text(**{**own, **given})


def _own_beams(runtime: Runtime, given: Mapping[str, Any]) -> int:
    """The number of beams where the caller names none."""
    wanted, n_seqs = runtime.source.settings.num_beams or 1, int(runtime.info["n_seqs"])
    if wanted == 1 or not searchable(given):
        return 1
    if wanted > n_seqs:
        tell(
            f"the model's own settings are num_beams={wanted}, which takes as many sequences; {n_seqs} beams are what "
            f"it has: load it with n_seqs={wanted}"
        )
    return min(wanted, n_seqs)


def searchable(given: Mapping[str, Any]) -> bool:
    """Whether beam search goes with options, given as keywords."""
    nothing: tuple[object, ...] = (None, "", [])
    return all(given.get(name) in (*nothing, off, getattr(Text2Text, name)) for name, off in NOT_WITH_BEAMS.items())


class EncodedRun(Run):
    """One text being generated from a source.

    Args:
        source: ids of the source text.
        index: of this source in the call; its seed is seed + index.
        first: ids that the output begins with.
    """

    def __init__(
        self,
        runtime: Runtime,
        source: Sequence[int],
        index: int,
        options: Text2Text,
        seed: int,
        called: float,
        first: Sequence[int],
    ):
        super().__init__(runtime, first, options, seed + index, None, called)
        self.n_given = len(self.prompt) - 1
        self.source, self.index, self._on_result = source, index, options.on_result

    def new_bans(self, source: Sequence[int] | None) -> Bans:
        return super().new_bans(self.source)

    def _new_detokenizer(self, tokenizer: Tokenizer) -> IncrementalDetokenizer:
        """Begins a new text: what the output begins with is no prompt to continue."""
        return tokenizer.detokenizer((), skip_special_tokens=True, shown=self.options.show_tokens)

    def task(self) -> Task[Generation]:
        result = yield from super().task()
        self.tell(result)
        return result

    def sources(self, sequence: Any) -> Sequence[Encode]:
        return [Encode(sequence, np.array(self.source, np.int32))]

    def result(self) -> Generation:
        """The Generation so far; its prompt_tokens are the source's."""
        result, n_source = super().result(), len(self.source)
        speed = n_source / self._prefill_seconds if self._prefill_seconds else 0.0
        return replace(
            result,
            usage=replace(result.usage, prompt_tokens=n_source),
            timings=replace(result.timings, prefill_tok_s=speed),
        )

    def tell(self, result: Generation) -> None:
        """Call on_result."""
        if self._on_result is not None:
            self._on_result(self.index, result)


def text2text(
    runtime: Runtime,
    sources: Sequence[Sequence[int]],
    options: Text2Text,
    seed: int,
    called: float,
    first: Sequence[int],
) -> list[Generation]:
    """The text for each source (ids), decoded together. first: EncodedRun's. Others and errors as Model.text2text."""
    for source in sources:
        check_source(runtime, len(source))
    runs = [EncodedRun(runtime, source, i, options, seed, called, first) for i, source in enumerate(sources)]
    if options.num_beams == 1:
        return run_texts(runtime, runs, options)
    taken, engine = [beam_places(one) for one in runs], Sequences(runtime)
    tasks = (_best_of(one, search_beams(engine, one, called)) for one in runs)
    return loop_of(runtime).run(zip(taken, tasks, strict=True))


def _best_of(run: EncodedRun, search: Task[list[Generation]]) -> Task[Generation]:
    """The best result of a beam search, reported to on_result."""
    best = (yield from search)[0]
    run.tell(best)
    return best


def check_source(runtime: Runtime, length: int) -> None:
    """Refuse a source that is empty or too long for the encoder: ValueError, ContextOverflowError."""
    most = encoder_of(runtime.info)["n_source"]
    if length == 0:
        raise ValueError("the text has no tokens: give some text")
    if length > most:
        more = ", or load the model with a larger n_source" if _can_grow(runtime, most) else ""
        raise ContextOverflowError(
            f"the text has {length} tokens, the encoder takes {most}: shorten it or split it{more}"
        )


def _can_grow(runtime: Runtime, n_source: int) -> bool:
    """Whether the encoder can take more tokens than that: it has no table of positions, as T5, or a longer one."""
    file, name = runtime.source.file, runtime.source.architecture
    has_table = core.architectures()[name].positions == "learned"
    return not has_table or n_source < int(file.value(f"{name}.encoder.context_length"))
