# SPDX-License-Identifier: Apache-2.0
"""tale-whisper: Whisper's layout, taught the ten digits by espeak-ng's voices.

Batches are composed anew from a store of spoken words, so that no clip is heard twice. Beside the text, the encoder
learns which digit each of its rows belongs to, with a head that is not kept: rows that say what they hear are easy to
find for the decoder.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from reference_speech import RATE, WORDS, Espeak, Samples, takes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

from slimrt.speech.mel import HOP, WINDOW, mel_filters
from slimrt.tokenizer.vocabulary import byte_level_alphabet

N_MELS, WIDTH, CONTEXT = 80, 128, 64
ROWS = 128  # of the encoder: 2.56 s, 20 ms each
ROW = 2 * HOP  # samples
SILENT, IGNORED = len(WORDS), -100
_CONTROLS = "startoftranscript en translate transcribe startoflm startofprev nospeech notimestamps".split()


def tokenizer() -> Tokenizer:
    """Bytes, one token for each word behind a space, then Whisper's controls and times in its order."""
    vocabulary = {letter: i for i, letter in enumerate(byte_level_alphabet())}
    merges = []
    for word in WORDS:
        begun = "\u0120"  # a space, as byte-level BPE writes it
        for letter in word:
            if begun + letter not in vocabulary:
                vocabulary[begun + letter] = len(vocabulary)
                merges.append((begun, letter))
            begun += letter
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = ["endoftext", *_CONTROLS, *(f"{i / 50:.2f}" for i in range(ROWS + 1))]
    made.add_special_tokens([AddedToken(f"<|{name}|>", normalized=False) for name in names])
    return made


