"""The figures by name: what each shows, and where in the paper it has its place. Modules are imported when one is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

from probes.errors import KeelError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["FIGURES", "FigureEntry", "FigureError", "FigureModule", "get_figure"]


class FigureError(KeelError):
    """A figure, or a preset of one, that does not exist."""


class FigureModule(Protocol):
    """What a figure's module has.

    Attributes:
        SETTINGS: keyword arguments of ``compute``, JSON values, by the name of the preset.
    """

    SETTINGS: Mapping[str, Mapping[str, Any]]

    def compute(self, *, folder: Path | None = None, **settings: Any) -> pd.DataFrame:
        """Measure into a tidy frame; runs that can be resumed live in the folder."""

    def draw(self, frame: pd.DataFrame) -> Figure:
        """Draw what the frame holds, and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureEntry:
    """A figure of the gallery.

    Attributes:
        name: of its module in ``figures``, its frames and its pictures.
        title: what it shows.
        place: where in the paper, such as "Figure 1a"; None for a figure of this toolkit's own.
    """

    name: str
    title: str
    place: str | None = None

    @property
    def module(self) -> str:
        """Dotted path of the module."""
        return f"figures.{self.name}"

    @property
    def exists(self) -> bool:
        """Whether the module is there; it is not imported."""
        return find_spec(self.module) is not None

    def load(self) -> FigureModule:
        """Import the module.

        Raises:
            FigureError: if there is none.
        """
        if not self.exists:
            raise FigureError(f"there is no module {self.module}; figures that exist: {_names(only_existing=True)}")
        return cast("FigureModule", import_module(self.module))


_ENTRIES = (
    FigureEntry(name="fig1a_stability", title="Training stability at an aggressive learning rate", place="Figure 1a"),
    FigureEntry(name="fig1b_capabilities", title="Published scores by capability", place="Figure 1b"),
    FigureEntry(name="fig1c_depth_scaling", title="Published average score against depth", place="Figure 1c"),
    FigureEntry(name="fig2_block_diagram", title="Block diagram, drawn from the scheme's spec", place="Figure 2"),
    FigureEntry(name="fig3_divergence", title="Three ways to diverge, from real runs", place="Figure 3"),
    FigureEntry(name="fig4_spike", title="Pre-LN's loss spike at the higher learning rate", place="Figure 4"),
    FigureEntry(name="fig5_token_budget", title="Loss of Pre-LN and Keel for two token budgets", place="Figure 5"),
    FigureEntry(name="fig6_layer_removal", title="What each block of a trained model is worth", place="Figure 6"),
    FigureEntry(name="fig7_open_models", title="What each block of an open model is worth", place="Figure 7"),
    FigureEntry(name="fig8a_deep_narrow", title="Shallow and wide against deep and narrow", place="Figure 8a"),
    FigureEntry(name="fig8b_small_lr", title="Pre-LN against Keel at a small learning rate", place="Figure 8b"),
    FigureEntry(name="table1_max_lr", title="Maximum tolerable learning rate", place="Table 1"),
    FigureEntry(name="gain_against_depth", title="Shortcut gain against depth, every scheme"),
    FigureEntry(name="phase_diagram", title="What the shortcut keeps, over depth and shortcut scale"),
    FigureEntry(name="heat_maps", title="Gradients over depth and training step"),
    FigureEntry(name="heat_maps_relu", title="Gradients over depth and training step, plain FFN"),
    FigureEntry(name="full_and_shortcut", title="Full against shortcut-only gradient over depth"),
    FigureEntry(name="second_norm_cost", title="What Keel's second norm costs, by width"),
    FigureEntry(name="gradient_norms", title="Gradient norms of SmolLM2-135M over depth"),
)

FIGURES: Mapping[str, FigureEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
"""Every figure, the paper's first and in its order."""


def get_figure(name: str) -> FigureEntry:
    """The figure of this name.

    Raises:
        FigureError: if there is none.

    Example:
        >>> get_figure("fig2_block_diagram").place
        'Figure 2'
    """
    if name not in FIGURES:
        raise FigureError(f"there is no figure '{name}'; figures: {_names()}")
    return FIGURES[name]


def _names(*, only_existing: bool = False) -> str:
    return ", ".join(name for name, entry in FIGURES.items() if entry.exists or not only_existing)
