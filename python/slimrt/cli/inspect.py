"""slimrt inspect: the contents of a model file, and the cache modes that it may use."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

from slimrt import core
from slimrt.cache.config import CacheChoice, kinds, row_type
from slimrt.cli.common import Flags, coloured, model_name, model_source, print_json, show_progress, table
from slimrt.errors import CacheUnsupportedError, SlimrtError, UnsupportedError
from slimrt.folding.spectrum import QUANTILES, Spectrum, spectra
from slimrt.info import cross_of
from slimrt.measure.plots import check_plot, plot_spectra
from slimrt.modelfile.hub import located
from slimrt.modelfile.source import ModelSource
from slimrt.modes import AGING, CACHE_TYPES, CODED_BY_AGE, INVERTED, RESIDUAL_MODE
from slimrt.plumbing.progress import wanted
from slimrt.plumbing.units import format_bytes

_SHOWN = ("f16", "q8", "q4")  # types of self-attention whose bytes are printed; JSON has all
_SHOWN_CROSS = ("f16", "bf16", "q8")
_LONG = 16  # longer lists are shortened to this many values


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.add("--spectrum", twin=False, nargs="?", const="", metavar="FILE", help="the singular values of every "
              "layer's W_K; drawn to FILE (.png, .svg, .pdf; needs the extra plot)")  # fmt: skip
    flags.output()


def run(args: argparse.Namespace) -> int:
    if args.spectrum:
        check_plot(args.spectrum)
    try:
        source = model_source(args)
    except UnsupportedError as error:
        return _show(args, _report_of_unreadable(args, error))
    report = _report(source)
    found = spectra(source.model, progress=wanted(show_progress(args))) if args.spectrum is not None else []
    if args.spectrum:
        plot_spectra(source.name, [one.values for one in found], args.spectrum)
    return _show(args, report, found)


def _show(args: argparse.Namespace, report: dict[str, Any], found: Sequence[Spectrum] = ()) -> int:
    if args.json:
        print_json(report | ({"spectrum": [one.to_dict() for one in found]} if found else {}))
        return 0
    _print(report, all_tensors=args.verbose > 0)
    if found:
        print(f"\nsingular values of W_K, quantiles over the largest\n{_spectrum_table(found)}")
    return 0


def _report_of_unreadable(args: argparse.Namespace, error: UnsupportedError) -> dict[str, Any]:
    """The contents of a GGUF file with tensor types that slimrt does not read. Other files: raises `error`."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    path = located(model_name(args), show_progress(args))
    if args.spectrum is not None or not path.is_file():
        raise error
    file = core.GgufFile(str(path), any_type=True)
    tensors = []
    for name, number, sizes, _ in file.tensor_list():
        if number not in GGML_QUANT_SIZES:  # a type removed from GGUF
            raise error
        rows, (block, size) = prod(sizes[1:]), GGML_QUANT_SIZES[GGMLQuantizationType(number)]
        type = GGMLQuantizationType(number).name.lower()
        tensors.append(_tensor(name, type, rows, sizes[0], rows * sizes[0] // block * size))
    return _contents(str(path), file, tensors) | {"cache_modes": [], "cache": None, "unsupported": str(error)}


def _tensor(name: str, type: str, rows: int, cols: int, n_bytes: int) -> dict[str, Any]:
    return {"name": name, "type": type, "rows": rows, "cols": cols, "bytes": n_bytes}


def _contents(path: str, file: core.GgufFile, tensors: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "path": path,
        "metadata": {key: _short(file.value(key)) for key in file.keys()},
        "parameters": sum(tensor["rows"] * tensor["cols"] for tensor in tensors),
        "bytes": sum(tensor["bytes"] for tensor in tensors),
        "tensors": tensors,
        "chat_template": "tokenizer.chat_template" in file.keys(),
    }


def _report(source: ModelSource) -> dict[str, Any]:
    file = source.file
    found = file.tensors().items()
    tensors = [_tensor(name, type, rows, cols, file.tensor_bytes(name)) for name, (type, (rows, cols)) in found]
    report = _contents(str(source.path), file, tensors)
    try:
        held = core.held(file)
        for tensor in tensors:
            type, n_bytes = held.get(tensor["name"], (tensor["type"], 0))
            if type != tensor["type"]:
                tensor |= {"held_as": type, "held_bytes": n_bytes}
        modes = [_cache_mode(source, mode) for mode in _described(source, cross=False)]
        report |= {"cache_modes": modes, "pays": _pays(modes), "cache": _chosen(source)}
        crosses = source.has_encoder and source.has_decoder
        return report | ({"cross_modes": _cross_modes(source)} if crosses else {})
    except SlimrtError as error:  # a vocabulary, or an unknown architecture: shown nevertheless
        return report | {"cache_modes": [], "cache": None, "unsupported": str(error)}


def _described(source: ModelSource, *, cross: bool) -> list[dict[str, Any]]:
    """Every mode: whether the model may use it, or why not."""
    found = source.modes(cross=cross).values()
    return [{"mode": mode.name, "legal": mode.legal, "reason": mode.refusal} for mode in found]


def _imprecise(source: ModelSource, part: str, mode: dict[str, Any]) -> dict[str, str]:
    """Types in which a mode is refused because it amplifies their rounding -> the reason. For large models only what
    conversion stored in the file is used."""
    from slimrt.folding.gate import Lossy, check, predicts_fast

    refused = {}
    for name in CACHE_TYPES if mode["legal"] else ():
        rows = Lossy(part, mode["mode"], name)
        try:
            if rows.loses and predicts_fast(source.model, rows, range(int(source.defaults["n_layers"]))):
                check(source.model, rows)
        except CacheUnsupportedError as error:
            refused[name] = str(error)
    return refused


def _cross_modes(source: ModelSource) -> list[dict[str, Any]]:
    """Every mode of cross-attention: whether it is legal or why not, bytes per row by type, and refused types."""
    found = []
    for mode in _described(source, cross=True):
        sizes = {
            name: cross_of(core.plan(source.file, cross=mode["mode"], cross_type=name))["bytes_per_row"]
            for name in (CACHE_TYPES if mode["legal"] else ())
        }
        refused = _imprecise(source, "cross-attention", mode)
        found.append(mode | {"bytes_per_row_by_type": sizes, "imprecise": refused})
    return found


def _cache_mode(source: ModelSource, mode: dict[str, Any]) -> dict[str, Any]:
    """An entry of cache_modes: bytes per token by type (or with its usual levels), with the default residual, and the
    types that are refused as too imprecise."""
    sizes: dict[str, int] = {}
    rows: dict[str, str] = {}
    types = (core.levels(mode["mode"]).text,) if mode["mode"] in CODED_BY_AGE else CACHE_TYPES
    for name in types if mode["legal"] else ():
        choice = CacheChoice.of(f"{mode['mode']}:{name}")
        sizes[name] = core.plan(source.file, **choice.arguments(source))["cache_bytes_per_token"]
        rows[name] = row_type(vars(choice.layers(source)[0]) | {"type": name})
    size = sizes.get("f16", next(iter(sizes.values()), None))
    line = mode | {"bytes_per_token": size, "bytes_per_token_by_type": sizes, "rows_by_type": rows}
    return line | {"imprecise": _imprecise(source, "self-attention", mode)}


def _pays(modes: list[dict[str, Any]]) -> dict[str, dict[str, Any] | None]:
    """For the usual types of kv: the mode whose rows are smallest, with its share of kv's bytes; None: kv itself. Mode
    k+r only if k is legal (K determines V, but for rounding) and no other mode is smaller than kv; no modes with aging
    rows. Empty if kv is not legal, or there is no decoder."""
    kv: dict[str, int] = next((mode["bytes_per_token_by_type"] for mode in modes if mode["mode"] == "kv"), {})
    found: dict[str, dict[str, Any] | None] = {}
    lossy = (*AGING, *(() if any(one["legal"] for one in modes if one["mode"] == "k") else (RESIDUAL_MODE,)))
    for name in kv and ("f16", "q8"):
        exact = [one for one in modes if one["legal"] and one["mode"] not in lossy and name not in one["imprecise"]]
        sizes = {one["mode"]: one["bytes_per_token_by_type"][name] for one in exact}
        smaller = [mode for mode, size in sizes.items() if size < kv[name]]
        best = min(smaller, key=lambda mode: (mode == RESIDUAL_MODE, sizes[mode], mode in INVERTED), default=None)
        said = best and {"mode": best, "bytes_per_token": sizes[best], "of_kv": sizes[best] / kv[name]}
        found[name] = said or None
    return found


def _chosen(source: ModelSource) -> list[dict[str, Any]] | None:
    """The cache that the file was converted for, layer by layer; None: for none."""
    if not source.says_cache:
        return None
    layers = CacheChoice.of("auto").layers(source)
    return [
        {"layer": i, "mode": one.mode, "type": one.type_k, "rank": one.rank, "residual_type": one.residual_type,
         "v_heads": one.v_heads}
        for i, one in enumerate(layers)
    ]  # fmt: skip


def _short(value: Any) -> Any:
    """A metadata value; a long list as its length and first values."""
    if isinstance(value, list) and len(value) > _LONG:
        return {"length": len(value), "first": value[:_LONG]}
    return value


def _print(report: dict[str, Any], *, all_tensors: bool) -> None:
    print(f"{report['path']}: {report['parameters']:,} parameters, {format_bytes(report['bytes'])}\n")
    for key, value in report["metadata"].items():
        print(f"{key} = {_text(value)}")
    tensors = report["tensors"]
    print(f"\n{len(tensors)} tensors")
    counts = Counter(tensor["type"] for tensor in tensors)
    for type, count in counts.most_common():
        of_type = [t for t in tensors if t["type"] == type]
        print(f"  {type}: {count}, {format_bytes(sum(t['bytes'] for t in of_type))}{_held(of_type)}")
    if all_tensors:
        rows = [(t["name"], t["type"], str(t["rows"]), str(t["cols"]), str(t["bytes"])) for t in tensors]
        print(table(("name", "type", "rows", "cols", "bytes"), rows))
    print(f"\nchat template: {'yes' if report['chat_template'] else 'no'}\n\ncache modes")
    width = max((len(mode["mode"]) for mode in report["cache_modes"]), default=0)
    for mode in report["cache_modes"]:
        print(f"  {mode['mode']:{width}} {_answer(mode)}")
    for name, one in report.get("pays", {}).items():
        best = f"{one['mode']}, {100 * one['of_kv']:.0f} % of kv's bytes" if one else "kv itself"
        print(f"pays in {name}: {best}")
    for mode in report.get("cross_modes", ()):
        print(f"  cross {mode['mode']:3} {_cross_answer(mode)}")
    if "unsupported" in report:
        print(f"  none: {report['unsupported']}")
    elif not report["cache_modes"]:
        print("  none: the model has no decoder")
    if report["cache"]:
        print(f"converted for: {kinds(report['cache'])}")


def _held(tensors: list[dict[str, Any]]) -> str:
    """The types and bytes in memory of tensors that are repacked when loaded."""
    others = [t for t in tensors if "held_as" in t]
    types = " and ".join(sorted({t["held_as"] for t in others}))
    return f"; in memory {types}, {format_bytes(sum(t['held_bytes'] for t in others))}" if others else ""


def _answer(mode: dict[str, Any]) -> str:
    """A mode's verdict: its bytes, or why it is not legal."""
    if not mode["legal"]:
        return coloured("no", "red", sys.stdout) + f": {mode['reason']}"
    sizes, rows = mode["bytes_per_token_by_type"], mode["rows_by_type"]
    names = [name for name in _SHOWN if name in sizes] or list(sizes)
    shown = ", ".join(f"{sizes[name]} in {rows[name]}" for name in names)
    if mode.get("imprecise"):
        return f"{coloured('not in every type', 'red', sys.stdout)}, bytes a token: {shown}{_but_not(mode)}"
    inverted = INVERTED.get(mode["mode"])
    caution = f"; inverts {inverted}, which amplifies the rounding of its rows" if inverted else ""
    return coloured("yes", "green", sys.stdout) + f", bytes a token: {shown}{caution}"


def _cross_answer(mode: dict[str, Any]) -> str:
    """A cross-attention mode's verdict: its bytes, or why it is not legal."""
    if not mode["legal"]:
        return coloured("no", "red", sys.stdout) + f": {mode['reason']}"
    sizes = mode["bytes_per_row_by_type"]
    shown = ", bytes a row of the encoder's output: " + ", ".join(f"{sizes[name]} in {name}" for name in _SHOWN_CROSS)
    if mode["imprecise"]:
        return coloured("not in every type", "red", sys.stdout) + shown + _but_not(mode)
    return coloured("yes", "green", sys.stdout) + shown


def _but_not(mode: dict[str, Any]) -> str:
    """The types in which a mode is refused, with the reason for the first."""
    refused = mode["imprecise"]
    return f"; not in {', '.join(refused)}: {next(iter(refused.values()))}"


def _spectrum_table(found: Sequence[Spectrum]) -> str:
    head = ("layer", "largest", "smallest", "cond", *(f"{100 * q:g} %" for q in QUANTILES))
    rows = [
        (
            str(one.layer),
            *(f"{value:.3g}" for value in (one.values[0], one.values[-1], one.cond)),
            *(f"{value:.2e}" for value in one.quantiles().values()),
        )
        for one in found
    ]
    return table(head, rows)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['length']} values: {', '.join(map(repr, value['first'][:6]))}, ..."
    text = repr(value) if isinstance(value, (str, list)) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
