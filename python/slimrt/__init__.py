"""slimrt: a transformer runtime whose context memory is a choice.

with slimrt.Model("model.gguf", cache="k") as model:
    print(model.generate("Once upon a time", max_tokens=64).text)
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, whose import (like importlib's) would take longer than all else here
if TYPE_CHECKING:  # at run time names are imported on first use, by __getattr__ below
    from slimrt.cache.config import CacheConfig
    from slimrt.cache.plan_result import PlanResult, PlanRow
    from slimrt.converter.call import convert
    from slimrt.converter.imatrix import ImatrixReport, imatrix
    from slimrt.core import __version__
    from slimrt.errors import (
        AudioError,
        CacheUnsupportedError,
        ChatError,
        ContextOverflowError,
        DownloadError,
        GrammarError,
        ModelFormatError,
        SlimrtError,
        UnsupportedError,
        WontFitError,
    )
    from slimrt.generation.options import GenerateOptions
    from slimrt.generation.stream import Stream
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
    "GrammarError",
    "ImatrixReport",
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
    "imatrix",
    "plan",
]

# module -> the public names that it defines. They are imported on first use, so that `slimrt --version`, or a program
# that needs one part, does not wait for the others
_NAMES = {
    "cache.config": ("CacheConfig",),
    "cache.plan_result": ("PlanResult", "PlanRow"),
    "converter.call": ("convert",),
    "converter.imatrix": ("ImatrixReport", "imatrix"),
    "core": ("__version__",),
    "errors": (
        "AudioError",
        "CacheUnsupportedError",
        "ChatError",
        "ContextOverflowError",
        "DownloadError",
        "GrammarError",
        "ModelFormatError",
        "SlimrtError",
        "UnsupportedError",
        "WontFitError",
    ),
    "generation.stream": ("Stream",),
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


if not TYPE_CHECKING:  # hidden from type checkers, which would accept any name otherwise

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'slimrt' has no attribute '{name}'")
        from importlib import import_module

        value: object = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value  # the next access finds it without this function
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
