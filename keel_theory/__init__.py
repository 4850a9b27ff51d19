"""Layer-norm Jacobian theory of residual schemes: NumPy, SciPy and (on demand) SymPy, never torch.

Example:
    >>> from keel_theory import get_scheme, shortcut_product
    >>> round(shortcut_product(get_scheme("post_ln"), 16), 6)  # 2^(-16/2)
    0.003906
"""

from keel_theory.depth_expression import DepthExpression, DepthExpressionError
from keel_theory.design import phase_diagram, smallest_alpha
from keel_theory.errors import DomainError, EquationError, TheoryError
from keel_theory.layer_norm import Convention, Normalisation
from keel_theory.propagation import monte_carlo_product, shortcut_log_product, shortcut_product
from keel_theory.schemes import SCHEMES, get_scheme
from keel_theory.spec import NormKind, ResidualSpec, Scheme, SchemeError, SublayerKind
from keel_theory.sublayer import branch_gain, shortcut_gain
from keel_theory.variance import variance_profile

__all__ = [
    "SCHEMES",
    "Convention",
    "DepthExpression",
    "DepthExpressionError",
    "DomainError",
    "EquationError",
    "NormKind",
    "Normalisation",
    "ResidualSpec",
    "Scheme",
    "SchemeError",
    "SublayerKind",
    "TheoryError",
    "branch_gain",
    "get_scheme",
    "monte_carlo_product",
    "phase_diagram",
    "shortcut_gain",
    "shortcut_log_product",
    "shortcut_product",
    "smallest_alpha",
    "variance_profile",
]
