"""The source of a model: a GGUF file, or a Hugging Face directory or whisper.cpp file that is converted to one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from slimrt import core
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.info import Plan
from slimrt.modelfile.hub import located, title, whispers_name
from slimrt.modelfile.settings import PREFIX, SUPPRESSED, Settings
from slimrt.plumbing import progress
from slimrt.plumbing.arguments import whole
from slimrt.plumbing.files import is_ggml_bin
from slimrt.plumbing.notes import note
from slimrt.tokenizer import embedded
from slimrt.tokenizer.gguf import read_fields
from slimrt.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from slimrt.modelfile.gguf import ModelData

CALIBRATION_CHUNK = 1024  # tokens of a run of a calibration text, whose activations of all layers are in memory at once
DEFAULT_N_CTX = 4096
MEASURED_ROWS = 2048  # tokens of a calibration text whose rounding is measured
WHITE_ROWS = 512  # random inputs in place of a text's tokens
KINDS = {
    "text": "a language model",
    "text2text": "an encoder-decoder of texts (T5, BART and their kin)",
    "whisper": "a Whisper model",
    "moonshine": "a Moonshine model",
    "chronos": "a Chronos model",
    "chronos-bolt": "a Chronos-Bolt model",
    "chronos-2": "a Chronos-2 model",
}
"""The kinds of models, and what messages call them."""
_POOLINGS = {1: "mean", 3: "last"}  # GGUF's numbers


class ModelSource:
    """A model's files, opened without reading weights.

    Args:
        path: a GGUF file (converted or not), a Hugging Face directory (config.json and safetensors), whisper.cpp's
            ggml-*.bin, or a repository on the hub that holds one of these: "hf://org/repo[:file or type][@revision]",
            also without "hf://" (slimrt.modelfile.hub). A directory or ggml-*.bin is converted to a GGUF file in
            slimrt's cache directory, so the first time is slow.
        show_progress: show bars on stderr; None: if it is a terminal.

    Attributes:
        path: as given, or the local path of what was downloaded. gguf: the GGUF file to load. file: the same, open; all
            properties are read from it, since the file at the path may be replaced.
        name: display name of the model.

    Raises:
        FileNotFoundError: there is nothing at path. OSError: it cannot be read.
        ModelFormatError, UnsupportedError: a broken file, or a directory or ggml file that cannot be converted; a URL.
        DownloadError: the repository, or the wanted file in it, cannot be downloaded.
    """

    def __init__(self, path: str | os.PathLike[str], *, show_progress: bool | None = None):
        if not os.fspath(path):
            raise FileNotFoundError("which model? its path is empty")
        self.path = located(os.fsdecode(path), show_progress)
        self.name = title(self.path)
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path}: no such file or directory{whispers_name(self.path.name)}")
        self._absolute = os.path.abspath(self.path)  # for pickling: the current directory may change or differ
        self.gguf = self.path
        if self.path.is_dir() or is_ggml_bin(self.path):
            from slimrt.modelfile.reading import cached_gguf

            self.gguf = Path(cached_gguf(self.path, progress=progress.wanted(show_progress), on_warning=note))
        self.file = core.GgufFile(str(self.gguf))
        if "slimrt.text_part" in self.file.keys():
            note(str(self.file.value("slimrt.text_part")))

    @classmethod
    def of(cls, path: str | os.PathLike[str] | ModelSource, show_progress: bool | None) -> ModelSource:
        """The argument itself if it is a ModelSource, else the source at that path."""
        return path if isinstance(path, ModelSource) else cls(path, show_progress=show_progress)

    def __reduce__(self) -> tuple[Callable[[str, str], ModelSource], tuple[str, str]]:
        """Pickles the path and fingerprint; unpickling opens the file again, which must be the same."""
        return _reopened, (self._absolute, self.fingerprint)

    @cached_property
    def kind(self) -> str:
        """A key of KINDS; "text": it has no encoder."""
        file = self.file
        if "slimrt.chronos.kind" in file.keys():
            kind = file.value("slimrt.chronos.kind")
            return f"chronos-{kind}" if kind in ("bolt", "2") else "chronos"
        named = {"none": "text", "tokens": "text2text", "series": "chronos-2"}
        return named.get(self._encoder_reads, self.architecture)

    @property
    def _encoder_reads(self) -> str:
        """The encoder's inputs (core.Architecture.encoder)."""
        known = core.architectures()
        return known[self.architecture].encoder if self.architecture in known else "none"

    @property
    def architecture(self) -> str:
        """GGUF's name of it."""
        return str(self.file.value("general.architecture"))

    @property
    def pooling(self) -> str:
        """How vectors of texts are pooled: as the file says, "mean" if it says nothing.

        Raises:
            UnsupportedError: in a way that slimrt does not have.
        """
        key = f"{self.architecture}.pooling_type"
        said = self.file.value(key) if key in self.file.keys() else 1
        if not isinstance(said, int) or said not in _POOLINGS:
            raise UnsupportedError(
                f"{self.name} was made for another pooling than slimrt has ({key} is {said}): in Python, "
                "embed(..., pooling='mean') or 'last' takes another, if its vectors are of use so"
            )
        return _POOLINGS[said]

    @property
    def described(self) -> str:
        """What messages call such a model. Not by its architecture: NLLB is an "mbart" to GGUF, and Marian a "bart"."""
        return KINDS[self.kind]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer: a directory's own, else that of the GGUF file.

        Raises:
            UnsupportedError: there is none, or one of a kind that is not supported.
        """
        file = self.file
        kind = file.value("tokenizer.ggml.model") if "tokenizer.ggml.model" in file.keys() else "no_vocab"
        # That of a translation model is as its file says: its tokenizer.json puts some language around a text.
        own = self.path.is_dir() and (self.path / "tokenizer.json").is_file() and kind != embedded.MODEL
        if "slimrt.chronos.kind" in file.keys():
            raise UnsupportedError(
                f"{self.name} reads no texts, it forecasts series: use predict_quantiles() or forecast"
            )
        if not own and kind == "no_vocab":
            missing = "tokenizer.json" if self.path.is_dir() else "tokenizer in its metadata"
            raise UnsupportedError(f"{self.name} has no {missing}: it can be used from Python with token ids only")
        if own:
            return Tokenizer(self.path)
        return Tokenizer.from_gguf_fields(read_fields(file))

    @cached_property
    def tokenizer_if_any(self) -> Tokenizer | None:
        """The tokenizer, or None: a model without one still works on token ids."""
        try:
            return self.tokenizer
        except UnsupportedError:
            return None

    def prompt_ids(self, text: str) -> list[int]:
        """The token ids of a prompt; of an empty one BOS alone, if the model has it."""
        ids = self.tokenizer.encode(text)
        return ids or ([self.tokenizer.bos_id] if self.tokenizer.bos_id is not None else [])

    @cached_property
    def defaults(self) -> Plan:
        """core.plan with default arguments, for the sizes of the model."""
        return core.plan(self.file)

    @cached_property
    def calibrating(self) -> int:
        """Most bytes while a calibration text is run (folding/calibrate.py): the model with rows of float32 for a
        chunk, and the inputs of its layers."""
        n_ctx = min(CALIBRATION_CHUNK, self.n_ctx_train)
        plan = core.plan(self.file, n_ctx=n_ctx, cache="kv", cache_type_k="f32", cache_type_v="f32")
        return plan["mapped"] + plan["total"] + 4 * n_ctx * plan["n_layers"] * plan["d_model"]

    @cached_property
    def settings(self) -> Settings:
        """The model's own generation settings. ModelFormatError: the file's are broken."""
        said = any(key.startswith((PREFIX, SUPPRESSED)) for key in self.file.keys())
        return Settings.of(self.file, int(self.defaults["n_vocab"])) if said else Settings()

    @cached_property
    def owners(self) -> list[int]:
        """For each layer of the decoder, the layer whose rows it reads, itself or an earlier one."""
        return [layer["owner"] for layer in core.resolve_layers(self.file)]

    def modes(self, *, cross: bool = False) -> dict[str, core.Mode]:
        """The modes of self-attention, or of cross-attention, of this model, by name."""
        return {mode.name: mode for mode in self._modes if mode.cross == cross}

    @cached_property
    def _modes(self) -> tuple[core.Mode, ...]:
        return core.modes(self.file)

    @cached_property
    def baseline(self) -> str:
        """The mode with which others are compared (core.baseline)."""
        return core.baseline(self.file)

    @cached_property
    def model(self) -> ModelData:
        """Metadata and tensors, for folding."""
        from slimrt.modelfile.gguf import read_gguf

        return read_gguf(self.file)

    @property
    def kv_width(self) -> int:
        """Columns of K, and of V, in a layer."""
        return int(self.defaults["n_kv_heads"]) * int(self.defaults["head_dim"])

    @property
    def has_encoder(self) -> bool:
        """Whether the model has an encoder."""
        return self.defaults["encoder"] is not None

    @property
    def has_decoder(self) -> bool:
        """Whether the model has a decoder, which is what a cache is for; else its encoder is all."""
        return self._encoder_reads != "series"

    @property
    def blocks(self) -> str:
        """Prefix of the names of the decoder's tensors, before the layer's number."""
        return "dec.blk." if self.has_encoder else "blk."

    @property
    def says_cache(self) -> bool:
        """Whether the file was converted for modes of self-attention."""
        return "slimrt.cache.modes" in self.file.keys()

    @property
    def says_cross(self) -> bool:
        """Whether the file was converted for a mode of cross-attention."""
        return "slimrt.cache.cross" in self.file.keys()

    @property
    def n_ctx_train(self) -> int:
        """Tokens of context that the model was trained on."""
        return int(self.defaults["n_ctx_train"])

    @property
    def n_ctx_short(self) -> int | None:
        """The largest context with which longrope takes its short factors; None: the model has no longrope."""
        if "rope_factors_long.weight" not in self.file.tensors():
            return None
        key = f"{self.architecture}.rope.scaling.original_context_length"
        return int(self.file.value(key)) if key in self.file.keys() else self.n_ctx_train

    @cached_property
    def n_ctx_limit(self) -> int | None:
        """The number of learned positions, which bounds the context; None: the model has none."""
        tensors = self.file.tensors()
        learned = not {"position_embd.weight", "dec.position_embd.weight"}.isdisjoint(tensors)
        return self.n_ctx_train if learned else None

    def n_ctx(self, asked: int = 0) -> int:
        """The context to use: `asked`, or if 0 the trained one, at most DEFAULT_N_CTX.

        Raises:
            ValueError: it is negative. UnsupportedError: one is given, and there is no decoder.
        """
        asked = whole("n_ctx", asked)
        if asked < 0:
            raise ValueError(f"n_ctx must not be negative, got {asked}")
        if asked and not self.has_decoder:
            raise UnsupportedError(
                f"{self.name} has no decoder, and so no context: leave out n_ctx (--ctx). n_source (--n-source) says "
                "how many rows the encoder takes"
            )
        return asked or min(self.n_ctx_train, DEFAULT_N_CTX)

    def more_context(self, n_ctx: int) -> str:
        """A phrase for messages on a text that does not fit: whether a larger context than n_ctx is possible."""
        if self.n_ctx_limit is not None and n_ctx >= self.n_ctx_limit:
            return "the model has positions for no more"
        if n_ctx >= self.n_ctx_train:
            return f"the model was trained on {self.n_ctx_train}, and makes little sense of more"
        return f"a larger context (n_ctx, --ctx) makes room, up to the trained {self.n_ctx_train}"

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the GGUF file: SHA-256 of its size, its first MiB and 256 pages spread over the rest.

        Hashing all of a large model would take longer than loading it, and a retrained, requantised or converted file
        differs in all of these pages.
        """
        data = self.file.bytes().data
        digest = hashlib.sha256(str(len(data)).encode())
        digest.update(data[: 1 << 20])
        for i in range(256):
            digest.update(data[len(data) * i // 256 :][:4096])
        return digest.hexdigest()


def _reopened(path: str, fingerprint: str) -> ModelSource:
    """Open a source that was pickled. ModelFormatError: the file has changed; others as ModelSource."""
    source = ModelSource(path)
    if source.fingerprint != fingerprint:
        raise ModelFormatError(f"{path}: not the model that was pickled: the file has changed since, load it anew")
    return source
