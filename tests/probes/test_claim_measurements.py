"""Every claim on real models."""

import pytest

from keel_theory.claims import CLAIMS, get_claim
from probes.claim_measurements import MEASUREMENTS, measure_claim


def test_every_claim_is_measured() -> None:
    assert list(MEASUREMENTS) == list(CLAIMS)


@pytest.mark.parametrize("claim_id", CLAIMS)
def test_measurement_agrees_with_theory(claim_id: str) -> None:
    measurement = measure_claim(claim_id)
    assert measurement.agrees, measurement
    spread = 3 * measurement.error + measurement.tolerance
    assert spread < 0.35 * max(abs(measurement.predicted), 1.0), "a measurement that could not fail"


@pytest.mark.parametrize(
    "claim_id", ["15-wrong-base", "19-wrong-no-power", "19-wrong-limit", "19-first-block", "15-full-gradient"]
)
def test_measurement_refutes_what_is_wrong(claim_id: str) -> None:
    measurement, evidence = measure_claim(claim_id), get_claim(claim_id).run().evidence
    assert abs(measurement.value - evidence.claimed) > 3 * measurement.error + measurement.tolerance


def test_post_ln_s_full_gradient_does_not_vanish_where_the_shortcut_s_does() -> None:
    shortcut, full = measure_claim("15-product"), measure_claim("15-full-gradient")
    assert shortcut.own < -0.5  # the model's own branches, log10
    assert full.own > -0.1
