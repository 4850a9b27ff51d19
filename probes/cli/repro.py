"""``keel repro``: the report on the paper, from every check that needs no training, and from committed frames."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["document", "register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("repro")(repro)


def repro(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write to this file instead of stdout.", show_default=False)
    ] = None,
) -> None:
    """Write the report on the paper as Markdown: every equation, figure and table with a status that is computed.

    Equations from derivations, models and claims that are checked now; figures from their committed frames; what the reduced
    scale cannot show, where measurements disagree with the paper, its claims, and its tables held against each other.

    Exit code 1 if a claim does not turn out as expected; what the paper contradicts itself in does not count.

    \b
    Example:
      keel repro -o paper_repro.md
    """  # noqa: D301 - a real \b keeps the lines of the example apart
    from probes.cli._io import emit
    from probes.cli.verify import ClaimProgress, require_place

    require_place(output)
    from figures.paper_check import check_paper
    from figures.paper_tables import PUBLISHED, load_tables
    from figures.reproduction import as_markdown as reproduction_of
    from figures.reproduction import claim_cells, collect
    from keel_theory.claims import CLAIMS
    from probes.cli.paper_check import as_markdown as consistency_of
    from probes.verification import as_markdown, verify_claims

    consistency = consistency_of(check_paper(load_tables(PUBLISHED)))
    done = verify_claims(progress=ClaimProgress(len(CLAIMS)))
    reproduction = reproduction_of(collect({each.result.claim.id: claim_cells(each) for each in done}))
    emit(document(reproduction, as_markdown(done), consistency), output)
    failed = [each.result.claim.id for each in done if not each.passed]
    if failed:
        print(f"not as expected: {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(1)


def document(reproduction: str, claims: str, consistency: str) -> str:
    """Put the sections of the report together.

    Args:
        reproduction: sections of :func:`figures.reproduction.as_markdown`.
        claims: table of ``keel verify --markdown``.
        consistency: tables of ``keel paper-check --markdown``.

    Returns:
        Markdown without a final newline.

    Example:
        >>> document("## Items", "| claim |", "**What was checked**").splitlines()[0]
        '# What holds of the paper'
    """
    return "\n".join([*_INTRODUCTION, "", reproduction, "", *_CLAIMS, "", claims, "", *_CONSISTENCY, "", consistency])


_INTRODUCTION = (
    "# What holds of the paper",
    "",
    "Chen Chen, Lai Wei, *Post-LayerNorm Is Back: Stable, ExpressivE, and Deep*, arXiv:2601.19895v2. Written by `make repro`",
    "(`keel repro -o paper_repro.md`); do not edit by hand.",
)
_CLAIMS = (
    "## Claims about gradients and streams",
    "",
    "From `keel verify --markdown`. *claimed*: what the statement gives; *derived*: by theory; *numeric*: an independent",
    "calculation that uses none of the formulas; *measured*: on a model whose branches meet the assumptions, width 128, beside",
    "what theory predicts at that width and depth; *own branches*: the same quantity on the model as initialised, where the",
    "assumptions need not hold. A claim *holds* if claimed and derived agree and both numbers confirm them to three standard",
    "errors while excluding the nearest wrong statement by five; it is *refuted* if both numbers contradict it by five. The",
    "wrong forms in circulation are expected to be refuted.",
)
_CONSISTENCY = (
    "## The paper's tables against its text and each other",
    "",
    "From `keel paper-check --markdown`.",
)
