# SPDX-License-Identifier: Apache-2.0
"""Converts models from Hugging Face directories, GGUF or whisper.cpp's ggml to GGUF: merged with adapters, folded and
requantised."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.random  # noqa: F401 (loaded before the work begins: its extension modules swallow a signal while loading)
from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from slimrt.cache.config import CacheChoice
from slimrt.cache.planner import Planner
from slimrt.converter.importance import Importance
from slimrt.converter.quantize import check_outtype, check_weighted, requantise, weight_type
from slimrt.converter.request import Asked, checked
from slimrt.converter.share import share as share_layers
from slimrt.converter.sparse import KEY as SPARSE_KEY
from slimrt.converter.sparse import check_sparse, find_delta
from slimrt.converter.verify import MAX_TOKENS, compare
from slimrt.errors import CacheUnsupportedError, UnsupportedError
from slimrt.folding.attention import Attention
from slimrt.folding.calibrate import Calibration, Text, calibrated, text_ids
from slimrt.folding.cross_model import check_cross, cross_fields, fold_cross_model, lost, require_all_precise
from slimrt.folding.fold import check_rank
from slimrt.folding.heads import keeping_heads, refusal, reordered
from slimrt.folding.layers import Request, fold_model, unfolded
from slimrt.folding.lowrank import LATENT_MODE, check_heads
from slimrt.folding.report import CAUTION, TOO_LARGE, ConvertReport, CrossReport, LayerReport, Stored, verdict
from slimrt.folding.weights import fold_value_bias
from slimrt.modelfile.gguf import ModelData, array, check_room, float32, string, uint32, written_gguf
from slimrt.modelfile.hub import located
from slimrt.modelfile.imatrix import Imatrix, read_imatrix
from slimrt.modelfile.lora import Adapters, Named
from slimrt.modelfile.reading import FORMAT_VERSION, plan_of_written, read_model, runnable, source_files, source_hash
from slimrt.modelfile.source import ModelSource
from slimrt.modes import AGING, AUTO, BASELINES, FOLDED
from slimrt.plumbing import progress as bars
from slimrt.plumbing.files import check_target, check_utf8, stand_in, writing


def convert(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    cache: str | None = None,
    cache_type: str | Sequence[str] = "auto",
    target_error: float | None = None,
    target_bytes: int | str | None = None,
    rank: float | Sequence[float] | None = None,
    residual_type: str | None = None,
    bits: int | Sequence[int] | None = None,
    share: float | Sequence[float] | None = None,
    sinks: int | None = None,
    group: int | None = None,
    heads: int | None = None,
    predict: bool = False,
    v_heads: float = 0.0,
    outtype: str | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    kv_layers: int | None = None,
    kv_heads: int | None = None,
    merge: str = "uniform",
    shared_keys: str = "unrotated",
    calibration: Text = None,
    exact: bool = False,
    cross: str | None = None,
    cross_type: str = "auto",
    sparse: bool = False,
    lora: Named = (),
    verify: bool | str | os.PathLike[str] | None = None,
    allow_lossy: bool = False,
    progress: bool = True,
    overwrite: bool = True,
) -> ConvertReport:
    """slimrt.convert, which documents arguments and errors; but progress: show bars on stderr if that is a terminal."""
    source, target, show = located(src, progress), Path(out), progress and bars.wanted(None)
    asked = Asked(
        cache, cache_type, target_error, target_bytes, rank, residual_type, bits, share, sinks, group, heads, predict,
        exact, allow_lossy, v_heads,
    ).spelled_out()  # fmt: skip
    request, cache = checked(asked), asked.cache
    adapters = Adapters.of(lora)
    _check(source, target, outtype, overwrite, adapters)
    _check_texts(target, cache, calibration, verify)
    sharing = _sharing(cache, kv_layers, kv_heads, merge, shared_keys)
    matrix = None if imatrix is None else _imatrix(imatrix, target, outtype, sharing)
    plainly = cache is None and cross is None and outtype is None and not sharing and not adapters
    folds = (f"--cache {cache}", f"--cross {cross}")
    model, warnings = read_model(source, keep_fold=plainly, named=folds, adapters=adapters)
    before = Stored(weight_type(model), sum(file.stat().st_size for file in source_files(source)))
    importance = Importance() if matrix is None else Importance.of(matrix, model)
    if sharing:
        model, more = share_layers(model, kv_layers, kv_heads, merge, shared_keys)
        warnings += more
    plain_types = model
    if outtype is not None:
        model, more = requantise(model, outtype, importance)
        warnings += more
    attention = _attention(model, request, cross, calibration, verify)
    if sparse:
        check_sparse(model, attention, cache)
    check_cross(model, cross, cross_type)
    check_room(target, model)  # before folding, which takes long and needs still more space
    compared = _compared(source, verify, show, adapters)
    metadata = {
        "slimrt.format_version": uint32(FORMAT_VERSION),
        "slimrt.source_hash": string(source_hash(source, show, adapters)),
    }
    layers, basis = (
        [LayerReport(layer, cache or BASELINES[attention.latent > 0]) for layer in range(attention.n_layers)],
        "none",
    )
    crossed: list[CrossReport] = []
    with stand_in(target, "", _private_folder) as spool, writing(target, spool):
        if cache is not None:
            model = fold_value_bias(model, attention)
        if cache in (*FOLDED, AUTO):
            plain = source if calibration == "none" else runnable(source, show, adapters)
            with calibrated(plain, model, calibration, folder=spool, show_progress=show) as known:
                if request.v_heads:
                    known = _keep_v(known, plain_types, request.v_heads, outtype, importance, show)
                model, layers = fold_model(known, request, spool, show_progress=show)
                basis, warnings = known.basis, warnings + known.warnings
            metadata |= _fold_fields(layers, basis)
            warnings += _error_warnings(layers, request)
            if not allow_lossy:
                require_all_precise(model, layers)
        if cache is not None:
            metadata |= _cache_fields(layers, request)
        if sparse:
            metadata[SPARSE_KEY] = float32(0.0)  # find_delta() overwrites it
        if cross is not None:
            model, crossed = fold_cross_model(
                model, cross, cross_type, spool, allow_lossy=allow_lossy, show_progress=show
            )
            metadata |= cross_fields(crossed, cross, cross_type)
        with written_gguf(target, model.with_metadata(metadata), show_progress=show) as written:
            planned = plan_of_written(written, source)
            spared = find_delta(written, source, calibration, show_progress=show) if sparse else None
    if cache not in (*FOLDED, AUTO):
        layers = [unfolded(attention, one) for one in planned["layers"]]
    shown = ", ".join(request.types)
    report = ConvertReport(
        target,
        cache,
        shown,
        basis,
        layers,
        warnings,
        target_error=request.target,
        target_bytes=target_bytes if target_bytes is None or isinstance(target_bytes, str) else int(target_bytes),
        cross=tuple(crossed),
        before=before,
        after=Stored(weight_type(model), target.stat().st_size),
        sparse=spared,
        n_ctx_train=int(planned["n_ctx_train"]),
        smaller_from=_break_evens(target, layers),
    )
    if compared is None:
        return report
    plain, ids = compared
    type_name = AUTO if "slimrt.cache.types" in metadata else request.types[0]
    return replace(report, verify=compare(plain, target, ids, type_name, show_progress=show))


def _break_evens(target: Path, layers: list[LayerReport]) -> dict[str, int | None]:
    """ConvertReport.smaller_from of the new file; {} if no weights were folded."""
    if not any(layer.weights for layer in layers):
        return {}
    planner = Planner.of(ModelSource(target, show_progress=False), None, 1, 512, None)
    return planner.break_evens(CacheChoice.of(AUTO))


def _keep_v(
    known: Calibration, model: ModelData, share: float, outtype: str | None, importance: Importance, show: bool
) -> Calibration:
    """The calibration with heads that store V chosen, and permuted to the end of each layer. model: the model before it
    was requantised.

    Raises:
        UnsupportedError: there is no text to rank heads by, or heads cannot be permuted.
    """
    attention = known.attention
    if known.folder is None:
        raise UnsupportedError("v_heads ranks heads by what they attend to in a text, and there is none: the model "
                               "needs a tokenizer, and the calibration a text")  # fmt: skip
    keeps = keeping_heads(known, share, show_progress=show)
    order = {layer: np.argsort(row, kind="stable") for layer, row in enumerate(keeps)}
    model, warnings = reordered(model, attention, order, unpack=outtype is not None), known.warnings
    if outtype is not None:
        model, _ = requantise(model, outtype, importance.without(lambda name: name.endswith("attn_output.weight")))
    if importance:
        warnings = [*warnings, "v_heads puts columns of attn_output in another order: they count alike"]
    model = fold_value_bias(model, attention)
    return replace(known, model=model, v_heads=tuple(map(int, keeps.sum(axis=1))), warnings=warnings)


def _sharing(cache: str | None, kv_layers: int | None, kv_heads: int | None, merge: str, keys: str) -> bool:
    """Whether K and V are to be merged. ValueError: folding was requested too, or options of merging without it."""
    asked = kv_layers is not None or kv_heads is not None
    if asked and cache is not None:
        raise ValueError(
            "kv_layers and kv_heads change the weights, which are then trained: fold for a cache after that"
        )
    if not asked and (merge, keys) != ("uniform", "unrotated"):
        raise ValueError("merge and shared_keys are for a conversion with kv_layers or kv_heads")
    return asked


def _attention(
    model: ModelData, request: Request, cross: str | None, calibration: Text, verify: bool | Text
) -> Attention:
    """The model's attention, checked to be suitable for the request.

    Raises:
        CacheUnsupportedError, UnsupportedError, ValueError: as `convert`.
    """
    attention, cache = Attention.of(model), request.mode
    kind = model.value("slimrt.chronos.kind", "")
    if attention.n_layers == 0 and (cache is not None or cross is not None):
        raise CacheUnsupportedError(
            f"architecture '{model.arch}' has no decoder, and so no cache: leave out cache and cross"
        )
    if attention.encoder_decoder and (request.target is not None or request.budget is not None):
        what = "cache 'auto'" if cache == AUTO else "a target"
        raise UnsupportedError(
            f"{what} measures on a text, which says nothing of a decoder beside an encoder ('{model.arch}'): "
            "choose the modes, such as --cache x --cross e, which invert nothing; slimrt plan and slimrt inspect show "
            "what each one costs"
        )
    if attention.norms_v and (request.target is not None or request.budget is not None):
        raise UnsupportedError(
            f"{'cache auto' if cache == AUTO else 'a target'} measures V as a product of a layer's input, and in "
            f"architecture '{model.arch}' V is normed: choose modes and types (kv, and kivi in layers without a window)"
        )
    if attention.encoder_decoder and calibration not in (None, "none"):
        raise UnsupportedError(
            f"a text says nothing of a decoder beside an encoder ('{model.arch}'): leave out the calibration"
        )
    if verify not in (None, False) and kind in ("bolt", "2"):
        raise UnsupportedError(f"verify compares logits, and Chronos-{kind.capitalize()} has none: compare forecasts")
    if attention.latent and cache == AUTO:
        raise UnsupportedError("latent attention (MLA) has one cache mode, latent: there is nothing to choose")
    if cache is not None and cache != AUTO:
        attention.require(cache)
    if request.v_heads and (reason := refusal(attention)):
        raise UnsupportedError(f"v_heads is not possible here: {reason}")
    check_rank(attention, request.rank)
    if request.heads is not None:
        check_heads(attention, request.heads)
    return attention


def _check(source: Path, target: Path, outtype: str | None, overwrite: bool, adapters: Adapters) -> None:
    if outtype is not None:
        check_outtype(outtype)
    if not source.exists():
        raise FileNotFoundError(f"{source}: no such file or directory")
    check_target(target)
    check_utf8(target)
    if not target.exists():
        return
    if any(target.samefile(file) for file in source_files(source, adapters)):
        raise ValueError(f"{target} is the source itself; write to another file")
    if not overwrite:
        raise FileExistsError(f"{target} exists: name another file, or replace it: --force, overwrite=True in Python")


def _check_texts(target: Path, cache: str | None, calibration: Text, verify: bool | Text) -> None:
    if calibration not in (None, "none") and cache not in (*FOLDED, AUTO):
        raise ValueError(
            f"calibration is for cache modes that fold ({', '.join(FOLDED)}, {AUTO}), and this conversion has none"
        )
    texts = (None if calibration == "none" else calibration, None if isinstance(verify, bool) else verify)
    for text in texts:
        if text and not Path(text).is_file():
            raise FileNotFoundError(f"{text}: no such text file")
        if text and target.exists() and target.samefile(text):
            raise ValueError(f"{target} is the text to read; write to another file")


def _imatrix(path: str | os.PathLike[str], target: Path, outtype: str | None, sharing: bool) -> Imatrix:
    """The importance matrix in a file. ValueError: it is not for this outtype or for merged layers, or the file is to
    be written to. Others as `read_imatrix`."""
    check_weighted(outtype)
    if sharing:
        raise ValueError(
            "kv_layers and kv_heads change the weights, which are then trained: use an importance matrix (imatrix) of "
            "the trained model after that"
        )
    if target.exists() and Path(path).exists() and target.samefile(path):
        raise ValueError(f"{target} is the importance matrix to read; write to another file")
    return read_imatrix(path)


def _compared(
    source: Path, verify: bool | Text, show: bool, adapters: Adapters
) -> tuple[Path, np.ndarray | None] | None:
    """What to verify the result against: the source as a runnable file, and ids of a text; None: no verification.
    Errors as text_ids."""
    if verify is None or verify is False:
        return None
    plain = runnable(source, show, adapters)
    return plain, text_ids(plain, None if verify is True else verify or None, MAX_TOKENS)


def _private_folder(path: Path) -> None:
    """Create the folder for tensors that are computed before the file's header can be written."""
    path.mkdir(mode=0o700, exist_ok=True)


