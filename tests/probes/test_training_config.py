"""The configuration: schedules by hand, a stable key, refusals that name the field."""

import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest

from keel_theory.spec import SchemeError
from probes.config import ConfigError, ModelConfig
from probes.corpus import CorpusConfig
from probes.errors import KeelError, TextError
from probes.training_config import TrainingConfig, TrainingConfigError, evenly_spaced, proportions


def test_the_papers_ramp_has_its_table_entries_at_whole_steps() -> None:
    ramp = TrainingConfig(steps=5000, peak_lr=5e-2)
    assert ramp.learning_rate(30) == pytest.approx(3.0e-4, rel=1e-12)
    assert ramp.learning_rate(1010) == pytest.approx(1.01e-2, rel=1e-12)
    assert ramp.learning_rate(5000) == 5e-2


def test_cosine_warms_up_linearly_and_ends_at_the_final_rate() -> None:
    config = TrainingConfig(schedule="cosine", steps=100, warmup=10, peak_lr=1.0, final_lr=0.1)
    assert [config.learning_rate(k) for k in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
    assert config.learning_rate(55) == pytest.approx(0.55)
    assert config.learning_rate(100) == pytest.approx(0.1)


def test_the_key_is_the_same_in_another_process_and_differs_with_every_field() -> None:
    config = TrainingConfig(seed=3, probe_steps=(5, 1))
    code = "from probes.training_config import *; print(TrainingConfig(seed=3, probe_steps=(5, 1)).key)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == config.key
    others = [replace(config, seed=4), replace(config, peak_lr=0.04), replace(config, model=ModelConfig(n_blocks=5))]
    assert len({c.key for c in [config, *others]}) == 4


def test_configuration_is_hashable_and_survives_json() -> None:
    config = TrainingConfig(model=ModelConfig(scheme="keel", scheme_parameters={"alpha": "sqrt(L)"}), probe_steps=(1, 20))
    again = TrainingConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)
    assert again.key == config.key


def test_differences_are_dotted_names() -> None:
    config = TrainingConfig()
    other = replace(config, peak_lr=0.1, model=replace(config.model, width=128))
    assert config.differences(other.to_dict()) == ["model.width", "peak_lr"]
    assert config.differences(config.to_dict()) == []
    assert config.differences({}) == sorted(config.to_dict())


def test_a_seed_is_of_weights_and_data() -> None:
    config = TrainingConfig().with_seed(7)
    assert (config.seed, config.model.seed) == (7, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_lr": 0.0}, "peak_lr must be above 0"),
        ({"peak_lr": math.nan}, "peak_lr must be a finite number"),
        ({"steps": 49}, "steps of a ramp must be at least 50, got 49"),
        ({"steps": 10, "schedule": "cosine", "warmup": 10}, "warmup must end before the last of 10 steps"),
        ({"schedule": "linear"}, "schedule must be one of ramp, cosine"),
        ({"accumulation": 3}, "batch_size 8 is not divisible by accumulation 3"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"steps": 50.0}, "steps must be an integer"),
        ({"probe_steps": (0,)}, r"probe_steps must be in 1\.\.600"),
        ({"beta2": 1.0}, "beta2 must be at least 0 and below 1"),
        ({"final_lr": 1.0}, "final_lr 1.0 must not be above peak_lr"),
        ({"warmup": 20}, "warmup belongs to schedule 'cosine', a ramp has none; got 20"),
        ({"activation_checkpointing": 1}, "activation_checkpointing must be true or false"),
    ],
)
def test_fields_outside_their_domain_are_refused_by_name(changes, message) -> None:
    with pytest.raises(TrainingConfigError, match=message):
        TrainingConfig(**changes)


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(TrainingConfigError, match=r"unknown training configuration field\(s\): peek"):
        TrainingConfig.from_dict({"peek": 1})


@pytest.mark.parametrize(("steps", "n", "expected"), [(10, 0, ()), (10, 1, (10,)), (10, 4, (1, 4, 7, 10)), (3, 9, (1, 2, 3))])
def test_evenly_spaced_steps(steps, n, expected) -> None:
    assert evenly_spaced(steps, n) == expected


