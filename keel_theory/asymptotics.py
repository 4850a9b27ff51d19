r"""Limits of shortcut products at infinite depth, with proofs, and the wrong forms in circulation, refuted.

For :math:`\alpha = c L^p` the product :math:`(\alpha / \sqrt{\alpha^2 + q})^L` tends to 1 for p > 1/2, to
:math:`e^{-q/(2c^2)}` at p = 1/2, and to 0 below. Keel (p = 1) approaches 1 as 1 - 1/(2L); DeepNorm (p = 1/4) dies like
:math:`e^{1/4 - \sqrt L/2}` once its small initial weights have grown to size one, and survives before.

Importing this module loads SymPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import sympy as sp

from keel_theory.errors import TheoryError, require_at_least, require_non_negative, require_positive
from keel_theory.expressions import ShortcutGain, ShortcutProduct
from keel_theory.named_symbols import NamedSymbol
from keel_theory.notation import symbol
from keel_theory.propagation import monte_carlo_product
from keel_theory.results import Derivation, MonteCarloProduct, Step, StepKind
from keel_theory.schemes import get_scheme

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "LIMITS",
    "WRONG_FORMS",
    "Refutation",
    "WrongForm",
    "limits",
    "power_law_limit",
    "refute",
]

_L, _q, _c, _delta = (symbol(name) for name in ("n_sublayers", "branch_variance", "coefficient", "excess"))
_beta, _k = symbol("beta"), symbol("scaled_matrices")
_y = sp.Symbol("y", nonnegative=True)
_HALF, _QUARTER = sp.Rational(1, 2), sp.Rational(1, 4)
_ASSUMPTIONS = (
    "x and F(x) are uncorrelated, entry by entry.",
    "Only the shortcut path is followed, at large width, with unit weights.",
    "Every sub-layer has an output norm and the same α; no first-layer rules.",
)


def power_law_limit(exponent: Any, *, coefficient: Any = None, branch_variance: Any = None) -> Any:
    r"""Limit of :math:`(\alpha / \sqrt{\alpha^2 + q})^L` for :math:`\alpha = c L^p`.

    Status: exact; the value is that of the derivation in :data:`LIMITS`.
    Source: Chen & Wei 2026, arXiv:2601.19895, Eqs. (15), (19), of which this is the general case.

    Args:
        exponent: p, a real number.
        coefficient: c > 0, a number; None leaves the symbol.
        branch_variance: q >= 0, a number; None leaves the symbol.

    Returns:
        A SymPy expression: 1 for p > 1/2 (or q = 0), exp(-q/(2c²)) at p = 1/2, 0 below.

    Raises:
        TheoryError: if the exponent is not a real number.

    Example:
        >>> power_law_limit(1), power_law_limit(sp.Rational(1, 2)), power_law_limit(0.25)
        (1, exp(-q/(2*c**2)), 0)
    """
    power = sp.sympify(exponent)
    if not (power.is_number and power.is_real and power.is_finite):
        raise TheoryError(f"the exponent must be a real number, got {exponent}")
    if power.is_Float:
        power = sp.Rational(power)  # the number itself, not a fraction near it: 1/2 is a case of its own
    values = {
        _c: _c if coefficient is None else sp.sympify(require_positive("coefficient", coefficient)),
        _q: _q if branch_variance is None else sp.sympify(require_non_negative("branch_variance", branch_variance)),
    }
    if values[_q] == 0:
        return sp.Integer(1)
    above, below = bool(power > _HALF), bool(power < _HALF)
    name = "limit-above" if above else "limit-below" if below else "limit-critical"
    return LIMITS[name]().result.rhs.subs(values)


def limits() -> tuple[Derivation, ...]:
    """All limits with their proofs, in the order of :data:`LIMITS`.

    Status: exact, under the assumptions that each one lists.

    Example:
        >>> [each.id for each in limits()][:3]
        ['limit-above', 'limit-critical', 'limit-below']
    """
    return tuple(derivation() for derivation in LIMITS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongForm:
    """A formula that circulates and is wrong.

    Attributes:
        name: key in :data:`WRONG_FORMS`.
        statement: what is claimed.
        claimed: the claim as an expression in L.
        derived: the right expression in L.
        reason: where it goes wrong.
        scheme: the scheme that it is about.
        parameters: of the scheme.
    """

    name: str
    statement: str
    claimed: Any
    derived: Any
    reason: str
    scheme: str
    parameters: Mapping[str, float | str]


WRONG_FORMS: Mapping[str, WrongForm] = MappingProxyType(
    {
        "depth-as-base": WrongForm(
            name="depth-as-base",
            statement="the Post-LN product is 1 / L^(L/2)",
            claimed=_L ** (-_L / 2),
            derived=ShortcutProduct(1, 1, _L),
            reason="the variance of each sum is 1 + 1 = 2, whatever the depth: the base is 2, and only the exponent grows",
            scheme="post_ln",
            parameters=MappingProxyType({}),
        ),
        "limit-without-power": WrongForm(
            name="limit-without-power",
            statement="the product tends to lim a/sqrt(a^2 + 1) = 1 whenever a grows with L",
            claimed=ShortcutGain(_L**_QUARTER, 1),
            derived=ShortcutProduct(_L**_QUARTER, 1, _L),
            reason="that is one sub-layer's gain; the product carries the power L: at a = L^(1/4) the gain tends to 1 and "
            "the product to 0",
            scheme="scaled_shortcut",
            parameters=MappingProxyType({"alpha": "L**0.25"}),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refutation:
    """A wrong form against the derived one and against a measurement, at one depth; logs in nats.

    Attributes:
        form: the wrong form.
        n_sublayers: L.
        claimed_log: log of the claimed product.
        derived_log: log of the derived product.
        measured: Monte-Carlo products.
    """

    form: WrongForm
    n_sublayers: int
    claimed_log: float
    derived_log: float
    measured: MonteCarloProduct

    @property
    def claimed_deviation(self) -> float:
        """(measured - claimed, at this width) in standard errors."""
        return self.measured.deviation(self.claimed_log + self._finite_width_shift)

    @property
    def derived_deviation(self) -> float:
        """(measured - derived, at this width) in standard errors."""
        return self.measured.deviation(self.derived_log + self._finite_width_shift)

    @property
    def is_refuted(self) -> bool:
        """The measurement contradicts the claim by more than five standard errors and agrees with the derived form to three."""
        return abs(self.claimed_deviation) > 5 and abs(self.derived_deviation) < 3

    @property
    def _finite_width_shift(self) -> float:
        return self.measured.predicted.mean - self.measured.closed_form

    def to_frame(self) -> pd.DataFrame:
        """One row per form."""
        import pandas as pd

        columns = ["form", "n_sublayers", "metric", "value", "unit"]
        values = {
            "claimed": self.claimed_log,
            "derived": self.derived_log,
            "measured": self.measured.mean,
            "standard error": self.measured.standard_error,
        }
        rows = [(self.form.name, self.n_sublayers, f"log product, {name}", value, "nats") for name, value in values.items()]
        return pd.DataFrame(rows, columns=columns)


def refute(name: str, n_sublayers: int = 64, *, width: int = 256, n_draws: int = 64, seed: int = 0) -> Refutation:
    """Put a wrong form beside the derived one and a measured product.

    Status: a comparison; the measurement is :func:`keel_theory.propagation.monte_carlo_product`.

    Args:
        name: key in :data:`WRONG_FORMS`.
        n_sublayers: L >= 2.
        width: D of the measurement.
        n_draws: of the measurement.
        seed: of the measurement.

    Returns:
        Claimed, derived and measured value.

    Raises:
        TheoryError: if there is no wrong form of that name.

    Example:
        >>> refute("depth-as-base", 16).is_refuted
        True
    """
    if name not in WRONG_FORMS:
        raise TheoryError(f"no wrong form '{name}'; known: {', '.join(WRONG_FORMS)}")
    form = WRONG_FORMS[name]
    require_at_least("n_sublayers", n_sublayers, 2)
    scheme = get_scheme(form.scheme).with_parameters(**form.parameters)
    return Refutation(
        form=form,
        n_sublayers=n_sublayers,
        claimed_log=_log_at(form.claimed, n_sublayers),
        derived_log=_log_at(form.derived, n_sublayers),
        measured=monte_carlo_product(scheme, n_sublayers, width=width, n_draws=n_draws, seed=seed),
    )


def _log_at(expression: Any, n_sublayers: int) -> float:
    return float(sp.log(expression.doit().subs(_L, n_sublayers)).evalf(30))


def _equal(left: Any, right: Any) -> Any:
    return sp.Eq(left, right, evaluate=False)


def _limit(expression: Any) -> Any:
    return sp.Limit(expression, _L, sp.oo)


def _log_bounds() -> tuple[Step, ...]:
    return (
        Step(
            "log(1+y) - y/(1+y) has this derivative, and is 0 at 0: so log(1+y) >= y/(1+y).",
            _equal(sp.Derivative(sp.log(1 + _y) - _y / (1 + _y), _y), _y / (1 + _y) ** 2),
        ),
        Step(
            "y - log(1+y) has this derivative, and is 0 at 0: so log(1+y) <= y.",
            _equal(sp.Derivative(_y - sp.log(1 + _y), _y), _y / (1 + _y)),
        ),
        Step("Hence the lower bound.", sp.Ge(sp.log(1 + _y), _y / (1 + _y), evaluate=False), StepKind.BOUND),
        Step("And the upper bound.", sp.Le(sp.log(1 + _y), _y, evaluate=False), StepKind.BOUND),
    )


def _log_step(alpha: Any, branch_variance: Any) -> Step:
    log_product = -_L / 2 * sp.log(1 + branch_variance / alpha**2)
    return Step("Take the log of the product.", _equal(sp.log(ShortcutProduct(alpha, branch_variance, _L).doit()), log_product))


def _above() -> Derivation:
    alpha = _c * _L ** (_HALF + _delta)
    bound = _q / (2 * _c**2) * _L ** (-2 * _delta)
    product = ShortcutProduct(alpha, _q, _L)
    at_most = sp.Le(-sp.log(product), bound, evaluate=False)
    at_least = sp.Ge(-sp.log(product), 0, evaluate=False)
    vanishes = _equal(_limit(bound), 0)
    result = _equal(_limit(product), 1)
    return Derivation(
        id="limit-above",
        title="α = c L^p with p > 1/2: nothing is lost in the limit",
        assumptions=(*_ASSUMPTIONS, "p = 1/2 + δ with δ > 0."),
        steps=(
            _log_step(alpha, _q),
            *_log_bounds(),
            Step("Minus the log of the product is not negative.", at_least, StepKind.BOUND),
            Step("With log(1+y) <= y, it is at most this.", at_most, StepKind.BOUND),
            Step("The bound vanishes.", vanishes, StepKind.LIMIT),
            Step(
                "So the log, squeezed between minus the bound and 0, tends to 0, and the product to 1.",
                result,
                StepKind.LIMIT,
                proof=(at_least, at_most, vanishes),
            ),
        ),
        result=result,
    )


def _critical() -> Derivation:
    alpha = _c * sp.sqrt(_L)
    product = (1 + _q / (_c**2 * _L)) ** (-_L / 2)
    value = sp.exp(-_q / (2 * _c**2))
    return Derivation(
        id="limit-critical",
        title="α = c √L: a constant share survives",
        assumptions=_ASSUMPTIONS,
        steps=(
            _log_step(alpha, _q),
            Step("Insert the scale.", _equal(ShortcutProduct(alpha, _q, _L), product)),
            Step("Limit of the compound-interest form.", _equal(_limit(product), value), StepKind.LIMIT),
        ),
        result=_equal(_limit(product), value),
    )


def _below() -> Derivation:
    alpha, variance = _c * _L ** (_HALF - _delta), NamedSymbol("q", positive=True)
    bound = (variance / 2) / (_c**2 * _L ** (-2 * _delta) + variance / _L)
    product = ShortcutProduct(alpha, variance, _L)
    at_least = sp.Ge(-sp.log(product), bound, evaluate=False)
    vanishes = _equal(_limit(sp.exp(-bound)), 0)
    result = _equal(_limit(product), 0)
    return Derivation(
        id="limit-below",
        title="α = c L^p with p < 1/2: everything is lost in the limit",
        assumptions=(*_ASSUMPTIONS, "p = 1/2 - δ with δ > 0; q > 0."),
        steps=(
            _log_step(alpha, variance),
            *_log_bounds(),
            Step("With log(1+y) >= y/(1+y), minus the log of the product is at least this.", at_least, StepKind.BOUND),
            Step("The bound grows without end: its reciprocal vanishes.", _equal(_limit(1 / bound), 0), StepKind.LIMIT),
            Step("And so does the exponential of minus it.", vanishes, StepKind.LIMIT),
            Step(
                "So the product, which is not negative and at most that exponential, tends to 0.",
                result,
                StepKind.LIMIT,
                proof=(sp.Ge(product, 0, evaluate=False), at_least, vanishes),
            ),
        ),
        result=result,
    )


def _keel_rate() -> Derivation:
    product = (1 + 1 / _L**2) ** (-_L / 2)
    first = _limit(_L * (1 - product))
    second = _limit(_L**2 * (product - 1 + 1 / (2 * _L)))
    return Derivation(
        id="keel-rate",
        title="Keel: the product is 1 - 1/(2L) + 1/(8L²) + O(1/L³)",
        assumptions=(*_ASSUMPTIONS, "α = L, q = 1."),
        steps=(
            _log_step(_L, sp.Integer(1)),
            Step("Limit.", _equal(_limit(product), 1), StepKind.LIMIT),
            Step("First order.", _equal(first, _HALF), StepKind.LIMIT),
            Step("Second order.", _equal(second, sp.Rational(1, 8)), StepKind.LIMIT),
        ),
        result=_equal(first, _HALF),
    )


def _deepnorm_initial() -> Derivation:
    alpha, variance = _L**_QUARTER, _beta ** (2 * _k)
    at_paper = {_beta: _L**-_QUARTER}
    log_product = -_L / 2 * sp.log(1 + _L ** sp.Rational(-3, 2))
    return Derivation(
        id="deepnorm-initial",
        title="DeepNorm at initialisation: nothing is lost in the limit, as long as its weights stay small",
        assumptions=(*_ASSUMPTIONS, "α = L^(1/4), β = L^(-1/4); k matrices of the branch start β times smaller; q = β^(2k)."),
        steps=(
            Step(
                "The ratio of variances.",
                _equal(sp.Subs(variance / alpha**2, _beta, at_paper[_beta]), _L ** (-(1 + _k) / 2)),
            ),
            Step(
                "For k = 2 the log of the product is this.",
                _equal(sp.log(ShortcutProduct(alpha, variance.subs({_k: 2, **at_paper}), _L).doit()), log_product),
            ),
            Step("It tends to zero:", _equal(_limit(log_product), 0), StepKind.LIMIT),
            Step("as -1/(2√L).", _equal(_limit(sp.sqrt(_L) * log_product), -_HALF), StepKind.LIMIT),
            Step(
                "With one scaled matrix (k = 1) the case is critical.",
                _equal(_limit((1 + 1 / _L) ** (-_L / 2)), sp.exp(-_HALF)),
                StepKind.LIMIT,
            ),
        ),
        result=_equal(_limit(sp.exp(log_product)), 1),
    )


def _deepnorm_drifted() -> Derivation:
    log_product = -_L / 2 * sp.log(1 + 1 / sp.sqrt(_L))
    return Derivation(
        id="deepnorm-drifted",
        title="DeepNorm once q is back to 1: the product dies like exp(1/4 - √L/2)",
        assumptions=(*_ASSUMPTIONS, "α = L^(1/4), q = 1: the initial scaling has drifted away."),
        steps=(
            _log_step(_L**_QUARTER, sp.Integer(1)),
            Step("Leading order of the log: -√L/2.", _equal(_limit(log_product / sp.sqrt(_L)), -_HALF), StepKind.LIMIT),
            Step(
                "What is left of the log is 1/4, a factor 1.284 on exp(-√L/2).",
                _equal(_limit(log_product + sp.sqrt(_L) / 2), _QUARTER),
                StepKind.LIMIT,
            ),
        ),
        result=_equal(_limit(log_product + sp.sqrt(_L) / 2), _QUARTER),
    )


def _gain_against_product() -> Derivation:
    gain = _L**_QUARTER / sp.sqrt(sp.sqrt(_L) + 1)
    log_product = -_L / 2 * sp.log(1 + 1 / sp.sqrt(_L))
    return Derivation(
        id="gain-against-product",
        title="One sub-layer's gain tends to 1 whenever α grows; the product need not",
        assumptions=(*_ASSUMPTIONS, "Shown at α = L^(1/4), q = 1."),
        steps=(
            Step("One sub-layer.", _equal(ShortcutGain(_L**_QUARTER, 1), gain)),
            Step("Its gain tends to 1.", _equal(_limit(gain), 1), StepKind.LIMIT),
            _log_step(_L**_QUARTER, sp.Integer(1)),
            Step("The product tends to 0.", _equal(_limit(sp.exp(log_product)), 0), StepKind.LIMIT),
        ),
        result=_equal(_limit(sp.exp(log_product)), 0),
    )


LIMITS: Mapping[str, Callable[[], Derivation]] = MappingProxyType(
    {
        "limit-above": _above,
        "limit-critical": _critical,
        "limit-below": _below,
        "keel-rate": _keel_rate,
        "deepnorm-initial": _deepnorm_initial,
        "deepnorm-drifted": _deepnorm_drifted,
        "gain-against-product": _gain_against_product,
    }
)
