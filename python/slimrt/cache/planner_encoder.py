"""The cache of an encoder-decoder in the options of slim attention (Graef and Wasielewski, 2025).

Baseline: K and V of both attentions. Option 1: K of both. Option 2: the encoder's output E for cross-attention, once
for all layers, and x or k for self-attention. Planned are the bytes of full contexts, with E and (as in the paper's
first figures) without it, and the bytes that decoding a token reads: the decoder's weights, divided by the batch, and
the text's own rows, with E read from memory by every layer, or by none if it stays in the processor's cache.
"""

from __future__ import annotations

from slimrt.cache.config import CacheChoice
from slimrt.cache.cross import CrossConfig
from slimrt.cache.plan_result import EncoderRow
from slimrt.cache.planner import Planner, whole_blocks
from slimrt.info import cross_of, encoder_of
from slimrt.modes import FOLD_SUFFIXES

_OPTIONS = (("baseline", "kv", "kv"), ("option 1", "k", "k"), ("option 2, x", "x", "e"), ("option 2, k", "k", "e"))


def encoder_rows(planner: Planner, choice: CacheChoice, n_ctx: int) -> tuple[EncoderRow, ...]:
    """The paper's options that are legal for the model, in the types of `choice`, followed by `choice` itself if it is
    none of them; () for a model without an encoder."""
    source = planner.source
    legal = {name for name, mode in source.modes().items() if mode.legal}
    legal_cross = {name for name, mode in source.modes(cross=True).items() if mode.legal}
    if not legal_cross:
        return ()
    asked = choice.cross.resolved(source)
    rows = []
    for name, mode, cross in _OPTIONS:
        if mode in legal and cross in legal_cross:
            option = choice.with_mode(mode).with_cross(CrossConfig(cross, asked.type, asked.n_source))
            rows.append(_row(planner, name, option, n_ctx))
    own = _row(planner, "this choice", choice, n_ctx)
    known = any((row.modes, row.types, row.cross) == (own.modes, own.types, own.cross) for row in rows)
    return tuple(rows if known else [*rows, own])


def _row(planner: Planner, name: str, choice: CacheChoice, n_ctx: int) -> EncoderRow:
    found = planner.ask(choice, n_ctx)
    cross, n_source, n_layers = cross_of(found), encoder_of(found)["n_source"], found["n_layers"]
    shared = planner.source.modes(cross=True)[cross["mode"]].shared
    self_read = found["cache_bytes_per_token"] * found["n_ctx"]
    cross_read = cross["bytes_per_row"] * n_source * (n_layers if shared else 1)
    rows = whole_blocks(planner.cache_tokens) or planner.n_seqs * whole_blocks(found["n_ctx"])
    weights = decoder_weights(planner, cross["mode"]) // planner.n_seqs
    return EncoderRow(
        name=name,
        modes=tuple(layer["mode"] for layer in found["layers"]),
        types=tuple(layer["type"] for layer in found["layers"]),
        ranks=tuple(layer["rank"] for layer in found["layers"]),
        residual_types=tuple(layer["residual_type"] for layer in found["layers"]),
        cross=cross["mode"],
        cross_type=cross["type"],
        self_bytes=found["cache_bytes_per_token"] * rows,
        cross_bytes=planner.n_seqs * cross["bytes_per_row"] * whole_blocks(n_source),
        shared=shared,
        read=weights + self_read + cross_read,
        read_on_chip=weights + self_read + (0 if shared else cross_read),
    )


def decoder_weights(planner: Planner, cross: str) -> int:
    """Bytes of weights that a decoding step reads: the decoder's layers and its output matrix, which may be the token
    embedding. Of cross-attention's W_K and W_V those are left out that its mode needs only to compute the rows of the
    encoder's output; one that a derived matrix replaces counts with its own size."""
    file = planner.source.file
    names = list(file.tensors())
    head = "output.weight" if "output.weight" in names else "token_embd.weight"
    unread = [one.suffix for one in planner.source.modes(cross=True)[cross].unread if not one.replaced]
    skipped = ("dec.position_embd.", *(f".{suffix.removesuffix('weight')}" for suffix in unread))
    own = [name for name in names if name.startswith("dec.") and not name.endswith(FOLD_SUFFIXES)]
    read = [name for name in own if not any(part in name for part in skipped)]
    return sum(file.tensor_bytes(name) for name in (*read, head))
