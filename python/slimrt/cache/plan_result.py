"""Records of the memory that a model would take, and their table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slimrt.cache.config import kinds, row_type
from slimrt.modes import BASELINES
from slimrt.plumbing.tables import table
from slimrt.plumbing.units import format_both, format_bytes
from slimrt.results import PerLayer, Record


@dataclass(frozen=True, kw_only=True)
class PartSizes(Record):
    """Bytes that layers `begin` to `end` - 1 take on their device. available: bytes free there; 0: not queried."""

    device: str
    begin: int
    end: int
    bytes: int
    available: int

    @property
    def too_large(self) -> bool:
        return 0 < self.available < self.bytes

    def __str__(self) -> str:
        taken, free = format_both(self.bytes, self.available)
        of = f" of {free} free" if self.available else ""
        return f"layers {self.begin} to {self.end - 1} on {self.device}: {taken}{of}"


@dataclass(frozen=True, kw_only=True)
class MemorySizes(PerLayer, Record):
    """Memory that a model takes, in bytes.

    Attributes:
        modes, types: of each layer's cache; ranks, residual_types: of its residual, 0 and "" without one.
        mapped: weights read in place from the file.
        weights, derived, cache_bytes, scratch: allocated in addition.
        logits, masks, queue: host memory of a server, if one is planned (ServerSizes).
        draft_weights, draft_cache, draft_scratch: of a draft model, if there is one: its weights (mapped or not), cache
            and scratch.
        total: the sum, which is compared with the limit; on a GPU without the server's part.
        folding: the most at once until the model is loaded, if the file lacks folded weights, which are then made at
            load; 0: it has them, or its device is not the CPU. It is compared with the limit, too.
        bytes_per_token: cache of one token in all layers; if rows age, in the oldest level.
        held_bytes: size of the rows of one text that fills its context; more than that is allocated for it.
        parts: layers and bytes of each device, if several share the layers.
    """

    mapped: int
    weights: int
    derived: int
    cache_bytes: int
    scratch: int
    logits: int = 0
    masks: int = 0
    queue: int = 0
    draft_weights: int = 0
    draft_cache: int = 0
    draft_scratch: int = 0
    total: int
    folding: int = 0
    bytes_per_token: int
    held_bytes: int
    parts: tuple[PartSizes, ...] = ()

    @property
    def draft(self) -> int:
        """All memory of a draft model."""
        return self.draft_weights + self.draft_cache + self.draft_scratch

    def drafting(self) -> str:
        """The parts of `draft` as text."""
        weights, rows, buffers = map(format_bytes, (self.draft_weights, self.draft_cache, self.draft_scratch))
        return f"weights {weights}, cache {rows}, buffers {buffers}"


@dataclass(frozen=True, kw_only=True)
class PlanRow(MemorySizes):
    """Memory of one choice of cache.

    Attributes:
        cache: mode of all layers, or "mixed"; "none" without a decoder.
        max_n_ctx: the largest context that fits the limit, a multiple of the block size or the requested context, at
            most the trained or the requested one, whichever is larger; 0 if none fits.
        fits: the requested context fits.
        smaller_from: the context, in tokens, from which the model takes less memory in all (derived weights and scratch
            included) than with kv of the same type; None for kv itself, or if it never does.
        too_imprecise: why loading refuses this cache as too imprecise; "": it does not; None: not determined, since
            that would take long (for the requested cache it always is). The error is that which a conversion wrote to
            the file, else predicted for white inputs. For mode k+r loading predicts it for its calibration text, which
            may decide differently near the limit.
        times_by_types: if rows of all layers age, how many times smaller than kv f16 they are by types and shares
            alone, as TALE counts: without scales, sinks and newest rows; else None.
        times_held: how many times smaller than kv f16 held_bytes is, which includes all of these; in any mode.
    """

    cache: str
    max_n_ctx: int
    fits: bool
    smaller_from: int | None = None
    times_by_types: float | None = None
    times_held: float = 1.0
    too_imprecise: str | None = ""


@dataclass(frozen=True, kw_only=True)
class EncoderRow(PerLayer, Record):
    """The cache of an encoder-decoder, in one of slim attention's options (cache/planner_encoder.py).

    Attributes:
        name: "baseline", "option 1", "option 2, x", "option 2, k", or "this choice".
        modes, types, ranks, residual_types: of each layer's self-attention; cross, cross_type: of cross-attention.
        self_bytes, cross_bytes: allocated for full contexts of all texts.
        shared: the rows of cross-attention are stored once for all layers (the encoder's output, or the first layer's
            K).
        read: bytes that decoding a token reads if every layer reads shared rows from memory; read_on_chip: if shared
            rows stay in the processor's cache.
    """

    name: str
    cross: str
    cross_type: str
    self_bytes: int
    cross_bytes: int
    shared: bool
    read: int
    read_on_chip: int

    @property
    def cache_bytes(self) -> int:
        """All bytes allocated for the cache."""
        return self.self_bytes + self.cross_bytes

    @property
    def uncounted(self) -> int:
        """cache_bytes without shared rows."""
        return self.self_bytes + (0 if self.shared else self.cross_bytes)


@dataclass(frozen=True)
class PlanResult(Record):
    """Memory that a model would take in every cache mode that is legal for it.

    Attributes:
        path: the model, as given.
        n_ctx, n_seqs, n_batch, cache_tokens: as planned; cache_tokens 0: n_ctx * n_seqs.
        n_ctx_train: tokens of context that the model was trained on.
        memory_limit: bytes.
        asked: the requested cache. rows: every legal mode; kivi only in a type in which its older rows differ.
        refused: (mode, reason) of the other modes.
        fits: the requested cache fits, and loading does not refuse it.
        encoder: of a model with an encoder, slim attention's options for both attentions of the decoder.
        max_queue: most waiting requests of a server, whose memory is included; None: no server.
        draft_model: name of a draft model, whose memory is included; "": none.
        gpu_layers: if the model does not fit on the GPU, how many layers do, with the others on the CPU; 0: none.
        device: the device planned for; "auto" is resolved.
    """

    path: str
    n_ctx: int
    n_ctx_train: int
    n_seqs: int
    n_batch: int
    memory_limit: int
    asked: PlanRow
    rows: tuple[PlanRow, ...]
    refused: tuple[tuple[str, str], ...]
    encoder: tuple[EncoderRow, ...] = ()
    cache_tokens: int = 0
    max_queue: int | None = None
    draft_model: str = ""
    gpu_layers: int = 0
    device: str = "cpu"

    @property
    def fits(self) -> bool:
        return self.asked.fits and not self.asked.too_imprecise

    @property
    def verdict(self) -> str:
        """Of the requested cache: "fits", "does not fit", or that it is refused."""
        if self.asked.too_imprecise:
            return "is refused: too imprecise"
        return "fits" if self.asked.fits else "does not fit"

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON-ready values, with fits."""
        return super().to_dict() | {"fits": self.fits}

    def table(self) -> str:
        """A text table with a row for every legal mode and for the requested cache, then notes on them."""
        rows = (*self.rows, *(() if self.asked in self.rows else (self.asked,)))
        beyond = ", more than makes sense" if self.n_ctx > self.n_ctx_train else ""
        pool = f" in {self.cache_tokens} tokens" if self.cache_tokens else ""
        at_once = f"{self.n_seqs} at once{pool}"
        lines = [f"{self.path}: context {self.n_ctx} of {self.n_ctx_train} trained{beyond}, {at_once}"]
        lines.append(table(_HEAD, [_cells(row, self.n_ctx_train) for row in rows]))
        lines += map(str, self.asked.parts)
        if self.gpu_layers:
            lines.append(f"the last {self.gpu_layers} layers fit on the GPU: -ngl {self.gpu_layers}")
        if self.draft_model:
            lines.append(f"in each total, drafts by {self.draft_model}: {self.asked.drafting()}")
        if self.max_queue is not None:
            lines.append(_of_server(self.asked, self.max_queue))
        if folded := [row for row in rows if row.folding]:
            each = ", ".join(f"{row.cache} {format_bytes(row.folding)}" for row in folded)
            lines.append(f"folding at load, most at once: {each}; a file that slimrt convert made needs none")
        lines += [_of_aging(row, self.n_ctx) for row in rows if row.times_by_types not in (None, 1.0)]  # 1: as kv f16
        for row in rows:
            if row.too_imprecise:
                lines.append(f"{row.cache}: {row.too_imprecise}")
            elif row.too_imprecise is None:
                lines.append(
                    f"{row.cache}: what it loses was not looked at, which would take long: ask for it "
                    f"(--cache {row.cache})"
                )
        lines += [f"{mode}: not for this model: {reason}" for mode, reason in self.refused]
        return "\n".join(lines + ([_encoder_table(self)] if self.encoder else []))

    def conclusion(self, verdict: str | None = None) -> str:
        """One line: the requested cache, and whether it fits. verdict: printed in place of self.verdict, such as a
        coloured one."""
        folds = self.asked.total <= self.memory_limit < self.asked.folding  # which is what does not fit
        total, limit = format_both(self.asked.folding if folds else self.asked.total, self.memory_limit)
        if folds:
            total += " while it is folded"
        if self.device != "cpu":
            limit += f" on {self.device}"
        return f"{kinds(self.asked.layers())}: {total} {verdict or self.verdict} in {limit}"

    def __str__(self) -> str:
        return f"{self.table()}\n{self.conclusion()}"


