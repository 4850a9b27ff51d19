"""The published tables: typed, tidy, complete, and refused where they are not what they should be."""

import shutil
from pathlib import Path

import pytest

from figures.paper_tables import PUBLISHED, TABLES, PaperTablesError, load_tables


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PUBLISHED, tmp_path / "published"))


def test_every_published_file_has_a_layout() -> None:
    assert {path.stem for path in PUBLISHED.glob("*.csv")} == set(TABLES)


@pytest.mark.parametrize(
    ("name", "n_rows"), [("table1_max_lr", 12), ("table3_depth_scaling", 120), ("table8_model_config", 18)]
)
def test_one_printed_number_per_row(name: str, n_rows: int) -> None:
    frame = load_tables().frame(name)
    assert list(frame.columns) == [*TABLES[name].keys, "printed", "value"]
    assert len(frame) == n_rows
    assert frame["value"].dtype == "float64"


def test_depth_is_in_sublayers_and_an_integer() -> None:
    frame = load_tables().frame("table3_depth_scaling")
    assert frame["n_sublayers"].dtype == "int64"
    assert set(frame["n_sublayers"]) == {64, 128, 512, 1024}


def test_precision_survives_reading() -> None:
    assert load_tables().printed("table8_model_config", hyper_parameter="dropout", shape="wide") == "0.0"


def test_asks_for_one_row() -> None:
    with pytest.raises(
        PaperTablesError, match=r"Table 7 \(table7_sft.csv\) has no row with benchmark MMLU, architecture post_ln"
    ):
        load_tables().printed("table7_sft", benchmark="MMLU", architecture="post_ln")
    with pytest.raises(PaperTablesError, match="has 2 rows"):
        load_tables().printed("table7_sft", benchmark="MMLU")


def test_names_the_missing_file(copy: Path) -> None:
    (copy / "table7_sft.csv").unlink()
    with pytest.raises(PaperTablesError, match=r"cannot read .*table7_sft.csv.*; Table 7 is expected there"):
        load_tables(copy)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("BBH,3,keel,51.7", "BBH,3,keel,n/a", "has 'n/a' where a number belongs, in the row 'BBH,3,keel,n/a'"),
        ("BBH,3,keel,51.7", "BBH,3,keel,475", "has 475 where a percentage from 0 to 100 belongs, in the row 'BBH,3,keel,475'"),
        ("BBH,3,keel,51.7", "BBH,3,keel,-1", "has -1 where a percentage from 0 to 100 belongs"),
        ("BBH,3,keel,51.7", "BBH,3,keel,nan", "has 'nan' where a number belongs"),
        ("BBH,3,keel,51.7", "BBH,3,pre_ln,51.7", "more than one row for BBH, 3, pre_ln"),
        ("benchmark,shots", "task,shots", "has the columns task, shots, architecture, score; Table 7 has benchmark"),
    ],
)
def test_names_what_is_wrong_in_a_table(copy: Path, old: str, new: str, message: str) -> None:
    path = copy / "table7_sft.csv"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(PaperTablesError, match=message):
        load_tables(copy)


def test_names_a_key_of_the_wrong_type(copy: Path) -> None:
    path = copy / "table1_max_lr.csv"
    path.write_text(path.read_text(encoding="utf-8").replace("keel,512,", "keel,deep,"), encoding="utf-8")
    with pytest.raises(PaperTablesError, match=r"column n_sublayers: .*deep.*; int is needed"):
        load_tables(copy)
