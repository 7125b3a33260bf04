"""What a token leaves behind in each layer: the user's choice, checked, and in the form the core takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from slimrt.cache.cross import CrossConfig, check_cross
from slimrt.errors import CacheUnsupportedError, UnsupportedError
from slimrt.modelfile.source import ModelSource
from slimrt.modes import AUTO, CACHE_TYPES, DEFAULT_TYPE, RESIDUAL_MODE, check_type, default_residual
from slimrt.plumbing.arguments import real, unknown, whole


@dataclass(frozen=True)
class CacheConfig:
    """The cache of one layer, or of all.

    Attributes:
        mode: "kv", "k", "k+r", "v", "x", "xr", or "auto" (what the file says, else
            ModelSource.usual_mode).
        type: element type of the rows; "auto": what the file says, else f16.
        rank: width of the residual of mode k+r, 0 for none; None: what the file says, else default_residual().
        residual_type: its element type; None: as rank.

    Raises:
        UnsupportedError: an unknown type. ValueError, TypeError: a rank below 0 or for a mode without a residual, or
            an argument of a wrong kind.
    """

    mode: str
    type: str = AUTO
    rank: int | None = None
    residual_type: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str) or not self.mode:
            raise ValueError(f"cache must be a mode such as 'kv', got {self.mode!r}")
        check_type(self.type, "cache type", (*CACHE_TYPES, AUTO))
        if self.residual_type is not None:
            check_type(self.residual_type, "residual type", CACHE_TYPES)
        if self.rank is not None and whole("rank", self.rank) < 0:
            raise ValueError(f"rank must not be negative, got {self.rank}")
        if (self.rank is not None or self.residual_type is not None) and self.mode not in (RESIDUAL_MODE, AUTO):
            raise ValueError(
                f"cache mode '{self.mode}' has no residual: rank and residual type belong to mode '{RESIDUAL_MODE}'"
            )

    @classmethod
    def parse(cls, text: str) -> CacheConfig:
        """From "mode", "mode:type", "k+r:type:rank" or "k+r:type:rank:residual type"; a part left empty: its default.

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
        """The argument if it is one already, else what the text says. Errors as parse; TypeError: neither."""
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
    """The keywords about caches of slimrt.Model and slimrt.plan, as Model explains them; CacheChoice.of has their
    defaults."""

    cache: Cache
    cache_type: str
    cache_type_k: str | None
    cache_type_v: str | None
    rank: int | None
    residual_type: str | None
    sparse_threshold: float
    cross: str
    cross_type: str
    n_source: int
    allow_lossy: bool


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache with nothing left open. rank 0 and residual_type "": no residual."""

    mode: str
    type_k: str
    type_v: str
    rank: int = 0
    residual_type: str = ""


@dataclass(frozen=True)
class CacheChoice:
    """The checked cache arguments of a model.

    Attributes:
        configs: one for all layers, or one a layer.
        type_k, type_v: where a config leaves its type open.
        cross: of the rows that an encoder leaves behind.
        allow_lossy: insist on modes whose error of V is over 5 % in a layer.
    """

    configs: tuple[CacheConfig, ...]
    type_k: str
    type_v: str
    sparse_threshold: float
    cross: CrossConfig = CrossConfig()
    allow_lossy: bool = False

    @classmethod
    def of(
        cls,
        cache: Cache = AUTO,
        cache_type: str = AUTO,
        cache_type_k: str | None = None,
        cache_type_v: str | None = None,
        *,
        rank: int | None = None,
        residual_type: str | None = None,
        sparse_threshold: float = 0.0,
        cross: str = AUTO,
        cross_type: str = AUTO,
        n_source: int = 0,
        allow_lossy: bool = False,
    ) -> CacheChoice:
        """From the arguments of slimrt.Model; what an entry of `cache` says itself goes before the others.

        Raises:
            UnsupportedError: an unknown type. ValueError, TypeError: as CacheConfig; a threshold that is no share; a
                rank or residual type, and no layer has a residual.
        """
        type_k = cache_type if cache_type_k is None else cache_type_k
        type_v = cache_type if cache_type_v is None else cache_type_v
        for name in (cache_type, type_k, type_v):
            check_type(name, "cache type", (*CACHE_TYPES, AUTO))
        alone = isinstance(cache, (str, CacheConfig))
        if not alone and (not isinstance(cache, Sequence) or not cache):
            raise ValueError(f"cache must be a mode, a CacheConfig, or one of these for each layer, got {cache!r}")
        entries: Sequence[Any] = [cache] if alone else cache  # type: ignore[assignment]
        configs = [CacheConfig.of(one) for one in entries]
        if rank is not None or residual_type is not None:
            configs = _with_residual(configs, rank, residual_type)
        threshold = real("sparse_threshold", sparse_threshold)
        if not 0 <= threshold < 1:
            raise ValueError(f"sparse_threshold must be at least 0 and below 1, got {sparse_threshold}")
        cross_config = CrossConfig(cross, cross_type, n_source)
        return cls(tuple(configs), type_k, type_v, threshold, cross_config, allow_lossy)

    @property
    def uniform(self) -> CacheConfig | None:
        """The config of all layers, where there is one."""
        return self.configs[0] if len(set(self.configs)) == 1 else None

    def with_mode(self, mode: str) -> CacheChoice:
        """The same types in another mode, with its default residual, and sparsity only where V is kept."""
        type = self.uniform.type if self.uniform else AUTO
        return replace(
            self, configs=(CacheConfig(mode, type),), sparse_threshold=self.sparse_threshold * (mode == "kv")
        )

    def with_cross(self, cross: CrossConfig) -> CacheChoice:
        """The same with another cache of an encoder's output."""
        return replace(self, cross=cross)

    def layers(self, source: ModelSource) -> tuple[LayerCache, ...]:
        """What each layer gets, with what the file says and the defaults filled in.

        Raises:
            ValueError: not one config a layer; a rank that a folded file does not have, or that no layer can.
        """
        n_layers, e_v = int(source.defaults["n_layers"]), source.kv_width
        if len(self.configs) not in (1, n_layers):
            raise ValueError(
                f"{len(self.configs)} cache modes were given for {n_layers} layers: give one for all, or one a layer"
            )
        configs = self.configs * n_layers if len(self.configs) == 1 else self.configs
        layers = tuple(self._layer(config, source, i, e_v) for i, config in enumerate(configs))
        asked = any(config.rank is not None or config.residual_type is not None for config in configs)
        if asked and not any(layer.mode == RESIDUAL_MODE for layer in layers):
            raise ValueError(_no_residual(layer.mode for layer in layers))
        return layers

    def _layer(self, config: CacheConfig, source: ModelSource, i: int, e_v: int) -> LayerCache:
        stored = source.stored_cache[i] if source.stored_cache else None
        usual = "kv" if self.sparse_threshold else source.usual_mode  # only kv has values that may be skipped
        mode = config.mode if config.mode != AUTO else (stored["mode"] if stored else usual)
        if stored is None or stored["mode"] != mode:  # what was chosen for another mode says nothing of this one
            stored = {}
        type_k, type_v = (config.type, config.type) if config.type != AUTO else (self.type_k, self.type_v)
        from_file = stored.get("type") or DEFAULT_TYPE
        type_k, type_v = (from_file if type == AUTO else type for type in (type_k, type_v))
        if mode != RESIDUAL_MODE:
            return LayerCache(mode, type_k, type_v)
        default_rank, default_type = default_residual(mode, type_k, e_v)
        folded_rank = source.folded_ranks.get(i)
        rank = config.rank if config.rank is not None else folded_rank
        rank = default_rank if rank is None else rank
        if folded_rank is not None and rank != folded_rank:
            raise ValueError(
                f"{source.path.name} was folded with a residual of rank {folded_rank} in layer {i}, not {rank}: leave "
                "the rank out, or fold the model it was made from again (slimrt convert --cache k+r --rank ...)"
            )
        if rank > e_v:
            raise ValueError(f"a residual of rank {rank} is wider than V: layer {i} has {e_v} columns of it")
        return LayerCache(mode, type_k, type_v, rank, config.residual_type or stored.get("residual") or default_type)

    def arguments(self, source: ModelSource) -> dict[str, Any]:
        """What core.plan and core.Engine take: one value where all layers agree, else one a layer."""
        layers = self.layers(source)
        given: dict[str, Any] = {
            "cache": _one_or_all([layer.mode for layer in layers]),
            "cache_type_k": _one_or_all([layer.type_k for layer in layers]),
            "cache_type_v": _one_or_all([layer.type_v for layer in layers]),
            "sparse_threshold": self.sparse_threshold,
            **self.cross.arguments(source),
        }
        if any(layer.mode == RESIDUAL_MODE for layer in layers):
            given["rank"] = _one_or_all([layer.rank for layer in layers])
            given["residual_type"] = _one_or_all([layer.residual_type or AUTO for layer in layers])
        return given


