"""Resampling of one channel, block by block: a polyphase filter with a Kaiser-windowed sinc.

Flat up to 91 % of the lower of the two Nyquist frequencies, and -100 dB from there on (J. F. Kaiser 1974).
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

_CROSSINGS = 74  # zero crossings of the sinc on either side
_CUTOFF = 0.956  # of the lower Nyquist frequency: the middle of the transition band
_BETA = 10.06  # of the Kaiser window, for 100 dB
_LARGEST = 1 << 21  # elements of the matrix for a whole period, at most; else outputs are computed one by one
_AT_ONCE = 1 << 17  # samples collected before a product: each call of BLAS has a fixed cost
_ROWS = 1024  # outputs computed at once without such a matrix
_PHASES = 256  # filters computed at once: in float64 all of them would take several times what they do
_MOST = 1 << 23  # elements of all filters, at most


class Resampler:
    """A streaming resampler: push() samples in blocks of any length, then take the rest with finish().

    n samples give ceil(n * to / rate) in all; output m is the sound at m / to seconds.

    Args:
        rate, to: Hz, positive integers.

    Raises:
        ValueError: the ratio of the rates, reduced, is so complex that the filters would be too large.
    """

    def __init__(self, rate: int, to: int):
        common = gcd(rate, to)
        self._up, self._down = to // common, rate // common
        self._taps = 2 * _half(self._up, self._down)
        if self._up * self._taps > _MOST:
            raise ValueError(f"{rate} Hz are not resampled to {to} Hz: bring it to a usual rate, such as 48000 Hz")
        self._held = [np.zeros(self._taps // 2 - 1, np.float32)]  # input still needed; silence before the first sample
        self._n_held, self._pushed, self._made = self._taps // 2 - 1, 0, 0
        # As many periods a step as are needed for the last output's window to begin in the first half of the input.
        self._periods = -(-self._taps // self._down)
        size = 2 * self._periods**2 * self._down * self._up
        self._whole = size <= _LARGEST
        self._table = _matrix(self._up, self._down, self._periods) if self._whole else _filters(self._up, self._down)
        self._step = self._periods * self._down if self._whole else self._down  # input samples consumed by a step
        self._reach = 2 * self._step if self._whole else self._step + self._taps  # input samples read by a step

    def push(self, samples: Samples) -> Samples:
        """Add samples (n,); the outputs that are now complete, float32 (m,)."""
        self._pushed += len(samples)
        return self._advance(samples, max(self._reach, _AT_ONCE))

    def finish(self) -> Samples:
        """The remaining outputs (m,), with silence after the last sample."""
        total = -(-self._pushed * self._up // self._down)
        rest = self._advance(np.zeros(self._reach + self._step, np.float32), 0)
        return rest[: len(rest) - (self._made - total)]

    def _advance(self, samples: Samples, least: int) -> Samples:
        self._held.append(samples)
        self._n_held += len(samples)
        if self._n_held < least:
            return np.zeros(0, np.float32)
        held = np.concatenate(self._held)
        steps = (len(held) - self._reach) // self._step + 1
        made = self._in_periods(held, steps) if self._whole else self._in_rows(held, steps)
        self._held, self._n_held = [held[steps * self._step :]], len(held) - steps * self._step
        self._made += len(made)
        return made

    def _in_periods(self, held: Samples, steps: int) -> Samples:
        """A step's outputs as one row of a matrix product: its own samples, then those of the next step."""
        blocks = held[: (steps + 1) * self._step].reshape(steps + 1, self._step)
        made: Samples = blocks[:-1] @ self._table[: self._step]
        made += blocks[1:] @ self._table[self._step :]
        return made.reshape(-1)

    def _in_rows(self, held: Samples, steps: int) -> Samples:
        """Each output as a dot product."""
        windows = np.lib.stride_tricks.sliding_window_view(held, self._taps)
        made = np.empty(steps * self._up, np.float32)
        for start in range(0, len(made), _ROWS):
            begins, phases = np.divmod(np.arange(start, min(start + _ROWS, len(made))) * self._down, self._up)
            made[start : start + _ROWS] = np.einsum("ij,ij->i", windows[begins], self._table[phases])
        return made


def _half(up: int, down: int) -> int:
    """Input samples on either side that an output depends on."""
    return -(-_CROSSINGS * max(up, down) // up)


def _filters(up: int, down: int) -> NDArray[np.float32]:
    """The filter of each phase, float32 (up, taps), for outputs phase / up of a sample after the window's middle."""
    half, cutoff = _half(up, down), _CUTOFF * min(1.0, up / down)  # of the input's Nyquist frequency
    made, taps = np.empty((up, 2 * half), np.float32), np.arange(1 - half, half + 1)
    for start in range(0, up, _PHASES):
        distance = np.arange(start, min(start + _PHASES, up))[:, None] / up - taps
        window = np.i0(_BETA * np.sqrt(np.maximum(1.0 - (distance / half) ** 2, 0.0))) / np.i0(_BETA)
        filters = cutoff * np.sinc(cutoff * distance) * window
        made[start : start + _PHASES] = filters / filters.sum(axis=1, keepdims=True)
    return made


@lru_cache(maxsize=4)  # of usual rates; each odd one would leave megabytes
def _matrix(up: int, down: int, periods: int) -> NDArray[np.float32]:
    """The matrix that maps 2 * periods * down samples to periods * up outputs, float32."""
    filters = _filters(up, down)
    matrix = np.zeros((2 * periods * down, periods * up), np.float32)
    for output in range(periods * up):
        begin, phase = divmod(output * down, up)
        matrix[begin : begin + filters.shape[1], output] = filters[phase]
    return matrix
