"""Sweeps as TOML: what they expand to, and mistakes told by name before anything runs."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from keel_theory.spec import SchemeError
from probes.config import ModelConfig
from probes.corpus import CorpusConfig
from probes.sweep_spec import read_sweep, sweep_from_dict
from probes.training_config import TrainingConfig
from probes.trial import SweepError
from tests.probes._sweeps import SMALL, small_sweep

COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "sweeps").glob("*.toml"))


def test_every_combination_is_one_trial() -> None:
    sweep = small_sweep(blocks=[1, 2], widths=[16, 32], peaks=[0.02, 0.1], seeds=[0, 1, 2])
    seen = {(c.model.scheme, c.model.n_blocks, c.model.width, c.peak_lr, c.seed) for c in (t.config for t in sweep.trials())}
    assert len(sweep.trials()) == len(seen) == 2 * 2 * 2 * 2 * 3


def test_seed_is_of_weights_and_data() -> None:
    (trial,) = small_sweep(schemes=["keel"], seeds=[7]).trials()
    assert (trial.config.seed, trial.config.model.seed) == (7, 7)


def test_grids_override_what_the_file_shares() -> None:
    sweep = small_sweep(
        grid=[{"peaks": [0.05]}, {"peaks": [0.25], "schemes": ["keel"], "early_stop": False, "training": {"steps": 100}}]
    )
    found = [(t.config.model.scheme, t.config.peak_lr, t.config.steps, t.early_stop) for t in sweep.trials()]
    assert found == [("keel", 0.05, 60, True), ("post_ln", 0.05, 60, True), ("keel", 0.25, 100, False)]
    assert {t.config.batch_size for t in sweep.trials()} == {2}, "a grid's table is laid over the shared one"


def test_a_trial_in_two_grids_is_one() -> None:
    assert len(small_sweep(grid=[{"seeds": [0, 1]}, {"seeds": [1, 2]}]).trials()) == 2 * 3


@pytest.mark.parametrize(("width", "shape"), [(16, (48, 1, 1)), (64, (192, 4, 2)), (512, (1536, 16, 8))])
def test_ffn_and_heads_follow_the_width(width: int, shape: tuple[int, int, int]) -> None:
    model = small_sweep(widths=[width]).trials()[0].config.model
    assert (model.ffn_width, model.n_heads, model.n_kv_heads) == shape


def test_the_model_table_has_the_last_word() -> None:
    model = small_sweep(widths=[64], model={"n_heads": 8, "n_kv_heads": 8}).trials()[0].config.model
    assert (model.n_heads, model.n_kv_heads, model.ffn_width) == (8, 8, 192)


@pytest.mark.parametrize(("tokenizer", "size"), [("bytes", 256), ("bpe:300", 300)])
def test_vocabulary_is_the_tokenizers(tokenizer: str, size: int) -> None:
    trials = small_sweep(corpus={"tokenizer": tokenizer}).trials()
    assert trials[0].config.model.vocab_size == size


def test_profiles_are_spread_over_the_steps() -> None:
    assert small_sweep(profiles=3).trials()[0].config.probe_steps == (1, 30, 60)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scheme": ["keel"]}, SweepError, r"unknown key 'scheme'; known: .*schemes"),
        ({"training": {"step": 60}}, SweepError, r"unknown key 'training\.step'; known: .*steps"),
        ({"training": {"peak_lr": 0.1}}, SweepError, r"unknown key 'training\.peak_lr'"),
        ({"model": {"width": 16}}, SweepError, r"unknown key 'model\.width'"),
        ({"corpus": {"source": "a"}}, SweepError, r"unknown key 'corpus\.source'; known: .*sources"),
        ({"grid": [{}, {"seed": [1]}]}, SweepError, r"grid 2: unknown key 'seed'"),
        ({"grid": {"seeds": [1]}}, SweepError, r"grid must be one or more \[\[grid\]\] tables"),
        ({"seeds": 3}, SweepError, r"seeds must be a list of integers, got 3"),
        ({"seeds": [True]}, SweepError, r"seeds must be a list of integers, got \[True\]"),
        ({"blocks": [2.5]}, SweepError, r"blocks must be a list of integers, got \[2\.5\]"),
        ({"peaks": ["0.1"]}, SweepError, r"peaks must be a list of numbers, got \['0\.1'\]"),
        ({"schemes": "keel"}, SweepError, r"schemes must be a list of names, got 'keel'"),
        ({"early_stop": "no"}, SweepError, r"early_stop must be true or false, got 'no'"),
        ({"training": 60}, SweepError, r"training must be a table, got 60"),
        ({"name": 3}, SweepError, r"name must be a text, got 3"),
        ({"seeds": []}, SweepError, r"has no trial: an axis is empty"),
        ({"schemes": ["keeel"]}, SchemeError, r"keeel"),
        ({"kind": "stres"}, SweepError, r"grid 1: kind must be one of stress, train, got 'stres'"),
        ({"peaks": [-0.1]}, SweepError, r"grid 1: peak_lr must be above 0, got -0\.1"),
        ({"training": {"steps": 10}}, SweepError, r"grid 1: steps of a ramp must be at least 50, got 10"),
        ({"training": {"steps": "60"}}, SweepError, r"grid 1: steps must be an integer of at least 1, got '60'"),
        ({"corpus": {"max_bytes": "a"}}, SweepError, r"grid 1: max_bytes must be an integer of at least 1, got 'a'"),
        ({"profiles": -3}, SweepError, r"profiles must be an integer of at least 0, got -3"),
        ({"peaks": [10**400]}, SweepError, r"peaks must be a list of numbers"),
        ({"training": {"device": "banana"}}, SweepError, r"grid 1: device 'banana' cannot be used"),
        ({"training": {"warmup": 20}}, SweepError, r"grid 1: warmup belongs to schedule 'cosine'"),
        ({"widths": [50]}, SweepError, r"grid 1: width 50 does not split .* the nearest that do: 48, 54"),
        ({"model": {"scheme_parameters": "alpha=3"}}, SweepError, r"grid 1: scheme_parameters must be a table"),
        ({"blocks": [10**400]}, SweepError, r"grid 1: n_blocks must be at most 1000000"),
        ({"model": {"scheme_parameters": {"beta": 3}}}, SweepError, r"grid 1: scheme 'keel' has no parameter 'beta'"),
        ({"blocks": [0]}, SweepError, r"grid 1: n_blocks must be an integer of at least 1, got 0"),
    ],
)
def test_a_mistake_is_told_by_name(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sweep_from_dict({**SMALL, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schemes = ]", r"sweep\.toml' is not TOML: .*line 1"),
        ("scheme = 1", r"sweep\.toml: unknown key 'scheme'"),
        ("seeds = [1" + 5000 * "0" + "]", r"sweep\.toml' is not TOML: .*digits"),
        (None, r"cannot read the sweep .*No such file"),
    ],
    ids=["syntax", "key", "digits", "missing"],
)
def test_a_bad_file_is_told_by_name(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "sweep.toml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(SweepError, match=message):
        read_sweep(path)


def test_a_sweep_without_a_name_is_called_as_its_file(tmp_path: Path) -> None:
    path = tmp_path / "depths.toml"
    path.write_text('schemes = ["keel"]\n', encoding="utf-8")
    assert read_sweep(path).name == "depths"


@pytest.mark.parametrize("path", COMMITTED, ids=[path.stem for path in COMMITTED])
def test_committed_sweeps_are_in_order(path: Path) -> None:
    sweep = read_sweep(path)
    assert sweep.name == path.stem
    assert {t.kind for t in sweep.trials()} == {"stress"}


def test_the_cpu_table_has_nine_schemes_two_ramps_and_three_seeds() -> None:
    path = next(path for path in COMMITTED if path.stem == "table1_cpu")
    trials = read_sweep(path).trials()
    assert len(trials) == 9 * 2 * 3
    assert {(t.config.peak_lr, t.config.steps) for t in trials} == {(0.05, 600), (0.25, 1000)}
    assert {t.config.model.n_sublayers for t in trials} == {64}


TOML_VALUES = [True, -3, 1.5, 10**400, "", "weird", [], [3], ["a"], {}, {"a": 3}]
TABLES = {"training": TrainingConfig, "model": ModelConfig, "corpus": CorpusConfig}
FIELDS = [(table, field.name) for table, kind in TABLES.items() for field in fields(kind)]


@pytest.mark.parametrize(("table", "name"), FIELDS, ids=[f"{table}.{name}" for table, name in FIELDS])
def test_whatever_a_field_is_given_it_is_taken_or_refused_by_name(table: str, name: str) -> None:
    refused = 0
    for value in TOML_VALUES:
        try:
            sweep_from_dict({**SMALL, "schemes": ["keel"], table: {**SMALL.get(table, {}), name: value}})
        except SweepError as error:
            refused += 1
            assert name in str(error) or "has no parameter 'a'" in str(error) or "context_length" in str(error)  # noqa: PT017 - every value is tried
    assert refused >= len(TOML_VALUES) // 2
