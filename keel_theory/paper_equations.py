r"""The paper's equations on residual schemes and their gradients, each derived step by step.

Numbers are those of Chen & Wei 2026, arXiv:2601.19895. Vector identities are proved at width 2 with the branch
F(x) = f + M x, which takes any value and any derivative at a point; gains are for large width, where a random gradient
loses nothing to the projection.

Importing this module loads SymPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import sympy as sp

from keel_theory.expressions import BranchGain, ShortcutGain, ShortcutProduct, SumVariance, WeightedShortcutGain
from keel_theory.named_symbols import NamedMatrix, NamedSymbol
from keel_theory.notation import symbol
from keel_theory.results import Derivation, Step, StepKind

__all__ = ["EQUATIONS"]

_DEFINITION, _ASSUMPTION, _LIMIT = StepKind.DEFINITION, StepKind.ASSUMPTION, StepKind.LIMIT
_UNCORRELATED = "x and F(x) are uncorrelated, entry by entry."
_SHORTCUT_ONLY = "The branch's own derivative dF/dx is left out: only the shortcut path is followed."
_LARGE_WIDTH = "Large width: the direction that a norm removes is a share 1/D of the gradient."
_UNIT_WEIGHTS = "All weights are one."
_QUARTER = sp.Rational(1, 4)

# As it is read: functions of one symbol x, and matrices of width D.
_x, _new_x = NamedSymbol("x"), NamedSymbol("x'")
_branch, _norm = sp.Function("F"), sp.Function("LN")
_D = symbol("width")
_identity = sp.Identity(_D)
_jacobian, _branch_jacobian, _sum_jacobian, _norm_jacobian_z, _norm_jacobian_x = (
    NamedMatrix(name, _D, _D) for name in ("dx'/dx", "J_F", "dz/dx", "J_LN(z)", "J_LN(x)")
)

# In components, for the proofs: width 2, branch f + M x.
_X = sp.Matrix(sp.symbols("x1:3", real=True))
_F = sp.Matrix(sp.symbols("f1:3", real=True))
_M = sp.Matrix(2, 2, sp.symbols("M1:5", real=True))
_BRANCH = _F + _M * _X

_alpha, _q, _L, _v = (symbol(name) for name in ("alpha", "branch_variance", "n_sublayers", "stream_variance"))
_out, _in, _previous = (symbol(name) for name in ("weight_out", "weight_in", "weight_previous"))
_J_F, _beta, _k, _T = (symbol(name) for name in ("branch_jacobian_norm", "beta", "scaled_matrices", "gate"))


def _equal(left: Any, right: Any) -> Any:
    return sp.Eq(left, right, evaluate=False)


def _length(vector: Any) -> Any:
    return sp.sqrt(vector.dot(vector))


def _unit(vector: Any) -> Any:
    return vector / _length(vector)


def _norm_jacobian(vector: Any) -> Any:
    return (sp.eye(2) - vector * vector.T / vector.dot(vector)) / _length(vector)


def _definition(text: str, right: Any) -> Step:
    return Step(text, _equal(_new_x, right), _DEFINITION)


def _variance_steps(alpha: Any, branch_variance: Any) -> tuple[Step, ...]:
    return (
        Step(
            "The entries of the sum have this variance, x being of unit variance behind the norm below.",
            _equal(SumVariance(alpha, 1, branch_variance), alpha**2 + branch_variance),
        ),
        Step(
            "The norm divides by the root of it and the shortcut multiplies by the scale.",
            _equal(ShortcutGain(alpha, branch_variance), alpha / sp.sqrt(SumVariance(alpha, 1, branch_variance))),
        ),
    )


def _normalisation(equation: str) -> Derivation:
    column, turned = NamedMatrix("x", _D, 1), sp.Matrix([-_X[1], _X[0]])
    orthogonal, length = NamedMatrix("t", _D, 1), NamedSymbol("||x||", positive=True)
    jacobian = _equal(_norm_jacobian_x, (_identity - column * column.T / length**2) / length)
    return Derivation(
        id=equation,
        title="The norm without mean subtraction, and its Jacobian",
        assumptions=("eps = 0.", _UNIT_WEIGHTS),
        steps=(
            Step("Divide by the Euclidean length.", _equal(_norm(_x), _x / length), _DEFINITION),
            Step("Differentiate.", jacobian, proof=_equal(_unit(_X).jacobian(_X), _norm_jacobian(_X))),
            Step(
                "The radial direction is annihilated.",
                _equal(_norm_jacobian_x * column, sp.ZeroMatrix(_D, 1)),
                proof=_equal(_norm_jacobian(_X) * _X, sp.zeros(2, 1)),
            ),
            Step(
                "Every direction t orthogonal to x is divided by the length.",
                _equal(_norm_jacobian_x * orthogonal, orthogonal / length),
                proof=_equal(_norm_jacobian(_X) * turned, turned / _length(_X)),
            ),
        ),
        result=jacobian,
    )


def _highway() -> Derivation:
    gate, branch = sp.Function("T", real=True)(_x), _branch(_x)
    update = gate * branch + (1 - gate) * _x
    derivative = 1 - gate + gate * branch.diff(_x) + (branch - _x) * gate.diff(_x)
    held = _equal(sp.Derivative(_T * NamedSymbol("f") + (1 - _T) * _x, _x), 1 - _T)
    return Derivation(
        id="1",
        title="Highway layer: the shortcut carries 1 - T",
        assumptions=("C = 1 - T; all operations are entry by entry, so one entry stands for all.",),
        steps=(
            _definition("Mix branch and shortcut by the gate.", update),
            Step(
                "Differentiate: shortcut, branch, and the gate's own dependence on x.",
                _equal(sp.Derivative(update, _x), derivative),
            ),
            Step("With the gate and the branch held constant, the shortcut is left.", held),
        ),
        result=held,
    )


def _residual() -> Derivation:
    jacobian = _equal(_jacobian, _identity + _branch_jacobian)
    return Derivation(
        id="2",
        title="Residual connection: the shortcut is the identity",
        assumptions=(),
        steps=(
            _definition("Add the branch.", _x + _branch(_x)),
            Step("Differentiate.", jacobian, proof=_equal((_X + _BRANCH).jacobian(_X), sp.eye(2) + _M)),
        ),
        result=jacobian,
    )


def _post_ln() -> Derivation:
    return Derivation(
        id="3",
        title="Post-LN: the norm stands on the shortcut, and divides by the size of the sum",
        assumptions=(_UNCORRELATED, _SHORTCUT_ONLY, _LARGE_WIDTH, _UNIT_WEIGHTS),
        steps=(
            _definition("Normalise the sum.", _norm(_x + _branch(_x))),
            *_variance_steps(sp.Integer(1), _q),
            Step("A branch as large as the shortcut.", _equal(ShortcutGain(1, 1), 1 / sp.sqrt(2))),
        ),
        result=_equal(ShortcutGain(1, _q), 1 / sp.sqrt(1 + _q)),
    )


def _post_ln_jacobian(equation: str) -> Derivation:
    z = _X + _BRANCH
    exact = _norm_jacobian(z) * (sp.eye(2) + _M)
    jacobian = _equal(_jacobian, _norm_jacobian_z * (_identity + _branch_jacobian))
    return Derivation(
        id=equation,
        title="Jacobian of Post-LN: J_LN(z) (I + dF/dx), z = x + F(x)",
        assumptions=("eps = 0.", _UNIT_WEIGHTS, "Exact; the last step names what the shortcut argument leaves out."),
        steps=(
            _definition("Normalise the sum.", _norm(_x + _branch(_x))),
            Step(
                "The sum has the Jacobian I + dF/dx.",
                _equal(_sum_jacobian, _identity + _branch_jacobian),
                proof=_equal(z.jacobian(_X), sp.eye(2) + _M),
            ),
            Step(
                "Chain rule with the Jacobian of the norm at the sum.",
                jacobian,
                proof=_equal(_unit(z).jacobian(_X), exact),
            ),
            Step(
                "Beyond the shortcut's part there is the branch path.",
                _equal(_jacobian - _norm_jacobian_z, _norm_jacobian_z * _branch_jacobian),
                proof=_equal(_unit(z).jacobian(_X) - _norm_jacobian(z), _norm_jacobian(z) * _M),
            ),
        ),
        result=jacobian,
    )


def _deepnorm() -> Derivation:
    scaled = _q * _beta ** (2 * _k)
    return Derivation(
        id="5",
        title="DeepNorm: a scaled shortcut and smaller initial branch weights",
        assumptions=(
            _UNCORRELATED,
            _SHORTCUT_ONLY,
            _LARGE_WIDTH,
            _UNIT_WEIGHTS,
            "k consecutive matrices of the branch start β times smaller, and F is homogeneous in each of them.",
        ),
        steps=(
            _definition("Scale the shortcut, add, normalise.", _norm(_alpha * _x + _branch(_x))),
            Step("The branch starts with this variance.", _equal(NamedSymbol("q'"), scaled), _ASSUMPTION),
            *_variance_steps(_alpha, scaled),
            Step(
                "With α = L^(1/4), β = L^(-1/4) and k = 2, the ratio of variances is L^(-3/2).",
                _equal(
                    sp.Subs(scaled / _alpha**2, (_k, _q, _alpha, _beta), (2, 1, _L**_QUARTER, _L**-_QUARTER)),
                    _L ** sp.Rational(-3, 2),
                ),
            ),
        ),
        result=_equal(ShortcutGain(_alpha, scaled), _alpha / sp.sqrt(_alpha**2 + scaled)),
    )


def _pre_ln() -> Derivation:
    return Derivation(
        id="6",
        title="Pre-LN: the norm stands in the branch, the shortcut is the identity",
        assumptions=(_UNCORRELATED,),
        steps=(
            _definition("Normalise the branch's input only.", _x + _branch(_norm(_x))),
            Step("With the branch held constant, the shortcut is one.", _equal(sp.Derivative(_x + NamedSymbol("f"), _x), 1)),
            Step("The stream's variance grows by that of the branch.", _equal(SumVariance(1, _v, _q), _v + _q)),
        ),
        result=_equal(SumVariance(1, _v, _q), _v + _q),
    )


def _pre_ln_jacobian() -> Derivation:
    update = _X + _F + _M * _unit(_X)
    jacobian = _equal(_jacobian, _identity + _branch_jacobian * _norm_jacobian_x)
    return Derivation(
        id="7",
        title="Jacobian of Pre-LN: I + dF/dLN(x) J_LN(x)",
        assumptions=("eps = 0.", _UNIT_WEIGHTS),
        steps=(
            _definition("Normalise the branch's input only.", _x + _branch(_norm(_x))),
            Step(
                "Chain rule: the identity, and the branch through the norm.",
                jacobian,
                proof=_equal(update.jacobian(_X), sp.eye(2) + _M * _norm_jacobian(_X)),
            ),
            Step(
                "The branch path falls as 1 / ||x||: a stream twice as large halves it.",
                _equal(NamedMatrix("J_LN(2x)", _D, _D), _norm_jacobian_x / 2),
                proof=_equal(_norm_jacobian(2 * _X), _norm_jacobian(_X) / 2),
            ),
        ),
        result=jacobian,
    )


def _keel(equation: str) -> Derivation:
    z = _alpha * _X + _F + _M * _unit(_X)
    exact = _norm_jacobian(z) * (_alpha * sp.eye(2) + _M * _norm_jacobian(_X))
    jacobian = _equal(_jacobian, _norm_jacobian_z * (_alpha * _identity + _branch_jacobian * _norm_jacobian_x))
    return Derivation(
        id=equation,
        title="Keel: a scaled shortcut under the output norm, a normalised branch input",
        assumptions=("eps = 0.", _UNIT_WEIGHTS, _UNCORRELATED, "α = L, the number of sub-layers."),
        steps=(
            _definition(
                "Scale the shortcut, normalise the branch's input and the sum.", _norm(_alpha * _x + _branch(_norm(_x)))
            ),
            Step("Chain rule, z the sum.", jacobian, proof=_equal(_unit(z).jacobian(_X), exact)),
            Step("At α = L each gain is this.", _equal(ShortcutGain(_L, _q), (1 + _q / _L**2) ** sp.Rational(-1, 2))),
        ),
        result=jacobian,
    )


def _post_ln_gain() -> Derivation:
    return Derivation(
        id="14",
        title="Post-LN: gain of the shortcut of one sub-layer",
        assumptions=(
            _UNCORRELATED,
            _SHORTCUT_ONLY,
            _LARGE_WIDTH,
            "All entries of a weight are equal (the paper bounds by the largest).",
            "The branch is as large as the shortcut: both have variance γ_{l-1}².",
        ),
        steps=(
            Step("The norm below leaves x with variance γ_{l-1}².", _equal(_v, _previous**2), _ASSUMPTION),
            Step("So the sum has twice that.", _equal(SumVariance(1, _previous**2, _previous**2), 2 * _previous**2)),
            Step(
                "Divide by its root, multiply by the norm's own weight.",
                _equal(_out / sp.sqrt(SumVariance(1, _previous**2, _previous**2)), _out / (sp.sqrt(2) * _previous)),
            ),
            Step(
                "It is Eq. (18) at α = 1 with the branch as large as the shortcut.",
                _equal(WeightedShortcutGain(_out, _previous, _previous, 1, 1), _out / (sp.sqrt(2) * _previous)),
            ),
        ),
        result=_equal(WeightedShortcutGain(_out, _previous, _previous, 1, 1), _out / (sp.sqrt(2) * _previous)),
    )


def _post_ln_product() -> Derivation:
    return Derivation(
        id="15",
        title="Post-LN: the product over L sub-layers is 2^(-L/2), not L^(-L/2)",
        assumptions=(_UNCORRELATED, _SHORTCUT_ONLY, _LARGE_WIDTH, _UNIT_WEIGHTS, "q = 1."),
        steps=(
            Step("One sub-layer.", _equal(ShortcutGain(1, 1), 1 / sp.sqrt(2))),
            Step("All L alike: the power of one.", _equal(ShortcutProduct(1, 1, _L), ShortcutGain(1, 1) ** _L)),
            Step("As a power of two; the base does not depend on depth.", _equal(ShortcutProduct(1, 1, _L), 2 ** (-_L / 2))),
            Step("It vanishes.", _equal(sp.Limit(2 ** (-_L / 2), _L, sp.oo), 0), _LIMIT),
        ),
        result=_equal(ShortcutProduct(1, 1, _L), 2 ** (-_L / 2)),
    )


def _keel_gain() -> Derivation:
    gain = WeightedShortcutGain(_out, _previous, _in, _alpha, _q)
    return Derivation(
        id="18",
        title="Keel: gain of the shortcut of one sub-layer",
        assumptions=(
            _UNCORRELATED,
            _SHORTCUT_ONLY,
            _LARGE_WIDTH,
            "All entries of a weight are equal.",
            "F is homogeneous of degree one, so that its output has variance γ_{l,2}² q; the paper takes q = 1.",
        ),
        steps=(
            Step(
                "The sum: shortcut of variance γ_{l-1,1}², branch of variance γ_{l,2}² q.",
                _equal(SumVariance(_alpha, _previous**2, _in**2 * _q), _previous**2 * _alpha**2 + _in**2 * _q),
            ),
            Step(
                "Divide by its root, multiply by shortcut scale and weight.",
                _equal(gain, _out * _alpha / sp.sqrt(SumVariance(_alpha, _previous**2, _in**2 * _q))),
            ),
            Step("With unit weights.", _equal(gain.subs({_out: 1, _previous: 1, _in: 1}), ShortcutGain(_alpha, _q))),
        ),
        result=_equal(gain, _out * _alpha / sp.sqrt(_previous**2 * _alpha**2 + _in**2 * _q)),
    )


def _keel_product() -> Derivation:
    product = (1 + 1 / _L**2) ** (-_L / 2)
    return Derivation(
        id="19",
        title="Keel: with α = L the product over L sub-layers tends to one",
        assumptions=(_UNCORRELATED, _SHORTCUT_ONLY, _LARGE_WIDTH, _UNIT_WEIGHTS, "q = 1.", "No first-layer rules."),
        steps=(
            Step("The power L of one gain.", _equal(ShortcutProduct(_L, 1, _L), ShortcutGain(_L, 1) ** _L)),
            Step("Divide numerator and denominator by L.", _equal(ShortcutProduct(_L, 1, _L), product)),
            Step("Limit.", _equal(sp.Limit(product, _L, sp.oo), 1), _LIMIT),
            Step("Rate: 1/(2L) from one.", _equal(sp.Limit(_L * (1 - product), _L, sp.oo), sp.Rational(1, 2)), _LIMIT),
        ),
        result=_equal(sp.Limit(ShortcutProduct(_L, 1, _L), _L, sp.oo), 1),
    )


def _attempt_1() -> Derivation:
    return Derivation(
        id="24",
        title="Attempt 1: the scaled shortcut alone has Keel's shortcut gain",
        assumptions=(_UNCORRELATED, _SHORTCUT_ONLY, _LARGE_WIDTH, _UNIT_WEIGHTS, "α = L."),
        steps=(
            _definition("Scale the shortcut, add, normalise.", _norm(_alpha * _x + _branch(_x))),
            *_variance_steps(_alpha, _q),
            Step(
                "The same as Eq. (18) with unit weights.", _equal(ShortcutGain(_L, _q), WeightedShortcutGain(1, 1, 1, _L, _q))
            ),
        ),
        result=_equal(ShortcutGain(_L, _q), _L / sp.sqrt(_L**2 + _q)),
    )


def _attempt_2() -> Derivation:
    gain = sp.Matrix(sp.symbols("b1:3", positive=True))
    branch = _F + _M * gain.multiply_elementwise(_X)
    diagonal = NamedMatrix("diag(b)", _D, _D)
    jacobian = _equal(NamedMatrix("dF(bx)/dx", _D, _D), _branch_jacobian * diagonal)
    return Derivation(
        id="25",
        title="Attempt 2: a learned vector on the branch's input scales the branch's Jacobian",
        assumptions=("b is learned and starts at one.",),
        steps=(
            _definition("Multiply the branch's input entry by entry.", _norm(_alpha * _x + _branch(NamedSymbol("b") * _x))),
            Step(
                "The branch's Jacobian is multiplied by b from the right.",
                jacobian,
                proof=_equal(branch.jacobian(_X), _M * sp.diag(*gain)),
            ),
            Step(
                "At its start it is attempt 1.",
                _equal(sp.Subs(_branch(NamedSymbol("b") * _x), NamedSymbol("b"), 1), _branch(_x)),
                proof=_equal(branch.subs(dict.fromkeys(gain, 1)), _BRANCH),
            ),
        ),
        result=jacobian,
    )


def _attempt_3() -> Derivation:
    gain, weight = sp.Matrix(sp.symbols("b1:3", positive=True)), sp.Matrix(sp.symbols("g1:3", positive=True))
    written = gain.multiply_elementwise(weight.multiply_elementwise(_unit(_X)))
    merged = gain.multiply_elementwise(weight).multiply_elementwise(_unit(_X))
    b, g, length = NamedSymbol("b"), NamedSymbol("gamma"), NamedSymbol("||x||", positive=True)
    one_weight = _equal(sp.Mul(b, sp.Mul(g, _x / length, evaluate=False), evaluate=False), b * g * _x / length)
    return Derivation(
        id="26",
        title="Attempt 3 is Keel: the learned vector merges into the norm's own weight",
        assumptions=("All products of vectors are entry by entry.",),
        steps=(
            _definition("Normalise the branch's input, then multiply by b.", _norm(_alpha * _x + _branch(b * _norm(_x)))),
            Step("b and the norm's weight act as one weight.", one_weight, proof=_equal(written, merged)),
            Step(
                "So the branch of attempt 3 is Keel's with the merged weight.",
                _equal(_branch(one_weight.lhs), _branch(one_weight.rhs)),
                proof=_equal(_F + _M * written, _F + _M * merged),
            ),
        ),
        result=one_weight,
    )


def _keel_branch_gain() -> Derivation:
    gain = BranchGain(_out, _previous, _in, _alpha, _q, _J_F)
    shortcut = WeightedShortcutGain(_out, _previous, _in, _alpha, _q)
    return Derivation(
        id="27",
        title="Keel: gain through the branch of one sub-layer",
        assumptions=(_UNCORRELATED, _LARGE_WIDTH, "All entries of a weight are equal.", "J_F acts alike on all directions."),
        steps=(
            Step(
                "The output norm's share, without the shortcut scale.",
                _equal(shortcut / _alpha, _out / sp.sqrt(SumVariance(_alpha, _previous**2, _in**2 * _q))),
            ),
            Step(
                "The input norm divides by the stream's size γ_{l-1,1} and multiplies by γ_{l,2}.",
                _equal(gain, shortcut / _alpha * _in / _previous * _J_F),
            ),
            Step(
                "With unit weights, q = 1 and α = L the branch carries 1/L of the gradient.",
                _equal(sp.Limit(_L * BranchGain(1, 1, 1, _L, 1, _J_F).doit(), _L, sp.oo), _J_F),
                _LIMIT,
            ),
        ),
        result=_equal(gain, _out * _in * _J_F / (_previous * sp.sqrt(_previous**2 * _alpha**2 + _in**2 * _q))),
    )


EQUATIONS: Mapping[str, Callable[[], Derivation]] = MappingProxyType(
    {
        "1": _highway,
        "2": _residual,
        "3": _post_ln,
        "4": lambda: _post_ln_jacobian("4"),
        "5": _deepnorm,
        "6": _pre_ln,
        "7": _pre_ln_jacobian,
        "8": lambda: _keel("8"),
        "9": lambda: _normalisation("9"),
        "13": lambda: _post_ln_jacobian("13"),
        "14": _post_ln_gain,
        "15": _post_ln_product,
        "18": _keel_gain,
        "19": _keel_product,
        "23": lambda: _normalisation("23"),
        "24": _attempt_1,
        "25": _attempt_2,
        "26": _attempt_3,
        "27": _keel_branch_gain,
        "28": lambda: _keel("28"),
    }
)
