# SPDX-License-Identifier: Apache-2.0
"""Layers with experts in plain float64 loops, for reference.py: a token takes those that a router scores best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference_formats import Array

Gated = Callable[[Array, Array], Array]  # of gate and up, see reference.py
SHARED = ("shared_expert", "shared_experts")


@dataclass
class Network:
    """down(gated(gate x, up x)); weights [out, in], biases [out] or zeros."""

    gate: Array
    up: Array
    down: Array
    biases: tuple[Array | float, Array | float, Array | float] = (0.0, 0.0, 0.0)

    def __call__(self, gated: Gated, x: Array) -> Array:
        of_gate, of_up, of_down = self.biases
        return gated(x @ self.gate.T + of_gate, x @ self.up.T + of_up) @ self.down.T + of_down


@dataclass
class Experts:
    """used: experts of a token. share: [d], makes the logit of what all tokens take; None: all of it. groups: how many
    there are and how many are used; bias: [experts], for the choice alone; scales: of each expert's result."""

    router: Array
    of: list[Network]
    used: int
    renormalised: bool
    scale: float = 1.0
    shared: Network | None = None
    share: Array | None = None
    sigmoid: bool = False
    groups: tuple[int, int] = (1, 1)
    bias: Array | None = None
    router_bias: Array | float = 0.0
    scales: Array | None = None
    near: float = 0.0  # SparseMixer's, if not 0

    def __call__(self, gated: Gated, x: Array, routed: Array | None = None) -> Array:
        """routed: what the router reads, if it is not x."""
        return np.stack([self._token(gated, *rows) for rows in zip(x, x if routed is None else routed, strict=True)])

    def _token(self, gated: Gated, x: Array, routed: Array) -> Array:
        scores = self.router @ routed + self.router_bias
        p = np.exp(scores - scores.max())
        p = 1 / (1 + np.exp(-scores)) if self.sigmoid else p / p.sum()
        chosen = self._chosen(p if self.bias is None else p + self.bias.ravel())
        if self.near:
            p = self._among_near(scores, chosen)
        total = p[chosen].sum() if self.renormalised else 1.0
        scales = np.ones(len(p)) if self.scales is None else self.scales.ravel()
        out = sum(self.scale * scales[expert] * p[expert] / total * self.of[expert](gated, x) for expert in chosen)
        if self.shared is not None:
            share = 1.0 if self.share is None else 1 / (1 + np.exp(-self.share.ravel() @ x))
            out = out + share * self.shared(gated, x)
        return np.asarray(out)

    def _among_near(self, scores: Array, chosen: list[int]) -> Array:
        """SparseMixer: of each chosen one in turn its softmax over those that are left and near it."""
        p, left = np.zeros(len(scores)), np.ones(len(scores), bool)
        for best in chosen:
            high = scores[best]
            near = left & ((high - scores) / np.maximum(np.abs(scores), high) <= self.near)
            p[best] = 1 / np.exp(scores[near] - high).sum()
            left[best] = False
        return p

    def _chosen(self, by: Array) -> list[int]:
        n_groups, n_used = self.groups
        groups = by.reshape(n_groups, -1)
        counts = [sum(sorted(group)[-2 if self.sigmoid else -1 :]) for group in groups]
        used = sorted(range(n_groups), key=lambda group: (-counts[group], group))[:n_used]
        left = [expert for expert in range(len(by)) if expert // groups.shape[1] in used]
        return sorted(left, key=lambda expert: (-by[expert], expert))[: self.used]


@dataclass
class Beside:
    """Norms of experts beside a dense network: of what the router and the experts read, of both results."""

    router_norm: Array
    norm: Array
    post_norm: Array
    dense_post_norm: Array


def beside_of_gguf(part: Mapping[str, Array]) -> Beside | None:
    names = ("ffn_gate_inp.scale", "pre_ffw_norm_2.weight", "post_ffw_norm_2.weight", "post_ffw_norm_1.weight")
    return Beside(*(part[name] for name in names)) if names[0] in part else None


def experts_of_gguf(part: Mapping[str, Array], key: Callable[..., Any], arch: str) -> Experts | None:
    """Of a layer's tensors by GGUF name; key(name, default): of the metadata."""
    if "ffn_gate_inp.weight" not in part:
        return None
    if "ffn_gate_up_exps.weight" in part:
        stacks = [*np.split(part["ffn_gate_up_exps.weight"], 2, axis=1), part["ffn_down_exps.weight"]]
    else:
        stacks = [part[f"ffn_{name}_exps.weight"] for name in ("gate", "up", "down")]
    biases = [part.get(f"ffn_{name}_exps.bias") for name in ("gate", "up", "down")]
    of = [Network(*matrices) for matrices in zip(*stacks, strict=True)]
    if biases[0] is not None:
        of = [
            Network(*matrices, biases=added)
            for *matrices, added in zip(*stacks, zip(*biases, strict=True), strict=True)
        ]
    shared = [part.get(f"ffn_{name}_shexp.weight") for name in ("gate", "up", "down")]
    return Experts(
        part["ffn_gate_inp.weight"],
        of,
        used=key("expert_used_count"),
        renormalised=key(
            "expert_weights_norm", arch in ("llama", "qwen3moe", "granitemoe", "gpt-oss", "minimax-m2", "gemma4")
        ),
        scale=key("expert_weights_scale", 1.0),
        shared=None if shared[0] is None else Network(*shared),
        share=part.get("ffn_gate_inp_shexp.weight"),
        sigmoid=key("expert_gating_func", 1) == 2,
        groups=(key("expert_group_count", 1), key("expert_group_used_count", 1)),
        bias=part.get("exp_probs_b.bias"),
        router_bias=part.get("ffn_gate_inp.bias", 0.0),
        scales=part.get("ffn_down_exps.scale"),
        near=0.02 if arch == "phimoe" else 0.0,
    )


def experts_of_hf(tensors: Mapping[str, Array], prefix: str, config: dict[str, Any]) -> Experts | None:
    """Of a layer whose names begin with `prefix`, as each model type spells them."""
    n = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if not n or f"{prefix}mlp.gate_proj.weight" in tensors:
        return None
    if config["model_type"] == "granitemoe":
        return _granite_experts(tensors, f"{prefix}block_sparse_moe.", config)
    mixtral = config["model_type"] == "mixtral"
    block = prefix + ("block_sparse_moe." if mixtral else "mlp.")
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")

    def network(name: str) -> Network:
        return Network(*(tensors[f"{block}{name}.{part}.weight"] for part in names))

    return Experts(
        tensors[f"{block}gate.weight"],
        [network(f"experts.{expert}") for expert in range(n)],
        used=config["num_experts_per_tok"],
        renormalised=config.get("norm_topk_prob", mixtral),
        shared=next((network(name) for name in SHARED if f"{block}{name}.{names[0]}.weight" in tensors), None),
        share=tensors.get(f"{block}shared_expert_gate.weight"),
    )


def _granite_experts(tensors: Mapping[str, Array], block: str, config: dict[str, Any]) -> Experts:
    """Gate and up are one matrix of each expert."""
    both, down = tensors[f"{block}input_linear.weight"], tensors[f"{block}output_linear.weight"]
    return Experts(
        tensors[f"{block}router.layer.weight"],
        [Network(*np.split(rows, 2), of_down) for rows, of_down in zip(both, down, strict=True)],
        used=config["num_experts_per_tok"],
        renormalised=True,
    )
