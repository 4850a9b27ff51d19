r"""SymPy symbols that print with the notation's LaTeX wherever they are printed: in a notebook, a file or JSON.

Importing this module loads SymPy.

Example:
    >>> from keel_theory.notation import symbol
    >>> print(sp.latex(1 / symbol("weight_previous") ** 2))
    \frac{1}{\gamma_{l-1,1}^{2}}
"""

from __future__ import annotations

from typing import Any

import sympy as sp

from keel_theory.notation import LATEX_NAMES

__all__ = ["NamedMatrix", "NamedSymbol"]


class NamedSymbol(sp.Symbol):  # type: ignore[misc]  # SymPy ships no types
    r"""A symbol whose LaTeX is looked up in the notation; two of one name and equal assumptions are one.

    Example:
        >>> print(sp.latex(NamedSymbol("gamma_l1", positive=True)))
        \gamma_{l,1}
    """

    def _latex(self, printer: Any, **_: Any) -> str:
        return LATEX_NAMES[self.name] if self.name in LATEX_NAMES else str(printer._print_Symbol(self))


class NamedMatrix(sp.MatrixSymbol):  # type: ignore[misc]  # SymPy ships no types
    r"""A matrix symbol whose LaTeX is looked up in the notation.

    Example:
        >>> print(sp.latex(NamedMatrix("diag(b)", 2, 2)))
        \operatorname{diag}(b)
    """

    def _latex(self, printer: Any, **_: Any) -> str:
        return LATEX_NAMES[self.name] if self.name in LATEX_NAMES else str(printer._print_MatrixSymbol(self))
