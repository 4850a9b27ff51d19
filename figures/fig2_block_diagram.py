# %%
"""The paper's Figure 2: the block, drawn from the scheme's own spec, so that it can show any scheme and cannot go stale.

The stream runs upwards on the left of each block, the branch on its right. Blocks whose sub-layers are built alike share one
drawing, with the range of whatever number changes along the depth; a first block with rules of its own is drawn beside them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from figures._curves import ONE_COLUMN, caption
from figures._findings import decide
from figures._style import paper_style, scheme_style
from keel_theory.depth_expression import DepthExpression, DepthExpressionError
from keel_theory.schemes import get_scheme
from keel_theory.spec import Scheme, alternating_kinds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SETTINGS", "compute", "draw", "finding", "frame_of", "main"]

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {preset: MappingProxyType({"scheme": "keel", "n_sublayers": 64}) for preset in ("smoke", "cpu", "gpu")}
)
"""A drawing: the same at every size."""
_NUMBERS = ("shortcut_scale", "branch_scale", "input_scale", "init_gain", "gate_bias")
_STRUCTURE = ("norm_in", "norm_branch", "norm_out", "input_gain", "gate", "qkv_norm", "profile")
_NORM_WORDS = {"rms": "RMSNorm", "layer": "LayerNorm"}
_KIND_WORDS = {"attention": "attention", "ffn": "FFN"}
_STREAM, _BRANCH, _WIDTH = 0.9, 2.95, 4.2
"""x of stream and branch, and width of one block, in units of a box's height."""
_BOX = (1.75, 0.66)
_STEP = 0.95
_SHORT = 3
_INK = "#333333"
_FILLS = {"norm": "#fff3d6", "function": "#dceaf7", "scale": "#f3f3f3"}


def compute(*, folder: Path | None = None, scheme: str = "keel", n_sublayers: int = 64) -> pd.DataFrame:
    """The spec of every sub-layer of a scheme with its published parameters.

    Args:
        folder: not needed: nothing is trained.
        scheme: name.
        n_sublayers: attention and FFN counted separately, even.

    Returns:
        See :func:`frame_of`.
    """
    return frame_of(get_scheme(scheme), n_sublayers)


