import contextlib
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel_theory.depth_expression import DepthExpression, DepthExpressionError


@pytest.mark.parametrize(
    ("text", "n_sublayers", "expected"),
    [
        ("L", 48, 48.0),
        ("L**0.25", 16, 2.0),
        ("2*sqrt(L)", 64, 16.0),
        ("(4*L)**-0.25", 4, 0.5),
        ("log(L)", 1, 0.0),
        ("log2(L) + 1", 1024, 11.0),
        ("exp(-0) * L / 2", 6, 3.0),
        ("-(+3 - L)", 5, 2.0),
        (" 1e-3 ", 7, 1e-3),
        ("2**3**2", 1, 512.0),
    ],
)
def test_value_at_depth(text, n_sublayers, expected):
    assert DepthExpression(text)(n_sublayers) == pytest.approx(expected, rel=1e-15, abs=0)


@pytest.mark.parametrize(
    "text",
    [
        "L.__class__",
        "().__class__.__bases__",
        "__import__('os').system('true')",
        "open(L)",
        "abs(L)",
        "M",
        "sqrt",
        "[L for L in (1, 2)]",
        "{L: 1}",
        "(L, L)",
        "L[0]",
        "lambda: L",
        "(L := 3)",
        "L if L else 1",
        "L < 3",
        "L and 1",
        "not L",
        "~L",
        "L // 2",
        "L % 2",
        "L @ L",
        "1 << 9",
        "sqrt(L, L)",
        "sqrt()",
        "sqrt(x=L)",
        "sqrt(*L)",
        "sqrt.real(L)",
        "True",
        "None",
        "...",
        "1j",
        "'L'",
        "b'L'",
        "f'{L}'",
        "1if L else 2",
    ],
)
def test_whatever_is_not_arithmetic_is_refused_unread(text):
    with pytest.raises(DepthExpressionError, match="is not allowed; use numbers, L"):
        DepthExpression(text)


@pytest.mark.parametrize("text", ["", "  ", "L +", "2L", "L;L", "L\nL", "L\0", "import os", "L = 2", "\ud800", "(" * 150 + "L"])
def test_unreadable_text_is_refused_with_an_example(text):
    with pytest.raises(DepthExpressionError, match=r"(?s)cannot read .* try L, L\*\*0.25"):
        DepthExpression(text)


def test_long_text_is_refused_before_it_is_parsed():
    with pytest.raises(DepthExpressionError, match="201 characters; at most 200"):
        DepthExpression("-" * 200 + "L")


@pytest.mark.timeout(5)
@pytest.mark.parametrize(
    "text", ["9**9**9**9", "9" * 190 + "**2", "exp(1000)", "1e308 * 10 ** L", "L**L**L", "exp(exp(exp(L)))"]
)
def test_huge_values_are_refused_at_once(text):
    with pytest.raises(DepthExpressionError, match=r"too large for a float|is inf at L = 64"):
        DepthExpression(text)(64)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 / (L - 64)", "division by zero"),
        ("0 ** -1", "has no value at L = 64"),
        ("log(L - 64)", "has no value at L = 64"),
        ("sqrt(-L)", "has no value at L = 64"),
        ("(-L) ** 0.5", "a finite real number is needed"),
        ("sqrt((-L) ** 0.5)", "must be real number"),
        ("1e999", "is inf at L = 64"),
        ("1e999 - 1e999", "is nan at L = 64"),
    ],
)
def test_text_without_a_finite_real_value_is_refused_at_the_depth(text, reason):
    expression = DepthExpression(text)
    with pytest.raises(DepthExpressionError, match=reason):
        expression(64)


@pytest.mark.parametrize("text", ["-" * 199 + "L", "(" * 99 + "L" + ")" * 99, "sqrt(" * 32 + "L" + ")" * 32])
def test_deep_nesting_is_read(text):
    assert math.isfinite(DepthExpression(text)(64))


@pytest.mark.parametrize("n_sublayers", [0, -1])
def test_depth_below_one_is_refused(n_sublayers):
    with pytest.raises(DepthExpressionError, match=f"at least 1; got {n_sublayers}"):
        DepthExpression("1")(n_sublayers)


def test_depth_beyond_floats_is_refused():
    with pytest.raises(DepthExpressionError, match="too large for a float"):
        DepthExpression("1 / L")(10**400)


@pytest.mark.parametrize("rule", [True, False, math.nan, math.inf, -math.inf, None, 1j, [1], 10**400])
def test_of_refuses_what_is_no_finite_number(rule):
    with pytest.raises(DepthExpressionError, match="a finite number or an expression in L is needed"):
        DepthExpression.of(rule)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 10**6))
def test_a_number_is_its_own_rule_at_every_depth(number, n_sublayers):
    assert DepthExpression.of(number)(n_sublayers) == number


_NUMBERS = st.integers(0, 99).map(str) | st.just("L")
_TREES = st.recursive(
    _NUMBERS,
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "/", "**"]), inner)
        | st.builds("-{}".format, inner)
    ),
    max_leaves=8,
)


@given(_TREES, st.integers(1, 2048))
def test_agrees_with_python_wherever_python_has_a_real_value(text, n_sublayers):
    expected = _python_value(text, n_sublayers)
    if expected is None:
        with pytest.raises(DepthExpressionError, match=r"at L = \d+"):
            DepthExpression(text)(n_sublayers)
    else:
        assert DepthExpression(text)(n_sublayers) == expected


def _python_value(text, n_sublayers):
    """The slow obvious twin: float literals, then Python itself. Only text made by the strategy above comes here."""
    floats = re.sub(r"\d+", lambda match: f"{match.group()}.0", text)
    try:
        value = eval(floats, {"__builtins__": {}}, {"L": float(n_sublayers)})
    except ArithmeticError:
        return None
    except TypeError:  # an overflowing complex power
        return None
    return None if isinstance(value, complex) or not math.isfinite(value) else value


@given(st.text(max_size=220))
def test_any_text_is_a_finite_number_or_a_named_error(text):
    with contextlib.suppress(DepthExpressionError):
        assert math.isfinite(DepthExpression(text)(48))


def test_text_is_kept_as_written():
    assert str(DepthExpression("2 * sqrt(L)")) == "2 * sqrt(L)"
    assert DepthExpression("L") == DepthExpression("L")
    assert hash(DepthExpression("L")) == hash(DepthExpression("L"))
