# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory (config.json, safetensors, tokenizer) as GGUF metadata and tensors.

Nothing is guessed: a tensor that the family does not name, a config value that changes the mathematics and is not
handled, a missing tensor or a wrong shape are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf.constants import GGUFValueType, LlamaFileType
from gguf.gguf_writer import GGUFValue

from slimrt.errors import UnsupportedError
from slimrt.modelfile.gguf import F32, ModelData, Tensor, array, boolean, float32, string, uint32
from slimrt.modelfile.hf.config import Config, Sizes, values_of
from slimrt.modelfile.hf.families import ACTIVATIONS
from slimrt.modelfile.hf.family import Source
from slimrt.modelfile.hf.generation_fields import generation_fields
from slimrt.modelfile.hf.layout import Layout
from slimrt.modelfile.hf.multimodal import TextPart
from slimrt.modelfile.hf.peft import CONFIG, Adapted, Peft
from slimrt.modelfile.hf.pooling import pooling_fields
from slimrt.modelfile.hf.rope import rope_fields
from slimrt.modelfile.hf.safetensors_files import DTYPES, Alias, Checkpoint
from slimrt.modelfile.hf.seq2seq_fields import text2text_fields
from slimrt.modelfile.hf.vocabulary import vocabulary_fields
from slimrt.modelfile.hf.windows import window_fields
from slimrt.modelfile.hub import title
from slimrt.modelfile.sharing import SHARING, sharing_fields


def read_hf(directory: Path, adapters: Sequence[Peft] = ()) -> tuple[ModelData, list[str]]:
    """Return the model in a Hugging Face directory, with adapters merged in, and warnings; tensor data stays on disk
    until asked for.

    Raises:
        ModelFormatError: a file is missing, broken, or contradicts config.json; an adapter of another model.
        UnsupportedError: an unknown model type, or something that changes the mathematics and is not handled.
    """
    config = Config.of(directory)
    untied, family = _untied(config, _embedded(config, Checkpoint(directory)), adapters), config.family
    adapted = Adapted(untied, adapters, family.head, family.conv1d)
    part = TextPart(adapted, config.wrapped_in)
    for adapter, places in adapted.changes:
        _refuse(config, part, adapter, places)
    model = read_tensors(config, part, title(directory.resolve()))
    settings, unapplied = _settings(config, model.metadata)
    vocabulary, warnings = vocabulary_fields(directory, config.family.arch, Sizes.of(config).v)
    if part.note:
        warnings, vocabulary["slimrt.text_part"] = [*warnings, part.note], string(part.note)
    pooling, unpooled = pooling_fields(directory, config.family.arch)
    if "slimrt.chronos.kind" in model.metadata:
        warnings = []  # a series is no text: it needs no tokenizer
    if (directory / CONFIG).is_file() and not any(directory.samefile(one.directory) for one in adapters):
        warnings = [*warnings, f"the adapter in {directory} is not merged: slimrt convert --lora {directory} does it"]
    return model.with_metadata(settings | pooling | vocabulary), warnings + unapplied + unpooled


def _embedded(config: Config, checkpoint: Checkpoint) -> Checkpoint | Alias:
    """The weights with the token embedding among them, where the files hold it as a decoder's tied head alone: of two
    names of one matrix safetensors' save_model() keeps the first in the alphabet."""
    family, (module, _) = config.family, config.family.outside["token_embd"]
    if not (family.head and config.get("tie_word_embeddings")) or len(family.stacks) > 1:
        return checkpoint
    head = next((name for name in checkpoint.entries if _is(name, family.head)), None)
    if head is None or any(_is(name, module) for name in checkpoint.entries):
        return checkpoint
    around = head.removesuffix(f"{family.head}.weight")
    return Alias(checkpoint, f"{around}{family.stem}{module}.weight", head)


def _untied(config: Config, checkpoint: Checkpoint | Alias, adapters: Sequence[Peft]) -> Checkpoint | Alias:
    """The weights with a decoder's head among them, if that is the token embedding: PEFT changes one where tokens are
    looked up, and the other where logits are computed. If the two are the same afterwards, one is stored."""
    family = config.family
    if not adapters or not (family.head and config.get("tie_word_embeddings")) or len(family.stacks) > 1:
        return checkpoint
    embeddings = [name for name in checkpoint.entries if _is(name, family.outside["token_embd"][0])]
    if len(embeddings) != 1:
        return checkpoint
    head = next((name for name in checkpoint.entries if _is(name, family.head)), None)
    if head and not np.array_equal(checkpoint.elements(head), checkpoint.elements(embeddings[0])):
        return checkpoint  # which Layout refuses
    config.family = replace(family, head_decides=True)
    return checkpoint if head else Alias(checkpoint, f"{family.head}.weight", embeddings[0])


def _refuse(config: Config, part: TextPart, adapter: Peft, places: Mapping[str, str]) -> None:
    """UnsupportedError: an adapter changes what is left out alone, the embedding of an encoder-decoder, which is more
    than that, or ternary weights."""
    family = config.family
    if part.names.isdisjoint(places):
        raise UnsupportedError(f"{adapter.directory} changes nothing of {part.note}")
    if len(family.stacks) > 1 and (config.get("tie_word_embeddings") or family.copies):
        for module in (family.outside["token_embd"][0], *family.copies):
            if name := next((name for name in places if _is(name, module)), None):
                raise UnsupportedError(
                    f"{adapter.directory} changes '{name}', which is in several places of this model: PEFT changes it "
                    "in one of them, and one matrix cannot be both"
                )
    for module in (theirs for ours, (theirs, _) in family.layer.items() if ours in family.ternary):
        if name := next((name for name, own in places.items() if _is(name, module) and adapter.adds_to(own)), None):
            raise UnsupportedError(
                f"{adapter.directory} changes '{name}', which becomes ternary: what was trained beside it would be "
                "rounded away"
            )


