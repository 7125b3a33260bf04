# SPDX-License-Identifier: Apache-2.0
"""Which heads store V beside K in modes k and k+r: those whose attention is spread over the most tokens.

For each token that it attends to, a slim head (whose V is computed from K) costs as many multiply-adds as K is wide, a
head with stored V only head_dim. How many tokens a head needs is its active share: of the tokens that a query sees, the
fraction left after skipping the smallest softmax weights whose squares sum to at most DELTA^2. Active shares differ
between heads more than between tokens, so whole heads are chosen, over all layers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from slimrt.errors import UnsupportedError
from slimrt.folding.attention import Attention
from slimrt.folding.calibrate import Calibration
from slimrt.folding.window import Window
from slimrt.modelfile.gguf import F32, ModelData, Tensor
from slimrt.plumbing import progress as bars

DELTA = 0.02  # costs about 1e-4 nats of KL divergence on the trained models on which it was measured

Order = NDArray[np.intp]  # a permutation of KV heads, slim ones first


def refusal(attention: Attention) -> str:
    """Why no head can store V here; "" if heads can."""
    if attention.encoder_decoder:
        return "a text says nothing of a decoder beside an encoder, and so not which heads to choose"
    if attention.owners and list(attention.owners) != list(range(attention.n_layers)):
        return "layers read the rows of others"
    if attention.n_kv_heads == 1:
        return "there is one KV head, whose V is all of it (cache 'kv')"
    if attention.alibi:
        return "heads change places, by which ALiBi biases their scores"
    return ""


def keeping_heads(known: Calibration, share: float, *, show_progress: bool) -> NDArray[np.bool_]:
    """Return a mask of the KV heads that store V [n_layers, n_kv_heads]: those with the largest active shares in the
    model. A layer may have none, or all.

    Args:
        known: a model and its calibration.
        share: fraction of the heads to choose, above 0 and below 1; at least one is chosen.
    """
    attention = known.attention
    shares = np.zeros((attention.n_layers, attention.n_kv_heads))
    with bars.bar(show_progress, attention.n_layers, "ranking heads", "layer") as update:
        for layer in range(attention.n_layers):
            sample, _ = known.layer(layer)
            shares[layer] = active_shares(sample.windows)
            update(layer + 1, attention.n_layers)
    count = max(1, round(share * shares.size))
    keeps = np.zeros(shares.size, bool)
    keeps[np.argsort(-shares.ravel(), kind="stable")[:count]] = True
    return keeps.reshape(shares.shape)


def active_shares(windows: Sequence[Window]) -> NDArray[np.float64]:
    """The active share of each KV head [n_kv_heads], the mean over the later half of the queries (which see the most
    tokens) and the head's query heads."""
    attention = windows[0].weights.attention
    found = np.zeros(attention.n_heads)
    for window in windows:
        late = window.queries >= len(window) // 2
        seen = np.minimum(window.queries + 1, attention.window or len(window))[late]
        for head, p in enumerate(window.softmax_weights()):
            found[head] += float((kept_rows(p[late]) / seen).mean())
    return np.asarray(found.reshape(attention.n_kv_heads, -1).mean(axis=1) / len(windows))


def kept_rows(p: np.ndarray) -> NDArray[np.intp]:
    """How many weights of each query [queries] are left after skipping the smallest ones of p [queries, n]."""
    skipped = np.cumsum(np.sort(np.square(p), axis=1), axis=1)
    return np.asarray(p.shape[1] - (skipped <= DELTA**2).sum(axis=1))


def reordered(model: ModelData, attention: Attention, order: Mapping[int, Order], *, unpack: bool) -> ModelData:
    """Return the model with the KV heads of some layers permuted, and their query heads with them. Results change only
    by the order of float sums.

    Args:
        order: layer -> permutation. unpack: where quantised columns of W_O cannot be permuted, make W_O float32.

    Raises:
        UnsupportedError: quantisation blocks of W_O contain columns of several heads, and not `unpack`.
    """
    changed: list[Tensor] = []
    for layer, heads in order.items():
        if (heads == np.arange(len(heads))).all():
            continue
        kv = _columns(heads, attention.head_dim)
        q = _columns(heads, attention.head_dim * (attention.n_heads // attention.n_kv_heads))
        fused = np.concatenate([q, attention.q_width + kv, attention.q_width + attention.kv_width + kv])
        rows = {"q": q, "k": kv, "v": kv, "qkv": fused, "sub_norm": q}
        if attention.qk_norm == "row":  # a norm of each head is the same for all
            rows |= {"q_norm": q, "k_norm": kv}
        prefix = f"{attention.prefix(layer)}{attention.part}_"
        for part, at in rows.items():
            for name in (f"{prefix}{part}.weight", f"{prefix}{part}.bias"):
                if (tensor := model.tensors.get(name)) is not None:
                    changed.append(_rows_moved(tensor, at))
        changed.append(_columns_moved(model.tensor(f"{prefix}output.weight"), q, attention.head_dim, unpack=unpack))
    return model.with_tensors(*changed)


def _columns(heads: Order, width: int) -> Order:
    """The indices of the columns of these heads, in this order, `width` per head."""
    return np.asarray((heads[:, None] * width + np.arange(width)).ravel())


def _rows_moved(tensor: Tensor, at: Order) -> Tensor:
    """The tensor with its rows (of a vector: its elements) gathered from these indices."""
    if len(tensor.shape) == 1:
        return replace(tensor, load=_loading(tensor, lambda data: data.reshape(len(at), -1)[at].ravel()))
    return replace(tensor, load=_loading(tensor, lambda data: data[at]))


def _columns_moved(tensor: Tensor, at: Order, head_dim: int, *, unpack: bool) -> Tensor:
    """The tensor with its columns gathered from these indices, which are those of whole heads. Rest as `reordered`."""
    block, size = GGML_QUANT_SIZES[tensor.type]
    if head_dim % block == 0:
        blocks = at[::block] // block

        def moved(data: np.ndarray) -> np.ndarray:
            return data.reshape(len(data), -1, size)[:, blocks].reshape(len(data), -1)

        return replace(tensor, load=_loading(tensor, moved))
    if unpack:
        return replace(tensor, type=F32, load=lambda: np.ascontiguousarray(tensor.values()[:, at]).view(np.uint8))
    raise UnsupportedError(
        f"v_heads puts heads in another order, and blocks of {block} columns of '{tensor.name}' "
        f"({tensor.type.name.lower()}) hold several heads of {head_dim}: give an outtype too, best with an unquantised "
        "source"
    )


def _loading(tensor: Tensor, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[], np.ndarray]:
    return lambda: np.ascontiguousarray(change(tensor.load()))
