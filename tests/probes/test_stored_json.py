"""One reader for every JSON file: what is missing or of another kind is told by file and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from probes.errors import CheckpointError
from probes.stored_json import COUNT, FLAG, NUMBER, NUMBER_OR_NONE, TABLE, TEXT, Kind, list_of, one_of, read_object
from tests.probes._damage import BROKEN_FILES, rewrite

FIELDS = {"a": COUNT, "b.c": TEXT}


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (TEXT, ["", "a"], [None, 1, []]),
        (FLAG, [True, False], [0, 1, "true"]),
        (TABLE, [{}], [[], "a", None]),
        (NUMBER, [0, -1.5], [None, True, float("nan"), float("inf"), 10**400, "1"]),
        (NUMBER_OR_NONE, [None, 2], [False, "null"]),
        (COUNT, [0, 7], [-1, 1.0, True, 1 << 63]),
        (one_of("a", "b"), ["a"], ["c", ["a"], None]),
        (list_of(TEXT, least=1), [["a"]], [[], ["a", 1], "a"]),
    ],
    ids=["text", "flag", "table", "number", "number or null", "count", "one of", "list"],
)
def test_a_kind_holds_its_own_and_nothing_else(kind: Kind, good: list[Any], bad: list[Any]) -> None:
    assert all(map(kind.holds, good))
    assert not any(map(kind.holds, bad))


def test_other_fields_come_back_too(tmp_path: Path) -> None:
    rewrite(tmp_path / "a.json", {"a": 1, "b": {"c": "x"}, "more": [1]})
    assert read_object(tmp_path / "a.json", FIELDS, error=CheckpointError) == {"a": 1, "b": {"c": "x"}, "more": [1]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"b": {"c": "x"}}, r"a\.json: field 'a' is missing; restore it"),
        ({"a": 1, "b": {}}, r"a\.json: field 'b\.c' is missing; restore it"),
        ({"a": 1, "b": 3}, r"a\.json: field 'b\.c' is missing; restore it"),
        ({"a": "1", "b": {"c": "x"}}, r"a\.json: field 'a' must be a count, got '1'; restore it"),
    ],
)
def test_a_field_is_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    rewrite(tmp_path / "a.json", values)
    with pytest.raises(CheckpointError, match=message):
        read_object(tmp_path / "a.json", FIELDS, error=CheckpointError, advice="restore it")


@pytest.mark.parametrize("content", BROKEN_FILES.values(), ids=list(BROKEN_FILES))
def test_a_file_that_holds_no_object_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.json"):
        read_object(tmp_path / "a.json", FIELDS, error=CheckpointError)


def test_a_missing_file_is_left_to_the_caller(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"a\.json"):
        read_object(tmp_path / "a.json", FIELDS, error=CheckpointError)
