"""``keel max-lr``: the largest learning rate that a scheme tolerates, by the paper's stress test, live or from a log."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from probes.divergence import JudgeThresholds, Landmarks
    from probes.judgement import Judgement

__all__ = ["check_reference", "judgement_page", "register"]

_OF_JUDGING = frozenset({"reference", "unigram_entropy", "text", "tokenizer", "to_end", "threshold", "output", "as_json"})
_OF_LOGS = frozenset({"from_log", "run", "column", "ramp", "ramp_steps", "loss_unit"})


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    from probes.judgement import DEFINITION

    app.command("max-lr", epilog=f"What is judged. {DEFINITION}")(max_lr)


def max_lr(
    ctx: typer.Context,
    scheme: Annotated[str | None, typer.Option(help="Residual scheme; keel schemes lists them.", show_default=False)] = None,
    from_log: Annotated[
        Path | None,
        typer.Option(
            help="Judge a finished run instead: a table (CSV, JSON, JSON lines, Parquet), what nanoGPT, Megatron-LM, "
            "torchtitan or a Trainer printed, a file or folder of TensorBoard, Lightning, DeepSpeed or a Trainer, - for stdin. "
            "Columns unigram_loss and bigram_loss, where it has both, take the noise of the batches off.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Of --from-log: which run, where the log holds several (without it they are listed).",
            show_default=False,
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="QUANTITY=NAME",
            help="Of --from-log: the column that holds loss, lr, step, grad_norm or run, where its name is not known.",
            show_default=False,
        ),
    ] = None,
    ramp: Annotated[
        str | None,
        typer.Option(
            metavar="START:PEAK:STEPS",
            help="Of --from-log, where the log has no learning rates: START + (PEAK - START) k / STEPS in the k-th optimizer "
            "step. Logs that count from 0 have k = 1 at their step 0.",
            show_default=False,
        ),
    ] = None,
    loss_unit: Annotated[
        str, typer.Option(help="Of --from-log and of its --reference: losses are in nats or bits per token.")
    ] = "nats",
    preset: Annotated[
        str, typer.Option(help="cpu: 64 sub-layers of width 64; gpu: 64 and 512 sub-layers of width 512.")
    ] = "cpu",
    blocks: Annotated[
        int | None, typer.Option(help="Transformer blocks, two sub-layers each. (default: the preset's)", show_default=False)
    ] = None,
    width: Annotated[int | None, typer.Option(help="Of the residual stream.", show_default=False)] = None,
    seeds: Annotated[int, typer.Option(help="Runs, each with its own weights and data.")] = 1,
    first_seed: Annotated[int, typer.Option(help="Seed of the first run.")] = 0,
    peak: Annotated[float, typer.Option(help="Learning rate at the end of the ramp.")] = 5e-2,
    steps: Annotated[int, typer.Option(help="Optimizer steps of the ramp.")] = 600,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per optimizer step.", show_default=False)] = None,
    accumulation: Annotated[int, typer.Option(help="Micro-batches that a step is cut into.")] = 1,
    seq_len: Annotated[int | None, typer.Option(help="Tokens that a sequence predicts.", show_default=False)] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="File, folder, saved data set or hub:NAME; may be repeated. With --from-log the text of that run, for its "
            "entropy and vocabulary. (default: Python's standard library; none for a log)",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="bytes, bpe:N (trained on the text) or a tokenizer.json.")] = "bytes",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Another value of a scheme's parameter.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, or bfloat16 branches beside a float32 stream.", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, mps. (default: the preset's)", show_default=False)
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads. (default: torch's choice)", show_default=False)] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="A healthy run on the same ramp, its folder or log; degradation is judged beside it.",
            show_default=False,
        ),
    ] = None,
    unigram_entropy: Annotated[
        float | None,
        typer.Option(
            help="Of the text, nats; a plateau there is stagnation. (default: of the text trained on, also by --from-log where "
            "the log is in a run's folder)",
            show_default=False,
        ),
    ] = None,
    ramp_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of --from-log: steps of the ramp, where the log ends before it. (default: of the run whose folder the log "
            "is in, or all steps of the log)",
            show_default=False,
        ),
    ] = None,
    to_end: Annotated[bool, typer.Option(help="Go on to the end of the ramp, even once the divergence is certain.")] = False,
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Another threshold of the judge, such as rise=0.05; may be repeated. An unknown NAME lists them all, --json "
            "prints those in effect. They are the same for every scheme.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Folder of the runs, unfinished ones are gone on with; with --from-log a file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON on stdout.")] = False,
) -> None:
    """Raise the learning rate until training breaks, and say when, how, and what was the last rate before.

    \b
    Examples:
      keel max-lr --scheme post_ln --preset cpu
      keel max-lr --scheme keel --seeds 3 --peak 0.25 --steps 1000 -o runs/keel
      keel max-lr --from-log loss.csv --reference healthy.csv
      keel max-lr --from-log runs.csv --run seed-1 --column loss=train/ce
      keel max-lr --from-log gpt.txt --ramp 0:0.05:600 --text corpus.txt
    """  # noqa: D301 - a real \b keeps the lines of the example apart
    from dataclasses import asdict

    import numpy as np

    from probes.cli import _tables
    from probes.cli._finished_runs import LogOptions, judge_log, landmarks_of
    from probes.cli._given import refuse_given
    from probes.cli._io import emit

    if (from_log is None) == (scheme is None):
        raise typer.BadParameter(
            "name a finished run (--from-log loss.csv) or a scheme to train (--scheme post_ln), one of them"
        )
    options = None
    if from_log is None:
        refuse_given(ctx, _OF_LOGS, "beside --scheme: it belongs to --from-log; a ramp that is trained has --steps")
    else:
        _check_log_options(ctx, text=text, ramp=ramp)
        options = LogOptions(
            path=from_log,
            columns=column or [],
            runs=run or [],
            ramp=ramp,
            ramp_steps=ramp_steps,
            loss_unit=loss_unit,
            texts=text,
            tokenizer=tokenizer,
        )
    thresholds = _thresholds(threshold or [])
    known = landmarks_of(options, reference, unigram_entropy)
    if options is not None:
        with np.errstate(over="ignore", invalid="ignore"):  # losses near the largest number
            judgement, log = judge_log(options, known=known, to_end=to_end, thresholds=thresholds, reference=reference)
        whole = {
            "source": log.source,
            **judgement.to_dict(),
            "notes": list(log.notes),
            "thresholds": asdict(thresholds),
        }
        wide = output is None and sys.stdout.isatty()
        emit(_tables.as_json(whole) if as_json else judgement_page(judgement, log.notes, wide=wide), output)
        return
    from probes.cli._ramps import Plan, page

    assert scheme is not None  # one of the two is named
    plan = Plan(
        scheme=scheme,
        preset=preset,
        blocks=blocks,
        width=width,
        n_seeds=seeds,
        first_seed=first_seed,
        peak=peak,
        steps=steps,
        batch_size=batch_size,
        accumulation=accumulation,
        seq_len=seq_len,
        texts=text,
        tokenizer=tokenizer,
        settings=settings or [],
        dtype=dtype,
        device=device,
        threads=threads,
        to_end=to_end,
        output=output,
        reference=reference,
    )
    tests = plan.run(known, thresholds)
    pages = (page(test, wide=sys.stdout.isatty()) for test in tests)
    whole_tests = [{**test.to_dict(), "thresholds": asdict(thresholds)} for test in tests]
    print(_tables.as_json(whole_tests) if as_json else "\n\n".join(pages))
    if output is not None:
        print(f"runs are in {output}", file=sys.stderr)


def _check_log_options(ctx: typer.Context, *, text: list[str] | None, ramp: str | None) -> None:
    from probes.cli._given import refuse_given

    of_training = {str(parameter.name) for parameter in ctx.command.params} - _OF_JUDGING - _OF_LOGS
    refuse_given(ctx, of_training, "beside --from-log: a finished run is judged as it is; they belong to --scheme")
    if text is None:
        refuse_given(ctx, {"tokenizer"}, "beside --from-log without the --text that it is for")
    if ramp is not None:
        refuse_given(ctx, {"ramp_steps"}, "beside --ramp, which says how many steps the ramp has")


def check_reference(reference: Path | None, known: Landmarks, ramp_steps: int, thresholds: JudgeThresholds | None) -> None:
    """Refuse a reference that the judge calls diverged.

    Args:
        reference: where it comes from.
        known: with it.
        ramp_steps: of the run to be judged beside it.
        thresholds: of the judge.

    Raises:
        KeelError: naming the kind of its divergence.
    """
    from probes.divergence import reference_fault
    from probes.errors import KeelError

    fault = reference_fault(known, ramp_steps=ramp_steps, thresholds=thresholds)
    if fault is not None:
        raise KeelError(f"reference '{reference}' diverges itself ({fault}); judge beside a run that holds, or without one")


def _thresholds(given: list[str]) -> JudgeThresholds:
    """The defaults with NAME=VALUE put in; what cannot be read is a usage error that lists the names."""
    from dataclasses import asdict

    from probes.divergence import JudgeThresholds

    defaults = asdict(JudgeThresholds())
    changed: dict[str, float] = {}
    for text in given:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or name not in defaults:
            known = ", ".join(f"{key}={default:g}" for key, default in defaults.items())
            what = f"no threshold '{name}'" if equals else f"'{text}' is not NAME=VALUE"
            raise typer.BadParameter(f"{what}; there are {known}", param_hint="--threshold")
        changed[name] = _threshold_value(name, value, whole=isinstance(defaults[name], int))
    try:
        return JudgeThresholds(**{**defaults, **changed})
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--threshold") from error


def _threshold_value(name: str, value: str, *, whole: bool) -> float:
    try:
        return int(value) if whole else float(value)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise typer.BadParameter(f"{name} is {kind} above 0, got '{value}'", param_hint="--threshold") from None


def judgement_page(judgement: Judgement, notes: tuple[str, ...] = (), *, wide: bool) -> str:
    """Verdict, reasons and the Max LR by every criterion, as text."""
    from probes.cli import _tables

    best = "none" if judgement.best_step is None else f"{judgement.best_loss:.4g} nats at step {judgement.best_step}"
    seen = "" if judgement.detected_step is None else f"; recognised at step {judgement.detected_step}"
    lines = [
        judgement.verdict(),
        *(f"  {reason}" for reason in judgement.reasons),
        *(f"  {note}" for note in notes),
        f"  best loss {best}; judged up to step {judgement.last_step}{judgement.place(judgement.last_step)}{seen}",
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
            "max_lr": f"{'< ' if result.upper_bound else '>= ' if result.lower_bound else ''}{result.max_lr:.4g}",
        }
        for result in judgement.criteria
    ]