def _is(name: str, module: str) -> bool:
    """Whether a tensor is a module's weight, whatever is around the module."""
    return f".{name}".endswith(f".{module}.weight")


def read_tensors(config: Config, checkpoint: Source, name: str) -> ModelData:
    """Return a model without its vocabulary: what `config` describes, from the tensors that `checkpoint` holds.

    Raises:
        ModelFormatError, UnsupportedError: they do not fit each other.
    """
    sizes = Sizes.of(config)
    with values_of(config.path):
        metadata = _metadata(config, sizes, name)
    if config.family.stored:
        checkpoint = config.family.stored(checkpoint)
    tensors = list(Layout(config, sizes, checkpoint).tensors())
    if config.family.rope:
        with values_of(config.path):
            family, windows = config.family, sizes.head_dim if config.family.window_rope else 0
            rope, more = rope_fields(config.values, sizes.rotating_dim, family.rope_aliases, windows=windows)
        metadata |= {f"{config.family.arch}.{key}": value for key, value in rope.items()}
        tensors += more
    metadata |= _file_type(tensors)
    return ModelData(metadata, {tensor.name: tensor for tensor in tensors})


def _file_type(tensors: list[Tensor]) -> dict[str, GGUFValue]:
    """What the file says of its weights: the type of the largest that is not float32."""
    smaller = [tensor for tensor in tensors if tensor.type != F32]
    if not smaller:
        return {"general.file_type": uint32(int(LlamaFileType.ALL_F32))}
    kind = max(smaller, key=lambda tensor: tensor.nbytes).type.name
    names = (
        name
        for name in (f"MOSTLY_{kind}", f"MOSTLY_{kind}_S", f"MOSTLY_{kind}_MOE")
        if name in LlamaFileType.__members__
    )
    said = {"general.file_type": uint32(int(LlamaFileType[next(names, "GUESSED")]))}
    return said if kind in DTYPES else said | {"general.quantization_version": uint32(2)}


def _of_layers(numbers: list[int]) -> GGUFValue:
    """One number where all layers have the same."""
    return uint32(numbers[0]) if len(set(numbers)) == 1 else array(numbers, GGUFValueType.UINT32)


def _metadata(config: Config, sizes: Sizes, name: str) -> dict[str, GGUFValue]:
    arch = config.family.arch
    eps_key, eps = config.family.norm_eps
    fields = {
        "context_length": uint32(sizes.ctx),
        "embedding_length": uint32(sizes.d),
        "block_count": uint32(sizes.n_layers),
        "feed_forward_length": _of_layers([sizes.in_layer(i).ff for i in range(sizes.n_layers)]),
        "attention.head_count": uint32(sizes.n_heads),
        "attention.head_count_kv": _of_layers([sizes.in_layer(i).n_kv_heads for i in range(sizes.n_layers)]),
        f"attention.{eps_key}": float32(config.number(eps)),
        "vocab_size": uint32(sizes.v),
    }
    if len(config.family.stacks) > 1:
        fields["decoder_block_count"] = uint32(config.layers(config.family.stacks[-1]))
    if sizes.differing:
        for part in ("key", "value"):
            fields[f"attention.{part}_length"] = uint32(sizes.rotating_dim)
            fields[f"attention.{part}_length_swa"] = uint32(sizes.head_dim)
    elif sizes.head_dim * sizes.n_heads != sizes.d or len(config.family.stacks) > 1:
        fields |= {f"attention.{part}_length": uint32(sizes.head_dim) for part in ("key", "value")}
    fields |= window_fields(config, sizes)
    general = {"architecture": string(arch), "type": string("model"), "name": string(name)}
    metadata = {f"general.{key}": value for key, value in general.items()}
    metadata |= {f"{arch}.{key}": value for key, value in fields.items()}
    metadata |= {f"{arch}.{ours}": boolean(bool(config.get(key))) for ours, key in config.family.flags.items()}
    metadata |= {f"{arch}.{ours}": uint32(int(config.number(key))) for ours, key in config.family.numbers.items()}
    scales = {ours: config.number(key) for ours, key in config.family.scales.items() if config.get(key) is not None}
    metadata |= {f"{arch}.{ours}": float32(value) for ours, value in scales.items()}
    if key := config.family.activation:
        metadata["slimrt.activation"] = string(ACTIVATIONS[config.get(key) or config.family.defaults[key]])
    if config.owners is not None:
        metadata |= sharing_fields(config.owners, SHARING[config.family.sharing].keys)
    if config.family.extra is not None:
        metadata |= config.family.extra(config.values, config.generation)
    return metadata


def _settings(config: Config, metadata: Mapping[str, GGUFValue]) -> tuple[dict[str, GGUFValue], list[str]]:
    """How a model that writes texts is run by its authors, and warnings; speech and series have rules of theirs."""
    if config.family.arch in ("whisper", "moonshine") or "slimrt.chronos.kind" in metadata:
        return {}, []
    encoder, n_vocab = len(config.family.stacks) > 1, Sizes.of(config).v
    with values_of(config.path):
        first = text2text_fields(config.values, config.generation) if encoder else {}
        settings, warnings = generation_fields(config.values, config.generation, n_vocab, encoder)
    return first | settings, warnings
