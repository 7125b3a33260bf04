# SPDX-License-Identifier: Apache-2.0
"""Which heads keep V beside K in modes k and k+r: those whose attention spreads over the most tokens.

Reading V through K costs a slim head as many products as K is wide for each token that it attends to, and a head that
keeps V one head's. What a head needs of a context is its active share: of the tokens that a query sees, those left when
the smallest softmax weights are left out whose squares add up to at most DELTA^2. The spread is between heads, not
between tokens, so whole heads are chosen, over all layers at once.
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

DELTA = 0.02  # about 1e-4 nats of KL divergence on the trained models where it was looked at

Order = NDArray[np.intp]  # of KV heads, slim ones first


def refusal(attention: Attention) -> str:
    """Why no head can keep V here; empty where some can."""
    if attention.encoder_decoder:
        return "a text says nothing of a decoder beside an encoder, and so not which heads to choose"
    if attention.owners and list(attention.owners) != list(range(attention.n_layers)):
        return "layers read the rows of others"
    if attention.n_kv_heads == 1:
        return "there is one KV head, whose V is all of it (cache 'kv')"
    return ""


def keeping_heads(known: Calibration, share: float, *, show_progress: bool) -> NDArray[np.bool_]:
    """Return which KV heads are to keep V [n_layers, n_kv_heads]: of all of the model those with the largest active
    shares. A layer may have none, or all.

    Args:
        known: a model and what a text does to it.
        share: of the heads, above 0 and below 1; at least one is chosen.
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
    """Of each KV head [n_kv_heads], over the later half of the queries, which see the most tokens."""
    attention = windows[0].weights.attention
    found = np.zeros(attention.n_heads)
    for window in windows:
        late = window.queries >= len(window) // 2
        seen = np.minimum(window.queries + 1, attention.window or len(window))[late]
        for head, p in enumerate(window.softmax_weights()):
            found[head] += float((kept_rows(p[late]) / seen).mean())
    return np.asarray(found.reshape(attention.n_kv_heads, -1).mean(axis=1) / len(windows))


def kept_rows(p: np.ndarray) -> NDArray[np.intp]:
    """How many weights of each query [queries] are left when the smallest ones of p [queries, n] are left out."""
    skipped = np.cumsum(np.sort(np.square(p), axis=1), axis=1)
    return np.asarray(p.shape[1] - (skipped <= DELTA**2).sum(axis=1))


def reordered(model: ModelData, attention: Attention, order: Mapping[int, Order], *, unpack: bool) -> ModelData:
    """Return the model with the KV heads of some layers in another order, and their query heads with them, which
    changes nothing but the order of sums.

    Args:
        order: by layer. unpack: where the type of W_O does not allow it, make it float32.

    Raises:
        UnsupportedError: blocks of W_O hold columns of several heads, which cannot be moved as they are.
    """
    changed: list[Tensor] = []
    for layer, heads in order.items():
        if (heads == np.arange(len(heads))).all():
            continue
        kv = _columns(heads, attention.head_dim)
        q = _columns(heads, attention.head_dim * (attention.n_heads // attention.n_kv_heads))
        fused = np.concatenate([q, attention.q_width + kv, attention.q_width + attention.kv_width + kv])
        rows = {"q": q, "k": kv, "v": kv, "qkv": fused}
        prefix = f"{attention.prefix(layer)}{attention.part}_"
        for part, at in rows.items():
            for name in (f"{prefix}{part}.weight", f"{prefix}{part}.bias", f"{prefix}{part}_norm.weight"):
                if (tensor := model.tensors.get(name)) is not None:
                    changed.append(_rows_moved(tensor, at))
        changed.append(_columns_moved(model.tensor(f"{prefix}output.weight"), q, attention.head_dim, unpack=unpack))
    return model.with_tensors(*changed)


def _columns(heads: Order, width: int) -> Order:
    """Of these heads, in their order, `width` each."""
    return np.asarray((heads[:, None] * width + np.arange(width)).ravel())


def _rows_moved(tensor: Tensor, at: Order) -> Tensor:
    """A weight's rows, or a vector's elements, from these places."""
    if len(tensor.shape) == 1:
        return replace(tensor, load=_loading(tensor, lambda data: data.reshape(len(at), -1)[at].ravel()))
    return replace(tensor, load=_loading(tensor, lambda data: data[at]))


def _columns_moved(tensor: Tensor, at: Order, head_dim: int, *, unpack: bool) -> Tensor:
    """A weight's columns from these places, whole heads of them."""
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
