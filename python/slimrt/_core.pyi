"""The native core. Errors are those of slimrt.errors; OSError and ValueError where Python users expect them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimrt.info import Info, LayerOptions, Plan

__version__: str

class _Ops:
    """Single kernels over arrays: for tests and benchmarks, and to fold for the rounding that will happen. isa: of
    backends(). ValueError: shapes that do not match, an unknown isa or type."""

    def unfold(
        self, x: NDArray[np.float32], width: int, stride: int, padding: int, rows: int, isa: str
    ) -> NDArray[np.float32]:
        """What a convolution multiplies with: of x [n, d] float32 [rows, width * d], where row i is the rows
        i * stride - padding and width - 1 more of x side by side, zeros beyond x."""
    def attention_of_terms(
        self,
        scores: Sequence[Mapping[str, Any]],
        values: Sequence[Mapping[str, Any]],
        n_heads: int,
        n_fresh: int,
        scale: float,
        window: int,
        isa: str,
        n_threads: int = 1,
        relative_bias: NDArray[np.float32] | None = None,
        causal: bool = True,
        score_cap: float = 0.0,
        sinks: NDArray[np.float32] | None = None,
        lse: NDArray[np.float32] | None = None,
        sparse_threshold: float = 0.0,
        sparse_delta: float = 0.0,
        keeps_means: bool = False,
    ) -> list[NDArray[np.float32]]:
        """Attention of one sequence over one or two terms of scores and of values: float32 [n_fresh, n_heads * dim]
        for each term of values.

        A term says rows (float32 [T, width], the last n_fresh not stored), type (of the stored ones), stored_heads,
        heads and dim; one of scores also q, and where wanted row_scale, factors [T, 1], bias, and table with n_rot and
        interleaved. window: 0 for none. relative_bias: float32 [n_heads, n], added to scores by a row's distance from
        its query; its last column is for the query's own token. Not causal: the fresh rows are queries only, they see
        all stored rows, and the middle column (n // 2) is for distance 0. score_cap c > 0: a score s is c tanh(s / c),
        before the bias. sinks: float32 [n_heads], scores in the denominator without a value. lse [n_fresh, n_heads]:
        combines the result with the terms' `out` by log-sum-exp, and returns the new one last. keeps_means: of whole
        stretches of the values' rows, for a budget to read.
        """
    def __getattr__(self, name: str) -> Any:
        """The others: csrc/bindings/ops.cpp, attention_ops.cpp and sampler.cpp."""

ops: _Ops

class GgufFile:
    """A validated, memory-mapped GGUF file, or the first of several shards, for all of them. Raises ModelFormatError,
    UnsupportedError, OSError. Not tensors: only the metadata is looked at, in this one.
    any_type: tensors of types that slimrt does not read are in tensor_list() too, and nowhere else."""

    def __init__(self, path: str, *, tensors: bool = True, any_type: bool = False) -> None: ...
    @property
    def path(self) -> str:
        """As it was given."""
    @property
    def paths(self) -> list[str]:
        """All files of the model: itself and the shards that belong to it."""
    def keys(self) -> list[str]: ...
    def value(self, key: str, /) -> Any:
        """int, float, bool, str, or a list of these. KeyError when there is none."""
    def fields(self, prefix: str = "") -> dict[str, tuple[int, int | None, Any]]:
        """Of the keys that begin so, in the order of the file: GGUF's numbers of the type and of an array's elements,
        and the value with nothing lost: int, float, bool, bytes, list[bytes], or an array of the file's own type."""
    def tensors(self) -> dict[str, tuple[str, tuple[int, int]]]:
        """name -> (type name such as "q8_0", (rows, cols))."""
    def tensor_list(self) -> list[tuple[str, int, tuple[int, ...], int]]:
        """In the order of the file: name, ggml's number of the type, sizes (innermost first), position in bytes()."""
    def tensor_bytes(self, name: str, /) -> int: ...
    def read(self, name: str, /) -> NDArray[np.float32]:
        """The tensor unpacked to float32 [rows, cols]."""
    def bytes(self) -> NDArray[np.uint8]:
        """All of the file, and of its other shards behind it, read-only, where it is mapped: what a path leads to later
        may be another file."""
    def move_to_huge_pages(self, first: int, bytes: int) -> bool:
        """Puts a copy of these bytes, whole huge pages of 2 MiB (or up to the end), in such pages of this process's
        memory where the file is mapped, for engines that have it too. False, and nothing has changed: the system
        cannot, or there is no memory."""
    def require_unchanged(self) -> None:
        """OSError: the file was written to or cut since it was opened."""

class Engine:
    """A loaded model with its cache. Token rows go in by sequence, logits come out.

    cache: a mode name for all layers or one a layer ("kv", "k", "k+r", "v", "x", "xr", "kivi", "lowrank"); "auto": what
        the file says, else kv.
    cache_type_k, cache_type_v: element type of k (or the whole row) and of v, for all layers or one a layer; "auto":
        what the file says of a layer whose mode is the file's, else f16. Of modes whose rows age cache_type_k may be
        levels (csrc/cache/levels.h); cache_type_v is then "auto", the same, or a type for V in all of them.
    rank, residual_type: width and type of the residual of mode "k+r", for all layers or one a layer; -1 and "auto":
        what the file says. Without either there is no default: CacheUnsupportedError, ValueError.
    derived: tensors the mode needs and the file lacks, by name ("blk.0.attn_kv.weight": W_KV [d_v, d_k] f32); vectors
        as [n] or [1, n].
    sparse_threshold: softmax weight of each head that decoding may leave unread: rows of V (mode kv), or rows that all
        heads read (k, k+r, x, xr, latent), for which their mean stands, are skipped whose weights add up to no more.
        sparse_delta: the same of the latter, whose weights' squares add up to at most its square; -1: what the file
        says. ValueError: both; CacheUnsupportedError: a layer has no such rows.
    cross: of a model with an encoder, "kv", "k", "e", "e1" or "auto" (e where a row of the encoder's output is no wider
        than K and V together, else kv); cross_type: of its rows, "auto": what the file says, else f16. ValueError
        without an encoder.
    n_source: most rows of one encoder output; 0: the model's own.
    n_ctx: positions each sequence may hold; n_seqs: the most sequences of a step. cache_tokens: tokens whose rows the
        cache holds, of all sequences together, at least n_ctx; 0: n_ctx for each of n_seqs.
    device: "cpu", "cuda" or "cuda:N", or a list in the order of layers: "cpu,cuda=12", the last 12 on cuda;
        "cuda:0,cuda:1", as many as each has free memory for. UnsupportedError: there is no such device, or layers that
        need each other would be apart.
    memory_limit: bytes, or 0 for what the device has available.
    """

    def __init__(
        self,
        file: GgufFile | str,
        *,
        n_ctx: int = 0,
        n_seqs: int = 1,
        cache_tokens: int = 0,
        n_batch: int = 512,
        n_threads: int = 0,
        cache: str | Sequence[str] = "auto",
        cache_type_k: str | Sequence[str] = "auto",
        cache_type_v: str | Sequence[str] = "auto",
        rank: int | Sequence[int] = -1,
        residual_type: str | Sequence[str] = "auto",
        sparse_threshold: float = 0.0,
        sparse_delta: float = 0.0,
        cross: str = "auto",
        cross_type: str = "auto",
        n_source: int = 0,
        derived: Mapping[str, NDArray[np.float32]] | None = None,
        device: str = "cpu",
        memory_limit: int = 0,
    ) -> None: ...
    def info(self) -> Info:
        """architecture, d_model, n_layers, n_heads, n_kv_heads, head_dim, n_vocab, n_ctx, n_ctx_train, n_batch,
        n_seqs, cache_tokens, n_threads, sparse_threshold, sparse_delta, device, name, d_ff, layers: list of {layer,
        mode, type, rank, residual_type, bytes_per_token, max_rows, bytes_held, v_heads}: type of k, v or x ("f16+q8": k
        and v; of modes whose rows age their levels), rank 0 and residual_type "" where there is no residual;
        bytes_per_token: what a token leaves behind, in the end; max_rows: the most rows of a sequence that are kept,
        n_ctx, or what a sliding window and the longest step need; bytes_held: of the rows of a sequence of n_ctx
        tokens; v_heads: KV heads that keep V beside K. parts: list of {device, begin, end, bytes}: who has which
        layers; device: the head's first.

        encoder, cross: None without an encoder; else {n_layers, n_source, inputs ("tokens", "mel" or "audio"), n_inputs
        (numbers a row, 0 for tokens)} and {mode, type, bytes_per_row (in all layers)}, and decoder_start_token_id."""
    def memory(self) -> dict[str, int]:
        """Bytes allocated: weights, derived, cache, scratch, total; and mapped (weights read in place from the
        file) and cache_bytes_per_token: what a token leaves behind in all layers, at any n_ctx."""
    def sparse_counts(self) -> dict[str, int]:
        """rows: of all heads and layers, that decoding with a budget came by; skipped: of these."""
    def new_sequence(self) -> int: ...
    def free_sequence(self, sequence: int) -> None: ...
    def fork(self, sequence: int) -> int:
        """A copy that shares full blocks (copy on write)."""
    def thin(self, sequence: int, first_blocks: int, last_blocks: int) -> int:
        """A fork that shares so many of the first and of the last blocks of 32 tokens and lacks the rows between them:
        its length is that of what it has, and tokens that are appended have the positions that would follow the whole
        sequence. It cannot be saved. ValueError: nothing is between these blocks. UnsupportedError: a cache mode other
        than kv, a sliding window, an encoder."""
    def truncate(self, sequence: int, length: int) -> None:
        """ValueError: it has fewer tokens, or can_truncate() is false."""
    def can_truncate(self, sequence: int, length: int) -> bool:
        """Whether all rows that a text of this length looks back to are still there, behind a window: always after an
        append of no more than n_batch tokens, and for 0."""
    def length(self, sequence: int) -> int: ...
    def has_room(self, growth: Sequence[tuple[int, int]]) -> bool:
        """Whether the (sequence, tokens) could be appended together: each within n_ctx, and all within the blocks that
        are free, of 32 tokens, shared ones counted once. ValueError: an unknown sequence, or one that is listed twice.
        """
    def free_blocks(self) -> int:
        """Blocks of 32 tokens that no sequence holds. Layers with a sliding window, and rows that age, have blocks of
        their own: this is of those of which the smallest share is free now, as n_blocks() and blocks() are."""
    def n_blocks(self) -> int:
        """Blocks that there are, free or not: see free_blocks()."""
    def blocks(self, sequence: int) -> tuple[int, int]:
        """Blocks that a sequence holds, and of these the ones that no other shares, which it alone could give back: see
        free_blocks()."""
    def tile(self, sequence: int, length: int) -> None:
        """Lengthens a sequence with copies of its own rows, in turn, without computing anything: a long context for
        measurements. ValueError unless both lengths are multiples of 32."""
    def encode(
        self,
        items: Sequence[
            tuple[int, NDArray[np.int32] | NDArray[np.float32]]
            | tuple[int, NDArray[np.int32] | NDArray[np.float32], NDArray[np.int32]]
        ],
        *,
        states: bool = False,
        encoded: bool = False,
        on_progress: Callable[[int, int], object] | None = None,
    ) -> list[NDArray[np.float32]] | None:
        """Encodes a source for each of several empty sequences; forks share it, and the GIL is released.

        A source is int32 ids [n] where the encoder reads tokens; else, or instead, float32 rows [n, n_inputs] (of
        tokens their embeddings, [n, d_model]). encoded: the rows are an encoder's output, [n, d_model]. An item may end
        in positions, int32 [n], of tokens or embeddings that have gaps between them (rows that are masked elsewhere):
        ascending and below n_source; else they are 0, 1, 2 ... Where the encoder reads series (architecture chronos2) a
        source is a group of them: each begins where positions do not ascend, and nothing is kept. With states returns
        what each became, float32 [rows, d_model], else None. on_progress as for append; an exception leaves the
        sequences without a source.
        ValueError: no encoder, a source that is too short or of another shape, an id outside the vocabulary, positions
        that do not ascend or are not as many, a sequence listed twice or that has a source or tokens;
        ContextOverflowError: more rows than n_source, or positions beyond it.
        """
    def append(
        self,
        items: Sequence[tuple[int, NDArray[np.int32]]],
        *,
        all_logits: bool = False,
        outputs: Sequence[int] | None = None,
        states: bool = False,
        out: NDArray[np.float32] | None = None,
        on_progress: Callable[[int, int], object] | None = None,
        tokens: bool = False,
        candidates: bool = False,
    ) -> NDArray[np.float32]:
        """Runs the tokens of several sequences in chunks of at most n_batch tokens; the GIL is released.

        Returns logits float32 [rows, n_vocab], with states what the head would read of them, [rows, d_model]: a row for
        each item's last token, with all_logits a row for every token, or with outputs for so many of each item's last
        tokens (0: none, -1: all), items one after another. out: an array of at least so many rows to write to, whose
        first rows are returned. tokens: of logits a device tells the likeliest token, int32 [rows,
        1] to be viewed as such; ModelFormatError where they are NaN or infinite. candidates: a device tells the
        min(256, n_vocab) largest logits, of equal ones those of the lowest ids, and then their ids, which ascend, to be
        viewed as int32; UnsupportedError where the head is on the CPU.

        on_progress(done, total) is called with the GIL after each chunk and a few times a second within a long one; an
        exception it raises stops the work, the sequences are truncated to where they stood before, and the exception
        goes on. A sequence whose rows from before are gone behind a window keeps the chunks that were done instead: see
        length() and can_truncate(). Signals (Ctrl-C) are checked at the same times. Before anything is computed:
        ContextOverflowError if it does not fit, ValueError for an id outside the vocabulary, outputs that items do not
        have, an out of another shape, or beside an encoder for a sequence without a source.
        """
    def sample(
        self,
        logits: NDArray[np.float32],
        samplers: Sequence[Sampler],
        *,
        masks: NDArray[np.uint32] | None = None,
        logprobs: Sequence[int] | None = None,
        joint_from: Sequence[int] | None = None,
    ) -> list[_Choice | Exception]:
        """A token for each row of logits (rows, vocab), on all threads: what each sampler would choose alone.

        masks: (rows, words), as Sampler.sample has them. logprobs: for each row how many of the likeliest to report,
        with the chosen one, as token_logprobs does of the row as it came; 0: None instead. joint_from: for each row the
        id from which on tokens are one choice, as Whisper's times are: where they are likelier together than the
        likeliest one before them, it is one of them; logprobs are then of what this and the mask leave; -1: none is. A
        row that Sampler.sample would refuse has that error in place of its choice; the others have moved on.

        Raises:
            ValueError: arguments that do not go together, or a sampler that is listed twice.
        """

    def sample_candidates(
        self, candidates: NDArray[np.int32], samplers: Sequence[Sampler]
    ) -> list[_Choice | Exception]:
        """What sample would choose, from append's candidates in place of logits, as int32.

        Raises:
            ValueError: not enough candidates (Sampler.n_deciding). Others as sample.
        """

    def log_normalisers(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """log(sum(exp(row))) of each row of logits (rows, vocab), on all threads: float64 (rows,), summed in float32;
        -inf where all logits are, NaN where one is NaN or +infinity."""
    def likeliest(self, logits: NDArray[np.float32], count: int) -> NDArray[np.int32]:
        """Ids of the `count` largest logits above -infinity of each row (rows, vocab), on all threads: int32 (rows,
        min(count, vocab)), largest first, of equal ones the lowest id first; -1 where there are fewer. For rows without
        NaN."""
    def alignment(
        self,
        sequence: int,
        tokens: NDArray[np.int32],
        heads: Sequence[tuple[int, int]],
        *,
        on_progress: Callable[[int, int], object] | None = None,
    ) -> NDArray[np.float32]:
        """Softmax weights of cross-attention's (layer, head)s, float32 [heads, tokens, rows of the source], as these
        tokens are appended to a sequence, which is then truncated to its length before; where that raises, as truncate,
        it keeps them. ValueError: the sequence has no source, or there is no such head; others as append.
        """
    def attention_inputs(
        self, ids: NDArray[np.int32], *, on_progress: Callable[[int, int], object] | None = None
    ) -> NDArray[np.float32]:
        """The input of every layer's attention (after its norm, if it has one) for one text: float32 [n_layers, n,
        d_model], for calibration. on_progress as for append.
        """
    def input_squares(
        self, ids: NDArray[np.int32], *, on_progress: Callable[[int, int], object] | None = None
    ) -> dict[str, tuple[NDArray[np.float64], NDArray[np.int64]]]:
        """Of each weight matrix but the output's that one text multiplies, by name: sums of squares of its input's
        columns [matrices, columns], and the number of rows [matrices]; a stack has a matrix for each expert or head.
        on_progress as for append.
        UnsupportedError: a layer is not on the CPU.
        """
    def save_sequence(self, sequence: int) -> NDArray[np.uint8]: ...
    def load_sequence(self, data: NDArray[np.uint8]) -> int:
        """A new sequence from saved rows. ModelFormatError when they are of another model or cache;
        ContextOverflowError: more tokens than n_ctx, or more rows that have aged, of a longer text that was cut."""
    def save_rows(self, sequence: int, begin: int) -> NDArray[np.uint8]:
        """The rows of the tokens from begin on, a multiple of 32; from 0 on as save_sequence. ValueError: another
        begin. UnsupportedError: beyond 0 where layers have a sliding window, or rows age."""
    def load_rows(self, sequence: int, data: NDArray[np.uint8]) -> None:
        """Saved rows to the end of a sequence, of the tokens before them. ValueError: it has more or fewer than begin.
        ModelFormatError when they are of another model or cache, or cut; ContextOverflowError: no room; nothing has
        changed then."""

_Logprobs = tuple[float, list[tuple[int, float]]]  # of a token, and of the likeliest ones with theirs
_Choice = tuple[int, _Logprobs | None]

class Sampler:
    """The choices of one text, for one thread at a time. A seed gives the same ones on every machine.

    In this order: mask and logit_bias; repeat_penalty (a logit above 0 is divided by it, another one multiplied),
    frequency_penalty (times the occurrences) and presence_penalty (subtracted), on the last repeat_last_n accepted
    tokens (-1: on all); DRY, on the last dry_penalty_last_n; top_n_sigma, top_k, typical_p, top_p, min_p, each on the
    softmax of what those before it left; XTC; temperature. Of equal tokens a filter takes that with the lower id first.
    temperature 0: the likeliest after the penalties. mirostat 2: the penalties, temperature, and in place of all
    filters a bound of the surprise, which sample() moves. Sources of each: csrc/engine/sampler.h and dry.h.

    dry_breakers: sequences of tokens that no repetition goes across.

    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        repeat_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_last_n: int = 64,
        seed: int = 0,
        logit_bias: Sequence[tuple[int, float]] = (),
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_penalty_last_n: int = -1,
        dry_breakers: Sequence[Sequence[int]] = (),
        top_n_sigma: float = 0.0,
        xtc_probability: float = 0.0,
        xtc_threshold: float = 0.1,
        mirostat: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
    ) -> None: ...
    def accept(self, tokens: Sequence[int]) -> None:
        """Note tokens that the text continues with, for penalties and DRY: the prompt's, then each that was chosen."""

    def n_deciding(self, n_vocab: int) -> int:
        """How many of the likeliest tokens of a row, of equal ones those with the lowest ids, decide the next choice if
        there is no mask; 0: all, or more than 256. With temperature 0 or top_k, and nothing that raises a logit."""

    def sample(self, logits: NDArray[np.float32], mask: NDArray[np.uint32] | None = None) -> int:
        """A token. mask: a bit for each, from the lowest of the first word on; 0 where it must not be chosen.

        Raises:
            ModelFormatError: a logit is NaN or +infinity.
            ValueError: no logits; all of them -infinity; or a mask or logit_bias for another vocabulary.
        """

def token_logprobs(logits: NDArray[np.float32], token: int, n: int = 0) -> _Logprobs:
    """Natural logarithms of probabilities, of a token and of the n likeliest ones. Errors as Sampler.sample."""

def plan(
    file: GgufFile | str,
    *,
    n_ctx: int = 0,
    n_seqs: int = 1,
    cache_tokens: int = 0,
    n_batch: int = 512,
    n_threads: int = 0,
    cache: str | Sequence[str] = "auto",
    cache_type_k: str | Sequence[str] = "auto",
    cache_type_v: str | Sequence[str] = "auto",
    rank: int | Sequence[int] = -1,
    residual_type: str | Sequence[str] = "auto",
    sparse_threshold: float = 0.0,
    sparse_delta: float = 0.0,
    cross: str = "auto",
    cross_type: str = "auto",
    n_source: int = 0,
    device: str = "cpu",
) -> Plan:
    """What Engine would allocate with the same arguments, to the byte, without reading a weight: the keys of
    Engine.memory() and of Engine.info(). Of tensors that are in no file yet it supposes float32, and static scales of
    rows (attn_kr_row.scale, attn_xr_row.scale) for the types q8, fp8_e4m3, q4, q3 and q2."""

def held(file: GgufFile | str, cache: str) -> dict[str, tuple[str, int]]:
    """What slimrt.core.held says. cache: a mode that is legal in all layers and needs no fold; errors as Engine."""

def resolve_layers(
    file: GgufFile | str,
    *,
    cache: str | Sequence[str] = "auto",
    cache_type_k: str | Sequence[str] = "auto",
    cache_type_v: str | Sequence[str] = "auto",
    rank: int | Sequence[int] = -1,
    residual_type: str | Sequence[str] = "auto",
    sparse_threshold: float = 0.0,
    sparse_delta: float = 0.0,
) -> list[LayerOptions]:
    """What each layer of self-attention would have, with what the file says and the defaults filled in; ValueError,
    UnsupportedError and ModelFormatError as Engine. Whether a mode is legal there is not looked at."""

def levels(mode: str, text: str) -> dict[str, Any]:
    """The fields of slimrt.core.Levels; of each level those of slimrt.core.Level. "": the usual ones. ValueError: no
    such text, or a mode whose rows do not age; UnsupportedError: an unknown mode or type."""

def cache_types() -> list[dict[str, Any]]:
    """The element types of cache rows, in the order they are shown: name (str), bits of an element, group (elements of
    a head that share a scale; 0: all of them) and scale_bytes (of one such scale; 0: no scales)."""

def modes(file: GgufFile | str) -> list[dict[str, Any]]:
    """The fields of slimrt.core.Mode for every mode of self-attention, then, with an encoder, of cross-attention."""

def attention_modes(
    *,
    d_model: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    n_rot: int,
    qk_norm: str,
    window: int = 0,
    cross: bool = False,
    type: str = "f16",
    rank: int = 0,
    residual_type: str = "f16",
    v_heads: int = 0,
    unrotated: bool = False,
    clamp: float = 0.0,
    layer_norm: bool = False,
    score_cap: float = 0.0,
    sinks: bool = False,
    latent: int = 0,
    norms_v: bool = False,
    v_is_k: bool = False,
) -> list[dict[str, Any]]:
    """The same for an attention of these sizes, with rows of these types."""

def plane_bytes(type: str, width: int, heads: int) -> int:
    """Bytes of a token in one plane of a row."""

def why_refused(name: str) -> str:
    """Why a model of this architecture (GGUF) or model type (Hugging Face) is not run, if that was decided; else ""."""

def architectures() -> list[dict[str, Any]]:
    """The fields of slimrt.core.Architecture for each."""

def cpu_info() -> dict[str, Any]:
    """isas (best first, those this machine runs), isa (chosen), default_threads, cache_bytes (of the last-level caches
    together), access_kinds (what access() says something of)."""

def cuda_devices() -> tuple[list[str], str]:
    """Names of the CUDA devices that can be used, and why there are none, or whose kernels are yet to be compiled by
    the driver ("": all is well)."""

def take_notes() -> list[str]:
    """What users should know of calls of any engine that succeeded, since the last call of this."""

def look_for_cublas_lt(files: list[str]) -> None:
    """Files that cuBLASLt may be besides where the system's loader looks; before a device multiplies first."""

def cublas_lt_library() -> str:
    """The file that CUDA devices multiply prompts with; "": their own kernels do, slower."""

def available_memory(device: str = "cpu") -> int:
    """Bytes free on a device; 0: unknown. UnsupportedError: there is no such device."""

def quantize(
    type: str, x: NDArray[np.float32], n_threads: int = 0, importance: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Rows [rows, cols] as blocks of "q4_0", "q2_k", "q3_k", "q4_k", "q5_k" or "q6_k": uint8 [rows, bytes of a row].
    importance [cols], about 1: what an element's squared error counts. The bytes are the same on every machine and for
    every n_threads. UnsupportedError: a value is not finite, or too large for f16 scales."""

def access(text: str = "") -> str:
    """What a text says of how to access memory, kind by kind: "f32=t0:4096,..."; without one, what engines opened from
    now on follow. See tune(). ValueError: it, or SLIMRT_ACCESS, says what there is not."""

def set_access(text: str) -> None:
    """What engines opened from now on follow, unless SLIMRT_ACCESS says it: "usual", or as in access(); kinds left out:
    as usual. It changes how long results take, never their bits. ValueError: there is no such access."""

def tune(kind: str, isa: str = "", n_threads: int = 0, seconds: float = 0.2) -> dict[str, Any]:
    """Tries ways to access memory with one of cpu_info()["access_kinds"] for about so many seconds: best (as in
    access()), gain (the usual one takes so many times as long; 1.0 where it is the best) and read_share (of the rate of
    a mere read that products then reach; 0.0 of rows). ValueError, WontFitError: no such kind; no memory for it."""

def huge_page_gain(file: GgufFile, n_threads: int = 0) -> float:
    """Reading a part of the file where it is mapped takes so many times as long as in huge pages (CPU time, median).
    WontFitError: no memory to measure with."""

def read_bandwidth(n_threads: int = 0, megabytes: int = 512) -> float:
    """Measured read bandwidth of main memory, GB/s."""
