"""How a model continues texts: whole, piece by piece, several at once, or as a conversation."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Unpack, overload

from slimrt.errors import UnsupportedError
from slimrt.generation.answers import answers
from slimrt.generation.asynchronous import iterate_in_thread, run_in_thread
from slimrt.generation.drafts import DraftedRun
from slimrt.generation.generate import Run, Stream, run_texts
from slimrt.generation.options import GenerateOptions, Options
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

        Args:
            prompt: text, or token ids; a list of either gives a list of results. The texts of a list are decoded
                together, n_seqs at a time; the i-th uses seed + i.
            n: so many answers to the prompt, as a list (of a list of prompts a list for each): it is computed once and
                forked, and the answers are decoded together, n_seqs at a time. The i-th is what seed + i gives alone.
            session: a session of this model whose tokens the prompt repeats: what they have in common is not
                computed again, the rest of the session is dropped. It ends up with prompt and text, except for the
                last token, which is not computed yet.
            max_tokens: 128; -1: until the model ends the text or the context is full.
            temperature: 0.8; 0: always the likeliest token.
            top_k: 40; 0: all. top_p: 0.95. min_p: 0.05, relative to the likeliest token.
            typical_p: 1.0: all; the tokens nearest to the entropy in -log p that have this probability together.
            repeat_penalty: 1.0 (none): logits of tokens that are there are divided by it, or multiplied if negative.
            frequency_penalty, presence_penalty: 0.0 (none): subtracted from them, times their number and once.
            repeat_last_n: 64: the tokens, prompt included, that penalties look at; -1: all.
            logit_bias: token ids to what is added to their logits; -inf: never chosen.
            dry_multiplier: 0.0 (none): DRY, subtracted from tokens that would go on with a repetition of
                dry_allowed_length (2) tokens, times dry_base (1.75) for each token that it is longer. It looks at the
                last dry_penalty_last_n (-1: all); none goes across the texts dry_sequence_breakers (\\n : " *).
            top_n_sigma: 0.0: all; so many standard deviations of the logits below the largest are left.
            xtc_probability: 0.0: never; how often all tokens of at least xtc_threshold (0.1) but the least likely of
                them are left out.
            mirostat: 0; 2: in place of the filters a bound that follows the choices, so that they surprise by
                mirostat_tau (5.0) bits; mirostat_eta: 0.1, how fast it follows.
            stop: text, or several: generation ends before the first of them, and no part of it is shown.
            ignore_eos: never choose an end token.
            seed: None: a new one, reported in the result.
            logprobs: how many of the likeliest tokens to report for each position; 0: no report.
            num_beams: 1. More search for a likelier text and draw none: they take so many of the model's n_seqs, and n
                gives the n likeliest. length_penalty: 1.0, power of the length that a score is divided by.
                early_stopping: end the search with the first num_beams texts.
            on_overflow: "error": a context that fills up ends the text, with finish_reason "context". "shift": the
                older half of it is dropped but for the first n_keep tokens (0; -1: the prompt; a BOS always stays),
                what stays is computed again, as a prompt is, in any cache mode, and the text goes on; `shifted` in the
                result counts what was dropped. A session then holds what stayed.
            cache_prompt: take the rows that earlier texts with this option have left for a prompt that begins as they
                do, in any cache mode, and leave those of this one, for as long as nobody needs the room; usage counts
                cached_tokens. Rows are read as they are stored then, so that the last digits of logits differ.
            lookup: guess what comes by what followed the last tokens where they stood before, and check several guesses
                in a step, where that pays: of text that repeats its prompt two tokens and more at once. The tokens are
                those that come without, but that those of a step see each other's rows as they are before these are
                stored: in f16 the last digits of logits differ by that, in q8 and q4 more, and since what pays is
                measured, a text in few bits may be another from call to call, whatever its seed. Not with num_beams;
                usage counts drafted_tokens and accepted_tokens.
            json_schema: hold the text to JSON of this schema: a mapping, or JSON; {"type": "object"}: any object.
                regex: to a regular expression, the whole text (Rust's syntax). choice: to one of these texts.
                grammar: to one in Lark's form, or in llama.cpp's (GBNF). One at a time; with the extra `grammar`. Where
                it is complete the text ends, with finish_reason "stop"; what only one token can continue is continued
                without the model, unless logprobs are wanted. See docs/structured-output.md.
            show_tokens: ids of control tokens that are shown in the text; others are left out of it.
            logits_processor: called as f(ids so far, logits float32 (vocab,)); returns the logits to sample from.
                Then come logit_bias, the penalties, DRY, top_n_sigma, top_k, typical_p, top_p, min_p, XTC, temperature,
                as in llama.cpp.
            on_progress: called as f("prefill" or "decode", done, total) between steps; an exception from it stops
                the work and goes on to the caller.

        Raises:
            ContextOverflowError: a prompt, or what beams may come to, does not fit; nothing was computed.
            GrammarError: a grammar or schema that is wrong, or has what cannot be enforced: it is named, and nothing
                was computed. A ValueError.
            UnsupportedError: text, stop strings, a grammar or DRY's breakers for a model without a tokenizer; a grammar
                without llguidance.
            ValueError: an option or a token id out of its range, options that do not go together, or an empty prompt
                where the model has no BOS.
            TypeError: an option of a wrong kind, or one that there is not.
        """
        return self._generate(prompt, n, session, options)

    @named
    def stream(self, prompt: Prompt, *, session: Session | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """Continue a prompt piece by piece: an iterator of str, whose `result` is the Generation so far.

        Pieces are whole UTF-8 characters and never part of a stop string. Arguments and errors as generate;
        UnsupportedError: num_beams, which know no text before the end.
        """
        settings, called = self._options(options), time.perf_counter()
        if settings.num_beams > 1:
            raise UnsupportedError("beams choose a text when they are done, so none can be streamed: use generate()")
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
        """generate() in a thread; cancelling it stops the work at the next step."""
        return await run_in_thread(lambda given: self._generate(prompt, n, session, given), options)

    @named
    def astream(
        self, prompt: Prompt, *, session: Session | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[str]:
        """stream() in a thread; closing the iterator stops the work at the next step."""
        return iterate_in_thread(lambda given: self.stream(prompt, session=session, **given), options)

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
        """The assistant's next message, in the model's own chat format. Its text has the thoughts, too, as the model
        writes them, and gpt-oss' channels with their control tokens: create_chat_completion tells them apart.

        Args:
            messages: {"role": "user", "content": "..."}, in order; a content is text, or a list of OpenAI's parts
                {"type": "text", "text": "..."}. The text of a control token in them stays text.
            chat_template: another than the file's own: the name of one of several that it has or of a built-in one
                (chatml, gemma, llama2, llama3, mistral, phi3, vicuna, zephyr), a file, or jinja2 text.
            chat_template_kwargs: more variables for it, such as enable_thinking, documents or tools.
            session, options: as generate.

        Raises:
            UnsupportedError: the model has no chat template and none was given, or there is none of that name.
            ChatError: messages that make no conversation, or that the template refuses; it says which.
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
        """The ids of a conversation, up to where the assistant's next message begins. Arguments and errors as chat."""
        continues_texts(self._runtime.source)
        from slimrt.tokenizer.chat import render_chat  # jinja2 takes as long to import as a small model to load

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
        kind = DraftedRun if options.lookup or self._runtime.draft is not None else Run
        return kind(self._runtime, self._prompt_ids(prompt), options, seed, session, called)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        continues_texts(self._runtime.source)
        return as_prompt(self._runtime, prompt)
