"""``keel max-lr``: the largest learning rate that a scheme tolerates, by the paper's stress test, live or from a log."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from probes.max_learning_rate import StressTest
    from probes.training import TrainingConfig

__all__ = ["register"]

_PRESETS = ("cpu", "gpu")
_GPU_DEPTHS = (64, 512)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("max-lr")(max_lr)


def max_lr(
    scheme: Annotated[str | None, typer.Option(help="Residual scheme; keel schemes lists them.", show_default=False)] = None,
    from_log: Annotated[
        Path | None,
        typer.Option(
            help="Judge a finished run instead: CSV, JSON lines, trainer_state.json or TensorBoard events.", show_default=False
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(help="cpu: 64 sub-layers of width 64; gpu: 64 and 512 sub-layers of width 512.")
    ] = "cpu",
    blocks: Annotated[
        int | None, typer.Option(help="Transformer blocks, two sub-layers each. [default: the preset's]", show_default=False)
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
        typer.Option(help="File, folder, saved data set or hub:NAME; may be repeated. [default: Python's standard library]"),
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
        str | None, typer.Option(help="cpu, cuda, cuda:1, mps. [default: the preset's]", show_default=False)
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads. [default: torch's choice]", show_default=False)] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a healthy run on the same ramp, or with --from-log its log; degradation is judged beside it.",
            show_default=False,
        ),
    ] = None,
    unigram_entropy: Annotated[
        float | None,
        typer.Option(
            help="With --from-log: unigram entropy of its text, nats; a plateau there is stagnation.", show_default=False
        ),
    ] = None,
    ramp_steps: Annotated[
        int | None,
        typer.Option(min=1, help="With --from-log: steps of the ramp, where the log ends before it.", show_default=False),
    ] = None,
    to_end: Annotated[bool, typer.Option(help="Go on to the end of the ramp, even once the divergence is certain.")] = False,
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
      keel max-lr --from-log loss.csv --reference healthy.csv --unigram-entropy 3.2
    """  # noqa: D301 - a real \b keeps the lines of the example apart
    if (from_log is None) == (scheme is None):
        raise typer.BadParameter("name a scheme (keel schemes lists them), or a finished run with --from-log, and not both")
    if from_log is not None:
        from probes.cli._max_lr_log import report_log

        report_log(
            from_log,
            reference=reference,
            unigram_entropy=unigram_entropy,
            ramp_steps=ramp_steps,
            to_end=to_end,
            as_json=as_json,
            output=output,
        )
        return
    if unigram_entropy is not None or ramp_steps is not None:
        raise typer.BadParameter("--unigram-entropy and --ramp-steps go with --from-log; a run that is trained knows both")
    assert scheme is not None  # one of the two is given
    from probes.cli import _tables, _training
    from probes.max_learning_rate import stress_test

    _training.threads(threads)
    corpus_config, corpus = _training.corpus_of(text, tokenizer, "text", output)
    changes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len, "device": device}
    given = {name: value for name, value in changes.items() if value is not None}
    tests = []
    for plain in _preset(preset, scheme, blocks):
        config = replace(plain, corpus=corpus_config, steps=steps, peak_lr=peak, accumulation=accumulation, **given)
        options = _training.ModelOptions(
            scheme=scheme, settings=settings or [], blocks=blocks, width=width, dtype=dtype, seed=first_seed
        )
        config = options.apply(config, vocab_size=corpus.vocab_size)
        folder = None if output is None else output / f"{scheme}_{config.model.n_sublayers}"
        with (
            _training.interruptible(output),
            _training.progress(f"{scheme}, {config.model.n_sublayers} sub-layers", steps) as show,
        ):
            test = stress_test(
                config,
                n_seeds=seeds,
                corpus=corpus,
                folder=folder,
                reference=_reference(reference),
                early_stop=not to_end,
                on_step=lambda seed, record: show(record),
            )
        tests.append(test)
    print(_tables.as_json([test.to_dict() for test in tests]) if as_json else "\n\n".join(map(_page, tests)))
    if output is not None:
        print(f"runs are in {output}", file=sys.stderr)


def _preset(name: str, scheme: str, blocks: int | None) -> list[TrainingConfig]:
    from keel_theory.schemes import get_scheme
    from probes.max_learning_rate import cpu_preset, gpu_preset

    get_scheme(scheme)
    if name not in _PRESETS:
        raise typer.BadParameter(f"unknown preset '{name}'; known: {', '.join(_PRESETS)}", param_hint="--preset")
    if name == "cpu":
        return [cpu_preset(scheme)]
    depths = _GPU_DEPTHS if blocks is None else (2 * max(1, blocks),)
    return [gpu_preset(scheme, depth) for depth in depths]


def _reference(folder: Path | None) -> Any:
    from probes.errors import CheckpointError
    from probes.run_folder import read_log

    if folder is None:
        return None
    try:
        return read_log(folder / "log.jsonl")
    except OSError as error:
        raise CheckpointError(f"--reference {folder} is not the folder of a run: it holds no readable log.jsonl") from error


def _page(test: StressTest) -> str:
    from probes.cli import _tables
    from probes.config import describe

    config = test.config
    lines = [
        f"{config.model.scheme}: {describe(config.model)}",
        f"ramp 0 -> {config.peak_lr:g} over {config.steps} steps of {config.batch_size * config.seq_len} tokens",
        "",
    ]
    for run in test.runs:
        judgement = run.judgement
        stopped = f", stopped early at step {judgement.last_step}" if judgement.early else ""
        lines += [
            f"seed {run.seed}: {judgement.verdict()}",
            f"  {run.training.seconds:.0f} s of training{stopped}; best loss {judgement.best_loss:.3f} nats/token",
            *(f"  {reason}" for reason in judgement.reasons),
        ]
    entropy = test.runs[0].training.corpus
    lines += [
        "",
        _tables.render(["seed", "criterion", "status", "onset_step", "max_LR"], _criteria(test), wide=sys.stdout.isatty()),
        "",
        f"text: {', '.join(config.corpus.sources)}, entropy {entropy['unigram_entropy']:.4f} unigram, "
        f"{entropy['bigram_entropy']:.4f} bigram nats/token",
    ]
    if test.interval is not None:
        low, high = test.interval
        bound = ">= " if test.lower_bound else ""
        lines.append(f"median Max LR {bound}{test.median_max_lr:.4g}, 95 % bootstrap interval {low:.4g} to {high:.4g}")
    return "\n".join(lines)


def _criteria(test: StressTest) -> list[dict[str, Any]]:
    return [
        {
            "seed": run.seed,
            "criterion": result.criterion.outcome.words,
            "status": result.status.value.replace("_", " "),
            "onset_step": "" if result.onset_step is None else result.onset_step,
            "max_LR": f"{'>= ' if result.lower_bound else ''}{result.max_lr:.4g}",
        }
        for run in test.runs
        for result in run.judgement.criteria
    ]
