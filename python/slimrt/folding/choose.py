# SPDX-License-Identifier: Apache-2.0
"""Choosing a cache for each layer: the fewest bytes that keep its error within a target.

The criterion: `Errors.size`, the larger of the relative error of V and that of attention's output over sqrt(2), must
not exceed the target, neither as predicted on the calibration text nor as measured on text held out from it. For rows
that age the errors are those of the oldest level, which are the largest, and the bytes those of a long context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from slimrt.errors import CacheUnsupportedError
from slimrt.folding.budget import Offer, loss
from slimrt.folding.conditioned import Conditioned
from slimrt.folding.fold import reader
from slimrt.folding.lowrank import LATENT_MODE, LEVEL_TYPES, PARTS, LowRank, aged_levels
from slimrt.folding.planes import bytes_per_token, planes
from slimrt.folding.precision import Errors, measured, predicted
from slimrt.folding.readback import Reader, Sample
from slimrt.folding.report import TOO_LARGE
from slimrt.folding.wiener import wiener
from slimrt.folding.window import Window
from slimrt.modes import AUTO, LOSSY

AUTO_TYPES = ("f16", "q8", "fp8_e4m3", "q4")
RESIDUAL_TYPES = ("q4", "q8", "f16")
_PARTS = (8, 4, 2, 1)  # ranks V's width / part are tried for any target with GQA, where K predicts only a part of V
_EIGHTHS = (1, 2, 3, 4, 6, 8)  # ranks to choose from with a budget, in eighths of V's width
_WIDER = (1.0, 1.25, 1.5, 2.0)  # factors of the smallest rank that suffices for V: the scores may need more


@dataclass(frozen=True)
class Offered:
    """The caches to choose from.

    Attributes:
        mode: AUTO: all modes that are exact here, and lowrank; else "lowrank" only.
        types: allowed element types of rows; None: AUTO_TYPES, and LEVEL_TYPES for rows that age.
        heads: KV heads that share a latent; None: the default.
        lossy: include modes that are normally refused because of their error of V.
        predict: lowrank stores the difference of V from its prediction from K.
    """

    mode: str = AUTO
    types: Sequence[str] | None = None
    heads: int | None = None
    lossy: bool = False
    predict: bool = False

    @property
    def level_types(self) -> list[str]:
        return [name for name in LEVEL_TYPES if self.types is None or name in self.types]


@dataclass
class Option:
    """One cache for one layer, folded when an error of it is first needed.

    Attributes:
        mode, type, rank, residual_type: as in LayerCache.
        bytes: per token of a long context.
        make: folds it. held_out: windows to measure it on.
    """

    mode: str
    type: str
    rank: int
    residual_type: str
    bytes: float
    make: Callable[[], Reader]
    held_out: list[Window]

    @cached_property
    def reader(self) -> Reader:
        return self.make()

    @cached_property
    def predicted(self) -> Errors:
        return predicted(self.reader)

    @cached_property
    def measured(self) -> Errors | None:
        return measured(self.reader, self.held_out)

    @property
    def error(self) -> float:
        """The error that a target bounds."""
        return max(self.predicted.size, self.measured.size if self.measured else 0.0)

    @property
    def refused(self) -> bool:
        """Whether loading would refuse it (gate.py): it computes V or K with too large an error."""
        if self.mode not in LOSSY:
            return False
        if self.reader.fold_error() > TOO_LARGE:
            return True
        return self.mode != "v" and self.measured is not None and self.measured.value > TOO_LARGE

    def offer(self) -> Offer:
        return Offer(self.bytes, loss(self.reader), self.mode, self.type, self.rank, self.residual_type)

    def meets(self, target: float) -> bool:
        """Whether every error is within the target; cheap ones are computed first."""
        return self.value_error <= target and self.predicted.size <= target and self.error <= target

    def beats(self, other: Option) -> bool:
        """Whether it dominates another option in bytes and predicted error (Pareto)."""
        return _better((self.bytes, self.predicted.size), (other.bytes, other.predicted.size))

    def reads_v_better(self, other: Option) -> bool:
        """Whether it dominates an option of k+r with the same type in bytes and error of V; the residual has no
        influence on the scores."""
        if self.mode != "k+r" or (self.mode, self.type) != (other.mode, other.type):
            return False
        return _better((self.bytes, self.value_error), (other.bytes, other.value_error))

    @cached_property
    def value_error(self) -> float:
        return self.reader.value_error()


def _better(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def choose(
    sample: Sample, held_out: list[Window], target: float, offered: Offered = Offered(), *, half: bool
) -> tuple[Option, list[Option]]:
    """Return a layer's cheapest cache within the target, and the Pareto front where K determines only a part of V.

    Args:
        sample: the layer and its calibration text.
        held_out: windows of other text; []: only predicted errors are used.
        target: relative error.
        offered: the caches to choose from.
        half: as `fold.reader`.

    Returns:
        The option: of those with the fewest bytes, preferably one without folded weights, then the one with the
        smallest error; if none meets the target, the one with the smallest error. And the Pareto front of bytes and
        error, by bytes, for grouped-query attention, where k+r is not always better than kv; else [].
    """
    options = _by_bytes(_families(sample, held_out, offered, target, half=half))
    tried: list[Option] = []
    serve: list[Option] = []  # all with the same bytes
    for option in options:
        tried.append(option)
        if serve and option.bytes > serve[0].bytes:
            break
        if option.meets(target) and (offered.lossy or not option.refused):
            serve.append(option)
    found = (
        min(serve, key=lambda option: (bool(option.reader.tensors), option.error)) if serve else _most_precise(tried)
    )
    attention = sample.weights.attention
    return found, front([*tried, *options]) if attention.kv_width < attention.d else []


def _most_precise(options: list[Option]) -> Option:
    """The option with the smallest error. Options whose predicted error is larger already are not measured."""
    first, *others = sorted(options, key=lambda option: option.predicted.size)
    for option in others:
        if option.predicted.size >= first.error:
            break
        first = min(first, option, key=lambda one: one.error)
    return first


def offers(sample: Sample, held_out: list[Window], offered: Offered = Offered(), *, half: bool) -> list[Offer]:
    """The Pareto front of a layer's caches in bytes and `budget.loss`, fewest bytes first. Arguments as `choose`."""
    options = chain.from_iterable(family.make() for family in _families(sample, held_out, offered, None, half=half))
    by_offer = {option.offer(): replace(option) for option in options}  # copies without the reader, which may be large
    kept: list[Offer] = []
    for offer in sorted(by_offer, key=lambda one: (one.bytes, one.loss)):
        better = not kept or offer.loss < kept[-1].loss
        if better and (offered.lossy or not by_offer[offer].refused):
            kept.append(offer)
    return kept


