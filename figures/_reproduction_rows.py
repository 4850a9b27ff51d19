"""Rows of the report on the paper: what an item is, which evidence decides it, and how its status follows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from figures.paper_check import Verdict as Consistency
from figures.registry import FIGURES

if TYPE_CHECKING:
    import pandas as pd

    from figures.paper_check import CheckResult, PaperCheck
    from figures.pipeline import StoredFrame
    from probes.verification import Verification

__all__ = [
    "ClaimCells",
    "Equation",
    "Figure",
    "Row",
    "Sources",
    "Spread",
    "Status",
    "Table",
    "claim_cells",
    "equation_row",
    "figure_row",
    "readable",
    "table_row",
]

ROUND_OFF = 1e-11
"""Relative difference of a model from a printed definition that is round-off."""
_NONE = "–"


class Status(str, Enum):
    """What became of an item of the paper."""

    REPRODUCED = "reproduced"
    DEFINED = "definition implemented"
    IN_DIRECTION = "reproduced in direction"
    NOT_REPRODUCED = "not reproduced"
    NOT_DECIDED = "not decided"
    NOT_ATTEMPTED = "not attempted"
    NOT_RESTATED = "not restated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the report; every field is text."""

    item: str
    paper: str
    ours: str
    size: str
    seeds: str
    device: str
    command: str
    status: Status
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimCells:
    """What the table of claims says of one claim.

    Attributes:
        statement: without its assumptions.
        claimed: value, as text.
        numeric: value with its error, as text.
        measured: value with its error, as text.
        own: value on the model as initialised, as text.
        holds: whether it holds; otherwise it is refuted.
        decided: whether the numbers confirm that.
    """

    statement: str
    claimed: str
    numeric: str
    measured: str
    own: str
    holds: bool
    decided: bool


def claim_cells(verification: Verification) -> ClaimCells:
    """The cells of a verified claim, with the digits of ``keel verify --markdown``.

    Args:
        verification: of the claim.
    """
    from keel_theory.claims import Verdict
    from probes.verification import number, with_error

    result, measurement = verification.result, verification.measurement
    return ClaimCells(
        statement=result.claim.statement,
        claimed=number(result.evidence.claimed),
        numeric=with_error(result.evidence.numeric, result.evidence.numeric_error),
        measured=with_error(measurement.value, measurement.error),
        own=number(measurement.own),
        holds=result.verdict is Verdict.HOLDS,
        decided=verification.passed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """All evidence.

    Attributes:
        proved: whether the derivation of an equation is proved, by its number.
        differences: of a model from a printed definition, relative, by the equation's number.
        claims: decided claims, by their id.
        frames: gives the committed frame of a figure, None where there is none.
        consistency: the paper against itself.
        tables: published numbers as frames, by the table's name.
    """

    proved: Mapping[str, bool]
    differences: Mapping[str, float]
    claims: Mapping[str, ClaimCells]
    frames: Callable[[str], StoredFrame | None]
    consistency: PaperCheck
    tables: Mapping[str, pd.DataFrame]
    _found: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)

    def finding(self, name: str) -> dict[str, Any] | None:
        """What a figure's own module finds in its committed frame, None where there is none.

        Args:
            name: of the figure.
        """
        if name not in self._found and (stored := self.frames(name)) is not None:
            module: Any = import_module(FIGURES[name].module)
            self._found[name] = module.finding(stored.frame)
        return self._found.get(name)


# --- equations -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Equation:
    """One equation, or several that are one.

    Attributes:
        numbers: in the paper.
        paper: what it says.
        derivations: numbers of ``keel theory derive`` that prove it.
        definition: number of the printed definition that a model is held against.
        claims: ids of what the paper itself says by it; they decide the status.
        beside: ids of claims that say where it ends, or what is made of it elsewhere.
        remark: on its limits.
        restated: whether what the paper prints under these numbers is among what this toolkit works from; otherwise there is
            nothing to hold a proof or a model against.
    """

    numbers: str
    paper: str
    derivations: tuple[str, ...] = ()
    definition: str = ""
    claims: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    remark: str = ""
    restated: bool = True


