"""The configuration: schedules by hand, a stable key, refusals that name the field."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from probes.config import ModelConfig
from probes.training_config import TrainingConfig, TrainingConfigError, evenly_spaced


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
