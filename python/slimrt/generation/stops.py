"""Stop strings."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text on up to the first stop string, and holds back an end that may be the start of one."""

    def __init__(self, stops: Sequence[str]):
        self.stopped = False
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that is safe to show now."""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            released, self._held = self._held[: min(found)], ""
            return released
        safe = len(self._held) - self._possible_start()
        released, self._held = self._held[:safe], self._held[safe:]
        return released

    def flush(self) -> str:
        """The text held back, when no more text comes."""
        released, self._held = self._held, ""
        return released

    def _possible_start(self) -> int:
        """The length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = min(len(self._held), max((len(stop) for stop in self._stops), default=1) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
