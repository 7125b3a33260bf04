# SPDX-License-Identifier: Apache-2.0
"""How a directory that sentence-transformers saved makes one vector of a text: modules.json, and its pooling's
config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import PoolingType
from gguf.gguf_writer import GGUFValue

from slimrt.errors import ModelFormatError
from slimrt.modelfile.gguf import uint32
from slimrt.tokenizer.hf import read_json_if_any, read_json_value

_TYPES = {"mean": PoolingType.MEAN, "cls": PoolingType.CLS, "lasttoken": PoolingType.LAST}
_COMPUTED = ("Transformer", "Pooling", "Normalize")


def pooling_fields(directory: Path, arch: str) -> tuple[dict[str, GGUFValue], list[str]]:
    """GGUF's type of the pooling, NONE where it has no name for it, and warnings on what embed() does not compute.

    Raises:
        ModelFormatError: a file is not what it should be.
    """
    path = directory / "modules.json"
    if not path.is_file():
        return {}, []
    modules = read_json_value(path)
    if not isinstance(modules, list) or not all(map(_is_module, modules)):
        raise ModelFormatError(f"{path}: not a list of modules with a type and a path")
    names = [one["type"].rpartition(".")[2] for one in modules]
    pooled = [directory / one["path"] / "config.json" for one in modules if one["type"].endswith("Pooling")]
    modes = [mode for file in pooled for mode in _modes(read_json_if_any(file))]
    kind, warnings = _TYPES.get(modes[0] if len(modes) == 1 else "", PoolingType.NONE), []
    if kind not in (PoolingType.MEAN, PoolingType.LAST):
        said = " and ".join(modes) or "none that is known"
        warnings.append(f"the pooling of {path} is {said}, which embed() does not have: it has to be told another")
    if more := [name for name in names if name not in _COMPUTED]:
        warnings.append(f"{path} names {', '.join(more)}, which embed() leaves out: its vectors are those before it")
    return {f"{arch}.pooling_type": uint32(kind)}, warnings


def _is_module(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("type"), str) and isinstance(one.get("path"), str)


def _modes(config: Mapping[str, Any]) -> list[str]:
    """The names of a pooling's modes: one in newer files, a flag for each in others."""
    if isinstance(named := config.get("pooling_mode"), str):
        return [named]
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    return [key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for key in chosen]
