"""The paper beside what was measured here: every equation, figure and table, and where the two part.

Statuses are computed from four kinds of evidence and written nowhere by hand: derivations that are proved, printed definitions
that a model computes, claims that ``keel verify`` has decided, and findings in committed frames. ``reproduced`` needs the
paper's own size; where every part holds at a smaller one, the status is ``reproduced in direction``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figures._reproduction_items import EQUATIONS, FIGURES, TABLES, label
from figures._reproduction_rows import (
    ClaimCells,
    Figure,
    Row,
    Sources,
    Status,
    Table,
    claim_cells,
    equation_row,
    figure_row,
    readable,
    table_row,
)
from figures._reproduction_text import DISAGREEMENTS, EQUATION_NOTES, LIMITS, NOTES, Disagreement, texts
from figures._training_runs import LR_FACTOR

if TYPE_CHECKING:
    import pandas as pd

    from figures.pipeline import StoredFrame

__all__ = [
    "ClaimCells",
    "Row",
    "Sources",
    "Status",
    "as_markdown",
    "claim_cells",
    "collect",
    "rows",
    "summary",
]

_COLUMNS = ("item", "the paper", "ours", "size", "seeds", "device", "command", "status", "why")
_TRAINED = ("fig1a_stability", "fig3_divergence", "fig4_spike", "fig5_token_budget", "fig8a_deep_narrow", "fig8b_small_lr")
_TRAINED_WITH_RAMPS = (*_TRAINED, "table1_max_lr", "heat_maps")


def collect(claims: Mapping[str, ClaimCells], *, data: Path | None = None, prove: bool = True) -> Sources:
    """All evidence but the claims, from this package and its committed frames.

    Args:
        claims: decided claims, by their id.
        data: folder of the frames; None for this package's own. A frame of other settings than the present ones does not count.
        prove: whether derivations are proved now, which takes half a minute; otherwise all count as proved, as the tests of
            ``keel_theory`` assert one by one.

    Returns:
        The evidence.
    """
    from figures.paper_check import check_paper
    from figures.paper_tables import TABLES as PUBLISHED_TABLES
    from figures.paper_tables import load_tables
    from figures.pipeline import DATA, Preset, settings_key, stored_frame
    from figures.registry import get_figure
    from keel_theory.derivations import derive, is_proved
    from probes.printed_equations import PRINTED, largest_difference

    folder = DATA if data is None else data
    known: dict[str, StoredFrame | None] = {}

    def frames(name: str) -> StoredFrame | None:
        if name not in known:
            kept = stored_frame(name, folder=folder)
            current = kept is not None and kept.about["key"] == settings_key(name, get_figure(name).load(), Preset.CPU)
            known[name] = kept if current else None
        return known[name]

    numbers = dict.fromkeys(number for item in EQUATIONS for number in item.derivations)
    tables = load_tables()
    return Sources(
        proved={number: is_proved(derive(number)) if prove else True for number in numbers},
        differences={number: largest_difference(number) for number in PRINTED},
        claims=claims,
        frames=frames,
        consistency=check_paper(tables),
        tables={name: tables.frame(name) for name in PUBLISHED_TABLES},
    )


def rows(sources: Sources) -> dict[str, tuple[Row, ...]]:
    """Every item of the paper, in its order.

    Args:
        sources: evidence.

    Returns:
        Rows of equations, figures and tables under those names.
    """
    return {
        "equations": tuple(equation_row(item, sources) for item in EQUATIONS),
        "figures": tuple(figure_row(item, sources) for item in FIGURES),
        "tables": tuple(_table_row(item, sources) for item in TABLES),
    }


def _table_row(item: Figure | Table, sources: Sources) -> Row:
    return figure_row(item, sources) if isinstance(item, Figure) else table_row(item, sources)


def summary(groups: Mapping[str, Sequence[Row]]) -> str:
    """How many items of each group have which status, a sentence each.

    Args:
        groups: of :func:`rows`.

    Example:
        >>> summary({"figures": []})
        'Of 0 figures: none.'
    """
    return " ".join(f"Of {len(group)} {name}: {_counts(group)}." for name, group in groups.items())


def _counts(group: Sequence[Row]) -> str:
    found = [row.status for row in group]
    return ", ".join(f"{found.count(status)} {status.value}" for status in Status if status in found) or "none"


def as_markdown(sources: Sources) -> str:
    """The sections on items, scale and disagreements.

    Args:
        sources: evidence.

    Returns:
        Markdown without a final newline.
    """
    groups = rows(sources)
    facts = _facts(sources)
    parts = [
        _HEADING,
        summary(groups),
        *(f"### {name.capitalize()}\n\n{_table(group)}" for name, group in groups.items()),
        "### Notes on the equations",
        *_equation_notes(facts),
        "### Notes on the figures",
        *_notes(facts),
        "## What the reduced scale cannot show",
        *_limits(sources),
        "## Where the measurements disagree with the paper's story",
        *_disagreements(facts),
    ]
    return "\n\n".join(parts)


_HEADING = """## Every equation, figure and table

