"""Which options were given, so that those that cannot apply are refused rather than ignored."""

from __future__ import annotations

from collections.abc import Collection

import typer

__all__ = ["given_options", "refuse_given"]


def given_options(ctx: typer.Context) -> dict[str, str]:
    """Parameters whose value does not come from their default: the long option, by the parameter's name."""
    given = {}
    for parameter in ctx.command.params:
        source = None if parameter.name is None else ctx.get_parameter_source(parameter.name)
        if parameter.name is not None and source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP"):
            given[parameter.name] = next((name for name in parameter.opts if name.startswith("--")), parameter.name)
    return given


def refuse_given(ctx: typer.Context, names: Collection[str], because: str) -> None:
    """Refuse options that were given and cannot apply.

    Args:
        ctx: of the command.
        names: of its parameters.
        because: what they do not go with, and what would work.

    Raises:
        typer.BadParameter: naming every one of them.
    """
    options = [option for name, option in given_options(ctx).items() if name in names]
    if options:
        raise typer.BadParameter(f"{', '.join(options)} cannot be given {because}")
