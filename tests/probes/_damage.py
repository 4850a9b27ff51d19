"""Damage to JSON files, of every kind that a reader meets: the whole file, and one field after the other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from probes.stored_json import Kind

BROKEN_FILES = {
    "empty": b"",
    "torn": b'{"outcome": "fin',
    "list": b"[1, 2]",
    "number": b"3",
    "binary": b"\xff\xfe\x00",
    "nested": b"[" * 100_000,
}
"""Contents that no reader can use."""

_STRANGERS = (None, True, -1, 3, 1.5, 10**400, "", "weird", [], [3], {}, {"a": 1})


def wrong_values(fields: Mapping[str, Kind]) -> list[tuple[str, Any]]:
    """Every field with every value of another kind."""
    return [(name, value) for name, kind in fields.items() for value in _STRANGERS if not kind.holds(value)]


def identifiers(cases: Iterable[tuple[str, Any]]) -> list[str]:
    """For pytest."""
    return [f"{name}-{str(value)[:12]}" for name, value in cases]


def without(values: dict[str, Any], dotted: str) -> dict[str, Any]:
    """The values without a field."""
    *outer, last = dotted.split(".")
    copy = json.loads(json.dumps(values))
    inner = copy
    for name in outer:
        inner = inner[name]
    del inner[last]
    return copy


def changed(values: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """The values with another one in a field."""
    copy = without(values, dotted)
    *outer, last = dotted.split(".")
    inner = copy
    for name in outer:
        inner = inner[name]
    inner[last] = value
    return copy


def rewrite(path: Path, values: Any) -> None:
    """Put JSON into a file."""
    path.write_text(json.dumps(values), encoding="utf-8")