*reproduced*: every part of the statement holds, at the paper's size where size matters; *definition implemented*: the
equation only defines, and a model computes it; *in direction*: its main parts hold, or all of it at a smaller size; *not
decided*: seeds differ, a trend or difference is not told from none, or a run learned nothing; *not attempted*: the last
column says why; *not restated*: what the paper prints there is not among what this toolkit works from. Statuses are computed:
an equation's from its proof (`keel theory derive`), from a model held against the definition as printed, and from the claims
below; a figure's from the `finding` of its committed frame (`figures/data`). Where a figure's rule was changed after its runs
had been seen, the last column says what was changed. Ranges are over seeds. Sub-layers count attention and FFN apart."""


def _table(group: Sequence[Row]) -> str:
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *(_cells(row) for row in group)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    measured = (row.item, row.paper, row.ours, row.size, row.seeds, row.device, row.command)
    return (*measured, row.status.value, row.why)


def _facts(sources: Sources) -> dict[str, Any]:
    """Findings of all committed frames that the text speaks of, the constants that decide them, and the claims."""
    from figures._removal import TREND_LEVEL
    from figures.heat_maps import VANISHED
    from keel_theory.claim_checks import CASE
    from probes.divergence import JudgeThresholds

    names = set(NOTES.values()) | {name for each in DISAGREEMENTS for name in each.figures}
    facts = {name: readable(found) for name in sorted(names) if (found := sources.finding(name)) is not None}
    if (table := sources.frames("table1_max_lr")) is not None:
        facts["table1_max_lr"] |= _further_max_lr(facts["table1_max_lr"], table.frame)
    constants = {"judge": asdict(JudgeThresholds()), "trend_level": TREND_LEVEL, "vanished": VANISHED}
    case = asdict(CASE)
    return facts | constants | {"claims": sources.claims, "case": case, "n_sublayers": CASE.n_sublayers}


def _further_max_lr(finding: Mapping[str, Any], frame: pd.DataFrame) -> dict[str, Any]:
    """Words that the text takes from Table 1's finding."""
    depth = int(frame["n_sublayers"].max())
    deepest = {
        cell["scheme"]: cell
        for cell in finding["cells"]
        if cell["n_sublayers"] == depth
        and cell["criterion"] == "overall"
        and cell["peak_lr_of_the_ramp"] == frame["peak_lr"].min()
    }
    pairs = (f"{label(second)} below {label(first)}" for first, second in finding["pairs_against_the_paper"])
    told_apart = ["pre_ln", "keel"] in finding["pairs_against_the_paper"]
    return {
        "width": int(frame["width"].min()),
        "pre_ln_seeds": _seeds_in_words("Pre-LN", finding["schemes"]["pre_ln"]["outcomes"]),
        "pairs_in_words": ", ".join(pairs),
        "told_apart": "told apart" if told_apart else "not told apart",
        "deepest": {
            "n_sublayers": depth,
            "seeds": max((cell["seeds"] for cell in deepest.values()), default=0),
            **{name: deepest[name]["max_lr"] if name in deepest else "not run" for name in ("post_ln", "pre_ln", "keel")},
        },
    }


def _seeds_in_words(scheme: str, outcomes: Sequence[str]) -> str:
    """Whether the seeds of a scheme end alike.

    Example:
        >>> _seeds_in_words("Keel", ["healthy", "healthy"]), _seeds_in_words("Keel", ["healthy", "irrecoverable_spike"])
        ('All 2 seeds of Keel are healthy', 'Seeds of Keel differ (healthy, irrecoverable spike)')
    """
    words = [outcome.replace("_", " ") for outcome in outcomes]
    if len(set(words)) > 1:
        return f"Seeds of {scheme} differ ({', '.join(words)})"
    verb = f"are {words[0]}" if words[0] == "healthy" else f"end in {words[0]}"
    return f"All {len(words)} seeds of {scheme} {verb}"


def _equation_notes(facts: Mapping[str, Any]) -> Iterator[str]:
    for place, claims in EQUATION_NOTES.items():
        if all(name in facts["claims"] for name in claims):
            yield f"**{place}.** {texts()[place].format(**facts)}"


def _notes(facts: Mapping[str, Any]) -> Iterator[str]:
    for place, figure in NOTES.items():
        if figure in facts:
            yield f"**{place}.** {texts()[place].format(**{**facts, **facts[figure]})}"


def _disagreements(facts: Mapping[str, Any]) -> Iterator[str]:
    """Those that are there by the numbers, as one list."""
    said = [texts()[each.id].format(**facts) for each in DISAGREEMENTS if _contradicts(each, facts)]
    yield "\n".join(f"- {text}" for text in said) or "None by the numbers at hand."


def _contradicts(each: Disagreement, facts: Mapping[str, Any]) -> bool:
    claims = [facts["claims"].get(name) for name in each.claims]
    if any(cells is None for cells in claims) or any(name not in facts for name in each.figures):
        return False
    refuted = all(cells.decided and not cells.holds for cells in claims if cells is not None)
    return refuted and (each.contradicts is None or each.contradicts(facts))


def _limits(sources: Sources) -> Iterator[str]:
    """The hand-written limits with the extremes of what was trained."""
    frames = [each.frame for name in _TRAINED_WITH_RAMPS if (each := sources.frames(name)) is not None]
    untrained = sources.frames("full_and_shortcut")
    if not frames or untrained is None:
        yield "No committed runs."
        return
    fields = {
        "width": _largest(frames, "width"),
        "depth": _largest(frames, "n_sublayers"),
        "untrained_depth": int(untrained.frame["n_sublayers"].max()),
        "tokens": max(
            int((frame["steps"] * frame["tokens_per_step"]).max())
            for frame in frames
            if {"steps", "tokens_per_step"} <= set(frame.columns)
        ),
        "parameters": _largest(frames, "n_parameters"),
        "seeds": max(int(frame["seed"].nunique()) for frame in frames),
        "lr_factor": LR_FACTOR,
    }
    for name in LIMITS:
        yield texts()[name].format(**fields)


def _largest(frames: Sequence[pd.DataFrame], column: str) -> int:
    return max(int(frame[column].max()) for frame in frames if column in frame.columns)