def equation_row(item: Equation, sources: Sources) -> Row:
    """The row of an equation.

    Args:
        item: of the report.
        sources: evidence.

    Returns:
        Reproduced if every derivation is proved and all of the paper's own claims hold; definition implemented if they do and
        the equation is a definition that a model computes; in direction if a claim is refuted beside one that holds; not
        attempted if there is nothing to decide by; not restated whatever is proved where the paper's words are not known.
    """
    claims = {name: sources.claims.get(name) for name in item.claims}
    proofs = [sources.proved.get(number) for number in item.derivations]
    difference = sources.differences.get(item.definition) if item.definition else None
    parts = [*proofs, *(None if cells is None else cells.holds and cells.decided for cells in claims.values())]
    if item.definition:
        parts.append(None if difference is None else difference < ROUND_OFF)
    return Row(
        item=f"Eq. {item.numbers}",
        paper=item.paper,
        ours="; ".join(_equation_words(proofs, difference, claims)) or _NONE,
        size=_equation_size(item),
        seeds="spread beside each number" if item.claims else _NONE,
        device="cpu" if parts else _NONE,
        command=_equation_command(item),
        status=_equation_status(item, parts, [cells for cells in claims.values() if cells is not None]),
        why="; ".join(_equation_reasons(item, sources)),
    )


def _equation_status(item: Equation, parts: Sequence[bool | None], claims: Sequence[ClaimCells]) -> Status:
    if not item.restated:
        return Status.NOT_RESTATED
    if not parts or any(part is None for part in parts):
        return Status.NOT_ATTEMPTED
    if all(parts):
        return Status.DEFINED if item.definition else Status.REPRODUCED
    some = any(cells.holds and cells.decided for cells in claims)
    others = all(cells.decided for cells in claims)
    return Status.IN_DIRECTION if some and others else Status.NOT_REPRODUCED


def _equation_words(
    proofs: Sequence[bool | None], difference: float | None, claims: Mapping[str, ClaimCells | None]
) -> list[str]:
    words = []
    if proofs and None not in proofs:
        words.append("derivation proved" if all(proofs) else "derivation NOT proved")
    if difference is not None:
        words.append("a model computes it to round-off" if difference < ROUND_OFF else f"a model differs by {difference:.2g}")
    words += [f"`{name}` {_decided(cells)}" for name, cells in claims.items() if cells is not None]
    return words


def _decided(cells: ClaimCells) -> str:
    verdict = ("holds" if cells.holds else "refuted") if cells.decided else "NOT decided"
    return f"{verdict}: claimed {cells.claimed}, numeric {cells.numeric}, measured {cells.measured}"


def _equation_reasons(item: Equation, sources: Sources) -> list[str]:
    named = [(name, sources.claims.get(name)) for name in (*item.claims, *item.beside)]
    reasons = [
        f"refuted (`{name}`): {cells.statement}"
        for name, cells in named
        if cells is not None and cells.decided and not cells.holds
    ]
    missing = [name for name in item.claims if name not in sources.claims]
    reasons += [f"`{name}` was not checked in this run" for name in missing]
    return [item.remark, *reasons] if item.remark else reasons


def _equation_size(item: Equation) -> str:
    from probes.claim_measurements import WIDTH

    sizes = ["symbolic"] if item.derivations else []
    sizes += [f"model of width {WIDTH}"] if item.claims else ["model of width 16"] if item.definition else []
    return "; ".join(sizes) or _NONE


def _equation_command(item: Equation) -> str:
    commands = [f"`keel theory derive {number}`" for number in item.derivations]
    if names := " ".join((*item.claims, *item.beside)):
        commands.append(f"`keel verify {names}`")
    return "; ".join(commands) or ("`keel repro`" if item.definition else _NONE)


# --- figures ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over seeds, printed as its median and range."""

    median: float
    low: float
    high: float
    seeds: int

    def __format__(self, spec: str) -> str:
        """By the same format for all three; the range only where there is one.

        Example:
            >>> f"{Spread(1.0, 0.5, 2.0, 3):.1f}, {Spread(1.0, 1.0, 1.0, 1):.1f}"
            '1.0 (0.5 to 2.0), 1.0'
        """
        middle = format(self.median, spec)
        return middle if self.seeds == 1 else f"{middle} ({format(self.low, spec)} to {format(self.high, spec)})"


