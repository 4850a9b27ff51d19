"""The committed pictures are what a redraw of the committed frames gives."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from matplotlib import image

from figures import fig7_open_models
from figures._style import GALLERY, save_figure
from figures.pipeline import DATA, Preset, settings_key, stored_frame
from figures.registry import FIGURES
from tests.figures._drawn import assert_same_picture

_VARYING = re.compile(r"Matplotlib v[\d.]+|#?\b[pm][0-9a-f]{10}\b|\bid=\"[^\"]*\"")
"""Parts of an SVG that say nothing of the picture: the version that wrote it, and names within the file."""


def _kept(name: str) -> str:
    return (GALLERY / f"{name}.svg").read_text(encoding="utf-8")


def _redrawn(name: str, frame: pd.DataFrame, folder) -> str:
    save_figure(FIGURES[name].load().draw(frame), folder / f"{name}.svg", folder / f"{name}.png")
    return (folder / f"{name}.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FIGURES)
def test_committed_pictures_are_what_a_redraw_gives(name: str, tmp_path) -> None:
    stored = stored_frame(name)
    assert stored is not None
    redrawn = _redrawn(name, stored.frame, tmp_path)
    assert_same_picture(_kept(name), redrawn)
    if _VARYING.sub("", redrawn) == _VARYING.sub("", _kept(name)):  # to the last digit: then to the last pixel
        np.testing.assert_array_equal(image.imread(tmp_path / f"{name}.png"), image.imread(GALLERY / f"{name}.png"))


@pytest.mark.parametrize("name", FIGURES)
def test_committed_frames_are_of_the_present_settings(name: str) -> None:
    stored = stored_frame(name)
    assert stored is not None
    assert stored.about["key"] == settings_key(name, FIGURES[name].load(), Preset.CPU)


def test_every_picture_and_every_frame_is_a_figures() -> None:
    assert {path.stem for path in GALLERY.iterdir()} == set(FIGURES)
    assert {path.name.partition(".")[0] for path in DATA.iterdir()} == set(FIGURES)


def _higher(frame: pd.DataFrame) -> pd.DataFrame:
    rows = frame.index[frame["metric"] == "delta_perplexity"]
    frame.loc[rows[10], ["value", "low", "high"]] *= 1.1
    return frame


EDITS: dict[str, tuple[str, Callable[[pd.DataFrame], pd.DataFrame], str]] = {
    "one value": (fig7_open_models.NAME, _higher, "a curve or mark has moved"),
    "one row less": (fig7_open_models.NAME, lambda frame: frame.drop(frame.index[-2:]), "differ"),
    "another text": (fig7_open_models.NAME, lambda frame: frame.assign(text="a book"), "the words differ"),
    "another scale": ("fig2_block_diagram", lambda frame: frame.assign(shortcut_scale=7.0), "the words differ"),
}


@pytest.mark.parametrize(("name", "edit", "says"), EDITS.values(), ids=list(EDITS))
def test_an_edit_of_the_data_without_a_redraw_is_noticed(name: str, edit, says: str, tmp_path) -> None:
    stored = stored_frame(name)
    assert stored is not None
    with pytest.raises(AssertionError, match=says):
        assert_same_picture(_kept(name), _redrawn(name, edit(stored.frame.copy()), tmp_path))
