"""slimrt.Model: a loaded model, with methods to generate, score and inspect."""

from __future__ import annotations

import os
import random
import re
import weakref
from collections.abc import Iterable
from pathlib import Path
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
from slimrt.modelfile.hub_files import is_model, matches
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
    """A loaded model. Use it as a context manager, or call close().

    It may be used from several threads: calls run one after another; a stream lets other calls run between its pieces.

    Args:
        path: a GGUF file (any, or one from slimrt.convert; of a split model the first file), a Hugging Face directory,
            whisper.cpp's ggml-*.bin, a repository on the hub that holds one of these ("org/repo:Q4_K_M", also with
            "hf://" in front; docs/getting-models.md), or a ModelSource.
        device: "cpu", "cuda" (an NVIDIA GPU), "cuda:N" (the N-th), or "auto": a GPU if there is one and the model fits
            it, else the CPU (SLIMRT_DEVICE=cpu makes "auto" the CPU). Several devices share the layers, in order:
            "cuda:0,cuda:1" in proportion to their free memory, "cuda:0=20,cuda:1=12" by numbers of layers; the last
            one has the output layer.
        n_gpu_layers: put this many of the last layers, and the output layer, on `device` (or "cuda") and the others on
            the CPU; -1: all of them.
        n_ctx: most tokens of a sequence; 0: the trained context, at most 4096; if that does not fit the memory, the
            largest that does (at least 256), with a warning.
        n_batch: most tokens of one step of a prefill; scratch memory grows with it.
        n_seqs: most sequences decoded together, such as the texts of a list; None: 1, or as many as the beams in an
            encoder-decoder's own generation settings.
        cache_tokens: capacity of the cache in tokens, shared by all sequences, at least n_ctx; 0: n_ctx * n_seqs, so
            that all sequences can be full at once.
        n_threads: CPU threads; None: one per physical core (of CPUs with big and little cores, per big core).
        cache: what is stored of each token in each layer. A mode: "kv", "k", "k+r", "v", "x", "xr", "kivi", "lowrank"
            or "latent" (docs/glossary.md); "auto" (what the file was converted for, else kv, with MLA latent, and in
            an encoder-decoder x if its rows are no wider); "fastest" (of kv f16, kv q8 and what the file was converted
            for, the one that fits and is predicted to decode fastest, by rates measured once on this machine:
            slimrt.machine.attention_rates). The mode may have types: "k+r:q8", "k+r:q8:64:q4" (mode, type, rank of the
            residual, its type), or levels that rows are requantised to as they age:
            "lowrank:q2@0.5+q4*0.1+sinks=4". Or a CacheConfig, or a list with one of these for each layer.
            Folded weights that the mode needs and the file lacks are computed while loading.
        cache_type: element type of rows, if `cache` gives none: f32, f16, bf16, q8 or fp8_e4m3 (8 bits, and a scale per
            token and head, in modes k+r and xr per token), fp8_e5m2 (8 bits), q4, q3 or q2 (5, 4 or 3 bits, 1 of them
            for scales), or "auto" (what the file says, else f16). cache_type_k and cache_type_v: the same for K and V
            alone.
        rank, residual_type: of mode k+r, if `cache` gives none: width of the residual that corrects V (0: no residual)
            and its element type. None: what the file says, else slimrt.modes.default_residual.
        sparse_threshold: softmax weight that decoding may leave unread in each head. In mode "kv" rows of V whose
            weights sum to at most this are skipped, which changes an output by at most this times the largest |v|; in
            "k", "k+r", "x", "xr" and "latent" whole rows are skipped and replaced by their mean. 0: every row is read.
        sparse_delta: the same for "k", "k+r", "x", "xr" and "latent", by squares: the skipped weights p have
            sqrt(sum p^2) <= sparse_delta, so that at most 1 / sparse_delta^2 rows of 1024 are read for a head. The
            resulting error is bounded statistically only: it assumes that skipped values are independent. "auto": the
            value in the file (measured by `slimrt convert --sparse`).
        cross: of a model with an encoder, what is stored of the encoder's output for cross-attention: "kv" (K and V of
            each layer), "k" (K of each layer), "e" (the output itself, once for all layers), "e1" (the first layer's K,
            once), or "auto" (what the file was converted for, else e if layers then read no more bytes than with kv).
            k and e1, like k and v of self-attention, invert a matrix, which amplifies rounding: see allow_lossy.
        cross_type: element type of those rows, as cache_type.
        n_source: most rows of one encoder output (of a text model: tokens of the source text); 0: the model's own.
        allow_lossy: load a mode although its relative error of V, predicted or measured by a conversion, is over 5 %
            in a layer; without it such a mode is refused, and the message names one that is precise enough.
        calibration: for modes k+r, xr and lowrank if they are folded while loading: a text file similar to what the
            model will read; None: a built-in English text; "none": no text, only the weights.
        memory_limit: bytes, or text like "6GiB"; None: the memory that is available now.
        draft_model: speculative decoding: a smaller model with the same tokenizer (a path, as `path`) proposes tokens,
            several of which are verified in one step; how many (possibly none) is adapted to their measured cost and
            acceptance rate. The output is that of decoding without a draft up to rounding: see lookup of generate. Not
            used with num_beams. Its memory counts towards memory_limit; it is closed with the model. "self": the model
            drafts for itself, reading only few rows of a long context; for cache mode kv, where reading rows is most
            of a step.
        on_overflow: default of generate's on_overflow: "error" or "shift".
        seed: makes the seeds of calls without one reproducible; -1: as None.
        verbose: report on stderr what all options resolved to, and what is logged to the logger "slimrt".
        progress: show progress bars on stderr for long work; None: if it is a terminal.

    Raises:
        FileNotFoundError: there is no such path.
        DownloadError: the repository cannot be downloaded.
        ModelFormatError: the file is broken.
        UnsupportedError: an architecture, tensor type, cache mode, cache type or device that slimrt does not have;
            a draft_model with another tokenizer (the message says what differs), or beside a cache whose rows age.
        CacheUnsupportedError: a cache mode that is not legal for this model (raised before anything slow begins), or
            one whose error of V is too large.
        WontFitError: too little memory; its `options` list what would fit.
        ValueError, TypeError: an argument out of its range, or of a wrong type.
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
        n_seqs: int | None = None,
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
        device = resolve_device(device, n_gpu_layers)  # arguments are checked before anything slow
        Options(on_overflow=on_overflow, seed=seed)
        choice = CacheChoice.of(**options)
        with shown(verbose):
            source = ModelSource.of(path, progress)
            if on_overflow != "error":
                continues_texts(source)
            n_seqs = source.settings.num_beams or 1 if n_seqs is None else n_seqs
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
                        ThinForks(weakref.proxy(self._runtime))  # no cycle: a model that nobody holds is freed at once
                        if planner.by_itself
                        else load_draft(planner, self._runtime, progress)
                    )
                except BaseException:
                    self._runtime.close()
                    raise
            _tell_of_context(source, self._runtime.n_ctx)
            _runtime.describe(self._runtime, self.memory(), note if verbose else LOG.debug)
            if self._runtime.draft is not None:
                (note if verbose else LOG.debug)(f"{self._runtime.draft}")
        self._on_overflow, self._verbose = on_overflow, verbose
        self._seeds = random.Random(None if seed in (None, -1) else int(seed))

    @classmethod
    def from_pretrained(cls, repo_id: str | os.PathLike[str], filename: str | None = None, **options: Any) -> Self:
        """Load a model from the Hugging Face hub, or from a path.

        Args:
            repo_id: "org/name", or an existing folder or file.
            filename: the file in it, or a pattern such as "*q8_0.gguf"; None: the folder as a whole, or the file that
                is chosen in a repository by default.
            options: as Model.

        Raises:
            As Model.
        """
        return cls(_address(os.fspath(repo_id), filename), **options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles path and arguments; unpickling loads the model again. ModelFormatError: the file has changed."""
        return _loaded, (type(self), self._runtime.source, self._given)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. UnsupportedError if the model has none (it still works on token ids)."""
        return self._runtime.source.tokenizer

    @property
    def n_ctx(self) -> int:
        """The context: most tokens of a sequence."""
        return self._runtime.n_ctx

    @property
    def n_vocab(self) -> int:
        """Size of the vocabulary: the width of a row of logits."""
        return self._runtime.n_vocab

    def info(self) -> dict[str, Any]:
        """Sizes, device, threads and each layer's cache (mode, type, bytes_per_token, ...), as resolved; with a
        draft_model also "draft": its name, n_ctx and bytes."""
        draft = self._runtime.draft
        return dict(self._runtime.info) | ({} if draft is None else {"draft": draft.info()})

    def memory(self) -> dict[str, int]:
        """Memory in bytes: weights, derived, cache and scratch are allocated, total is their sum; mapped is read in
        place from the file; cache_bytes_per_token is one token's rows in all layers."""
        with self._runtime.use() as engine:
            return dict(engine.memory())

    @named
    def tokenize(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of a text, as Tokenizer.encode."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)

    @named
    def detokenize(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids, as Tokenizer.decode; control tokens such as BOS are left out by default."""
        return self.tokenizer.decode(ids, skip_special_tokens)

    def logits(self, ids: TokenIds) -> NDArray[np.float32]:
        """Logits after each token: float32 (n, vocab).

        Raises:
            ContextOverflowError: more than n_ctx ids, or unread streams and open sessions leave too few rows.
            ValueError: no ids, or one outside the vocabulary.
        """
        continues_texts(self._runtime.source)
        return _score.logits(self._runtime, as_ids(ids, self._runtime.n_vocab))

    @named
    def score(self, text: Prompt) -> Score:
        """Log-probability of each token of a text (or ids) under the model.

        Raises:
            ContextOverflowError: it does not fit the context. ValueError: fewer than two tokens.
        """
        continues_texts(self._runtime.source)
        return _score.score(self._runtime, self._ids(text))

    @named
    def perplexity(self, text: Prompt, *, stride: int | None = None) -> float:
        """Perplexity of a text of any length, in windows of n_ctx tokens.

        Each window but the first scores its last `stride` tokens, given all tokens before them in the window. None:
        half a window. A smaller stride gives every token more context, and takes longer. Windows are computed by
        prefill, where the tokens of a step attend to each other's rows unrounded, so the error of a lossy cache hardly
        shows; compare_caches() measures that.

        Raises:
            ValueError: fewer than two tokens, or a stride that is not shorter than a window.
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
            ContextOverflowError: it holds more tokens than n_ctx, or it was truncated from a longer text and has more
                aged rows than a text of n_ctx tokens can have.
            UnsupportedError: the model has an encoder.
        """
        continues_texts(self._runtime.source)
        return load_session(self._runtime, path)

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._runtime.closed

    def close(self) -> None:
        """Free all memory; waits for a call in progress. Using the model afterwards raises ValueError."""
        self._runtime.close()

    def __repr__(self) -> str:
        info = self._runtime.info
        modes = "/".join(sorted({layer["mode"] for layer in info["layers"]}))
        keeps = f", n_ctx {self.n_ctx}, {modes}" if self._runtime.source.has_decoder else ""
        return f"<slimrt.Model {self._runtime.source.name}: {info['architecture']}{keeps}>"

    def _ids(self, prompt: Prompt) -> list[int]:
        return self.tokenize(prompt) if isinstance(prompt, str) else as_ids(prompt, self.n_vocab)

    def _seed_of(self, seed: int | None) -> int:
        return self._seeds.getrandbits(32) if seed in (None, -1) else whole("seed", seed)


def _address(repo_id: str, filename: str | None) -> str:
    """A local path if it exists or can be nothing else, else hf://org/name[:file]."""
    if os.path.exists(repo_id) or os.path.isabs(repo_id) or repo_id.startswith((".", "~")):
        return repo_id if filename is None else _in_folder(repo_id, filename)
    address = repo_id if repo_id.startswith("hf://") else f"hf://{repo_id}"
    return f"{address}:{filename}" if filename else address


def _in_folder(folder: str, filename: str) -> str:
    """The path of a file in a folder, or of the one model that a pattern matches, in any case. ValueError: it matches
    several."""
    path = os.path.join(folder, filename)
    if os.path.exists(path) or not re.search(r"[*?\[]", filename):
        return path
    files = (file.relative_to(folder).as_posix() for file in Path(folder).rglob("*"))
    found = sorted(file for file in files if matches(file, filename))
    found = [file for file in found if is_model(file)] or found  # else whisper.cpp's
    if len(found) > 1:
        raise ValueError(f"{path}: {len(found)} models match, {found[0]} and {found[1]} among them: name one")
    return os.path.join(folder, found[0]) if found else path


def _tell_of_context(source: ModelSource, n_ctx: int) -> None:
    """Notes on a context that changes what the model makes of texts."""
    if n_ctx > source.n_ctx_train and not source.has_encoder:
        note(
            f"the context of {n_ctx} tokens is longer than the {source.n_ctx_train} that {source.name} was "
            "trained on, and the model makes little sense of more"
        )
    if source.n_ctx_short is not None and n_ctx > source.n_ctx_short:
        note(
            f"the context of {n_ctx} tokens is above the {source.n_ctx_short} of {source.name} before longrope: all "
            "texts, short ones too, take the long factors, as in llama.cpp (transformers takes them for longer texts "
            f"alone); n_ctx (--ctx) {source.n_ctx_short} keeps the short ones"
        )


def _loaded(kind: type[Model], source: ModelSource, given: dict[str, Any]) -> Model:
    """Load a model that was pickled (Model.__reduce__)."""
    return kind(source, **given)
