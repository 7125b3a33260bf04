# SPDX-License-Identifier: Apache-2.0
"""Train the small encoder-decoders that ship in `models/`, in Hugging Face's layouts, and convert them to GGUF.

`tale-whisper` writes down spoken digits (task_speech.py), `tale-t5` reverses words (task_words.py), `tale-chronos`
forecasts seasonal series (task_series.py; needs chronos-forecasting). Run

    python training/train_tasks.py --out models

which takes about 35 minutes on two cores; `--only speech` makes one of them, `--minutes` shortens each.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Protocol

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads stall each other on a shared machine

import torch  # noqa: E402
from task_series import Seasons
from task_speech import Speech
from task_words import Words
from torch import Tensor, nn
from tqdm import tqdm
from train_reference import Muon

import slimrt


class Task(Protocol):
    """What is learned.

    Attributes:
        name: of the file. outtype: of its matrices.
        steps: of the training. matrix_lr, other_lr: learning rates of Muon and AdamW.
    """

    name: str
    outtype: str
    steps: int
    matrix_lr: float
    other_lr: float

    def build(self) -> nn.Module:
        """A freshly initialised model."""

    def prepare(self, seed: int) -> None:
        """Make what batches are made of."""

    def batch(self, model: nn.Module, rng: random.Random, progress: float) -> dict[str, Tensor]:
        """What a step reads, this far (0 to 1) into the training."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss of a batch."""

    def save(self, model: nn.Module, directory: Path) -> None:
        """Write a Hugging Face directory."""


TASKS: dict[str, type[Task]] = {"speech": Speech, "words": Words, "series": Seasons}


def optimizers(model: nn.Module, task: Task) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, convolutions, norms and biases."""
    blocks = {
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (".layers." in name or ".block." in name)
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        Muon([{"params": [p for p in trained if id(p) in blocks]}], lr=task.matrix_lr),
        torch.optim.AdamW(
            [p for p in trained if id(p) not in blocks], lr=task.other_lr, betas=(0.9, 0.98), weight_decay=0.01
        ),
    ]


RESUMED = 0.4  # where in the schedule further training begins


def train(task: Task, minutes: float, seed: int, saved: dict[str, Tensor] | None = None) -> nn.Module:
    """Train from nothing, or on from saved weights; a time limit shrinks the schedule instead of cutting it."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    task.prepare(seed)
    model, begin = task.build().train(), RESUMED if saved else 0.0
    if saved:
        model.load_state_dict(saved)
    opts = optimizers(model, task)
    rates = [o.param_groups[0]["lr"] for o in opts]
    started, progress, step, shown = time.monotonic(), begin, 0, 0.0
    bar = tqdm(total=task.steps, desc=task.name, mininterval=10)
    while progress < 1:
        loss = task.loss(model, task.batch(model, rng, progress))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = min(1.0, (step + 1) / 30) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for o, base in zip(opts, rates, strict=True):
            for group in o.param_groups:
                group["lr"] = base * rate
            o.step()
            o.zero_grad(set_to_none=True)
        step += 1
        elapsed = (time.monotonic() - started) / 60
        progress = begin + (1 - begin) * max(step / task.steps, elapsed / minutes if minutes else 0.0)
        shown = 0.95 * shown + 0.05 * loss.item()
        bar.set_postfix(loss=f"{shown / (1 - 0.95**step):.3f}", refresh=False)
        bar.update()
    bar.close()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("models"), help="where the files go (default: models)")
    parser.add_argument(
        "--only", choices=sorted(TASKS), nargs="+", default=list(TASKS), help="which models (default: all)"
    )
    parser.add_argument("--minutes", type=float, default=0, help="time limit for each model (default: none)")
    parser.add_argument("--seed", type=int, default=7, help="of everything drawn (default: 7)")
    parser.add_argument("--work", type=Path, default=Path("build/tasks"), help="for checkpoints (default: build/tasks)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints, with other numbers drawn")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for key in args.only:
        task = TASKS[key]()
        path = args.work / f"{task.name}.pt"
        model = train(task, args.minutes, args.seed + args.resume, torch.load(path) if args.resume else None)
        torch.save(model.state_dict(), path)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / task.name  # which the file is called after, inside
            folder.mkdir()
            task.save(model, folder)
            slimrt.convert(folder, args.out / f"{task.name}.gguf", outtype=task.outtype)


if __name__ == "__main__":
    main()
