"""The quality of a cache: perplexity and KL divergence from kv f32, measured by decoding through the cache.

A prefill computes its tokens from rows that are not rounded yet, which hides the error of rounding. Here each window of
the text starts with a prefix that is prefilled, and every scored token is then computed from stored rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slimrt.cache.config import Cache, CacheChoice, check_cache, kinds
from slimrt.cache.placement import placed
from slimrt.cache.plan_result import MemorySizes
from slimrt.cache.planner import Planner, memory_limit_bytes, require_together, resolve_device
from slimrt.modelfile.source import ModelSource
from slimrt.modelfile.text import file_ids
from slimrt.plumbing import progress as bars
from slimrt.plumbing.arguments import positive, whole
from slimrt.plumbing.keywords import named
from slimrt.plumbing.numbers import surprise_and_divergence
from slimrt.results import CacheComparison, CacheQuality
from slimrt.runtime.kinds import continues_texts
from slimrt.runtime.runtime import Runtime, load
from slimrt.runtime.session import Session, TokenIds, append_together, as_ids

WINDOW = 512  # default window in tokens, unless the model was trained on fewer
_SEQUENCES = 8  # windows decoded together by default
_KEPT_BYTES = 256 << 20  # most bytes of the reference's logits that are kept for comparison with the other caches
_N_BATCH = 512

Ids = NDArray[np.int32]
Logits = NDArray[np.float32]


@named
def compare_caches(
    path: str | os.PathLike[str] | ModelSource,
    text: str | os.PathLike[str] | TokenIds,
    caches: Sequence[Cache | CacheChoice],
    *,
    window: int = 0,
    prefix: int | None = None,
    chunk: int = 1,
    max_tokens: int | None = None,
    sequences: int | None = None,
    calibration: str | os.PathLike[str] | None = None,
    device: str = "auto",
    n_threads: int | None = None,
    memory_limit: str | int | None = None,
    progress: bool | None = None,
) -> CacheComparison:
    """Measure the KL divergence of the next-token distributions of several caches from those of kv (with MLA latent) in
    float32, and their perplexity.

    The text is cut into windows. The prefix of each is prefilled and the rest computed in chunks, so that every scored
    token reads the rows before its chunk as they are stored. All caches are loaded at the same time.

    Args:
        path: as slimrt.Model.
        text: a text, token ids, or the path (not a str) of a UTF-8 file.
        caches: each as the `cache` of slimrt.Model: "k+r:q8", a CacheConfig, or a list with one per layer. Modes that
            loading refuses as too imprecise are measured too.
        window: tokens of a window; 0: 512, or the trained context if that is less. If the tokenizer starts texts with
            BOS, every window starts with it.
        prefix: tokens prefilled in each window; None: a quarter of it.
        chunk: tokens per step after the prefix; the tokens of a chunk read each other's rows unrounded.
        max_tokens: most tokens to score; None: the whole text.
        sequences: windows decoded together, which is faster; None: up to 8.
        calibration, device, n_threads, memory_limit, progress: as slimrt.Model.

    Raises:
        ValueError, TypeError: an argument out of its range, or a text that is too short or not UTF-8.
        WontFitError: the caches do not fit at the same time.
        Others as slimrt.Model.
    """
    resolve_device(device)  # checked before anything slow
    source = ModelSource.of(path, progress)
    continues_texts(source)
    if isinstance(caches, str):
        raise TypeError(f"caches are a list, such as ['kv:q8', 'k+r'], got {caches!r}")
    given = [one if isinstance(one, CacheChoice) else CacheChoice.of(one) for one in caches]
    choices = [replace(one, allow_lossy=True) for one in given]  # their error is what is to be measured
    for choice in choices:
        check_cache(source, choice)
    plan = Windows.of(source, window, prefix, chunk, max_tokens)
    windows = plan.cut(source, text)
    n_sequences = min(_SEQUENCES if sequences is None else positive("sequences", sequences), len(windows))
    planner = Planner.of(source, memory_limit, n_sequences, _N_BATCH, n_threads, device)
    distinct = _distinct(source, choices)
    n_ctx = max(map(len, windows))
    planner = placed(planner, distinct, n_ctx)
    sizes = [planner.sizes(choice, n_ctx) for choice in distinct]
    require_together(sizes, planner.limit, "Compare fewer, or lower the window or the sequences")
    limit = 0 if memory_limit is None else memory_limit_bytes(memory_limit)
    loaded = list[_Contestant]()
    try:
        for choice in distinct:
            runtime = load(
                source,
                choice,
                planner,
                n_ctx=n_ctx,
                memory_limit=limit,
                show_progress=progress,
                calibration=calibration,
            )
            loaded.append(_Contestant(choice, runtime))
        _decode(loaded, windows, plan, n_sequences, bars.wanted(progress))
    finally:
        for one in loaded:
            one.runtime.close()
    alone = Planner.of(source, memory_limit, 1, _N_BATCH, n_threads, planner.device)
    held = [alone.sizes(one.choice, n_ctx) for one in loaded]
    return CacheComparison(
        path=str(source.path),
        tokens=len(loaded[0].nll),
        windows=len(windows),
        window=plan.window,
        prefix=plan.prefix,
        chunk=plan.chunk,
        rows=tuple(one.quality(size, held[0], n_ctx) for one, size in zip(loaded, held, strict=True)),
    )


@dataclass(frozen=True)
class Windows:
    """How a text is cut into windows; arguments as compare_caches()."""

    window: int
    prefix: int
    chunk: int
    max_tokens: int | None

    @classmethod
    def of(cls, source: ModelSource, window: int, prefix: int | None, chunk: int, max_tokens: int | None) -> Windows:
        trained = source.n_ctx_train
        window = whole("window", window) or min(WINDOW, trained)
        prefix = max(window // 4, 1) if prefix is None else whole("prefix", prefix)
        if not 3 <= window <= trained:
            raise ValueError(f"a window must be from 3 to the {trained} tokens the model was trained on, got {window}")
        if not 1 <= prefix <= window - 2:
            raise ValueError(f"prefix must be from 1 to {window - 2} in a window of {window} tokens, got {prefix}")
        if max_tokens is not None:
            positive("max_tokens", max_tokens)
        return cls(window, prefix, positive("chunk", chunk), max_tokens)

    def cut(self, source: ModelSource, text: str | os.PathLike[str] | TokenIds) -> list[Ids]:
        """The windows of a text, all but the last of `window` ids. ValueError: it is too short for one."""
        scored = self.window - 1 - self.prefix
        enough = None if self.max_tokens is None else -(-self.max_tokens // scored) * self.window
        if isinstance(text, os.PathLike):
            ids = file_ids(source.tokenizer, text, enough)
        elif isinstance(text, str):
            ids = np.array(source.tokenizer.encode(text), np.int32)
        else:
            ids = np.array(as_ids(text, int(source.defaults["n_vocab"])), np.int32)
        tokenizer = source.tokenizer_if_any if isinstance(text, (str, os.PathLike)) else None
        opening = ids[:1] if tokenizer and len(ids) and ids[0] == tokenizer.bos_id else ids[:0]
        own = self.window - len(opening)
        body = ids[len(opening) :]
        windows = [np.concatenate([opening, body[at : at + own]]) for at in range(0, len(body), own)]
        windows = [one for one in windows if len(one) >= self.prefix + 2]
        if not windows:
            raise ValueError(
                f"the text has {len(ids)} tokens; with a prefix of {self.prefix} it needs {self.prefix + 2} at least: "
                "give a longer text, or a shorter prefix"
            )
        return self._limited(windows)

    def _limited(self, windows: list[Ids]) -> list[Ids]:
        """The first windows, the last of them shortened, so that at most max_tokens are scored."""
        if self.max_tokens is None:
            return windows
        kept, left = [], self.max_tokens
        for one in windows:
            kept.append(one[: self.prefix + 1 + left])
            left -= len(kept[-1]) - 1 - self.prefix
            if left == 0:
                break
        return kept

    def steps(self, group: Sequence[Ids]) -> list[list[tuple[int, Ids, Ids]]]:
        """The steps after the prefix: in each, for every window, (its index, ids, the id that follows each of them)."""
        steps = []
        for start in range(self.prefix, max(map(len, group)) - 1, self.chunk):
            parts = [(i, ids[start : min(start + self.chunk, len(ids) - 1)]) for i, ids in enumerate(group)]
            steps.append([(i, fed, group[i][start + 1 :][: len(fed)]) for i, fed in parts if len(fed)])
        return steps


class _Contestant:
    """One cache: its model, and the measurements, one value per scored token."""

    def __init__(self, choice: CacheChoice, runtime: Runtime):
        self.choice, self.runtime = choice, runtime
        self.nll: list[float] = []
        self.kl: list[float] = []
        self.same_top: list[bool] = []
        self._sessions: list[Session] = []

    @contextmanager
    def opened(self, group: Sequence[Ids], prefix: int) -> Iterator[None]:
        """Context manager: with a session for each window, whose prefix is prefilled."""
        try:
            self._sessions = [Session.new(self.runtime) for _ in group]
            append_together(
                self.runtime, [(s, ids[:prefix].tolist()) for s, ids in zip(self._sessions, group, strict=True)]
            )
            yield
        finally:
            for session in self._sessions:
                session.close()

    def step(self, items: list[tuple[int, Ids, Ids]]) -> Logits:
        """Logits of all ids of a step, in order."""
        fed = [(self._sessions[i], ids.tolist()) for i, ids, _ in items]
        return append_together(self.runtime, fed, all_logits=True)

    def note(self, items: list[tuple[int, Ids, Ids]], logits: Logits, reference: Logits) -> None:
        """Add the measurements of a step: negative log-probabilities of the ids that follow, and the distance to the
        reference's logits."""
        targets = np.concatenate([following for _, _, following in items])
        nll, kl = surprise_and_divergence(logits, reference, targets)
        self.nll += nll.tolist()
        self.kl += kl.tolist()
        self.same_top += (logits.argmax(-1) == reference.argmax(-1)).tolist()

    def quality(self, size: MemorySizes, kv: MemorySizes, n_ctx: int) -> CacheQuality:
        nll, kl = np.array(self.nll), np.array(self.kl)
        return CacheQuality(
            cache=kinds(size.layers()),
            modes=size.modes,
            types=size.types,
            ranks=size.ranks,
            residual_types=size.residual_types,
            perplexity=float(np.exp(nll.mean())),
            kl_mean=float(kl.mean()),
            kl_p99=float(np.quantile(kl, 0.99, method="higher")),
            kl_max=float(kl.max()),
            same_top=float(np.mean(self.same_top)),
            bytes_per_token=round(size.held_bytes / n_ctx),
            cache_bytes=size.cache_bytes,
            extra_weights=size.mapped + size.weights + size.derived - kv.mapped - kv.weights - kv.derived,
            too_imprecise=self.runtime.lossy,
        )


