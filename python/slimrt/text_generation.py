"""Generating text: whole, streamed, in batches, or as a conversation."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Unpack, overload

from slimrt.errors import UnsupportedError
from slimrt.generation.answers import answers
from slimrt.generation.asynchronous import iterate_in_thread, run_in_thread
from slimrt.generation.drafts import DraftedRun
from slimrt.generation.generate import Run, run_texts
from slimrt.generation.options import GenerateOptions, Options
from slimrt.generation.stream import Stream
from slimrt.plumbing.keywords import named
from slimrt.plumbing.notes import note, shown
from slimrt.results import Generation
from slimrt.runtime.kinds import continues_texts
from slimrt.runtime.session import Session, as_prompt, is_batch
from slimrt.tasks import Tasks
from slimrt.tasks import Text as Prompt
from slimrt.tasks import Texts as Prompts
from slimrt.tokenizer.channels import has_channels, mark_ids


class TextGeneration(Tasks):
    """The methods of slimrt.Model that continue a text."""

    _on_overflow = "error"
    _verbose = False

    @overload
    def generate(
        self, prompt: Prompt, *, n: None = None, session: Session | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Prompts, *, n: None = None, session: None = None, **options: Unpack[GenerateOptions]
    ) -> list[Generation]: ...

    @overload
    def generate(
        self, prompt: Prompt, *, n: int, session: None = None, **options: Unpack[GenerateOptions]
    ) -> list[Generation]: ...

    @overload
    def generate(
        self, prompt: Prompts, *, n: int, session: None = None, **options: Unpack[GenerateOptions]
    ) -> list[list[Generation]]: ...

    @named
    def generate(
        self, prompt: Any, *, n: int | None = None, session: Session | None = None, **options: Unpack[GenerateOptions]
    ) -> Any:  # what the overloads say
        """Continue a prompt.

        Args: (numbers are defaults)
            prompt: text, or token ids; a list of either gives a list of results. The texts of a list are decoded
                together, n_seqs at a time; the i-th uses seed + i.
            n: number of answers to the prompt, returned as a list (for a list of prompts, a list of lists). The prompt
                is computed once and forked; answers are decoded together, n_seqs at a time. Answer i is the text that
                seed + i gives.
            session: a session of this model. The longest common prefix of its tokens and the prompt is not computed
                again; the rest of the session is dropped. Afterwards it holds prompt and text except for the last
                token, which has not been computed yet.
            max_tokens: 128; -1: until the model ends the text or the context is full.
            min_tokens: no end token is chosen before so many, though a stop string may end the text; None: what the
                model's own settings say, else 0.
            temperature: 0.8; 0: greedy.
            top_k: 40; 0: all tokens. top_p: 0.95. min_p: 0.05, relative to the most likely token.
            typical_p: 1.0 (off): locally typical sampling: the tokens whose -log p is nearest to the entropy, until
                their probabilities sum to this.
            repeat_penalty: 1.0 (off), 1e-6 or more: positive logits of tokens that have occurred are divided by it,
                negative ones multiplied.
            frequency_penalty, presence_penalty: 0.0 (off): subtracted from the logits of tokens that have occurred, per
                occurrence and once in all.
            repeat_last_n: 64: the window of tokens, prompt included, that these penalties look at; -1: all.
            no_repeat_ngram_size: no sequence of so many tokens, of prompt and text, occurs again. suppress_tokens: ids
                that are never chosen. Both, with None, as the model's own settings say (transformers'
                generation_config.json; docs/tasks.md); 0 and [] switch these off.
            logit_bias: maps token ids to what is added to their logits; -inf: never chosen.
            dry_multiplier: 0.0 (off): DRY: a token that would extend a repeated sequence of at least dry_allowed_length
                (2) tokens has its logit reduced by this, times dry_base (1.75) for each further repeated token. It
                looks at the last dry_penalty_last_n (-1: all) tokens; no repetition extends across the texts in
                dry_sequence_breakers (\\n : " *), at most 32 of at most 40 characters.
            top_n_sigma: 0.0 (off): keep tokens whose logits are within this many standard deviations of the largest.
            xtc_probability: 0.0 (off): how often XTC drops all tokens with at least probability xtc_threshold (0.1)
                except the least likely of them.
            mirostat: 0 (off); 2: Mirostat 2.0 in place of the filters: keeps the surprise of tokens near mirostat_tau
                (5.0) bits with learning rate mirostat_eta (0.1).
            stop: text, or several: generation ends before the first of them; no part of it is returned.
            ignore_eos: never choose an end token.
            seed: None or -1: a new one, reported in the result.
            logprobs: how many of the most likely tokens to report at each position; 0: no logprobs.
            num_beams: 1; more: beam search, deterministic, which takes num_beams of the model's n_seqs; n gives the n
                best texts. length_penalty: 1.0, a score is divided by the text's length to this power.
                early_stopping: end the search as soon as num_beams texts have ended.
            on_overflow: "error": a full context ends the text, with finish_reason "context". "shift": the older half of
                the context is dropped, except for its first n_keep tokens (0; -1: the prompt; a BOS is always kept),
                the rest is prefilled again, in any cache mode, and the text goes on; `shifted` in the result counts
                the dropped tokens. A session then holds the rest.
            cache_prompt: reuse the rows of earlier texts with this option as far as this prompt has a prefix in common
                with one, in any cache mode, and keep those of this text until their memory is needed; usage counts
                cached_tokens. Reused rows are read as stored, so the last digits of logits differ. Not with session.
            lookup: prompt-lookup decoding: propose what followed an earlier occurrence of the last tokens, and verify
                several tokens in a step, if measured times show a gain: for text that repeats its prompt, two and more
                tokens a step. The output is that without lookup up to rounding: the tokens of a step attend to each
                other's rows before these are rounded for storage, so logits differ in the last digits with f16, more
                with q8 and q4. As the gain is measured, a text over a cache of few bits may differ from call to call
                with the same seed. Not with num_beams; usage counts drafted_tokens and accepted_tokens.
            json_schema: constrain the text to JSON of this schema: a mapping, or JSON text; {"type": "object"}: any
                object. regex: to a regular expression that matches the whole text (Rust's syntax). choice: to one of
                these texts. grammar: to a grammar in Lark's or llama.cpp's (GBNF) syntax. Only one of these; they need
                the extra `grammar`. A complete text ends with finish_reason "stop". Where only one token is possible
                it is taken without running the model, unless logprobs are requested. See docs/structured-output.md.
            show_tokens: ids of control tokens to include in the text; others are left out.
            logits_processor: called as f(ids so far, logits float32 (vocab,)); returns the logits to sample from.
                Then come logit_bias, the penalties, DRY, top_n_sigma, top_k, typical_p, top_p, min_p, XTC, temperature,
                as in llama.cpp.
            on_progress: called as f("prefill" or "decode", done, total) between steps; an exception that it raises
                stops the work and is passed on to the caller.

        Raises:
            ContextOverflowError: a prompt, or with beams the longest texts, would not fit; nothing was computed.
            GrammarError (a ValueError): a grammar or schema is invalid or has parts that cannot be enforced; the
                message names them; nothing was computed.
            UnsupportedError: text, stop strings, a grammar or DRY's breakers for a model without a tokenizer; a grammar
                without llguidance.
            ValueError: an option or a token id out of its range, options that exclude each other, or an empty prompt
                for a model without BOS.
            TypeError: an option of a wrong type, or an unknown one.
        """
        return self._generate(prompt, n, session, options)

    @named
    def stream(self, prompt: Prompt, *, session: Session | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """Continue a prompt piece by piece: an iterator of str, whose `result` is the Generation so far.

        Pieces are whole UTF-8 characters and never part of a stop string. Arguments and errors as generate;
        UnsupportedError: num_beams, since beam search has no text before its end.
        """
        settings, called = self._options(options), time.perf_counter()
        if settings.num_beams > 1:
            raise UnsupportedError("beam search chooses its text at the end, so it cannot be streamed: use generate()")
        return Stream(self._runtime, self._run(prompt, settings, self._seed_of(settings.seed), session, called))

    @overload
    async def agenerate(
        self, prompt: Prompt, *, n: None = None, session: Session | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation: ...

    @overload
    async def agenerate(
        self, prompt: Prompts, *, n: None = None, session: None = None, **options: Unpack[GenerateOptions]
    ) -> list[Generation]: ...

    @overload
    async def agenerate(
        self, prompt: Prompt, *, n: int, session: None = None, **options: Unpack[GenerateOptions]
    ) -> list[Generation]: ...

    @overload
    async def agenerate(
        self, prompt: Prompts, *, n: int, session: None = None, **options: Unpack[GenerateOptions]
    ) -> list[list[Generation]]: ...

    @named
    async def agenerate(
        self, prompt: Any, *, n: int | None = None, session: Session | None = None, **options: Unpack[GenerateOptions]
    ) -> Any:
        """generate() in a thread; cancelling the task stops the work at the next step. The texts of concurrent tasks
        are decoded together, n_seqs at a time."""
        return await run_in_thread(self._runtime, lambda given: self._generate(prompt, n, session, given), options)

    @named
    def astream(
        self, prompt: Prompt, *, session: Session | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[str, None]:
        """stream() in a thread; closing the iterator stops the work at the next step."""
        return iterate_in_thread(self._runtime, lambda given: self.stream(prompt, session=session, **given), options)

    @named
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | os.PathLike[str] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        session: Session | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Generate the assistant's next message, in the model's own chat format. The text includes reasoning
        ("thinking") as the model writes it, and gpt-oss' channels with their control tokens; create_chat_completion
        separates them.

        Args:
            messages: {"role": "user", "content": "..."}, in order; content is text, or a list of OpenAI's parts
                {"type": "text", "text": "..."}. Text that looks like a control token is encoded as plain text.
            chat_template: used in place of the file's own: the name of one of several in the file or of a built-in one
                (chatml, gemma, llama2, llama3, mistral, phi3, vicuna, zephyr), a file, or jinja2 text.
            chat_template_kwargs: further variables of the template, such as enable_thinking, documents or tools.
            session, options: as generate.

        Raises:
            UnsupportedError: the model has no chat template and none was given, or there is none of that name.
            ChatError: messages that are not a valid conversation, or that the template refuses; it says which.
            OSError: the template's file cannot be read.
            Others as generate.
        """
        from slimrt.tokenizer.chat import find_template, stops

        tokenizer = self._runtime.source.tokenizer
        ids = self.render_chat(messages, chat_template=chat_template, chat_template_kwargs=chat_template_kwargs)
        if ends := stops(tokenizer, chat_template):
            options["stop"] = [*Options(**options).stops, *ends]
        if has_channels(find_template(tokenizer, chat_template)):
            options.setdefault("show_tokens", mark_ids(tokenizer))
        return self.generate(ids, session=session, **options)

    @named
    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | os.PathLike[str] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, up to where the assistant's next message begins. Arguments and errors as
        chat."""
        continues_texts(self._runtime.source)
        from slimrt.tokenizer.chat import render_chat  # imports jinja2, which takes as long as loading a small model

        tokenizer = self._runtime.source.tokenizer
        return render_chat(tokenizer, messages, chat_template=chat_template, variables=chat_template_kwargs)

    def _options(self, options: GenerateOptions) -> Options:
        return Options(**({"on_overflow": self._on_overflow} | options))

    def _generate(
        self, prompt: Prompt | Prompts, n: int | None, session: Session | None, options: GenerateOptions
    ) -> Any:
        settings, called = self._options(options), time.perf_counter()
        several = is_batch(prompt)
        if several and session is not None:
            raise ValueError("a session continues one prompt, not a list of them")
        prompts: list[Any] = list(prompt) if several else [prompt]
        seed = self._seed_of(settings.seed)
        n_seqs = int(self._runtime.info["n_seqs"])
        if len(prompts) > n_seqs:
            with shown(self._verbose):
                note(f"{len(prompts)} texts are decoded {n_seqs} at a time: a model with a larger n_seqs takes more")
        if n is not None or settings.num_beams > 1:
            if session is not None:
                raise ValueError("a session continues one text: it does not go with n or num_beams")
            every = [self._prompt_ids(one) for one in prompts]
            found = answers(self._runtime, every, 1 if n is None else n, settings, seed, called)
            results: list[Any] = found if n is not None else [one[0] for one in found]
        else:
            runs = [self._run(one, settings, seed + i, session, called) for i, one in enumerate(prompts)]
            results = run_texts(self._runtime, runs, settings)
        return results if several else results[0]

    def _run(self, prompt: Prompt, options: Options, seed: int, session: Session | None, called: float) -> Run:
        if session is not None and not isinstance(session, Session):
            raise TypeError(f"session must be one that Model.session() or load_session() made, got {session!r}")
        if session is not None and session.runtime is not self._runtime:
            raise ValueError("the session belongs to another model")
        if session is not None and options.cache_prompt:
            raise ValueError("cache_prompt does not go with session, which has rows of its own: leave out one of them")
        kind = DraftedRun if options.lookup or self._runtime.draft is not None else Run
        return kind(self._runtime, self._prompt_ids(prompt), options, seed, session, called)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        continues_texts(self._runtime.source)
        return as_prompt(self._runtime, prompt)
