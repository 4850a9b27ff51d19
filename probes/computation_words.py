"""Words in the names of settings and tensors that speak of what a model computes."""

from __future__ import annotations

import re

__all__ = ["speaks_of_computation", "words"]

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_START = re.compile(
    r"alpha|beta|lambda|gamma|scal|multipl|factor|mup|temperature|resid|shortcut|skip|highway|hyper|connection|branch|stream"
    r"|norm|prenorm|postnorm|layernorm|rmsnorm|sandwich|rezero|fixup|subln|layerscale|deep|keel|gat(e|ing)|softcap|clip|clamp"
    r"|parallel|activation|rope|rotary|alibi|position|window|sink|attention|attn|expert|router|recur|embed|logit|bias|mixture"
    r"|layer|block|scheme"
)
_WHOLE = re.compile(r"ln|pre|post|peri|qk|ls|cap|act|diff|mix|rms|tau|gain|hc|mhc|moe|glu|res")


def words(name: str) -> list[str]:
    """The words of a name in snake or camel case, in lower case.

    Example:
        >>> words("post_normScale2")
        ['post', 'norm', 'scale', '2']
    """
    return [word.lower() for word in _WORD.findall(name)]


def speaks_of_computation(name: str) -> bool:
    """Whether a name speaks of a scale, a norm, a gate, a shortcut or another part of the forward pass.

    Example:
        >>> [speaks_of_computation(name) for name in ("resid_mult", "lnScale", "license", "post")]
        [True, True, False, True]
    """
    return any(_START.match(word) or _WHOLE.fullmatch(word) for word in words(name))
