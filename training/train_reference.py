# SPDX-License-Identifier: Apache-2.0
"""Train the small reference models that ship in `models/`, and write them as GGUF with goldens.

All read the language of reference_language.py: `tale-llama` (Llama layout, RoPE, finds a fact anywhere in a context of
1000 tokens and more), `tale-gpt2` (GPT-2 layout, learned positions), `tale-hard` (tale-llama taught to say lists again
while its W_K becomes ill-conditioned), `tale-neox` (GPT-NeoX layout, partial rotary) and `tale-gqa` (Llama layout, two
query heads for each KV head). Run

    python training/train_reference.py --out models

which takes one to two hours on two cores; `--only hard neox` makes some of them, `--minutes` shortens each.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads stall each other on a shared machine

import gguf  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from reference_export import export
from reference_language import Encoder, build_tokenizer
from reference_models import CONFIGS, Config, build_model
from reference_rows import copy_row, drill_row, lookup_row, tale_row
from torch import Tensor, nn
from tqdm import tqdm

# bfloat16 where the CPU multiplies in it; elsewhere it is three times as slow as float32.
FAST = torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Newton-Schulz), for the matrices inside the blocks.

    It reaches the same loss in far fewer steps than AdamW here, which is what lets two cores do. Matrices of one
    shape are stacked, so that the products are few and large. A parameter group with `orthogonal` False takes the
    momentum as it is, at the norm that the orthogonal update would have: directions without gradient then only decay.
    """

    def __init__(self, params: list[dict], lr: float, momentum: float = 0.95, decay: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay, "orthogonal": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            stacks: dict[tuple[int, int], list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    stacks.setdefault((min(p.shape), max(p.shape)), []).append(p)
            for _, same in sorted(stacks.items()):
                self._step_stack(same, group)

    def _step_stack(self, params: list[nn.Parameter], group: dict) -> None:
        updates = []
        for p in params:
            buf = self.state[p].setdefault("buf", torch.zeros_like(p))
            buf.lerp_(p.grad, 1 - group["momentum"])
            g = p.grad.lerp(buf, group["momentum"])
            updates.append(g.T if p.shape[0] > p.shape[1] else g)
        x = torch.stack(updates)
        x /= x.norm(dim=(1, 2), keepdim=True) + 1e-7
        if group["orthogonal"]:
            x = x.to(FAST)
            for _ in range(5):
                a = x @ x.mT
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        else:
            x *= x.shape[1] ** 0.5
        for p, u in zip(params, x.float(), strict=True):
            p.mul_(1 - group["lr"] * group["decay"])
            tall = p.shape[0] > p.shape[1]
            p.add_(u.T if tall else u, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def optimizers(model: nn.Module, c: Config) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for embeddings, norms and biases."""
    named = list(model.named_parameters())
    matrices = {n: p for n, p in named if p.ndim == 2 and n.startswith("blk.")}
    rest = [p for n, p in named if n not in matrices]
    keys = [matrices.pop(n) for n in list(matrices) if c.key_decay and re.search(r"attn_[qk]\.", n)]
    groups: list[dict] = [{"params": list(matrices.values())}]
    if keys:
        groups.append({"params": keys, "decay": c.key_decay / c.matrix_lr, "orthogonal": False})
    return [
        Muon(groups, lr=c.matrix_lr),
        torch.optim.AdamW(rest, lr=c.other_lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
    ]


def batch(
    rng: random.Random, encode: Encoder, c: Config, length: int, rows: int, drill: float
) -> tuple[Tensor, Tensor]:
    """Token ids and loss weights, each (rows, length + 1)."""
    made = []
    for _ in range(rows):
        if rng.random() < drill:
            made.append(drill_row(rng, encode, length + 1))
        elif rng.random() < c.lookup_share:
            if c.copy_share and rng.random() < c.copy_share:
                made.append(copy_row(rng, encode, length + 1, c.answer_weight))
            else:
                made.append(lookup_row(rng, encode, length + 1, c.answer_weight, dense=rng.random() < 0.5))
        else:
            made.append(tale_row(rng, encode, length + 1))
    ids, weights = zip(*made, strict=True)
    return torch.tensor(ids), torch.tensor(weights)


def phase(c: Config, progress: float) -> tuple[int, int]:
    """Sequence length and rows at this point of the training: short first, where lookup is learned fast."""
    for share, length, rows in c.phases:  # noqa: B007 (the last one stays)
        progress -= share
        if progress < 0:
            break
    return length, rows


def loss_and_hits(model: nn.Module, ids: Tensor, weights: Tensor, answer_weight: float) -> tuple[Tensor, float | None]:
    """The weighted loss, and the share of repeated values that were looked up right (None where there are none)."""
    target, weight = ids[:, 1:].flatten(), weights[:, 1:].flatten()
    with torch.autocast("cpu", torch.bfloat16, enabled=FAST is torch.bfloat16):
        logits = model(ids[:, :-1]).flatten(0, 1)
    loss = F.cross_entropy(logits.float(), target, reduction="none")
    asked = weight == answer_weight
    hits = (logits[asked].argmax(-1) == target[asked]).float().mean().item() if asked.any() else None
    return (loss * weight).sum() / weight.sum(), hits


def save(path: Path, model: nn.Module, step: int, progress: float) -> None:
    """Write a checkpoint beside the old one first, so that a usable one always exists."""
    torch.save({"model": model.state_dict(), "step": step, "progress": progress}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def shipped_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a GGUF that this script wrote, as float32; FileNotFoundError where that is still to be done."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is what another model goes on from; train {path.stem} first")
    return {t.name: torch.from_numpy(t.data.astype("float32")) for t in gguf.GGUFReader(path).tensors}


def train(c: Config, encode: Encoder, out: Path, minutes: float, path: Path, resume: bool) -> None:
    """Train one model, saving a checkpoint now and then; a time limit shrinks the schedule instead of cutting it."""
    torch.manual_seed(7)
    model, first, begin = build_model(c, encode.tokenizer.get_vocab_size()), 0, 0.0
    if c.start:
        model.load_state_dict(shipped_weights(out / f"{c.start}.gguf"))
    if resume:
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        first, begin = saved["step"], saved["progress"]
    opts, rng = optimizers(model, c), random.Random(7 + first)
    rates = [o.param_groups[0]["lr"] for o in opts]
    held = [p for n, p in model.named_parameters() if re.match(r"blk\.[01]\.attn_(q|k|qkv)\.", n)]
    start, step, progress, hit, shown = time.monotonic(), first, begin, 0.0, 0.0
    bar = tqdm(total=c.steps, initial=first, desc=c.name, mininterval=10)
    while progress < 1:
        for p in held:  # the start that `look_back` gives is soon undone unless the rest has learned to use it
            p.requires_grad_(progress > 0.06 or bool(c.start))
        ids, weights = batch(rng, encode, c, *phase(c, progress), drill=0.5 if progress < 0.15 else 0.1)
        loss, hits = loss_and_hits(model, ids, weights, c.answer_weight)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = min(1.0, (step - first + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for opt, base in zip(opts, rates, strict=True):
            for group in opt.param_groups:
                group["lr"] = base * rate
            opt.step()
            opt.zero_grad(set_to_none=True)
        hit = hit if hits is None else 0.95 * hit + 0.05 * hits
        shown = 0.95 * shown + 0.05 * loss.item()
        step += 1
        bar.update()
        bar.set_postfix(refresh=False, loss=f"{shown:.3f}", lookup=f"{hit:.3f}", length=ids.shape[1] - 1)
        spent = (time.monotonic() - start) / 60 / minutes if minutes else 0.0
        progress = max(step / c.steps, begin + (1 - begin) * spent)
        if step % 50 == 0 or progress >= 1:
            save(path, model, step, progress)
    bar.close()


def main() -> None:
    """Train what was asked for, then measure and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("models"), help="folder for the models and goldens")
    parser.add_argument("--work", type=Path, default=Path("build/reference"), help="folder for checkpoints")
    parser.add_argument("--only", choices=sorted(CONFIGS), nargs="+", default=list(CONFIGS), help="which models")
    parser.add_argument("--minutes", type=float, default=0, help="time limit for each model (default: none)")
    parser.add_argument("--no-train", action="store_true", help="measure and write the saved checkpoints again")
    parser.add_argument("--resume", action="store_true", help="go on from the saved checkpoints")
    args = parser.parse_args()
    tokenizer = build_tokenizer()
    encode = Encoder(tokenizer)
    args.work.mkdir(parents=True, exist_ok=True)
    for key, c in CONFIGS.items():
        if key not in args.only:
            continue
        path = args.work / f"{c.name}.pt"
        if not args.no_train:
            train(c, encode, args.out, args.minutes, path, args.resume)
        model = build_model(c, tokenizer.get_vocab_size())
        model.load_state_dict(torch.load(path)["model"])
        export(model, c, encode, args.out)


if __name__ == "__main__":
    main()
