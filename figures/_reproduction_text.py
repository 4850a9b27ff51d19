"""What the hand-written part of the report on the paper is about; its words are in ``commentary.md``.

A note is printed only where its frame or its claims are there; a disagreement only where it is one by the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

__all__ = ["DISAGREEMENTS", "EQUATION_NOTES", "LIMITS", "NOTES", "Disagreement", "texts"]

Facts = Mapping[str, Any]
_FILE = Path(__file__).with_name("commentary.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A place where what is measured does not fit the paper's story.

    Attributes:
        id: heading of its text.
        figures: whose findings it needs.
        claims: that it needs, refuted.
        contradicts: whether the findings say so; None if the claims alone do.
    """

    id: str
    figures: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    contradicts: Callable[[Facts], bool] | None = None


@cache
def texts() -> Mapping[str, str]:
    """The paragraphs of ``commentary.md`` by their second-level headings, each on one line, with fields in braces."""
    found = re.findall(r"^## ([^\n]+)\n\n(.+?)(?=\n\n#|\Z)", _FILE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return MappingProxyType({heading: " ".join(text.split()) for heading, text in found})


NOTES: Mapping[str, str] = MappingProxyType(
    {
        "Figure 1a": "fig1a_stability",
        "Figure 2": "fig2_block_diagram",
        "Figure 3": "fig3_divergence",
        "Figure 4": "fig4_spike",
        "Figure 5": "fig5_token_budget",
        "Figure 6": "fig6_layer_removal",
        "Figure 7": "fig7_open_models",
        "Figure 8a": "fig8a_deep_narrow",
        "Figure 8b": "fig8b_small_lr",
        "Table 1": "table1_max_lr",
    }
)
"""Whose finding fills the note on each figure or table."""

EQUATION_NOTES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Eqs. 14 and 18": ("14-largest", "14-rms", "14-bound", "18-largest", "18-rms", "18-bound"),
        "Eq. 19": ("19-first-block", "19-first-block-initial"),
    }
)
"""Which claims fill the note on each equation."""

LIMITS = ("Width", "Depth", "Tokens", "Scores", "Precision and machine", "Seeds")
"""What the reduced scale cannot show; fields are the extremes over all committed frames of trained models."""


def _one_path(facts: Facts) -> bool:
    ours = [facts["full_and_shortcut"][ffn]["post_ln"] for ffn in ("swiglu", "relu")]
    return all(each["shortcut"].median < 1e-6 and each["full"].median > 0.1 for each in ours)


def _falls_in_training(facts: Facts) -> bool:
    ours = [facts["heat_maps"]["swiglu"]["post_ln"], facts["heat_maps_relu"]["relu"]["post_ln"]]
    return all(each["start_full"] > 0.1 and each["vanishes"] is not None for each in ours)


def _order(facts: Facts) -> bool:
    order = facts["table1_max_lr"]["order_measured"]
    return bool(order.index("pre_ln") > order.index("keel"))


def _pairs(facts: Facts) -> bool:
    return bool(facts["table1_max_lr"]["pairs_against_the_paper"])


def _deep_keel_breaks(facts: Facts) -> bool:
    deepest = facts["table1_max_lr"]["deepest"]
    return not deepest["keel"].startswith(">=") and deepest["pre_ln"].startswith(">=")


def _learned_nothing(facts: Facts) -> bool:
    return bool(facts["fig8a_deep_narrow"]["learned_nothing"])


def _not_reproduced(figure: str) -> Callable[[Facts], bool]:
    return lambda facts: facts[figure]["verdict"] == "not reproduced"


def _cheap_first(facts: Facts) -> bool:
    ours = facts["fig6_layer_removal"]
    return bool(ours["keel"]["first_blocks_delta_perplexity"].high < ours["pre_ln"]["first_blocks_delta_perplexity"].low)


def _lower_from_the_start(facts: Facts) -> bool:
    return any(each["start_gap_pre_ln_minus_keel"].low > 0 for each in facts["fig5_token_budget"]["budgets"])


DISAGREEMENTS = (
    Disagreement(
        id="one-path", figures=("full_and_shortcut",), claims=("15-full-gradient", "13-neglect"), contradicts=_one_path
    ),
    Disagreement(id="falls-in-training", figures=("heat_maps", "heat_maps_relu"), contradicts=_falls_in_training),
    Disagreement(id="alpha", claims=("alpha-needed",)),
    Disagreement(id="deepnorm", claims=("5-beta",)),
    Disagreement(id="gradient-step", claims=("34-full-gradient",)),
    Disagreement(id="max-lr", figures=("table1_max_lr",), contradicts=_order),
    Disagreement(id="max-lr-pairs", figures=("table1_max_lr",), contradicts=_pairs),
    Disagreement(id="deep-keel", figures=("table1_max_lr",), contradicts=_deep_keel_breaks),
    Disagreement(id="stability", figures=("fig1a_stability",), contradicts=_not_reproduced("fig1a_stability")),
    Disagreement(id="spike", figures=("fig4_spike",), contradicts=_not_reproduced("fig4_spike")),
    Disagreement(id="starts-higher", figures=("fig5_token_budget",), contradicts=_lower_from_the_start),
    Disagreement(id="first-blocks", figures=("fig6_layer_removal",), contradicts=_cheap_first),
    Disagreement(id="open-models", figures=("fig7_open_models",), contradicts=_not_reproduced("fig7_open_models")),
    Disagreement(id="too-fast", figures=("fig8a_deep_narrow", "fig5_token_budget"), contradicts=_learned_nothing),
    Disagreement(id="depth-pays", figures=("fig8a_deep_narrow",), contradicts=_not_reproduced("fig8a_deep_narrow")),
)
