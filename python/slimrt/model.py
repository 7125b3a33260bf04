"""slimrt.Model: load a model, generate, look inside."""

from __future__ import annotations

import os
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Self, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from slimrt.cache.config import CacheChoice, CacheOptions
from slimrt.cache.planner import Planner, resolve_device
from slimrt.errors import UnsupportedError
from slimrt.generation import search
from slimrt.generation.answers import answers
from slimrt.generation.asynchronous import iterate_in_thread, run_in_thread
from slimrt.generation.generate import Run, SessionEngine, Stream
from slimrt.generation.options import GenerateOptions, Options
from slimrt.measure import score as _score
from slimrt.modelfile.source import ModelSource
from slimrt.openai.methods import OpenAIMethods
from slimrt.plumbing.arguments import whole
from slimrt.plumbing.closing import Closing
from slimrt.plumbing.keywords import named
from slimrt.plumbing.notes import LOG, note, shown
from slimrt.results import Generation, Score
from slimrt.runtime import runtime as _runtime
from slimrt.runtime.kinds import continues_texts
from slimrt.runtime.session import Session, TokenIds, as_ids, as_prompt, is_batch, load_session
from slimrt.tokenizer.tokenizer import Tokenizer

Prompt = str | TokenIds
Prompts = list[str] | list[list[int]]


