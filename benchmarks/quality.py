"""What caches cost in quality, on trained models: divergence, tasks, bytes; JSON, a table and a plot of each model.

    python benchmarks/quality.py --models models/tale-llama.gguf --out benchmarks/results/2026-11-21-quality

A cache "auto:E" is what `slimrt convert --cache auto --target-error E` chooses, layer by layer.

Perplexity and KL divergence from kv f32 as `slimrt perplexity --compare` measures them: on held-out text, through
cached decoding. Tasks (tasks.py): a fact to look up, a list to repeat; the prompts are fed in chunks, the question and
the answer token by token. Bits are of a (k, v) pair of elements in the rows that a window holds, scales included; bytes
of a window are what is allocated for it; W^: the weights beyond kv's. Baselines from papers are caches like others:
KIVI (kivi:q2+recent=0), low rank from the prompt on, as Palu (lowrank:...+eager), sinks and the newest rows, as
StreamingLLM (kivi:none+recent=128+sinks=4).
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import machine
import tasks

import slimrt
from slimrt import CacheComparison
from slimrt.cache.config import CacheChoice
from slimrt.measure.plots import plot_front

ROOT = Path(__file__).parent.parent
CACHES = (  # a rank of e/N: the N-th part of V's width
    ["kv:f16", "kv:bf16", "kv:q8", "kv:fp8_e4m3", "kv:q4"]
    + ["k:f32", "k:f16", "k:bf16", "k:q8"]
    + ["k+r:f16", "k+r:f16:e/32:q8", "k+r:bf16", "k+r:q8:0", "k+r:q8:e/8:q8", "k+r:q8", "k+r:q8:e/4:q8"]
    + ["k+r:fp8_e4m3", "k+r:q4"]
    + ["kivi:q2+recent=0", "kivi:q2", "kivi:q4+recent=0", "kivi:q4", "kivi:q2+q4*0.1+sinks=4+recent=0"]
    + ["kivi:none+recent=128+sinks=4", "lowrank:q2@0.5+sinks=0+eager", "lowrank:q4@0.5+sinks=0+eager"]
    + ["lowrank", "lowrank:q3@0.5+q4*0.1", "lowrank:q4@0.5+q4*0.1", "lowrank:q4@0.5+q8*0.1", "lowrank:q2+q4*0.1"]
    + ["xr:f16", "xr:q8", "xr:q4", "x:f16", "x:q8", "x:q4", "v:f16", "v:q8", "auto:0.01"]
)
HEAD = ("cache", "bits", "bytes/token", "of kv f16", "bytes of a window", "W^", "perplexity", "KL mean", "KL 99 %",
        "KL max", "same top")  # fmt: skip


def language_models() -> list[Path]:
    """The shipped models that continue a text."""
    return sorted(path for path in (ROOT / "models").glob("*.gguf") if path.with_suffix(".golden.json").exists())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", type=Path, default=language_models())
    parser.add_argument("--caches", nargs="+", default=CACHES, help="those that a model cannot have are left out")
    parser.add_argument("--text", type=Path, default=ROOT / "models" / "heldout.txt")
    parser.add_argument("--calibration", default=str(ROOT / "models" / "calibration.txt"), help="for what is folded; "
                        "none: the weights alone")  # fmt: skip
    parser.add_argument("--tasks", nargs="*", type=Path, default=task_files())
    parser.add_argument("--prompts", type=int, help="of each task at most; default: all")
    parser.add_argument("--window", type=int, default=1024, help="or what a model was trained on, if that is less")
    parser.add_argument("--tokens", type=int, help="scored at most; default: all of the text")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / f"{date.today()}-quality")
    args = parser.parse_args()
    if not args.out.parent.is_dir():
        parser.error(f"{args.out.parent}: no such directory")
    results: dict[str, Any] = machine.describe() | {"text": args.text.name}
    results |= {"date": str(date.today()), "calibration": Path(args.calibration).name, "models": {}}
    for path in args.models:
        print(f"{path.name}", flush=True)
        comparison, found = measure(path, args)
        results["models"][path.name] = comparison.to_dict() | {"tasks": found, "findings": findings(comparison, found)}
        plot_front(comparison, args.out.with_name(f"{args.out.name}-{path.stem}.png"))
        args.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(report(results))
    print(report(results))


def task_files() -> list[Path]:
    models = ROOT / "models"
    return [*sorted(models.glob("retrieval*.json")), *sorted(models.glob("copy*.json"))]


def measure(path: Path, args: argparse.Namespace) -> tuple[CacheComparison, dict[str, dict[str, Any]]]:
    """The comparison on text, and cache -> task -> what was answered."""
    source = slimrt.ModelSource(path)
    legal = {name for name, mode in source.modes().items() if mode.legal}
    choices = [with_rank(one, source.kv_width) for one in args.caches if one.partition(":")[0] in legal]
    window = min(args.window, source.n_ctx_train)
    comparison = slimrt.compare_caches(
        source, args.text, choices, window=window, max_tokens=args.tokens, calibration=args.calibration
    )
    asked = [tasks.some(one, args.prompts) for one in tasks.tasks_for(source, args.tasks)]
    found: dict[str, dict[str, Any]] = {}
    for row, cache in zip(comparison.rows, in_order(source, ["kv:f32", *choices]), strict=True):
        found[row.cache] = answered(source, cache, asked, args.calibration)
        print(f"  {row.cache}: {found[row.cache]}", flush=True)
    for target in (one.partition(":")[2] for one in args.caches if one.startswith("auto:")):
        with TemporaryDirectory() as folder:
            file = Path(folder) / path.name
            slimrt.convert(path, file, cache="auto", target_error=float(target), calibration=args.calibration)
            row = slimrt.compare_caches(file, args.text, ["auto"], window=window, max_tokens=args.tokens).rows[-1]
            row = replace(row, cache=f"auto, {float(target):.2g}")
            found[row.cache] = answered(slimrt.ModelSource(file), "auto", asked, None)
        comparison = replace(comparison, rows=(*comparison.rows, row))
        print(f"  {row.cache}: {found[row.cache]}", flush=True)
    return comparison, found


def answered(
    source: slimrt.ModelSource, cache: str, asked: Sequence[tasks.Task], calibration: str | None
) -> dict[str, Any]:
    """task -> what is answered with a cache."""
    if not asked:
        return {}
    n_ctx = source.n_ctx_train
    with slimrt.Model(source, cache=cache, n_ctx=n_ctx, calibration=calibration, allow_lossy=True) as model:
        predict = tasks.predict_with(model)
        return {one.name: tasks.summary(tasks.answers(predict, one)) for one in asked}


def with_rank(cache: str, e_v: int) -> str:
    """The cache with e/N as a number: a multiple of 4, at least 4 and at most e_v."""
    return re.sub(r"\be/(\d+)", lambda part: str(min(max(e_v // int(part[1]) // 4 * 4, 4), e_v)), cache)


def in_order(source: slimrt.ModelSource, choices: Sequence[str]) -> list[str]:
    """The choices without those that mean the same as one before, as compare_caches orders its rows."""
    meant = [json.dumps(CacheChoice.of(one).arguments(source)) for one in choices]
    return [one for i, one in enumerate(choices) if meant[i] not in meant[:i]]


def findings(comparison: CacheComparison, found: dict[str, dict[str, Any]]) -> list[str]:
    """What the rows say of mode k+r, in sentences, and what "auto" has chosen."""
    rows = {row.cache: row for row in comparison.rows}
    said = [f"{row.cache}: {layer_by_layer(row)}" for row in comparison.rows if row.cache.startswith("auto")]
    for wide, dtype in (("kv f16", "f16"), ("kv q8", "q8")):
        for row in comparison.rows:
            if row.cache.startswith(f"k+r {dtype}") and wide in rows:
                kv = rows[wide]
                times = f", {row.kl_mean / kv.kl_mean:.2g} times that of {wide}" if kv.kl_mean else ""
                said.append(
                    f"{row.cache}: {100 * row.bytes_per_token / kv.bytes_per_token:.1f} % of the bytes of {wide}, KL "
                    f"{row.kl_mean:.2g}{times}{kept_tasks(row.cache, found)}"
                )
    fours = [row for row in comparison.rows if row.cache.startswith("kv q4")]
    if fours:
        best = min(fours, key=lambda row: row.kl_mean)
        inside = [row for row in comparison.rows if row.cache.startswith("k+r")]
        inside = [row for row in inside if row.bytes_per_token <= best.bytes_per_token and row.kl_mean > 0]
        if inside:
            one = min(inside, key=lambda row: row.kl_mean)
            times = best.kl_mean / one.kl_mean
            said.append(
                f"best own kv q4: {best.cache}, {best.bytes_per_token} bytes, KL {best.kl_mean:.2g}; best k+r in no "
                f"more bytes: {one.cache}, {one.bytes_per_token} bytes, KL {one.kl_mean:.2g}: "
                + (f"{times:.3g} times less" if times >= 1 else f"{1 / times:.3g} times more")
            )
    return said


def layer_by_layer(row: slimrt.CacheQuality) -> str:
    """ "k+r q8 + 48 q8 / kv q8": the cache of each layer."""
    columns = zip(row.modes, row.types, row.ranks, row.residual_types, strict=True)
    return " / ".join(f"{mode} {type}" + f" + {rank} {kind}" * (rank > 0) for mode, type, rank, kind in columns)


def kept_tasks(cache: str, found: dict[str, dict[str, Any]]) -> str:
    """ ", retrieval 100 % of kv f32's, ...", of what kv f32 can answer."""
    able = [name for name in found.get(cache, {}) if found["kv f32"][name]["answered"]]
    shares = [f"{name} {share(cache, name, found)} of kv f32's" for name in able]
    return "".join(f", {one}" for one in shares)


def share(cache: str, task: str, found: dict[str, dict[str, Any]]) -> str:
    """What a cache answers, over what kv f32 answers."""
    reference = found["kv f32"][task]["answered"]
    return f"{100 * found[cache][task]['answered'] / reference:.1f} %" if reference else "-"


def report(results: dict[str, Any]) -> str:
    """Markdown."""
    info, versions = results["machine"], results["versions"]
    lines = [
        f"{results['date']}; {info['cpu']}, {info['cores']} cores; slimrt {versions['slimrt']} "
        f"({versions['slimrt_commit']}, {versions['isa']}); text: {results['text']}; "
        f"calibration: {results['calibration']}",
    ]
    for name, model in results["models"].items():
        lines += ["", f"## {name}", "", *model_table(model), "", *(f"- {one}" for one in model["findings"])]
    return "\n".join(lines) + "\n"


def model_table(model: dict[str, Any]) -> list[str]:
    rows, found = model["rows"], model["tasks"]
    names = list(found["kv f32"])
    f32 = rows[0]["bytes_per_token"]
    lines = [
        f"{model['tokens']} tokens in {model['windows']} windows of {model['window']}, decoded one at a time after a "
        f"prefix of {model['prefix']}. Bold: on the front of bytes and KL. Tasks: share answered (of kv f32's).",
        "",
        "| " + " | ".join((*HEAD, *names)) + " |",
        "|---" * (len(HEAD) + len(names)) + "|",
    ]
    for row in rows:
        cells = [
            f"**{row['cache']}**" if row["cache"] in model["front"] else row["cache"],
            f"{64 * row['bytes_per_token'] / f32:.2f}",  # kv f32: 64 bits a pair
            f"{row['bytes_per_token']}",
            f"{200 * row['bytes_per_token'] / f32:.1f} %",
            f"{row['cache_bytes']}",
            f"{row['extra_weights']}",
            number(row["perplexity"], ".4f"),
            *(number(row[key], ".2e") for key in ("kl_mean", "kl_p99", "kl_max")),
            f"{100 * row['same_top']:.2f} %",
            *(task_cell(row["cache"], task, found) for task in names),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def task_cell(cache: str, task: str, found: dict[str, dict[str, Any]]) -> str:
    return f"{100 * found[cache][task]['answered']:.1f} % ({share(cache, task, found)})"


def number(value: float | None, form: str) -> str:
    return "inf" if value is None or not math.isfinite(value) else format(value, form)


if __name__ == "__main__":
    main()
