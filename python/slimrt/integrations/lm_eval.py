"""The model type "slimrt" for lm-evaluation-harness (docs/adapters.md).

python -m slimrt.integrations.lm_eval run --model slimrt --model_args pretrained=model.gguf --tasks arc_easy
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError("lm-evaluation-harness is missing: pip install 'slimrt[eval]'") from error

import slimrt
from slimrt import core
from slimrt.plumbing.numbers import log_softmax_at
from slimrt.tokenizer.chat import render_chat_text

LOG = logging.getLogger("lm_eval.slimrt")  # lm-eval shows what is below its own logger

_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first one counts, as there
_MAX_TOKENS = 256  # for tasks that give no limit, as in lm-eval's own models


@register_model("slimrt")
class SlimrtLM(TemplateLM):
    """A slimrt.Model for lm-eval. Answers to the same question reuse the cached rows of their common prefix.

    Args:
        pretrained: the model, as Model.from_pretrained takes it.
        batch_size: texts generated together (n_seqs).
        options: of slimrt.Model.
    """

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ):
        super().__init__()
        if not str(batch_size).isdecimal():
            raise ValueError(f"batch_size must be a number, got '{batch_size}': slimrt does not try which is fastest")
        given: dict[str, Any] = {"n_seqs": int(batch_size), "device": _present(device)} | options
        self.model = slimrt.Model.from_pretrained(pretrained, **given)

    @property
    def eot_token_id(self) -> int:
        tokenizer = self.model.tokenizer
        return int(tokenizer.eos_id if tokenizer.eos_id is not None else min(tokenizer.eog_ids))

    @property
    def prefix_token_id(self) -> int:
        bos = self.model.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.model)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.model.tokenize(string, add_special_tokens=add_special_tokens is not False)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return render_chat_text(self.model.tokenizer, chat_history, add_generation_prompt)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """For each (texts, context, continuation): the continuation's log likelihood, and whether it is greedy."""
        found: dict[int, tuple[float, bool]] = {}
        with self.model.session() as session:
            for index in sorted(range(len(requests)), key=lambda i: requests[i][1] + requests[i][2]):
                texts, context, continuation = requests[index]
                found[index] = self._score(session, context, continuation)
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, found[index])
        return [found[index] for index in range(len(requests))]

    def _score(self, session: slimrt.Session, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        fed = self._fitting(context + continuation[:-1], self.model.n_ctx)
        start = len(fed) - len(continuation)  # the token before the continuation predicts its first token
        if start < 0:
            raise slimrt.ContextOverflowError(
                f"a continuation has {len(continuation)} tokens, the context holds {self.model.n_ctx}: "
                f"{self.model._runtime.source.more_context(self.model.n_ctx)}"
            )
        pairs = enumerate(zip(session.tokens, fed[:start], strict=False))
        known = next((at for at, (held, wanted) in pairs if held != wanted), min(session.length, start))
        session.truncate(known)
        if known < start:
            session.append(fed[known:start], last_only=True)
        value, greedy, n_batch = 0.0, True, int(self.model.info()["n_batch"])
        for at in range(0, len(continuation), n_batch):  # rows of logits are large: a window's can take gigabytes
            logits = session.append(fed[start + at :][:n_batch])
            wanted = continuation[at : at + n_batch]
            value += float(log_softmax_at(logits, wanted).sum())
            greedy = greedy and np.array_equal(logits.argmax(-1), wanted)
        return value, greedy

    def loglikelihood_rolling(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[float]:
        """Log likelihoods of whole texts: each token is scored once, in windows of n_ctx tokens; the last window has as
        much context as fits."""
        totals = []
        for request in requests:
            (text,) = request.args
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.model.n_ctx, 1)
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue contexts; consecutive requests with the same options are generated together."""
        found: dict[int, str] = {}
        for _, group in itertools.groupby(range(len(requests)), key=lambda index: repr(requests[index].args[1])):
            indices = list(group)
            options = self._options(requests[indices[0]].args[1])
            room = self.model.n_ctx - options["max_tokens"]
            if room < 1:
                raise slimrt.ContextOverflowError(
                    f"a task's answers have up to {options['max_tokens']} tokens (max_gen_toks), the context holds "
                    f"{self.model.n_ctx}, with the prompt: {self.model._runtime.source.more_context(self.model.n_ctx)}"
                )
            prompts = [self._fitting(self.tok_encode(requests[index].args[0]), room) for index in indices]
            for index, result in zip(indices, self.model.generate(prompts, **options), strict=True):
                found[index] = result.text
                self.cache_hook.add_partial("generate_until", requests[index].args, result.text)
        return [found[index] for index in range(len(requests))]

    @staticmethod
    def _options(given: dict[str, Any]) -> Any:
        """A task's generation_kwargs as options of generate; greedy unless the task samples."""
        options = {"stop" if name == "until" else name: given[name] for name in given if name not in _LIMITS}
        if not options.pop("do_sample", options.get("temperature", 0.0) > 0):
            options["temperature"] = 0.0
        limits = (given[name] for name in _LIMITS if given.get(name) is not None)
        return options | {"max_tokens": next(limits, _MAX_TOKENS)}

    def _fitting(self, ids: list[int], room: int) -> list[int]:
        """The last tokens that fit, as in lm-eval's own models."""
        if len(ids) > room:
            LOG.warning("a context of %d tokens was cut to its last %d: n_ctx is %d", len(ids), room, self.model.n_ctx)
        return ids[-room:]


def _present(device: str | None) -> str:
    """A device that there is: lm-eval's command line says cuda:0 where nothing is said, and its own models take the CPU
    where there is no GPU."""
    found, why = core.cuda_devices()
    if device in ("cuda", "cuda:0") and not found:
        LOG.warning("device %s: %s; the model is on the CPU", device, why)
        return "cpu"
    return device or "auto"


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