def _decode(loaded: Sequence[_Contestant], windows: Sequence[Ids], plan: Windows, n_sequences: int, show: bool) -> None:
    """Decode all windows with all caches, n_sequences windows at a time; the first cache is the reference.

    Its logits are kept for several steps, which the other caches then compute one after another: if engines alternated
    at every step, their thread pools would have to be woken each time, and logits of a whole window may be too large to
    keep.
    """
    total = sum(len(one) - 1 - plan.prefix for one in windows) * len(loaded)
    done, reference = 0, loaded[0]
    with bars.bar(show, total, "perplexity", "tok") as update:
        for first in range(0, len(windows), n_sequences):
            group = windows[first : first + n_sequences]
            steps = plan.steps(group)
            row_bytes = 4 * len(group) * plan.chunk * reference.runtime.n_vocab
            stride = max(1, _KEPT_BYTES // row_bytes)
            with _all_opened(loaded, group, plan.prefix):
                for at in range(0, len(steps), stride):
                    wanted = list[Logits]()
                    for one in loaded:
                        for i, items in enumerate(steps[at : at + stride]):
                            logits = one.step(items)
                            if one is reference:
                                wanted.append(logits)
                            one.note(items, logits, wanted[i])
                            done += len(logits)
                            update(done, total)


@contextmanager
def _all_opened(loaded: Sequence[_Contestant], group: Sequence[Ids], prefix: int) -> Iterator[None]:
    if not loaded:
        yield
        return
    with loaded[0].opened(group, prefix), _all_opened(loaded[1:], group, prefix):
        yield


def _distinct(source: ModelSource, choices: Sequence[CacheChoice]) -> list[CacheChoice]:
    """The reference and the choices, without duplicates."""
    found: list[CacheChoice] = []
    for choice in (CacheChoice.of(f"{source.baseline}:f32"), *choices):
        if all(choice.arguments(source) != other.arguments(source) for other in found):
            found.append(choice)
    return found
