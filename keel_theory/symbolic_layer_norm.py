r"""The normalisation Jacobian by SymPy at a small width: differentiated, closed form, and the difference of the two.

Importing this module loads SymPy.

Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (9), (23) for the norm; the Jacobian and its spectrum are derived here.

Example:
    >>> jacobian_difference(2, NormKind.RMS)
    Matrix([
    [0, 0],
    [0, 0]])
"""

from __future__ import annotations

from typing import Any

import sympy as sp

from keel_theory.errors import DomainError, require_at_least
from keel_theory.layer_norm import Convention
from keel_theory.notation import symbol
from keel_theory.spec import NormKind

__all__ = [
    "closed_form_jacobian",
    "coordinates",
    "differentiated_jacobian",
    "jacobian_difference",
    "normalised",
    "spectrum_residuals",
    "weights",
]


def coordinates(width: int) -> Any:
    """The vector x as symbols, shape (width, 1).

    Status: definition.

    Example:
        >>> list(coordinates(2))
        [x1, x2]
    """
    return sp.Matrix(sp.symbols(f"x1:{width + 1}", real=True))


def weights(width: int) -> Any:
    """The weight as symbols, shape (width, 1).

    Status: definition.

    Example:
        >>> list(weights(2))
        [g1, g2]
    """
    return sp.Matrix(sp.symbols(f"g1:{width + 1}", real=True))


def normalised(width: int, kind: NormKind, convention: Convention = Convention.UNIT) -> Any:
    """The normalised, weighted vector with eps, shape (width, 1).

    Status: definition.

    Example:
        >>> normalised(2, NormKind.RMS)[0]
        g1*x1/sqrt(eps + x1**2 + x2**2)
    """
    centred = _centring(width, kind) * coordinates(width)
    return weights(width).multiply_elementwise(centred / _scale(centred, convention))


def differentiated_jacobian(width: int, kind: NormKind, convention: Convention = Convention.UNIT) -> Any:
    """The Jacobian by differentiation, shape (width, width).

    Status: exact.

    Example:
        >>> at = {"x1": 3, "x2": 4, "g1": 1, "g2": 1, "eps": 0}
        >>> jacobian = differentiated_jacobian(2, NormKind.RMS)
        >>> jacobian.subs({each: at[each.name] for each in jacobian.free_symbols}) * 125 # 1/|x| across x, 0 along it
        Matrix([
        [ 16, -12],
        [-12,   9]])
    """
    return normalised(width, kind, convention).jacobian(coordinates(width))


def closed_form_jacobian(width: int, kind: NormKind, convention: Convention = Convention.UNIT) -> Any:
    r"""The Jacobian by the closed form of :mod:`keel_theory.layer_norm`, shape (width, width).

    .. math:: J = \frac{1}{s}\,\mathrm{diag}(\gamma)\left(I - \frac{c c^\top}{n s^2}\right) C

    Status: exact; :func:`jacobian_difference` is the proof.

    Example:
        >>> at = {"x1": 3, "x2": 4, "g1": 1, "g2": 1, "eps": 0}
        >>> jacobian = closed_form_jacobian(2, NormKind.RMS)
        >>> jacobian.subs({each: at[each.name] for each in jacobian.free_symbols}) * 125
        Matrix([
        [ 16, -12],
        [-12,   9]])
    """
    centring = _centring(width, kind)
    centred = centring * coordinates(width)
    scale = _scale(centred, convention)
    projection = sp.eye(width) - centred * centred.T / (_count(width, convention) * scale**2)
    return sp.diag(*weights(width)) * projection * centring / scale


def jacobian_difference(width: int, kind: NormKind, convention: Convention = Convention.UNIT) -> Any:
    """Differentiated minus closed form, simplified: the zero matrix is the proof.

    Status: exact.

    Args:
        width: D >= 2.
        kind: which normalisation.
        convention: ``rms`` or ``unit``.

    Returns:
        Shape (width, width).

    Example:
        >>> jacobian_difference(3, NormKind.LAYER, Convention.RMS).is_zero_matrix
        True
    """
    difference = differentiated_jacobian(width, kind, convention) - closed_form_jacobian(width, kind, convention)
    return difference.applyfunc(sp.simplify)


def spectrum_residuals(width: int, kind: NormKind, convention: Convention = Convention.UNIT) -> dict[str, Any]:
    r"""What is left of each eigenvector equation of the unweighted Jacobian, simplified: zero vectors are the proof.

    The matrix is symmetric, so its singular values are the absolute eigenvalues: 1/s on every centred direction orthogonal
    to c, :math:`(1/s)(\epsilon/s^2)` on c, and 0 on the constant vector for LayerNorm.

    Status: exact.

    Args:
        width: D >= 2.
        kind: which normalisation.
        convention: ``rms`` or ``unit``.

    Returns:
        ``tangential``, ``radial`` and, for LayerNorm, ``mean``: each of shape (width, 1).

    Example:
        >>> {name: bool(residual.is_zero_matrix) for name, residual in spectrum_residuals(2, NormKind.RMS).items()}
        {'tangential': True, 'radial': True}
    """
    jacobian = closed_form_jacobian(width, kind, convention).subs(dict.fromkeys(weights(width), 1))
    centring = _centring(width, kind)
    centred = centring * coordinates(width)
    scale = _scale(centred, convention)
    other = centring * sp.Matrix(sp.symbols(f"t1:{width + 1}", real=True))
    tangential = centred.dot(centred) * other - centred.dot(other) * centred
    residuals = {
        "tangential": jacobian * tangential - tangential / scale,
        "radial": jacobian * centred - symbol("eps") / scale**3 * centred,
    }
    if kind is NormKind.LAYER:
        residuals["mean"] = jacobian * sp.ones(width, 1)
    return {name: residual.applyfunc(sp.simplify) for name, residual in residuals.items()}


def _centring(width: int, kind: NormKind) -> Any:
    require_at_least("width", width, 2)
    if kind is NormKind.NONE:
        raise DomainError("kind must be rms or layer, got none")
    return sp.eye(width) - sp.ones(width, width) / width if kind is NormKind.LAYER else sp.eye(width)


def _count(width: int, convention: Convention) -> int:
    return width if convention is Convention.RMS else 1


def _scale(centred: Any, convention: Convention) -> Any:
    return sp.sqrt(centred.dot(centred) / _count(centred.rows, convention) + symbol("eps"))
