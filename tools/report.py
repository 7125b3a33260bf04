# SPDX-License-Identifier: Apache-2.0
"""What a conversion did, layer by layer, as data and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CAUTION, TOO_LARGE = 0.01, 0.05  # relative error of V
_AMPLIFIED = {"k": "V", "v": "K"}  # mode -> what is computed from the stored row


def verdict(error: float) -> str:
    """What to say of a predicted relative error: nothing, "caution", or "do not use: use kv"."""
    if error > TOO_LARGE:
        return "do not use: use kv"
    return "caution" if error > CAUTION else ""


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        layer: which.
        mode: its cache mode.
        cond: condition of the projection that is inverted; None when none is.
        errors: element type -> predicted relative error of V (of K in mode "v"); empty when nothing is inverted.
    """

    layer: int
    mode: str
    cond: float | None = None
    errors: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class VerifyReport:
    """Logits of the result, with its cache, against those of the source with a float32 `kv` cache.

    Attributes:
        tokens: how many rows of logits were compared, each one decoded over the cache.
        max_abs: the largest difference. max_rel: that over the largest logit.
        kl: mean KL divergence of the next-token distributions, nats. same_top: share of equal top tokens.
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
class ConvertReport:
    """What `convert` wrote.

    Attributes:
        path: the new file. cache: its cache mode, None when it is a plain model.
        cache_type: the element type that the warnings are about.
        calibration: what the predicted errors rest on.
        layers: one report a layer. warnings: what the user should know.
        verify: the comparison with the source, when asked for.
    """

    path: Path
    cache: str | None
    cache_type: str
    calibration: str
    layers: list[LayerReport]
    warnings: list[str]
    verify: VerifyReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return asdict(self) | {"path": str(self.path)}

    def table(self) -> str:
        """The report as text: a row a layer, then warnings."""
        lines = [str(self.path)]
        if any(layer.errors for layer in self.layers):
            what = _AMPLIFIED[self.layers[0].mode]
            lines += [
                f"predicted relative error of {what} by type of the cache ({self.calibration})",
                f"{'layer':>5}  {'mode':<4}  {f'cond(W_{self.layers[0].mode.upper()})':>9}  "
                + "  ".join(f"{name:>8}" for name in self.layers[0].errors),
            ]
            lines += [self._row(layer) for layer in self.layers]
        if self.verify:
            lines.append(str(self.verify))
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])

    @staticmethod
    def _row(layer: LayerReport) -> str:
        errors = "  ".join(f"{error:8.2g}" for error in layer.errors.values())
        said = ", ".join(f"{name}: {verdict(error)}" for name, error in layer.errors.items() if verdict(error))
        return f"{layer.layer:>5}  {layer.mode:<4}  {layer.cond or 0:9.3g}  {errors}  {said}".rstrip()
