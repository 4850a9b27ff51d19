"""Layer removal on a checkpoint of any size: the sweep of :mod:`probes.removal_sweep` with one block of weights in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from probes.layer_removal import Progress, measure_layer_removal
from probes.removal_result import LayerRemoval
from probes.removal_sweep import StreamTable
from probes.removal_units import UnitKind
from probes.streaming.model import StreamedCheckpoint
from probes.streaming.run_state import MappedStreams, RunState
from probes.text import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KeptSweep", "measure_streamed_layer_removal"]


def measure_streamed_layer_removal(
    streamed: StreamedCheckpoint,
    batches: Sequence[TokenBatch],
    *,
    unit: UnitKind | str = UnitKind.BLOCK,
    span: int = 1,
    remove: Sequence[int] = (),
    documents: Sequence[Sequence[int]] | None = None,
    threshold: float = 0.1,
    estimates: bool = True,
    taylor: bool = False,
    joint: bool = False,
    state: RunState | None = None,
    max_memory: int | None = None,
    spill_folder: Path | None = None,
    tokens_per_call: int | None = None,
    n_resamples: int = 2000,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> LayerRemoval:
    """The loss without each unit, with one block of weights in memory: one read of the weights.

    Args:
        streamed: the checkpoint.
        batches: inputs and targets of shape (B, T), all carried together.
        unit: what a step is: ``block``, ``sublayer``, ``attn`` or ``ffn``.
        span: consecutive steps removed together, at every place.
        remove: one further set of steps to remove together.
        documents: per batch, the document of each sequence, for the intervals.
        threshold: nats per token, below which a unit is called cheap.
        estimates: whether to compute the cheap numbers of the forward pass too: no more to read.
        taylor: whether to add the first-order estimate: two more reads of the weights.
        joint: whether to measure how many of the cheap units can go together: one more read.
        state: keeps the streams and finished blocks on disk, for a run that can be interrupted; estimates that need a
            backward pass are not kept.
        max_memory: bytes that streams without a state may take in memory; beyond that they go to disk.
        spill_folder: where; beside the state where there is one.
        tokens_per_call: tokens that go through a block at once.
        n_resamples: of the bootstrap.
        seed: of the bootstrap.
        on_progress: called with a stage, its steps done and its steps in all.

    Returns:
        The same result as :func:`probes.layer_removal.measure_layer_removal` gives.

    Raises:
        CheckpointError: if a file of the checkpoint changes meanwhile.
        OutputError: if the streams or the state do not fit onto the disk.

    Status: exact.
    """
    return measure_layer_removal(
        streamed.model,
        batches,
        layout=streamed.layout,
        unit=unit,
        span=span,
        remove=remove,
        documents=documents,
        threshold=threshold,
        estimates=estimates,
        taylor=taylor,
        joint=joint,
        max_memory=max_memory,
        spill_folder=state.folder if spill_folder is None and state is not None else spill_folder,
        tokens_per_call=tokens_per_call,
        resident=streamed.stream.resident,
        device=streamed.device,
        keeper=None if state is None else KeptSweep(state),
        joint_keeper=None if state is None or not joint else KeptSweep(state.part("together")),
        n_resamples=n_resamples,
        seed=seed,
        on_progress=on_progress,
    )


class KeptSweep:
    """A sweep's streams on disk.

    A block changes them in place, so they are copied first: two steps of the run's state per block, the copy and the change.
    A run killed in the middle of a block starts that block again from the copy.

    Args:
        state: of the run; nothing else may add steps to it.
    """

    def __init__(self, state: RunState) -> None:
        self.state = state
        self._copy: MappedStreams | None = None

    def open(self, shapes: Sequence[tuple[int, ...]], n_streams: int, dtype: torch.dtype) -> tuple[StreamTable, int]:
        """The streams as after the last finished block, and its number."""
        streams, self._copy = self.state.all_streams(("variants", "before_block"), shapes, n_streams, dtype)
        if self.state.n_steps % 2:
            with self.state.restoring():
                self._restore(streams, len(shapes), self.state.records[-1])
        return streams, self.state.n_steps // 2

    @property
    def watched(self) -> Mapping[str, Any]:
        """What the watcher knew after the last finished block."""
        return self.state.tensors

    def before_block(self, streams: StreamTable, n_batches: int, n_alive: int) -> None:
        """Copy what the block will change, unless the copy is there already."""
        assert self._copy is not None
        if self.state.n_steps % 2:
            return
        for i in range(n_batches):
            self._copy[i][:n_alive] = streams[i][:n_alive]
        self.state.finish_step({"copied": n_alive}, self.state.tensors)

    def after_block(self, watched: Mapping[str, Any]) -> None:
        """The streams count from now on, and so does what the watcher has seen."""
        self.state.finish_step({"passed": self.state.n_steps // 2}, watched)

    def _restore(self, streams: MappedStreams, n_batches: int, record: Mapping[str, int]) -> None:
        assert self._copy is not None
        for i in range(n_batches):
            streams[i][: record["copied"]] = self._copy[i][: record["copied"]]
