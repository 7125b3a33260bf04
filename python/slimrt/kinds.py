"""What a model is for, and a clear answer to who wants another thing of it."""

from __future__ import annotations

from slimrt import _core
from slimrt.errors import UnsupportedError
from slimrt.runtime import Runtime
from slimrt.source import ModelSource

_USES = {
    "whisper": "transcribe()",
    "moonshine": "transcribe()",
    "t5": "text2text() and translate()",
    "chronos": "predict_quantiles() (slimrt forecast)",
    "chronos-bolt": "predict_quantiles() (slimrt forecast)",
}
_TEXT = "generate(), stream() and chat()"


def kind_of(source: ModelSource) -> str:
    """ "whisper", "moonshine", "t5", "chronos" or "chronos-bolt"; "text" of a model that continues texts."""
    file = _core.GgufFile(str(source.gguf))
    architecture = str(file.value("general.architecture"))
    if "slimrt.chronos.kind" in file.keys():
        return "chronos-bolt" if file.value("slimrt.chronos.kind") == "bolt" else "chronos"
    return architecture if architecture in _USES else "text"


def require(runtime: Runtime, *kinds: str, to: str) -> str:
    """The model's kind, if it is one of these. UnsupportedError else, with what the model is for.

    Args:
        to: what is wanted of it, as a verb.
    """
    kind = kind_of(runtime.source)
    if kind not in kinds:
        what = f"is a {runtime.info['architecture']} model" if kind in ("text", "t5") else f"is a {kind} model"
        raise UnsupportedError(
            f"{runtime.source.path.name} {what} and cannot {to}: that takes {' or '.join(kinds)}; "
            f"use {_USES.get(kind, _TEXT)} with this one"
        )
    return kind


def continues_texts(source: ModelSource) -> None:
    """UnsupportedError for a model that has an encoder: without a source there is nothing to continue or to keep."""
    if not source.has_encoder:
        return
    kind = kind_of(source)
    raise UnsupportedError(
        f"{source.path.name} is a {kind} model, and a decoder beside an encoder cannot continue a text by itself: "
        f"use {_USES[kind]} with this one"
    )


def check_sequences(runtime: Runtime, needed: int) -> None:
    """ValueError where one search needs more sequences at once than the model was loaded with."""
    if needed > int(runtime.info["n_seqs"]):
        raise ValueError(
            f"num_beams or best_of {needed} needs {needed} sequences at once, the model has {runtime.info['n_seqs']}: "
            f"load it with n_seqs={needed}, or a multiple of it for as many inputs at once"
        )