_HEAD = ("cache", "type", "weights", "derived", "cache", "scratch", "total", "bytes/token", "largest ctx", "fits",
         "smaller than kv")  # fmt: skip


def _cells(row: PlanRow, n_ctx_train: int) -> tuple[str, ...]:
    return (
        row.cache,
        ", ".join(sorted({row_type(layer) for layer in row.layers()})),
        format_bytes(row.mapped + row.weights),
        format_bytes(row.derived),
        format_bytes(row.cache_bytes),
        format_bytes(row.scratch),
        format_bytes(row.total),
        str(row.bytes_per_token),
        str(row.max_n_ctx),
        "too imprecise" if row.too_imprecise else "yes" if row.fits else "no",
        _smaller_from(row, n_ctx_train),
    )


def _smaller_from(row: PlanRow, n_ctx_train: int) -> str:
    """The last column: the context from which the model takes less memory than with kv."""
    if row.cache in (*BASELINES, "none"):
        return "-"
    if row.smaller_from is None:
        return "never"
    return f"from {row.smaller_from}" + (", untrained" if row.smaller_from > n_ctx_train else "")


def _of_aging(row: PlanRow, n_ctx: int) -> str:
    """A sentence on how small rows that age become, counted in two ways."""
    return (
        f"{kinds(row.layers())}: {row.times_by_types:.2f} times smaller than kv f16 by types and shares alone (as TALE "
        f"counts), {row.times_held:.2f} times with scales, sinks and newest rows: a text of "
        f"{n_ctx} tokens holds {format_bytes(row.held_bytes)}, and more is allocated"
    )


def _of_server(row: PlanRow, max_queue: int) -> str:
    return (
        f"with a server: logits of a step {format_bytes(row.logits)}, masks {format_bytes(row.masks)}, requests taken "
        f"on, {max_queue} of which wait, {format_bytes(row.queue)}"
    )


def _encoder_table(result: PlanResult) -> str:
    """The caches of both attentions compared with the baseline: slim attention's table for encoder-decoders."""
    base = result.encoder[0]

    def times(part: str, row: EncoderRow) -> str:
        return f"{getattr(base, part) / getattr(row, part):.2f}x"

    head = ("", "self", "cross", "self bytes", "cross bytes", "smaller", "E not counted", "read a token", "fewer",
            "E on chip")  # fmt: skip
    rows = [
        (
            row.name,
            kinds(row.layers()),
            f"{row.cross} {row.cross_type}",
            format_bytes(row.self_bytes),
            format_bytes(row.cross_bytes),
            times("cache_bytes", row),
            times("uncounted", row),
            format_bytes(row.read),
            times("read", row),
            times("read_on_chip", row),
        )
        for row in result.encoder
    ]
    return f"\nwith the encoder's output, {result.n_seqs} at once, full contexts\n{table(head, rows)}\n"
