"""One look for every figure: the style sheet, a line per scheme, labels at the end of lines, and writing files.

Colours are from Paul Tol's colour-blind-safe sets (personal.sron.nl/~pault), spread in lightness as well; because no set
holds fourteen hues that everyone tells apart, each scheme has its own dash and marker too, so hue is never the only cue.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "GALLERY",
    "SCHEME_STYLES",
    "STYLE_SHEET",
    "SchemeStyle",
    "contrast_on_white",
    "label_line_ends",
    "paper_style",
    "save_figure",
    "scheme_style",
    "spread",
    "text_color",
]

STYLE_SHEET = Path(__file__).with_name("keel.mplstyle")
GALLERY = Path(__file__).with_name("gallery")

_Dash: TypeAlias = "str | tuple[int, tuple[float, ...]]"
_LONG: _Dash = (0, (6.0, 2.0))
_DOTS: _Dash = (0, (1.0, 1.4))
_DASH_DOT: _Dash = (0, (5.0, 1.5, 1.0, 1.5))


@dataclass(frozen=True, slots=True)
class SchemeStyle:
    """How the curve of one scheme is drawn."""

    color: str
    dash: _Dash = "-"
    marker: str = "o"

    def line(self) -> dict[str, Any]:
        """Keyword arguments for ``Axes.plot``."""
        return {"color": self.color, "linestyle": self.dash, "marker": self.marker}


SCHEME_STYLES: Mapping[str, SchemeStyle] = MappingProxyType(
    {
        "keel": SchemeStyle("#0077bb", "-", "o"),
        "post_ln": SchemeStyle("#cc3311", "-", "s"),
        "pre_ln": SchemeStyle("#333333", "-", "^"),
        "deepnorm": SchemeStyle("#ee7733", _LONG, "D"),
        "admin": SchemeStyle("#aa4499", _DASH_DOT, "v"),
        "mix_ln": SchemeStyle("#009988", _LONG, "P"),
        "hybrid_norm": SchemeStyle("#117733", _DASH_DOT, "X"),
        "highway": SchemeStyle("#999933", _DOTS, "h"),
        "peri_ln": SchemeStyle("#332288", _LONG, "<"),
        "branch_norm": SchemeStyle("#882255", _DOTS, ">"),
        "layernorm_scaling": SchemeStyle("#777777", _LONG, "d"),
    }
)
_OTHER_STYLES: tuple[SchemeStyle, ...] = (
    SchemeStyle("#33bbee", _LONG, "p"),
    SchemeStyle("#88ccee", _DASH_DOT, "*"),
    SchemeStyle("#6699cc", _DOTS, "8"),
    SchemeStyle("#ee3377", _DASH_DOT, "4"),
    SchemeStyle("#ddaa33", _DASH_DOT, "3"),
    SchemeStyle("#661100", _DOTS, "2"),
    SchemeStyle("#44aa99", _DOTS, "1"),
)
"""For schemes without a fixed style, by their order in the registry: the earlier attempts of Keel, and what users add."""


def scheme_style(name: str) -> SchemeStyle:
    """The style of a registered scheme: the same one in every figure.

    Args:
        name: a scheme's name.

    Returns:
        Colour, dash and marker. An unknown name is the registry's SchemeError.
    """
    from keel_theory.schemes import SCHEMES, get_scheme

    get_scheme(name)
    if name in SCHEME_STYLES:
        return SCHEME_STYLES[name]
    others = [other for other in SCHEMES if other not in SCHEME_STYLES]
    return _OTHER_STYLES[others.index(name) % len(_OTHER_STYLES)]


def text_color(color: str) -> str:
    """A colour for words on white: the same hue, as dark as it takes to be read (WCAG 2.2, a contrast of 4.5 to 1).

    Args:
        color: what matplotlib takes.

    Returns:
        Six hexadecimal digits after a #; the colour itself where it is dark enough.

    Example:
        >>> text_color("#0077bb"), text_color("#88ccee")
        ('#0077bb', '#527a8f')
    """
    from matplotlib.colors import to_hex, to_rgb

    red, green, blue = to_rgb(color)
    shades = ((n / 100 * red, n / 100 * green, n / 100 * blue) for n in range(100, -1, -1))
    return to_hex(next(shade for shade in shades if contrast_on_white(shade) >= _READABLE))


def contrast_on_white(channels: Sequence[float]) -> float:
    """Contrast of a colour with white, 1 to 21, dimensionless.

    Args:
        channels: red, green and blue in sRGB, 0 to 1.

    Returns:
        As WCAG 2.2 defines the ratio of relative luminances.

    Example:
        >>> contrast_on_white([0, 0, 0])
        21.0
    """
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 1.05 / (sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) + 0.05)


_READABLE = 4.5


@contextmanager
def paper_style() -> Iterator[None]:
    """Draw in the project's style, and leave matplotlib's settings as they were."""
    import matplotlib.pyplot as plt

    with plt.style.context(STYLE_SHEET):
        yield


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Move positions apart until neighbours are at least ``gap`` away from each other, keeping their order and their mean.

    Args:
        positions: where labels want to be.
        gap: least distance, in the same unit.

    Returns:
        Where they can be, in the order given.

    Example:
        >>> spread([0.0, 0.0, 5.0], 1.0)
        [-0.5, 0.5, 5.0]
    """
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    clusters: list[tuple[float, int]] = []  # (centre, number of labels)
    for index in order:
        clusters.append((positions[index], 1))
        while len(clusters) > 1 and _overlap(clusters[-2], clusters[-1], gap):
            (c_a, n_a), (c_b, n_b) = clusters[-2:]
            clusters[-2:] = [((c_a * n_a + c_b * n_b) / (n_a + n_b), n_a + n_b)]
    placed = [centre + gap * (i - (n - 1) / 2) for centre, n in clusters for i in range(n)]
    return [placed[order.index(index)] for index in range(len(positions))]


