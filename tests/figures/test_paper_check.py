"""The paper against itself: a wrong number in a copy of a table is found, a corrected one is no longer reported."""

import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from decimal import Decimal
from pathlib import Path

import pytest

from figures.paper_check import CheckResult, PaperCheck, Verdict, check_paper
from figures.paper_check_numbers import GainCheck, MeanCheck, OrdersCheck, SameNumbersCheck
from figures.paper_check_settings import DepthCheck
from figures.paper_places import Check, Kind, Place
from figures.paper_statements import CHECKS
from figures.paper_tables import PUBLISHED, PaperTables, load_tables

BY_ID = {check.id: check for check in CHECKS}
MEAN = next(check for check in CHECKS if isinstance(check, MeanCheck))
TABLES = load_tables()
Edited = Callable[[str, str, str], PaperTables]


@pytest.fixture(scope="module")
def published() -> PaperCheck:
    return check_paper()


@pytest.fixture
def edited(tmp_path: Path) -> Edited:
    """The tables from a copy in which one text of one file is another."""

    def edit(name: str, old: str, new: str) -> PaperTables:
        folder = Path(shutil.copytree(PUBLISHED, tmp_path / "published"))
        text = (folder / f"{name}.csv").read_text(encoding="utf-8")
        assert old in text
        (folder / f"{name}.csv").write_text(text.replace(old, new), encoding="utf-8")
        return load_tables(folder)

    return edit


def _run(check_id: str, tables: PaperTables = TABLES) -> CheckResult:
    return check_paper(tables, [BY_ID[check_id]]).results[0]


def _verdict(check: Check, tables: PaperTables = TABLES) -> Verdict:
    return check_paper(tables, [check]).results[0].verdict


WRONG = [
    ("table7_sft", "BBH,3,keel,51.7", "BBH,3,keel,53.7", "table7-average-keel"),
    ("table7_sft", "Average,,keel,54.8", "Average,,keel,55.0", "table7-average-keel"),
    ("figure1b_capabilities", "math_and_code,keel,45.0", "math_and_code,keel,45.2", "figure1b-math_and_code-keel"),
    ("figure1b_capabilities", "overall,pre_ln,58.7", "overall,pre_ln,57.8", "figure1b-overall-pre_ln"),
    ("figure1c_depth_scaling", "keel,1024,60.9", "keel,1024,61.0", "figure1c-keel-1024"),
    ("table2_learning_rate", "PIQA,0,keel,0.006,76.7", "PIQA,0,keel,0.006,77.6", "table2-table5-keel"),
    ("table7_sft", "MBPP,0,", "MBPP,3,", "shots-MBPP"),
    ("table3_depth_scaling", ",1024,", ",2048,", "table3-depths"),
    ("figure1c_depth_scaling", ",64,", ",32,", "figure1c-depths"),
    ("table8_model_config", "intermediate_dim,3072,", "intermediate_dim,4096,", "size-narrow-512-keel"),
    ("table1_max_lr", "post_ln,64,5000,0.05,0.0003", "post_ln,64,5000,0.05,0.000304", "table1-steps"),
    ("table1_max_lr", "keel,64,5000,0.05,0.0101", "keel,64,5000,0.05,0.0501", "table1-steps"),
    ("table1_max_lr", "pre_ln,64,5000", "pre_ln,64,2500", "table1-warmup-steps"),
    ("table1_max_lr", "pre_ln,64,5000,0.05", "pre_ln,64,5000,0.5", "table1-peak-lr"),
    ("table4_data_scaling", "keel,10,0.003", "keel,10,0.002", "table4-learning-rates"),
    ("table4_data_scaling", ",40,", ",30,", "table4-tokens"),
    ("table5_deeper_vs_wider", ",2048,", ",1536,", "table5-widths"),
]

FOLLOWING = [
    ("table6_pretraining_1t", "Average,,keel,0.0045,62.5", "Average,,keel,0.0045,62.8", "table6-gain-keel"),
    ("figure1b_capabilities", "multilingual,keel,70.8", "multilingual,keel,71.1", "figure1b-gain-multilingual"),
    ("figure1c_depth_scaling", "pre_ln,64,37.9", "pre_ln,64,36.9", "figure1c-gain-64"),
]

