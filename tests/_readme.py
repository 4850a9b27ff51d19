"""The README as the tests read it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["README", "readme_words"]

README = Path(__file__).parents[1] / "README.md"


def readme_words() -> str:
    """The text with one space between words, so that sentences are found however their lines are broken."""
    return " ".join(README.read_text(encoding="utf-8").split())
