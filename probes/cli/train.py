"""``keel train``: train a model in any residual scheme, resumable at any moment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from probes.run_folder import StepRecord
    from probes.training import TrainingResult

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("train")(train)


def train(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder of the run; one that holds the same run is gone on with.")
    ],
    scheme: Annotated[str, typer.Option(help="Residual scheme; keel schemes lists them.")] = "keel",
    blocks: Annotated[int, typer.Option(help="Transformer blocks, two sub-layers each.")] = 4,
    width: Annotated[int, typer.Option(help="Of the residual stream; FFN width is three times it.")] = 64,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 600,
    batch_size: Annotated[int, typer.Option(help="Sequences per optimizer step.")] = 8,
    accumulation: Annotated[int, typer.Option(help="Micro-batches that a step is cut into.")] = 1,
    seq_len: Annotated[int, typer.Option(help="Tokens that a sequence predicts.")] = 64,
    schedule: Annotated[str, typer.Option(help="cosine (warm-up, then down) or ramp (up to the end).")] = "cosine",
    peak: Annotated[float, typer.Option(help="Highest learning rate.")] = 3e-3,
    warmup: Annotated[int | None, typer.Option(help="Optimizer steps. [default: a tenth of all]", show_default=False)] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="File, folder, saved data set or hub:NAME; may be repeated. [default: Python's standard library]"),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="bytes, bpe:N (trained on the text) or a tokenizer.json.")] = "bytes",
    column: Annotated[str, typer.Option(help="Column of a data set that holds the text.")] = "text",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Another value of a scheme's parameter.", show_default=False),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 branches beside a float32 stream.")] = "float32",
    checkpointing: Annotated[bool, typer.Option(help="Compute activations again to save memory.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads. [default: torch's choice]", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    profiles: Annotated[int, typer.Option(help="Measure the gradients over depth at this many steps, and draw heat maps.")] = 0,
    save_seconds: Annotated[float, typer.Option(help="Save the state this often.")] = 60.0,
    tensorboard: Annotated[bool, typer.Option(help="Also write TensorBoard events into the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Train a model; after a crash or Ctrl-C the same command goes on where it stopped.

    \b
    Example:
      keel train --scheme keel --blocks 8 --steps 1000 -o runs/keel
      keel grad-norm runs/keel
    """  # noqa: D301 - a real \b keeps the lines of the example apart
    from probes import training
    from probes.cli import _tables, _training
    from probes.training_config import TrainingConfig, evenly_spaced

    _training.threads(threads)
    for name, value in (("profiles", profiles), ("save-seconds", save_seconds)):
        if not value >= 0:
            raise typer.BadParameter(f"must be at least 0, got {value}", param_hint=f"--{name}")
    corpus_config, corpus = _training.corpus_of(text, tokenizer, column, output)
    options = _training.ModelOptions(scheme=scheme, settings=settings or [], blocks=blocks, width=width, dtype=dtype, seed=seed)
    plain = TrainingConfig(
        corpus=corpus_config,
        steps=steps,
        batch_size=batch_size,
        accumulation=accumulation,
        seq_len=seq_len,
        schedule=schedule,  # type: ignore[arg-type]  # checked by the configuration
        peak_lr=peak,
        warmup=warmup if warmup is not None else 0 if schedule == "ramp" else steps // 10,
        final_lr=min(1e-7, peak) if peak > 0 else 0.0,
        activation_checkpointing=checkpointing,
        device=device,
        probe_steps=evenly_spaced(steps, profiles),
    )
    config = options.apply(plain, vocab_size=corpus.vocab_size)
    with (
        _training.interruptible(output),
        _events(output, enabled=tensorboard) as log_events,
        _training.progress(f"{scheme}, {2 * blocks} sub-layers", steps) as show,
    ):

        def note(record: StepRecord) -> None:
            show(record)
            log_events(record)

        result = training.train(config, corpus=corpus, folder=output, on_step=note, save_seconds=save_seconds)
    print(_tables.as_json(result.to_dict()) if as_json else _page(result))
    print(f"model, log and result are in {output}", file=sys.stderr)
    if profiles:
        _draw(result, output)


@contextmanager
def _events(folder: Path, *, enabled: bool) -> Iterator[Callable[[StepRecord], None]]:
    """Write each record as TensorBoard events; a resumed run writes its earlier steps again in place of the old ones."""
    if not enabled:
        yield lambda record: None
        return
    events = _Events(folder / "tensorboard")
    try:
        yield events.write
    finally:
        events.close()


class _Events:
    """TensorBoard's writer, which makes the folder only once there is something to write."""

    def __init__(self, folder: Path) -> None:
        from importlib import import_module

        from probes.errors import KeelError

        self._folder = folder
        self._writer: Any = None
        try:
            self._module: Any = import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise KeelError(
                "--tensorboard needs the package 'tensorboard': pip install 'keel-dynamics[logs]', or pip install tensorboard"
            ) from error

    def write(self, record: StepRecord) -> None:
        """Add a step's scalars."""
        with self._told():
            if self._writer is None:
                self._writer = self._module.SummaryWriter(str(self._folder), purge_step=0)
            for name in ("loss", "lr", "grad_norm", "unigram_loss", "bigram_loss"):
                value = getattr(record, name)
                if value is not None:  # a step logged before they were
                    self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Write what waits."""
        with self._told():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        from probes.errors import OutputError

        try:
            yield
        except OSError as error:
            raise OutputError(
                f"cannot write TensorBoard events to {self._folder}: {error.strerror or error}; what was saved is unharmed"
            ) from error


def _draw(result: TrainingResult, folder: Path) -> None:
    """Heat maps over depth and time, beside the numbers."""
    import matplotlib as mpl
    import pandas as pd

    mpl.use("Agg")
    from figures._style import save_figure
    from figures.heat_maps import draw, landmark_rows
    from probes.errors import OutputError

    dynamics = result.dynamics()
    if dynamics.empty:
        print("the run ended before the first profile: no heat maps", file=sys.stderr)
        return
    figure = draw(pd.concat([dynamics, result.to_frame(), landmark_rows(result)], ignore_index=True))
    try:
        save_figure(figure, folder / "heat_maps.png")
    except OSError as error:
        raise OutputError(
            f"cannot write heat_maps.png in {folder}: {error.strerror or error}; the run is finished, the same command draws it"
        ) from error


def _page(result: TrainingResult) -> str:
    from probes.config import describe

    facts = result.to_dict()
    corpus = facts["corpus"]

    def nats(name: str) -> str:
        return "not finite" if facts[name] is None else f"{facts[name]:.4f}"

    validation = "" if facts["validation_loss"] is None else f"; validation {facts['validation_loss']:.4f}"
    return "\n".join(
        [
            f"{result.config.model.scheme}: {describe(result.config.model)}",
            f"{facts['outcome']} after {facts['steps_done']} steps, {facts['seconds_per_step']:.3f} s each",
            f"loss {nats('final_loss')} (best {nats('best_loss')}, mean of 20 steps){validation} nats/token",
            f"text: {corpus['n_train_tokens']} tokens of {', '.join(corpus['sources'])} (hash {corpus['content_hash']}), "
            f"entropy {corpus['unigram_entropy']:.4f} unigram, {corpus['bigram_entropy']:.4f} bigram nats/token",
        ]
    )
