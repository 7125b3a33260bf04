# SPDX-License-Identifier: Apache-2.0
"""Train `tale-chat`, the small model that chats, and write it as GGUF with its golden conversations.

It reads the conversations of reference_chat.py in ChatML, in tale-llama's layout. Run

    python training/train_chat.py --out models

which takes a quarter of an hour on one core; `--minutes` shortens it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from pathlib import Path

import torch
from reference_chat import BRIEF, CHATML, CLOSE, OPEN, Rows, build_tokenizer, turns
from reference_export import greedy, logits, round_weights, write_gguf
from reference_models import Config, build_model
from torch import nn
from tqdm import tqdm
from train_reference import loss_and_hits, optimizers, phase

CONFIG = Config(
    name="tale-chat", arch="llama", d_model=128, n_layers=2, n_heads=4, d_ff=256, n_ctx=1024, steps=3000,
    phases=((0.7, 128, 16), (0.2, 256, 8), (0.1, 512, 4)), lookup_share=0.0, lookups=(), rope_base=500000.0,
    answer_weight=1.0,
)  # fmt: skip
CONVERSATIONS = [
    ["What is 2 + 3?", "And 7 times 8?", "What is 9 - 4?", "What is 52 + 31?"],
    ["My name is Anna.", "What is the capital of France?", "What is my name?", "Thank you!"],
    ["Hello!", "I am Tom.", "What is my favourite colour?", "My favourite colour is green.", "Who am I?",
     "What is my favourite colour?"],
    ["system: Be brief.", "What is the opposite of hot?", "What is 6 * 7?", "What comes after Monday?"],
]  # fmt: skip


def train(c: Config, rows: Rows, minutes: float, checkpoint: Path) -> None:
    """Train it from nothing; a time limit shrinks the schedule instead of cutting it."""
    torch.manual_seed(7)
    model, rng = build_model(c, rows.tokenizer.get_vocab_size()), random.Random(7)
    opts = optimizers(model, c)
    rates = [o.param_groups[0]["lr"] for o in opts]
    held = [p for n, p in model.named_parameters() if re.match(r"blk\.[01]\.attn_[qk]\.", n)]
    start, step, progress, shown, hit = time.monotonic(), 0, 0.0, 0.0, 0.0
    bar = tqdm(total=c.steps, desc=c.name, mininterval=10)
    while progress < 1:
        for p in held:  # as in train_reference.py: what `look_back` gives is soon undone otherwise
            p.requires_grad_(progress > 0.06)
        length, n_rows = phase(c, progress)
        ids, weights = zip(*(rows.row(rng, length + 1, c.answer_weight) for _ in range(n_rows)), strict=True)
        loss, hits = loss_and_hits(model, torch.tensor(ids), torch.tensor(weights), c.answer_weight)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for opt, base in zip(opts, rates, strict=True):
            for group in opt.param_groups:
                group["lr"] = base * rate
            opt.step()
            opt.zero_grad(set_to_none=True)
        shown, hit = 0.95 * shown + 0.05 * loss.item(), 0.95 * hit + 0.05 * (hits or 0.0)
        step += 1
        bar.update()
        bar.set_postfix(refresh=False, loss=f"{shown:.3f}", tokens=f"{hit:.3f}", length=length)
        if step % 100 == 0:
            torch.save(model.state_dict(), checkpoint)
        progress = max(step / c.steps, (time.monotonic() - start) / 60 / minutes if minutes else 0.0)
    bar.close()
    torch.save(model.state_dict(), checkpoint)


class Talk:
    """A conversation with the model as shipped, greedy."""

    def __init__(self, model: nn.Module, c: Config, rows: Rows) -> None:
        self.model, self.c, self.rows = model, c, rows
        self.messages: list[dict[str, str]] = []
        self.ids: list[int] = []

    def say(self, role: str, text: str) -> None:
        self.messages.append({"role": role, "content": text})
        self.ids += self.rows.tokenizer.encode(f"{OPEN}{role}\n{text}{CLOSE}\n").ids

    def prompt(self) -> list[int]:
        return self.ids + self.rows.tokenizer.encode(f"{OPEN}assistant\n").ids

    def answer(self, most: int = 40) -> str:
        """The model's answer, which becomes part of the conversation."""
        close, ids = self.rows.tokenizer.token_to_id(CLOSE), []
        while len(ids) < most and (not ids or ids[-1] != close):
            ids += greedy(self.model, self.c, self.prompt() + ids, 1)
        text = self.rows.tokenizer.decode([id for id in ids if id != close], skip_special_tokens=False)
        self.say("assistant", text)
        return text


