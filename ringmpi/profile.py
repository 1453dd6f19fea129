"""Records of hops and tiles."""
from __future__ import annotations

from typing import Any


class Trace:
    """The events of the laps that were run while it was recording, in order: pairs of a name and its facts.

    The names and facts are those of ``ring.Lap``: "post" and "done" of every message, "tile", "poll" and "wait".
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, **facts: Any) -> None:
        """Takes an event."""
        self.events.append((name, facts))

    def of(self, name: str) -> list[dict[str, Any]]:
        """The facts of all events of a name."""
        return [facts for event, facts in self.events if event == name]
