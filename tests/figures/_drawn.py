"""What a saved SVG shows: its words, and its curves and marks in units of their axes.

Files differ in bytes between versions of matplotlib, and by hundredths of a point between drawings; this does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree as ET

import numpy as np
import numpy.typing as npt

_SVG = "{http://www.w3.org/2000/svg}"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
_TOLERANCE = 4e-3  # of an axes' width or height: a pixel at most, where layouts differ by parts of a point


@dataclass(frozen=True, eq=False)
class Drawn:
    """Words in the order of drawing; per curve or set of marks the points in the axes, 0 to 1."""

    words: tuple[str, ...]
    shapes: tuple[npt.NDArray[np.float64], ...]


def read_svg(text: str) -> Drawn:
    """What an SVG of matplotlib shows; text is drawn as outlines, and stands in comments beside them."""
    root = ET.fromstring(text, ET.XMLParser(target=ET.TreeBuilder(insert_comments=True)))
    clips = {clip.get("id", ""): _box(clip[0]) for clip in root.iter(f"{_SVG}clipPath") if clip[0].tag == f"{_SVG}rect"}
    words = tuple((each.text or "").strip() for each in root.iter() if each.tag is ET.Comment)
    return Drawn(words, tuple(_shapes(root, clips, None)))


def _box(rect: ET.Element) -> npt.NDArray[np.float64]:
    return np.array([float(rect.get(name, "nan")) for name in ("x", "y", "width", "height")])


def _shapes(
    element: ET.Element, clips: dict[str, npt.NDArray[np.float64]], box: npt.NDArray[np.float64] | None
) -> Iterator[npt.NDArray[np.float64]]:
    """Paths and marks that are clipped to axes; a group's clip is that of its members."""
    found = _REFERENCE.search(element.get("clip-path", ""))
    box = clips.get(found[1]) if found else box
    if box is not None and element.tag in (f"{_SVG}path", f"{_SVG}use"):
        points = _points(element)
        if len(points):
            yield (points - box[:2]) / box[2:]
    for child in element:
        if child.tag != f"{_SVG}defs":
            yield from _shapes(child, clips, box)


def _points(element: ET.Element) -> npt.NDArray[np.float64]:
    if element.tag == f"{_SVG}use":
        return np.array([[float(element.get("x", 0)), float(element.get("y", 0))]])
    numbers = [float(number) for number in _NUMBER.findall(element.get("d", ""))]
    return np.array(numbers[: len(numbers) // 2 * 2]).reshape(-1, 2)


def assert_same_picture(kept: str, redrawn: str) -> None:
    """The same words, and every curve and mark at the same place of its axes."""
    old, new = read_svg(kept), read_svg(redrawn)
    assert new.words == old.words, "the words differ"
    assert new.shapes, "nothing is drawn"
    assert [len(shape) for shape in new.shapes] == [len(shape) for shape in old.shapes], "curves or marks differ in number"
    for a, b in zip(old.shapes, new.shapes, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=_TOLERANCE, err_msg="a curve or mark has moved")
