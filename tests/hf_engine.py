# SPDX-License-Identifier: Apache-2.0
"""The engine's interface over Hugging Face models, without a cache: for front ends without the core."""

from __future__ import annotations

import numpy as np
import torch

from scripted import ScriptedEngine


class HfEngine(ScriptedEngine):
    """An encoder-decoder model of transformers, in float32.

    Args:
        encode: the encoder's states (1, rows, d_model), or all its output, from a source array, and its positions if
            there are some.
    """

    def __init__(self, model, encode, **info):
        super().__init__(self._row, n_vocab=model.config.vocab_size, **info)
        self._model, self._encode = model.eval().float(), encode
        self._states: dict[int, torch.Tensor] = {}

    def encode(self, items, *, states=False) -> None:
        super().encode(items)
        with torch.no_grad():
            for _, source, *positions in items:
                self._states[id(source)] = self._encode(source, *positions)

    def _row(self, source, tokens) -> np.ndarray:
        states = self._states[id(source)]
        output = (states,) if isinstance(states, torch.Tensor) else states
        with torch.no_grad():
            out = self._model(encoder_outputs=output, decoder_input_ids=torch.tensor([tokens]))
        return out.logits[0, -1].numpy()


class HfStates(HfEngine):
    """Chronos-Bolt's encoder and decoder: append(states=True) gives the decoder's states."""

    def append(self, items, *, states=False, **_) -> np.ndarray:
        assert states
        self.appends.append(len(items))
        rows = []
        with torch.no_grad():
            for sequence, tokens in items:
                source, _ = self.live[sequence]
                ids = torch.tensor(tokens.astype(np.int64))[None]
                out = self._model.decoder(input_ids=ids, encoder_hidden_states=self._states[id(source)])
                rows.append(out.last_hidden_state[0, -1].numpy())
        return np.stack(rows)


def t5_engine(model, **info) -> HfEngine:
    """Sources are ids int32 (n,), or embeddings float32 (n, d_model). What positions leave out is there, and masked."""

    def encode(source, positions=None):
        at = np.arange(len(source)) if positions is None else positions
        whole, mask = np.zeros((at[-1] + 1, *source.shape[1:]), source.dtype), np.zeros(at[-1] + 1, np.int64)
        whole[at], mask[at] = source, 1
        name = "input_ids" if source.dtype == np.int32 else "inputs_embeds"
        given = torch.tensor(whole.astype(np.int64) if source.dtype == np.int32 else whole)[None]
        return model.encoder(**{name: given}, attention_mask=torch.tensor(mask)[None]).last_hidden_state[:, at]

    bolt = not hasattr(model, "lm_head")
    info = {"architecture": "t5", "decoder_start_token_id": 0,
            "encoder": {"n_source": 512, "inputs": "tokens", "n_inputs": 0}} | info  # fmt: skip
    return (HfStates if bolt else HfEngine)(model, encode, **info)
