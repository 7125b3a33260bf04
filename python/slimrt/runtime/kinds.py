"""What a model is for, and a clear answer to who wants another thing of it."""

from __future__ import annotations

from slimrt.errors import UnsupportedError
from slimrt.modelfile.source import ModelSource
from slimrt.runtime.runtime import Runtime

_USES = {
    "whisper": "slimrt transcribe (from Python transcribe())",
    "moonshine": "slimrt transcribe (from Python transcribe())",
    "t5": "slimrt text2text or translate (from Python text2text() and translate())",
    "chronos": "slimrt forecast (from Python predict_quantiles())",
    "chronos-bolt": "slimrt forecast (from Python predict_quantiles())",
}
_TEXT = "slimrt generate or chat (from Python generate(), stream() and chat())"


def require(runtime: Runtime, *kinds: str, to: str) -> str:
    """The model's kind, if it is one of these. UnsupportedError else, with what the model is for.

    Args:
        to: what is wanted of it, as a verb.
    """
    kind = runtime.source.kind
    if kind not in kinds:
        what = f"is a {runtime.info['architecture']} model" if kind in ("text", "t5") else f"is a {kind} model"
        raise UnsupportedError(
            f"{runtime.source.name} {what} and cannot {to}: that takes {' or '.join(kinds)}; "
            f"use {_USES.get(kind, _TEXT)} with this one"
        )
    return kind


def continues_texts(source: ModelSource) -> None:
    """UnsupportedError for a model that has an encoder: without a source there is nothing to continue or to keep."""
    if source.kind != "text":
        raise UnsupportedError(
            f"{source.name} is a {source.kind} model, and a decoder beside an encoder cannot continue a text by "
            f"itself: use {_USES[source.kind]} with this one"
        )


def check_sequences(runtime: Runtime, needed: int) -> None:
    """ValueError where one search needs more sequences at once than the model was loaded with."""
    if needed > int(runtime.info["n_seqs"]):
        raise ValueError(
            f"num_beams or best_of {needed} needs {needed} sequences at once, the model has {runtime.info['n_seqs']}: "
            f"load it with n_seqs={needed}, or a multiple of it for as many inputs at once"
        )
