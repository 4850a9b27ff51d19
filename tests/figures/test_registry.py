"""The registry: every figure of the paper and of the toolkit has a module that keeps the contract."""

import importlib
import inspect
import subprocess
import sys

import pytest

from figures.pipeline import Preset, make_figure
from figures.registry import FIGURES, FigureError, get_figure

PAPER = {
    "fig1a_stability": "Figure 1a",
    "fig1b_capabilities": "Figure 1b",
    "fig1c_depth_scaling": "Figure 1c",
    "fig2_block_diagram": "Figure 2",
    "fig3_divergence": "Figure 3",
    "fig4_spike": "Figure 4",
    "fig5_token_budget": "Figure 5",
    "fig6_layer_removal": "Figure 6",
    "fig7_open_models": "Figure 7",
    "fig8a_deep_narrow": "Figure 8a",
    "fig8b_small_lr": "Figure 8b",
    "table1_max_lr": "Table 1",
}
OWN = {
    "gain_against_depth",
    "phase_diagram",
    "heat_maps",
    "heat_maps_relu",
    "full_and_shortcut",
    "second_norm_cost",
    "gradient_norms",
}

_MARKS = dict.fromkeys(("fig7_open_models", "gradient_norms"), pytest.mark.smollm2)


def test_every_figure_of_the_paper_has_an_entry_and_so_have_the_toolkits_own() -> None:
    assert {name: entry.place for name, entry in FIGURES.items() if entry.place} == PAPER
    assert {name for name, entry in FIGURES.items() if entry.place is None} == OWN
    assert all(entry.name == name and entry.title for name, entry in FIGURES.items())


@pytest.mark.parametrize("name", FIGURES)
def test_module_keeps_the_contract(name: str) -> None:
    entry = FIGURES[name]
    module = importlib.import_module(entry.module)
    assert list(module.SETTINGS) == [preset.value for preset in Preset]
    assert all(callable(getattr(module, function)) for function in ("compute", "draw", "main"))
    assert {"SETTINGS", "compute", "draw", "main"} <= set(module.__all__)


@pytest.mark.parametrize("preset", [preset.value for preset in Preset])
@pytest.mark.parametrize("name", FIGURES)
def test_settings_are_arguments_of_compute(name: str, preset: str) -> None:
    module = FIGURES[name].load()
    inspect.signature(module.compute).bind(**module.SETTINGS[preset])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Figures share runs, as those of one command do."""
    return tmp_path_factory.mktemp("smoke")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=_MARKS.get(name, ())) for name in FIGURES])
def test_smoke_preset_runs(name: str, runs) -> None:
    drawn = make_figure(name, "smoke", runs=runs, recompute=True)
    assert drawn.computed
    assert all(path.stat().st_size > 1000 for path in drawn.paths)


def test_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(FigureError, match=r"no figure 'fig9'.*fig1a_stability.*gradient_norms"):
        get_figure("fig9")


def test_registry_imports_no_figure_and_no_torch() -> None:
    program = "import sys, figures.registry, figures.pipeline; print(*sorted(sys.modules))"
    loaded = set(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split())
    assert not {"torch", "pandas", "matplotlib"} & loaded
    assert not {entry.module for entry in FIGURES.values()} & loaded
