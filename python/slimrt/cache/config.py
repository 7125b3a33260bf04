"""The cache of each layer: the user's arguments, checked and converted to the arguments of the core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

from slimrt import core
from slimrt.cache.cross import CrossConfig
from slimrt.errors import CacheUnsupportedError, UnsupportedError
from slimrt.info import LayerOptions
from slimrt.modelfile.source import ModelSource
from slimrt.modes import (
    AGING,
    AUTO,
    CACHE_TYPES,
    CODED_BY_AGE,
    INVERTED,
    RESIDUAL_MODE,
    SPARED,
    check_row_type,
    check_type,
    cross_hint,
    default_residual,
)
from slimrt.plumbing.arguments import check_switch, real, unknown, whole


@dataclass(frozen=True)
class CacheConfig:
    """The cache of one layer, or of all.

    Attributes:
        mode: "kv", "k", "k+r", "v", "x", "xr", "kivi", "lowrank", "latent", or "auto" (what the file says, else
            what the core chooses).
        type: element type of the rows; "auto": what the file says, else f16. In modes whose rows age also the levels
            that they are requantised to (docs/glossary.md), such as "q2@0.5+q4*0.1+sinks=4".
        rank: width of the residual of mode k+r, 0 for none; None: what the file says, else
            slimrt.modes.default_residual().
        residual_type: its element type; None: as rank.

    Raises:
        UnsupportedError: an unknown type. ValueError, TypeError: a rank below 0 or for a mode without a residual, or
            an argument of a wrong type.
    """

    mode: str
    type: str = AUTO
    rank: int | None = None
    residual_type: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str) or not self.mode:
            raise ValueError(f"cache must be a mode such as 'kv', got {self.mode!r}")
        check_row_type(self.mode, self.type)
        if self.residual_type is not None:
            check_type(self.residual_type, "residual type", CACHE_TYPES)
        if self.rank is not None:
            object.__setattr__(self, "rank", whole("rank", self.rank))
            if self.rank < 0:
                raise ValueError(f"rank must not be negative, got {self.rank}")
        if (self.rank is not None or self.residual_type is not None) and self.mode not in (RESIDUAL_MODE, AUTO):
            raise ValueError(
                f"cache mode '{self.mode}' has no residual: rank and residual type belong to mode '{RESIDUAL_MODE}'"
            )

    @classmethod
    def parse(cls, text: str) -> CacheConfig:
        """Parse "mode", "mode:type", "k+r:type:rank" or "k+r:type:rank:residual type"; an empty part has its default.

        Raises:
            ValueError, UnsupportedError: as the class; or more than four parts, or a rank that is not a number.
        """
        mode, type, rank, residual_type, *more = [*text.split(":"), "", "", ""]
        if any(more):
            raise ValueError(f"cache '{text}' has too many parts; what there may be: mode:type:rank:residual type")
        if rank and not rank.isdecimal():
            raise ValueError(f"cache '{text}': the rank '{rank}' is not a whole number (mode:type:rank:residual type)")
        return cls(mode, type or AUTO, int(rank) if rank else None, residual_type or None)

    @classmethod
    def of(cls, cache: str | CacheConfig) -> CacheConfig:
        """The argument itself if it is a CacheConfig, else parse(cache). Errors as parse; TypeError: neither."""
        if isinstance(cache, CacheConfig):
            return cache
        if not isinstance(cache, str):
            raise TypeError(f"a cache is a mode such as 'kv' or 'k+r:q8', or a CacheConfig, got {cache!r}")
        return cls.parse(cache)

    def __str__(self) -> str:
        parts = [self.mode, "" if self.type == AUTO else self.type]
        parts += ["" if self.rank is None else str(self.rank), self.residual_type or ""]
        return ":".join(parts).rstrip(":")


Cache = str | CacheConfig | Sequence[str | CacheConfig]


class CacheOptions(TypedDict, total=False):
    """The keyword arguments about caches of slimrt.Model and slimrt.plan. Model documents them, CacheChoice.of has
    their defaults."""

    cache: Cache
    cache_type: str
    cache_type_k: str | None
    cache_type_v: str | None
    rank: int | None
    residual_type: str | None
    sparse_threshold: float
    sparse_delta: float | str
    cross: str
    cross_type: str
    n_source: int
    allow_lossy: bool


AS_STORED = -1.0  # a sparse_delta to be taken from the file


@dataclass(frozen=True)
class LayerCache:
    """One layer's resolved cache. rank 0 and residual_type "": no residual. v_heads: number of KV heads that store V
    beside K, from the file."""

    mode: str
    type_k: str
    type_v: str
    rank: int = 0
    residual_type: str = ""
    v_heads: int = 0

    @property
    def type(self) -> str:
        """Element type of the row: of V in mode v, else of K (or x)."""
        return self.type_v if INVERTED.get(self.mode) == "W_V" else self.type_k


@dataclass(frozen=True)
class CacheChoice:
    """The checked cache arguments of a model.

    Attributes:
        configs: one for all layers, or one per layer.
        type_k, type_v: types where a config has type "auto".
        sparse_threshold, sparse_delta: as slimrt.Model; AS_STORED: the delta in the file.
        cross: the cache of cross-attention.
        allow_lossy: load modes although their error of V is over 5 % in a layer.
    """

    configs: tuple[CacheConfig, ...]
    type_k: str
    type_v: str
    sparse_threshold: float
    cross: CrossConfig = CrossConfig()
    allow_lossy: bool = False
    sparse_delta: float = 0.0

    @classmethod
    def of(cls, cache: Cache = AUTO, cache_type: str = AUTO, /, **options: Unpack[CacheOptions]) -> CacheChoice:
        """From the arguments of slimrt.Model; what an entry of `cache` specifies takes precedence over the others.

        Raises:
            UnsupportedError: an unknown type. ValueError, TypeError: as CacheConfig; a sparse_threshold or sparse_delta
                outside [0, 1); a rank or residual type although no layer has a residual; an unknown argument.
        """
        if unexpected := options.keys() - CacheOptions.__optional_keys__:
            raise TypeError(f"unexpected arguments: {', '.join(sorted(unexpected))}")
        cache, cache_type = options.get("cache", cache), options.get("cache_type", cache_type)
        configs = _configs(cache)
        if cache_type not in (*CACHE_TYPES, AUTO) and all(config.mode in AGING for config in configs):  # it has levels
            configs = [replace(one, type=cache_type) if one.type == AUTO else one for one in configs]
            cache_type = AUTO
        type_k, type_v = options.get("cache_type_k"), options.get("cache_type_v")
        type_k, type_v = (cache_type if type is None else type for type in (type_k, type_v))
        for name in (cache_type, type_k, type_v):
            check_type(name, "cache type", (*CACHE_TYPES, AUTO))
        rank, residual_type = options.get("rank"), options.get("residual_type")
        if rank is not None or residual_type is not None:
            configs = _with_residual(configs, rank, residual_type)
        threshold = real("sparse_threshold", options.get("sparse_threshold", 0.0))
        if not 0 <= threshold < 1:
            raise ValueError(f"sparse_threshold must be at least 0 and below 1, got {threshold}")
        asked = options.get("sparse_delta", 0.0)
        delta = AS_STORED if asked == AUTO else real("sparse_delta", asked)
        if asked != AUTO and not 0 <= delta < 1:
            raise ValueError(f"sparse_delta must be at least 0 and below 1, or 'auto', got {delta}")
        cross = CrossConfig(options.get("cross", AUTO), options.get("cross_type", AUTO), options.get("n_source", 0))
        check_switch("allow_lossy", allow_lossy := options.get("allow_lossy", False))
        return cls(tuple(configs), type_k, type_v, threshold, cross, allow_lossy, delta)

    @property
    def uniform(self) -> CacheConfig | None:
        """The config of all layers; None if they differ."""
        return self.configs[0] if len(set(self.configs)) == 1 else None

    def with_mode(self, mode: str) -> CacheChoice:
        """The same choice in another mode, the same in all layers: with its default residual; in modes that age, with
        their default levels unless levels were given for this mode; and with only the sparsity options that apply."""
        asked = self.uniform
        if asked and asked.mode == mode and mode in AGING:
            return replace(self, sparse_threshold=0.0, sparse_delta=0.0)
        type = asked.type if asked and asked.type in CACHE_TYPES and asked.mode not in CODED_BY_AGE else AUTO
        if mode in CODED_BY_AGE:
            bare = replace(self, sparse_threshold=0.0, sparse_delta=0.0)
            return replace(bare, configs=(CacheConfig(mode),), type_k=AUTO, type_v=AUTO)
        of_all = mode in SPARED  # where sparse_delta has something to skip
        return replace(
            self,
            configs=(CacheConfig(mode, type),),
            sparse_threshold=self.sparse_threshold * (mode == "kv" or of_all),
            sparse_delta=self.sparse_delta * of_all,
        )

    def with_cross(self, cross: CrossConfig) -> CacheChoice:
        """The same choice with another cache of cross-attention."""
        return replace(self, cross=cross)

    def layers(self, source: ModelSource) -> tuple[LayerCache, ...]:
        """Each layer's cache as the core resolves it, with the default residual where none is specified.

        Raises:
            ValueError: the number of configs is not that of layers; a rank that differs from the file's folded weights,
                or is impossible.
        """
        return tuple(_settled(found, source.kv_width) for found in core.resolve_layers(source.file, **self._asked()))

    def _asked(self) -> dict[str, Any]:
        """The user's choice, unresolved, as arguments of core.resolve_layers."""
        given: dict[str, list[Any]] = {
            "cache": [config.mode for config in self.configs],
            "cache_type_k": [self.type_k if config.type == AUTO else config.type for config in self.configs],
            "cache_type_v": [self.type_v if config.type == AUTO else config.type for config in self.configs],
            "rank": [-1 if config.rank is None else config.rank for config in self.configs],
            "residual_type": [config.residual_type or AUTO for config in self.configs],
        }
        alone = len(self.configs) == 1
        return {key: values[0] if alone else values for key, values in given.items()} | {
            "sparse_threshold": self.sparse_threshold,
            "sparse_delta": self.sparse_delta,
        }

    def arguments(self, source: ModelSource) -> dict[str, Any]:
        """Arguments of core.plan and core.Engine: one value if all layers agree, else one per layer."""
        layers = self.layers(source)
        if not layers:  # there is no decoder
            return self.cross.arguments(source)
        given: dict[str, Any] = {
            "cache": _one_or_all([layer.mode for layer in layers]),
            "cache_type_k": _one_or_all([layer.type_k for layer in layers]),
            "cache_type_v": _one_or_all([layer.type_v for layer in layers]),
            "sparse_threshold": self.sparse_threshold,
            "sparse_delta": self.sparse_delta,
            **self.cross.arguments(source),
        }
        if any(layer.mode == RESIDUAL_MODE for layer in layers):
            given["rank"] = _one_or_all([layer.rank for layer in layers])
            given["residual_type"] = _one_or_all([layer.residual_type or AUTO for layer in layers])
        return given


