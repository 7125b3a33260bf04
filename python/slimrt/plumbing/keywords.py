"""Keyword arguments: unknown ones are refused with slimrt's name for them, and switches that are no bool."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

from slimrt.plumbing.arguments import check_bool, check_switch

P = ParamSpec("P")
R = TypeVar("R")

ELSEWHERE: dict[str, tuple[str, ...]] = {
    # how texts are generated
    "temp": ("temperature",),
    "max_new_tokens": ("max_tokens",),
    "max_length": ("max_tokens (of what is generated, the prompt not counted)",),
    "max_completion_tokens": ("max_tokens",),
    "min_new_tokens": ("min_tokens",),
    "min_length": ("min_tokens (of what is generated, the prompt not counted)",),
    "n_predict": ("max_tokens",),
    "num_predict": ("max_tokens",),
    "n_tokens": ("max_tokens",),
    "do_sample": ("temperature (0: the likeliest token)",),
    "typical": ("typical_p",),
    "repetition_penalty": ("repeat_penalty",),
    "penalty_alpha": ("repeat_penalty",),
    "penalty_last_n": ("repeat_last_n",),
    "last_n_tokens_size": ("repeat_last_n",),
    "stop_strings": ("stop",),
    "stop_sequences": ("stop",),
    "top_logprobs": ("logprobs",),
    "random_seed": ("seed",),
    "response_format": ('json_schema ({"type": "object"}: any object)',),
    "schema": ("json_schema",),
    "guided_json": ("json_schema",),
    "guided_regex": ("regex",),
    "guided_choice": ("choice",),
    "guided_grammar": ("grammar",),
    "structured_outputs": ("json_schema, regex, choice or grammar",),
    "bad_words_ids": ("suppress_tokens (ids, one by one)",),
    "ngram_size": ("no_repeat_ngram_size",),
    "beam_size": ("num_beams",),
    "n_beams": ("num_beams",),
    "logits_processors": ("logits_processor",),
    "callback": ("on_progress",),
    "progress_callback": ("on_progress",),
    "conversation": ("messages",),
    "inputs": ("prompt", "text", "texts"),
    "input": ("prompt", "text", "texts"),
    "prompts": ("prompt",),
    # transcribe
    "log_prob_threshold": ("logprob_threshold",),
    "vad_filter": ("vad ('silero', or 'energy', which skip_silence means too)",),
    "without_timestamps": ("timestamps (which says the contrary)",),
    "return_timestamps": ("timestamps, or word_timestamps",),
    # translate
    "src_lang": ("source",),
    "source_lang": ("source",),
    "tgt_lang": ("target",),
    "target_lang": ("target",),
    # predict_quantiles
    "context": ("series",),
    "horizon": ("prediction_length",),
    "quantiles": ("quantile_levels",),
    "n_samples": ("num_samples",),
    # embed
    "normalize_embeddings": ("normalize",),
    "pooling_type": ("pooling",),
    # tokenize, detokenize
    "add_bos": ("add_special_tokens",),
    "special": ("parse_special", "skip_special_tokens (which says the contrary)"),
    # Model
    "model_path": ("path",),
    "model_id": ("path",),
    "context_length": ("n_ctx",),
    "max_seq_len": ("n_ctx",),
    "n_parallel": ("n_seqs",),
    "n_ubatch": ("n_batch",),
    "threads": ("n_threads",),
    "num_threads": ("n_threads",),
    "cpu_threads": ("n_threads",),
    "n_threads_batch": ("n_threads",),
    "n_gpu_layers": ('device (the last 12 layers on one: device="cpu,cuda=12")',),
    "device_map": ("device",),
    "type_k": ("cache_type_k",),
    "type_v": ("cache_type_v",),
    "kv_cache_type": ("cache_type",),
}
"""Names in other libraries -> names here, with a remark in some; the first that the call has is suggested."""


ADVICE: dict[str, str] = {
    "forced_eos_token_id": "the model's own generation settings say it (docs/tasks.md)",
    "begin_suppress_tokens": "the model's own generation settings say it (docs/tasks.md)",
    "encoder_no_repeat_ngram_size": "the model's own generation settings say it (docs/tasks.md)",
    "stream": "stream() yields the pieces of a text, and create_completion() takes stream",
    "tools": "write what tools there are into the messages",
    "tool_choice": "write what tools there are into the messages",
    "echo": "create_completion() takes it",
    "chat_format": "the file says it; chat() takes chat_template",
    "chat_handler": "it reads text alone",
    "draft_model": "Model() takes it, for all its texts",
    "tokenizer": "it is the file's",
    "lora_path": "slimrt.convert(model, out, lora=adapter) merges it into a model",
    "fp16": "weights are used as they are stored",
    "embedding": "embed() works with every model",
    "logits_all": "logits() and score() work with every model",
    "use_mmap": "weights are read where the file is mapped",
    "use_mlock": "weights are read where the file is mapped",
    "flash_attn": "attention never holds all scores",
    "dtype": "the file says it; cache_type is that of the context's rows",
    "torch_dtype": "the file says it; cache_type is that of the context's rows",
    "compute_type": "the file says it; cache_type is that of the context's rows",
    "main_gpu": 'device names one: "cuda:1"',
}
"""For keywords of other libraries that no call has: what to do instead."""


def of_model(call: Callable[P, R]) -> Callable[P, R]:
    """Have Python's errors about wrong arguments of a method name Model instead of the class that defines it."""
    if "." in call.__qualname__:
        call.__qualname__ = f"Model.{call.__name__}"
    return call


