"""Trials: keys, and what they are predicted to cost."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from probes.config import ModelConfig, count_parameters, narrow
from probes.sweep_spec import sweep_from_dict
from probes.training_config import TrainingConfig
from probes.trial import SweepError, Trial, labels, predicted_flops, predicted_memory

PLAIN = Trial(config=TrainingConfig())


def test_key_is_the_same_in_another_process() -> None:
    code = (
        "from probes.trial import Trial; from probes.training_config import TrainingConfig as C; print(Trial(config=C()).key)"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == PLAIN.key
    assert len(PLAIN.key) == 12


@pytest.mark.parametrize(
    "other",
    [
        Trial(config=TrainingConfig(peak_lr=0.06)),
        Trial(config=TrainingConfig().with_seed(1)),
        Trial(config=TrainingConfig(model=ModelConfig(scheme="post_ln"))),
        Trial(config=TrainingConfig(), early_stop=False),
        Trial(config=TrainingConfig(), kind="train"),
    ],
    ids=["peak", "seed", "scheme", "early_stop", "kind"],
)
def test_whatever_can_change_the_result_changes_the_key(other: Trial) -> None:
    assert other.key != PLAIN.key


def test_it_comes_back_from_json() -> None:
    assert Trial.from_dict(json.loads(json.dumps(PLAIN.to_dict()))) == PLAIN


def test_training_has_one_key_whatever_is_said_of_stopping_early() -> None:
    config = TrainingConfig(schedule="cosine", warmup=10)
    assert Trial(config=config, kind="train").key == Trial(config=config, kind="train", early_stop=False).key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "stres"}, r"kind must be one of stress, train, got 'stres'"),
        ({"early_stop": 1}, r"early_stop must be true or false, got 1"),
        ({"config": TrainingConfig(schedule="cosine")}, r"needs schedule 'ramp', got 'cosine'"),
    ],
)
def test_bad_trial_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SweepError, match=message):
        replace(PLAIN, **changes)


def test_operations_are_six_per_parameter_and_token_where_attention_is_small() -> None:
    config = TrainingConfig(model=narrow(64), steps=100, batch_size=2, seq_len=8, validation_tokens=0)
    model = config.model
    multiplying = count_parameters(model) - model.vocab_size * model.width
    assert predicted_flops(config) == pytest.approx(6 * multiplying * 100 * 2 * 8, rel=1e-3)


@pytest.mark.parametrize("name", ["steps", "batch_size", "seq_len"])
def test_operations_grow_with_the_tokens(name: str) -> None:
    config = TrainingConfig(steps=100, batch_size=4, seq_len=32)
    assert predicted_flops(replace(config, **{name: 2 * getattr(config, name)})) >= 2 * predicted_flops(config)  # type: ignore[arg-type]


def test_memory_counts_weights_gradients_and_moments() -> None:
    config = TrainingConfig(model=narrow(512), batch_size=1, seq_len=1)
    assert predicted_memory(config) > 16 * count_parameters(config.model)


def test_memory_shrinks_with_micro_batches_and_with_checkpointing() -> None:
    config = TrainingConfig(model=ModelConfig(n_blocks=64), batch_size=64, seq_len=64)
    assert predicted_memory(replace(config, accumulation=8)) < predicted_memory(config)
    assert predicted_memory(replace(config, activation_checkpointing=True)) < predicted_memory(config)


@pytest.mark.slow
def test_memory_is_about_what_a_process_takes() -> None:
    model = ModelConfig(n_blocks=12, width=128, ffn_width=384, n_heads=8, n_kv_heads=4)
    config = TrainingConfig(model=model, batch_size=32, seq_len=128, validation_tokens=0)
    code = f"""
import json, torch
from probes.memory import peak_memory
torch.set_num_threads(1)
from probes.training import Trainer, TrainingConfig
from probes.corpus import build_corpus
config = TrainingConfig.from_dict(json.loads({json.dumps(json.dumps(config.to_dict()))}))
trainer = Trainer(config, build_corpus(config.corpus))
trainer.advance()
print(peak_memory())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) / 1.5 < predicted_memory(config) < 1.5 * int(done.stdout)


def test_a_label_names_size_ramp_and_seed_however_unusual_the_rest_is() -> None:
    model = ModelConfig(n_blocks=4, width=16, ffn_width=24, n_heads=2, n_kv_heads=1, vocab_size=512, init_std=0.03)
    config = TrainingConfig(schedule="cosine", steps=20, warmup=2, batch_size=8, model=model, clip=0.5, device="cuda")
    trial = Trial(kind="train", config=config.with_seed(3))
    assert trial.label == "keel, 8 sub-layers of width 16, peak 0.05 in 20 steps, seed 3"
    assert labels([trial]) == {trial.key: trial.label}


def test_labels_name_besides_only_what_differs_within_the_sweep() -> None:
    shared = {"steps": 80, "clip": 0.5, "weight_decay": 0.3}
    trials = sweep_from_dict(
        {"schemes": ["keel", "pre_ln"], "training": shared, "grid": [{}, {"training": {"batch_size": 4}}]}
    ).trials()
    assert list(labels(trials).values()) == [
        f"{scheme}, 64 sub-layers of width 64, peak 0.05 in 80 steps, batch_size {size}, seed 0"
        for size in (8, 4)
        for scheme in ("keel", "pre_ln")
    ]


def test_a_field_that_follows_the_depth_is_not_named() -> None:
    grids = [{"blocks": [2], "training": {"batch_size": 4}}, {"blocks": [4], "training": {"batch_size": 2}}]
    assert [label.split(", ")[3:] for label in labels(sweep_from_dict({"grid": grids}).trials()).values()] == [["seed 0"]] * 2
