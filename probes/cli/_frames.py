"""Frames as files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from probes.errors import OutputError
from probes.run_folder import RunFolder

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["write_frame"]


def write_frame(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame as its file's ending says, whole or not at all.

    Args:
        frame: of any columns.
        path: ``.csv`` or ``.parquet``, in an existing folder.

    Raises:
        OutputError: if the ending is another one, or the place cannot be written to.
    """
    buffer = io.BytesIO()
    if path.suffix == ".csv":
        frame.to_csv(buffer, index=False)
    elif path.suffix == ".parquet":
        frame.to_parquet(buffer, index=False)
    else:
        raise OutputError(f"cannot write '{path}': name a file that ends in .csv or .parquet")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write '{path}': its folder does not exist")
    RunFolder(path.parent).write_bytes(path.name, buffer.getvalue())
