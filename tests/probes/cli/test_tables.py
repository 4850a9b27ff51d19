import math

import pytest

from probes.cli._tables import as_json, render

ROWS = [{"name": "a[b]", "norm_in": 1.0}, {"name": "longer", "norm_in": True}]


def test_plain_columns_are_aligned():
    lines = render(["name", "norm_in"], ROWS, wide=False).splitlines()
    assert lines == ["name    norm in", "a[b]    1", "longer  yes"]


def test_plain_table_without_rows_is_its_heading():
    assert render(["name", "norm_in"], [], wide=False) == "name  norm in"


def test_drawn_table_shows_brackets_as_text():
    drawn = render(["name", "norm_in"], ROWS, wide=True)
    assert "a[b]" in drawn
    assert "│" in drawn


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_json_refuses_what_json_cannot_say(value):
    with pytest.raises(ValueError, match="Out of range float values"):
        as_json({"x": value})
