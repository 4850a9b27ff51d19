r"""The symbolic twins of :mod:`keel_theory.sublayer`: gains and the full Jacobian of one sub-layer, from the same spec.

Importing this module loads SymPy.

Example:
    >>> shortcut_gain(ResidualSpec(norm_out=NormKind.RMS))
    alpha*gamma_l1/sqrt(alpha**2*v + b**2*q*s**2*v)
    >>> shortcut_gain(ResidualSpec(norm_in=NormKind.RMS))
    alpha
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy as sp

from keel_theory.notation import symbol
from keel_theory.spec import GateKind, NormKind, ResidualSpec
from keel_theory.sublayer import NormWeights

__all__ = ["SymbolicSublayer", "branch_gain", "numeric_values", "shortcut_gain", "sublayer_jacobian"]


def shortcut_gain(spec: ResidualSpec) -> Any:
    """The shortcut gain as an expression in alpha, b, s, v, q, T and the weights; the numbers in the spec do not enter.

    Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (14), (18).   Status: exact as D grows.
    Assumes: as :func:`keel_theory.sublayer.shortcut_gain`, and neglects the same.

    Args:
        spec: which norms and which gate there are.

    Returns:
        The gain.

    Example:
        >>> shortcut_gain(ResidualSpec(norm_in=NormKind.RMS, norm_out=NormKind.RMS))
        alpha*gamma_l1/sqrt(alpha**2*v + b**2*gamma_l2**2*q*s**2)
    """
    carry, _ = _gate(spec)
    kept = symbol("alpha") * carry
    if spec.norm_out is NormKind.NONE:
        return kept
    return symbol("weight_out") * kept / sp.sqrt(_sum_variance(spec))


def branch_gain(spec: ResidualSpec) -> Any:
    """The gain through the branch, as an expression in the same symbols and the norm of the branch's Jacobian.

    Source: Chen & Wei 2026, arXiv:2601.19895, Eq. (27).   Status: order of magnitude.
    Assumes: as :func:`keel_theory.sublayer.branch_gain`, and neglects the same.

    Args:
        spec: which norms and which gate there are.

    Returns:
        The gain.

    Example:
        >>> branch_gain(ResidualSpec(norm_in=NormKind.RMS)) # Pre-LN
        b*gamma_l2*s*||J_F||/sqrt(v)
    """
    _, transform = _gate(spec)
    gain = symbol("branch_scale") * transform * symbol("branch_jacobian_norm") * symbol("input_scale")
    if spec.norm_out is not NormKind.NONE:
        gain *= symbol("weight_out") / sp.sqrt(_sum_variance(spec))
    if spec.norm_in is not NormKind.NONE:
        gain *= symbol("weight_in") / sp.sqrt(symbol("stream_variance"))
    if spec.norm_branch is not NormKind.NONE:
        gain *= symbol("weight_branch") / sp.sqrt(_raw_variance(spec))
    return gain


def numeric_values(
    spec: ResidualSpec,
    *,
    branch_variance: float = 1.0,
    stream_variance: float = 1.0,
    branch_jacobian_norm: float = 1.0,
    weights: NormWeights | None = None,
) -> dict[Any, float]:
    """The numbers that turn a symbolic gain into the numeric one.

    Status: definition.

    Args:
        spec: the sub-layer's update.
        branch_variance: q.
        stream_variance: v.
        branch_jacobian_norm: norm of the branch's Jacobian.
        weights: of the norms; a vector enters by its root mean square; None means one.

    Returns:
        Symbol to value.

    Example:
        >>> post_ln = ResidualSpec(norm_out=NormKind.RMS)
        >>> round(float(shortcut_gain(post_ln).subs(numeric_values(post_ln, branch_variance=3.0))), 12)
        0.5
    """
    sizes = (weights or NormWeights()).rms
    values: dict[str, Any] = {
        "alpha": spec.shortcut_scale,
        "branch_scale": spec.branch_scale,
        "input_scale": spec.input_scale,
        "branch_variance": branch_variance,
        "stream_variance": stream_variance,
        "branch_jacobian_norm": branch_jacobian_norm,
        "weight_out": sizes.norm_out,
        "weight_in": sizes.norm_in,
        "weight_branch": sizes.norm_branch,
        "gate": float(1 / (1 + sp.exp(-spec.gate_bias))),
    }
    return {symbol(name): float(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class SymbolicSublayer:
    """One sub-layer at a small width with the branch F(y) = f + M y, which has any value and any derivative at a point.

    Attributes:
        stream: x, shape (D, 1).
        constant: f, shape (D, 1).
        matrix: M, shape (D, D).
        output: x', shape (D, 1).
        jacobian: dx'/dx by differentiation, shape (D, D).
    """

    stream: Any
    constant: Any
    matrix: Any
    output: Any
    jacobian: Any


def sublayer_jacobian(spec: ResidualSpec, width: int = 2) -> SymbolicSublayer:
    """Differentiate one sub-layer with unit weights, eps = 0 and the spec's own numbers; a Highway gate is held constant.

    Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (4), (7), (13) as cases.   Status: exact.
    Neglects: nothing, but the dependence of a Highway gate on x.

    Args:
        spec: the sub-layer's update.
        width: D, 2 or 3 in practice.

    Returns:
        Symbols, output and Jacobian.

    Example:
        >>> plain = sublayer_jacobian(ResidualSpec()) # x + f + M x
        >>> sp.simplify(plain.jacobian - plain.matrix - sp.eye(2)).is_zero_matrix
        True
    """
    x = sp.Matrix(sp.symbols(f"x1:{width + 1}", real=True))
    constant = sp.Matrix(sp.symbols(f"f1:{width + 1}", real=True))
    matrix = sp.Matrix(width, width, sp.symbols(f"M1:{width**2 + 1}", real=True))
    transform = 1 / (1 + sp.exp(-sp.Float(spec.gate_bias))) if spec.gate is GateKind.HIGHWAY else sp.Integer(1)
    carry = 1 - transform if spec.gate is GateKind.HIGHWAY else sp.Integer(1)
    branch = constant + matrix * (sp.Float(spec.input_scale) * _normalise(x, spec.norm_in))
    kept = sp.Float(spec.shortcut_scale) * carry * x
    output = _normalise(kept + sp.Float(spec.branch_scale) * transform * _normalise(branch, spec.norm_branch), spec.norm_out)
    return SymbolicSublayer(stream=x, constant=constant, matrix=matrix, output=output, jacobian=output.jacobian(x))


def _gate(spec: ResidualSpec) -> tuple[Any, Any]:
    if spec.gate is GateKind.NONE:
        return sp.Integer(1), sp.Integer(1)
    return 1 - symbol("gate"), symbol("gate")


def _raw_variance(spec: ResidualSpec) -> Any:
    if spec.qkv_norm:
        return symbol("branch_variance")
    read = symbol("branch_variance") * symbol("input_scale") ** 2
    if spec.norm_in is not NormKind.NONE:
        return read * symbol("weight_in") ** 2
    return read * symbol("stream_variance")


def _sum_variance(spec: ResidualSpec) -> Any:
    carry, transform = _gate(spec)
    written = symbol("weight_branch") ** 2 if spec.norm_branch is not NormKind.NONE else _raw_variance(spec)
    return (symbol("alpha") * carry) ** 2 * symbol("stream_variance") + (symbol("branch_scale") * transform) ** 2 * written


def _normalise(vector: Any, kind: NormKind) -> Any:
    if kind is NormKind.NONE:
        return vector
    width = vector.rows
    centred = vector - sp.ones(width, 1) * sum(vector) / width if kind is NormKind.LAYER else vector
    return centred / sp.sqrt(centred.dot(centred) / width)
