"""What the last rows of a run say: training that broke is often hidden there.

Loggers write a loss that is not a number as an empty cell, leave it out, or put another number in its place: zero, or the loss
of the row before (the ``nan`` filter of ``transformers.Trainer``). Only the gradient norm beside it tells. Evidence that lasts
to the last row therefore decides, and a run whose last losses are not known is never healthy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from probes.onset import FloatArray

__all__ = ["RunEnd", "find_run_end", "is_stand_in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The last rows do not show a sound run.

    Attributes:
        earliest: index of the first row of which nothing good is known.
        index: of the first row that shows it.
        diverged: whether the run is known to be broken; otherwise its end is not known.
        what: is not finite or not known, in a few words.
        reason: in words, without the step.
    """

    earliest: int
    index: int
    diverged: bool
    what: str
    reason: str


def is_stand_in(loss: float, before: float | None, grad_norm: float | None) -> bool:
    """Whether a loss is no loss of its step: zero or that of the row before, beside a gradient that is not finite.

    Args:
        loss: as logged, nats.
        before: of the row before, nats; None for the first row.
        grad_norm: of the same row; None where not known.

    Example:
        >>> is_stand_in(0.0, 2.5, math.nan), is_stand_in(2.5, 2.5, math.inf), is_stand_in(2.4, 2.5, math.inf)
        (True, True, False)
    """
    return grad_norm is not None and not math.isfinite(grad_norm) and loss in (0.0, before)


def find_run_end(
    losses: FloatArray, known: NDArray[np.bool_], norms: FloatArray, norm_known: NDArray[np.bool_], patience: int
) -> RunEnd | None:
    """What is wrong with the last rows, or None.

    Args:
        losses: shape (n,), nats; not a number where unknown.
        known: whether a loss is known, shape (n,).
        norms: gradient norms, shape (n,).
        norm_known: whether a norm is known, shape (n,).
        patience: rows with finite losses whose gradients are not finite are a divergence from so many on.

    Returns:
        Rows from the first after the last sound one. A row is sound with a finite loss, or with a finite gradient norm where it
        has no loss, unless the other of the two is not finite.

    Example:
        >>> loss, norm = np.array([3.0, 2.5, 0.0, 0.0]), np.array([1.0, 1.0, np.nan, np.nan])
        >>> find_run_end(loss, np.array([True, True, False, False]), norm, np.ones(4, bool), 5).index
        2
    """
    bad_norm = norm_known & ~np.isfinite(norms)
    bad_loss = known & ~np.isfinite(losses)
    sound = ~bad_norm & ~bad_loss & (known | norm_known)
    start = _after_last(sound)
    shown = np.flatnonzero((bad_norm | bad_loss)[start:])
    if not len(shown):
        return _unknown_end(known)
    index = start + int(shown[0])
    only_norms = bool(known[start:].all() and not bad_loss[start:].any())
    if only_norms and (len(shown) < patience or not np.isfinite(norms[norm_known]).any()):
        count = f"the last {len(shown)}" if len(shown) < patience else "all"
        reason = f"{count} gradient norms are not finite, and the losses beside them are: that does not tell a sound run"
        return RunEnd(earliest=start, index=index, diverged=False, what="gradient norms not finite", reason=reason)
    what = "the loss is" if bad_loss[index] else "the gradient norm is"
    value = losses[index] if bad_loss[index] else norms[index]
    hidden = "" if bad_loss[index] else ", and the loss beside it " + ("is not known" if not known[index] else "tells nothing")
    return RunEnd(
        earliest=start, index=index, diverged=True, what="not finite", reason=f"{what} {value}{hidden}, to the end of the data"
    )


def _unknown_end(known: NDArray[np.bool_]) -> RunEnd | None:
    """Losses that are missing at the end, more of them than usual between two known ones."""
    start = _after_last(known)
    missing = len(known) - start
    gaps = np.diff(np.flatnonzero(known))
    if missing < (float(np.median(gaps)) if len(gaps) else 1.0):
        return None
    reason = f"the last {missing} losses are not known: many loggers leave out a loss that is not a number"
    return RunEnd(earliest=start, index=start, diverged=False, what="losses not known", reason=reason)


def _after_last(condition: NDArray[np.bool_]) -> int:
    """Index behind the last row of which the condition holds."""
    held = np.flatnonzero(condition)
    return int(held[-1]) + 1 if len(held) else 0
