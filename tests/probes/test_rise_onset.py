"""Onsets of rises under the noise of small batches, which no single point stands out of."""

import numpy as np
import pytest

from probes.divergence_criteria import JudgeThresholds, Landmarks, Record, find_rise

NOISE = 0.25


def onset(mean, seed, noise=NOISE):
    """Of a rise in a curve that falls from 5.5 before it, in steps after the fall of 60 steps."""
    fall = 2.6 + 2.9 * np.exp(-np.arange(60) / 10)
    losses = np.concatenate([fall, mean]) + noise * np.random.default_rng(seed).standard_normal(60 + len(mean))
    record = Record(np.arange(1.0, len(losses) + 1), losses, 1000, Landmarks(initial_loss=5.5))
    rise = find_rise(record, JudgeThresholds())
    assert rise is not None
    return rise.index - 60


def errors(mean, true, **options):
    return [onset(mean, seed, **options) - true for seed in range(12)]


@pytest.mark.parametrize("length", [1, 20, 60])
def test_a_rise_is_dated_to_its_beginning(length):
    mean = 2.6 + 0.7 * np.clip((np.arange(500) - 250) / length, 0, 1)
    missed = errors(mean, 250)
    assert abs(np.median(missed)) <= 10
    assert np.quantile(np.abs(missed), 0.9) <= 40


def test_a_second_rise_does_not_move_the_onset_of_the_first():
    first = np.where(np.arange(500) < 180, 2.6, 3.05)
    second = first + np.where(np.arange(500) < 350, 0.0, 0.5)
    assert abs(np.median(errors(first, 180))) <= 6
    assert abs(np.median(errors(second, 180))) <= 6


def test_a_small_drift_before_a_jump_is_not_the_onset():
    mean = 2.6 + 0.06 * np.clip(np.arange(500) / 300, 0, 1) + np.where(np.arange(500) < 300, 0.0, 0.7)
    assert abs(np.median(errors(mean, 300))) <= 6


def test_a_drift_that_leaves_the_level_is_the_onset_although_a_jump_follows():
    steps = np.arange(500)
    mean = 2.6 + 0.6 * np.clip((steps - 150) / 200, 0, 1) + np.where(steps < 350, 0.0, 0.5)
    assert abs(np.median(errors(mean, 150))) <= 40


def test_a_transient_rise_before_does_not_hide_the_base():
    steps = np.arange(500)
    mean = 2.6 + 1.5 * ((steps >= 200) & (steps < 212)) + 0.7 * np.clip((steps - 300) / 40, 0, 1)
    assert abs(np.median(errors(mean, 300))) <= 10


def test_without_noise_a_rise_is_dated_to_the_step():
    mean = 2.6 + 0.01 * np.maximum(0, np.arange(400) - 200)
    assert abs(onset(mean, 0, noise=0.0) - 200) <= 2
