from __future__ import annotations

import pytest

from keel_theory.tex_text import tex_text


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("Only words, a dash - and (brackets).", "Only words, a dash $-$ and (brackets)."),
        ("eps = 0.", r"$\epsilon = 0$."),
        ("γ_{l-1,1}² at Eq. (18)", r"$\gamma_{l-1,1}^{2}$ at Eq. (18)"),
        ("exp(1/4 - √L/2), then 3 more", r"$\exp(1/4 - \sqrt{L}/2)$, then 3 more"),
        ("1 / ||x||: 50% of it", r"$1 / \|x\|$: 50\% of it"),
        ("J_LN(z) (I + dF/dx), z = x + F(x)", r"$J_{\mathrm{LN}}(z) (I + dF/dx)$, $z = x + F(x)$"),
        ("A norm and a weight", "A norm and a weight"),
        ("", ""),
    ],
)
def test_formulas_go_between_dollars(text: str, latex: str) -> None:
    assert tex_text(text) == latex