def front(options: list[Option]) -> list[Option]:
    """The Pareto front in bytes and predicted error, fewest bytes first.

    Options of k+r with the same type read the same keys, so of these one with a larger error of V at the same bytes is
    dropped too.
    """
    kept = [option for option in options if not any(other.reads_v_better(option) for other in options)]
    return [option for option in kept if not any(other.beats(option) for other in kept)]


class _Family(NamedTuple):
    """Options that are made together. least: bytes that none of them is below."""

    least: float
    make: Callable[[], Iterable[Option]]


def _by_bytes(families: Iterable[_Family]) -> Iterator[Option]:
    """Their options, fewest bytes first. Those of a family, which take long, are made when it is its turn."""
    waiting: list[Option] = []
    for family in [*sorted(families, key=lambda one: one.least), _Family(math.inf, list)]:
        while waiting and waiting[0].bytes < family.least:
            yield waiting.pop(0)
        waiting = sorted([*waiting, *family.make()], key=lambda option: option.bytes)


def _families(
    sample: Sample, held_out: list[Window], offered: Offered, target: float | None, *, half: bool
) -> Iterator[_Family]:
    """All caches to choose from. target: None: not limited by an error."""
    attention = sample.weights.attention
    for type_name in AUTO_TYPES if offered.types is None else offered.types:
        for mode in attention.predictable() if offered.mode == AUTO else ():
            size = bytes_per_token(planes(attention, mode, type_name))
            if mode == "k+r":
                yield _Family(size, partial(_conditioned, sample, held_out, type_name, target, half=half))
            elif not _singular(sample, mode):
                make = partial(reader, sample, mode, type_name, half=half)
                yield _Family(size, partial(list, [Option(mode, type_name, 0, "", size, make, held_out)]))
    if offered.level_types and attention.modes()[LATENT_MODE].legal:
        yield _Family(0, partial(_aging, sample, held_out, offered))