CONFIGURATIONS = {TrainingConfig: TrainingConfigError, ModelConfig: ConfigError, CorpusConfig: TextError}
STRANGERS = [None, True, -3, 1.5, 10**400, math.nan, "", "weird", [], ["a"], {}, {"a": []}, object()]


def _wrong(value: Any, example: Any) -> bool:
    """Whether a value can be none of a field's, judged by the kind of its default alone."""
    if isinstance(example, bool) or isinstance(value, bool):
        return type(value) is not type(example)
    if isinstance(example, (int, float)):
        return not isinstance(value, (int, float))
    return not isinstance(value, (str, list, dict) if isinstance(example, (str, tuple)) else type(example)) or (
        isinstance(example, str) and not isinstance(value, str)
    )


WRONG = [
    (kind, field.name, value)
    for kind in CONFIGURATIONS
    for field in fields(kind)
    for value in STRANGERS
    if _wrong(value, getattr(kind(), field.name))
]


@pytest.mark.parametrize(("kind", "name", "value"), WRONG, ids=[f"{k.__name__}-{n}-{str(v)[:9]}" for k, n, v in WRONG])
def test_a_field_of_the_wrong_type_is_refused_by_name(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(CONFIGURATIONS[kind], match=rf"^{name}\b"):
        kind(**{name: value})


@pytest.mark.parametrize("kind", CONFIGURATIONS)
@pytest.mark.parametrize("value", STRANGERS, ids=lambda value: str(value)[:9])
def test_whatever_a_field_is_given_it_is_taken_or_refused(kind: Any, value: Any) -> None:
    for field in fields(kind):
        try:
            kind(**{field.name: value})
        except (KeelError, SchemeError) as error:
            assert str(error)  # noqa: PT017 - that no other error comes is what is tested


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (3, "the training configuration must be a table of fields, got 3"),
        ({"model": 3}, "model must be a table of fields, got 3"),
        ({"corpus": []}, r"corpus must be a table of fields, got \[\]"),
    ],
)
def test_what_is_no_table_is_refused_by_name(values, message) -> None:
    with pytest.raises(TrainingConfigError, match=message):
        TrainingConfig.from_dict(values)


def test_an_unknown_field_of_a_text_is_named() -> None:
    with pytest.raises(TextError, match=r"unknown field\(s\) of a text: sauce"):
        CorpusConfig.from_dict({"sauce": 1})


@pytest.mark.parametrize("device", ["banana", "cuda:x", ""])
def test_a_device_that_nobody_has_is_refused_at_once(device) -> None:
    with pytest.raises(TrainingConfigError, match=f"device '{device}' cannot be used"):
        TrainingConfig(device=device)


@pytest.mark.parametrize("head_width", [16, 64])
@pytest.mark.parametrize("width", range(1, 1300, 37))
def test_a_width_makes_a_model_or_the_nearest_that_do_are_named(width, head_width) -> None:
    try:
        ModelConfig(**proportions(width, head_width=head_width))
    except TrainingConfigError as error:
        named = [int(word) for word in str(error).rpartition("do: ")[2].split(", ")]
        assert len(named) == (1 if width == 1 else 2)
        assert named[0] < width < named[-1] or width == 1
        for nearest in named:
            ModelConfig(**proportions(nearest, head_width=head_width))


@pytest.mark.parametrize(("width", "nearest"), [(50, "48, 54"), (21, "20, 22"), (80, "72, 96"), (1, "2")])
def test_a_width_without_heads_is_told_the_nearest(width, nearest) -> None:
    with pytest.raises(TrainingConfigError, match=rf"width {width} does not split .*; the nearest that do: {nearest}$"):
        proportions(width)


def test_heads_that_are_given_have_the_last_word() -> None:
    assert proportions(50, given={"n_heads": 5, "n_kv_heads": 5})["n_heads"] == 5


def test_a_wider_model_keeps_the_width_of_its_heads() -> None:
    assert proportions(512, head_width=64)["n_heads"] == 8
    assert proportions(512)["n_heads"] == 16