def _configs(cache: Cache) -> list[CacheConfig]:
    """One config for all layers, or one per layer. Errors as CacheConfig.of."""
    if isinstance(cache, (str, CacheConfig)):
        return [CacheConfig.of(cache)]
    if not isinstance(cache, Sequence) or not cache:
        raise ValueError(f"cache must be a mode, a CacheConfig, or one of these for each layer, got {cache!r}")
    return [CacheConfig.of(one) for one in cache]


def _settled(found: LayerOptions, e_v: int) -> LayerCache:
    """A resolved layer, with the default residual if its mode has one and none is specified. e_v: columns of V."""
    mode, type_k, type_v = found["mode"], found["type_k"], found["type_v"]
    if mode != RESIDUAL_MODE:
        return LayerCache(mode, type_k, type_v, v_heads=found["v_heads"])
    rank, residual_type = default_residual(mode, type_k, e_v)
    rank = rank if found["rank"] < 0 else found["rank"]
    return LayerCache(mode, type_k, type_v, rank, found["residual_type"] or residual_type, found["v_heads"])


def _with_residual(configs: list[CacheConfig], rank: int | None, residual_type: str | None) -> list[CacheConfig]:
    """The configs with this rank and residual type where they can have a residual and do not specify it. ValueError:
    none can have one."""
    if not any(config.mode in (RESIDUAL_MODE, AUTO) for config in configs):
        have = ", ".join(dict.fromkeys(map(str, configs)))
        raise ValueError(f"rank and residual type belong to cache mode '{RESIDUAL_MODE}', and no layer has it: {have}")
    return [
        replace(
            config,
            rank=rank if config.rank is None else config.rank,
            residual_type=config.residual_type or residual_type,
        )
        if config.mode in (RESIDUAL_MODE, AUTO)
        else config
        for config in configs
    ]


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(set(values)) == 1 else values


