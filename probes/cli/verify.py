r"""``keel verify``: every claim of the paper that a machine can check, derived, calculated and measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from probes.verification import Verification

__all__ = ["ClaimProgress", "register", "require_place"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("verify")(verify)


def verify(
    claims: Annotated[list[str] | None, typer.Argument(help="Claims to check; all without one.", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write to this file instead of stdout.", show_default=False)
    ] = None,
) -> None:
    """Check every claim about gradients and streams: derived value, independent number, value in a real model.

    Exit code 0 if every claim turns out as expected (the wrong forms in circulation are expected to be refuted), 1 if one does
    not.

    \b
    Examples:
      keel verify
      keel verify 15-product 15-wrong-base
      keel verify --markdown -o claims.md
    """  # noqa: D301 - a real \b keeps the lines of the example apart
    from keel_theory.claims import CLAIMS, get_claim
    from probes.cli._io import emit

    if json and markdown:
        raise typer.BadParameter("--json and --markdown exclude each other")
    ids = list(dict.fromkeys(get_claim(claim).id for claim in claims or CLAIMS))
    require_place(output)
    from probes.verification import as_markdown, as_row, verify_claims

    done = verify_claims(ids, progress=ClaimProgress(len(ids)))
    if json:
        from probes.cli._tables import as_json

        emit(as_json([as_row(each) for each in done]), output)
    else:
        emit(as_markdown(done) if markdown else _table(done), output)
    failed = [each.result.claim.id for each in done if not each.passed]
    if failed:
        print(f"not as expected: {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(1)


def require_place(output: Path | None) -> None:
    """Half a minute of checks must not end at a place that cannot be written to.

    Args:
        output: the file to be written at the end; None for stdout.

    Raises:
        OutputError: if it is a folder or a device, or its folder is missing or cannot be written to.
    """
    from tempfile import TemporaryFile

    from probes.errors import OutputError

    if output is None:
        return
    reason = None
    if not output.parent.is_dir():
        reason = "its folder does not exist"
    elif output.exists() and not output.is_file():
        reason = "it is a folder or a device"
    else:
        try:
            with TemporaryFile(dir=output.parent, prefix=f".{output.name}."):  # permissions alone do not say it
                pass
        except OSError as error:
            reason = f"its folder cannot be written to ({error.strerror or error})"
    if reason is not None:
        raise OutputError(f"cannot write '{output}': {reason}; name a file in an existing folder you may write to")


class ClaimProgress:
    """One line on stderr, overwritten on a terminal and silent elsewhere but for the start."""

    def __init__(self, n_claims: int) -> None:
        self.n_claims, self.n_done = n_claims, 0
        self.live = sys.stderr.isatty()
        if not self.live:
            print(f"checking {n_claims} claims", file=sys.stderr)

    def __call__(self, claim: str) -> None:
        """Show that a claim is next.

        Args:
            claim: its id.
        """
        self.n_done += 1
        if self.live:
            end = "\n" if self.n_done == self.n_claims else ""
            print(f"\r\x1b[K{self.n_done}/{self.n_claims} {claim}", end=end, file=sys.stderr, flush=True)


def _table(done: tuple[Verification, ...]) -> str:
    from probes.cli._tables import render

    columns = ["claim", "claimed", "derived", "numeric", "measured", "predicted", "own_branches", "verdict"]
    n_passed = sum(each.passed for each in done)
    return "\n".join(
        [
            render(columns, [_row(each) for each in done], wide=False),
            "",
            "claimed: by the statement; derived: by theory; numeric: independent calculation; measured: on a real model under",
            "the claim's assumptions, beside what theory predicts at that width; own branches: on the model as initialised.",
            "numeric and measured must agree with derived and predicted to 3 standard errors, and must be 5 away from what is",
            "refuted, or from the nearest wrong statement where a claim holds.",
            f"{n_passed} of {len(done)} claims as expected; statements and assumptions: keel verify --markdown",
        ]
    )


def _row(each: Verification) -> dict[str, Any]:
    from probes.verification import as_row, number, with_error

    row = as_row(each)
    return {
        "claim": row["id"],
        "claimed": number(row["claimed"]),
        "derived": number(row["derived"]),
        "numeric": with_error(row["numeric"], row["numeric_error"]),
        "measured": with_error(row["measured"], row["measured_error"]),
        "predicted": number(row["measured_predicted"]),
        "own_branches": number(row["own_branches"]),
        "verdict": row["verdict"] if row["passed"] else f"{row['verdict']}, NOT AS EXPECTED",
    }
