"""Mathematical statements as named assertions, shared by the tests."""

from __future__ import annotations

from keel_theory.spec import Scheme

__all__ = ["assert_reduces_to"]


def assert_reduces_to(scheme: Scheme, other: Scheme, n_sublayers: int, *, first: int = 0) -> None:
    """Both schemes give the same update to every sub-layer from index ``first`` (0-based) on."""
    mine, theirs = scheme.specs(n_sublayers)[first:], other.specs(n_sublayers)[first:]
    assert mine, "nothing to compare"
    differing = [first + i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
    assert not differing, f"{scheme.name} and {other.name} differ at sub-layers {differing}"
