r"""``keel sweep``: many stress tests or trainings, on one machine or a Slurm cluster."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from probes.sweep import Event
    from probes.sweep_spec import Sweep

__all__ = ["register"]

_EXIT_FAILED = 1


def register(app: typer.Typer) -> None:
    """Add the group of commands to the application."""
    group = typer.Typer(no_args_is_help=True, help="Many stress tests or trainings, on one machine or a Slurm cluster.")
    for name, command in (("run", run), ("status", status), ("results", results)):
        group.command(name)(command)
    app.add_typer(group, name="sweep")


def run(
    file: Annotated[Path | None, typer.Argument(help="TOML file of the sweep; without one, it is made of the options.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder of the sweep. [default: runs/NAME]", show_default=False)
    ] = None,
    schemes: Annotated[str | None, typer.Option(help="Names, separated by commas.", show_default=False)] = None,
    blocks: Annotated[str | None, typer.Option(help="Transformer blocks, e.g. 32,128.", show_default=False)] = None,
    widths: Annotated[str | None, typer.Option(help="Of the residual stream, e.g. 64,128.", show_default=False)] = None,
    peaks: Annotated[str | None, typer.Option(help="Learning rates that the ramps end at.", show_default=False)] = None,
    seeds: Annotated[str | None, typer.Option(help="Of weights and data, e.g. 0,1,2.", show_default=False)] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of the ramp.", show_default=False)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per optimizer step.", show_default=False)] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens that a sequence predicts.", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda.", show_default=False)] = None,
    to_end: Annotated[
        bool, typer.Option("--to-end", help="Train every ramp to its end, for the Max LR by each criterion.")
    ] = False,
    executor: Annotated[str, typer.Option(help="local (processes of this machine), slurm, or debug (this process).")] = "local",
    jobs: Annotated[
        int | None, typer.Option(help="Trials side by side. [default: as many as the CPUs hold]", show_default=False)
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of each trial.")] = 1,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs to share out, one per trial on cuda. [default: all]", show_default=False)
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(help="GB that the trials may take together. [default: 80 % of what is free]", show_default=False),
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition.", show_default=False)] = None,
    time: Annotated[
        int | None, typer.Option(help="Minutes a job may take; one out of time resumes in a new one.", show_default=False)
    ] = None,
    retries: Annotated[int, typer.Option(help="How often a broken trial is tried again.")] = 1,
    save_seconds: Annotated[float, typer.Option(help="Each trial saves its state this often.")] = 60.0,
    keep_weights: Annotated[bool, typer.Option("--keep-weights", help="Keep the trained weights of every trial.")] = False,
) -> None:
    """Run every trial that is not finished yet; the same command goes on after a crash, a kill or Ctrl-C.

    \b
    Examples:
      keel sweep run benchmarks/sweeps/table1_cpu.toml -o runs/table1
      keel sweep run --schemes keel,pre_ln --blocks 8,32 --seeds 0,1,2 -o runs/mine
      keel sweep run big.toml --executor slurm --partition gpu --time 240
    """  # noqa: D301 - a real \b keeps the lines of the example apart
    from probes.executors import JobOptions
    from probes.sweep import RunOptions, run_sweep
    from probes.trial_folder import TrialState

    axes = {"schemes": schemes, "blocks": blocks, "widths": widths, "peaks": peaks, "seeds": seeds}
    fields = {"steps": steps, "batch_size": batch_size, "seq_len": seq_len, "device": device}
    sweep = _sweep(file, axes, fields, to_end=to_end)
    options = RunOptions(
        executor=executor,
        jobs=jobs,
        gpus=gpus,
        memory=None if memory is None else _bytes(memory),
        retries=retries,
        save_seconds=save_seconds,
        keep_weights=keep_weights,
        job=JobOptions(threads=threads, minutes=time, partition=partition),
    )
    folder = output or Path("runs", sweep.name)
    print(f"{sweep.name}: {len(sweep.trials())} trial(s) in {folder}", file=sys.stderr)
    counts = run_sweep(sweep, folder, options, on_event=_tell)
    print(", ".join(f"{counts.get(state, 0)} {state.value}" for state in TrialState))
    if counts.get(TrialState.FAILED):
        print(f"keel: keel sweep status {folder} says why; the same command tries again", file=sys.stderr)
        raise typer.Exit(_EXIT_FAILED)


def _sweep(file: Path | None, axes: dict[str, str | None], fields: dict[str, Any], *, to_end: bool) -> Sweep:
    """The file's sweep, or the options' own; one of the two."""
    from probes.sweep_spec import read_sweep, sweep_from_dict

    given = {name: text for name, text in axes.items() if text is not None}
    training = {name: value for name, value in fields.items() if value is not None}
    if file is not None:
        extra = [*given, *training, *(["to-end"] if to_end else [])]
        if extra:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in extra)
            raise typer.BadParameter(f"{flags} cannot be given beside a file; write it into {file}")
        return read_sweep(file)
    if "schemes" not in given:
        raise typer.BadParameter("name a TOML file, or --schemes")
    return sweep_from_dict(
        {
            **{name: _values(name, text) for name, text in given.items()},
            "early_stop": not to_end,
            "training": training,
        }
    )


def _values(name: str, text: str) -> list[Any]:
    """The values between commas."""
    kinds: dict[str, type] = {"schemes": str, "peaks": float}
    kind = kinds.get(name, int)
    try:
        return [kind(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"'{text}' is not a list of numbers such as 1,2", param_hint=f"--{name}") from error


def _bytes(gigabytes: float) -> int:
    if not math.isfinite(gigabytes):
        raise typer.BadParameter(f"must be a finite number of GB, got {gigabytes}", param_hint="--memory")
    return int(gigabytes * 1e9)


def _tell(event: Event) -> None:
    detail = f": {event.detail}" if event.detail else ""
    print(f"{event.folder.trial.key}  {event.label}  {event.what}{detail}", file=sys.stderr)


def status(
    folder: Annotated[Path, typer.Argument(help="Folder of a sweep.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show every trial: finished, running, failed or waiting, with its progress; also while the sweep runs.

    \b
    Example:
      keel sweep status runs/table1
    """  # noqa: D301 - a real \b keeps the lines of the example apart
    from collections import Counter

    from probes.cli import _tables
    from probes.sweep_folder import SweepFolder
    from probes.sweep_results import status_rows
    from probes.trial_folder import TrialState

    sweep = SweepFolder(folder)
    rows = status_rows(sweep)
    counts = Counter(row["state"] for row in rows)
    if as_json:
        print(_tables.as_json({"sweep": sweep.read()[0], "counts": dict(counts), "trials": rows}))
        return
    print(_tables.render(list(rows[0]), rows, wide=sys.stdout.isatty()))
    print()
    print(f"{sweep.read()[0]}: " + ", ".join(f"{counts[state.value]} {state.value}" for state in TrialState))


