"""From tokens to text while they come: no half characters, and nothing of a stop string is ever shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

HALF = "\ufffd"  # what bytes that are no whole character are decoded to
CONTEXT = 6  # tokens of the prompt that decide whether the text goes on with a space
LONGEST = 4  # bytes, and so tokens, of a character in UTF-8


class TextStream:
    """Feed tokens, get text that is safe to show; `finish` gives the rest. Joined, it is the text of all tokens.

    decode: ids -> text. `stopped` is true once a stop string stood in the text, which ends in front of it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (), stops: Sequence[str] = ()):
        self._decode, self._stops = decode, [s for s in stops if s]
        self._before = _end_of(prompt, decode)
        self._begin = len(decode(self._before)) if self._before else 0
        self._ids: list[int] = []
        self.text, self.shown, self.stopped = "", 0, False

    def push(self, token: int) -> str:
        """Return the text that has become certain with this token."""
        if self.stopped:
            return ""
        self._ids.append(token)
        self.text = self._decode([*self._before, *self._ids])[self._begin :]
        self._look_for_stops()
        certain = len(self.text) if self.stopped else self._certain()
        return self._show(certain)

    def finish(self) -> str:
        """Return what was held back: a character that stayed half, the beginning of a stop string that did not come."""
        return self._show(len(self.text))

    def _show(self, until: int) -> str:
        fresh = self.text[self.shown : until]
        self.shown = max(self.shown, until)
        return fresh

    def _look_for_stops(self) -> None:
        found = [at for stop in self._stops if (at := self.text.find(stop)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _certain(self) -> int:
        certain = len(self.text.rstrip(HALF))
        for stop in self._stops:
            for length in range(min(len(stop) - 1, certain), 0, -1):
                if self.text[:certain].endswith(stop[:length]):
                    certain -= length
                    break
        return certain


def _end_of(prompt: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return the prompt's last tokens, from where a character begins: SentencePiece's byte pieces (<0xE4>) decode to
    nothing but half characters as long as one among neighbours is half."""
    ends = [list(prompt[-count:]) for count in range(CONTEXT, CONTEXT + LONGEST)] if prompt else [[]]
    return next((end for end in ends if not decode(end).startswith(HALF)), ends[0])