def _overlap(a: tuple[float, int], b: tuple[float, int], gap: float) -> bool:
    return b[0] - a[0] < gap * (a[1] + b[1]) / 2 - 1e-12 * gap


def label_line_ends(
    axes: Axes, labels: Mapping[str, tuple[float, float]], colors: Mapping[str, str], *, size: float = 7.0
) -> None:
    """Write each curve's name beside its last point, moved apart where they would overlap.

    Args:
        axes: finished axes: limits and scales are read.
        labels: text -> (x, y) of the curve's last point, in data coordinates.
        colors: text -> colour.
        size: in points.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None  # axes belong to a figure
    figure.draw_without_rendering()
    names = list(labels)
    pixels = [axes.transData.transform(labels[name]) for name in names]
    heights = spread([float(p[1]) for p in pixels], 1.15 * size * figure.dpi / 72)
    for name, pixel, height in zip(names, pixels, heights, strict=True):
        x, y = axes.transData.inverted().transform((pixel[0], height))
        offset = (4, 0)
        axes.annotate(
            name,
            (x, y),
            offset,
            textcoords="offset points",
            color=text_color(colors[name]),
            size=size,
            va="center",
            annotation_clip=False,
        )


def save_figure(figure: Figure, *paths: Path) -> None:
    """Write a figure, all files or none; suffixes give the formats. SVG files carry no date, so equal runs give equal files.

    Args:
        figure: the figure.
        paths: where to; existing files are replaced.

    Raises:
        OSError: if one of them cannot be written; none is then.
    """
    partials = {path: path.with_name(f".{path.name}.partial") for path in paths}
    try:
        for path, partial in partials.items():
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            partial.write_bytes(_rendered(figure, path.suffix.lstrip(".") or "png"))
        for path, partial in partials.items():
            partial.replace(path)
    finally:
        for partial in partials.values():
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def _rendered(figure: Figure, suffix: str) -> bytes:
    buffer = BytesIO()
    with paper_style():  # resolution, margins and reproducible SVG identifiers
        figure.savefig(buffer, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
    return buffer.getvalue()
