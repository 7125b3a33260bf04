# SPDX-License-Identifier: Apache-2.0
"""The report of a conversion, layer by layer, as data and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slimrt.folding.precision import Errors
from slimrt.modes import AGING, COMPUTED
from slimrt.plumbing.units import format_bytes

CAUTION, TOO_LARGE = 0.01, 0.05  # relative error of V


def verdict(error: float) -> str:
    """The verdict on a predicted relative error: "", "caution", or "do not use: use kv"."""
    if error > TOO_LARGE:
        return "do not use: use kv"
    return "caution" if error > CAUTION else ""


@dataclass(frozen=True)
class FrontReport:
    """A cache on one layer's Pareto front of bytes and error (predicted, `Errors.size`)."""

    mode: str
    type: str
    rank: int
    residual_type: str
    bytes_per_token: float
    error: float


@dataclass(frozen=True)
class LayerReport:
    """One layer of a conversion.

    Attributes:
        layer: index. mode: its cache mode. type: of its rows. rank, residual_type: of the residual of k+r.
        v_heads: how many KV heads store V beside K, in modes k and k+r.
        cond: condition number of the projection that is, or would be, inverted; None: none.
        errors: element type -> predicted relative error of V (of K in mode "v"); for exact folds only.
        predicted: relative errors of V and of attention's output. measured: the same, on held-out text.
        bytes_per_token: of the cache; if rows age, of the oldest level. long_bytes: of a long context, the mean over
            levels. kv_bytes: of kv f16; 0 with latent attention, which has no kv. All three are 0 in a layer that reads
            another's rows. weights: bytes of folded weights.
        share_of_v: fraction of V's variance that K predicts; None unless K is narrower than the input.
        front: the Pareto front of caches; () unless K is narrower than the input and the cache was to be chosen.
    """

    layer: int
    mode: str
    type: str = ""
    rank: int = 0
    residual_type: str = ""
    cond: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    predicted: Errors | None = None
    measured: Errors | None = None
    bytes_per_token: int = 0
    long_bytes: float = 0
    kv_bytes: int = 0
    weights: int = 0
    share_of_v: float | None = None
    front: tuple[FrontReport, ...] = ()
    v_heads: int = 0

    @property
    def label(self) -> str:
        """The mode, and how many heads store V."""
        return f"{self.mode}, V of {self.v_heads}" if self.v_heads else self.mode

    @property
    def share(self) -> float:
        """bytes_per_token as a fraction of kv f16; 0 without kv_bytes."""
        return self.bytes_per_token / self.kv_bytes if self.kv_bytes else 0.0


@dataclass(frozen=True)
class CrossReport:
    """One layer's cross-attention, folded for mode k or e1.

    Attributes:
        cond: condition number of the W_K that is inverted.
        errors: element type -> predicted relative error of V, in mode e1 the larger of K's and V's.
    """

    layer: int
    mode: str
    type: str
    cond: float
    errors: dict[str, float]


@dataclass(frozen=True)
class VerifyReport:
    """Logits of the result, with its cache, compared with those of the source with a float32 `kv` cache.

    Attributes:
        tokens: how many rows of logits were compared, each one decoded over the cache.
        max_abs: the largest difference. max_rel: the same over the largest logit.
        kl: mean KL divergence of the next-token distributions, nats. same_top: fraction of equal top tokens.
    """

    tokens: int
    max_abs: float
    max_rel: float
    kl: float
    same_top: float

    def __str__(self) -> str:
        return (
            f"verified on {self.tokens} tokens: max |difference| {self.max_abs:.3g} ({self.max_rel:.3g} relative), "
            f"KL {self.kl:.3g}, same top token {self.same_top:.2%}"
        )


@dataclass(frozen=True)
class SparseReport:
    """The measured sparse_delta of a conversion.

    Attributes:
        delta: the largest one tried that adds little KL divergence; 0: none.
        tried: delta -> what it adds to the mean KL divergence from kv f32, nats, on the worse of two texts.
        reason: why there is none; "": there is one.
    """

    delta: float
    tried: dict[float, float]
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"no sparse_delta: {self.reason}"
        return f"sparse_delta {self.delta}: adds {self.tried[self.delta]:.1e} to the KL divergence from kv f32"


