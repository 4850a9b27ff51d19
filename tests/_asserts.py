"""Mathematical statements as named assertions, shared by the tests."""

from __future__ import annotations

from dataclasses import replace

from keel_theory.spec import Scheme

__all__ = ["assert_reduces_to", "assert_runs_match_specs"]


def assert_reduces_to(scheme: Scheme, other: Scheme, n_sublayers: int, *, first: int = 0) -> None:
    """Both schemes give the same update to every sub-layer from index ``first`` (0-based) on."""
    mine, theirs = scheme.specs(n_sublayers)[first:], other.specs(n_sublayers)[first:]
    assert mine, "nothing to compare"
    differing = [first + i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
    assert not differing, f"{scheme.name} and {other.name} differ at sub-layers {differing}"


def assert_runs_match_specs(scheme: Scheme, n_sublayers: int) -> None:
    """The runs of a scheme cover the depth without gaps and say what its specs say, their varying fields apart."""
    specs, runs = scheme.specs(n_sublayers), scheme.runs(n_sublayers)
    assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
    assert runs[-1].stop == n_sublayers
    for run in runs:
        for i in range(run.start, run.stop):
            told = run.period[(i - run.start) % len(run.period)]
            varying = {name: getattr(specs[i], name) for name in run.varying}
            assert replace(told, **varying) == specs[i], f"{scheme.name}: sub-layer {i} of {n_sublayers}"
