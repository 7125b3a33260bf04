# SPDX-License-Identifier: Apache-2.0
"""Train a model whose layers or heads were made to share K and V until it is usable again, on a text of yours.

The recipe of MLKV (Zuhri et al., 2024): AdamW (0.9, 0.95), weight decay 0.01, learning rate 6e-4 falling as a cosine,
warm-up over the first fifth, about 5 % of the tokens that the model was trained on. Run

    slimrt convert MODEL -o shared.gguf --kv-layers 4 --kv-heads 3
    python training/uptrain.py shared.gguf TEXT -o uptrained.gguf --plot loss.png

Steps that were interrupted go on with --resume. A step draws its rows from the seed and its own number, so that a run
that was interrupted ends where one that was not would have.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads stall each other on a shared machine

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from shared_model import SharedModel  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from tqdm import tqdm  # noqa: E402

from slimrt.modelfile.gguf import read_gguf, write_gguf  # noqa: E402
from slimrt.modelfile.source import ModelSource  # noqa: E402
from slimrt.modelfile.text import file_ids  # noqa: E402
from slimrt.plumbing.files import check_target, written_beside  # noqa: E402


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
        steps: of the optimiser. batch: rows of a step. length: tokens of a row.
        lr: the largest learning rate, reached after the share `warmup` of the steps.
    """

    steps: int
    batch: int
    length: int
    lr: float = 6e-4
    warmup: float = 0.2
    decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    seed: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of a step: a line up, then half a cosine down."""
        rising = self.warmup * self.steps
        if step + 1 < rising:
            return self.lr * (step + 1) / rising
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step + 1 - rising) / max(self.steps - rising, 1)))

    def rows(self, ids: np.ndarray, step: int) -> Tensor:
        """Token ids [batch, length + 1] from anywhere in the text."""
        starts = np.random.default_rng((self.seed, step)).integers(0, len(ids) - self.length, self.batch)
        return torch.from_numpy(np.stack([ids[start : start + self.length + 1] for start in starts]).astype(np.int64))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean surprise of each row's tokens but the first, nats."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


class Training:
    """A model on its way, which a checkpoint holds whole.

    Args:
        identity: of the model and the text; a checkpoint of others is refused.
    """

    def __init__(self, model: SharedModel, recipe: Recipe, identity: str) -> None:
        self.model, self.recipe, self.identity = model, recipe, identity
        self.losses: list[float] = []
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.decay
        )

    def steps(self, ids: np.ndarray) -> Iterator[float]:
        """Takes the steps that are left; yields the loss of each."""
        while len(self.losses) < self.recipe.steps:
            step = len(self.losses)
            for group in self.optimizer.param_groups:
                group["lr"] = self.recipe.rate(step)
            loss = loss_of(self.model, self.recipe.rows(ids, step))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.losses.append(loss.item())
            yield self.losses[-1]

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "losses": self.losses,
            "recipe": asdict(self.recipe), "identity": self.identity,
        }  # fmt: skip
        with written_beside(path) as partial:
            torch.save(state, partial)

    def load(self, path: Path) -> None:
        """ValueError: it is of another model, text or recipe."""
        state: dict[str, Any] = torch.load(path)
        if (state["identity"], state["recipe"]) != (self.identity, asdict(self.recipe)):
            raise ValueError(f"{path} is of another model, text or recipe: go on with those, or start anew elsewhere")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = list(state["losses"])


def uptrain(
    source: Path, text: Path, out: Path, recipe: Recipe, *, checkpoint: Path, every: int = 100, resume: bool = False
) -> list[float]:
    """Train a GGUF model on a text and write it; the loss of each step.

    Args:
        checkpoint: written every so many steps and at the end. resume: go on from it, if it is there.

    Raises:
        UnsupportedError: as SharedModel, or the model has no tokenizer. ValueError: too little text; a checkpoint of
            something else. OSError: a file cannot be read or written.
    """
    for target in (out, checkpoint):
        check_target(target)
    opened = ModelSource(source)
    ids = file_ids(opened.tokenizer, text)
    if len(ids) <= recipe.length:
        raise ValueError(f"{text} has {len(ids)} tokens, too few for rows of {recipe.length}")
    identity = f"{opened.fingerprint} {hashlib.sha256(ids.tobytes()).hexdigest()}"
    torch.manual_seed(recipe.seed)
    training = Training(SharedModel(read_gguf(opened.file)), recipe, identity)
    if resume and checkpoint.exists():
        training.load(checkpoint)
    shown = math.nan
    with tqdm(total=recipe.steps, initial=len(training.losses), desc=source.stem, mininterval=1) as bar:
        for loss in training.steps(ids):
            shown = loss if math.isnan(shown) else 0.95 * shown + 0.05 * loss
            bar.set_postfix(refresh=False, loss=f"{shown:.3f}")
            bar.update()
            if len(training.losses) % every == 0:
                training.save(checkpoint)
    training.save(checkpoint)
    write_gguf(out, training.model.exported(), show_progress=False)
    return training.losses


def plot(losses: list[float], path: Path) -> None:
    """The loss of each step, and its mean over fifty; needs the extra `plot`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses, linewidth=0.5, alpha=0.5)
    width = min(50, len(losses))
    axes.plot(np.arange(width - 1, len(losses)), np.convolve(losses, np.ones(width) / width, "valid"))
    axes.set(xlabel="step", ylabel="loss, nats a token")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a GGUF file with float weights, from slimrt convert --kv-layers")
    parser.add_argument("text", type=Path, help="what to train on: a text file")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the GGUF file to write")
    parser.add_argument("--steps", type=int, help="default: as many as read the text once")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step (default: 16)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row (default: 256)")
    parser.add_argument("--lr", type=float, default=6e-4, help="largest learning rate (default: 6e-4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--checkpoint", type=Path, help="default: OUT.checkpoint")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints (default: 100)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--plot", type=Path, help="draw the loss into this file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    steps = args.steps
    if steps is None:
        steps = max(1, len(file_ids(ModelSource(args.source).tokenizer, args.text)) // (args.batch * args.length))
    recipe = Recipe(steps, args.batch, args.length, args.lr, seed=args.seed)
    checkpoint = args.checkpoint or args.out.with_name(f"{args.out.name}.checkpoint")
    losses = uptrain(
        args.source, args.text, args.out, recipe, checkpoint=checkpoint, every=args.every, resume=args.resume
    )
    print(f"{args.out}: {len(losses)} steps, loss {losses[0]:.3f} -> {np.mean(losses[-20:]):.3f}")
    if args.plot:
        plot(losses, args.plot)


if __name__ == "__main__":
    main()
