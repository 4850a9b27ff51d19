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

__all__ = ["RunEnd", "StandIns", "find_run_end"]

_NEAR_ZERO = 0.1  # of the first loss: from there a loss may get to zero
_RECENT = 20  # distances between known losses that tell the usual one
_BAD, _GOOD = 9, -1  # a tenth of the last rows, from the row on where that is clearest
_LONG = 0.05  # of the rows: a stretch without a loss after which a few losses say little


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


class StandIns:
    """Tells losses that are no losses of their steps, row by row.

    Beside a gradient that is not finite those are zero and the loss of the row before. Zero is one as well where the loss was
    far from it just before, for no step of training takes a loss there, and where it never was anything else. A row without a
    norm has that of the last row with one where norms are logged more rarely than losses.

    Example:
        >>> tell = StandIns()
        >>> [tell(loss, norm) for loss, norm in [(2.5, 1.0), (2.5, math.inf), (2.4, math.inf), (0.0, None)]]
        [False, True, False, True]
    """

    def __init__(self) -> None:
        self._before: float | None = None
        self._first = self._last = 0.0  # losses other than zero
        self._norm = 1.0
        self._rows_since_norm = self._rows_between_norms = 0

    @property
    def gradient_is_bad(self) -> bool:
        """Whether the gradient of the last row is not finite."""
        return not math.isfinite(self._norm) and self._rows_since_norm < max(self._rows_between_norms, 1)

    def __call__(self, loss: float | None, grad_norm: float | None) -> bool:
        """Whether a loss is no loss of its step.

        Args:
            loss: of the next row, as logged, nats; None where not known, which is no stand-in.
            grad_norm: of the same row; None where not known.
        """
        self._rows_since_norm += 1
        if grad_norm is not None:
            self._norm, self._rows_between_norms, self._rows_since_norm = grad_norm, self._rows_since_norm, 0
        if loss is None:
            return False
        far = not self._first or abs(self._last) > _NEAR_ZERO * abs(self._first)
        stand_in = (self.gradient_is_bad and loss in (0.0, self._before)) or (loss == 0.0 and far)
        self._before = loss
        if loss and math.isfinite(loss):
            self._first, self._last = self._first or loss, loss
        return stand_in


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """What is known of each row, shape (n,)."""

    known: NDArray[np.bool_]
    bad_loss: NDArray[np.bool_]
    bad_norm: NDArray[np.bool_]
    logged_norm: NDArray[np.bool_]


def find_run_end(
    losses: FloatArray, known: NDArray[np.bool_], norms: FloatArray, bad_norm: NDArray[np.bool_], patience: int
) -> RunEnd | None:
    """What is wrong with the last rows, or None.

    Args:
        losses: shape (n,), nats; not a number where unknown.
        known: whether a loss is known, shape (n,).
        norms: gradient norms, shape (n,); infinite where not finite, not a number where unknown.
        bad_norm: whether the gradient of a row is not finite, by its norm or by the last one logged, shape (n,).
        patience: so many rows whose gradients alone are not finite are a divergence.

    Returns:
        Rows from the first after the last sound one; or from where on a tenth of the rows, and as many as the patience, are not
        finite. A row is sound with a finite loss, or with a finite gradient norm where it has no loss, unless the other of the
        two is not finite.

    Example:
        >>> loss, norm = np.array([3.0, 2.5, *6 * [np.nan]]), np.array([1.0, 1.0, *6 * [np.inf]])
        >>> find_run_end(loss, ~np.isnan(loss), norm, np.isinf(norm), 5).index
        2
    """
    logged = ~np.isnan(norms)
    rows = _Rows(known=known, bad_loss=known & ~np.isfinite(losses), bad_norm=bad_norm, logged_norm=logged)
    never_finite = bool(not np.isfinite(norms).any() and np.isfinite(losses[known]).any())
    if never_finite and rows.bad_loss[known][-1:].any():  # such norms say nothing, and the losses do
        rows = _Rows(known=known, bad_loss=rows.bad_loss, bad_norm=np.zeros_like(bad_norm), logged_norm=logged)
    sound = ~rows.bad_norm & ~rows.bad_loss & (known | logged)
    start = _after_last(sound)
    shown = np.flatnonzero((rows.bad_norm | rows.bad_loss)[start:])
    failing = _failing_end(rows, patience)
    if failing is not None and (not len(shown) or failing.index < start):
        return failing
    if len(shown):
        return _lasting_end(rows, start, start + int(shown[0]), never_finite, patience)
    ends = (_unknown_end(known, patience), _failing_gradients(rows, patience))
    return min((end for end in ends if end is not None), key=lambda end: end.index, default=None)