def _cache_fields(layers: list[LayerReport], request: Request) -> dict[str, GGUFValue]:
    """Metadata of the caches that the runtime uses by default; types only if they were given, or folded for."""
    fields = {"modes": array([layer.mode for layer in layers], GGUFValueType.STRING)}
    if request.said or request.mode in ("k+r", "xr", LATENT_MODE, AUTO):
        fields["types"] = array([layer.type or request.types[0] for layer in layers], GGUFValueType.STRING)
    if any(layer.mode == "k+r" for layer in layers):
        fields["residual_types"] = array([layer.residual_type for layer in layers], GGUFValueType.STRING)
        fields["ranks"] = array([layer.rank for layer in layers], GGUFValueType.UINT32)
    if any(layer.v_heads for layer in layers):
        fields["v_heads"] = array([layer.v_heads for layer in layers], GGUFValueType.UINT32)
    return {f"slimrt.cache.{key}": value for key, value in fields.items()}


def _fold_fields(layers: list[LayerReport], basis: str) -> dict[str, GGUFValue]:
    """The report as metadata, one value per layer; 0 if nothing was inverted or measured there."""
    columns: dict[str, list[float]] = {
        "cond": [layer.cond or 0.0 for layer in layers],
        "rank": [layer.rank for layer in layers],
    }
    names = dict.fromkeys(name for layer in layers for name in layer.errors)
    columns |= {f"error_{name}": [layer.errors.get(name, 0.0) for layer in layers] for name in names}
    for key in ("predicted", "measured"):
        for part in ("value", "output"):
            found = (getattr(layer, key) for layer in layers)
            columns[f"{key}_{part}"] = [getattr(errors, part) if errors else 0.0 for errors in found]
    kinds = {"rank": GGUFValueType.UINT32}
    fields = {key: array(list(values), kinds.get(key, GGUFValueType.FLOAT32)) for key, values in columns.items()}
    fields["calibration"] = string(basis)
    return {f"slimrt.fold.{key}": value for key, value in fields.items()}


