"""Items of the report: statuses follow from the evidence, and the text from the frames."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from figures._reproduction_items import EQUATIONS, FIGURES, TABLES
from figures._reproduction_rows import (
    ClaimCells,
    Equation,
    Figure,
    Sources,
    Spread,
    Status,
    _grouped,
    equation_row,
    figure_row,
    readable,
)
from figures._reproduction_text import DISAGREEMENTS, EQUATION_NOTES, LIMITS, NOTES, texts
from figures.paper_check import check_paper
from figures.paper_tables import TABLES as PUBLISHED_TABLES
from figures.paper_tables import load_tables
from figures.pipeline import StoredFrame, stored_frame
from figures.registry import FIGURES as REGISTRY
from figures.reproduction import as_markdown, collect, rows, summary
from keel_theory.claims import CLAIMS
from keel_theory.derivations import DERIVATIONS
from probes.printed_equations import PRINTED
from tests.figures._frames import learning, run, runs, with_spike

HOLDS = ClaimCells(statement="s", claimed="1", numeric="1.0 ± 0.1", measured="1.1 ± 0.1", own="0.9", holds=True, decided=True)
REFUTED = replace(HOLDS, holds=False)
UNDECIDED = replace(HOLDS, decided=False)
ITEM = Equation(numbers="3", paper="p", derivations=("3",), definition="3", claims=("a", "b"))


def _sources(frames: Callable[[str], StoredFrame | None] = lambda name: None, **changes: Any) -> Sources:
    tables = load_tables()
    plain: dict[str, Any] = {
        "proved": {"3": True},
        "differences": {"3": 1e-16},
        "claims": {"a": HOLDS, "b": HOLDS},
        "frames": frames,
        "consistency": check_paper(tables),
        "tables": {name: tables.frame(name) for name in PUBLISHED_TABLES},
    }
    return Sources(**(plain | changes))


def _stability(pre_ln: float, keel: float, width: int = 64) -> StoredFrame:
    """Two seeds of Figure 1a with rises of these heights."""
    calm = learning(1000, 2.2)
    frame = runs(
        run(with_spike(calm, 500, height), scheme=scheme, seed=seed, width=width)
        for scheme, height in (("pre_ln", pre_ln), ("keel", keel))
        for seed in (0, 1)
    )
    return StoredFrame(frame=frame, about={"device": "cpu"})


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, Status.DEFINED),
        ({"claims": {"a": HOLDS, "b": REFUTED}}, Status.IN_DIRECTION),
        ({"claims": {"a": REFUTED, "b": REFUTED}}, Status.NOT_REPRODUCED),
        ({"claims": {"a": HOLDS, "b": UNDECIDED}}, Status.NOT_REPRODUCED),
        ({"claims": {"a": HOLDS}}, Status.NOT_ATTEMPTED),
        ({"differences": {"3": 1e-3}, "claims": {"a": REFUTED, "b": REFUTED}}, Status.NOT_REPRODUCED),
    ],
    ids=["all hold", "one refuted", "all refuted", "one undecided", "one not run", "another model"],
)
def test_status_of_an_equation_follows_from_its_evidence(changes: dict[str, Any], status: Status) -> None:
    assert equation_row(ITEM, _sources(**changes)).status is status


@pytest.mark.parametrize("changes", [{"proved": {"3": False}}, {"differences": {"3": 1e-3}}])
def test_an_equation_without_proof_or_model_is_not_reproduced_in_full(changes: dict[str, Any]) -> None:
    assert equation_row(ITEM, _sources(**changes)).status in {Status.IN_DIRECTION, Status.NOT_REPRODUCED}
    alone = replace(ITEM, claims=())
    assert equation_row(alone, _sources(**changes)).status is Status.NOT_REPRODUCED


def test_a_claim_without_a_definition_is_reproduced_and_what_is_not_restated_is_not() -> None:
    claim = replace(ITEM, definition="")
    assert equation_row(claim, _sources()).status is Status.REPRODUCED
    row = equation_row(replace(claim, restated=False, remark="r"), _sources())
    assert (row.status, row.why) == (Status.NOT_RESTATED, "r")
    assert "derivation proved" in row.ours


def test_row_of_an_equation_says_what_was_refuted_and_how_to_repeat_it() -> None:
    row = equation_row(replace(ITEM, beside=("c",)), _sources(claims={"a": HOLDS, "b": HOLDS, "c": REFUTED}))
    assert "refuted (`c`): s" in row.why
    assert row.command == "`keel theory derive 3`; `keel verify a b c`"
    assert "`a` holds: claimed 1, numeric 1.0 ± 0.1, measured 1.1 ± 0.1" in row.ours


def _figure(name: str) -> Figure:
    return next(item for item in (*FIGURES, *TABLES) if isinstance(item, Figure) and item.figure == name)


@pytest.mark.parametrize(
    ("pre_ln", "keel", "width", "status"),
    [
        (1.5, 0.0, 1024, Status.REPRODUCED),
        (1.5, 0.0, 64, Status.IN_DIRECTION),
        (1.5, 1.0, 1024, Status.IN_DIRECTION),
        (0.5, 1.0, 64, Status.NOT_REPRODUCED),
    ],
)
def test_status_of_a_figure_is_its_finding_at_its_size(pre_ln: float, keel: float, width: int, status: Status) -> None:
    row = figure_row(_figure("fig1a_stability"), _sources(lambda name: _stability(pre_ln, keel, width)))
    assert row.status is status
    assert row.seeds == "0, 1"
    assert f"width {width:,}" in row.size
    assert ("every part holds" in row.why) == (status is Status.IN_DIRECTION and keel == 0.0)


def _shallow_and_deep(keel: float) -> StoredFrame:
    """Figure 8a with three seeds; Keel ends at this loss."""
    frame = runs(
        run(
            learning(100, 2.5),
            scheme=scheme,
            n_sublayers=depth,
            seed=seed,
            width=1024,
            validation_loss=(2.7 if depth == 16 else keel) if scheme == "keel" else 2.6,
        )
        for scheme in ("pre_ln", "keel")
        for depth in (16, 64)
        for seed in (0, 1, 2)
    )
    return StoredFrame(frame=frame, about={"device": "cpu"})


@pytest.mark.parametrize(
    ("keel", "status", "why"),
    [
        (2.3, Status.IN_DIRECTION, "not tested: scores"),
        (3.25, Status.NOT_DECIDED, "3 runs end at the unigram entropy, and of those nothing can be compared"),
        (2.8, Status.NOT_REPRODUCED, "does not hold: Keel, deep and narrow, ends lower than both shapes of Pre-LN"),
    ],
)
def test_row_of_a_figure_says_which_parts_hold_and_why_others_are_open(keel: float, status: Status, why: str) -> None:
    row = figure_row(_figure("fig8a_deep_narrow"), _sources(lambda name: _shallow_and_deep(keel)))
    assert row.status is status
    assert why in row.why
    assert "every part holds" not in row.why
    assert "rule changed after the runs: nothing is compared where" in row.why


REPORTED = [item for item in (*FIGURES, *TABLES) if isinstance(item, Figure) and not item.published]
_SETTING = ("scheme", "n_sublayers", "width", "peak_lr", "steps", "run")


@pytest.mark.parametrize("item", REPORTED, ids=lambda item: item.place)
def test_seeds_and_tokens_are_said_for_every_setting_as_its_data_has_them(item: Figure) -> None:
    stored = stored_frame(item.figure)
    assert stored is not None
    frame = stored.frame
    if "batch_size" in frame.columns:
        frame = frame.assign(tokens_per_step=frame["batch_size"] * frame["seq_len"])
    row = figure_row(item, _sources(stored_frame))
    if "seed" not in frame.columns:
        assert row.seeds == "–"
        return
    setting = [name for name in (*_SETTING, *item.groups) if name in frame.columns]
    for _, of_setting in frame.groupby(list(dict.fromkeys(setting))):
        (group,) = _grouped(of_setting, item.groups)
        seeds = sorted(map(str, of_setting["seed"].unique()))
        assert _said(row.seeds, group) == seeds, of_setting[setting].iloc[0]
        (tokens,) = of_setting["tokens_per_step"].unique()
        assert f"{tokens} tokens a step" in _said(row.size, group), of_setting[setting].iloc[0]


def _said(cell: str, group: str) -> list[str]:
    """What a cell says of all groups and of this one."""
    parts = [part.rpartition(": ") for part in cell.split("; ")]
    return [word for name, _, words in parts if name in ("", group) for word in words.split(", ")]


def test_table_1_says_that_the_deep_models_have_one_seed_and_half_the_batch() -> None:
    row = figure_row(_figure("table1_max_lr"), _sources(stored_frame))
    assert row.seeds == "64 sub-layers: 0, 1, 2; 256 sub-layers: 0"
    assert row.size.endswith("256 sub-layers: 600 steps, 128 tokens a step, half the batch")


def test_figure_3_says_that_its_ramps_have_one_seed() -> None:
    assert "ramps, 600 steps: 0" in figure_row(_figure("fig3_divergence"), _sources(stored_frame)).seeds.split("; ")


def test_counts_are_given_per_group() -> None:
    row = equation_row(ITEM, _sources())
    groups = {"equations": [row, replace(row, status=Status.NOT_DECIDED)], "tables": [row]}
    assert summary(groups) == (
        "Of 2 equations: 1 definition implemented, 1 not decided. Of 1 tables: 1 definition implemented."
    )


def test_figure_without_a_run_is_not_attempted() -> None:
    row = figure_row(_figure("fig1a_stability"), _sources())
    assert (row.status, row.ours) == (Status.NOT_ATTEMPTED, "–")
    assert "no committed run" in row.why


def test_a_finding_changes_the_document() -> None:
    texts = [
        as_markdown(_sources(lambda name, h=height: _stability(*h) if name == "fig1a_stability" else None))
        for height in ((1.5, 0.0), (0.5, 1.0))
    ]
    assert texts[0] != texts[1]
    assert "Figure 1a is not reproduced" in texts[1]
    assert "Figure 1a is not reproduced" not in texts[0]


def test_frames_of_other_settings_do_not_count(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    current = collect({}, prove=False).frames("fig2_block_diagram")
    assert current is not None
    monkeypatch.setattr("figures.pipeline.settings_key", lambda *arguments: "another")
    assert collect({}, prove=False).frames("fig2_block_diagram") is None
    monkeypatch.undo()
    assert collect({}, data=tmp_path, prove=False).frames("fig2_block_diagram") is None


def test_derivations_are_proved_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel_theory.derivations.is_proved", lambda derivation: derivation.id != "15")
    proved = collect({}).proved
    assert not proved["15"]
    assert proved["3"]
    assert collect({}, prove=False).proved["15"]


def test_evidence_that_items_name_exists() -> None:
    for item in EQUATIONS:
        assert set(item.derivations) <= set(DERIVATIONS)
        assert {*item.claims, *item.beside} <= set(CLAIMS)
        assert not item.definition or item.definition in PRINTED
    assert {item.figure for item in (*FIGURES, *TABLES) if isinstance(item, Figure)} <= set(REGISTRY)
    assert {name for each in DISAGREEMENTS for name in each.claims} <= set(CLAIMS)
    assert {name for names in EQUATION_NOTES.values() for name in names} <= set(CLAIMS)


def test_every_definition_and_every_numbered_claim_is_used() -> None:
    assert {item.definition for item in EQUATIONS} >= set(PRINTED)
    used = {name for item in EQUATIONS for name in (*item.claims, *item.beside)}
    assert {name for name, claim in CLAIMS.items() if claim.equation != "-"} <= used


def test_table_8_is_computed() -> None:
    sources = _sources()
    assert rows(sources)["tables"][-1].status is Status.REPRODUCED
    changed = sources.tables["table8_model_config"].copy()
    changed.loc[changed["hyper_parameter"] == "hidden_dim", "value"] = 512.0
    other = replace(sources, tables={**sources.tables, "table8_model_config": changed})
    assert rows(other)["tables"][-1].status is Status.NOT_REPRODUCED


KNOWN = (
    r"Eqs?\. \d+( and \d+)?|Figures? \d[a-c]?( and \d[a-c])?|Tables? \d( to \d)?|`[\w-]+`|1/sqrt\((width|v_0 \+ 2 q)\)|"
    r"log10|1e4|10\^12|v_0( = q = 1)?|1,024 and 2,048|1,024|512 sub-layers|float32|bfloat16|vocabulary of 256"
)


def test_every_text_is_used_and_every_item_has_one() -> None:
    assert list(texts()) == [*EQUATION_NOTES, *NOTES, *LIMITS, *(each.id for each in DISAGREEMENTS)]


@pytest.mark.parametrize("name", texts())
def test_no_measured_number_is_written_by_hand(name: str) -> None:
    """Outside the fields there are the paper's numbers, names, and nothing else."""
    by_hand = re.sub(KNOWN, "", re.sub(r"\{[^}]*\}", "", texts()[name]))
    assert not re.search(r"\d", by_hand), by_hand


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"median": 1.0, "low": 0.5, "high": 2.0, "seeds": 3}, "1.0 (0.5 to 2.0)"),
        ({"median": 1.0, "low": 1.0, "high": 1.0, "seeds": 1}, "1.0"),
    ],
)
def test_spreads_print_their_range(value: dict[str, float], text: str) -> None:
    spread = readable({"x": [value]})["x"][0]
    assert isinstance(spread, Spread)
    assert f"{spread:.1f}" == text