def golden(model: nn.Module, c: Config, rows: Rows) -> dict:
    """Conversations with their prompts' ids, logits and answers, and how many of others' answers are right."""
    conversations = []
    for lines in CONVERSATIONS:
        talk, turns_of = Talk(model, c, rows), []
        for line in lines:
            if line.startswith("system: "):
                talk.say("system", line.removeprefix("system: "))
                continue
            talk.say("user", line)
            ids = talk.prompt()
            last = logits(model, ids)[-1]
            top = last.topk(5)
            turns_of.append({
                "ids": ids, "top5_ids": top.indices.tolist(), "top5_logits": [round(v, 6) for v in top.values.tolist()],
                "answer": talk.answer(),
            })  # fmt: skip
        conversations.append({"messages": talk.messages, "turns": turns_of})
    return {"model": f"{c.name}.gguf", "parameters": sum(p.numel() for p in model.parameters()),
            "conversations": conversations, "measured": measured(model, c, rows)}  # fmt: skip


def measured(model: nn.Module, c: Config, rows: Rows, n_talks: int = 40, n_turns: int = 8) -> dict[str, float]:
    """The share of answers of held-out conversations that are right to the letter."""
    right = 0
    for seed in range(n_talks):
        rng, talk = random.Random(1000 + seed), Talk(model, c, rows)
        brief = seed % 4 == 0
        if brief:
            talk.say("system", BRIEF)
        source = turns(rng, brief)
        for _ in range(n_turns):
            user, wanted = next(source)
            talk.say("user", user)
            got = talk.answer()
            right += got == wanted
            if got != wanted:
                print(f"  {user!r}: {got!r}, not {wanted!r}")
    return {"answers": n_talks * n_turns, "right": right / (n_talks * n_turns)}


def main() -> None:
    """Train, round to float16, write, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("models"), help="folder for the model and its golden")
    parser.add_argument("--work", type=Path, default=Path("build/reference"), help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=0, help="time limit (default: none)")
    parser.add_argument("--no-train", action="store_true", help="measure and write the saved checkpoint again")
    args = parser.parse_args()
    rows = Rows(build_tokenizer())
    args.work.mkdir(parents=True, exist_ok=True)
    checkpoint = args.work / f"{CONFIG.name}.pt"
    if not args.no_train:
        train(CONFIG, rows, args.minutes, checkpoint)
    model = build_model(CONFIG, rows.tokenizer.get_vocab_size())
    model.load_state_dict(torch.load(checkpoint))
    round_weights(model.eval())
    write_gguf(model, CONFIG, rows.tokenizer, args.out / f"{CONFIG.name}.gguf", chat_template=CHATML, end=CLOSE)
    result = golden(model, CONFIG, rows)
    text = json.dumps(result, separators=(",", ":"), ensure_ascii=False) + "\n"
    (args.out / f"{CONFIG.name}.json").write_text(text, encoding="utf-8")
    print(f"{CONFIG.name}: {result['parameters']} parameters, {result['measured']['right']:.4f} of answers right")
    for conversation in result["conversations"]:
        print("\n".join(f"{message['role']}: {message['content']}" for message in conversation["messages"]))


if __name__ == "__main__":
    main()
