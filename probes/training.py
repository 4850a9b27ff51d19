r"""Train a model of the toolkit: a lean loop that resumes bit for bit.

One optimizer step: the gradient of the mean loss over the micro-batches, its norm read before it is clipped, AdamW. A step
depends on the weights, the optimizer's state and its own number, and on nothing else; so that is all that is saved.

A loss that is not a number ends the run as a recorded result: the weights are those before the step, and the outcome says so.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from keel_theory.spec import ProfileKind
from probes.activation_checkpointing import activation_checkpointing
from probes.admin_profile import profile_admin
from probes.corpus import Corpus, CorpusConfig, build_corpus
from probes.device import resolve_device
from probes.dynamics import COLUMNS, gradient_profile, join_profiles, merge_profiles, read_profiles, updates, write_profile
from probes.errors import CheckpointError, Interrupted, TextError
from probes.model import Transformer, residual_layout
from probes.provenance import provenance
from probes.run_folder import Outcome, RunFolder, SavedState, StepRecord, random_state, restore_random_state
from probes.saving import save_model
from probes.text import TokenBatch
from probes.training_config import Schedule, TrainingConfig, TrainingConfigError, evenly_spaced

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "CorpusConfig",
    "Outcome",
    "Schedule",
    "StepRecord",
    "Trainer",
    "TrainingConfig",
    "TrainingConfigError",
    "TrainingInterrupted",
    "TrainingResult",
    "check_run",
    "evenly_spaced",
    "stored_tokenizer",
    "train",
]

_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
_SMOOTHING = 20
_METRICS = {  # of a step, with their units
    "loss": "nats/token",
    "lr": "1",
    "grad_norm": "nats/token per unit",
    "unigram_loss": "nats/token",
    "bigram_loss": "nats/token",
}
_ADAMW_STATE = frozenset({"step", "exp_avg", "exp_avg_sq"})
_TOKENIZER = "tokenizer.json"
_TOKENIZER_CONFIG = b'{"tokenizer_class": "PreTrainedTokenizerFast"}\n'


class TrainingInterrupted(Interrupted):
    """A signal asked the run to stop; its state has been saved. The message says how to go on."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """A run that has come to an end.

    Attributes:
        config: what was trained.
        outcome: how it ended.
        records: one per optimizer step.
        validation_loss: nats per token after the last step; None where it was not asked for or the run is non-finite.
        corpus: what the text was, its entropies included.
        sessions: first step and thread count of every process that worked on the run.
        provenance: versions, platform, time.
        folder: where it is on disk, or None.
        profiles: over depth, one frame per configured step; empty where they are in the folder.
    """

    config: TrainingConfig
    outcome: Outcome
    records: tuple[StepRecord, ...]
    validation_loss: float | None
    corpus: dict[str, Any]
    sessions: tuple[dict[str, int], ...]
    provenance: dict[str, Any]
    folder: Path | None = None
    profiles: tuple[pd.DataFrame, ...] = ()

    @property
    def best_loss(self) -> float:
        """The lowest mean loss over 20 consecutive steps (all, where there are fewer), nats per token."""
        losses = np.array([r.loss for r in self.records if math.isfinite(r.loss)])
        if not len(losses):
            return math.nan
        width = min(_SMOOTHING, len(losses))
        return float(np.convolve(losses, np.full(width, 1 / width), "valid").min())

    @property
    def seconds(self) -> float:
        """Of training, pauses between sessions left out."""
        return self.records[-1].time if self.records else 0.0

    def to_frame(self) -> pd.DataFrame:
        """Tidy rows of loss, learning rate, gradient norm and batch losses of every step, as ``probes.dynamics.COLUMNS``."""
        import pandas as pd

        steps = pd.DataFrame([asdict(record) for record in self.records], columns=[f.name for f in fields(StepRecord)])
        model = self.config.model
        parts = [
            pd.DataFrame({"step": steps["step"], "value": steps[metric]}).assign(
                scheme=model.scheme,
                n_sublayers=model.n_sublayers,
                seed=self.config.seed,
                sublayer=-1,
                kind="model",
                metric=metric,
                unit=unit,
            )
            for metric, unit in _METRICS.items()
        ]
        return pd.concat(parts, ignore_index=True)[list(COLUMNS)]

    def dynamics(self) -> pd.DataFrame:
        """The profiles over depth at the configured steps, one tidy frame."""
        return read_profiles(self.folder) if self.folder is not None else join_profiles(self.profiles)

    def to_dict(self) -> dict[str, Any]:
        """The result without its steps, ready for JSON; a loss that is not finite is null."""
        last = self.records[-1] if self.records else None
        return {
            "key": self.config.key,
            "outcome": self.outcome.value,
            "steps_done": len(self.records),
            "final_loss": _finite_or_none(last.loss if last else None),
            "best_loss": _finite_or_none(self.best_loss),
            "validation_loss": _finite_or_none(self.validation_loss),
            "seconds": self.seconds,
            "seconds_per_step": self.seconds / max(1, len(self.records)),
            "config": self.config.to_dict(),
            "corpus": self.corpus,
            "sessions": list(self.sessions),
            "provenance": self.provenance,
        }


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def check_run(config: TrainingConfig, corpus: Corpus) -> torch.device:
    """Refuse a run that cannot begin, before anything of it is made.

    Args:
        config: of the run.
        corpus: the text.

    Returns:
        The device that it trains on.

    Raises:
        TextError: if the text does not hold a window.
        TrainingConfigError: if the model's vocabulary is smaller than the tokenizer's, or the device is not there.
    """
    corpus.check_window(config.seq_len)
    if corpus.vocab_size > config.model.vocab_size:
        raise TrainingConfigError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's {corpus.vocab_size} tokens"
        )
    return resolve_device(config.device, error=TrainingConfigError)


class Trainer:
    """Model, optimizer and position of one run, in memory.

    Args:
        config: of the run.
        corpus: the text.

    Raises:
        TextError: if the text does not hold a window.
        TrainingConfigError: if the model's vocabulary is smaller than the tokenizer's, or the device is not there.
    """

    def __init__(self, config: TrainingConfig, corpus: Corpus) -> None:
        self.device = check_run(config, corpus)
        self.config, self.corpus = config, corpus
        self._ngram_losses = corpus.ngram_losses  # counted before the clock starts
        self.model = Transformer(config.model)
        self.layout = residual_layout(self.model)
        self.step = 0
        if any(spec.profile is ProfileKind.ADMIN for spec in config.model.specs()):
            profile_admin(self.model, [self._batch(1)[:, :-1]])
        self.model.to(self.device)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.learning_rate(1),
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=self.device.type in _FUSED_DEVICES,
        )
        self._blocks = cast("Sequence[nn.Module]", self.model.blocks)
        self._elapsed, self._started = 0.0, time.perf_counter()
        self.profile: pd.DataFrame | None = None

    def advance(self) -> StepRecord:
        """Do one optimizer step.

        Returns:
            Its record. Where its loss is not finite, the weights have been left as they were.
        """
        self.step += 1
        lr = self.config.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch = self._batch(self.step)
        unigram_loss, bigram_loss = self._ngram_losses.of(batch)
        micro_batches = [part.to(self.device, non_blocking=True) for part in batch.chunk(self.config.accumulation)]
        with ExitStack() as stack:
            if self.step in self.config.probe_steps:
                stack.enter_context(self._probing(micro_batches[0]))
            with activation_checkpointing(self._blocks, enabled=self.config.activation_checkpointing):
                loss, grad_norm = self._gradient(micro_batches)
            if math.isfinite(loss):
                self.optimizer.step()
            self.optimizer.zero_grad()
        return StepRecord(
            step=self.step,
            lr=lr,
            loss=loss,
            grad_norm=grad_norm,
            time=self.seconds,
            unigram_loss=unigram_loss,
            bigram_loss=bigram_loss,
        )

    def _batch(self, step: int) -> Tensor:
        c = self.config
        return self.corpus.batch(seed=c.seed, step=step, n_windows=c.batch_size, seq_len=c.seq_len)

    def _gradient(self, micro_batches: Sequence[Tensor]) -> tuple[float, float]:
        """Leave the clipped gradient in the parameters; loss and norm before clipping, read at one synchronisation."""
        losses = []
        for windows in micro_batches:
            loss = self.model.loss(windows[:, :-1], windows[:, 1:])
            (loss / len(micro_batches) if len(micro_batches) > 1 else loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.config.clip:
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip, norm)
        mean = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        loss_value, norm_value = torch.stack((mean, norm.to(mean.dtype))).tolist()
        return loss_value, norm_value

    @contextmanager
    def _probing(self, windows: Tensor) -> Iterator[None]:
        """Measure the profile before the step, and the update after it."""
        profile = gradient_profile(self.model, self.layout, TokenBatch(windows[:, :-1], windows[:, 1:]))
        with updates(self.model, self.layout) as changes:
            yield
        model = self.config.model
        whole = type(profile)(profile.rows + tuple(changes))
        self.profile = whole.to_frame(scheme=model.scheme, n_sublayers=model.n_sublayers, seed=self.config.seed, step=self.step)

    @property
    def seconds(self) -> float:
        """Of training so far, in this process and those before."""
        return self._elapsed + time.perf_counter() - self._started

    @torch.no_grad()
    def validation_loss(self) -> float | None:
        """Mean loss over the validation windows, nats per token; None where the configuration leaves it out."""
        c = self.config
        if not c.validation_tokens:
            return None
        batches = self.corpus.validation_batches(n_tokens=c.validation_tokens, batch_size=c.batch_size, seq_len=c.seq_len)
        sums, n_windows = [], 0
        for windows in batches:
            ids = windows.to(self.device)
            sums.append(self.model.loss(ids[:, :-1], ids[:, 1:]).double() * len(ids))
            n_windows += len(ids)
        return float(torch.stack(sums).sum() / n_windows)

    def state(self) -> SavedState:
        """Everything that :meth:`restore` needs."""
        tensors = {f"model/{name}": tensor for name, tensor in self._weights()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{name}/{key}"] = value
        tensors |= {f"random/{name}": value for name, value in random_state(self.device).items()}
        return SavedState(
            {name: t.detach().contiguous() for name, t in tensors.items()}, {"step": self.step, "seconds": self.seconds}
        )

    @torch.no_grad()
    def restore(self, state: SavedState) -> None:
        """Go back to a saved state; where it is refused, nothing has changed.

        Raises:
            CheckpointError: if it is not one of this model; the message names the tensor.
        """
        self._check_state(state)
        for name, tensor in self._weights():
            tensor.copy_(state.tensors[f"model/{name}"])
        parameters = dict(self.model.named_parameters())
        for owner, key, tensor in _optimizer_tensors(state):
            own = torch.empty_like(tensor, device=self.device).copy_(tensor)  # aligned as torch aligns, not as the file does
            self.optimizer.state[parameters[owner]][key] = own
        restore_random_state(
            {n.removeprefix("random/"): t for n, t in state.tensors.items() if n.startswith("random/")}, self.device
        )
        self.step = int(state.facts["step"])
        self._elapsed, self._started = float(state.facts["seconds"]), time.perf_counter()

    def _check_state(self, state: SavedState) -> None:
        shapes = {name: tensor.shape for name, tensor in self._weights()}
        for name, shape in shapes.items():
            _check_shape(state, f"model/{name}", shape)
        moments: dict[str, set[str]] = {}
        for owner, key, _ in _optimizer_tensors(state):
            if owner not in shapes or key not in _ADAMW_STATE:
                raise CheckpointError(f"the saved state holds 'optimizer/{owner}/{key}', which this model does not have")
            _check_shape(state, f"optimizer/{owner}/{key}", torch.Size() if key == "step" else shapes[owner])
            moments.setdefault(owner, set()).add(key)
        for owner, keys in moments.items():
            for key in _ADAMW_STATE - keys:
                raise CheckpointError(f"the saved state lacks the tensor 'optimizer/{owner}/{key}'")
        if state.facts["step"] > self.config.steps:
            raise CheckpointError(f"the saved state is of step {state.facts['step']}, the run has {self.config.steps}")

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()


def _optimizer_tensors(state: SavedState) -> Iterator[tuple[str, str, Tensor]]:
    """Parameter's name, key of its state, and tensor."""
    for name, tensor in state.tensors.items():
        part, _, rest = name.partition("/")
        if part == "optimizer":
            owner, _, key = rest.rpartition("/")
            yield owner, key, tensor


