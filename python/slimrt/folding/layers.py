# SPDX-License-Identifier: Apache-2.0
"""Folding a whole model, one layer at a time: the request, the cache of each layer, and its tensors in files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from slimrt.folding.attention import Attention
from slimrt.folding.budget import Budget, Offer, allocate
from slimrt.folding.calibrate import Calibration
from slimrt.folding.choose import Offered, Option, choose, kv_bytes, offers, share_of_v
from slimrt.folding.exact import FOLDED as EXACT
from slimrt.folding.fold import reader
from slimrt.folding.noise import ROUNDOFF
from slimrt.folding.planes import bytes_per_token, planes
from slimrt.folding.precision import Errors, measured, predicted
from slimrt.folding.readback import Reader, Sample
from slimrt.folding.report import FrontReport, LayerReport
from slimrt.info import LayerInfo
from slimrt.modelfile.gguf import ModelData, Tensor
from slimrt.modes import AGING
from slimrt.plumbing import progress as bars

_STORED = {np.dtype(np.float32): GGMLQuantizationType.F32, np.dtype(np.float16): GGMLQuantizationType.F16}


@dataclass(frozen=True)
class Request:
    """The cache that a conversion is to fold for.

    Attributes:
        mode: for all layers; "auto": to be chosen; None: no folding.
        types: element types of the rows; several to choose from; in modes whose rows age possibly levels (core.levels).
        said: the types were given, not defaults.
        target: choose the fewest bytes within this error.
        rank, residual_type: of mode "k+r"; None: the default.
        heads: KV heads that share a latent, of mode "lowrank"; None: the default.
        budget: choose the smallest error within these bytes.
        lossy: modes with a large error of V may be chosen.
        predict: lowrank stores the difference of V from its prediction from K.
        v_heads: fraction of all KV heads that store V beside K, of modes "k" and "k+r".
    """

    mode: str | None
    types: tuple[str, ...]
    said: bool
    target: float | None
    rank: int | None
    residual_type: str | None
    heads: int | None = None
    budget: Budget | None = None
    lossy: bool = False
    predict: bool = False
    v_heads: float = 0.0

    @property
    def offered(self) -> Offered:
        """The caches from which a target or budget chooses."""
        assert self.mode is not None
        return Offered(self.mode, self.types if self.said else None, self.heads, self.lossy, self.predict)


def fold_model(
    known: Calibration, request: Request, spool: Path, *, show_progress: bool
) -> tuple[ModelData, list[LayerReport]]:
    """Return the model with the folded tensors of its cache, whose data is in files in `spool`, and a report per layer;
    a layer that reads another's rows has that layer's report, without bytes.

    Raises:
        CacheUnsupportedError: a projection to be inverted is singular.
        ValueError: the budget is too small.
    """
    chosen = _spend(known, request.budget, request.offered, show_progress) if request.budget else {}
    made: list[Tensor] = []
    reports: list[LayerReport] = []
    n_layers = known.attention.n_layers
    with bars.bar(show_progress, n_layers, "folding", "layer") as update:
        for layer in range(n_layers):
            if (owner := known.attention.owner(layer)) != layer:
                reports.append(
                    replace(
                        reports[owner], layer=layer, bytes_per_token=0, long_bytes=0, kv_bytes=0, weights=0, front=()
                    )
                )
                continue
            report, tensors = fold_one(known, layer, request, chosen.get(layer))
            reports.append(report)
            made += [
                in_file(spool, f"{known.attention.prefix(layer)}{name}", tensor) for name, tensor in tensors.items()
            ]
            update(layer + 1, n_layers)
    return known.model.with_tensors(*made), reports


def _spend(known: Calibration, budget: Budget, offered: Offered, show_progress: bool) -> dict[int, Offer]:
    """The cache of each layer that has rows of its own, chosen for all layers together within the budget."""
    owning, found, kv = known.attention.owning(), list[list[Offer]](), 0
    with bars.bar(show_progress, len(owning), "choosing", "layer") as update:
        for done, layer in enumerate(owning, start=1):
            sample, held_out = known.layer(layer)
            found.append(offers(sample, held_out, offered, half=True))
            kv += kv_bytes(sample)
            update(done, len(owning))
    return dict(zip(owning, allocate(found, budget.bytes(kv)), strict=True))


def fold_one(
    known: Calibration, layer: int, request: Request, chosen: Offer | None = None
) -> tuple[LayerReport, dict[str, np.ndarray]]:
    """One layer's report, and its tensors by name after "blk.N.". chosen: its cache, if a budget has chosen it."""
    sample, held_out = known.layer(layer)
    if request.target is not None:
        option, front = choose(sample, held_out, request.target, request.offered, half=True)
        return (
            _report(sample, option.reader, option.predicted, option.measured, front),
            option.reader.tensors,
        )
    mode = "kv" if known.keeps_v(layer) else request.mode
    assert mode is not None
    asked = (mode, request.types[0], request.rank, request.residual_type)
    if chosen is not None:
        asked = (chosen.mode, chosen.type, chosen.rank, chosen.residual_type)
    made = reader(sample, *asked, half=True, heads=request.heads)
    exact = mode in EXACT
    return _report(sample, made, predicted(made), measured(made, held_out), [], exact=exact), made.tensors


def _report(
    sample: Sample, made: Reader, expected: Errors, found: Errors | None, front: list[Option], *, exact: bool = False
) -> LayerReport:
    attention = sample.weights.attention
    errors: dict[str, float] = {}
    if exact:
        names = dict.fromkeys((*ROUNDOFF, made.type))
        errors = {name: reader(sample, made.mode, name, half=True).fold_error() for name in names}
    return LayerReport(
        layer=sample.weights.layer,
        mode=made.mode,
        type=made.type,
        rank=made.rank,
        residual_type=made.residual_type,
        v_heads=sample.v_heads,
        cond=sample.cond if made.cond is None else made.cond,
        errors=errors,
        predicted=expected,
        measured=found,
        bytes_per_token=bytes_per_token(made.planes),
        long_bytes=made.long_bytes,
        kv_bytes=kv_bytes(sample),
        weights=sum(tensor.nbytes for tensor in made.tensors.values()),
        share_of_v=share_of_v(sample) if attention.kv_width < attention.d and made.mode not in AGING else None,
        front=tuple(FrontReport(o.mode, o.type, o.rank, o.residual_type, o.bytes, o.predicted.size) for o in front),
    )


def unfolded(attention: Attention, planned: LayerInfo) -> LayerReport:
    """The report of a layer for which nothing was folded, with the sizes that the new file's plan has."""
    layer, size = planned["layer"], planned["bytes_per_token"]
    has_kv = attention.owner(layer) == layer and not attention.latent
    kv = bytes_per_token(planes(attention.in_layer(layer), "kv", "f16")) if has_kv else 0
    return LayerReport(
        layer, planned["mode"], planned["type"], planned["rank"], planned["residual_type"], bytes_per_token=size,
        long_bytes=size, kv_bytes=kv, v_heads=planned["v_heads"],
    )  # fmt: skip


def in_file(spool: Path, name: str, values: np.ndarray) -> Tensor:
    """Write values, float32 or float16, to a file in the folder, and return a tensor that reads them from there."""
    file, shape, kind = spool / name, values.shape, values.dtype
    file.write_bytes(np.ascontiguousarray(values).data)
    return Tensor(name, shape, _STORED[kind], lambda: np.memmap(file, kind, "r", shape=shape).view(np.uint8))