def _lasting_end(rows: _Rows, start: int, index: int, never_finite: bool, patience: int) -> RunEnd:
    """Every one of the last rows is bad or not known."""
    n_norms = int((rows.bad_norm & rows.logged_norm)[start:].sum())
    beside_losses = bool(rows.known[start:].all())
    if not rows.bad_loss[start:].any() and (n_norms < patience or (never_finite and beside_losses)):
        count = "all" if never_finite else f"the last {n_norms}"
        beside = "the losses beside them are" if beside_losses else "losses beside them are not known"
        reason = f"{count} gradient norms are not finite, and {beside}: that does not tell a sound run"
        return RunEnd(earliest=start, index=index, diverged=False, what="gradient norms not finite", reason=reason)
    if rows.bad_loss[index]:
        reason = "the loss is not finite, to the end of the data"
    else:
        hidden = "tells nothing" if rows.known[index] else "is not known"
        reason = f"the gradient norm is not finite, and the loss beside it {hidden}, to the end of the data"
    return RunEnd(earliest=start, index=index, diverged=True, what="not finite", reason=reason)


def _failing_end(rows: _Rows, patience: int) -> RunEnd | None:
    """Rows that are not finite again and again, to the end, with others between."""
    told = np.flatnonzero(rows.known | rows.logged_norm)
    bad = (rows.bad_loss | (rows.bad_norm & ~rows.known))[told]
    scores = np.cumsum(np.where(bad, _BAD, _GOOD)[::-1])[::-1]
    if not bad[-_BAD:].any() or scores.max() <= 0:
        return None
    first = int(np.argmax(scores))
    n_bad = int(bad[first:].sum())
    if n_bad < patience:
        return None
    start = int(told[first])
    reason = f"{n_bad} of {len(told) - first} rows are not finite, up to the end of the data"
    return RunEnd(earliest=start, index=start, diverged=True, what="not finite", reason=reason)


def _failing_gradients(rows: _Rows, patience: int) -> RunEnd | None:
    """Gradient norms that are not finite again and again, to the end, beside losses that are."""
    bad = rows.bad_norm
    scores = np.cumsum(np.where(bad, _BAD, _GOOD)[::-1])[::-1]
    start = int(np.argmax(scores))
    n_bad = int(bad[start:].sum())
    if not bad[-_BAD:].any() or n_bad < patience:
        return None
    reason = f"{n_bad} of {len(bad) - start} gradient norms are not finite: that does not tell a sound run"
    return RunEnd(earliest=start, index=start, diverged=False, what="gradient norms not finite", reason=reason)


def _unknown_end(known: NDArray[np.bool_], patience: int) -> RunEnd | None:
    """Losses that are missing at the end, more of them than usual between two known ones of late.

    A few known ones after a long stretch without do not make the end known.
    """
    told = np.flatnonzero(known)
    if len(told) > patience:
        gaps = np.diff(np.append(told, len(known)))
        recent = gaps[-patience:]
        longest = int(np.argmax(recent))
        if recent[longest] > max(_LONG * len(known), 3 * float(np.median(gaps))):
            told = told[: len(told) - len(recent) + longest + 1]
    start = int(told[-1]) + 1 if len(told) else 0
    missing = int((~known[start:]).sum())
    gaps = np.diff(told)[-_RECENT:]
    if missing < (float(np.median(gaps)) if len(gaps) else 1.0):
        return None
    reason = f"the last {missing} losses are not known or a zero in their place, as loggers write for not a number"
    return RunEnd(earliest=start, index=start, diverged=False, what="losses not known", reason=reason)


def _after_last(condition: NDArray[np.bool_]) -> int:
    """Index behind the last row of which the condition holds."""
    held = np.flatnonzero(condition)
    return int(held[-1]) + 1 if len(held) else 0