def readable(finding: Any) -> Any:
    """A finding with spreads that print themselves, and lists of yes and no counted.

    Example:
        >>> readable({"a": {"median": 1.0, "low": 1.0, "high": 2.0, "seeds": 2}, "b": [True, False]})["b"]
        '1 of 2'
    """
    if isinstance(finding, Mapping):
        if set(finding) == {"median", "low", "high", "seeds"}:
            return Spread(**finding)
        return {name: readable(value) for name, value in finding.items()}
    if isinstance(finding, list) and finding and all(isinstance(value, bool) for value in finding):
        return f"{sum(finding)} of {len(finding)}"
    return [readable(value) for value in finding] if isinstance(finding, list) else finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure, or a table that has one.

    Attributes:
        place: in the paper.
        figure: whose frame and finding decide.
        paper: what the paper shows.
        ours: puts the finding in words.
        full_size: whether a frame is of the paper's size and protocol.
        rule_changed: what of the rule by which the finding decides was changed after the runs had been seen; empty if nothing.
        untested: parts of what the paper shows that no finding tests; with some, not every part holds.
        smaller: how ours differs in size or protocol; names of :data:`SIZES` in braces become the frame's values.
        published: why nothing can be measured, for figures of published numbers.
        groups: columns by which runs differ in their seeds or sizes, if they do; both are then told group by group.
    """

    place: str
    figure: str
    paper: str | Callable[[Sources], str]
    ours: Callable[[Mapping[str, Any]], str]
    full_size: Callable[[pd.DataFrame], bool] = field(default=lambda frame: False)
    smaller: str = ""
    rule_changed: str = ""
    untested: str = ""
    published: str = ""
    groups: tuple[str, ...] = ()


def figure_row(item: Figure, sources: Sources) -> Row:
    """The row of a figure.

    Args:
        item: of the report.
        sources: evidence.

    Returns:
        The status is the finding's verdict; ``reproduced`` at another size than the paper's becomes ``in direction``.
    """
    stored = sources.frames(item.figure)
    finding = sources.finding(item.figure)
    status, why = _figure_status(item, stored, finding)
    consistency = _consistency_words(item.place, sources.consistency)
    return Row(
        item=_linked(item.place, item.figure, drawn=stored is not None),
        paper=item.paper if isinstance(item.paper, str) else item.paper(sources),
        ours=_NONE if finding is None else item.ours(readable(finding)),
        size=_NONE if stored is None or item.published else _size_words(stored.frame, item.groups),
        seeds=_NONE if stored is None else _seed_words(stored.frame, item.groups),
        device=_NONE if stored is None or item.published else str(stored.about["device"]),
        command=f"`keel figures {item.figure} --recompute`",
        status=status,
        why="; ".join(filter(None, (why, _rule_words(item), consistency))),
    )


def _rule_words(item: Figure) -> str:
    return f"rule changed after the runs: {item.rule_changed}" if item.rule_changed else ""


def _figure_status(item: Figure, stored: StoredFrame | None, finding: Mapping[str, Any] | None) -> tuple[Status, str]:
    if item.published:
        return Status.NOT_ATTEMPTED, item.published
    if stored is None or finding is None:
        return Status.NOT_ATTEMPTED, "no committed run of the present settings"
    status = Status(finding["verdict"])
    full_size = item.full_size(stored.frame)
    smaller = item.smaller.format(**{name: _values(stored.frame, name) for name in SIZES if name in stored.frame.columns})
    parts = _part_words(finding, item.untested)
    size = "" if full_size else smaller
    if status is Status.REPRODUCED and (not full_size or item.untested):
        parts = parts or "every part holds"
        status = Status.IN_DIRECTION
    return status, "; ".join(filter(None, (parts, size)))


def _part_words(finding: Mapping[str, Any], untested: str) -> str:
    """What does not hold, what is open and why, and what was not tested."""
    parts: Mapping[str, bool | None] = finding.get("parts", {})
    groups = {"holds": True, "does not hold": False, "not decided": None}
    named = {word: [name for name, answer in parts.items() if answer is value] for word, value in groups.items()}
    if not named["does not hold"] and not named["not decided"] and not untested:
        return ""
    words = [f"{word}: {', '.join(names)}" for word, names in named.items() if names]
    if named["not decided"] and (failed := finding.get("learned_nothing")):
        words.append(f"{len(failed)} runs end at the unigram entropy, and of those nothing can be compared")
    elif named["not decided"]:
        words.append("open where seeds differ, or a difference or trend is not told from none")
    return "; ".join([*words, f"not tested: {untested}"] if untested else words)


def _linked(place: str, figure: str, *, drawn: bool) -> str:
    return f"[{place}](figures/gallery/{figure}.png)" if drawn else place


SIZES = {
    "n_sublayers": "{} sub-layers",
    "n_blocks": "{} blocks",
    "width": "width {}",
    "steps": "{} steps",
    "tokens_per_step": "{} tokens a step",
    "n_predictions": "{} predicted tokens",
}


def _size_words(frame: pd.DataFrame, groups: Sequence[str] = ()) -> str:
    """Depths, widths, steps and tokens that a frame has: what all groups share, then what each has of its own."""
    if "batch_size" in frame.columns and "seq_len" in frame.columns and "tokens_per_step" not in frame.columns:
        frame = frame.assign(tokens_per_step=frame["batch_size"] * frame["seq_len"])
    names = [name for name in SIZES if name in frame.columns and not (name == "n_blocks" and "width" in frame.columns)]
    parts = _grouped(frame, groups)
    own = [n for n in names if n not in groups and len({_values(rows, n) for rows in parts.values()}) > 1]
    words = [SIZES[n].format(_values(frame, n)) for n in names if n not in own and not (own and n in groups)]
    checkpoints = [str(value) for value in frame["checkpoint"].unique()] if "checkpoint" in frame.columns else []
    each = [f"{name}: {', '.join(_own_words(rows, frame, own))}" for name, rows in parts.items()] if own else []
    return "; ".join(filter(None, (", ".join([*checkpoints, *words]), *each))) or _NONE


def _own_words(rows: pd.DataFrame, frame: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """What one group has of its own; a smaller batch than the largest is said to be one."""
    words = [SIZES[name].format(_values(rows, name)) for name in names]
    if "tokens_per_step" in names:
        share, rest = divmod(int(frame["tokens_per_step"].max()), int(rows["tokens_per_step"].max()))
        if share > 1 and not rest:
            words.append(f"{'half' if share == 2 else f'1/{share} of'} the batch")
    return words


def _values(frame: pd.DataFrame, name: str) -> str:
    return " and ".join(f"{value:,}" for value in sorted(frame[name].unique()))


def _seed_words(frame: pd.DataFrame, groups: Sequence[str] = ()) -> str:
    """The seeds, of each group where they differ."""
    if "seed" not in frame.columns:
        return _NONE
    seeds = {name: ", ".join(map(str, sorted(rows["seed"].unique()))) for name, rows in _grouped(frame, groups).items()}
    distinct = set(seeds.values())
    return distinct.pop() if len(distinct) == 1 else "; ".join(f"{name}: {words}" for name, words in seeds.items())


_GROUP_WORDS = {"ramp": "ramps", "plain": "plain trainings", "budget": "budgets"}


def _grouped(frame: pd.DataFrame, groups: Sequence[str]) -> dict[str, pd.DataFrame]:
    """The frame's parts by the name of each; one without a name where nothing tells them apart."""
    if not groups:
        return {"": frame}
    found = {}
    for values, rows in frame.groupby(list(groups)):
        words = (_group_word(name, value) for name, value in zip(groups, values, strict=True))
        found[", ".join(words)] = rows
    return found