class Speech:
    """What the trainer asks of a task (train_tasks.py)."""

    name, outtype = "tale-whisper", "f16"
    steps, matrix_lr, other_lr = 1150, 0.02, 2e-3

    def __init__(self) -> None:
        self.tokenizer = tokenizer()
        self._id = {name: self.tokenizer.token_to_id(f"<|{name}|>") for name in ["endoftext", "0.00", *_CONTROLS]}
        self._words = {word: self.tokenizer.token_to_id(f"\u0120{word}") for word in WORDS}
        self.rows = ROWS

    def build(self) -> nn.Module:
        end = self._id["endoftext"]
        config = WhisperConfig(
            vocab_size=self.tokenizer.get_vocab_size(), num_mel_bins=N_MELS, d_model=WIDTH,
            encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=384, decoder_ffn_dim=384, max_source_positions=ROWS, max_target_positions=CONTEXT,
            pad_token_id=end, bos_token_id=end, eos_token_id=end, decoder_start_token_id=self._id["startoftranscript"],
            suppress_tokens=None, begin_suppress_tokens=None, init_std=0.05,
        )  # fmt: skip
        model = WhisperForConditionalGeneration(config)
        model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
        model.which = nn.Linear(WIDTH, len(WORDS) + 1)
        self._positions = model.model.encoder.embed_positions.weight.clone()
        return model

    def prepare(self, seed: int) -> None:
        """Have the words spoken."""
        self._takes = list(takes(Espeak(), seed, 300))
        noise, n = np.random.default_rng(seed), 1 << 20
        waves = np.fft.rfft(noise.normal(size=(6, n)))
        coloured = [np.fft.irfft(w / (1 + np.arange(n // 2 + 1) / n * 40) ** (i / 5)) for i, w in enumerate(waves)]
        self._hiss = [(one / one.std()).astype(np.float32) for one in coloured]

    def batch(self, model: nn.Module, rng: random.Random, progress: float) -> dict[str, Tensor]:
        """Mel frames (n, 80, 2 rows), decoder tokens and what follows each (n, t), the digit of each row (n, rows)."""
        self._set_window(model, ROWS // 2 if progress < 0.3 else ROWS)
        count = 64 if progress < 0.3 else 32
        made = [self._clip(rng, 2 if self.rows < ROWS else 4) for _ in range(count)]
        longest = max(len(one[1]) for one in made)
        tokens = torch.full((count, longest), self._id["endoftext"])
        labels = torch.full((count, longest), IGNORED)
        for i, (_, ids, wanted, _, _) in enumerate(made):
            tokens[i, : len(ids)], labels[i, : len(ids)] = torch.tensor(ids), torch.tensor(wanted)
        lengths = torch.tensor([one[4] for one in made])
        mel = self._heard(torch.from_numpy(np.stack([one[0] for one in made])), lengths, rng)
        return {"mel": mel, "tokens": tokens, "labels": labels, "digits": torch.tensor([one[3] for one in made])}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        states = model.model.encoder(batch["mel"]).last_hidden_state
        read = model.model.decoder(batch["tokens"], encoder_hidden_states=states).last_hidden_state
        said = model.proj_out(read).flatten(0, 1)
        text = F.cross_entropy(said, batch["labels"].flatten(), ignore_index=IGNORED, label_smoothing=0.05)
        return text + 0.5 * F.cross_entropy(model.which(states).flatten(0, 1), batch["digits"].flatten())

    def save(self, model: nn.Module, directory: Path) -> None:
        """As a Hugging Face directory."""
        self._set_window(model, ROWS)
        del model.which
        model.save_pretrained(directory)
        self.tokenizer.save(str(directory / "tokenizer.json"))
        end = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(end), encoding="utf-8")

    def _set_window(self, model: nn.Module, rows: int) -> None:
        """Let the encoder read fewer rows: its positions are sines, which nothing has to learn."""
        if self.rows != rows:
            self.rows = model.config.max_source_positions = rows
            model.model.encoder.embed_positions = nn.Embedding.from_pretrained(self._positions[:rows])

    def _clip(self, rng: random.Random, most: int) -> tuple[Samples, list[int], list[int], list[int], int]:
        """A window of sound, the tokens, what follows each, the digit of each row, and the samples that are sound."""
        n = self.rows * ROW
        samples, digits, words = np.zeros(n, np.float32), [SILENT] * self.rows, []
        take, cut, speed = rng.choice(self._takes), None, rng.uniform(0.85, 1.2)
        at, pause = max(rng.uniform(-0.1, 0.5), 0.0), rng.choice((0.5, 0.5, 1.2))
        if rng.random() < 0.2:
            at = rng.uniform(0.0, 1.8)
        if rng.random() < 0.3:  # the end of a word that the window before has heard
            rest = take[rng.choice(WORDS)][-round(rng.uniform(0.03, 0.15) * RATE) :]
            samples[: len(rest)] += rest
            at = max(at, 0.05)
        for _ in range(0 if rng.random() < 0.06 else rng.randint(1, most)):
            word = rng.choice(WORDS)
            spoken = _faster(take[word], speed * rng.uniform(0.93, 1.07)) * np.float32(rng.uniform(0.6, 1.0))
            start, end = round(at * RATE), round(at * RATE) + len(spoken) - round(RATE / 20 / speed)
            if start > n - RATE // 20:
                break
            kept = min(len(spoken), n - start)
            samples[start : start + kept] += spoken[:kept]
            if end > n:
                cut = start
                break
            digits[start // ROW : end // ROW] = [WORDS.index(word)] * (end // ROW - start // ROW)
            words.append((word, start, end))
            at = end / RATE + rng.uniform(0.0, pause)
        if cut is not None and not words:
            return self._clip(rng, most)
        if cut is None and rng.random() < 0.6:
            n = min(n, (words[-1][2] if words else 0) + round(rng.uniform(0.02, 1.0) * RATE))
        self._add_hiss(samples, rng)
        samples[n:] = 0.0
        return samples, *self._script(rng, words, cut), digits, n

    def _add_hiss(self, samples: Samples, rng: random.Random) -> None:
        hiss = rng.choice(self._hiss)
        start = rng.randrange(len(hiss) - len(samples))
        samples += np.float32(10 ** rng.uniform(-4.0, -1.2)) * hiss[start : start + len(samples)]

    def _script(
        self, rng: random.Random, words: list[tuple[str, int, int]], cut: int | None
    ) -> tuple[list[int], list[int]]:
        """Half with times; a word that the window cuts off is left to the next one, as Whisper does it."""
        ids = self._id
        before = [ids["startofprev"], *self._before(rng)] if rng.random() < 0.5 else []
        head = [*before, ids["startoftranscript"], ids["en"], ids["transcribe"]]
        text = [self._words[word] for word, _, _ in words]
        timed = rng.random() < 0.6 or not words
        if timed:
            first = ids["0.00"]
            text = [first + (round(words[0][1] / ROW) if words else 0), *text]
            text += [first + round(words[-1][2] / ROW)] if words else []
            text += [first + round(cut / ROW)] if cut is not None else []
        else:
            head.append(ids["notimestamps"])
        all_ids = [*head, *text, ids["endoftext"]]
        wanted = [IGNORED] * (len(head) - 1) + all_ids[len(head) :]
        wanted[len(before)] = ids["en"] if words else ids["nospeech"]
        return all_ids[:-1], wanted

    def _before(self, rng: random.Random) -> list[int]:
        """What a prompt shows of the windows before: the end of some segments with their times, or words alone."""
        timed, shown = rng.random() < 0.7, list[int]()
        while len(shown) < CONTEXT // 2:
            words = [self._words[rng.choice(WORDS)] for _ in range(rng.randint(1, 4))]
            start, end = sorted(rng.sample(range(ROWS + 1), 2))
            first = self._id["0.00"]
            shown += [first + start, *words, first + end] if timed else words
        return shown[-rng.randint(1, CONTEXT // 2 - 1) :]

    def _heard(self, samples: Tensor, lengths: Tensor, rng: random.Random) -> Tensor:
        """What slimrt.speech.mel.log_mel makes of it, with the spectrum bent, tinted and partly hidden."""
        spectrum = torch.stft(samples, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True)
        power = spectrum[:, :, :-1].abs().square()
        mel = (torch.from_numpy(mel_filters(N_MELS)) @ power).clamp_min(1e-10).log10()
        frames, channels = mel.shape[2], torch.arange(N_MELS)
        for one in mel:
            place = (channels * rng.uniform(0.9, 1.12) + rng.uniform(-1, 1)).clamp(0, N_MELS - 1)
            low, share = place.long(), (place - place.floor())[:, None]
            tint = sum(rng.uniform(-0.35, 0.35) * torch.cos(torch.pi * k * channels / N_MELS) for k in (1, 2, 3, 4))
            one.copy_(one[low] * (1 - share) + one[(low + 1).clamp_max(N_MELS - 1)] * share + tint[:, None])
            if rng.random() < 0.35:  # recorded at 8 kHz: the mel channels from 4 kHz on
                one[rng.randint(58, 66) :] = -10.0
        loudest = (
            mel.amax((1, 2), keepdim=True) + torch.tensor([max(rng.uniform(-1, 0.5), 0) for _ in mel])[:, None, None]
        )
        mel = (torch.maximum(mel, loudest - 8.0) + 4.0) / 4.0
        mel += (torch.tensor([rng.uniform(-0.9, 0.1) for _ in mel]))[:, None, None]  # a level
        hidden = mel.amin((1, 2))
        for one, floor in zip(mel, hidden, strict=True):
            for _ in range(2):
                start, channel = rng.randrange(frames), rng.randrange(N_MELS)
                one[:, start : start + rng.randint(0, 8)] = floor
                one[channel : channel + rng.randint(0, 10)] = floor
        return torch.where(torch.arange(frames) < lengths[:, None, None] // HOP, mel, 0.0)


def _faster(samples: Samples, factor: float) -> Samples:
    """Played faster by linear interpolation, pitch and all."""
    return np.interp(np.arange(0, len(samples) - 1, factor), np.arange(len(samples)), samples).astype(np.float32)
