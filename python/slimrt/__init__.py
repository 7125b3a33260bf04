"""slimrt: a transformer runtime whose context memory is a choice.

with slimrt.Model("model.gguf", cache="k") as model:
    print(model.generate("Once upon a time", max_tokens=64).text)
"""

from __future__ import annotations

TYPE_CHECKING = False  # what typing calls so; to import that, or importlib, takes longer than all else here
if TYPE_CHECKING:  # else on first use: __getattr__
    import os
    from collections.abc import Sequence

    from slimrt.cache.config import CacheConfig
    from slimrt.cache.plan_result import PlanResult, PlanRow
    from slimrt.core import __version__
    from slimrt.errors import (
        AudioError,
        CacheUnsupportedError,
        ChatError,
        ContextOverflowError,
        DownloadError,
        ModelFormatError,
        SlimrtError,
        UnsupportedError,
        WontFitError,
    )
    from slimrt.folding.report import ConvertReport
    from slimrt.generation.generate import Stream
    from slimrt.generation.options import GenerateOptions
    from slimrt.measure.quality import compare_caches
    from slimrt.model import Model
    from slimrt.modelfile.source import ModelSource
    from slimrt.results import (
        CacheComparison,
        CacheQuality,
        CacheUse,
        Generation,
        Score,
        Timings,
        TokenLogprob,
        TopLogprob,
        Usage,
    )
    from slimrt.runtime.plan import plan
    from slimrt.runtime.session import Session
    from slimrt.speech.records import Segment, TranscriptionInfo, Word
    from slimrt.tokenizer.tokenizer import Tokenizer

__all__ = [
    "AudioError",
    "CacheComparison",
    "CacheConfig",
    "CacheQuality",
    "CacheUnsupportedError",
    "CacheUse",
    "ChatError",
    "ContextOverflowError",
    "DownloadError",
    "GenerateOptions",
    "Generation",
    "Model",
    "ModelFormatError",
    "ModelSource",
    "PlanResult",
    "PlanRow",
    "Score",
    "Segment",
    "Session",
    "SlimrtError",
    "Stream",
    "Timings",
    "TokenLogprob",
    "Tokenizer",
    "TopLogprob",
    "TranscriptionInfo",
    "UnsupportedError",
    "Usage",
    "WontFitError",
    "Word",
    "__version__",
    "compare_caches",
    "convert",
    "plan",
]

# module -> the public names that it defines, which are imported when they are first used: `slimrt --version`, and
# whoever uses a part, must not wait for all of it
_NAMES = {
    "cache.config": ("CacheConfig",),
    "cache.plan_result": ("PlanResult", "PlanRow"),
    "core": ("__version__",),
    "errors": (
        "AudioError",
        "CacheUnsupportedError",
        "ChatError",
        "ContextOverflowError",
        "DownloadError",
        "ModelFormatError",
        "SlimrtError",
        "UnsupportedError",
        "WontFitError",
    ),
    "generation.generate": ("Stream",),
    "generation.options": ("GenerateOptions",),
    "measure.quality": ("compare_caches",),
    "model": ("Model",),
    "modelfile.source": ("ModelSource",),
    "results": (
        "CacheComparison",
        "CacheQuality",
        "CacheUse",
        "Generation",
        "Score",
        "Timings",
        "TokenLogprob",
        "TopLogprob",
        "Usage",
    ),
    "runtime.plan": ("plan",),
    "runtime.session": ("Session",),
    "speech.records": ("Segment", "TranscriptionInfo", "Word"),
    "tokenizer.tokenizer": ("Tokenizer",),
}
_HOMES = {name: f"slimrt.{module}" for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker knows the names, and must complain of others

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'slimrt' has no attribute '{name}'")
        from importlib import import_module

        value: object = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value  # from now on without this function
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
    kv_layers: int | None = None,
    kv_heads: int | None = None,
    merge: str = "uniform",
    shared_keys: str = "unrotated",
    calibration: str | os.PathLike[str] | None = None,
    exact: bool = False,
    cross: str | None = None,
    cross_type: str = "auto",
    sparse: bool = False,
    verify: bool | str | os.PathLike[str] | None = None,
    allow_lossy: bool = False,
    progress: bool | None = None,
    overwrite: bool = True,
) -> ConvertReport:
    """Convert a GGUF file or a Hugging Face directory to a GGUF file that loads with its cache mode at once.

    Args: as slimrt.converter.convert.convert; progress None: bars when stderr is a terminal.
    """
    from slimrt.converter import convert as tool  # its readers and writers are needed for nothing else
    from slimrt.plumbing.progress import wanted

    return tool.convert(
        src,
        out,
        cache=cache,
        cache_type=cache_type,
        target_error=target_error,
        target_bytes=target_bytes,
        rank=rank,
        residual_type=residual_type,
        bits=bits,
        share=share,
        sinks=sinks,
        group=group,
        heads=heads,
        predict=predict,
        v_heads=v_heads,
        outtype=outtype,
        kv_layers=kv_layers,
        kv_heads=kv_heads,
        merge=merge,
        shared_keys=shared_keys,
        calibration=calibration,
        exact=exact,
        cross=cross,
        cross_type=cross_type,
        sparse=sparse,
        verify=verify,
        allow_lossy=allow_lossy,
        progress=wanted(progress),
        overwrite=overwrite,
    )
