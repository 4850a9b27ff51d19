"""What the training commands share: options to a configuration, a progress bar, and how an interrupted run ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from probes.corpus import Corpus, CorpusConfig
    from probes.run_folder import StepRecord
    from probes.training import TrainingConfig

__all__ = ["ModelOptions", "corpus_of", "interruptible", "progress", "threads"]

_DTYPES = ("float32", "bfloat16")
_EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What the command line says of the model; None where it says nothing.

    Attributes:
        scheme: name.
        settings: ``name=value`` texts for the scheme's parameters.
        blocks: Transformer blocks.
        width: of the stream; FFN width and heads follow it.
        dtype: the branches compute in.
        seed: of the weights.
    """

    scheme: str
    settings: list[str]
    blocks: int | None = None
    width: int | None = None
    dtype: str | None = None
    seed: int = 0

    def apply(self, config: TrainingConfig, *, vocab_size: int) -> TrainingConfig:
        """The configuration with these options, its vocabulary that of the text.

        Raises:
            typer.BadParameter: if the dtype is unknown.
        """
        from keel_theory.schemes import get_scheme
        from probes.cli.schemes import parse_settings
        from probes.training_config import proportions

        get_scheme(self.scheme)
        changes: dict[str, Any] = {
            "scheme": self.scheme,
            "scheme_parameters": parse_settings(self.settings),
            "vocab_size": vocab_size,
            "context_length": config.seq_len,
            "seed": self.seed,
        }
        if self.blocks is not None:
            changes["n_blocks"] = self.blocks
        if self.width is not None:
            changes |= proportions(self.width, head_width=config.model.head_width)
        if self.dtype is not None:
            if self.dtype not in _DTYPES:
                raise typer.BadParameter(f"unknown dtype '{self.dtype}'; known: {', '.join(_DTYPES)}", param_hint="--dtype")
            changes["compute_dtype"] = self.dtype
        return replace(config, model=replace(config.model, **changes), seed=self.seed)


def corpus_of(texts: list[str] | None, tokenizer: str, column: str, folder: Path | None) -> tuple[CorpusConfig, Corpus]:
    """The text that the options name; a tokenizer that the folder of the run, or of several, holds is used again."""
    from probes.corpus import CorpusConfig, build_corpus

    config = CorpusConfig(sources=tuple(texts or ("stdlib",)), tokenizer=tokenizer, column=column)
    return config, build_corpus(config, tokenizer_json=None if folder is None else _kept_tokenizer(folder, config))


def _kept_tokenizer(folder: Path, corpus: CorpusConfig) -> str | None:
    """That of the first run on the same text, in the folder itself or two below it."""
    from probes.run_folder import RunFolder
    from probes.training import stored_tokenizer

    runs = (folder, *sorted(path.parent for path in folder.glob("*/seed_*/tokenizer.json")))
    return next((stored_tokenizer(run) for run in runs if RunFolder(run).corpus_fields == corpus.to_dict()), None)


def threads(n: int | None) -> None:
    """Use this many CPU threads; None leaves the choice to torch.

    Raises:
        typer.BadParameter: if there are fewer than one.
    """
    import torch

    if n is not None:
        if n < 1:
            raise typer.BadParameter(f"at least 1 thread is needed, got {n}", param_hint="--threads")
        torch.set_num_threads(n)


@contextmanager
def progress(what: str, steps: int) -> Iterator[Callable[[StepRecord], None]]:
    """A progress bar on stderr with loss and learning rate, gone at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=steps)

        def show(record: StepRecord) -> None:
            words = f"{what}  loss {record.loss:.3f}  lr {record.lr:.2e}"
            bar.update(task, completed=record.step, description=words)

        yield show


@contextmanager
def interruptible(folder: Path | None) -> Iterator[None]:
    """Turn a saved interruption, or Ctrl-C, into one message and exit code 130."""
    from probes.training import TrainingInterrupted

    try:
        yield
    except TrainingInterrupted as error:
        print(f"keel: {error}; the same command with -o {folder} goes on from there", file=sys.stderr)
        raise typer.Exit(_EXIT_INTERRUPTED) from error
    except KeyboardInterrupt as error:
        print("keel: stopped; nothing was saved" if folder is None else f"keel: stopped; {folder} resumes", file=sys.stderr)
        raise typer.Exit(_EXIT_INTERRUPTED) from error
