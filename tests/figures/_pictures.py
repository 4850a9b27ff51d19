"""What the tests of figures ask of every picture."""

from __future__ import annotations

from collections.abc import Collection

from matplotlib.figure import Figure
from matplotlib.text import Text


def words(figure: Figure) -> list[str]:
    """All text that is drawn."""
    return [text.get_text() for text in _visible(figure)]


def _visible(figure: Figure) -> list[Text]:
    found = figure.findobj(Text)
    return [text for text in found if isinstance(text, Text) and text.get_visible() and text.get_text().strip()]


def assert_readable(figure: Figure, *, width: float) -> None:
    """The figure is as wide as its column, no word leaves it by more than what saving adds, and no two annotations overlap."""
    assert figure.get_size_inches()[0] == width
    figure.draw_without_rendering()
    box = figure.bbox
    for axes in figure.axes:
        for text in axes.texts:
            extent = text.get_window_extent()
            assert box.x0 - 4 <= extent.x0, text.get_text()
            assert extent.x1 <= 1.03 * box.x1, text.get_text()
            assert box.y0 <= extent.y0, text.get_text()
            assert extent.y1 <= box.y1, text.get_text()
        _assert_apart(list(axes.texts))


def assert_inside_axes(figure: Figure, *, beside: Collection[str] = ()) -> None:
    """What is written on axes stays within them.

    Args:
        figure: drawn.
        beside: texts that stand beside their axes on purpose.
    """
    figure.draw_without_rendering()
    for axes in figure.axes:
        box = axes.get_window_extent()
        for text in axes.texts:
            if text.get_text() in beside:
                continue
            extent = Text.get_window_extent(text)  # of an annotation, without its arrow
            assert box.x0 <= extent.x0, f"'{text.get_text()}' crosses the left axis"
            assert extent.x1 <= box.x1, f"'{text.get_text()}' leaves to the right"
            assert box.y0 <= extent.y0, f"'{text.get_text()}' crosses the lower axis"
            assert extent.y1 <= box.y1, f"'{text.get_text()}' leaves at the top"


def _assert_apart(texts: list[Text]) -> None:
    boxes = [(text.get_text(), text.get_window_extent().padded(-0.5)) for text in texts if text.get_text()]
    for i, (first, a) in enumerate(boxes):
        for second, b in boxes[i + 1 :]:
            assert not a.overlaps(b), f"'{first}' overlaps '{second}'"