def _check_shape(state: SavedState, name: str, shape: torch.Size) -> None:
    tensor = state.tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"the saved state lacks the tensor '{name}'")
    if tensor.shape != shape:
        raise CheckpointError(f"the saved state's tensor '{name}' has shape {tuple(tensor.shape)}, not {tuple(shape)}")


def train(
    config: TrainingConfig,
    *,
    corpus: Corpus | None = None,
    folder: str | Path | None = None,
    on_step: Callable[[StepRecord], object] | None = None,
    save_seconds: float = 60.0,
    save_steps: int | None = None,
) -> TrainingResult:
    """Train to the end of the schedule.

    With a folder the run survives: it holds log, state, profiles, and at the end the model (as ``probes.saving`` writes it)
    and the result. A folder that holds the same run, unfinished, is gone on with; a finished one is read and returned.

    Args:
        config: of the run.
        corpus: the text; built from ``config.corpus`` when None.
        folder: of the run, or None to keep everything in memory.
        on_step: called with every record, also with those of earlier processes; a true answer ends the run there.
        save_seconds: save when this long has passed since the last time.
        save_steps: save after every so many steps, whatever the time.

    Returns:
        The result.

    Raises:
        CheckpointError: if the folder holds another run.
        OutputError: if the folder cannot be written; what was saved is unharmed.
        TrainingInterrupted: after Ctrl-C or SIGTERM, once the state is saved (only with a folder).
    """
    if folder is None:
        trainer = Trainer(config, build_corpus(config.corpus) if corpus is None else corpus)
        return _Run(trainer, None, on_step, math.inf, None).go([])
    files = RunFolder(folder)
    if corpus is None:
        corpus = build_corpus(config.corpus, tokenizer_json=stored_tokenizer(files.path))
    if not files.is_finished:
        check_run(config, corpus)  # before the folder is made; a finished run is read on any machine
    with files.opened(config, {"content_hash": corpus.content_hash}):
        finished = files.result
        if finished is not None:
            return _read_result(config, files, finished, on_step)
        trainer = Trainer(config, corpus)
        if corpus.tokenizer_json is not None:
            files.write_bytes(_TOKENIZER, corpus.tokenizer_json.encode())
            files.write_bytes("tokenizer_config.json", _TOKENIZER_CONFIG)
        return _Run(trainer, files, on_step, save_seconds, save_steps).resume()


