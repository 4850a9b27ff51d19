r"""``keel schemes``: the residual schemes, their equations, parameters and per-sub-layer specs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from keel_theory.spec import ParameterValue, ResidualSpec, Scheme

__all__ = ["parse_settings", "register"]

_MAX_SUBLAYERS = 100_000
_ALWAYS_SHOWN = ("norm_in", "norm_branch", "norm_out", "shortcut_scale")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("schemes")(schemes)


def schemes(
    name: Annotated[str | None, typer.Argument(help="A scheme; without one, all are listed.", show_default=False)] = None,
    sublayers: Annotated[
        int, typer.Option(help="Depth: attention and FFN counted separately (two per block).", max=_MAX_SUBLAYERS)
    ] = 12,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Another value of a parameter; may be repeated.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write to this file instead of stdout.", show_default=False)
    ] = None,
    draw: Annotated[
        Path | None,
        typer.Option(help="Draw the blocks into this .png, .svg or .pdf file, and print nothing.", show_default=False),
    ] = None,
) -> None:
    """List the residual schemes, or show one: equation, source, parameters and the update of every sub-layer.

    \b
    Examples:
      keel schemes
      keel schemes keel --sublayers 48
      keel schemes mix_ln --set ratio=0.5 --json -o mix_ln.json
      keel schemes hybrid_norm --draw hybrid_norm.svg
    """  # noqa: D301 - a real \b keeps the lines of the example apart
    from keel_theory.schemes import SCHEMES, get_scheme
    from probes.cli import _tables
    from probes.cli._io import emit

    if name is None:
        if settings:
            raise typer.BadParameter("--set needs a scheme: keel schemes NAME --set name=value")
        if draw is not None:
            raise typer.BadParameter("--draw needs a scheme: keel schemes NAME --draw NAME.svg")
        rows = [_summary(scheme) for scheme in SCHEMES.values()]
        emit(_tables.as_json(rows) if json else _listing(rows, wide=_is_terminal(output)), output)
        return
    scheme = get_scheme(name).with_parameters(**parse_settings(settings or []))
    if draw is not None:
        _draw(scheme, sublayers, draw)
        return
    description = _describe(scheme, sublayers)
    emit(_tables.as_json(description) if json else _page(description, wide=_is_terminal(output)), output)


def parse_settings(settings: list[str]) -> dict[str, ParameterValue]:
    """Parameter values from ``name=value`` texts.

    Raises:
        SchemeError: if a text has no name or no value, or a name comes twice.

    Example:
        >>> parse_settings(["ratio=0.5"])
        {'ratio': '0.5'}
    """
    from keel_theory.spec import SchemeError

    values: dict[str, ParameterValue] = {}
    for setting in settings:
        name, separator, value = (part.strip() for part in setting.partition("="))
        if not (name and separator and value):
            raise SchemeError(f"--set '{setting}' is not of the form name=value; for example --set alpha=2*sqrt(L)")
        if name in values:
            raise SchemeError(f"--set gives '{name}' twice: '{values[name]}' and '{value}'")
        values[name] = value
    return values


def _draw(scheme: Scheme, n_sublayers: int, output: Path) -> None:
    from probes.errors import OutputError

    if output.suffix not in (".png", ".svg", ".pdf"):
        raise OutputError(f"cannot draw '{output}': the name must end in .png, .svg or .pdf")
    from figures._style import save_figure
    from figures.fig2_block_diagram import draw, frame_of

    figure = draw(frame_of(scheme, n_sublayers))
    try:
        save_figure(figure, output)
    except OSError as error:
        raise OutputError(f"cannot write '{output}': {error.strerror or error}; name a file in an existing folder") from error


def _is_terminal(output: Path | None) -> bool:
    return output is None and sys.stdout.isatty()


def _summary(scheme: Scheme) -> dict[str, str]:
    return {"name": scheme.name, "label": scheme.label, "equation": scheme.equation, "source": scheme.source}


def _describe(scheme: Scheme, n_sublayers: int) -> dict[str, Any]:
    from keel_theory.spec import alternating_kinds

    kinds = alternating_kinds(n_sublayers)
    rows = [
        {"sublayer": i, "block": i // 2, "kind": kind.value, **_fields(spec)}
        for i, (kind, spec) in enumerate(zip(kinds, scheme.specs(n_sublayers), strict=True))
    ]
    parameters = [
        {"name": name, "value": value, "meaning": scheme.parameter_docs[name]} for name, value in scheme.parameters.items()
    ]
    return {
        **_summary(scheme),
        "latex": scheme.latex,
        "norm": scheme.norm.value,
        "n_sublayers": n_sublayers,
        "parameters": parameters,
        "sublayers": rows,
    }


def _fields(spec: ResidualSpec) -> dict[str, Any]:
    from dataclasses import asdict
    from enum import Enum

    return {name: value.value if isinstance(value, Enum) else value for name, value in asdict(spec).items()}


def _listing(rows: list[dict[str, str]], *, wide: bool) -> str:
    from probes.cli import _tables

    return _tables.render(["name", "label", "equation", "source"], rows, wide=wide)


def _page(description: dict[str, Any], *, wide: bool) -> str:
    from probes.cli import _tables

    heading = [
        f"{description['label']} ({description['name']})",
        f"  equation    {description['equation']}",
        f"  source      {description['source']}",
        f"  LN          {_NORM_WORDS[description['norm']]}",
    ]
    parameters = [f"  {p['name']} = {p['value']}: {p['meaning']}" for p in description["parameters"]] or ["  none"]
    rows = description["sublayers"]
    table = _tables.render(["sublayer", "block", "kind", *_shown_fields(rows)], rows, wide=wide)
    n_sublayers = _tables.counted(description["n_sublayers"], "sub-layer")
    depth = f"{n_sublayers}, numbered from 0; fields not shown have their default everywhere:"
    return "\n".join([*heading, "", "Parameters", *parameters, "", depth, table])


_NORM_WORDS = {"rms": "RMSNorm", "layer": "LayerNorm"}


def _shown_fields(rows: list[dict[str, Any]]) -> list[str]:
    """The fields that some sub-layer sets, after those that every scheme is read by."""
    from keel_theory.spec import ResidualSpec

    defaults = _fields(ResidualSpec())
    changed = [name for name in defaults if any(row[name] != defaults[name] for row in rows)]
    return [*_ALWAYS_SHOWN, *(name for name in changed if name not in _ALWAYS_SHOWN)]