def frame_of(scheme: Scheme, n_sublayers: int) -> pd.DataFrame:
    """The spec of every sub-layer.

    Args:
        scheme: with its parameters.
        n_sublayers: attention and FFN counted separately.

    Returns:
        One row per sub-layer: index, block, kind, every field of the spec, and the parameter that is the shortcut's scale at
        this depth, if there is one; and, the same in all rows, what the caption says of the scheme.
    """
    import pandas as pd

    rows = []
    for i, (kind, spec) in enumerate(zip(alternating_kinds(n_sublayers), scheme.specs(n_sublayers), strict=True)):
        fields = {name: value.value if isinstance(value, Enum) else value for name, value in asdict(spec).items()}
        rule = _rule(scheme, spec.shortcut_scale, n_sublayers)
        rows.append({"sublayer": i, "block": i // 2, "kind": kind.value, **fields, "shortcut_rule": rule})
    return pd.DataFrame(rows).assign(
        scheme=scheme.name,
        label=scheme.label,
        equation=scheme.equation,
        source=scheme.source,
        changed=_changed(scheme),
        n_sublayers=n_sublayers,
    )


def _changed(scheme: Scheme) -> str:
    """Parameters with another value than the published one."""
    published = get_scheme(scheme.name).parameters
    return ", ".join(f"{name} = {value}" for name, value in scheme.parameters.items() if value != published.get(name))


def _rule(scheme: Scheme, scale: float, n_sublayers: int) -> str:
    """The parameter, an expression in L, whose value is this scale; empty if none is."""
    for value in scheme.parameters.values():
        if isinstance(value, str) and scale != 1.0:
            try:
                if DepthExpression(value)(n_sublayers) == scale:
                    return value
            except DepthExpressionError:
                continue
    return ""


@dataclass(frozen=True, slots=True)
class _Group:
    """Blocks drawn as one: the rows of their sub-layers."""

    rows: pd.DataFrame

    @property
    def title(self) -> str:
        """Which blocks these are."""
        blocks = sorted(set(self.rows["block"]))
        first, last = int(blocks[0]), int(blocks[-1])
        if len(blocks) == 1:
            return f"block {first}"
        if len(blocks) == last - first + 1:
            return f"blocks {first}–{last}"
        return f"{len(blocks)} blocks: {first}, {int(blocks[1])}, …"

    def value(self, kind: str, field: str) -> str:
        """A number, or the range of numbers that it takes."""
        values = self.rows.loc[self.rows["kind"] == kind, field]
        low, high = float(values.min()), float(values.max())
        return f"{low:.3g}" if low == high else f"{float(values.iloc[0]):.3g} … {float(values.iloc[-1]):.3g}"


def _groups(frame: pd.DataFrame) -> list[_Group]:
    """Blocks that are built alike; a number of one or two values counts as structure, one of more is a range."""
    import pandas as pd

    columns = [*_STRUCTURE, *(name for name in _NUMBERS if frame[name].nunique() <= 2), "kind"]
    alike: dict[str, list[pd.DataFrame]] = {}
    for _, block in frame.groupby("block"):
        alike.setdefault(str(block[columns].to_dict("records")), []).append(block)
    return [_Group(pd.concat(blocks)) for blocks in alike.values()]


def finding(frame: pd.DataFrame) -> dict[str, Any]:
    """Whether the sub-layers are those of the paper's diagram and implementation rules.

    Every branch reads through a norm; every sub-layer but the very first attention ends in one; the shortcut's scale is 1 in
    the first block and the number of sub-layers elsewhere; nothing else stands in the block.

    Args:
        frame: of :func:`compute`.

    Returns:
        How many sub-layers, how many have norm in, norm out and scale as the paper says, and the verdict: reproduced if all
        have; in direction if all have the norms.
    """
    first_attention, first_block = frame["sublayer"] == 0, frame["sublayer"] < len(_KIND_WORDS)
    rules = {
        "norm_in": frame["norm_in"] == "rms",
        "norm_out": (frame["norm_out"] == "rms") != first_attention,
        "scale": frame["shortcut_scale"] == frame["n_sublayers"].where(~first_block, 1),
        "nothing_else": (frame["norm_branch"] == "none") & (frame["gate"] == "none") & (frame["branch_scale"] == 1.0),
    }
    counts = {name: int(kept.sum()) for name, kept in rules.items()}
    norms = counts["norm_in"] == counts["norm_out"] == len(frame)
    return {
        "n_sublayers": len(frame),
        **counts,
        "verdict": decide(fully=all(n == len(frame) for n in counts.values()), in_direction=norms),
    }


def draw(frame: pd.DataFrame) -> Figure:
    """The blocks side by side, the stream upwards.

    Args:
        frame: of :func:`compute` or :func:`frame_of`.

    Returns:
        A figure of column width, wider if there are more than two kinds of block.
    """
    from matplotlib.figure import Figure as NewFigure

    groups = _groups(frame)
    with paper_style():
        figure = NewFigure(figsize=(ONE_COLUMN * max(1.0, len(groups) / 2), 4.6), layout="constrained")
        axes = figure.add_subplot()
        heights = [_draw_group(axes, group, _WIDTH * i, str(frame["scheme"].iloc[0])) for i, group in enumerate(groups)]
        middle = _WIDTH * len(groups) / 2
        half = max(middle, _WIDTH)
        axes.set(xlim=(middle - half, middle + half), ylim=(-1.3, max(heights)), aspect="equal")
        axes.axis("off")
        first = frame.iloc[0]
        axes.set_title(str(first["label"]), loc="center")
        caption(figure, _words(frame))
        figure.draw_without_rendering()
    return figure


def _words(frame: pd.DataFrame) -> str:
    first = frame.iloc[0]
    gains = frame["init_gain"]
    smaller = f" Value, output and FFN matrices start × {gains.iloc[-1]:.3g}." if (gains != 1.0).any() else ""
    profiled = " Shortcut scales are profiled on data, then learned." if (frame["profile"] != "none").any() else ""
    changed = f" with {first['changed']} in the place of the published value" if first["changed"] else ""
    blocks = int(frame["block"].max()) + 1
    return (
        f"{first['equation']}{changed}. Drawn at L = {first['n_sublayers']} sub-layers ({blocks} blocks), from "
        f"the spec that builds the models.{smaller}{profiled} {first['source']}."
    )


def _draw_group(axes: Axes, group: _Group, left: float, scheme: str) -> float:
    """One block from its input upwards.

    Returns:
        The height of its upper end.
    """
    color = scheme_style(scheme).color
    bottom = 0.0
    axes.text(left + _STREAM, -0.12, "$x$", ha="center", va="top", size=8)
    for kind in group.rows["kind"].drop_duplicates():
        bottom = _draw_sublayer(axes, group, str(kind), left, bottom, color)
    axes.text(left + (_STREAM + _BRANCH) / 2, -0.85, group.title, ha="center", va="top", size=7.5, weight="bold")
    return bottom


def _draw_sublayer(axes: Axes, group: _Group, kind: str, left: float, bottom: float, color: str) -> float:
    """Fork, branch, shortcut, sum and norm of one sub-layer; returns the height at which the next begins."""
    spec = group.rows[group.rows["kind"] == kind].iloc[0]
    stream, branch = left + _STREAM, left + _BRANCH
    boxes = _branch_boxes(group, kind, spec)
    fork = bottom + 0.3
    y = fork + 0.75
    first = y
    for text, role in boxes:
        _box(axes, branch, y, text, role)
        y += _STEP
    join = y - _STEP + 0.95
    _arrow(axes, [(stream, fork), (branch, fork), (branch, first - _BOX[1] / 2)])
    for k in range(len(boxes) - 1):
        _arrow(axes, [(branch, first + k * _STEP + _BOX[1] / 2), (branch, first + (k + 1) * _STEP - _BOX[1] / 2)])
    _arrow(axes, [(branch, y - _STEP + _BOX[1] / 2), (branch, join), (stream + 0.2, join)])
    _shortcut(axes, group, kind, spec, stream, (bottom, fork, join), color)
    axes.text(stream, join, "+", ha="center", va="center", size=8, zorder=5)
    axes.plot([stream], [join], "o", ms=9, mfc="white", mec=_INK, mew=0.8, zorder=4)
    top = join + 0.2
    if spec["norm_out"] != "none":
        _arrow(axes, [(stream, top), (stream, top + 0.3)])
        _box(axes, stream, top + 0.3 + _BOX[1] / 2, _NORM_WORDS[spec["norm_out"]], "norm", width=1.55)
        top += 0.3 + _BOX[1]
    _arrow(axes, [(stream, top), (stream, top + 0.4)])
    return top + 0.4


def _branch_boxes(group: _Group, kind: str, spec: pd.Series[Any]) -> list[tuple[str, str]]:
    """Text and role of what the branch consists of, first to last."""
    boxes = []
    if spec["norm_in"] != "none":
        boxes.append((_NORM_WORDS[spec["norm_in"]], "norm"))
    if group.value(kind, "input_scale") != "1":
        boxes.append((f"× {group.value(kind, 'input_scale')}", "scale"))
    if spec["input_gain"]:
        boxes.append(("⊙ gain\n(learned)", "scale"))
    function = _KIND_WORDS[kind]
    boxes.append((f"{function}\n(QKV norm)" if spec["qkv_norm"] else function, "function"))
    if spec["norm_branch"] != "none":
        boxes.append((_NORM_WORDS[spec["norm_branch"]], "norm"))
    if group.value(kind, "branch_scale") != "1":
        boxes.append((f"× {group.value(kind, 'branch_scale')}", "scale"))
    if spec["gate"] != "none":
        boxes.append(("⊙ T(x)", "scale"))
    return boxes


def _shortcut(
    axes: Axes, group: _Group, kind: str, spec: pd.Series[Any], x: float, heights: tuple[float, float, float], color: str
) -> None:
    """The stream past the branch, in the scheme's colour, with its scale."""
    bottom, fork, join = heights
    axes.plot([x, x], [bottom, fork], color=color, linewidth=2.0, solid_capstyle="butt")
    axes.annotate(
        "",
        (x, join - 0.2),
        (x, fork),
        arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 2.0, "shrinkA": 0, "shrinkB": 0},
    )
    scale = group.value(kind, "shortcut_scale")
    words = []
    if scale != "1":
        rule = str(spec["shortcut_rule"])
        space = " " if len(rule) <= _SHORT else "\n"
        words.append(f"× {_math(rule)}{space}= {scale}" if rule else f"× {scale}")
    if spec["gate"] != "none":
        words.append("⊙ (1 − T(x))")
    for word in words:
        _box(axes, x, (fork + join) / 2, word, "scale", width=1.55)


def _math(expression: str) -> str:
    """Powers as mathematics: L**0.25 with a raised 0.25."""
    raised = re.sub(r"\*\*\s*(-?[\w.]+)", r"^{\1}", expression).replace("*", r" \cdot ")
    return f"${raised.replace('sqrt', '√')}$"


def _box(axes: Axes, x: float, y: float, text: str, role: str, width: float = _BOX[0]) -> None:
    from matplotlib.patches import FancyBboxPatch

    height = _BOX[1]
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=_FILLS[role],
            edgecolor=_INK,
            linewidth=0.7,
            zorder=3,
        )
    )
    axes.text(x, y, text, ha="center", va="center", size=6.2, zorder=4)


def _arrow(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """A line along the points with a head at its end."""
    if len(points) > 2:
        axes.plot([x for x, _ in points[:-1]], [y for _, y in points[:-1]], color=_INK, linewidth=0.8, zorder=1)
    axes.annotate(
        "",
        points[-1],
        points[-2],
        arrowprops={"arrowstyle": "-|>", "color": _INK, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 6},
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw; see :func:`figures.pipeline.run_main`."""
    from figures.pipeline import run_main

    run_main("fig2_block_diagram", arguments)


# %%
if __name__ == "__main__":
    main()
