"""The residual schemes, one module each, in one literal mapping. An unknown name raises an error that lists the known ones."""

import re
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

__all__ = ["SCHEMES", "get_scheme", "register_scheme"]

_PUBLISHED: Mapping[str, Scheme] = MappingProxyType(
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

_REGISTERED: dict[str, Scheme] = dict(_PUBLISHED)

SCHEMES: Mapping[str, Scheme] = MappingProxyType(_REGISTERED)
"""Every scheme by name: those above, and what :func:`register_scheme` has added."""


def get_scheme(name: str) -> Scheme:
    """The scheme of that name.

    Raises:
        SchemeError: if there is none; the message lists the known names.
    """
    if name not in SCHEMES:
        raise SchemeError(f"unknown scheme '{name}'; known: {', '.join(SCHEMES)}")
    return SCHEMES[name]


def register_scheme(scheme: Scheme) -> Scheme:
    """Add a scheme for as long as the process runs: theory, models and figures then know its name.

    Registering the same name again replaces it, so that a notebook's cell can be run twice. Other processes, and a saved model
    that is loaded by them, have to register it for themselves.

    Args:
        scheme: its rule has to have a value at some usual depth.

    Returns:
        The scheme.

    Raises:
        SchemeError: if the name is one of the toolkit's own, or no identifier in lower case, or no depth has a spec.

    Example:
        >>> from keel_theory.schemes import post_ln
        >>> register_scheme(post_ln.SCHEME)
        Traceback (most recent call last):
        ...
        keel_theory.spec.SchemeError: 'post_ln' is a scheme of the toolkit; ...
    """
    if scheme.name in _PUBLISHED:
        raise SchemeError(f"'{scheme.name}' is a scheme of the toolkit; give yours another name")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", scheme.name):
        raise SchemeError(f"the name '{scheme.name}' must be lower-case letters, digits and _, starting with a letter")
    scheme.with_parameters()  # refuses a rule without a value at any depth tried
    _REGISTERED[scheme.name] = scheme
    return scheme
