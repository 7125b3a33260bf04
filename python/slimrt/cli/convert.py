"""slimrt convert: write a GGUF file, quantised or folded for a cache mode."""

from __future__ import annotations

import argparse
from dataclasses import fields

import slimrt
from slimrt.cli.common import Flags, complain, from_flags, model_name, native_types, print_json, show_progress
from slimrt.cli.values import between, count, file_name, is_number, lower, parsed, positive
from slimrt.errors import CacheUnsupportedError
from slimrt.folding.report import ConvertReport
from slimrt.modes import AUTO, CACHE_TYPES, CROSS_MODES, MODES, SPARED

_NOT_VERIFIED = 3  # exit code: with --verify the mode was found too lossy


def add_flags(flags: Flags) -> None:
    flags.checks += [native_types, _check_cache]
    flags.twins = False  # the contents of a file must not depend on the environment
    flags.model()
    flags.add("-o", "--output", "--out", required=True, type=file_name, metavar="OUT",
              help="the file to write")  # fmt: skip
    flags.add("--force", action="store_true", help="replace OUT where it exists")
    flags.add("--lora", action="append", default=[], metavar="ADAPTER[:SCALE]", help="merge a LoRA adapter: PEFT's "
              "directory, or a GGUF file; may be given several times")  # fmt: skip
    types = "f32, f16, bf16, q8_0, q4_0, q2_k, q3_k, q4_k, q4_k_m, q5_k, q6_k"
    flags.add("--outtype", type=lower, metavar="TYPE", help=f"type of the weights: {types}; default: as they are")
    flags.add("--imatrix", metavar="FILE", help="importance matrix: weights count by what they are multiplied by; a "
              "file of slimrt imatrix or llama-imatrix")  # fmt: skip
    flags.add("--verify", nargs="?", const="", metavar="TEXTFILE", help="compare the logits with those of the source "
              "with kv f32, on a text; audio encoders are given noise. Exit code 3, and no file, where over 5 %% of V "
              "is lost in a layer")  # fmt: skip
    _cache_flags(flags)
    _lowrank_flags(flags)
    flags.group("layers and heads that share K and V")
    flags.add("--kv-layers", type=positive, metavar="M", help="merge K and V of neighbouring layers until M layers "
              "have their own (MLKV)")  # fmt: skip
    flags.add("--kv-heads", type=positive, metavar="G", help="merge neighbouring KV heads until a layer has G (GQA)")
    flags.add("--merge", default="uniform", metavar="HOW", help="weights of merged layers: uniform, or reference, "
              "those of the published converter (default: uniform)")  # fmt: skip
    flags.add("--shared-keys", default="unrotated", metavar="HOW", help="keys that merged layers share: unrotated, "
              "before RoPE, as published, or rotated (default: unrotated)")  # fmt: skip
    flags.twins = True
    flags.output()


def _cache_flags(flags: Flags) -> None:
    flags.group("cache")
    flags.add("--cache", type=lower, metavar="MODE[:TYPE[:RANK[:TYPE]]]", help=f"fold for {', '.join(MODES)}; or auto: "
              "for each layer the best within a target; default: no fold")  # fmt: skip
    flags.add("--cache-type", type=lower, goes_on=lambda word: word.lower() in CACHE_TYPES, default="auto",
              metavar="TYPE", help=f"element type of the rows: {', '.join(CACHE_TYPES)} (default: f16); for auto those "
              "it may choose from, separated by commas (default: f16,q8,fp8_e4m3,q4)")  # fmt: skip
    flags.add("--target-error", type=between, metavar="E", help="for auto and lowrank, as 0.01 or 1%%: the "
              "largest relative error of V, and over sqrt(2) of attention's output (auto: 0.01)")  # fmt: skip
    flags.add("--target-bytes", metavar="N", help="for auto and lowrank: bytes per token of all layers together in "
              "a long context, such as 600, or how many times fewer than kv f16, such as 8x")  # fmt: skip
    flags.add("--rank", type=several, goes_on=is_number, metavar="N", help="width of k+r's residual (default: by "
              "type); of lowrank the fraction of V's latent that old rows keep, for each level from the oldest, "
              "separated by commas (default: 0.5)")  # fmt: skip
    flags.add("--residual-type", type=lower, metavar="TYPE", help="element type of k+r's residual (default: by type)")
    flags.add("--v-heads", type=between, default=0.0, metavar="P", help="of k and k+r, the fraction of heads that keep "
              "V beside K, those that attend to most tokens, such as 0.25 (default: 0)")  # fmt: skip
    flags.add("--exact", action="store_true", help="require an exact fold, without a residual: k or v")
    flags.add("--cross", type=lower, metavar="MODE", help="cache mode of cross-attention, of a model with an encoder: "
              f"{', '.join(CROSS_MODES)}")  # fmt: skip
    flags.add("--cross-type", type=lower, default="auto", metavar="TYPE", help="element type of its rows, as "
              "--cache-type (default: f16)")  # fmt: skip
    flags.add("--sparse", action="store_true", help=f"of {', '.join(SPARED)} and {AUTO}: find the largest "
              "--sparse-delta that changes little and store it in the file, for --sparse-delta auto")  # fmt: skip
    flags.add("--calibration", metavar="FILE", help="calibration text; none: do without")
    flags.allow_lossy()


