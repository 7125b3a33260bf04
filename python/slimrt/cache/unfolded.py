"""What a file lacks for a choice of cache, which loading folds then, and the memory that folding takes."""

from __future__ import annotations

from collections.abc import Sequence

from slimrt.cache.config import CacheChoice, LayerCache
from slimrt.info import Plan
from slimrt.modelfile.source import MEASURED_ROWS, WHITE_ROWS, ModelSource
from slimrt.modes import AGING, CROSS_FOLDED, FOLDED, INVERTED, reads_text

# Most float64 matrices of a layer that folding holds at once, as wide as the model or K: to invert one, with LAPACK's
# copies; for latents; for a residual, or K and V of cross-attention
_TO_INVERT, _FOR_LATENTS, _FOR_OTHERS = 13, 11, 19


def folds_at_load(source: ModelSource, layers: Sequence[LayerCache]) -> dict[LayerCache, list[int]]:
    """Cache -> those of the layers with these caches that have rows of their own and whose folded weights the file
    lacks."""
    if not any(cache.mode in FOLDED for cache in layers):
        return {}
    present = source.file.tensors()
    missing: dict[LayerCache, list[int]] = {}
    for layer, cache in owning(source, layers):
        if cache.mode in FOLDED and f"{source.blocks}{layer}.{FOLDED[cache.mode]}" not in present:
            missing.setdefault(cache, []).append(layer)
    return missing


def owning(source: ModelSource, layers: Sequence[LayerCache]) -> list[tuple[int, LayerCache]]:
    """(layer, cache) of the layers that have rows of their own."""
    owners = source.owners
    return [(i, cache) for i, cache in enumerate(layers) if owners[i] == i]


def cross_folds_at_load(source: ModelSource, mode: str) -> list[int]:
    """The layers whose cross-attention needs folded weights in this mode that the file lacks."""
    if not (names := CROSS_FOLDED.get(mode, ())):
        return []
    present = source.file.tensors()
    layers = range(int(source.defaults["n_layers"]))
    return [layer for layer in layers if any(f"{source.blocks}{layer}.{name}" not in present for name in names)]


def most_at_once(source: ModelSource, choice: CacheChoice, layers: Sequence[LayerCache], sizes: Plan) -> int:
    """The most bytes in use at a time until a model with this choice of cache is loaded, if it is folded then; else 0.

    Args:
        layers: the choice's. sizes: of the loaded model.
    """
    unfolded, crossing = folds_at_load(source, layers), cross_folds_at_load(source, choice.cross.mode_for(source))
    if not unfolded and not crossing:
        return 0
    own, cross, modes = source.modes(), source.modes(cross=True), {cache.mode for cache in unfolded}
    folds = [(fold, cache.rank) for cache, of in unfolded.items() for _ in of for fold in own[cache.mode].folds]
    folds += [(fold, 0) for _ in crossing for fold in cross[choice.cross.mode_for(source)].folds]
    made = sum(4 * (fold.rows or rank) * (fold.cols or rank) for fold, rank in folds)
    if modes.isdisjoint(INVERTED) and not crossing:  # else they are float32, whatever the engine holds them in
        made = min(made, sizes["derived"])
    width = max(int(sizes["d_model"]), source.kv_width)
    inverts, by_age = (modes <= set(some) and not crossing for some in (INVERTED, AGING))
    matrices = _TO_INVERT if inverts else _FOR_LATENTS if by_age else _FOR_OTHERS
    on_text = not source.has_encoder and any(reads_text(cache.mode, cache.type) for cache in unfolded)
    rows = MEASURED_ROWS if on_text else WHITE_ROWS
    folding = sizes["mapped"] + made + matrices * 8 * width * max(width, rows)
    copying = sizes["mapped"] + sizes["total"] + made  # the engine has its own of what was made
    return max(folding, copying, source.calibrating if on_text else 0)
