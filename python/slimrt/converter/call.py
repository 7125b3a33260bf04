"""slimrt.convert."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slimrt.plumbing.keywords import named

if TYPE_CHECKING:
    from slimrt.folding.report import ConvertReport


@named
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
