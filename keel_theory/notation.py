"""Every symbol once: its LaTeX, its meaning, what the paper calls it, its unit, and the SymPy symbol with assumptions.

SymPy is loaded when a symbol is asked for, not when this module is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from keel_theory.errors import TheoryError

__all__ = ["LATEX_NAMES", "NOTATION", "Notation", "symbol"]


@dataclass(frozen=True, kw_only=True)
class Notation:
    """One quantity of the theory.

    Attributes:
        name: key in :data:`NOTATION`.
        latex: how it is written; also the name of the SymPy symbol's LaTeX.
        text: how plain text writes it.
        meaning: what it is.
        paper: the paper's symbol, or an empty string where the paper has none.
        unit: in words.
        assumptions: of the SymPy symbol.
    """

    name: str
    latex: str
    text: str
    meaning: str
    paper: str = ""
    unit: str = "dimensionless"
    assumptions: Mapping[str, bool] = field(default_factory=lambda: {"positive": True})

    @cached_property
    def symbol(self) -> Any:
        """The SymPy symbol, which prints as ``latex`` everywhere."""
        from keel_theory.named_symbols import NamedSymbol

        return NamedSymbol(self.text, **self.assumptions)


_REAL = MappingProxyType({"real": True})
_NON_NEGATIVE = MappingProxyType({"nonnegative": True})
_COUNT = MappingProxyType({"positive": True, "integer": True})

_ALL = (
    Notation(
        name="n_sublayers", latex="L", text="L", paper="L", unit="count",
        meaning="number of sub-layers, attention and FFN counted separately",
    ),
    Notation(name="width", latex="D", text="D", meaning="entries of the stream", paper="d", unit="count", assumptions=_COUNT),
    Notation(name="alpha", latex=r"\alpha", text="alpha", meaning="shortcut scale a", paper="α"),
    Notation(name="branch_scale", latex="b", text="b", meaning="fixed scale on the branch's output"),
    Notation(name="input_scale", latex="s", text="s", meaning="fixed scale on the branch's input"),
    Notation(name="beta", latex=r"\beta", text="beta", meaning="factor on the initial weights of the branch", paper="β"),
    Notation(
        name="scaled_matrices", latex="k", text="k", meaning="consecutive matrices of the branch scaled by β", unit="count",
        assumptions=_NON_NEGATIVE,
    ),
    Notation(
        name="branch_variance", latex="q", text="q", meaning="variance of F's output for an input of unit variance",
        assumptions=_NON_NEGATIVE,
    ),
    Notation(name="stream_variance", latex="v", text="v", meaning="variance of the stream's entries"),
    Notation(name="gate", latex="T", text="T", meaning="Highway gate, share of the branch", paper="T(x)"),
    Notation(name="weight_out", latex=r"\gamma_{l,1}", text="gamma_l1", meaning="weight of the output norm", paper="γ_{l,1}"),
    Notation(name="weight_in", latex=r"\gamma_{l,2}", text="gamma_l2", meaning="weight of the input norm", paper="γ_{l,2}"),
    Notation(name="weight_branch", latex=r"\gamma_{F}", text="gamma_F", meaning="weight of the norm on the branch's output"),
    Notation(
        name="weight_previous", latex=r"\gamma_{l-1,1}", text="gamma_p1", meaning="weight of the output norm below",
        paper="γ_{l-1,1}, γ_{l-1}",
    ),
    Notation(
        name="branch_jacobian_norm", latex=r"\|J_F\|", text="||J_F||", meaning="norm of the branch's Jacobian",
        paper="‖∂F/∂LN₂(x)‖", assumptions=_NON_NEGATIVE,
    ),
    Notation(name="eps", latex=r"\epsilon", text="eps", meaning="number under a norm's square root", assumptions=_NON_NEGATIVE),
    Notation(name="coefficient", latex="c", text="c", meaning="coefficient of α = c L^p"),
    Notation(name="exponent", latex="p", text="p", meaning="exponent of α = c L^p", assumptions=_REAL),
    Notation(name="excess", latex=r"\delta", text="delta", meaning="distance of the exponent from 1/2"),
    Notation(name="omega", latex=r"\omega", text="omega", meaning="Admin's profiled shortcut scale", paper="ω"),
)  # fmt: skip

NOTATION: Mapping[str, Notation] = MappingProxyType({each.name: each for each in _ALL})

LATEX_NAMES: Mapping[str, str] = MappingProxyType(
    {each.text: each.latex for each in _ALL}
    | {
        "||x||": r"\|x\|",
        "dx'/dx": r"\frac{\mathrm{d}x'}{\mathrm{d}x}",
        "dz/dx": r"\frac{\mathrm{d}z}{\mathrm{d}x}",
        "dF(bx)/dx": r"\frac{\mathrm{d}F(bx)}{\mathrm{d}x}",
        "diag(b)": r"\operatorname{diag}(b)",
        "J_F": "J_F",
        "J_G": "J_G",
        "J_LN(x)": r"J_{\mathrm{LN}}(x)",
        "J_LN(2x)": r"J_{\mathrm{LN}}(2x)",
        "J_LN(z)": r"J_{\mathrm{LN}}(z)",
        "||J_F||": r"\|J_F\|",
        "Wo": "W_o",
        "g_held": r"g_{\mathrm{held}}",
        "loss": r"\ell",
    }
)
"""Text name -> LaTeX, for every symbol that a derivation shows."""


def symbol(name: str) -> Any:
    """The SymPy symbol of a quantity.

    Args:
        name: key in :data:`NOTATION`.

    Returns:
        The same symbol at every call.

    Raises:
        TheoryError: if there is no such quantity.

    Example:
        >>> symbol("alpha").is_positive
        True
    """
    if name not in NOTATION:
        raise TheoryError(f"no quantity '{name}' in the notation; known: {', '.join(NOTATION)}")
    return NOTATION[name].symbol
