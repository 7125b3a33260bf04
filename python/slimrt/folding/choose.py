# SPDX-License-Identifier: Apache-2.0
"""Which cache each layer gets when the choice is left open: the fewest bytes that keep its error within a target.

The rule: `Errors.size`, which is the relative error of V, or that of attention's output over sqrt(2) if that is larger,
must not exceed the target: neither as predicted on the calibration text nor as measured on text held out from it. Of
rows that age these are the errors of the oldest, which are the largest, and the bytes those of a long context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

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
_PARTS = (8, 4, 2, 1)  # of V's width, ranks that are looked at whatever the target, where K knows only a part of V
_EIGHTHS = (1, 2, 3, 4, 6, 8)  # of V's width, ranks for a budget
_WIDER = (1.0, 1.25, 1.5, 2.0)  # ranks tried above the one that V alone would need


@dataclass(frozen=True)
class Offered:
    """What may be chosen from.

    Attributes:
        mode: AUTO: all that are exact here, and lowrank; else that one.
        types: element types that rows may have; None: AUTO_TYPES, and LEVEL_TYPES for rows that age.
        heads: KV heads that share a latent; None: as many as is usual.
        lossy: modes that are refused because they lose too much of V, too.
        predict: of V, lowrank keeps only what K does not tell.
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
    """One cache for one layer, folded when it is looked at.

    Attributes:
        mode, type, rank, residual_type: as the runtime knows them.
        bytes: a token, of a long context.
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
        """What a target bounds."""
        return max(self.predicted.size, self.measured.size if self.measured else 0.0)

    @property
    def refused(self) -> bool:
        """Whether a file with it would not load (gate): it computes V, or K, and loses too much of it."""
        if self.mode not in LOSSY:
            return False
        if self.reader.fold_error() > TOO_LARGE:
            return True
        return self.mode != "v" and self.measured is not None and self.measured.value > TOO_LARGE

    def offer(self) -> Offer:
        return Offer(self.bytes, loss(self.reader), self.mode, self.type, self.rank, self.residual_type)

    def meets(self, target: float) -> bool:
        """Whether every error is within the target, the dearer ones looked at last."""
        return self.value_error <= target and self.predicted.size <= target and self.error <= target

    def beats(self, other: Option) -> bool:
        """Nowhere worse, somewhere better."""
        return _better((self.bytes, self.predicted.size), (other.bytes, other.predicted.size))

    def reads_v_better(self, other: Option) -> bool:
        """`beats` among options of k+r that differ in the residual only."""
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
        held_out: windows of other text; none: what is predicted has to do.
        target: relative error.
        offered: what may be chosen.
        half: as `fold.reader`.

    Returns:
        The option, of several with as many bytes one that needs no folded weights, and then the one with the smallest
        error; where nothing meets the target, the one with the smallest error. And the options that no other
        beats in bytes and error, by bytes: for grouped-query attention, where k+r has to earn its place beside kv;
        empty otherwise.
    """
    options = sorted(_options(sample, held_out, offered, target, half=half), key=lambda option: option.bytes)

    def serves(option: Option) -> bool:
        return option.meets(target) and (offered.lossy or not option.refused)

    found = next(filter(serves, options), None)
    if found is None:
        found = _most_precise(options)
    else:
        equal = [option for option in options if option.bytes == found.bytes and serves(option)]
        found = min(equal, key=lambda option: (bool(option.reader.tensors), option.error))
    attention = sample.weights.attention
    return found, front(options) if attention.kv_width < attention.d else []


def _most_precise(options: list[Option]) -> Option:
    """The one with the smallest error, without measuring those whose predicted one is larger already."""
    first, *others = sorted(options, key=lambda option: option.predicted.size)
    for option in others:
        if option.predicted.size >= first.error:
            break
        first = min(first, option, key=lambda one: one.error)
    return first


def offers(sample: Sample, held_out: list[Window], offered: Offered = Offered(), *, half: bool) -> list[Offer]:
    """The caches of a layer that none beats in bytes and `budget.loss`, fewest bytes first. Arguments as `choose`."""
    options = _options(sample, held_out, offered, None, half=half)
    by_offer = {option.offer(): replace(option) for option in options}  # less the reader, which may be large
    kept: list[Offer] = []
    for offer in sorted(by_offer, key=lambda one: (one.bytes, one.loss)):
        better = not kept or offer.loss < kept[-1].loss
        if better and (offered.lossy or not by_offer[offer].refused):
            kept.append(offer)
    return kept


