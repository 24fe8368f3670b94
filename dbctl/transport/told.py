"""Which lines about dropped messages and refused connections are worth a line of the log. Pure.

Rules of this file: whoever comes, however often, the log stays short. Each different text of a kind
is told once, up to TEXTS of them; then, and for what is repeated, only how many there were, at each
power of ten. So a stranger is seen whoever came before, and a flood costs a few lines.
"""

from __future__ import annotations

TEXTS = 16


class Told:
    def __init__(self) -> None:
        self._texts: dict[str, set[str]] = {}
        self._counts: dict[str, int] = {}

    def line(self, kind: str, text: str) -> str | None:
        """What to write about one more of `kind`, or None."""
        n = self._counts[kind] = self._counts.get(kind, 0) + 1
        texts = self._texts.setdefault(kind, set())
        if text not in texts and len(texts) < TEXTS:
            texts.add(text)
            return f"{text} (the same again is only counted)"
        if str(n).rstrip("0") == "1":
            return f"{text} ({n:,} of this kind so far)"
        return None
