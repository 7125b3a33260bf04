"""slimrt.plan."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Unpack

from slimrt.cache.config import CacheChoice, CacheOptions, check_cache
from slimrt.cache.placement import placed
from slimrt.cache.plan_result import PlanResult
from slimrt.cache.planner import Planner, resolve_device
from slimrt.cache.planner_encoder import encoder_rows
from slimrt.modelfile.source import ModelSource
from slimrt.plumbing.keywords import named
from slimrt.runtime.drafting import refuse_aging, refuse_rows_to_fork, with_draft
from slimrt.runtime.fold_at_load import refusal
from slimrt.runtime.runtime import settle


@named
def plan(
    path: str | os.PathLike[str] | ModelSource,
    *,
    device: str = "auto",
    n_gpu_layers: int | None = None,
    n_ctx: int = 0,
    n_seqs: int = 1,
    cache_tokens: int = 0,
    max_queue: int | None = None,
    n_batch: int = 512,
    n_threads: int | None = None,
    memory_limit: str | int | None = None,
    draft_model: str | os.PathLike[str] | ModelSource | None = None,
    progress: bool | None = None,
    **options: Unpack[CacheOptions],
) -> PlanResult:
    """The memory that a model would take in every cache mode that is legal for it, without loading it.

    Weights are read only to predict the error of the requested mode, if loading might refuse it: its layers are then
    folded, one at a time.

    Args: as slimrt.Model; memory_limit in bytes or as "6GiB", None: what the device has available now.
        max_queue: most waiting requests of a server of the model (slimrt serve); its logits, masks and requests are
            then included; None: no server.
        draft_model: its memory is included in every total, and listed as draft_weights, draft_cache and draft_scratch;
            "self" has no weights and rows of its own.

    Raises:
        FileNotFoundError, ModelFormatError, UnsupportedError, CacheUnsupportedError: as slimrt.Model.
        ValueError, TypeError: an argument out of its range, or of a wrong type.
    """
    device = resolve_device(device, n_gpu_layers)  # before anything slow
    source = ModelSource.of(path, progress)
    choice = CacheChoice.of(**options)
    planner = Planner.of(source, memory_limit, n_seqs, n_batch, n_threads, device, cache_tokens, max_queue)
    planner = placed(with_draft(planner, draft_model, progress), [choice], n_ctx)
    context = source.n_ctx(n_ctx)
    choice, _ = settle(planner, choice, context)
    check_cache(source, choice)
    asked = planner.row(choice, context)
    if draft_model is not None:
        refuse_aging(source, asked.modes)
        refuse_rows_to_fork(planner, choice)
    return PlanResult(
        path=str(source.path),
        n_ctx=context,
        n_ctx_train=source.n_ctx_train,
        n_seqs=planner.n_seqs,
        n_batch=planner.n_batch,
        device=planner.device,
        cache_tokens=planner.cache_tokens,
        max_queue=planner.max_queue,
        draft_model="" if planner.draft is None else planner.draft.name,
        gpu_layers=0 if asked.fits else planner.most_gpu_layers(choice, context),
        memory_limit=planner.limit,
        asked=replace(asked, too_imprecise=refusal(source, choice, only_cheap=False, show_progress=progress)),
        rows=tuple(
            replace(planner.row(legal, context), too_imprecise=refusal(source, legal, only_cheap=True))
            for legal in planner.legal(choice)
        ),
        refused=tuple((name, mode.refusal) for name, mode in source.modes().items() if not mode.legal),
        encoder=encoder_rows(planner, choice, context),
    )