def _lowrank_flags(flags: Flags) -> None:
    flags.group("cache mode lowrank")
    flags.add("--bits", type=several, goes_on=is_number, metavar="B", help="bits of the levels from the oldest: 2, 3, "
              "4, 8 or 16 (default: 2,4)")  # fmt: skip
    flags.add("--share", type=several, goes_on=is_number, metavar="P", help="fraction of the aged rows in each level "
              "but the oldest, or their number, such as 64 (default: 0.1)")  # fmt: skip
    flags.add("--sinks", type=count, metavar="N", help="first tokens whose rows stay as written (default: 4)")
    flags.add("--group", type=count, metavar="N", help="elements that share a scale: 32")
    flags.add("--heads", type=positive, metavar="N", help="KV heads that share a latent (default: up to 4)")
    flags.add("--predict", action="store_true", help="store V as its difference from a prediction from K: fewer bytes, "
              "more time")  # fmt: skip


def several(text: str) -> int | float | list[int | float]:
    """A number, or several separated by commas, for argparse."""
    values: list[int | float] = [
        int(part) if part.strip().isdecimal() else parsed(float, part, "a number, or several separated by commas")
        for part in text.split(",")
    ]
    return values if len(values) > 1 else values[0]


def _check_cache(args: argparse.Namespace) -> None:
    """Refuse as wrong usage cache flags that cannot be combined, whatever the model, and unknown outtypes. A target
    without --cache means auto."""
    from slimrt.converter.quantize import check_outtype, check_weighted
    from slimrt.converter.request import Asked, checked

    if args.cache is None and (args.target_error is not None or args.target_bytes is not None):
        args.cache = "auto"
    if "," in args.cache_type:
        args.cache_type = args.cache_type.split(",")
    if args.outtype is not None:
        from_flags(args, lambda: check_outtype(args.outtype))
    if args.imatrix is not None:
        from_flags(args, lambda: check_weighted(args.outtype))
    names = {field.name for field in fields(Asked)} - {"lossy"}
    asked = Asked(lossy=args.allow_lossy, **{name: getattr(args, name) for name in names})
    from_flags(args, lambda: checked(asked.spelled_out()))


def run(args: argparse.Namespace) -> int:
    try:
        report = _convert(args)
    except CacheUnsupportedError as error:
        if args.verify is None:
            raise
        complain(error)
        return _NOT_VERIFIED
    if args.json:
        print_json(report.to_dict())
    else:
        print(report.table())
    return 0


def _convert(args: argparse.Namespace) -> ConvertReport:
    return slimrt.convert(
        model_name(args),
        args.output,
        cache=args.cache,
        cache_type=args.cache_type,
        target_error=args.target_error,
        target_bytes=args.target_bytes,
        rank=args.rank,
        residual_type=args.residual_type,
        bits=args.bits,
        share=args.share,
        sinks=args.sinks,
        group=args.group,
        heads=args.heads,
        predict=args.predict,
        v_heads=args.v_heads,
        outtype=args.outtype,
        imatrix=args.imatrix,
        kv_layers=args.kv_layers,
        kv_heads=args.kv_heads,
        merge=args.merge,
        shared_keys=args.shared_keys,
        calibration=args.calibration,
        exact=args.exact,
        cross=args.cross,
        cross_type=args.cross_type,
        sparse=args.sparse,
        lora=args.lora,
        verify=args.verify,
        allow_lossy=args.allow_lossy,
        progress=show_progress(args),
        overwrite=args.force,
    )
