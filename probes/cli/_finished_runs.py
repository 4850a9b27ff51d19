"""``keel max-lr --from-log``: from options to a judged log."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probes.divergence import JudgeThresholds, Landmarks
    from probes.judgement import Judgement
    from probes.logs import RunLog

__all__ = ["LogOptions", "judge_log", "landmarks_of"]

_FAR = (0.8, 1.25)  # of ln V: where the first loss of an untrained model lies
_BITS = (1.3, 1.6)  # around 1 / ln 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """What the command line says of a log.

    Attributes:
        path: of the log, ``-`` for stdin.
        columns: texts ``QUANTITY=NAME``.
        runs: names of the run, where the log holds several.
        ramp: ``START:PEAK:STEPS``, where it holds no rates.
        ramp_steps: steps of the whole ramp.
        loss_unit: of its losses and those of the reference.
        texts: that the run was trained on.
        tokenizer: of the text.
    """

    path: Path
    columns: list[str]
    runs: list[str]
    ramp: str | None = None
    ramp_steps: int | None = None
    loss_unit: str = "nats"
    texts: list[str] | None = None
    tokenizer: str = "bytes"

    def read(self) -> RunLog:
        """The log, up to the end of its ramp.

        Raises:
            LossLogError: if it cannot be read as one run on a ramp.
        """
        from probes.logs import Ramp, read_loss_log

        ramp = None if self.ramp is None else Ramp.parse(self.ramp)
        log = read_loss_log(self.path, columns=self._columns(), runs=self.runs, ramp=ramp, loss_unit=self.loss_unit)
        return log.ramp()

    def read_reference(self, path: Path) -> RunLog:
        """A reference run, by names that are known, or else by the names that are given for the log.

        Raises:
            LossLogError: if it cannot be read.
        """
        from probes.logs import LossLogError, read_loss_log

        if str(path) == str(self.path) == "-":
            raise LossLogError("the log and its reference cannot both be read from stdin; name a file for one of them")
        try:
            return read_loss_log(path, need_rates=False, runs=None, loss_unit=self.loss_unit)
        except LossLogError:
            if not self.columns:
                raise
        return read_loss_log(path, need_rates=False, columns=self._columns(), runs=None, loss_unit=self.loss_unit)

    def of_text(self) -> Landmarks | None:
        """Entropy and ln V of the text that is named; None where none is."""
        if self.texts is None:
            return None
        from probes.cli._training import corpus_of
        from probes.max_learning_rate import landmarks_for

        return landmarks_for(corpus_of(self.texts, self.tokenizer, "text", None)[1])

    def _columns(self) -> dict[str, str]:
        from probes.logs import LossLogError

        pairs = [text.partition("=") for text in self.columns]
        wrong = next((text for text, (_, equals, name) in zip(self.columns, pairs, strict=True) if not (equals and name)), None)
        if wrong is not None:
            raise LossLogError(f"--column is QUANTITY=NAME such as loss=train/ce, got '{wrong}'")
        quantities = [quantity.strip() for quantity, _, _ in pairs]
        twice = next((quantity for quantity in quantities if quantities.count(quantity) > 1), None)
        if twice is not None:
            raise LossLogError(f"--column {twice}=NAME is given more than once; give one column for each quantity")
        return {quantity.strip(): name for quantity, _, name in pairs}


def landmarks_of(options: LogOptions | None, reference: Path | None, unigram_entropy: float | None) -> Landmarks:
    """What is given about a healthy run, its reference read.

    Args:
        options: of the log that is judged; None for a live run.
        reference: its folder or log.
        unigram_entropy: nats.

    Raises:
        KeelError: if they are no landmarks.
    """
    import numpy as np

    from probes.control_variates import without_batches
    from probes.divergence import Landmarks
    from probes.errors import KeelError

    if unigram_entropy is not None and not 0 < unigram_entropy < math.inf:
        raise KeelError(f"--unigram-entropy is a finite number of nats above 0, got {unigram_entropy:g}")
    try:
        if reference is None:
            return Landmarks(unigram_entropy=unigram_entropy)
        log = (options or LogOptions(path=Path(), columns=[], runs=[])).read_reference(reference)
        losses = without_batches(log.losses, log.batch_losses)
        return Landmarks(
            unigram_entropy=unigram_entropy,
            reference_steps=log.steps[log.known].astype(np.float64),
            reference_losses=losses[log.known],
        )
    except ValueError as error:
        raise KeelError(f"landmarks: {error}") from error


def judge_log(
    options: LogOptions,
    *,
    known: Landmarks | None = None,
    to_end: bool = False,
    thresholds: JudgeThresholds | None = None,
    reference: Path | None = None,
) -> tuple[Judgement, RunLog]:
    """Judge a finished log.

    Of a run of this toolkit the length of the ramp and what is known of its text are taken from its folder, where they are not
    given; a note says so.

    Args:
        options: of the log.
        known: what is known about a healthy run.
        to_end: go on after the verdict is certain.
        thresholds: of the judge.
        reference: where the landmarks' reference comes from, for messages.

    Returns:
        The judgement, and the part of the log that was judged.

    Raises:
        KeelError: if the log cannot be read or goes on beyond the ramp, or the reference diverges itself.
    """
    from probes.cli.max_lr import check_reference
    from probes.divergence import Landmarks, judge_run

    known = _with_text(known or Landmarks(), options.of_text())
    log, ramp_steps, known = _with_own(options.read(), options.ramp_steps, known)
    log, known = _beside_first_loss(log, known, options.loss_unit)
    assert log.learning_rates is not None  # a log without is refused by the reader
    first_step = None if ramp_steps is None else log.first_step_of(ramp_steps)
    check_reference(reference, known, log.n_steps if ramp_steps is None else ramp_steps, thresholds)
    judgement = judge_run(
        log.steps.tolist(),
        log.learning_rates.tolist(),
        [loss if is_known else None for loss, is_known in zip(log.losses.tolist(), log.known, strict=True)],
        log.grad_norms,
        batch_losses=log.batch_losses,
        ramp_steps=ramp_steps,
        first_step=first_step,
        landmarks=known,
        thresholds=thresholds,
        to_end=to_end,
    )
    return judgement, log


def _with_text(known: Landmarks, text: Landmarks | None) -> Landmarks:
    if text is None:
        return known
    entropy = text.unigram_entropy if known.unigram_entropy is None else known.unigram_entropy
    return replace(known, unigram_entropy=entropy, initial_loss=text.initial_loss)


def _with_own(log: RunLog, ramp_steps: int | None, known: Landmarks) -> tuple[RunLog, int | None, Landmarks]:
    """What was given, and where it was not, what the log or the run's own folder says; with a note of what that is."""
    taken = []
    if ramp_steps is None and log.ramp_steps is not None:
        ramp_steps = log.ramp_steps
        taken.append(f"a ramp of {ramp_steps} steps")
    if known.unigram_entropy is None and log.unigram_entropy is not None:
        known = replace(known, unigram_entropy=log.unigram_entropy)
        taken.append(f"the unigram entropy {log.unigram_entropy:.4f}")
    if known.initial_loss is None and log.initial_loss is not None:
        known = replace(known, initial_loss=log.initial_loss)
        taken.append(f"the loss {log.initial_loss:.4f} of an untrained model")
    if taken and log.of_own_folder:
        log = replace(log, notes=(*log.notes, f"taken from the run's folder: {', '.join(taken)}"))
    return log, ramp_steps, known


def _beside_first_loss(log: RunLog, known: Landmarks, unit: str) -> tuple[RunLog, Landmarks]:
    """A note where the first loss is far from ln V; where it is far below, ln V is no landmark of the run."""
    losses = [loss for loss in log.losses.tolist() if math.isfinite(loss)]
    if known.initial_loss is None or not losses or _FAR[0] <= losses[0] / known.initial_loss <= _FAR[1]:
        return log, known
    ratio = losses[0] / known.initial_loss
    note = f"the first loss, {losses[0]:.4g} nats, is far from ln V = {known.initial_loss:.4g}, that of an untrained model"
    if unit == "nats" and _BITS[0] < ratio < _BITS[1]:
        note += ": is it in bits (--loss-unit bits)?"
    elif unit == "bits" and _BITS[0] < 1 / ratio < _BITS[1]:
        note += ": is it in nats (no --loss-unit bits)?"
    else:
        note += ": a run that began trained, another vocabulary or another unit"
    if ratio < 1:
        known = replace(known, initial_loss=None)
        note += "; ln V is not used"
    return replace(log, notes=(*log.notes, note)), known
