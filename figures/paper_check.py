"""The paper against itself: run every check of ``figures/paper_statements.py`` and say what does not fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from figures.paper_places import Cause, Check, Comparison, Kind
from figures.paper_statements import CHECKS
from figures.paper_tables import PaperTables, load_tables

__all__ = ["CheckResult", "PaperCheck", "Verdict", "check_paper"]


class Verdict(str, Enum):
    """What a check finds."""

    CONSISTENT = "consistent"
    CONTRADICTION = "contradiction"
    """Arithmetic: the two places cannot both be right."""
    CONSEQUENCE = "consequence"
    """They cannot both be right, because a number that enters is itself contradicted elsewhere."""
    WORDING = "wording"
    """They differ as words are usually read; another reading (blocks for layers) reconciles them."""
    TENSION = "tension"
    """They cannot both be right if the check's premise holds, which the paper does not print."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check and what it compared.

    Attributes:
        check: the statement.
        comparisons: in order, at least one.
    """

    check: Check
    comparisons: tuple[Comparison, ...]

    @property
    def disagreements(self) -> tuple[Comparison, ...]:
        """The comparisons that fail."""
        return tuple(each for each in self.comparisons if not each.agrees)

    @property
    def verdict(self) -> Verdict:
        """Consistent, a tension under a premise, or what the worst of the disagreements is."""
        causes = {each.cause for each in self.disagreements}
        if not causes:
            return Verdict.CONSISTENT
        if self.check.premise:
            return Verdict.TENSION
        if Cause.NUMBERS in causes:
            return Verdict.CONTRADICTION
        return Verdict.CONSEQUENCE if Cause.CONSEQUENCE in causes else Verdict.WORDING


@dataclass(frozen=True, slots=True)
class PaperCheck:
    """All checks.

    Attributes:
        results: in the order of the statements.
    """

    results: tuple[CheckResult, ...]

    def of(self, verdict: Verdict) -> tuple[CheckResult, ...]:
        """The results with this verdict."""
        return tuple(result for result in self.results if result.verdict is verdict)

    def counts(self) -> list[dict[str, Any]]:
        """Per kind of check: how many statements and comparisons, and how many statements have which verdict; then the sums."""
        rows = [_count(kind.value, [r for r in self.results if r.check.kind is kind]) for kind in Kind]
        return [*(row for row in rows if row["statements"]), _count("all", self.results)]

    def summary(self) -> str:
        """What does not fit, in one sentence.

        Example:
            >>> PaperCheck(()).summary()
            'Nothing contradicts itself; 0 tensions under a premise.'
        """
        found = {verdict: len(self.of(verdict)) for verdict in Verdict}
        wrong, follows, words = (found[v] for v in (Verdict.CONTRADICTION, Verdict.CONSEQUENCE, Verdict.WORDING))
        total = wrong + follows + words
        parts = [
            f"{wrong} of arithmetic" if wrong else "",
            f"{follows} that follow{'s' if follows == 1 else ''} from {'it' if wrong == 1 else 'them'}" if follows else "",
            f"{words} of wording" if words else "",
        ]
        tensions = f"{found[Verdict.TENSION]} tension{'' if found[Verdict.TENSION] == 1 else 's'} under a premise"
        if not total:
            return f"Nothing contradicts itself; {tensions}."
        noun = "contradiction" if total == 1 else "contradictions"
        return f"{total} {noun}: {', '.join(filter(None, parts))}; {tensions}."

    def to_dict(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        return {"summary": self.summary(), "counts": self.counts(), "checks": [_as_dict(result) for result in self.results]}


def check_paper(tables: PaperTables | None = None, checks: Sequence[Check] = CHECKS) -> PaperCheck:
    """Hold the paper's statements against its tables.

    Args:
        tables: from :func:`figures.paper_tables.load_tables`; the published ones without it.
        checks: statements; all of them by default.

    Returns:
        One result per statement.

    Example:
        >>> from figures.paper_statements import CHECKS
        >>> [r.verdict.value for r in check_paper(checks=[c for c in CHECKS if c.id == "figure1b-overall-keel"]).results]
        ['consistent']
    """
    tables = tables or load_tables()
    return PaperCheck(tuple(CheckResult(check, tuple(check.compare(tables))) for check in checks))


def _count(name: str, results: Sequence[CheckResult]) -> dict[str, Any]:
    return {
        "kind": name,
        "statements": len(results),
        "comparisons": sum(len(r.comparisons) for r in results),
        "contradictions": sum(r.verdict is Verdict.CONTRADICTION for r in results),
        "consequences": sum(r.verdict is Verdict.CONSEQUENCE for r in results),
        "wording": sum(r.verdict is Verdict.WORDING for r in results),
        "tensions": sum(r.verdict is Verdict.TENSION for r in results),
    }


def _as_dict(result: CheckResult) -> dict[str, Any]:
    check = result.check
    return {
        "id": check.id,
        "kind": check.kind.value,
        "statement": check.statement,
        "source": check.source,
        "premise": check.premise,
        "verdict": result.verdict.value,
        "comparisons": [
            {
                "stated": {"value": c.stated.text, "where": c.stated.where},
                "against": {"value": c.against.text, "where": c.against.where},
                "agrees": c.agrees,
                "note": c.note,
                "cause": None if c.agrees else c.cause.value,
            }
            for c in result.comparisons
        ],
    }
