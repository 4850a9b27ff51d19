"""What is removed: blocks, sub-layers, or runs of them, as sets of sub-layers of a layout.

Ranges are 0-based and half-open: blocks [3, 6) are 3, 4 and 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from probes.errors import KeelError
from probes.layout import BlockKind, ResidualLayout

__all__ = ["RemovalError", "Unit", "UnitKind", "joint_unit", "removal_units"]


class RemovalError(KeelError, ValueError):
    """A removal that the model does not have. The message says what it has."""


class UnitKind(str, Enum):
    """What one step of the depth is."""

    BLOCK = "block"
    SUBLAYER = "sublayer"
    ATTENTION = "attn"
    FFN = "ffn"

    @property
    def words(self) -> tuple[str, str]:
        """Singular and plural in a sentence."""
        return _WORDS[self]


_WORDS = {
    UnitKind.BLOCK: ("block", "blocks"),
    UnitKind.SUBLAYER: ("sub-layer", "sub-layers"),
    UnitKind.ATTENTION: ("attention sub-layer", "attention sub-layers"),
    UnitKind.FFN: ("FFN sub-layer", "FFN sub-layers"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Something to remove: identity stands in its place.

    Attributes:
        name: ``block 3``, ``block 3 attention``, ``blocks [3, 6)``.
        kind: in what it is counted.
        start: first step, 0-based among the steps of its kind.
        stop: after the last step.
        block: block of its first sub-layer.
        sublayers: indices of the sub-layers of the layout, ascending.
        modules: dotted names of the modules removed.
    """

    name: str
    kind: UnitKind
    start: int
    stop: int
    block: int
    sublayers: tuple[int, ...]
    modules: tuple[str, ...]


def removal_units(layout: ResidualLayout, kind: UnitKind | str = UnitKind.BLOCK, span: int = 1) -> tuple[Unit, ...]:
    """Every run of ``span`` consecutive steps of a kind, by its first step.

    Args:
        layout: of the model.
        kind: what a step is; ``sublayer`` counts attention and FFN separately, ``attn`` and ``ffn`` take one of them.
        span: steps removed together.

    Returns:
        Units in forward order.

    Raises:
        RemovalError: if the span does not fit into the model, or the model has no such steps.
    """
    kind = _known_kind(kind)
    steps = _steps(layout, kind)
    if not steps:
        raise RemovalError(
            f"family '{layout.family}' is known block by block only; it has no {kind.words[1]} to remove, use --unit block"
        )
    if not 1 <= span <= len(steps):
        raise RemovalError(f"a span of {span} does not fit: the model has {len(steps)} {kind.words[1]}; use 1 to {len(steps)}")
    return tuple(_unit(layout, kind, steps, range(i, i + span)) for i in range(len(steps) - span + 1))


def joint_unit(layout: ResidualLayout, kind: UnitKind | str, indices: Sequence[int]) -> Unit:
    """Several steps removed together, consecutive or not.

    Args:
        layout: of the model.
        kind: what a step is.
        indices: 0-based among the steps of that kind.

    Returns:
        One unit.

    Raises:
        RemovalError: if an index is out of range or nothing is named.
    """
    kind = _known_kind(kind)
    steps = _steps(layout, kind)
    for index in indices:
        if not 0 <= index < len(steps):
            raise RemovalError(
                f"there is no {kind.words[0]} {index}: the model has {len(steps)}, counted from 0 to {len(steps) - 1}"
            )
    if not indices:
        raise RemovalError(f"no {kind.words[0]} to remove is named")
    return _unit(layout, kind, steps, sorted(set(indices)))


def _known_kind(kind: UnitKind | str) -> UnitKind:
    try:
        return UnitKind(kind)
    except ValueError:
        raise RemovalError(f"unknown unit '{kind}'; known: {', '.join(k.value for k in UnitKind)}") from None


def _steps(layout: ResidualLayout, kind: UnitKind) -> list[tuple[int, ...]]:
    """The sub-layers of each step."""
    if kind is UnitKind.BLOCK:
        return [tuple(i for i, s in enumerate(layout.sublayers) if s.block == b) for b in range(layout.n_blocks)]
    wanted = {
        UnitKind.SUBLAYER: {BlockKind.ATTENTION, BlockKind.FFN},
        UnitKind.ATTENTION: {BlockKind.ATTENTION},
        UnitKind.FFN: {BlockKind.FFN},
    }[kind]
    return [(i,) for i, s in enumerate(layout.sublayers) if s.kind in wanted]


def _unit(layout: ResidualLayout, kind: UnitKind, steps: list[tuple[int, ...]], chosen: Sequence[int]) -> Unit:
    sublayers = tuple(i for step in chosen for i in steps[step])
    return Unit(
        name=_name(layout, kind, steps, chosen),
        kind=kind,
        start=chosen[0],
        stop=chosen[-1] + 1,
        block=layout.sublayers[sublayers[0]].block,
        sublayers=sublayers,
        modules=_modules(layout, sublayers),
    )


def _name(layout: ResidualLayout, kind: UnitKind, steps: list[tuple[int, ...]], chosen: Sequence[int]) -> str:
    if len(chosen) > 1:
        consecutive = chosen[-1] - chosen[0] + 1 == len(chosen)
        which = f"[{chosen[0]}, {chosen[-1] + 1})" if consecutive else ", ".join(map(str, chosen))
        return f"{kind.words[1]} {which}"
    sublayer = layout.sublayers[steps[chosen[0]][0]]
    return f"block {sublayer.block}" if kind is UnitKind.BLOCK else f"block {sublayer.block} {sublayer.kind.value}"


def _modules(layout: ResidualLayout, sublayers: tuple[int, ...]) -> tuple[str, ...]:
    """Whole blocks by the block's name, else the owners of each sub-layer's parameters that nothing left in the block reads."""
    names: list[str] = []
    for block in sorted({layout.sublayers[i].block for i in sublayers}):
        inside = [i for i, s in enumerate(layout.sublayers) if s.block == block]
        removed = [i for i in inside if i in sublayers]
        still_read = {site.module for i in inside if i not in removed for site in layout.sublayers[i].norms}
        owned = [m for i in removed for m in layout.sublayers[i].modules if m not in still_read]
        names += [layout.blocks[block]] if removed == inside else owned
    return tuple(names)
