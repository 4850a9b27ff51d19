r"""``keel max-lr``: the largest learning rate that a run tolerates."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from probes.divergence import Landmarks
    from probes.judgement import Judgement
    from probes.loss_logs import RunLog

__all__ = ["judge_log", "judgement_page", "register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("max-lr")(max_lr)


def max_lr(
    from_log: Annotated[
        Path | None,
        typer.Option(
            help="A finished run: CSV, JSON lines, trainer_state.json or TensorBoard events, with losses and learning rates.",
            show_default=False,
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="Log of a healthy run; without it degradation cannot be judged.", show_default=False),
    ] = None,
    unigram_entropy: Annotated[
        float | None,
        typer.Option(help="Unigram entropy of the training text, nats; a plateau there is stagnation.", show_default=False),
    ] = None,
    ramp_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the whole ramp, where the log ends before it.", show_default=False)
    ] = None,
    to_end: Annotated[
        bool, typer.Option("--to-end", help="Go on after the verdict is certain, for the Max LR by every criterion.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write to this file instead of stdout.", show_default=False)
    ] = None,
) -> None:
    """Say whether, when and how a run of rising learning rate diverged, and the largest rate that it tolerated.

    \b
    Examples:
      keel max-lr --from-log loss.csv
      keel max-lr --from-log loss.csv --reference healthy.csv --unigram-entropy 3.2
    """  # noqa: D301 - a real \b keeps the lines of the example apart
    from probes.cli import _tables
    from probes.cli._io import emit

    if from_log is None:
        raise typer.BadParameter("name a finished run: keel max-lr --from-log loss.csv")
    judgement, log = judge_log(
        from_log, reference=reference, unigram_entropy=unigram_entropy, ramp_steps=ramp_steps, to_end=to_end
    )
    if json:
        emit(_tables.as_json({"source": log.source, **judgement.to_dict(), "notes": list(log.notes)}), output)
    else:
        emit(judgement_page(judgement, log.notes, wide=output is None and sys.stdout.isatty()), output)


def judge_log(
    path: Path,
    *,
    reference: Path | None = None,
    unigram_entropy: float | None = None,
    ramp_steps: int | None = None,
    to_end: bool = False,
) -> tuple[Judgement, RunLog]:
    """Judge a finished log.

    Args:
        path: the log.
        reference: log of a healthy run, which needs no learning rates.
        unigram_entropy: of the training text, nats.
        ramp_steps: steps of the whole ramp; the log's last step on it where None.
        to_end: go on after the verdict is certain.

    Returns:
        The judgement, and the part of the log that was judged.
    """
    from probes.divergence import judge_run
    from probes.loss_logs import read_loss_log

    log = read_loss_log(path).ramp()
    assert log.learning_rates is not None  # a log without is refused by the reader
    judgement = judge_run(
        log.steps.tolist(),
        log.learning_rates.tolist(),
        log.losses.tolist(),
        log.grad_norms,
        ramp_steps=ramp_steps,
        landmarks=_landmarks(reference, unigram_entropy),
        to_end=to_end,
    )
    return judgement, log


def _landmarks(reference: Path | None, unigram_entropy: float | None) -> Landmarks:
    import numpy as np

    from probes.divergence import Landmarks
    from probes.errors import KeelError
    from probes.loss_logs import read_loss_log

    try:
        if reference is None:
            return Landmarks(unigram_entropy=unigram_entropy)
        log = read_loss_log(reference, need_rates=False)
        return Landmarks(
            unigram_entropy=unigram_entropy, reference_steps=log.steps.astype(np.float64), reference_losses=log.losses
        )
    except ValueError as error:
        raise KeelError(f"landmarks: {error}") from error


def judgement_page(judgement: Judgement, notes: tuple[str, ...] = (), *, wide: bool) -> str:
    """Verdict, reasons and the Max LR by every criterion, as text."""
    from probes.cli import _tables

    best = "none" if judgement.best_step is None else f"{judgement.best_loss:.4g} nats at step {judgement.best_step}"
    seen = "" if judgement.detected_step is None else f"; recognised at step {judgement.detected_step}"
    lines = [
        judgement.verdict(),
        *(f"  {reason}" for reason in judgement.reasons),
        *(f"  {note}" for note in notes),
        f"  best loss {best}; judged up to step {judgement.last_step} of {judgement.ramp_steps}{seen}",
        "",
        _tables.render(["criterion", "status", "onset_step", "max_lr"], _criterion_rows(judgement), wide=wide),
    ]
    return "\n".join(lines)


def _criterion_rows(judgement: Judgement) -> list[dict[str, Any]]:
    return [
        {
            "criterion": result.criterion.value.replace("_", " "),
            "status": result.status.value.replace("_", " "),
            "onset_step": "" if result.onset_step is None else result.onset_step,
            "max_lr": f"{'>= ' if result.lower_bound else ''}{result.max_lr:.4g}",
        }
        for result in judgement.criteria
    ]