DOUBTFUL = [
    ("table1_max_lr", "keel,512,5000,0.05,0.00631", "keel,512,5000,0.05,0.00531", "tolerated-keel-512"),
    ("table8_model_config", "intermediate_dim,3072,6144", "intermediate_dim,3072,9216", "size-wide-128-pre_ln"),
    ("table6_pretraining_1t", "HumanEval,0,keel,0.0045,33.5", "HumanEval,0,keel,0.0045,33.3", "granularity-HumanEval"),
    ("table7_sft", "MBPP,0,keel,42.6", "MBPP,0,keel,42.7", "granularity-MBPP"),
    ("table4_data_scaling", "Average,,keel,40,0.003,68.2", "Average,,keel,40,0.003,67.6", "table4-gap"),
]

IN_TENSION = {
    "figure4-spike": ("4.5e-3", "0.00467"),
    "table2-best-rate": ("0.006", "0.00467"),
    "figure1a-warmup": ("4.5e-3", "0.0018, 40 % of it"),
    "orders-of-magnitude": ("50 to 100 times", "33.7 times"),
    "table3-gap": ("the gap grows", "from +1.7 to +1.2"),
    "tolerated-pre_ln-64": ("9e-3", "0.00765"),
}
"""Both values of each tension of the published tables."""


@pytest.mark.parametrize(("name", "old", "new", "check_id"), WRONG, ids=[f"{row[3]}-{i}" for i, row in enumerate(WRONG)])
def test_finds_a_wrong_number(edited: Edited, name: str, old: str, new: str, check_id: str) -> None:
    assert _run(check_id).verdict is Verdict.CONSISTENT
    assert _run(check_id, edited(name, old, new)).verdict is Verdict.CONTRADICTION


@pytest.mark.parametrize(("name", "old", "new", "check_id"), FOLLOWING, ids=[row[3] for row in FOLLOWING])
def test_a_gain_of_a_mean_that_is_wrong_itself_follows_from_it(
    edited: Edited, name: str, old: str, new: str, check_id: str
) -> None:
    assert _run(check_id).verdict is Verdict.CONSISTENT
    assert _run(check_id, edited(name, old, new)).verdict is Verdict.CONSEQUENCE


@pytest.mark.parametrize("by", ["-0.9", "-0.2", "-0.1", "0.1", "0.2", "0.9"])
@pytest.mark.parametrize("check", [c for c in CHECKS if isinstance(c, GainCheck)], ids=lambda check: check.id)
def test_a_gain_is_never_wrong_alone(check: GainCheck, by: str) -> None:
    """Whatever a mean is changed by: where the gain fails, some mean does."""
    for place in (check.ours, check.baseline):
        tables = _bumped(TABLES, place, by)
        pairs = ((check.ours, check.our_column), (check.baseline, check.baseline_column))
        means = [replace(MEAN, place=each, column=column) for each, column in pairs]
        if _verdict(check, tables) is not Verdict.CONSISTENT:
            assert Verdict.CONTRADICTION in {_verdict(mean, tables) for mean in means}


@pytest.mark.parametrize("check_id", IN_TENSION)
def test_tensions_name_both_values_and_their_premise(published: PaperCheck, check_id: str) -> None:
    result = next(r for r in published.results if r.check.id == check_id)
    stated, against = IN_TENSION[check_id]
    found = result.disagreements[0]
    assert result.verdict is Verdict.TENSION
    assert result.check.premise
    assert stated in found.stated.text
    assert against in found.against.text


@pytest.mark.parametrize(
    ("check_id", "changes"),
    [
        ("figure4-spike", {"peak_lr": "4.7e-3"}),
        ("figure1a-warmup", {"warmup_steps": 1000}),
        ("figure1a-warmup", {"shown_steps": 2500}),
    ],
)
def test_what_would_fit_is_consistent(check_id: str, changes: dict[str, object]) -> None:
    assert _verdict(replace(BY_ID[check_id], **changes)) is Verdict.CONSISTENT


@pytest.mark.parametrize(("name", "old", "new", "check_id"), DOUBTFUL, ids=[row[3] for row in DOUBTFUL])
def test_what_hangs_on_a_premise_is_a_tension(edited: Edited, name: str, old: str, new: str, check_id: str) -> None:
    assert _run(check_id).verdict is Verdict.CONSISTENT
    assert _run(check_id, edited(name, old, new)).verdict is Verdict.TENSION


