# SPDX-License-Identifier: Apache-2.0
"""How wrong V may be before a reference model shows it: the table of models/README.md.

    python training/reference_noise.py hard models

V of every token in every layer is replaced by V with normal noise of a share of its norm, or by V computed from a
rounded K (mode "k", folded in float64). Prints, for each: the share of prompts answered exactly and the negative
log-likelihood of an answer's token, of the first prompts of retrieval.json and copy.json; and on held-out text the
mean KL divergence from the exact model and the share of tokens with the same likeliest successor.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from reference_language import Encoder, build_tokenizer
from reference_models import CONFIGS, LlamaBlock, build_model
from torch import Tensor, nn
from train_reference import shipped_weights

NOISE = (0.03, 0.1, 0.3, 1.0)
ROUNDED = ("f16", "bf16", "q8")


def rounded(k: Tensor, type_name: str) -> Tensor:
    """K [..., e_k] as it reads back from a cache; q8 has a scale for every 32 numbers."""
    if type_name == "q8":
        groups = k.unflatten(-1, (-1, 32))
        scale = groups.abs().amax(-1, keepdim=True) / 127
        return (torch.round(groups / scale) * scale).flatten(-2)
    return k.to({"f16": torch.float16, "bf16": torch.bfloat16}[type_name]).float()


def wrong_value(block: LlamaBlock, error: float | str | None, rng: torch.Generator) -> Callable[[Tensor], Tensor]:
    """What computes a block's V [..., e_v] from its input [..., d] with an error: a share, a type of K, or none."""
    w_k, w_v = block.attn_k.weight, block.attn_v.weight
    if isinstance(error, str):
        fold = torch.linalg.solve(w_k.double().T, w_v.double().T).float()
        return lambda x: rounded(x @ w_k.T, error) @ fold
    share = (error or 0.0) * w_v.shape[0] ** -0.5

    def noisy(x: Tensor) -> Tensor:
        v = x @ w_v.T
        return v + share * v.norm(dim=-1, keepdim=True) * torch.randn(v.shape, generator=rng) if error else v

    return noisy


def answers(model: nn.Module, prompts: list[dict]) -> str:
    """Share answered exactly, and nats per token of the answers."""
    right, nll, count = 0, 0.0, 0
    for row in prompts:
        ids, wanted = row["prompt_ids"], torch.tensor(row["answer_ids"])
        logits = model(torch.tensor([ids + row["answer_ids"][:-1]]))[0, len(ids) - 1 :]
        right += int((logits.argmax(-1) == wanted).all())
        nll, count = nll + F.cross_entropy(logits, wanted, reduction="sum").item(), count + len(wanted)
    return f"{right / len(prompts):.0%}, {nll / count:.4f}"


@torch.no_grad()
def main() -> None:
    """Print a line for each kind of error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", choices=sorted(k for k, c in CONFIGS.items() if c.arch == "llama" and not c.n_kv_heads)
    )
    parser.add_argument("folder", type=Path, help="where the models and texts are")
    parser.add_argument("--prompts", type=int, default=22, help="how many of each file")
    args = parser.parse_args()
    c, encode = CONFIGS[args.model], Encoder(build_tokenizer())
    model = build_model(c, encode.tokenizer.get_vocab_size()).eval()
    model.load_state_dict(shipped_weights(args.folder / f"{c.name}.gguf"))
    tasks = {
        name: json.loads((args.folder / f"{name}.json").read_text(encoding="utf-8"))["prompts"][: args.prompts]
        for name in ("retrieval", "copy")
    }
    text = [encode.end, *encode((args.folder / "heldout.txt").read_text(encoding="utf-8"))]
    windows = torch.tensor(text[:2048]).view(2, 1024)
    exact = model(windows).log_softmax(-1)
    for error in (None, *NOISE, *ROUNDED):
        rng = torch.Generator().manual_seed(5)
        for block in model.blk:
            block.attn_v.forward = wrong_value(block, error, rng)
        got = model(windows).log_softmax(-1)
        divergence = (exact.exp() * (exact - got)).sum(-1).mean()
        same = (exact.argmax(-1) == got.argmax(-1)).float().mean()
        line = "  ".join(f"{name} {answers(model, prompts)}" for name, prompts in tasks.items())
        print(f"{error or 'none'}: {line}  divergence {divergence:.1e}, same top token {same:.3f}", flush=True)


if __name__ == "__main__":
    main()