def _aging(sample: Sample, held_out: list[Window], offered: Offered) -> Iterator[Option]:
    """Mode lowrank, for every combination of types and part of V in the oldest level."""
    types = offered.level_types
    shared = None if offered.predict else LowRank(sample, heads=offered.heads)
    for type_k in types:
        fold = shared or LowRank(sample, heads=offered.heads, predicts=type_k)
        for type_v, part in product(types, PARTS):
            levels = aged_levels(type_k, type_v, part, types, predict=offered.predict)
            make = partial(fold.reader, levels.text)
            yield Option(LATENT_MODE, levels.text, 0, "", fold.long_bytes(levels), make, held_out)


def _singular(sample: Sample, mode: str) -> bool:
    try:
        if mode in ("k", "v"):
            _ = sample.v_from_k if mode == "k" else sample.k_from_v
        elif mode == "xr":
            _ = sample.rotated_cond
    except CacheUnsupportedError:
        return True
    return False


def _conditioned(
    sample: Sample, held_out: list[Window], type_name: str, target: float | None, *, half: bool
) -> Iterator[Option]:
    """k+r with the smallest rank at which V is expected to meet the target, and some larger ranks; without a target,
    with ranks that are fractions of V's width."""
    attention = sample.weights.attention
    grouped, width = attention.kv_width < attention.d, attention.kv_width
    most = width if grouped or target is None else width // 2  # with MHA K nearly determines V: half is mostly enough
    fold = Conditioned(sample, type_name, half=half, max_rank=most, known=sample.products)
    if target is not None:
        enough = [rank for kind in RESIDUAL_TYPES if (rank := fold.smallest_rank(kind, target)) is not None]
        if most < width and min(enough, default=most) * _WIDER[1] > most:
            most = width
            fold = Conditioned(sample, type_name, half=half, max_rank=most, known=sample.products)
    found: set[tuple[int, str]] = set()
    for residual_type in RESIDUAL_TYPES:
        ranks = {width // part // 4 * 4 for part in _PARTS} if grouped else set()
        if target is None:
            ranks = {width * eighths // 8 // 4 * 4 for eighths in _EIGHTHS}
        elif (least := fold.smallest_rank(residual_type, target)) is not None:
            ranks |= {min(int(least * wider) // 4 * 4, most) for wider in _WIDER}
        found |= {(rank, residual_type if rank else "") for rank in ranks}
    for rank, kind in sorted(found):
        size = bytes_per_token(planes(attention, "k+r", type_name, rank, kind))
        yield Option("k+r", type_name, rank, kind, size, partial(fold.reader, rank, kind), held_out)


def share_of_v(sample: Sample) -> float:
    """The fraction of V's variance that an unrounded K predicts: 1 - tr(C) / E|v|^2, without noise and residual.

    It is 1 if W_K has an inverse, and less with grouped-query attention.
    """
    weights, moment = sample.weights, sample.moment
    if not sample.value_energy:
        return 1.0
    energy = np.einsum("ij,ij->j", weights.w_k, moment @ weights.w_k)
    # regularises, far below any signal: S may be singular
    floor = np.maximum(energy, energy.max(initial=0.0) * 1e-6) * 1e-12
    weight = wiener(moment, weights.w_k, weights.w_v, floor)
    missed = weights.w_v - weights.w_k @ weight
    return 1 - float(np.einsum("ij,ij->", missed, moment @ missed)) / sample.value_energy


def kv_bytes(sample: Sample) -> int:
    """Bytes per token of kv f16, the reference."""
    return bytes_per_token(planes(sample.weights.attention, "kv", "f16"))