def named(call: Callable[P, R]) -> Callable[P, R]:
    """Decorator for methods of Model and similar functions: unknown keywords raise a TypeError that gives slimrt's name
    for them, or the most similar one; so do values of switches that are neither true nor false, such as "no"."""
    call = of_model(call)
    known = set[str]()
    checks = {"bool": check_bool, "bool | None": check_switch}
    switches = {name: checks[kind] for name, kind in call.__annotations__.items() if kind in checks}

    def check(keywords: Mapping[str, Any]) -> None:
        if not known.issuperset(keywords):  # `known` is empty before the first call
            known.update(_names(call))
            for name in keywords:
                if name not in known:
                    raise TypeError(refusal(call.__name__, name, known))
        for name in keywords.keys() & switches.keys():
            if type(keywords[name]) is not int or keywords[name] not in (0, 1):  # which say the same
                switches[name](name, keywords[name])

    if inspect.iscoroutinefunction(call):

        @functools.wraps(call)
        async def checked_coroutine(*args: P.args, **keywords: P.kwargs) -> Any:
            check(keywords)
            return await call(*args, **keywords)

        return checked_coroutine  # type: ignore[return-value]  # R is the coroutine

    @functools.wraps(call)
    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        check(keywords)
        return call(*args, **keywords)

    return checked


def refusal(call: str, name: str, known: Iterable[str]) -> str:
    """The error message for a keyword that a call does not have."""
    known = sorted(known)
    call = "Model" if call == "__init__" else call
    for there in ELSEWHERE.get(name, ()):
        if re.split(r"\W", there)[0] in known:
            return f"{call} has no {name}: here it is called {there}"
    if name in ADVICE:
        return f"{call} has no {name}: {ADVICE[name]}"
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f" (did you mean {nearest[0]}?)" if nearest else ""
    return f"{call} has no {name}{hint}; it has {', '.join(known)}"


def _names(call: Callable[..., Any]) -> set[str]:
    """All keywords of a function, including those of a TypedDict that it unpacks."""
    names = set[str]()
    for parameter in inspect.signature(call).parameters.values():
        if parameter.kind == parameter.VAR_KEYWORD:
            (options,) = get_args(get_type_hints(call)[parameter.name])
            names |= set(get_type_hints(options))
        elif parameter.kind != parameter.VAR_POSITIONAL:
            names.add(parameter.name)
    return names - {"self", "cls"}