CORRECTED = [
    ("table2_learning_rate", "Average,,keel,0.0015,50.5", "Average,,keel,0.0015,50.3", "table2-average-keel-0.0015"),
    ("table4_data_scaling", "Average,,pre_ln,10,0.0015,60.3", "Average,,pre_ln,10,0.0015,60.2", "table4-average-pre_ln-10"),
    ("table4_data_scaling", "SciQ,0,pre_ln,10,0.0015,76.1", "SciQ,0,pre_ln,10,0.0015,76.7", "table4-average-pre_ln-10"),
    ("table4_data_scaling", "Average,,keel,10,0.003,61.5", "Average,,keel,10,0.003,61.6", "table4-average-keel-10"),
    ("table4_data_scaling", "Average,,keel,10,0.003,61.5", "Average,,keel,10,0.003,61.7", "table4-gain-keel-10"),
    ("table1_max_lr", ",512,", ",256,", "table1-caption"),
    ("table1_max_lr", "pre_ln,64,5000,0.05,0.00765", "pre_ln,64,5000,0.05,0.009", "tolerated-pre_ln-64"),
    ("table1_max_lr", "post_ln,64,5000,0.05,0.0003", "post_ln,64,5000,0.05,0.00015", "orders-of-magnitude"),
    ("table1_max_lr", "pre_ln,512,5000,0.05,0.00467", "pre_ln,512,5000,0.05,0.00449", "figure4-spike"),
    ("table2_learning_rate", "Average,,pre_ln,0.006,52.3", "Average,,pre_ln,0.006,42.3", "table2-best-rate"),
]


@pytest.mark.parametrize(("name", "old", "new", "check_id"), CORRECTED, ids=[f"{r[3]}-{r[2]}" for r in CORRECTED])
def test_a_corrected_number_is_no_longer_reported(edited: Edited, name: str, old: str, new: str, check_id: str) -> None:
    assert _run(check_id).verdict is not Verdict.CONSISTENT
    assert _run(check_id, edited(name, old, new)).verdict is Verdict.CONSISTENT


def test_three_depths_are_three_once_a_depth_is_gone() -> None:
    frame = TABLES.frame("table3_depth_scaling")
    fewer = PaperTables({**TABLES.frames, "table3_depth_scaling": frame[frame["n_sublayers"] != 128]})
    assert _run("section5.3-three").verdict is Verdict.WORDING
    assert _run("section5.3-three", fewer).verdict is Verdict.CONSISTENT


@pytest.mark.parametrize(
    ("check_id", "corrected"),
    [
        ("figure4-captions", {"stated": (512, 1024)}),
        ("figure5-captions", {"other": (512,)}),
        ("figure8-captions", {"stated": (512, 128)}),
        ("section5.3-three", {"count": 4}),
    ],
)
def test_a_corrected_caption_is_no_longer_reported(check_id: str, corrected: dict[str, object]) -> None:
    check = BY_ID[check_id]
    assert isinstance(check, DepthCheck)
    assert _verdict(check) is Verdict.WORDING
    assert _verdict(replace(check, **corrected)) is Verdict.CONSISTENT


@pytest.mark.parametrize(
    ("stated", "note"),
    [((256, 64), "256, 64 blocks are 512, 128 sub-layers"), ((100,), "does not reconcile them")],
)
def test_what_counting_blocks_reconciles_is_wording(stated: tuple[int, ...], note: str) -> None:
    check = replace(BY_ID["figure8-captions"], stated=stated)  # type: ignore[call-arg]
    (comparison,) = check.compare(TABLES)
    assert note in comparison.note
    assert _verdict(check) is (Verdict.CONTRADICTION if "not" in note else Verdict.WORDING)


def _bumped(tables: PaperTables, place: Place, by: str) -> PaperTables:
    frame = tables.frame(place.table).copy()
    rows = frame.index
    for column, value in place.where:
        rows = rows.intersection(frame.index[frame[column] == value])
    (row,) = rows
    text = str(Decimal(str(frame.loc[row, "printed"])) + Decimal(by))
    frame.loc[row, "printed"] = text
    frame.loc[row, "value"] = float(text)
    return PaperTables({**tables.frames, place.table: frame})


