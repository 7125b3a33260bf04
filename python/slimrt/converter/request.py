# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of a conversion that concern the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from slimrt import core
from slimrt.cache.config import CacheConfig
from slimrt.folding.budget import Budget
from slimrt.folding.choose import AUTO_TYPES
from slimrt.folding.layers import Request
from slimrt.folding.lowrank import BLOCK, LATENT_MODE, LEVEL_TYPES, levels_text
from slimrt.modes import AGING, AUTO, CACHE_TYPES, DEFAULT_TYPE, MODES, cross_hint
from slimrt.plumbing.arguments import real


@dataclass(frozen=True)
class Asked:
    """The arguments of `convert` about the cache, as they were given."""

    cache: str | None
    cache_type: str | Sequence[str]
    target_error: float | None
    target_bytes: int | str | None
    rank: float | Sequence[float] | None
    residual_type: str | None
    bits: int | Sequence[int] | None
    share: float | Sequence[float] | None
    sinks: int | None
    group: int | None
    heads: int | None
    predict: bool
    exact: bool
    lossy: bool
    v_heads: float = 0.0

    @property
    def targeted(self) -> bool:
        """Whether each layer's levels or mode are to be chosen."""
        return self.cache == AUTO or self.target_error is not None or self.target_bytes is not None

    def spelled_out(self) -> Asked:
        """With a cache such as "k+r:q8:16:q4" split into mode, cache_type, rank and residual_type.

        Raises:
            ValueError, UnsupportedError: as CacheConfig.parse; or a part is also given as an argument of its own.
        """
        if not isinstance(self.cache, str) or ":" not in self.cache:
            return self
        said = CacheConfig.parse(self.cache)
        parts: dict[str, Any] = {"cache_type": said.type, "rank": said.rank, "residual_type": said.residual_type}
        parts = {name: value for name, value in parts.items() if value not in (None, AUTO)}
        for name in parts:
            if getattr(self, name) not in (None, AUTO):
                raise ValueError(f"cache {self.cache!r} says {name}, which was given too: leave one out")
        return replace(self, cache=said.mode, **parts)


def shown(cache: str | None) -> str:
    """The cache of a conversion, for messages."""
    return "a conversion that names none" if cache is None else repr(cache)


def checked(asked: Asked) -> Request:
    """Check the arguments and convert them to a Request.

    Raises:
        ValueError, TypeError, UnsupportedError: as `convert`.
    """
    if (mode := asked.cache) not in (None, AUTO, *MODES):
        raise ValueError(f"unknown cache mode {mode!r}; the modes are: {', '.join(MODES)}{cross_hint(str(mode))}")
    _check_target(asked)
    _check_v_heads(asked)
    types = _types(asked)
    if asked.cache is None and asked.cache_type != AUTO:
        raise ValueError("cache_type is of the rows of a cache, and this conversion is for none: name it too (--cache)")
    rank, residual_type = asked.rank, asked.residual_type
    if ((rank is not None and asked.cache != LATENT_MODE) or residual_type is not None) and asked.cache != "k+r":
        raise ValueError(f"rank and residual_type are for cache 'k+r', not for {shown(asked.cache)}")
    if asked.exact and asked.cache not in ("k", "v"):
        raise ValueError(f"exact folds are those of cache 'k' and 'v', not of {shown(asked.cache)}")
    if asked.cache != "k+r":
        rank = None
    elif rank is not None and not isinstance(rank, Integral):
        raise ValueError(f"rank of cache 'k+r' must be a whole number, the width of its residual, got {rank!r}")
    budget = None if asked.target_bytes is None else Budget.of(asked.target_bytes)
    target = None if asked.target_error is None else float(asked.target_error)
    if target is None and budget is None and asked.cache == AUTO:
        target = 0.01
    said = asked.cache_type != AUTO or (asked.cache == LATENT_MODE and not asked.targeted)
    rank = None if rank is None else int(rank)
    return Request(
        asked.cache, types, said, target, rank, residual_type, asked.heads, budget, asked.lossy, asked.predict,
        asked.v_heads,
    )  # fmt: skip


