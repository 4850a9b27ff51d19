"""Frames as files."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from probes.cli._frames import write_frame
from probes.errors import OutputError

FRAME = pd.DataFrame({"scheme": ["keel", "post_ln"], "max_lr": [0.25, 1 / 3]})


@pytest.mark.parametrize(("name", "read"), [("a.csv", pd.read_csv), ("a.parquet", pd.read_parquet)])
def test_it_comes_back_bit_for_bit(tmp_path: Path, name: str, read) -> None:
    write_frame(FRAME, tmp_path / name)
    pd.testing.assert_frame_equal(read(tmp_path / name), FRAME, check_exact=True)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.xlsx", r"name a file that ends in \.csv or \.parquet"), ("no/a.csv", r"its folder does not exist")],
)
def test_a_bad_place_is_told(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(OutputError, match=message):
        write_frame(FRAME, tmp_path / name)