@dataclass(frozen=True)
class Stored:
    """Type of a model's weights, such as "q4_k_m", and bytes of all its files."""

    type: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.type} {format_bytes(self.bytes)}"


@dataclass(frozen=True)
class ConvertReport:
    """The result of slimrt.convert.

    Attributes:
        path: the new file. cache: the requested cache mode ("auto": chosen by layer); None: a plain model.
        cache_type: the requested element types, separated by commas.
        calibration: a phrase on what the errors were predicted on.
        layers: one report per layer. warnings: for the user.
        verify: the comparison with the source, if requested.
        target_error: the bound on the errors, if any. target_bytes: that on the sum of `long_bytes`.
        cross: one report per layer whose cross-attention was folded. sparse: the measured sparse_delta, if requested.
        before, after: type and size of the source, and of the new file.
        n_ctx_train: tokens of context that the model was trained on.
        smaller_from: if weights were folded: label of a plain cache, such as "kv q8" -> the context, in tokens, from
            which the model takes less memory in all than with that cache, as slimrt.plan counts; None: never.
    """

    path: Path
    cache: str | None
    cache_type: str
    calibration: str
    layers: list[LayerReport]
    warnings: list[str]
    verify: VerifyReport | None = None
    target_error: float | None = None
    target_bytes: int | str | None = None
    cross: tuple[CrossReport, ...] = ()
    sparse: SparseReport | None = None
    before: Stored | None = None
    after: Stored | None = None
    smaller_from: dict[str, int | None] = field(default_factory=dict)
    n_ctx_train: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return asdict(self) | {"path": str(self.path)}

    def table(self) -> str:
        """The report as text, also returned by str(): a row per layer, a total, then warnings."""
        lines = [str(self.path), *([f"{self.before} -> {self.after}"] if self.before else [])]
        if any(layer.errors for layer in self.layers):
            lines += self._by_type()
        if any(layer.predicted for layer in self.layers):
            lines += self._by_layer()
        if self.cross:
            lines += self._of_cross()
        if self.sparse:
            lines.append(str(self.sparse))
        if self.verify:
            lines.append(str(self.verify))
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])

    __str__ = table

    def _of_cross(self) -> list[str]:
        read = "K and V" if self.cross[0].mode == "e1" else "V"
        head = (
            f"predicted relative error of cross-attention's {read} by type of the cache (white encoder states assumed)"
        )
        names = "  ".join(f"{name:>8}" for name in self.cross[0].errors)
        rows = [
            f"{one.layer:>5}  {one.mode:<4}  {one.cond:9.3g}  " + "  ".join(f"{e:8.2g}" for e in one.errors.values())
            for one in self.cross
        ]
        return [head, f"{'layer':>5}  {'mode':<4}  {'cond(W_K)':>9}  {names}", *rows]

    def _by_type(self) -> list[str]:
        """Predicted errors of an exact fold in every float type."""
        exact = [layer for layer in self.layers if layer.errors]
        mode, width = exact[0].mode, max(4, *(len(layer.label) for layer in exact))
        head = [
            f"predicted relative error of {COMPUTED[mode]} by type of the cache ({self.calibration})",
            f"{'layer':>5}  {'mode':<{width}}  {f'cond(W_{mode.upper()})':>9}  "
            + "  ".join(f"{name:>8}" for name in exact[0].errors),
        ]
        return head + [self._type_row(layer, width) for layer in exact]

    @staticmethod
    def _type_row(layer: LayerReport, width: int) -> str:
        errors = "  ".join(f"{error:8.2g}" for error in layer.errors.values())
        said = ", ".join(f"{name}: {verdict(error)}" for name, error in layer.errors.items() if verdict(error))
        return f"{layer.layer:>5}  {layer.label:<{width}}  {layer.cond or 0:9.3g}  {errors}  {said}".rstrip()

    def _by_layer(self) -> list[str]:
        """Error and size of each layer's cache."""
        mode, type = (max(len(getattr(layer, name)) for layer in self.layers) for name in ("label", "type"))
        widths = max(4, mode), max(8, type)
        head = [
            f"relative errors of V and of attention's output, predicted and measured ({self.calibration})",
            f"{'layer':>5}  {'mode':<{widths[0]}}  {'type':<{widths[1]}}  {'residual':<8}  {'cond(W_K)':>9}"
            f"  {'V pred.':>8}  {'V meas.':>8}  {'out pred.':>9}  {'out meas.':>9}  {'bytes/token':>11}"
            f"  {'of kv f16':>9}",
        ]
        return head + [self._row(layer, *widths) for layer in self.layers] + self.summary()

    @staticmethod
    def _row(layer: LayerReport, mode_width: int, type_width: int) -> str:
        residual = f"{layer.rank} {layer.residual_type}" if layer.rank else "-"
        cond = f"{layer.cond:9.3g}" if layer.cond is not None else f"{'-':>9}"
        shown = []
        for name, width in (("value", 8), ("output", 9)):
            for errors in (layer.predicted, layer.measured):
                shown.append(f"{getattr(errors, name):{width}.2g}" if errors else f"{'-':>{width}}")
        return (
            f"{layer.layer:>5}  {layer.label:<{mode_width}}  {layer.type:<{type_width}}  {residual:<8}  {cond}"
            f"  {'  '.join(shown)}  "
            f"{layer.bytes_per_token:>11}  {layer.share:>9.1%}"
        )

    def summary(self) -> list[str]:
        """Sentences on what the cache saves in the whole model, and at what cost."""
        bytes_, kv = sum(layer.bytes_per_token for layer in self.layers), sum(layer.kv_bytes for layer in self.layers)
        long = sum(layer.long_bytes for layer in self.layers)
        weights = sum(layer.weights for layer in self.layers)
        total = f"total: {bytes_} bytes a token, {bytes_ / kv:.1%} of kv f16"
        aging = sum(layer.mode in AGING for layer in self.layers)
        if aging:
            total += f" (of the oldest rows; of a long context {long:.0f}, {long / kv:.1%})"
        if weights:
            total += f"; folded weights take {format_bytes(weights)}"
        if self.smaller_from:
            total += f"; with these and scratch less in all than with {', '.join(map(self._beside, self.smaller_from))}"
        lines = [total]
        if aging:
            where = "" if aging == len(self.layers) else f"rows age in {aging} of {len(self.layers)} layers: there "
            lines.append(
                f"{where}the errors are those of the oldest rows, lossy by choice, and no limit refuses them: what a "
                "text loses is said by --verify and by slimrt perplexity --compare"
            )
        shares = [layer.share_of_v for layer in self.layers if layer.share_of_v is not None]
        if shares:
            lines.append(self._about_groups(shares))
        if self.cache == "auto" and all(layer.mode == "kv" for layer in self.layers):
            lines.append(self._nothing_gained())
        return lines

    def _beside(self, plain: str) -> str:
        """A phrase: a plain cache, and the context from which it takes more memory."""
        n_ctx = self.smaller_from[plain]
        if n_ctx is None:
            return f"{plain} at no context"
        beyond = f" (beyond the {self.n_ctx_train} trained)" if n_ctx > self.n_ctx_train else ""
        return f"{plain} from {n_ctx} tokens on{beyond}"

    def _about_groups(self, shares: list[float]) -> str:
        low, high = min(shares), max(shares)
        between = f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
        text = f"K is narrower than the layer's input; it predicts {between} of V's variance"
        if self.cache != "auto" or not any(layer.front for layer in self.layers):
            return text
        offered = sum(any(option.mode == "k+r" for option in layer.front) for layer in self.layers)
        return f"{text}, and k+r beats kv at its bytes in {offered} of {len(self.layers)} layers"

    def _nothing_gained(self) -> str:
        types = sorted({layer.type for layer in self.layers})
        use = f"cache='kv', cache_type='{types[0]}'" if len(types) == 1 else "this file, whose types differ by layer"
        return f"no mode beats kv here at this target: use {use}"