def _parts(check: Check) -> list[tuple[Check, Place]]:
    """The check cut into single comparisons, each with a place that it reads."""
    if isinstance(check, MeanCheck):
        return [(check, check.place)]
    if isinstance(check, GainCheck):
        return [(check, check.ours), (check, check.baseline)]
    if isinstance(check, SameNumbersCheck):
        return [(replace(check, pairs=(pair,)), place) for pair in check.pairs for place in pair]
    return []


@pytest.mark.parametrize("check", [c for c in CHECKS if _parts(c)], ids=lambda check: check.id)
def test_every_average_gain_and_repeated_number_can_be_contradicted(check: Check) -> None:
    for part, place in _parts(check):
        assert _verdict(part, _bumped(TABLES, place, "1.7")) is not Verdict.CONSISTENT


def test_averages_within_rounding_are_not_reported(edited: Edited) -> None:
    tables = edited("table7_sft", "Average,,keel,54.8", "Average,,keel,54.9")  # the mean is 54.825, 54.775 to 54.875
    assert _run("table7-average-keel", tables).verdict is Verdict.CONSISTENT


def test_a_finding_names_both_values_and_places(published: PaperCheck) -> None:
    result = next(r for r in published.results if r.check.id == "table4-average-keel-10")
    (found,) = result.disagreements
    assert (found.stated.text, found.stated.where) == ("61.5", "Table 4, Average, Keel, 10B tokens")
    assert found.against.text == "61.617 (61.567 to 61.667 within rounding)"
    assert found.against.where == "mean of the 6 benchmarks of Table 4, Keel, 10B tokens"


def test_ids_are_unique_and_every_statement_has_a_source() -> None:
    assert len(BY_ID) == len(CHECKS)
    assert [check.id for check in CHECKS if not (check.source and check.statement)] == []


def test_every_check_compares_something_and_every_kind_is_used(published: PaperCheck) -> None:
    assert [result.check.id for result in published.results if not result.comparisons] == []
    assert {result.check.kind for result in published.results} == set(Kind)


def test_checks_are_data() -> None:
    check = CHECKS[0]
    with pytest.raises(AttributeError, match="cannot assign to field"):
        check.statement = "another"  # type: ignore[misc]
    assert {"id", "statement", "source", "premise"} <= {f.name for f in fields(check)}


def test_every_column_of_the_tables_has_its_average_checked() -> None:
    checked = {c.place for c in CHECKS if type(c) is MeanCheck}
    averages = sum(
        int((frame["benchmark"] == "Average").sum()) for frame in TABLES.frames.values() if "benchmark" in frame.columns
    )
    assert len(checked) == averages


def test_counts_add_up(published: PaperCheck) -> None:
    *kinds, total = published.counts()
    for column in total.keys() - {"kind"}:
        assert total[column] == sum(row[column] for row in kinds)
    assert total["statements"] == len(CHECKS)
    columns = zip(("contradictions", "consequences", "wording", "tensions"), (*Verdict,)[1:], strict=True)
    assert all(total[column] == len(published.of(verdict)) for column, verdict in columns)


def test_what_does_not_fit_is_counted_by_its_kind(published: PaperCheck) -> None:
    """Three averages, a gain of two of them, five captions; the rest hangs on a premise."""
    assert published.summary() == (
        "9 contradictions: 3 of arithmetic, 1 that follows from them, 5 of wording; 9 tensions under a premise."
    )
    assert published.to_dict()["summary"] == published.summary()
    causes = {c["cause"] for check in published.to_dict()["checks"] for c in check["comparisons"]}
    assert causes == {None, "numbers", "consequence", "wording"}
    assert {r.check.kind for r in published.of(Verdict.CONTRADICTION)} == {Kind.AVERAGE}
    assert {r.check.kind for r in published.of(Verdict.WORDING)} == {Kind.DEPTH}


@pytest.mark.parametrize("orders", [1, 2])
def test_orders_are_read_generously_but_not_without_end(orders: int) -> None:
    check = BY_ID["orders-of-magnitude"]
    assert isinstance(check, OrdersCheck)
    assert _verdict(replace(check, orders=orders)) is Verdict.TENSION  # 34 times is neither nearly 10 nor nearly 100
