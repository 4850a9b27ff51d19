r"""Plain sentences with formulas in them, as LaTeX: ``drifted at α = L^(1/4)`` becomes ``drifted at $\alpha = L^{1/4}$``."""

from __future__ import annotations

import re

__all__ = ["tex_text"]

_OPERATORS = frozenset({"=", "<", ">", "<=", ">=", "+", "-", "/"})
_MATH = re.compile(r"[_^²³√αβγδωε=<>|/∂ℓ]|^\(?[B-HJ-Zb-z]\)?$|^\(?[A-Za-z]+\([a-z0-9]")
_NUMBER = re.compile(r"^[-(]?[0-9.]*[0-9]\)?$")
_GREEK = {"α": r"\alpha", "β": r"\beta", "γ": r"\gamma", "δ": r"\delta", "ω": r"\omega", "ε": r"\epsilon", "ℓ": r"\ell"}
_REWRITES = (
    (r"\^\(([^()]*)\)", r"^{\1}"),
    ("²", "^{2}"),
    ("³", "^{3}"),
    (r"√(\w)", r"\\sqrt{\1}"),
    (r"\|\|(\w)\|\|", r"\\|\1\\|"),
    (">=", r"\\geq"),
    ("<=", r"\\leq"),
    (r"\bJ_LN\b", r"J_{\\mathrm{LN}}"),
    (r"(?<![A-Za-z{])(d?)LN(?=\()", r"\1\\mathrm{LN}"),
    (r"\b(log|exp)\(", r"\\\1("),
    (r"\beps\b", r"\\epsilon"),
)
_ESCAPES = re.compile(r"([%&#$_{}])")


def tex_text(text: str) -> str:
    r"""The sentence with its formulas between dollars and the rest escaped.

    A word is taken for a formula by its signs (``=``, ``^``, Greek, a single letter other than a, ``F(x)``), and a number
    where it stands beside an operator.

    Args:
        text: a sentence of a derivation.

    Returns:
        LaTeX for text mode, in ASCII.

    Example:
        >>> print(tex_text("DeepNorm at α = L^(1/4), 5% of x"))
        DeepNorm at $\alpha = L^{1/4}$, 5\% of $x$
    """
    words = text.split(" ")
    cores = [word.rstrip(".,:;") for word in words]
    formula = [_is_formula(cores, i) for i in range(len(cores))]
    parts, run = [], []
    for i, (word, core) in enumerate(zip(words, cores, strict=True)):
        if not formula[i]:
            parts.append(_ESCAPES.sub(r"\\\1", word))
            continue
        run.append(core)
        if word != core or i + 1 == len(words) or not formula[i + 1]:
            parts.append(f"${_tex(' '.join(run))}${word[len(core) :]}")
            run = []
    return " ".join(parts)


def _is_formula(cores: list[str], i: int) -> bool:
    if cores[i] in _OPERATORS or _MATH.search(cores[i]):
        return True
    neighbours = cores[max(i - 1, 0) : i] + cores[i + 1 : i + 2]
    return bool(_NUMBER.match(cores[i]) or cores[i] in {"I", "(I", "A", "a", "eps"}) and any(
        each in _OPERATORS for each in neighbours
    )


def _tex(formula: str) -> str:
    for pattern, replacement in _REWRITES:
        formula = re.sub(pattern, replacement, formula)
    latin = re.sub("[αβγδωεℓ]", lambda match: f"{_GREEK[match[0]]} ", formula)
    return re.sub(r" +(?=[_^ ]|$)", "", latin)
