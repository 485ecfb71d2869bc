"""Stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string appears, and holds back what may turn out to be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Take the next piece; return the text that is certain to come before any stop string, and whether one came."""
        text = self._held + piece
        if found := [at for stop in self._stops if (at := text.find(stop)) >= 0]:
            self._held = ""
            return text[: min(found)], True
        held = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """The text still held back: the stop string it might have begun did not come."""
        text, self._held = self._held, ""
        return text
