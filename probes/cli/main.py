"""Entry point of the ``keel`` command: assembles the command groups and turns user errors into exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

import typer

from probes.cli import (
    alignment,
    figures,
    grad_norm,
    layer_removal,
    max_lr,
    paper_check,
    repro,
    schemes,
    sweep,
    theory,
    train,
    verify,
)
from probes.cli._io import guarded_stdout
from probes.errors import Interrupted, OutputError

__all__ = ["app", "main"]

app = typer.Typer(
    name="keel",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
alignment.register(app)
figures.register(app)
grad_norm.register(app)
layer_removal.register(app)
max_lr.register(app)
paper_check.register(app)
repro.register(app)
schemes.register(app)
sweep.register(app)
theory.register(app)
train.register(app)
verify.register(app)


@app.callback()  # without one, an application of a single command would drop that command's name
def keel() -> None:
    """Why gradients live or die with depth in Transformers: theory, and measurements on any checkpoint.

    \b
    Example:
      keel grad-norm smollm2 -o out
      keel layer-removal smollm2 -o out
      keel schemes keel --sublayers 48
    """  # noqa: D301 - a real \b keeps the lines of the example apart


def main() -> None:
    """Run the command; a user's mistake is one message on stderr and exit code 2, an interruption 130; never a traceback."""
    try:
        with guarded_stdout():
            _refuse_empty_paths(sys.argv[1:])
            app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Interrupted as error:
        print(f"keel: {error}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as error:
        if not _is_user_error(error):
            raise
        print(f"keel: {error}", file=sys.stderr)
        sys.exit(2)


INTERRUPTED = 128 + 2
"""Exit code after Ctrl-C, as of a process that SIGINT ends."""
_PLACES = ("-o", "--output", "--runs")


def _refuse_empty_paths(arguments: Sequence[str]) -> None:
    """An empty text, as of a shell variable that is not set, would stand for the working folder.

    Raises:
        OutputError: naming the option.
    """
    for option, value in pairwise([*arguments, "-"]):
        for place in _PLACES:
            if (option == place and not value) or option == f"{place}=":
                raise OutputError(f"{place} is given an empty path; name a place, '.' for the working folder")


def _is_user_error(error: Exception) -> bool:
    from keel_theory.depth_expression import DepthExpressionError
    from keel_theory.errors import TheoryError
    from keel_theory.spec import SchemeError
    from probes.errors import KeelError

    return isinstance(error, (KeelError, SchemeError, DepthExpressionError, TheoryError))