def stored_tokenizer(folder: Path) -> str | None:
    """The tokenizer that a run's folder holds, or None.

    Raises:
        CheckpointError: if it is damaged.
    """
    from probes.bpe import load_tokenizer

    path = folder / _TOKENIZER
    if not path.is_file():
        return None
    try:
        return load_tokenizer(path)
    except TextError as error:
        raise CheckpointError(f"the run's tokenizer is damaged: {error}; restore it, or name another folder") from error


def _read_result(
    config: TrainingConfig, files: RunFolder, stored: dict[str, Any], on_step: Callable[[StepRecord], object] | None
) -> TrainingResult:
    records = tuple(files.finished_records(stored["steps_done"]))
    for record in records:
        if on_step is not None:
            on_step(record)
    return TrainingResult(
        config=config,
        outcome=Outcome(stored["outcome"]),
        records=records,
        validation_loss=stored["validation_loss"],
        corpus=stored["corpus"],
        sessions=tuple(stored["sessions"]),
        provenance=stored["provenance"],
        folder=files.path,
    )


class _Run:
    """The loop around a trainer: records, saving, stopping."""

    def __init__(
        self,
        trainer: Trainer,
        files: RunFolder | None,
        on_step: Callable[[StepRecord], object] | None,
        save_seconds: float,
        save_steps: int | None,
    ) -> None:
        self.trainer, self.files, self.on_step = trainer, files, on_step
        self.save_seconds, self.save_steps = save_seconds, save_steps
        self.records: list[StepRecord] = []
        self.profiles: list[pd.DataFrame] = []
        self.outcome: Outcome | None = None
        self.sessions: list[dict[str, int]] = []
        self.saved_at = time.monotonic()

    def resume(self) -> TrainingResult:
        assert self.files is not None
        state, records = self.files.resume()
        if state is not None:
            self.trainer.restore(state)
            self.sessions = list(state.facts["sessions"])
        return self.go(records)

    def go(self, records: Sequence[StepRecord]) -> TrainingResult:
        self.sessions.append({"first_step": self.trainer.step + 1, "threads": torch.get_num_threads()})
        for record in records:
            self._note(record)
        with _stop_signals(enabled=self.files is not None) as asked:
            while self.outcome is None:
                record = self.trainer.advance()
                self._write(record)
                self._note(record)
                if asked.is_set() and self.outcome is None:
                    self._save()
                    raise TrainingInterrupted(
                        f"stopped after step {record.step} of {self.trainer.config.steps}; its state is saved"
                    )
                if self._is_time_to_save():
                    self._save()
        return self._finish()

    def _note(self, record: StepRecord) -> None:
        """Take a record in and decide whether it is the last."""
        self.records.append(record)
        stop = self.on_step(record) if self.on_step is not None else False
        if not math.isfinite(record.loss):
            self.outcome = Outcome.NON_FINITE
        elif record.step >= self.trainer.config.steps:
            self.outcome = Outcome.FINISHED
        elif stop:
            self.outcome = Outcome.STOPPED

    def _write(self, record: StepRecord) -> None:
        profile, self.trainer.profile = self.trainer.profile, None
        if self.files is None:
            self.profiles += [] if profile is None else [profile]
            return
        if profile is not None:
            write_profile(self.files.path, profile)
        self.files.append(record)

    def _is_time_to_save(self) -> bool:
        if self.files is None or self.outcome is not None:
            return False
        if self.save_steps is not None and self.trainer.step % self.save_steps == 0:
            return True
        return time.monotonic() - self.saved_at > self.save_seconds

    def _save(self) -> None:
        assert self.files is not None
        state = self.trainer.state()
        self.files.save(SavedState(state.tensors, state.facts | {"sessions": self.sessions}))
        self.saved_at = time.monotonic()

    def _finish(self) -> TrainingResult:
        assert self.outcome is not None
        if self.files is not None:
            self._save()
        result = TrainingResult(
            config=self.trainer.config,
            outcome=self.outcome,
            records=tuple(self.records),
            validation_loss=None if self.outcome is Outcome.NON_FINITE else self.trainer.validation_loss(),
            corpus=self.trainer.corpus.summary(),
            sessions=tuple(self.sessions),
            provenance=dict(provenance()),
            folder=None if self.files is None else self.files.path,
            profiles=tuple(self.profiles),
        )
        if self.files is not None:
            merge_profiles(self.files.path, self.trainer.step)
            tokenizer = "bytes" if self.trainer.corpus.tokenizer_json is None else _TOKENIZER
            save_model(self.trainer.model, self.files.path, tokenizer)
            self.files.write_json("result.json", result.to_dict())
            self.files.forget_state()
        return result


@contextmanager
def _stop_signals(*, enabled: bool) -> Iterator[threading.Event]:
    """Turn the first Ctrl-C or SIGTERM into a flag, so that the step under way is completed; a second one acts at once."""
    asked = threading.Event()
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        asked.set()
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
