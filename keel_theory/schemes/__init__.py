"""The residual schemes, one module each, in one literal mapping. An unknown name raises an error that lists the known ones."""

from collections.abc import Mapping
from types import MappingProxyType

from keel_theory.schemes import (
    admin,
    branch_norm,
    deepnorm,
    highway,
    hybrid_norm,
    keel,
    layernorm_scaling,
    mix_ln,
    peri_ln,
    post_ln,
    pre_ln,
    scaled_shortcut,
    scaled_shortcut_input_gain,
    scaled_shortcut_normed_input_gain,
)
from keel_theory.spec import Scheme, SchemeError

__all__ = ["SCHEMES", "get_scheme"]

SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "highway": highway.SCHEME,
        "post_ln": post_ln.SCHEME,
        "deepnorm": deepnorm.SCHEME,
        "admin": admin.SCHEME,
        "pre_ln": pre_ln.SCHEME,
        "hybrid_norm": hybrid_norm.SCHEME,
        "mix_ln": mix_ln.SCHEME,
        "keel": keel.SCHEME,
        "scaled_shortcut": scaled_shortcut.SCHEME,
        "scaled_shortcut_input_gain": scaled_shortcut_input_gain.SCHEME,
        "scaled_shortcut_normed_input_gain": scaled_shortcut_normed_input_gain.SCHEME,
        "peri_ln": peri_ln.SCHEME,
        "branch_norm": branch_norm.SCHEME,
        "layernorm_scaling": layernorm_scaling.SCHEME,
    }
)


def get_scheme(name: str) -> Scheme:
    """The scheme of that name.

    Raises:
        SchemeError: if there is none; the message lists the known names.
    """
    if name not in SCHEMES:
        raise SchemeError(f"unknown scheme '{name}'; known: {', '.join(SCHEMES)}")
    return SCHEMES[name]