def _check_target(asked: Asked) -> None:
    for name in ("target_error", "target_bytes"):
        if getattr(asked, name) is not None and asked.cache not in (AUTO, LATENT_MODE):
            raise ValueError(f"{name} is for cache '{AUTO}' and '{LATENT_MODE}', not for {shown(asked.cache)}")
    if asked.target_error is not None and asked.target_bytes is not None:
        raise ValueError("target_error and target_bytes were given: give one of them")
    if asked.target_error is not None and not 0 < real("target_error", asked.target_error) < 1:
        raise ValueError(f"target_error must be above 0 and below 1, got {asked.target_error}")


def _check_v_heads(asked: Asked) -> None:
    if not 0 <= real("v_heads", asked.v_heads) < 1:
        raise ValueError(f"v_heads must be at least 0 and below 1, a share of the heads, got {asked.v_heads}")
    if asked.v_heads and asked.cache not in ("k", "k+r"):
        raise ValueError(f"v_heads is for cache 'k' and 'k+r', which compute V, not for {shown(asked.cache)}")


def _types(asked: Asked) -> tuple[str, ...]:
    """Element types of the rows, or levels of an aging mode; with a target several, to choose from."""
    levels = _levels(asked)
    if levels is not None:
        return (core.levels(LATENT_MODE, levels).text,)
    given = (asked.cache_type,) if isinstance(asked.cache_type, str) else tuple(asked.cache_type)
    if given == (AUTO,):
        given = AUTO_TYPES if asked.cache == AUTO else LEVEL_TYPES if asked.targeted else (DEFAULT_TYPE,)
    if asked.cache in AGING and len(given) == 1 and not asked.targeted:
        given = (core.levels(asked.cache, given[0]).text,)
    else:
        for name in given:
            _check_type(name)
    if asked.residual_type is not None:
        _check_type(asked.residual_type)
    if len(given) != 1 and not asked.targeted:
        raise ValueError(f"{len(given)} cache types were given; several to choose from are for cache 'auto'")
    if asked.cache == LATENT_MODE and asked.targeted and not set(given) & set(LEVEL_TYPES):
        raise ValueError(f"levels of cache '{LATENT_MODE}' are chosen of {', '.join(LEVEL_TYPES)}, and not of these")
    return given


def _check_type(name: str) -> None:
    if name not in CACHE_TYPES:
        raise ValueError(f"unknown cache type {name!r}; the types are: {', '.join(CACHE_TYPES)}")


def _levels(asked: Asked) -> str | None:
    """Levels of mode lowrank in the core's notation; None for another mode, or if cache_type or a target determines
    them."""
    parameters = (asked.bits, asked.share, asked.sinks)
    if asked.cache != LATENT_MODE:
        if asked.predict and asked.cache != AUTO:
            raise ValueError(f"predict is for cache '{LATENT_MODE}' and '{AUTO}', not for {shown(asked.cache)}")
        if any(one is not None for one in (*parameters, asked.group, asked.heads)):
            raise ValueError(
                f"bits, share, sinks, group and heads are for cache '{LATENT_MODE}', not for {shown(asked.cache)}"
            )
        return None
    if asked.group not in (None, BLOCK):
        raise ValueError(
            f"group must be {BLOCK}, got {asked.group}: rows lie in blocks of {BLOCK} tokens, which share the scales "
            f"of K, and V has scales for {BLOCK} columns"
        )
    given = any(one is not None for one in (asked.rank, *parameters))
    if asked.targeted and given:
        raise ValueError("rank, bits, share and sinks make the levels that a target chooses: give one or the other")
    if asked.targeted:
        return None
    if asked.cache_type == AUTO:
        return levels_text(asked.rank, *parameters, predict=asked.predict)
    if given or asked.predict:
        raise ValueError(
            "rank, bits, share, sinks and predict make the levels that cache_type says: give one or the other"
        )
    return None