def results(
    folder: Annotated[Path, typer.Argument(help="Folder of a sweep.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the frame as JSON records.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Write the frame to this .csv or .parquet file, and beside it a .json that says where it comes from.",
            show_default=False,
        ),
    ] = None,
    rejudge: Annotated[bool, typer.Option("--rejudge", help="Judge the recorded losses again, by the present judge.")] = False,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Scheme that counts as healthy; with it degradation can be judged. Its trials must have run --to-end.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the Max LR over the seeds, or write everything as one tidy frame.

    \b
    Examples:
      keel sweep results runs/table1
      keel sweep results runs/table1 -o table1.csv
    """  # noqa: D301 - a real \b keeps the lines of the example apart
    import json

    from probes.cli import _tables
    from probes.cli._frames import write_frame
    from probes.cli._io import emit
    from probes.sweep_folder import SweepFolder
    from probes.sweep_results import judge_again, origins, results_frame, seed_table
    from probes.trial import SweepError

    name, folders = SweepFolder(folder).read()
    for damage in filter(None, (place.damage for place in folders)):
        print(f"keel: left out: {damage}; keel sweep run makes it anew", file=sys.stderr)
    anew = judge_again(folders, reference=reference) if rejudge or reference is not None else None
    frame = results_frame(folders, anew)
    if frame.empty:
        raise SweepError(f"no trial of {name} in {folder} is finished yet; keel sweep status {folder} shows its progress")
    if output is not None:
        write_frame(frame, output)
        about = {"sweep": name, "trials": len(folders), "finished": frame["trial"].nunique(), "judged_again": anew is not None}
        emit(_tables.as_json({**about, "reference": reference, "origins": origins(folders)}), output.with_suffix(".json"))
        print(f"{frame['trial'].nunique()} of {len(folders)} trials in {output}", file=sys.stderr)
    if as_json:
        print(_tables.as_json(json.loads(frame.to_json(orient="records"))))
    elif output is None:
        _print_table(seed_table(frame), frame)
        print(f"{frame['trial'].nunique()} of {len(folders)} trials are finished", file=sys.stderr)


def _print_table(rows: list[dict[str, Any]], frame: Any) -> None:
    from probes.cli import _tables
    from probes.sweep_results import COLUMNS

    if not rows:
        further = [name for name in frame.columns if name not in COLUMNS]
        columns = ["scheme", "n_sublayers", "width", "peak_lr", *further, "seed", "steps_done", "final_loss", "validation_loss"]
        rows = frame[columns].to_dict("records")
    print(_tables.render(list(rows[0]), rows, wide=sys.stdout.isatty()))
