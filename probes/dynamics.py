r"""What the gradients do across depth while a model trains: one profile over all sub-layers at chosen optimizer steps.

Each profile takes one forward and one backward pass more, with everything read on the way: about the time of two optimizer
steps. It is taken on the step's own first micro-batch and the weights before the update; the training is not touched by it.

Metrics, one value per sub-layer (rows of kind ``attention`` and ``ffn``; where a metric belongs to the residual stream it is
taken at the sub-layer's input, and a last row of kind ``output`` has the stream after the last sub-layer):

========================== ===================== ====================================================================
metric                     unit                  meaning
========================== ===================== ====================================================================
stream_grad_norm           nats/token per unit   norm of the loss gradient with respect to the stream
shortcut_grad_norm         nats/token per unit   the same with every branch held constant on the way down
stream_rms                 1                     root mean square of the stream
token_cosine               1                     mean cosine between the stream at different positions of a sequence
branch_ratio               1                     root mean square of what the branch adds, over that of the stream
param_grad_norm            nats/token per unit   norm of the gradient of the sub-layer's parameters, before clipping
update_to_weight           1                     norm of the optimizer's update over that of the weights it was added to
========================== ===================== ====================================================================
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from probes.errors import OutputError
from probes.gradient_capture import Capture, capture
from probes.layout import ResidualLayout
from probes.text import TokenBatch

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "COLUMNS",
    "Profile",
    "gradient_profile",
    "join_profiles",
    "merge_profiles",
    "read_profiles",
    "updates",
    "write_profile",
]

COLUMNS = ("scheme", "n_sublayers", "seed", "step", "sublayer", "kind", "metric", "value", "unit")
_GRADIENT_UNIT = "nats/token per unit"
_MERGED = "dynamics.parquet"
_PARTS = "dynamics"

_Row: TypeAlias = "tuple[int, str, str, float, str]"
"""Sub-layer, kind, metric, value, unit."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile over depth.

    Attributes:
        rows: sub-layer (0-based; -1 for the whole model), kind, metric, value, unit.
    """

    rows: tuple[_Row, ...]

    def to_frame(self, *, scheme: str, n_sublayers: int, seed: int, step: int) -> pd.DataFrame:
        """Tidy rows.

        Args:
            scheme: name.
            n_sublayers: attention and FFN counted separately.
            seed: of the run.
            step: 1-based optimizer step.

        Returns:
            Columns :data:`COLUMNS`.
        """
        import pandas as pd

        frame = pd.DataFrame(list(self.rows), columns=list(COLUMNS[4:]))
        return frame.assign(scheme=scheme, n_sublayers=n_sublayers, seed=seed, step=step)[list(COLUMNS)]


def gradient_profile(model: nn.Module, layout: ResidualLayout, batch: TokenBatch) -> Profile:
    """The profile of one batch, the update left out.

    Args:
        model: holds no gradients; its weights are not changed.
        layout: where its residual stream is.
        batch: inputs and targets, shape (B, T).

    Returns:
        Rows of every metric but ``update_to_weight``, and the loss (sub-layer -1, kind ``model``).
    """
    reading = capture(model, layout, batch)
    found = list(_stream_rows(reading, layout)) + list(_sublayer_rows(model, reading, layout))
    values = torch.stack([value.detach().double() for *_, value, _ in found]).tolist()  # one transfer from the device
    rows = [(*row[:3], value, row[4]) for row, value in zip(found, values, strict=True)]
    return Profile(((-1, "model", "loss", float(reading.loss), "nats/token"), *rows))


_Found: TypeAlias = "tuple[int, str, str, Tensor, str]"


def _stream_rows(reading: Capture, layout: ResidualLayout) -> Iterator[_Found]:
    metrics = (
        ("stream_grad_norm", reading.stream_grad, _GRADIENT_UNIT),
        ("shortcut_grad_norm", reading.shortcut_grad, _GRADIENT_UNIT),
        ("stream_rms", reading.stream_rms, "1"),
        ("token_cosine", reading.token_cosine, "1"),
    )
    places = [(i, s.kind.value, s.boundary_in) for i, s in enumerate(layout.sublayers)]
    places.append((len(layout.sublayers), "output", layout.sublayers[-1].boundary_out))
    for index, kind, boundary in places:
        for metric, values, unit in metrics:
            if boundary in values:
                yield index, kind, metric, values[boundary], unit


def _sublayer_rows(model: nn.Module, reading: Capture, layout: ResidualLayout) -> Iterator[_Found]:
    for index, (sublayer, parameters) in enumerate(zip(layout.sublayers, _owned(model, layout), strict=True)):
        kind = sublayer.kind.value
        if index in reading.branch_rms:
            ratio = reading.branch_rms[index] / reading.stream_rms[sublayer.boundary_in]
            yield index, kind, "branch_ratio", ratio, "1"
        norms = [reading.parameter_grad[p].double() for p in parameters if p in reading.parameter_grad]
        if norms:
            yield index, kind, "param_grad_norm", torch.linalg.vector_norm(torch.stack(norms)), _GRADIENT_UNIT


def _owned(model: nn.Module, layout: ResidualLayout) -> list[list[nn.Parameter]]:
    """The parameters of each sub-layer."""
    return [[p for name in s.modules for p in model.get_submodule(name).parameters()] for s in layout.sublayers]


@contextlib.contextmanager
def updates(model: nn.Module, layout: ResidualLayout) -> Iterator[list[_Row]]:
    """Measure what the optimizer changes inside the block.

    Args:
        model: its sub-layers' weights are copied for as long as the block runs.
        layout: which parameters belong to which sub-layer.

    Yields:
        A list that holds one ``update_to_weight`` row per sub-layer after the block.
    """
    rows: list[_Row] = []
    owned = _owned(model, layout)
    before = [[p.detach().clone() for p in parameters] for parameters in owned]
    yield rows
    with torch.no_grad():
        ratios = torch.stack([_relative_change(*pair) for pair in zip(before, owned, strict=True)]).tolist()
    for index, (sublayer, ratio) in enumerate(zip(layout.sublayers, ratios, strict=True)):
        rows.append((index, sublayer.kind.value, "update_to_weight", ratio, "1"))


def _relative_change(before: Sequence[Tensor], after: Sequence[nn.Parameter]) -> Tensor:
    changes = torch.stack(torch._foreach_norm(torch._foreach_sub(list(after), list(before))))
    weights = torch.stack(torch._foreach_norm(list(before)))
    ratio: Tensor = torch.linalg.vector_norm(changes.double()) / torch.linalg.vector_norm(weights.double())
    return ratio


def write_profile(folder: Path, frame: pd.DataFrame) -> None:
    """Add one profile to a run: a file of its own, whole or not at all; writing the same step again replaces it.

    Args:
        folder: of the run.
        frame: of one step.

    Raises:
        OutputError: if it cannot be written; profiles written before are unharmed.
    """
    path = folder / _PARTS / f"step_{int(frame['step'].iloc[0]):08d}.parquet"
    _write(frame, path)


def read_profiles(folder: str | Path) -> pd.DataFrame:
    """All profiles of a run, in the order of the steps; an empty frame where there is none.

    A run that could not be finished after its profiles were merged may have gone on: single ones are newer than merged ones.
    """
    import pandas as pd

    folder = Path(folder)
    frames = [pd.read_parquet(path) for path in sorted((folder / _PARTS).glob("step_*.parquet"))]
    if (folder / _MERGED).exists():
        merged, newer = pd.read_parquet(folder / _MERGED), [int(frame["step"].iloc[0]) for frame in frames]
        frames.insert(0, merged[~merged["step"].isin(newer)])
    return join_profiles([frame for frame in frames if len(frame)]).sort_values("step", kind="stable", ignore_index=True)


def join_profiles(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Several frames as one; an empty one with the right columns where there is none."""
    import pandas as pd

    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(COLUMNS))


def merge_profiles(folder: Path, last_step: int) -> None:
    """Put all profiles up to a step into one file, ``dynamics.parquet``, and remove the single ones.

    Args:
        folder: of the run.
        last_step: profiles of later steps belong to an abandoned continuation and are dropped.

    Raises:
        OutputError: if the file cannot be written; the single ones then stay.
    """
    frame = read_profiles(folder)
    if frame.empty:
        return
    _write(frame[frame["step"] <= last_step].reset_index(drop=True), folder / _MERGED)
    for path in (folder / _PARTS).glob("step_*.parquet"):
        path.unlink()
    with contextlib.suppress(OSError):
        (folder / _PARTS).rmdir()


def _write(frame: pd.DataFrame, path: Path) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            frame.to_parquet(file, index=False)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror or error}; profiles written before are unharmed") from error
