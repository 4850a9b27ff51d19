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

_MOST_SHOWN = 3
_CONDITIONAL = "Contradictions if the premise holds, which no table prints"


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
    give it. Exit code 0 if there is no contradiction, 1 if there is one; what depends on a premise that the tables do not
    print is listed apart and does not count.

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
    if done.of(Verdict.CONTRADICTION):
        raise typer.Exit(1)


def _page(done: PaperCheck) -> str:
    from figures.paper_check import Verdict
    from probes.cli._tables import render

    groups = (("Contradictions", done.of(Verdict.CONTRADICTION)), (_CONDITIONAL, done.of(Verdict.CONDITIONAL)))
    lines = [line for heading, results in groups if results for line in (heading, "", *_listing(results))]
    counts = done.counts()
    return "\n".join([*lines, render(list(counts[0]), counts, wide=False)])


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
    from figures.paper_check import Verdict

    found = _markdown_table(
        ("statement", "value", "where", "against", "where", "what would reconcile them"),
        (_cells(result, c, c.note) for result in done.of(Verdict.CONTRADICTION) for c in _shown(result)),
    )
    conditional = _markdown_table(
        ("statement", "value", "where", "against", "where", "premise"),
        (
            _cells(result, c, "; ".join(filter(None, (result.check.premise, _rest(result)))))
            for result in done.of(Verdict.CONDITIONAL)
            for c in _shown(result)
        ),
    )
    counts = done.counts()
    kinds = _markdown_table(tuple(counts[0]), ([str(value) for value in row.values()] for row in counts))
    parts = [("Contradictions", found), (_CONDITIONAL, conditional), ("What was checked", kinds)]
    return "\n\n".join(f"**{heading}**\n\n{table}" for heading, table in parts if table)


def _cells(result: CheckResult, comparison: Comparison, remark: str) -> list[str]:
    stated, against = comparison.stated, comparison.against
    return [f"{result.check.statement} ({result.check.source})", stated.text, stated.where, against.text, against.where, remark]


def _markdown_table(columns: Sequence[str], rows: Iterator[list[str]]) -> str:
    """A table, or nothing where there are no rows."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *lines]) if lines else ""
