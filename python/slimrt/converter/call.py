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
    imatrix: str | os.PathLike[str] | None = None,
    kv_layers: int | None = None,
    kv_heads: int | None = None,
    merge: str = "uniform",
    shared_keys: str = "unrotated",
    calibration: str | os.PathLike[str] | None = None,
    exact: bool = False,
    cross: str | None = None,
    cross_type: str = "auto",
    sparse: bool = False,
    lora: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    verify: bool | str | os.PathLike[str] | None = None,
    allow_lossy: bool = False,
    progress: bool | None = None,
    overwrite: bool = True,
) -> ConvertReport:
    """Convert a model to a GGUF file: fold its weights for a cache mode, so that it loads with that mode at once, and
    requantise, merge or verify them.

    Args:
        src: a GGUF file (of a split model the first file), a Hugging Face directory (config.json, safetensors), a ggml
            file of whisper.cpp, or a repository that holds one of these ("org/repo:file"); it is only read.
        out: the GGUF file to write. It appears, or is replaced, only when it is complete.
        cache: the cache mode to fold for ("kv", "k", "k+r", "v", "x", "xr", "kivi", "lowrank", "latent"); "auto": for
            each layer the smallest of them (except kivi) within the target; None: no folding. Types may be appended as
            in slimrt.Model: "k+r:q8:16:q4" gives cache_type, rank and residual_type too.
        cache_type: element type of the cache. With "auto" it may be several to choose from; for modes whose rows age it
            may be levels, such as "q2@0.5+q4*0.1+sinks=4". "auto": f16; for cache "auto" f16, q8, fp8_e4m3, q4 and, for
            rows that age, q8, q4, q3, q2 to choose from; for cache "lowrank" its default levels, or with a target those
            four types to choose from.
        target_error: with cache "auto" or "lowrank": the largest allowed relative error of V, and of attention's output
            over sqrt(2) (`slimrt.folding.precision.Errors.size`), in any layer; if rows age, of the oldest ones. Each
            layer gets the fewest bytes within it. None: with "auto" 0.01, unless target_bytes is given.
        target_bytes: with the same caches, instead of target_error: the bytes per token of a long context for all
            layers together, or a factor by which they are fewer than those of kv f16, such as "8x"; they are
            distributed such that the error is smallest (`slimrt.folding.budget`).
        rank, residual_type: of the residual of "k+r"; None: the default for the type.
        rank, bits, share, sinks: of "lowrank", one value for each level, oldest first: fractions of V's latent that are
            kept, bits of K and V, fractions of the aged rows (one value less: the oldest level has the rest), and the
            number of tokens at the beginning of a text that stay as written
            (`slimrt.folding.lowrank.levels_text`).
        group: tokens that share a scale of K, and columns that share a scale of V: 32, the only value. heads: KV heads
            that share a latent; None: up to four.
        predict: of "lowrank", alone or in "auto": store the difference of V from its prediction from the stored keys of
            the same heads, which is smaller than V; this takes more time.
        v_heads: of "k" and "k+r": fraction of all KV heads that store V beside K, those whose attention is spread over
            the most tokens. They are read as in kv, so V is computed for the other heads only; with 0.25 rows grow by a
            quarter of K's bytes. Heads are permuted, which changes only the order of float sums; a layer in which all
            heads are chosen gets mode kv. Not with ALiBi, which biases heads by their place.
        outtype: type of the weight matrices, a key of `slimrt.converter.quantize.OUT_TYPES`; None: as in the source.
        imatrix: for outtypes of less than 8 bits: an importance matrix of this model, a file of `slimrt.imatrix` or of
            llama.cpp's llama-imatrix, in GGUF or its older binary format. The error of a weight then counts as much as
            the mean square of what it is multiplied by.
        kv_layers, kv_heads: for architectures "gptneox" and "llama" (MLKV): how many layers have K and V of their own,
            and how many KV heads these have; the others are merged into them (`slimrt.converter.share.share`). None:
            all. The result is not usable before it is trained further.
        merge: how they are merged: "uniform" or "reference". shared_keys: which K the other layers read: "unrotated"
            (before RoPE) or "rotated".
        calibration: a text file to fold for, and to predict errors with; None: the built-in text, if the model has a
            tokenizer; "none": no text.
        exact: require a fold that is exact in exact arithmetic: only for cache "k" and "v", whose folds always are.
        cross: of an encoder-decoder, the mode of cross-attention to fold for ("kv", "k", "e", "e1"); None: none.
        cross_type: element type of its rows; "auto": f16, not written to the file.
        sparse: for "k", "k+r", "x", "xr": find the largest sparse_delta that adds at most 1e-4 nats to the KL
            divergence of the cache from kv f32, on the calibration text and on a text in which parts of it are
            repeated; it is written to the file, for sparse_delta "auto".
        lora: LoRA adapters that are merged into the weights before all else, each with ":SCALE" behind its path or
            without: directories of PEFT (adapter_config.json, adapter_model.safetensors) for a Hugging Face directory,
            GGUF files of llama.cpp's converter for any source.
        verify: compare logits of source and result on a text file; True or "": on the built-in text (on arbitrary
            tokens if the model has no tokenizer). An encoder is given the same text, or noise.
        allow_lossy: convert for a mode although its error of V, predicted or measured, is over 5 % in a layer; loading
            the file needs allow_lossy too.
        progress: show progress bars on stderr; None: if it is a terminal.
        overwrite: replace an existing file.

    Returns:
        A report of what was written, with the errors and sizes of each layer's cache; print() shows it as a table.

    Raises:
        ValueError: an unknown mode or type, an argument that does not apply to the mode, both targets, target_bytes
            below the smallest possible (which the message says), a text or name of `out` that is not UTF-8, or `out` is
            the source.
        FileExistsError: `out` exists and overwrite is false.
        CacheUnsupportedError: the mode is not exact for this model (names the layer, the reason, and legal modes), or
            its error of V in this type is too large (names the error, the layer, and the nearest mode that is precise
            enough).
        ModelFormatError, UnsupportedError: the source is broken, or contains something that is not supported; named in
            the message.
        OSError: the disk is full, or a file cannot be read or written. No partial file remains.
    """
    from slimrt.converter import convert as tool  # imported on use: its readers and writers take long to import
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
        imatrix=imatrix,
        kv_layers=kv_layers,
        kv_heads=kv_heads,
        merge=merge,
        shared_keys=shared_keys,
        calibration=calibration,
        exact=exact,
        cross=cross,
        cross_type=cross_type,
        sparse=sparse,
        lora=lora,
        verify=verify,
        allow_lossy=allow_lossy,
        progress=wanted(progress),
        overwrite=overwrite,
    )
