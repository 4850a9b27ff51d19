r"""``keel paper-check``: the paper's statements held against its own tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from figures.paper_check import CheckResult, PaperCheck
    from figures.paper_places import Comparison

__all__ = ["as_markdown", "register"]

_MOST_SHOWN = 4
_HEADINGS = {
    "contradiction": "Contradictions of arithmetic",
    "consequence": "What follows from them",
    "wording": "Wording",
    "tension": "Tensions: contradictions if the premise holds, which the paper does not print",
}
"""Verdict -> what its findings are listed under, in this order."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("paper-check")(paper_check)


def paper_check(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every comparison.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write to this file instead of stdout.", show_default=False)
    ] = None,
    tables: Annotated[
        Path | None,
        typer.Option(help="Folder with another copy of the tables; without it, the published ones.", show_default=False),
    ] = None,
) -> None:
    """Check the paper against itself: averages, gains, captions, words, sizes and settings against its tables.

    Averages are compared at the precision printed: one is a contradiction only if no values that round to the printed columns
    give it. What follows from another contradiction, what another reading of the words reconciles (blocks for layers), and
    what depends on a premise that the paper does not print are listed apart. Exit code 1 if numbers contradict each other, else
    0; wording and tensions do not count.

    \b
    Examples:
      keel paper-check
      keel paper-check --markdown -o consistency.md
    """  # noqa: D301 - a real \b keeps the lines of the example apart
    from figures.paper_check import Verdict, check_paper
    from figures.paper_tables import PUBLISHED, load_tables
    from probes.cli._io import emit

    if json and markdown:
        raise typer.BadParameter("--json and --markdown exclude each other")
    done = check_paper(load_tables(tables or PUBLISHED))
    if json:
        from probes.cli._tables import as_json

        emit(as_json(done.to_dict()), output)
    else:
        emit(as_markdown(done) if markdown else _page(done), output)
    if done.of(Verdict.CONTRADICTION) or done.of(Verdict.CONSEQUENCE):
        raise typer.Exit(1)


def _page(done: PaperCheck) -> str:
    from probes.cli._tables import render

    lines = [line for heading, results in _groups(done) for line in (heading, "", *_listing(results))]
    counts = done.counts()
    return "\n".join([*lines, render(list(counts[0]), counts, wide=False), "", done.summary()])


def _groups(done: PaperCheck) -> Iterator[tuple[str, tuple[CheckResult, ...]]]:
    """Headings with what is found under them, without empty ones."""
    from figures.paper_check import Verdict

    for verdict, heading in _HEADINGS.items():
        if results := done.of(Verdict(verdict)):
            yield heading, results


def _listing(results: Sequence[CheckResult]) -> Iterator[str]:
    for result in results:
        check = result.check
        yield f"{check.id}: {check.statement}"
        yield f"  source: {check.source}"
        if check.premise:
            yield f"  premise: {check.premise}"
        for comparison in _shown(result):
            yield f"    {comparison.stated.text}  {comparison.stated.where}"
            yield f"    {comparison.against.text}  {comparison.against.where}"
            if comparison.note:
                yield f"    {comparison.note}"
        if rest := _rest(result):
            yield f"    {rest}"
        yield ""


def _shown(result: CheckResult) -> tuple[Comparison, ...]:
    """The disagreements; only the first where there are many."""
    found = result.disagreements
    return found if len(found) <= _MOST_SHOWN else found[:1]


def _rest(result: CheckResult) -> str:
    n_shown, n_found = len(_shown(result)), len(result.disagreements)
    return f"{n_found} of {len(result.comparisons)} numbers differ, the others in --json" if n_found > n_shown else ""


def as_markdown(done: PaperCheck) -> str:
    """The findings and the counts as Markdown tables, without a heading.

    Args:
        done: from :func:`figures.paper_check.check_paper`.

    Returns:
        Text without a final newline.
    """
    columns = ("statement", "value", "where", "against", "where", "what would reconcile them, or the premise")
    tables = [
        f"**{heading}**\n\n{_markdown_table(columns, [_cells(result, c) for result in results for c in _shown(result)])}"
        for heading, results in _groups(done)
    ]
    counts = done.counts()
    kinds = _markdown_table(tuple(counts[0]), [[str(value) for value in row.values()] for row in counts])
    return "\n\n".join([done.summary(), *tables, f"**What was checked**\n\n{kinds}"])


def _cells(result: CheckResult, comparison: Comparison) -> list[str]:
    check, stated, against = result.check, comparison.stated, comparison.against
    remark = "; ".join(filter(None, (comparison.note, check.premise, _rest(result))))
    return [f"{check.statement} ({check.source})", stated.text, stated.where, against.text, against.where, remark]


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *lines])
