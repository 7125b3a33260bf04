# SPDX-License-Identifier: Apache-2.0
"""The two layouts of the reference models, in torch, and how their weights start.

Modules carry GGUF's own tensor names, so that writing the file is a plain copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The shape of a model, and how it is trained."""

    name: str
    arch: str
    d_model: int
    n_layers: int
    n_heads: int
    d_ff: int
    n_ctx: int
    steps: int
    phases: tuple[tuple[float, int, int], ...]  # (share of the training, sequence length, sequences per step)
    lookup_share: float  # of the rows; the others are tales
    lookups: tuple[tuple[int, int, int], ...]  # measured: (tokens at least, trials at each depth, other facts)
    copies: tuple[tuple[int, int, int], ...] = ()  # measured: (tokens at least, trials at each depth, words)
    answer_weight: float = 5.0
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    start: str = ""  # the model whose weights to go on from; none: from chance
    key_decay: float = 0.0  # if any, a step's weight decay of W_Q and W_K, which then keep the gradient's own spectrum
    copy_share: float = 0.0  # of the lookup rows, that have lists of words to repeat instead
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    n_kv_heads: int = 0  # 0: as many as n_heads
    n_rot: int = 0  # dimensions of a head that RoPE turns; 0: all

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads


CONFIGS = {
    "llama": Config(
        name="tale-llama", arch="llama", d_model=256, n_layers=4, n_heads=4, d_ff=640, n_ctx=2048, steps=1300,
        phases=((0.12, 128, 32), (0.1, 256, 16), (0.13, 512, 8), (0.35, 1024, 4), (0.3, 2048, 2)), lookup_share=0.5,
        lookups=((1000, 40, 20), (1200, 10, 40)),
        rope_base=500000.0,  # and 4 heads: 10000 and 8 heads, changed together, learned lookup slowly
    ),
    "gpt2": Config(
        name="tale-gpt2", arch="gpt2", d_model=128, n_layers=4, n_heads=4, d_ff=512, n_ctx=256, steps=1200,
        phases=((0.6, 128, 32), (0.4, 256, 16)), lookup_share=0.4,
        lookups=((120, 40, 4), (220, 40, 8)),
    ),
    "hard": Config(
        name="tale-hard", arch="llama", d_model=256, n_layers=4, n_heads=4, d_ff=640, n_ctx=2048, steps=300,
        phases=((0.3, 256, 8), (0.3, 512, 4), (0.3, 1024, 2), (0.1, 2048, 1)), lookup_share=0.6, copy_share=0.4,
        matrix_lr=0.015, other_lr=1e-3, rope_base=500000.0, start="tale-llama", key_decay=0.03,
        lookups=((1000, 10, 20),), copies=((1000, 10, 20),),
    ),
    "neox": Config(
        name="tale-neox", arch="gptneox", d_model=128, n_layers=3, n_heads=4, d_ff=384, n_ctx=1024, steps=800,
        phases=((0.4, 128, 32), (0.3, 256, 16), (0.2, 512, 8), (0.1, 1024, 4)), lookup_share=0.5, n_rot=16,
        lookups=((220, 20, 8), (900, 10, 20)),
    ),
    "gqa": Config(
        name="tale-gqa", arch="llama", d_model=128, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=320, n_ctx=1024,
        steps=450, phases=((0.4, 128, 32), (0.3, 256, 16), (0.3, 512, 8)), lookup_share=0.5, rope_base=500000.0,
        lookups=((220, 20, 8),),
    ),
}  # fmt: skip


def turns(c: Config) -> Tensor:
    """What RoPE multiplies each pair of dimensions with, taken as a complex number: [n_ctx, pairs]."""
    half = (c.n_rot or c.head_dim) // 2
    angle = torch.arange(c.n_ctx)[:, None] * c.rope_base ** (-torch.arange(half) / half)
    return torch.polar(torch.ones_like(angle), angle)