def _with_residual(configs: list[CacheConfig], rank: int | None, residual_type: str | None) -> list[CacheConfig]:
    """The configs with this residual where they may have one and leave it open. ValueError: none may."""
    if not any(config.mode in (RESIDUAL_MODE, AUTO) for config in configs):
        raise ValueError(_no_residual(map(str, configs)))
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


def _no_residual(modes: Iterable[str]) -> str:
    """What is wrong with a rank or residual type where layers have these modes."""
    have = ", ".join(dict.fromkeys(modes))
    return f"rank and residual type belong to cache mode '{RESIDUAL_MODE}', and no layer has it: {have}"


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(set(values)) == 1 else values


def check_cache(source: ModelSource, choice: CacheChoice) -> None:
    """Refuses a cache that is unknown, or illegal for the model, before anything slow begins.

    Raises:
        UnsupportedError: an unknown mode (the message suggests the nearest).
        CacheUnsupportedError: an illegal one; the message names the layer, the reason and the legal modes.
        ValueError: as CacheChoice.layers and CrossConfig.arguments.
    """
    modes = source.modes()
    for config in choice.configs:
        if config.mode != AUTO and config.mode not in modes:
            raise UnsupportedError(unknown("cache mode", config.mode, [AUTO, *modes]))
    mode = choice.configs[0].mode
    if len(choice.configs) == 1 and mode != AUTO and not modes[mode].legal:
        legal = ", ".join(name for name, one in modes.items() if one.legal)
        raise CacheUnsupportedError(
            f"cache mode '{mode}' cannot be used with {source.path.name}: {modes[mode].refusal}. "
            f"Legal for this model: {legal}"
        )
    choice.layers(source)
    check_cross(source, choice.cross)


def row_type(layer: Mapping[str, Any]) -> str:
    """The types of a layer's rows, for people: "q8", or "q8 + 64 q4" with a residual. layer: of Engine.info()."""
    return f"{layer['type']} + {layer['rank']} {layer['residual_type']}" if layer.get("rank") else str(layer["type"])


def kinds(layers: Sequence[Mapping[str, Any]]) -> str:
    """The caches of all layers, for people: "kv f16", or several with commas between. layers: of Engine.info()."""
    return ", ".join(sorted({f"{layer['mode']} {row_type(layer)}" for layer in layers}))