def front(options: list[Option]) -> list[Option]:
    """The options that none beats in bytes and predicted error, fewest bytes first.

    Options of k+r with the same type read the same keys, so one whose V is worse for as many bytes is beaten.
    """
    kept = [option for option in options if not any(other.reads_v_better(option) for other in options)]
    return [option for option in kept if not any(other.beats(option) for other in kept)]


def _options(
    sample: Sample, held_out: list[Window], offered: Offered, target: float | None, *, half: bool
) -> Iterator[Option]:
    """target: None: whatever the error."""
    attention = sample.weights.attention
    for type_name in AUTO_TYPES if offered.types is None else offered.types:
        for mode in attention.predictable() if offered.mode == AUTO else ():
            if mode == "k+r":
                yield from _conditioned(sample, held_out, type_name, target, half=half)
            elif not _singular(sample, mode):
                size = bytes_per_token(planes(attention, mode, type_name))
                make = _later(sample, mode, type_name, half)
                yield Option(mode, type_name, 0, "", size, make, held_out)
    if offered.level_types and attention.modes()[LATENT_MODE].legal:
        yield from _aging(sample, held_out, offered)


def _aging(sample: Sample, held_out: list[Window], offered: Offered) -> Iterator[Option]:
    """lowrank in every oldest level."""
    types = offered.level_types
    shared = None if offered.predict else LowRank(sample, heads=offered.heads)
    for type_k in types:
        fold = shared or LowRank(sample, heads=offered.heads, predicts=type_k)
        for type_v, part in product(types, PARTS):
            levels = aged_levels(type_k, type_v, part, types, predict=offered.predict)
            make = partial(fold.reader, levels.text)
            yield Option(LATENT_MODE, levels.text, 0, "", fold.long_bytes(levels), make, held_out)


def _later(sample: Sample, mode: str, type_name: str, half: bool) -> Callable[[], Reader]:
    return lambda: reader(sample, mode, type_name, half=half)


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
    """k+r with the smallest rank, and some above it, at which V is expected to meet the target; without one, parts of
    V's width."""
    attention = sample.weights.attention
    grouped, width = attention.kv_width < attention.d, attention.kv_width
    most = width if grouped or target is None else width // 2  # of V that K nearly knows, half is mostly enough
    fold = Conditioned(sample, type_name, half=half, max_rank=most)
    if target is not None:
        enough = [rank for kind in RESIDUAL_TYPES if (rank := fold.smallest_rank(kind, target)) is not None]
        if most < width and min(enough, default=most) * _WIDER[1] > most:
            most, fold = width, Conditioned(sample, type_name, half=half, max_rank=width)
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
        yield Option("k+r", type_name, rank, kind, size, _at(fold, rank, kind), held_out)


def _at(fold: Conditioned, rank: int, residual_type: str) -> Callable[[], Reader]:
    return lambda: fold.reader(rank, residual_type)


def share_of_v(sample: Sample) -> float:
    """The share of V's variance that an exact K predicts: 1 - tr(C) / E|v|^2, with no noise and no residual.

    1 where W_K has an inverse; with grouped-query attention what K knows of V.
    """
    weights, moment = sample.weights, sample.moment
    if not sample.value_energy:
        return 1.0
    energy = np.einsum("ij,ij->j", weights.w_k, moment @ weights.w_k)
    # far below any signal: S may be singular
    floor = np.maximum(energy, energy.max(initial=0.0) * 1e-6) * 1e-12
    weight = wiener(moment, weights.w_k, weights.w_v, floor)
    missed = weights.w_v - weights.w_k @ weight
    return 1 - float(np.einsum("ij,ij->", missed, moment @ missed)) / sample.value_energy


def kv_bytes(sample: Sample) -> int:
    """Bytes a token of kv f16, which others are compared with."""
    return bytes_per_token(planes(sample.weights.attention, "kv", "f16"))
