"""Read a JSON file that this toolkit has written, and say by name which field is missing or of another kind.

Fields are named from the top with dots. A file that somebody has damaged, or that another program has written, is met here and
nowhere else.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.errors import KeelError

__all__ = [
    "COUNT",
    "FLAG",
    "LIST",
    "NUMBER",
    "NUMBER_OR_NONE",
    "TABLE",
    "TEXT",
    "Kind",
    "check_fields",
    "json_ready",
    "list_of",
    "one_of",
    "parse_object",
    "read_object",
]


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field may hold.

    Attributes:
        holds: whether a value is of the kind.
        words: what it must be, for the message.
    """

    holds: Callable[[Any], bool]
    words: str


def json_ready(value: Any) -> Any:
    """The same data with null for every float that is not finite: JSON has no word for them.

    Example:
        >>> json_ready({"loss": float("nan"), "norms": (1.0, float("inf"))})
        {'loss': None, 'norms': [1.0, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: json_ready(inner) for key, inner in value.items()}
    return [json_ready(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


TEXT = Kind(lambda value: isinstance(value, str), "a text")
FLAG = Kind(lambda value: isinstance(value, bool), "true or false")
TABLE = Kind(lambda value: isinstance(value, dict), "a table")
LIST = Kind(lambda value: isinstance(value, list), "a list")
NUMBER = Kind(_is_number, "a finite number")
NUMBER_OR_NONE = Kind(lambda value: value is None or _is_number(value), "a finite number or null")
COUNT = Kind(lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63, "a count")


def one_of(*words: str) -> Kind:
    """One of these texts."""
    return Kind(lambda value: value in words, "one of " + ", ".join(words))


def list_of(kind: Kind, *, least: int = 0) -> Kind:
    """A list of values of one kind.

    Args:
        kind: of each.
        least: how many there must be.
    """
    some = f"at least {least} times " if least else ""
    return Kind(
        lambda value: isinstance(value, list) and len(value) >= least and all(map(kind.holds, value)),
        f"a list that holds {some}{kind.words}",
    )


def read_object(path: Path, fields: Mapping[str, Kind], *, error: type[KeelError], advice: str = "") -> dict[str, Any]:
    """The object that a file holds.

    Args:
        path: of the file.
        fields: that are needed, by dotted name.
        error: to raise.
        advice: what would work, for the message.

    Returns:
        All that the file holds, its other fields too.

    Raises:
        FileNotFoundError: if there is no file.
        error: if it cannot be read or a field is wrong; the message names both.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as problem:
        raise FileNotFoundError(str(path)) from problem
    except (OSError, ValueError) as problem:
        raise error(f"cannot read {path}: {problem}{_after(advice)}") from problem
    return parse_object(text, fields, str(path), error=error, advice=advice)


def parse_object(
    text: str, fields: Mapping[str, Kind], where: str, *, error: type[KeelError], advice: str = ""
) -> dict[str, Any]:
    """The object that a text holds.

    Args:
        text: JSON.
        fields: that are needed, by dotted name.
        where: it stands, for the message.
        error: to raise.
        advice: what would work, for the message.

    Raises:
        error: if it is no JSON object, or a field is wrong.

    Example:
        >>> parse_object('{"a": {"b": 1}}', {"a.b": TEXT}, "line 1", error=KeelError)
        Traceback (most recent call last):
        probes.errors.KeelError: line 1: field 'a.b' must be a text, got 1
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"cannot read {where}: {problem}{_after(advice)}") from problem
    if not isinstance(values, dict):
        raise error(f"{where} does not hold a JSON object{_after(advice)}")
    check_fields(values, fields, where, error=error, advice=advice)
    return values


def check_fields(
    values: Mapping[str, Any], fields: Mapping[str, Kind], where: str, *, error: type[KeelError], advice: str = ""
) -> None:
    """Refuse values in which a field is missing or of another kind.

    Args:
        values: as JSON gives them.
        fields: that are needed, by dotted name.
        where: they stand, for the message.
        error: to raise.
        advice: what would work, for the message.

    Raises:
        error: naming the first such field.
    """
    for name, kind in fields.items():
        found: Any = values
        for part in name.split("."):
            if not isinstance(found, Mapping) or part not in found:
                raise error(f"{where}: field '{name}' is missing{_after(advice)}")
            found = found[part]
        if not kind.holds(found):
            shown = repr(found)
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            raise error(f"{where}: field '{name}' must be {kind.words}, got {shown}{_after(advice)}")


def _after(advice: str) -> str:
    return f"; {advice}" if advice else ""
