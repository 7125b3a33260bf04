"""slimrt.Model: load a model, generate, look inside."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from slimrt.cache.config import CacheChoice, CacheOptions
from slimrt.cache.placement import placed
from slimrt.cache.planner import Planner, resolve_device
from slimrt.generation.draft_model import load_draft
from slimrt.generation.options import Options
from slimrt.generation.thin_forks import ThinForks
from slimrt.measure import score as _score
from slimrt.modelfile.source import ModelSource
from slimrt.openai.methods import OpenAIMethods
from slimrt.plumbing.arguments import whole
from slimrt.plumbing.closing import Closing
from slimrt.plumbing.keywords import named
from slimrt.plumbing.notes import LOG, note, shown
from slimrt.results import Score
from slimrt.runtime import runtime as _runtime
from slimrt.runtime.drafting import refuse_aging, with_draft
from slimrt.runtime.kinds import continues_texts
from slimrt.runtime.session import Session, TokenIds, as_ids, load_session
from slimrt.tokenizer.tokenizer import Tokenizer

Prompt = str | TokenIds


class Model(OpenAIMethods, Closing):
    """A model, loaded and ready. Use it as a context manager, or close() it.

    It may be used from several threads: each call has the model to itself until it returns; a stream lets others in
    between its pieces.

    Args:
        path: a GGUF file (as it is, or from slimrt.convert; of a split one the first), a Hugging Face directory,
            whisper.cpp's ggml-*.bin, the name of a repository that holds one of these ("org/repo:Q4_K_M", also after
            "hf://"; docs/getting-models.md), or a ModelSource.
        device: "cpu", "cuda" (an NVIDIA GPU) or "cuda:N"; "auto" is an NVIDIA GPU where there is one
            and the model fits it, else the CPU (SLIMRT_DEVICE=cpu insists). Several share the layers in their order,
            "cuda:0,cuda:1" by the memory that is free, "cuda:0=20,cuda:1=12" as it says; the last one has the head.
        n_gpu_layers: so many of the last layers, and the head, are on `device` (or "cuda"), the others on the CPU; -1:
            all of them.
        n_ctx: tokens a sequence may hold; 0: the trained context, at most 4096, or where that does not fit the most
            that does (256 at least), which a warning tells.
        n_batch: tokens computed at once in a prefill; scratch grows with it.
        n_seqs: sequences computed together, such as texts of a list.
        cache_tokens: tokens whose rows the cache holds, of all sequences together, at least n_ctx; 0: n_ctx for each of
            n_seqs, so that all may be full at once.
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
        draft_model: a smaller model with the same tokenizer, as path: it guesses what texts go on with, and several
            guesses are checked in a step, as many as pay by what that takes and how many were right, none included. The
            tokens are those that come without, as near as rows are to what is stored of them: see lookup of generate.
            Beams take no guesses. Its memory counts in memory_limit, and it is closed with the model. "self": the model
            itself, which reads few rows of a long text for its guesses; with cache mode kv, where reading rows is most
            of a step.
        on_overflow: what calls do at a full context that do not say it themselves, "error" or "shift": see generate.
        seed: makes the seeds of calls that give none reproducible.
        verbose: say on stderr what everything resolved to, and what logging's "slimrt" is told.
        progress: bars on stderr for long work; None: when it is a terminal.

    Raises:
        FileNotFoundError: there is no such path.
        DownloadError: what a repository's name leads to cannot be fetched.
        ModelFormatError: the file is broken.
        UnsupportedError: an architecture, tensor type, cache mode, cache type or device that slimrt does not have;
            a draft_model with another tokenizer (it says what differs), or with rows that age.
        CacheUnsupportedError: a cache mode that is not legal for this model, said before anything slow begins; or one
            that loses too much of V.
        WontFitError: too little memory; its `options` would fit.
        ValueError, TypeError: an argument out of its range, or of a wrong kind.
    """

    @named
    def __init__(
        self,
        path: str | os.PathLike[str] | ModelSource,
        *,
        device: str = "auto",
        n_gpu_layers: int | None = None,
        n_ctx: int = 0,
        n_batch: int = 512,
        n_seqs: int = 1,
        cache_tokens: int = 0,
        n_threads: int | None = None,
        calibration: str | os.PathLike[str] | None = None,
        memory_limit: str | int | None = None,
        draft_model: str | os.PathLike[str] | ModelSource | None = None,
        on_overflow: str = "error",
        seed: int | None = None,
        verbose: bool = False,
        progress: bool | None = None,
        **options: Unpack[CacheOptions],
    ):
        self._given = {name: value for name, value in locals().items() if name not in ("self", "path", "options")}
        self._given |= options
        device = resolve_device(device, n_gpu_layers)  # before anything slow
        Options(on_overflow=on_overflow)
        choice = CacheChoice.of(**options)
        with shown(verbose):
            source = ModelSource.of(path, progress)
            if on_overflow != "error":
                continues_texts(source)
            planner = Planner.of(source, memory_limit, n_seqs, n_batch, n_threads, device, cache_tokens)
            source.n_ctx(n_ctx)  # checked before anything slow
            planner = placed(with_draft(planner, draft_model, progress), [choice], n_ctx)
            self._runtime = _runtime.load(
                source,
                choice,
                planner,
                n_ctx=n_ctx,
                memory_limit=0 if memory_limit is None else planner.limit,
                show_progress=progress,
                calibration=calibration,
            )
            if draft_model is not None:
                try:
                    refuse_aging(source, [layer["mode"] for layer in self._runtime.info["layers"]])
                    self._runtime.draft = (
                        ThinForks(self._runtime) if planner.by_itself else load_draft(planner, self._runtime, progress)
                    )
                except BaseException:
                    self._runtime.close()
                    raise
            if n_ctx > source.n_ctx_train and not source.has_encoder:
                note(
                    f"the context of {n_ctx} tokens is longer than the {source.n_ctx_train} that {source.name} was "
                    "trained on, and the model makes little sense of more"
                )
            _runtime.describe(self._runtime, self.memory(), note if verbose else LOG.debug)
            if self._runtime.draft is not None:
                (note if verbose else LOG.debug)(f"{self._runtime.draft}")
        self._on_overflow, self._verbose = on_overflow, verbose
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
        """Sizes, device, threads and each layer's cache (mode, type, bytes_per_token, ...), as resolved; with a
        draft_model what it is and takes: "draft", of name, n_ctx and bytes."""
        draft = self._runtime.draft
        return dict(self._runtime.info) | ({} if draft is None else {"draft": draft.info()})

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
            ContextOverflowError: it holds more tokens than n_ctx; or it was cut from a text of more, most of whose rows
                had aged.
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

    def _ids(self, prompt: Prompt) -> list[int]:
        return self.tokenize(prompt) if isinstance(prompt, str) else as_ids(prompt, self.n_vocab)

    def _seed_of(self, seed: int | None) -> int:
        return self._seeds.getrandbits(32) if seed is None else seed


def _address(repo_id: str, filename: str | None) -> str:
    """A path that is there or can only be one, or hf://org/name[:file]."""
    if os.path.exists(repo_id) or os.path.isabs(repo_id) or repo_id.startswith((".", "~")):
        return os.path.join(repo_id, filename) if filename else repo_id
    address = repo_id if repo_id.startswith("hf://") else f"hf://{repo_id}"
    return f"{address}:{filename}" if filename else address


def _loaded(kind: type[Model], source: ModelSource, given: dict[str, Any]) -> Model:
    """A model that was pickled."""
    return kind(source, **given)
