"""Every claim on real models."""

from collections.abc import Callable

import pytest

from keel_theory.claims import CLAIMS, get_claim
from probes import claim_measurements
from probes.blocks import ResidualSublayer
from probes.claim_measurements import MEASUREMENTS, measure_claim
from probes.model import Transformer


def test_every_claim_is_measured() -> None:
    assert list(MEASUREMENTS) == list(CLAIMS)


@pytest.mark.parametrize("claim_id", CLAIMS)
def test_measurement_agrees_with_theory_and_with_nothing_else(claim_id: str) -> None:
    """Three standard errors around the prediction, at this width, are clear of what has to be excluded, moved likewise."""
    measurement, result = measure_claim(claim_id), get_claim(claim_id).run()
    assert measurement.agrees, measurement
    spread = 3 * measurement.error + measurement.tolerance
    if result.excluded is None:
        assert spread <= 1e-9, "an identity is exact"
    else:
        distance = abs(result.excluded - result.evidence.derived)
        assert spread < 0.35 * distance, "a measurement that could not fail"
        assert measurement.excludes(result.excluded + measurement.predicted - result.evidence.derived)


def _spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[str, ResidualSublayer], None]) -> None:
    build = claim_measurements._model

    def spoilt(scheme: str, *arguments: object, **values: object) -> Transformer:
        model = build(scheme, *arguments, **values)
        for sublayer in model.sublayers():
            change(scheme, sublayer)
        return model

    monkeypatch.setattr(claim_measurements, "_model", spoilt)


@pytest.mark.parametrize("alpha", [45.0, 1e9], ids=["a = 45", "nothing lost"])
def test_another_scale_in_the_later_blocks_of_keel_is_noticed(monkeypatch: pytest.MonkeyPatch, alpha: float) -> None:
    def change(_: str, sublayer: ResidualSublayer) -> None:
        sublayer.shortcut_scale = alpha if sublayer.shortcut_scale == 64.0 else sublayer.shortcut_scale

    _spoil(monkeypatch, change)
    assert not measure_claim("19-later-blocks").agrees


@pytest.mark.parametrize(
    ("claim_id", "scheme"), [("24-26-shortcut", "scaled_shortcut"), ("24-26-shortcut", "scaled_shortcut_input_gain")]
)
def test_an_attempt_with_another_shortcut_is_noticed(monkeypatch: pytest.MonkeyPatch, claim_id: str, scheme: str) -> None:
    def change(name: str, sublayer: ResidualSublayer) -> None:
        sublayer.shortcut_scale = 32.0 if name == scheme else sublayer.shortcut_scale

    _spoil(monkeypatch, change)
    assert not measure_claim(claim_id).agrees


def test_ignoring_the_input_scale_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(_: str, sublayer: ResidualSublayer) -> None:
        sublayer.branch.input_scale = 1.0

    _spoil(monkeypatch, change)
    measurement = measure_claim("layernorm-scaling")
    assert not measurement.agrees
    assert measurement.value > 50


def test_post_ln_s_full_gradient_does_not_vanish_where_the_shortcut_s_does() -> None:
    shortcut, full = measure_claim("15-product"), measure_claim("15-full-gradient")
    assert shortcut.own < -0.5  # the model's own branches, log10
    assert full.own > -0.1


def test_the_first_block_of_the_paper_s_shape_gains_what_its_initialisation_gives() -> None:
    """One q for both branches stands for the model's two: the gain of a model of width 1,024 is within a tenth of it."""
    measurement = measure_claim("19-first-block-initial")
    assert measurement.own == pytest.approx(measurement.predicted, rel=0.1)
    assert measurement.own > 3