def _group_word(name: str, value: object) -> str:
    return SIZES[name].format(f"{value:,}") if name in SIZES else _GROUP_WORDS.get(str(value), str(value))


# --- tables ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table that no frame stands behind.

    Attributes:
        place: in the paper.
        paper: what it has.
        why: it is not attempted, or what the check is.
        check: computes ours and whether it agrees; None for what is not attempted.
    """

    place: str
    paper: str
    why: str
    check: Callable[[Sources], tuple[str, bool]] | None = None


def table_row(item: Table, sources: Sources) -> Row:
    """The row of a table.

    Args:
        item: of the report.
        sources: evidence.
    """
    ours, agrees = (_NONE, None) if item.check is None else item.check(sources)
    status = Status.NOT_ATTEMPTED if agrees is None else Status.REPRODUCED if agrees else Status.NOT_REPRODUCED
    return Row(
        item=item.place,
        paper=item.paper,
        ours=ours,
        size=_NONE if item.check is None else "configurations only; nothing is built",
        seeds=_NONE,
        device=_NONE,
        command="`keel paper-check`" if item.check is None else "`keel repro`",
        status=status,
        why="; ".join(filter(None, (item.why, _consistency_words(item.place, sources.consistency)))),
    )


def _consistency_words(place: str, consistency: PaperCheck) -> str:
    """What the paper's consistency says of the checks that name this place."""
    results = [result for result in consistency.results if _names(result, place)]
    if not results:
        return ""
    counts = {verdict: sum(result.verdict is verdict for result in results) for verdict in Consistency}
    named = "1 statement names it" if len(results) == 1 else f"{len(results)} statements name it"
    kinds = {
        Consistency.CONSEQUENCE: "following from such",
        Consistency.WORDING: "of wording",
        Consistency.TENSION: "in tension under a premise",
    }
    further = [f"{counts[kind]} {words}" for kind, words in kinds.items() if counts[kind]]
    return ", ".join([f"paper-check: {named}", f"{counts[Consistency.CONTRADICTION]} contradictory", *further])


def _names(result: CheckResult, place: str) -> bool:
    number = re.escape(place.removeprefix("Figure ").removeprefix("Table "))
    kind = "Figs?" if place.startswith("Figure") else "Tables?"
    text = [result.check.statement, result.check.source]
    text += [reading.where for each in result.comparisons for reading in (each.stated, each.against)]
    short = re.match(r"\d+", number)
    loose = rf"|{kind}\. ?{short[0]}(?![\da-z])" if short is not None and kind == "Figs?" else ""
    return any(re.search(rf"{kind}\.? ?{number}(?![\da-z]){loose}", part) for part in text)
