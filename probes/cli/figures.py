r"""``keel figures``: the gallery, drawn from kept frames and computed where one is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from figures.pipeline import Drawn

__all__ = ["register"]

_RUNS = Path("runs", "figures")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("figures")(figures)


def figures(
    names: Annotated[
        list[str] | None, typer.Argument(help="Figures; without one, all of them.", metavar="[NAME]...", show_default=False)
    ] = None,
    preset: Annotated[str, typer.Option(help="How much is computed: smoke (seconds), cpu, gpu.")] = "cpu",
    runs: Annotated[Path, typer.Option(help="Folder of the runs that a later call resumes.")] = _RUNS,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Folder of the pictures and, in its data/, of computed frames. [default: figures/gallery and figures/data"
            " for cpu, RUNS/PRESET for the others]",
            show_default=False,
        ),
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute although a frame of these settings is kept, and replace it.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the figures and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Draw the paper's figures and this toolkit's own, as PNG and SVG.

    Frames of earlier calls are read as long as their settings are the present ones; what is missing is computed. Trainings
    that are finished in RUNS are not run again, also after --recompute: name another folder to repeat them.

    \b
    Examples:
      keel figures --list
      keel figures
      keel figures gain_against_depth --recompute
      keel figures --preset smoke -o out
    """  # noqa: D301 - a real \b keeps the lines of the example apart
    from figures.pipeline import read_preset
    from figures.registry import FIGURES, get_figure
    from probes.cli import _tables
    from probes.cli._io import emit

    entries = [get_figure(name) for name in dict.fromkeys(names or FIGURES)]
    if list_:
        rows = [{"name": entry.name, "paper": entry.place or "", "title": entry.title} for entry in entries]
        emit(
            _tables.as_json(rows) if json else _tables.render(["name", "paper", "title"], rows, wide=sys.stdout.isatty()), None
        )
        return
    chosen = read_preset(preset).value
    done, failed = _draw([entry.name for entry in entries], chosen, runs, output, recompute=recompute)
    if json:
        emit(_tables.as_json([drawn.to_dict() for drawn in done]), None)
    elif done:
        emit("\n".join(str(path) for drawn in done for path in drawn.paths), None)
    if failed:
        raise typer.Exit(2)


def _draw(names: list[str], preset: str, runs: Path, output: Path | None, *, recompute: bool) -> tuple[list[Drawn], list[str]]:
    """Every figure that can be drawn; one that cannot is told of and does not stop the others."""
    from figures.pipeline import make_figure
    from probes.errors import KeelError

    done: list[Drawn] = []
    failed: list[str] = []
    for name in names:
        try:
            done.append(make_figure(name, preset, runs=runs, output=output, recompute=recompute, tell=_tell))
        except KeelError as error:
            _tell(f"keel: {name}: {error}")
            failed.append(name)
    return done, failed


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
