# SPDX-License-Identifier: Apache-2.0
"""Write the reference models as GGUF, measure them as shipped, and write their goldens.

Everything here uses the weights after rounding to float16, computed in float32: what the file holds, exactly.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import torch
import torch.nn.functional as F
from reference_language import END, Encoder
from reference_tasks import accuracy_table, copy_prompt, lookup_prompt, write_texts
from tokenizers import Tokenizer
from torch import nn

if TYPE_CHECKING:
    from reference_models import Config

PROMPTS = [
    "Once upon a time",
    "In a small village lived a baker named Anna.",
    "The password of Anna is lantern. The number of Tom is 47. The colour of Nora is green."
    " Question: What is the number of Tom? Answer:",
    "Once upon a time, there was a shepherd named Nora. One winter day, it snowed,",
    "Zo\u00eb's caf\u00e9: 3 \u20ac!",  # not in the language: goes through the bytes
]


def round_weights(model: nn.Module) -> None:
    """Replace the matrices by their float16 values; norms and biases stay float32, in the file too."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(p.half().float())


def write_gguf(
    model: nn.Module, c: Config, tokenizer: Tokenizer, path: Path, *, chat_template: str = "", end: str = END
) -> None:
    """Write one model in llama.cpp's layout; the module names are already GGUF's.

    chat_template: of a model that chats, whose texts begin with no BOS. end: the token that ends what it generates.
    """
    w = gguf.GGUFWriter(str(path), c.arch)
    w.add_name(c.name)
    w.add_author("slimrt contributors")
    w.add_license("Apache-2.0")
    w.add_description("Small reference model of slimrt, trained on a generated language (training/)")
    w.add_languages(["en"])
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    w.add_context_length(c.n_ctx)
    w.add_embedding_length(c.d_model)
    w.add_block_count(c.n_layers)
    w.add_feed_forward_length(c.d_ff)
    w.add_head_count(c.n_heads)
    vocab = tokenizer.get_vocab_size()
    if c.arch == "llama":
        w.add_head_count_kv(c.kv_heads)
        w.add_layer_norm_rms_eps(c.norm_eps)
    else:
        w.add_layer_norm_eps(c.norm_eps)
    if c.arch != "gpt2":
        w.add_rope_dimension_count(c.n_rot or c.head_dim)
        w.add_rope_freq_base(c.rope_base)
    if c.arch == "gptneox":
        w.add_parallel_residual(True)
    w.add_vocab_size(vocab)
    spec = json.loads(tokenizer.to_str())
    control = tokenizer.get_added_tokens_decoder()
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list([tokenizer.id_to_token(i) for i in range(vocab)])
    w.add_token_types([gguf.TokenType.CONTROL if i in control else gguf.TokenType.NORMAL for i in range(vocab)])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]])
    w.add_bos_token_id(tokenizer.token_to_id(END))
    w.add_eos_token_id(tokenizer.token_to_id(end))
    w.add_add_bos_token(not chat_template)
    w.add_add_eos_token(False)
    if chat_template:
        w.add_chat_template(chat_template)
    for name, p in model.state_dict().items():
        matrix = p.ndim == 2
        w.add_tensor(name, (p.half() if matrix else p.float()).numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@torch.no_grad()
def logits(model: nn.Module, ids: list[int]) -> torch.Tensor:
    """Float32 logits (tokens, vocab) of one sequence."""
    return model(torch.tensor([ids]))[0]


def greedy(model: nn.Module, c: Config, ids: list[int], count: int) -> list[int]:
    """The `count` most likely tokens after `ids`, one at a time, going on after the end of a text."""
    start = len(ids)
    for _ in range(count):
        ids = [*ids, int(logits(model, ids[-c.n_ctx :])[-1].argmax())]
    return ids[start:]


def perplexity(model: nn.Module, encode: Encoder, text: str, window: int) -> dict[str, float | int]:
    """Perplexity over windows that each open with BOS, as `slimrt perplexity` cuts them without overlap."""
    ids = encode(text)
    total, count = 0.0, 0
    for at in range(0, len(ids), window - 1):
        part = [encode.end, *ids[at : at + window - 1]]
        nll = F.cross_entropy(logits(model, part[:-1]), torch.tensor(part[1:]), reduction="sum")
        total, count = total + nll.item(), count + len(part) - 1
    return {"tokens": count, "window": window, "nll_per_token": total / count, "perplexity": math.exp(total / count)}


def golden(model: nn.Module, c: Config, encode: Encoder, out: Path) -> dict:
    """Everything that is known about the shipped weights: logits, a long greedy sample, and how good they are."""
    tokenizer, prompts = encode.tokenizer, []
    for i, text in enumerate(PROMPTS):
        ids = [encode.end, *tokenizer.encode(text).ids]
        last = logits(model, ids)[-1]
        top = last.topk(5)
        row = {
            "prompt": text, "ids": ids, "top5_ids": top.indices.tolist(),
            "top5_logits": [round(v, 6) for v in top.values.tolist()],
            "log_sum_exp": round(last.logsumexp(0).item(), 6),
        }  # fmt: skip
        if i in (0, 2):
            row["last_logits"] = [round(v, 5) for v in last.tolist()]
        if i < 4:
            row["greedy_ids"] = greedy(model, c, ids, 24)
            row["greedy_text"] = tokenizer.decode(row["greedy_ids"], skip_special_tokens=False)
        prompts.append(row)
    start = [encode.end, *encode(PROMPTS[0])]
    sample = greedy(model, c, start, 200)
    text = (out / "heldout.txt").read_text(encoding="utf-8")
    result = {
        "model": f"{c.name}.gguf", "computed_in": "float32 from the float16 weights of the file",
        "parameters": sum(p.numel() for p in model.parameters()), "prompts": prompts,
        "greedy_200": {"prompt": PROMPTS[0], "ids": start, "greedy_ids": sample,
                       "greedy_text": tokenizer.decode(sample, skip_special_tokens=False)},
        "heldout": perplexity(model, encode, text, min(1024, c.n_ctx)),
        "retrieval": [accuracy_table(model, encode, lookup_prompt, *sizes) for sizes in c.lookups],
    }  # fmt: skip
    if c.copies:
        result["copy"] = [accuracy_table(model, encode, copy_prompt, *sizes) for sizes in c.copies]
    return result


def export(model: nn.Module, c: Config, encode: Encoder, out: Path) -> dict:
    """Round, write, measure; returns what was also written to `<name>.golden.json`."""
    out.mkdir(parents=True, exist_ok=True)
    round_weights(model)
    write_gguf(model.eval(), c, encode.tokenizer, out / f"{c.name}.gguf")
    write_texts(encode, out)
    result = golden(model, c, encode, out)
    (out / f"{c.name}.golden.json").write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{c.name}: {result['parameters']} parameters, held-out perplexity {result['heldout']['perplexity']:.4f}")
    for table in [*result["retrieval"], *result.get("copy", [])]:
        kind = "copy" if "words" in table else "retrieval"
        print(f"{kind} in {table['context_tokens_at_least']} tokens: {table['accuracy']:.4f} of {table['trials']}")
        print("  " + "  ".join(f"{depth} {share:.3f}" for depth, share in table["accuracy_by_depth"].items()))
    print(PROMPTS[0] + result["greedy_200"]["greedy_text"])
    return result
