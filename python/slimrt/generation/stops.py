"""Where a text ends by what it says."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Lets text through up to the first stop string, holding back an end that may still become one."""

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
        """What was held back, now that no more text comes."""
        released, self._held = self._held, ""
        return released

    def _possible_start(self) -> int:
        """The length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max((len(stop) for stop in self._stops), default=1) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