def _error_warnings(layers: list[LayerReport], request: Request) -> list[str]:
    """A warning, naming the worst layer, if the rounding of stored rows is amplified too much; else []."""
    if request.target is not None:
        return _target_warnings(layers, request, request.target)
    if request.budget is not None:
        return []

    def error_of(layer: LayerReport) -> float:
        return lost(layer) or (layer.predicted.value if layer.predicted else 0.0)

    if request.mode in AGING:  # lossy by design: the report says how much
        return []
    worst = max(layers, key=error_of)
    error = error_of(worst)
    if not verdict(error):
        return []
    limit = TOO_LARGE if error > TOO_LARGE else CAUTION
    n_over = sum(error_of(layer) > limit for layer in layers)
    amplified = "K" if worst.mode == "v" else "V"
    return [
        f"cache mode '{worst.mode}' in {worst.type}: predicted error of {amplified} {error:.1%} in layer {worst.layer} "
        f"(over {limit:.0%} in {n_over} of {len(layers)} layers): {verdict(error)}"
    ]


def _target_warnings(layers: list[LayerReport], request: Request, target: float) -> list[str]:
    over = [
        layer.layer
        for layer in layers
        if any(errors and errors.size > target for errors in (layer.predicted, layer.measured))
    ]
    if not over:
        return []
    larger = "" if request.mode == LATENT_MODE and not request.said else "larger types (--cache-type) or "
    return [
        f"no allowed type meets the target error of {target:.2g} in {len(over)} of {len(layers)} layers (the first is "
        f"{over[0]}); they have the cache with the smallest error: allow {larger}a larger error"
    ]
