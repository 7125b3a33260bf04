# SPDX-License-Identifier: Apache-2.0
"""Cache "fastest": of kv and what the file was converted for, the cache that fits and is predicted to decode fastest.

The number of bytes does not decide: absorbed modes read half as many, but multiply each row for all heads, so which is
faster depends on the machine, the shape of heads and the number of threads. The predicted time of a token is that of
its attention, by times per row measured on this machine (slimrt.machine), and that of reading the weights that one
cache needs and another does not, at memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from slimrt import machine
from slimrt.cache.config import CacheChoice, CacheConfig, LayerCache
from slimrt.cache.planner import Planner
from slimrt.errors import CacheUnsupportedError
from slimrt.modelfile.source import ModelSource
from slimrt.modes import AUTO, DEFAULT_TYPE, FASTEST, FOLD_SUFFIXES, RESIDUAL_MODE

_TIMED = ("kv", "k", RESIDUAL_MODE)  # modes whose attention can be measured without a model
_TYPES = (DEFAULT_TYPE, "q8")  # of kv, unless a type is given


@dataclass(frozen=True)
class Fastest:
    """The chosen cache, and why.

    Attributes:
        choice: the choice with FASTEST replaced.
        times: cache name -> predicted milliseconds of a token half-way through the context (attention, and weights
            beyond those of kv), fastest first; includes caches that do not fit.
        left_out: name -> reason, of caches that were not compared or do not fit.
    """

    choice: CacheChoice
    times: dict[str, float]
    left_out: dict[str, str]

    def __str__(self) -> str:
        times = ", ".join(f"{name} {ms:.3g} ms" for name, ms in self.times.items())
        out = "".join(f"; {name}: {why}" for name, why in self.left_out.items())
        return f"attention of a token half-way through the context, measured here: {times}{out}"


def asks_for_fastest(choice: CacheChoice) -> bool:
    return any(config.mode == FASTEST for config in choice.configs)


def fastest(planner: Planner, choice: CacheChoice, n_ctx: int, refusal: Callable[[CacheChoice], str | None]) -> Fastest:
    """The fastest cache that fits, in the requested types, by default f16, q8 and what the file says.

    Args:
        refusal: returns why a cache would be refused as too imprecise; "": it would not; None: not known.

    If none fits, the smallest is returned; loading it raises WontFitError with options.

    Raises:
        CacheUnsupportedError: the model has an encoder, the device is not the CPU, "fastest" is for some layers only,
            or sparsity is requested, whose time is not measured.
    """
    source = planner.source
    if len(choice.configs) > 1 or source.has_encoder or planner.device != "cpu":
        raise CacheUnsupportedError(
            f"cache '{FASTEST}' compares caches of a decoder alone, the same in all layers, on the CPU: name one"
        )
    if choice.sparse_threshold or choice.sparse_delta:
        raise CacheUnsupportedError(
            f"cache '{FASTEST}' compares caches that are read whole, "
            "without sparse_threshold and sparse_delta: name one"
        )
    times, left_out = dict[str, float](), dict[str, str]()
    compared = dict[str, tuple[CacheChoice, list[Part]]]()
    for one in _candidates(source, choice):
        layers = one.layers(source)
        name = _name(layers)
        if unknown := sorted({layer.mode for layer in layers} - set(_TIMED)):
            left_out[name] = f"not compared, since mode {', '.join(unknown)} is timed with a model only"
        elif (why := refusal(one)) != "":
            left_out[name] = why or "not compared, since only folding it tells what it loses"
        else:
            compared[name] = one, _parts(planner, one, n_ctx)
    rates = machine.attention_rates([p.kind for _, parts in compared.values() for p in parts], planner.n_threads)
    for name, (one, parts) in compared.items():
        attention = 1e-6 * sum(part.rows * part.share * rates[part.kind] for part in parts)
        times[name] = attention + _weights_ms(planner, one, n_ctx)
        if not planner.fits(one, n_ctx):
            left_out[name] = "does not fit"
    times = dict(sorted(times.items(), key=lambda item: item[1]))
    fitting = [compared[name][0] for name in times if name not in left_out]
    smallest = min((one for one, _ in compared.values()), key=lambda one: planner.sizes(one, n_ctx).total)
    return Fastest(fitting[0] if fitting else smallest, times, left_out)


@dataclass(frozen=True)
class Part:
    """Attention of some heads of a layer: the fraction `share` of the time of `kind` per row, times `rows`."""

    kind: machine.Decoding
    rows: float
    share: float = 1.0


def _candidates(source: ModelSource, choice: CacheChoice) -> list[CacheChoice]:
    """kv in the requested or default types, and the file's own cache, without duplicates."""
    asked = choice.configs[0]
    types = [asked.type] if asked.type != AUTO else [AUTO] if choice.type_k != AUTO else list(_TYPES)
    found = [replace(choice, configs=(CacheConfig("kv", type),)) for type in types]
    if source.says_cache:
        found.append(replace(choice, configs=(replace(asked, mode=AUTO),)))
    return list({one.layers(source): one for one in found}.values())


def _name(layers: tuple[LayerCache, ...]) -> str:
    """The cache in the syntax of CacheConfig.parse, "k+r:q8"; if layers differ several, separated by commas."""
    return ", ".join(dict.fromkeys(f"{layer.mode}:{layer.type}" for layer in layers))


def _parts(planner: Planner, choice: CacheChoice, n_ctx: int) -> list[Part]:
    """The attention of all layers for a token half-way through the context."""
    sizes, source = planner.ask(choice, n_ctx), planner.source
    heads, of_kv, dim = (int(source.defaults[name]) for name in ("n_heads", "n_kv_heads", "head_dim"))
    parts = []
    for found, layer in zip(sizes["layers"], choice.layers(source), strict=True):
        rows = min(n_ctx / 2, found["max_rows"])
        if layer.mode == "kv":
            parts.append(Part(machine.Decoding(heads, of_kv, dim, False, layer.type_k, layer.type_v), rows))
            continue
        slim = 1 - layer.v_heads / of_kv  # fraction of heads without stored V; the others read V as in mode kv
        rest = layer.residual_type or layer.type_k
        parts.append(Part(machine.Decoding(heads, of_kv, dim, True, layer.type_k, rest, layer.rank), rows, slim))
        if layer.v_heads:
            as_kv = machine.Decoding(heads, of_kv, dim, False, layer.type_k, layer.type_k)
            parts.append(Part(as_kv, rows, 1 - slim))
    return parts


def _weights_ms(planner: Planner, choice: CacheChoice, n_ctx: int) -> float:
    """Milliseconds to read the weights that a token needs beyond those of mode kv; negative if it needs fewer."""
    source = planner.source
    folded = {layer for layer, cache in enumerate(choice.layers(source)) if cache.mode != "kv"}
    if not folded:
        return 0.0
    kv = replace(choice, configs=(CacheConfig("kv"),))
    more = planner.ask(choice, n_ctx)["derived"] - planner.ask(kv, n_ctx)["derived"]
    for layer in folded:
        for name in source.file.tensors():
            if name.startswith(f"{source.blocks}{layer}.") and name.endswith(FOLD_SUFFIXES):
                more += source.file.tensor_bytes(name)
        value = f"{source.blocks}{layer}.attn_v.weight"  # not read: W_KV replaces it
        more -= source.file.tensor_bytes(value) if value in source.file.tensors() else 0
    return 1e-6 * more / machine.rates(planner.n_threads).read