def check_cache(source: ModelSource, choice: CacheChoice) -> None:
    """Refuse an unknown cache mode, or one that is illegal for the model, before anything slow begins.

    Raises:
        UnsupportedError: an unknown mode (the message suggests the nearest).
        CacheUnsupportedError: an illegal mode; the message names the layer, the reason and the legal modes; or
            there is no cache, since the model has no decoder.
        ValueError: as CacheChoice.layers and CrossConfig.arguments.
    """
    if not source.has_decoder and choice.with_cross(replace(choice.cross, n_source=0)) != CacheChoice.of():
        raise CacheUnsupportedError(f"{source.name} has no decoder, and so no cache: leave out its modes and types")
    modes = source.modes()
    for config in choice.configs:
        if config.mode != AUTO and config.mode not in modes:
            raise UnsupportedError(unknown("cache mode", config.mode, [AUTO, *modes]) + cross_hint(config.mode))
    mode = choice.configs[0].mode
    if len(choice.configs) == 1 and mode != AUTO and not modes[mode].legal:
        legal = ", ".join(name for name, one in modes.items() if one.legal)
        raise CacheUnsupportedError(
            f"cache mode '{mode}' cannot be used with {source.name}: {modes[mode].refusal}. "
            f"Legal for this model: {legal}"
        )
    choice.layers(source)
    choice.cross.mode_for(source)


def row_type(layer: Mapping[str, Any]) -> str:
    """A label of a layer's row types: "q8", "q8 + 64 q4" with a residual, "q8 + V of 2 heads" if these store V. layer:
    from Engine.info()."""
    parts = [str(layer["type"])]
    parts += [f"V of {layer['v_heads']} heads"] if layer.get("v_heads") else []
    parts += [f"{layer['rank']} {layer['residual_type']}"] if layer.get("rank") else []
    return " + ".join(parts)


def kinds(layers: Sequence[Mapping[str, Any]]) -> str:
    """A label of the caches of all layers: "kv f16", or several, separated by commas; "none" if there is none.
    layers: from Engine.info()."""
    return ", ".join(sorted({f"{layer['mode']} {row_type(layer)}" for layer in layers})) or "none"