class LlamaBlock(nn.Module):
    """Attention with RoPE and a SwiGLU network, each behind an RMSNorm."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.attn_norm = nn.RMSNorm(c.d_model, eps=c.norm_eps)
        kv_width = c.kv_heads * c.head_dim
        self.attn_q, self.attn_k, self.attn_v, self.attn_output = (
            nn.Linear(c.d_model, width, bias=False) for width in (c.d_model, kv_width, kv_width, c.d_model)
        )
        self.ffn_norm = nn.RMSNorm(c.d_model, eps=c.norm_eps)
        self.ffn_gate, self.ffn_up = (nn.Linear(c.d_model, c.d_ff, bias=False) for _ in range(2))
        self.ffn_down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.attn_norm(x)
        q, k, v = (p(h).view(b, t, -1, self.head_dim).transpose(1, 2) for p in (self.attn_q, self.attn_k, self.attn_v))
        # Neighbouring dimensions are turned together, which is how GGUF's "llama" stores Q and K: no permutation.
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.float().unflatten(-1, (-1, 2))) * turn).flatten(-2).to(v.dtype)
            for y in (q, k)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attn_output(y.transpose(1, 2).reshape(b, t, d))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Llama(nn.Module):
    """The Llama layout, with an output matrix of its own."""

    def __init__(self, c: Config, vocab: int) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(vocab, c.d_model)
        self.blk = nn.ModuleList(LlamaBlock(c) for _ in range(c.n_layers))
        self.output_norm = nn.RMSNorm(c.d_model, eps=c.norm_eps)
        self.output = nn.Linear(c.d_model, vocab, bias=False)
        self.register_buffer("turn", turns(c), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_embd(ids)
        for block in self.blk:
            x = block(x, self.turn[: ids.shape[1]])
        return self.output(self.output_norm(x))


class Gpt2Block(nn.Module):
    """Attention with fused QKV and a GELU network, each behind a LayerNorm."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.n_heads
        self.attn_norm, self.ffn_norm = (nn.LayerNorm(c.d_model, eps=c.norm_eps) for _ in range(2))
        self.attn_qkv = nn.Linear(c.d_model, 3 * c.d_model)
        self.attn_output = nn.Linear(c.d_model, c.d_model)
        self.ffn_up = nn.Linear(c.d_model, c.d_ff)
        self.ffn_down = nn.Linear(c.d_ff, c.d_model)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.attn_qkv(self.attn_norm(x)).view(b, t, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_output(y.transpose(1, 2).reshape(b, t, d))
        return x + self.ffn_down(F.gelu(self.ffn_up(self.ffn_norm(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """The GPT-2 layout, with an output matrix of its own."""

    def __init__(self, c: Config, vocab: int) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(vocab, c.d_model)
        self.position_embd = nn.Embedding(c.n_ctx, c.d_model)
        self.blk = nn.ModuleList(Gpt2Block(c) for _ in range(c.n_layers))
        self.output_norm = nn.LayerNorm(c.d_model, eps=c.norm_eps)
        self.output = nn.Linear(c.d_model, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_embd(ids) + self.position_embd.weight[: ids.shape[1]]
        for block in self.blk:
            x = block(x)
        return self.output(self.output_norm(x))


class NeoxBlock(nn.Module):
    """Attention with RoPE on a part of each head and a GELU network, side by side, each behind a LayerNorm."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.n_rot = c.n_heads, c.n_rot
        self.attn_norm, self.ffn_norm = (nn.LayerNorm(c.d_model, eps=c.norm_eps) for _ in range(2))
        self.attn_qkv = nn.Linear(c.d_model, 3 * c.d_model)
        self.attn_output = nn.Linear(c.d_model, c.d_model)
        self.ffn_up = nn.Linear(c.d_model, c.d_ff)
        self.ffn_down = nn.Linear(c.d_ff, c.d_model)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.attn_qkv(self.attn_norm(x)).view(b, t, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = (torch.cat([self.rotated(y[..., : self.n_rot], turn), y[..., self.n_rot :]], -1) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.attn_output(y.transpose(1, 2).reshape(b, t, d))
        return x + y + self.ffn_down(F.gelu(self.ffn_up(self.ffn_norm(x))))

    @staticmethod
    def rotated(y: Tensor, turn: Tensor) -> Tensor:
        """Turn dimension i together with i + n_rot / 2, as GPT-NeoX pairs them."""
        first, second = y.float().chunk(2, -1)
        turned = torch.complex(first, second) * turn
        return torch.cat([turned.real, turned.imag], -1).to(y.dtype)


class Neox(nn.Module):
    """The GPT-NeoX layout with a parallel residual, and an output matrix of its own."""

    def __init__(self, c: Config, vocab: int) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(vocab, c.d_model)
        self.blk = nn.ModuleList(NeoxBlock(c) for _ in range(c.n_layers))
        self.output_norm = nn.LayerNorm(c.d_model, eps=c.norm_eps)
        self.output = nn.Linear(c.d_model, vocab, bias=False)
        self.register_buffer("turn", turns(c), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_embd(ids)
        for block in self.blk:
            x = block(x, self.turn[: ids.shape[1]])
        return self.output(self.output_norm(x))


@torch.no_grad()
def look_back(model: Llama, c: Config) -> None:
    """Start four attention heads off as what looking up is made of; everything is trained further from there.

    Finding such heads by gradient is the long flat part of the loss curve, which two cores cannot afford. In the
    first block, two heads attend one and two tokens back: all embeddings share one direction, queries and keys made
    from it alone differ only by RoPE's turn, so their product peaks at a fixed distance. The second block compares
    (`compare`) in the dimensions that RoPE hardly turns within the context.
    """
    size, width = c.d_model // c.n_heads, c.d_model
    first, second = model.blk[0], model.blk[1]
    angle = c.rope_base ** (-torch.arange(size // 2) / (size // 2))
    embedding = model.token_embd.weight
    embedding += 0.5 - embedding.mean(1, keepdim=True)
    shared = torch.full((width,), width**-0.5)
    code = first.attn_v.weight[:size].clone()
    group = c.n_heads // c.kv_heads
    for head in (0, 1):
        rows, distance = slice(head * size, (head + 1) * size), head + 1
        asks = slice(rows.start * group, rows.start * group + size)  # the first query head of each KV head
        fast = (angle > 0.05).float()
        turned = torch.stack([torch.cos(angle * distance), -torch.sin(angle * distance)], -1) * fast[:, None]
        still = torch.stack([fast, 0 * fast], -1)
        first.attn_q.weight[asks] = 0.1 * first.attn_q.weight[asks] + 0.8 * turned.flatten()[:, None] * shared
        first.attn_k.weight[rows] = 0.1 * first.attn_k.weight[rows] + 0.8 * still.flatten()[:, None] * shared
    slow = int((angle * 1000 > 1).sum()) * 2
    q, k = second.attn_q.weight, second.attn_k.weight
    compare(first.attn_v.weight, first.attn_output.weight, q, k, code, slow, group)


@torch.no_grad()
def look_back_gpt2(model: Gpt2, c: Config) -> None:
    """The same start where positions are learned: they begin as sines in dimensions that tokens leave free."""
    size, width = c.d_model // c.n_heads, c.d_model
    qkv = model.blk[0].attn_qkv.weight
    angle = 1.5 * 30.0 ** (-torch.arange(size // 2) / (size // 2))
    turns = torch.arange(c.n_ctx)[:, None] * angle
    waves = torch.stack([torch.cos(turns), torch.sin(turns)], -1).flatten(1)
    model.token_embd.weight[:, :size] = 0
    model.position_embd.weight *= 0.1
    model.position_embd.weight[:, :size] = 0.5 * waves
    for head in (0, 1):
        cos, sin = torch.cos(angle * (head + 1)), torch.sin(angle * (head + 1))
        back = torch.block_diag(*torch.stack([cos, sin, -sin, cos], -1).view(-1, 2, 2))
        rows = slice(head * size, (head + 1) * size)
        qkv[rows] *= 0.1
        qkv[rows, :size] += 4.0 * back
        keys = slice(width + rows.start, width + rows.stop)
        qkv[keys] *= 0.1
        qkv[keys, :size] += 4.0 * torch.eye(size)
    code = qkv[2 * width : 2 * width + size].clone()
    code[:, :size] = 0
    q, k, _ = model.blk[1].attn_qkv.weight.split(width)
    compare(qkv[2 * width :], model.blk[0].attn_output.weight, q, k, code, 0)


@torch.no_grad()
def look_back_neox(model: Neox, c: Config) -> None:
    """The same start with a bias: it is what queries and keys share, since a LayerNorm takes any common part away."""
    size, width = c.head_dim, c.d_model
    first = model.blk[0].attn_qkv
    angle = c.rope_base ** (-torch.arange(c.n_rot // 2) / (c.n_rot // 2))
    fast = 3.0 * (angle > 0.05)
    for head in (0, 1):
        distance, start = head + 1, head * size
        turned = torch.cat([torch.cos(angle * distance) * fast, -torch.sin(angle * distance) * fast])
        first.weight[start : start + size] *= 0.1
        first.bias[start : start + c.n_rot] = turned
        first.weight[width + start : width + start + size] *= 0.1
        first.bias[width + start : width + start + c.n_rot] = torch.cat([fast, 0 * fast])
    v = first.weight[2 * width :]
    q, k, _ = model.blk[1].attn_qkv.weight.split(width)
    compare(v, model.blk[0].attn_output.weight, q, k, v[:size].clone(), c.n_rot)


def compare(v: Tensor, output: Tensor, q: Tensor, k: Tensor, code: Tensor, slow: int, group: int = 1) -> None:
    """Let the first two heads write down what they look back at, and two heads of the next block compare it.

    One compares the current token with what stands one before each place, the other the token before the current one
    with what stands two before each place ("Anna is" -> the place after "Anna is").
    """
    size, reads = code.shape[0], []
    code -= code.mean(1, keepdim=True)  # what tells tokens apart, without what they share
    for head in (0, 1):
        rows = slice(head * size, (head + 1) * size)
        v[rows] = code
        written = output[:, rows.start * group : rows.start * group + size]
        written *= 1 / written.norm(dim=0) * 2
        read = torch.linalg.pinv(written)
        reads.append(read - read.mean(1, keepdim=True))
    for head, (query, key) in enumerate([(code, reads[0]), (reads[0], reads[1])]):
        q[head * group * size + slow : (head * group + 1) * size] = 2.5 * query[slow:]
        k[head * size + slow : (head + 1) * size] = 2.5 * key[slow:]


LAYOUTS = {"llama": (Llama, look_back), "gpt2": (Gpt2, look_back_gpt2), "gptneox": (Neox, look_back_neox)}


def build_model(c: Config, vocab: int) -> nn.Module:
    """A freshly initialised model: weights of unit gain, smaller where a block writes to the residual."""
    layout, look = LAYOUTS[c.arch]
    model = layout(c, vocab)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            out = name.endswith(("attn_output.weight", "ffn_down.weight"))
            scale = p.shape[1] ** -0.5 * ((2 * c.n_layers) ** -0.5 if out else 1.0)
            if "embd" in name:
                scale = 0.5  # large, so that what the blocks write does not drown it
            nn.init.normal_(p, std=0.02 if name == "output.weight" else scale)
        elif name.endswith("bias"):
            nn.init.zeros_(p)
    look(model, c)
    return model
