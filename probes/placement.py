r"""A table of modules and devices, held against the model before any weight is read.

``accelerate`` passes over names that it does not find, and puts what a table leaves out wherever it likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from torch import nn

from probes.errors import CheckpointError

__all__ = ["check_placement"]

_NEAREST = 3


def check_placement(placement: Mapping[str, object], model: nn.Module) -> None:
    """Refuse a placement whose names are not the model's, or that leaves some of it out.

    Args:
        placement: name of a module or parameter -> device; the empty name is the whole model.
        model: its modules count, not its numbers.

    Raises:
        CheckpointError: naming what is not there, with the nearest names that are; or what has no place.

    Example:
        >>> check_placement({"0": "cpu", "2": "cpu"}, nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
        Traceback (most recent call last):
        probes.errors.CheckpointError: the placement names '2', and Sequential has no such module; nearest: '1', '0'
    """
    parameters = [name for name, _ in model.named_parameters()]
    known = {name for name, _ in model.named_modules()} | {n for n, _ in model.named_parameters(remove_duplicate=False)}
    what = type(model).__name__
    for name in placement:
        if name not in known:
            raise CheckpointError(
                f"the placement names '{name}', and {what} has no such module; nearest: {_nearest(name, known)}"
            )
    left = [name for name in parameters if not any(_holds(module, name) for module in placement)]
    if left:
        raise CheckpointError(
            f"the placement gives no device to {len(left)} parameter(s) of {what}, first '{left[0]}'; add "
            f"'{left[0].rpartition('.')[0] or left[0]}', or '' for the whole model"
        )


def _holds(module: str, parameter: str) -> bool:
    return not module or parameter == module or parameter.startswith(f"{module}.")


def _nearest(name: str, known: Iterable[str]) -> str:
    """Names that look most alike, the likest first; never none."""
    return ", ".join(f"'{each}'" for each in get_close_matches(name, sorted(filter(None, known)), n=_NEAREST, cutoff=0.0))