class Model(OpenAIMethods, Closing):
    """A model, loaded and ready. Use it as a context manager, or close() it.

    It may be used from several threads: each call has the model to itself until it returns; a stream lets others in
    between its pieces.

    Args:
        path: a GGUF file (as it is, or from slimrt.convert; of a split one the first), a Hugging Face directory,
            whisper.cpp's ggml-*.bin, the name of a repository that holds one of these ("org/repo:Q4_K_M", also after
            "hf://"; docs/getting-models.md), or a ModelSource.
        device: "cpu", "cuda" (an NVIDIA GPU) or "cuda:N"; "auto" is the CPU.
        n_ctx: tokens a sequence may hold; 0: the trained context, at most 4096.
        n_batch: tokens computed at once in a prefill; scratch grows with it.
        n_seqs: sequences that may be full at once; also how many texts of a list are generated together.
        n_threads: None: the physical (or big) cores.
        cache: what a token leaves behind in each layer: "kv", "k", "k+r", "v", "x", "xr", "kivi", "lowrank", "latent",
            or "auto" (what the file was converted for, else kv or latent, or of an encoder-decoder x where its rows are
            no wider); with its
            types, "k+r:q8" or "k+r:q8:64:q4" (mode, type, rank of the residual, its type), or what rows become as they
            age, "lowrank:q2@0.5+q4*0.1+sinks=4"; or a CacheConfig; or one of these for each layer. "fastest": of kv
            in f16 and q8 and what the file says, what is predicted to decode fastest of what fits, by rates of this
            machine (slimrt.machine.attention_rates, measured once).
            A mode that needs folded weights which the file lacks folds them while loading.
        cache_type: where the cache does not say its own: f32, f16 or bf16, or with scales per token and head (in mode
            k+r and xr per token) q8 (8 bits and a float), fp8_e4m3, fp8_e5m2 (8 bits, no scale) or q4 (5 bits, of
            which 1 for scales), or "auto" (what the file says, else f16); cache_type_k and cache_type_v to differ.
        rank, residual_type: of mode k+r, where the cache does not say its own: the width of what corrects V, 0 for
            none, and its type. None: what the file says, else what slimrt.modes.default_residual says.
        sparse_threshold: softmax weight of each head that decoding may leave unread: rows of V (cache mode "kv") whose
            weights add up to no more are skipped, which changes an output by at most this share of the largest |v|;
            in "k", "k+r", "x" and "xr" rows, which then count as their mean. 0: every row is read.
        sparse_delta: the same in "k", "k+r", "x" and "xr", by squares: those of the weights skipped add up to at most
            its square, so that at most 1 / sparse_delta^2 rows of 1024 are read for a head. A statistical bound: what
            is skipped is taken for independent. "auto": what the file says (`slimrt convert --sparse` measures it).
        cross: of a model with an encoder, what its output leaves behind for cross-attention: "kv" (K and V of each
            layer), "k" (each layer's K), "e" (the output itself, once for all layers), "e1" (the first layer's K,
            once), or "auto" (what the file was converted for, else e where layers read no more bytes than of kv). k and
            e1, and self-attention's k and v, invert a matrix, which amplifies rounding: see allow_lossy.
        cross_type: of its rows, as cache_type.
        n_source: most rows of one encoder output, tokens of a source text; 0: the model's own.
        allow_lossy: insist on a mode whose error of V, as predicted or as a conversion measured it, is over 5 % in a
            layer; else it is refused, with the nearest one that is fine.
        calibration: for modes k+r, xr and lowrank where they are folded while loading: a text file like what the model
            is to read; None: a built-in English one; "none": the weights alone.
        memory_limit: bytes, or text like "6GiB"; None: what the machine has available.
        on_overflow: what calls do at a full context that do not say it themselves, "error" or "shift": see generate.
        seed: makes the seeds of calls that give none reproducible.
        verbose: say on stderr what everything resolved to, and what logging's "slimrt" is told.
        progress: bars on stderr for long work; None: when it is a terminal.

    Raises:
        FileNotFoundError: there is no such path.
        DownloadError: what a repository's name leads to cannot be fetched.
        ModelFormatError: the file is broken.
        UnsupportedError: an architecture, tensor type, cache mode, cache type or device that slimrt does not have.
        CacheUnsupportedError: a cache mode that is not legal for this model, said before anything slow begins; or one
            that loses too much of V.
        WontFitError: too little memory; its `options` would fit.
        ValueError, TypeError: an argument out of its range, or of a wrong kind.
    """

    _on_overflow = "error"

    @named
    def __init__(
        self,
        path: str | os.PathLike[str] | ModelSource,
        *,
        device: str = "auto",
        n_ctx: int = 0,
        n_batch: int = 512,
        n_seqs: int = 1,
        n_threads: int | None = None,
        calibration: str | os.PathLike[str] | None = None,
        memory_limit: str | int | None = None,
        on_overflow: str = "error",
        seed: int | None = None,
        verbose: bool = False,
        progress: bool | None = None,
        **options: Unpack[CacheOptions],
    ):
        self._given = {name: value for name, value in locals().items() if name not in ("self", "path", "options")}
        self._given |= options
        resolve_device(device)  # before anything slow
        Options(on_overflow=on_overflow)
        choice = CacheChoice.of(**options)
        with shown(verbose):
            source = ModelSource.of(path, progress)
            if on_overflow != "error":
                continues_texts(source)
            planner = Planner.of(source, memory_limit, n_seqs, n_batch, n_threads, device)
            n_ctx = source.n_ctx(n_ctx)
            self._runtime = _runtime.load(
                source,
                choice,
                planner,
                n_ctx=n_ctx,
                memory_limit=0 if memory_limit is None else planner.limit,
                show_progress=progress,
                calibration=calibration,
            )
            if n_ctx > source.n_ctx_train and not source.has_encoder:
                note(
                    f"the context of {n_ctx} tokens is longer than the {source.n_ctx_train} that {source.name} was "
                    "trained on, and the model makes little sense of more"
                )
            _runtime.describe(self._runtime, self.memory(), note if verbose else LOG.debug)
        self._on_overflow = on_overflow
        self._seeds = random.Random(None if seed is None else whole("seed", seed))

    @classmethod
    def from_pretrained(cls, repo_id: str | os.PathLike[str], filename: str | None = None, **options: Any) -> Self:
        """A model from the Hugging Face hub, or from a path.

        Args:
            repo_id: "org/name", or a folder or file that is there.
            filename: the file in it, "*q8_0.gguf" of one that is named so; None: the folder as a whole, or what
                there is to be chosen from in a repository.
            options: as Model.

        Raises:
            Those of Model, and what the hub says.
        """
        return cls(_address(os.fspath(repo_id), filename), **options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by path and arguments: it is loaded again where it is unpickled. ModelFormatError: the file there is
        another one."""
        return _loaded, (type(self), self._runtime.source, self._given)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. UnsupportedError if the model has none (it still works on token ids)."""
        return self._runtime.source.tokenizer

    @property
    def n_ctx(self) -> int:
        """Tokens a sequence may hold."""
        return self._runtime.n_ctx

    @property
    def n_vocab(self) -> int:
        """Width of a row of logits."""
        return self._runtime.n_vocab

    def info(self) -> dict[str, Any]:
        """Sizes, device, threads and each layer's cache (mode, type, bytes_per_token, ...), as resolved."""
        return dict(self._runtime.info)

    def memory(self) -> dict[str, int]:
        """Bytes: weights, derived, cache, scratch and total allocated, mapped, cache_bytes_per_token."""
        with self._runtime.use() as engine:
            return dict(engine.memory())

    @named
    def tokenize(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of a text, as Tokenizer.encode."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)

    @named
    def detokenize(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids, as Tokenizer.decode, but without control tokens such as BOS, unless these are asked for."""
        return self.tokenizer.decode(ids, skip_special_tokens)

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
            logits_processor: called as f(ids so far, logits float32 (vocab,)); returns the logits to sample from.
                Then come logit_bias, the penalties, DRY, top_n_sigma, top_k, typical_p, top_p, min_p, XTC, temperature,
                as in llama.cpp.
            on_progress: called as f("prefill" or "decode", done, total) between steps; an exception from it stops
                the work and goes on to the caller.

        Raises:
            ContextOverflowError: a prompt does not fit; nothing was computed.
            UnsupportedError: text, stop strings or DRY's breakers for a model without a tokenizer.
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
        """The assistant's next message, in the model's own chat format.

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
        from slimrt.tokenizer.chat import stops

        ids = self.render_chat(messages, chat_template=chat_template, chat_template_kwargs=chat_template_kwargs)
        if ends := stops(self.tokenizer, chat_template):
            options["stop"] = [*Options(**options).stops, *ends]
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

        return render_chat(self.tokenizer, messages, chat_template=chat_template, variables=chat_template_kwargs)

    def logits(self, ids: TokenIds) -> NDArray[np.float32]:
        """Logits after each token: float32 (n, vocab).

        Raises:
            ContextOverflowError: more than n_ctx ids. ValueError: no ids, or one outside the vocabulary.
        """
        with self._runtime.lock, self.session() as session:
            return session.append(ids)

    @named
    def score(self, text: Prompt) -> Score:
        """How likely the model finds a text (or ids), token by token.

        Raises:
            ContextOverflowError: it does not fit the context. ValueError: fewer than two tokens.
        """
        continues_texts(self._runtime.source)
        return _score.score(self._runtime, self._ids(text))

    @named
    def perplexity(self, text: Prompt, *, stride: int | None = None) -> float:
        """Perplexity of a text of any length, in windows of n_ctx tokens.

        Each window but the first scores its last `stride` tokens, given all before them in the window. None: half a
        window. A smaller stride gives every token more context, and takes longer. Each window is computed by prefill
        passes, whose tokens see each other exactly: what a cache costs hardly shows. compare_caches() measures that.

        Raises:
            ValueError: fewer than two tokens, or a stride that is not inside the window.
        """
        continues_texts(self._runtime.source)
        return _score.perplexity(self._runtime, self._ids(text), stride)

    def session(self) -> Session:
        """A new, empty session. UnsupportedError for a model with an encoder."""
        continues_texts(self._runtime.source)
        return Session.new(self._runtime)

    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """A session from a file that Session.save wrote.

        Raises:
            ModelFormatError: not a session file, damaged, or of another model file or cache.
            ContextOverflowError: it holds more tokens than n_ctx.
            UnsupportedError: a model with an encoder.
        """
        continues_texts(self._runtime.source)
        return load_session(self._runtime, path)

    def close(self) -> None:
        """Free all memory; waits for a call in progress. Using the model afterwards is a ValueError."""
        self._runtime.close()

    def __repr__(self) -> str:
        info = self._runtime.info
        modes = "/".join(sorted({layer["mode"] for layer in info["layers"]}))
        return f"<slimrt.Model {self._runtime.source.name}: {info['architecture']}, n_ctx {self.n_ctx}, {modes}>"

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
            with shown(self._given["verbose"]):
                note(f"{len(prompts)} texts are decoded {n_seqs} at a time: a model with a larger n_seqs takes more")
        if n is not None or settings.num_beams > 1:
            if session is not None:
                raise ValueError("a session continues one text: it does not go with n or num_beams")
            every = [self._prompt_ids(one) for one in prompts]
            found = answers(self._runtime, every, 1 if n is None else n, settings, seed, called)
            results: list[Any] = found if n is not None else [one[0] for one in found]
        else:
            runs = [self._run(one, settings, seed + i, session, called) for i, one in enumerate(prompts)]
            engine = SessionEngine(self._runtime, settings.on_progress)
            with self._runtime.lock:
                tasks = [(1, run.task(engine)) for run in runs]
                results = search.run(engine, tasks, n_seqs)
        return results if several else results[0]

    def _ids(self, prompt: Prompt) -> list[int]:
        return self.tokenize(prompt) if isinstance(prompt, str) else as_ids(prompt, self.n_vocab)

    def _seed_of(self, seed: int | None) -> int:
        return self._seeds.getrandbits(32) if seed is None else seed

    def _run(self, prompt: Prompt, options: Options, seed: int, session: Session | None, called: float) -> Run:
        if session is not None and not isinstance(session, Session):
            raise TypeError(f"session must be one that Model.session() or load_session() made, got {session!r}")
        if session is not None and session.runtime is not self._runtime:
            raise ValueError("the session belongs to another model")
        return Run(self._runtime, self._prompt_ids(prompt), options, seed, session, called)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        continues_texts(self._runtime.source)
        return as_prompt(self._runtime, prompt)


def _address(repo_id: str, filename: str | None) -> str:
    """A path that is there or can only be one, or hf://org/name[:file]."""
    if os.path.exists(repo_id) or os.path.isabs(repo_id) or repo_id.startswith((".", "~")):
        return os.path.join(repo_id, filename) if filename else repo_id
    address = repo_id if repo_id.startswith("hf://") else f"hf://{repo_id}"
    return f"{address}:{filename}" if filename else address


def _loaded(kind: type[Model], source: ModelSource, given: dict[str, Any]) -> Model:
    """A model that was pickled."""
    return kind(source, **given)
