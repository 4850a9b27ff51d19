"""The paper's tables and figure data as typed, tidy frames: one printed number per row.

Source: Chen & Wei 2026, arXiv:2601.19895 (v2): Tables 1 to 8 and the numbers printed in Figs. 1b and 1c. Scores are percent,
learning rates absolute; the column ``layers`` of a table counts sub-layers (attention and FFN apart, the paper's footnote 1)
and is called ``n_sublayers`` here. Column ``printed`` keeps each number as it stands, since its last digit is its precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from probes.errors import KeelError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["PUBLISHED", "TABLES", "Key", "PaperTables", "PaperTablesError", "TableFormat", "load_tables"]

PUBLISHED = Path(__file__).with_name("published")
"""The folder with the published tables as CSV."""

Key: TypeAlias = "str | int | float"

_MOST_PERCENT = 100


class PaperTablesError(KeelError):
    """A table is missing, has other columns, or lacks a number that is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFormat:
    """How one file is laid out.

    Attributes:
        title: how the paper calls it.
        keys: key columns of the tidy frame and their types.
        value: the column with the printed number.
        unit: of the printed number.
    """

    title: str
    keys: Mapping[str, type[str] | type[int] | type[float]]
    value: str
    unit: str = "percent"


_BENCHMARK: Mapping[str, type[str] | type[int] | type[float]] = {"benchmark": str, "shots": str, "architecture": str}
_RAMP: Mapping[str, type[str] | type[int] | type[float]] = {
    "architecture": str,
    "n_sublayers": int,
    "warmup_steps": int,
    "peak_lr": float,
}
_DEPTH: Mapping[str, type[str] | type[int] | type[float]] = {"n_sublayers": int}

TABLES: Mapping[str, TableFormat] = MappingProxyType(
    {
        "table1_max_lr": TableFormat(title="Table 1", keys=_RAMP, value="max_lr", unit="learning rate"),
        "table2_learning_rate": TableFormat(title="Table 2", keys={**_BENCHMARK, "peak_lr": float}, value="score"),
        "table3_depth_scaling": TableFormat(title="Table 3", keys={**_BENCHMARK, **_DEPTH}, value="score"),
        "table4_data_scaling": TableFormat(
            title="Table 4", keys={**_BENCHMARK, "tokens_billion": int, "peak_lr": float}, value="score"
        ),
        "table5_deeper_vs_wider": TableFormat(title="Table 5", keys={**_BENCHMARK, **_DEPTH, "hidden_dim": int}, value="score"),
        "table6_pretraining_1t": TableFormat(title="Table 6", keys={**_BENCHMARK, "peak_lr": float}, value="score"),
        "table7_sft": TableFormat(title="Table 7", keys=_BENCHMARK, value="score"),
        "table8_model_config": TableFormat(
            title="Table 8", keys={"hyper_parameter": str, "shape": str}, value="value", unit="as named"
        ),
        "figure1b_capabilities": TableFormat(
            title="Fig. 1b", keys={"capability": str, "architecture": str}, value="average_score"
        ),
        "figure1c_depth_scaling": TableFormat(title="Fig. 1c", keys={"architecture": str, **_DEPTH}, value="average_score"),
    }
)
"""File name without suffix -> its layout."""


@dataclass(frozen=True, slots=True)
class PaperTables:
    """All tables, by the names of :data:`TABLES`.

    Attributes:
        frames: tidy frames with the key columns, ``printed`` (text) and ``value`` (float).
    """

    frames: Mapping[str, pd.DataFrame]

    def frame(self, table: str, **where: Key) -> pd.DataFrame:
        """The rows of a table whose key columns have these values.

        Args:
            table: name in :data:`TABLES`.
            **where: key column -> value.

        Returns:
            At least one row, in the paper's order.

        Raises:
            PaperTablesError: if there is no such row.
        """
        rows = self.frames[table]
        for column, value in where.items():
            rows = rows[rows[column] == value]
        if rows.empty:
            wanted = ", ".join(f"{column} {value}" for column, value in where.items())
            raise PaperTablesError(f"{TABLES[table].title} ({table}.csv) has no row with {wanted}")
        return rows

    def printed(self, table: str, **where: Key) -> str:
        """The one number at these keys, as printed.

        Raises:
            PaperTablesError: if there is no such row or more than one.
        """
        rows = self.frame(table, **where)
        if len(rows) > 1:
            raise PaperTablesError(f"{TABLES[table].title} ({table}.csv) has {len(rows)} rows with {where}; one is needed")
        return str(rows["printed"].iloc[0])


def load_tables(folder: Path = PUBLISHED) -> PaperTables:
    """Read every table.

    Args:
        folder: with one CSV per name in :data:`TABLES`; the published ones by default.

    Returns:
        Typed, tidy frames.

    Raises:
        PaperTablesError: if a file is missing, has other columns, a number that is none, or a row twice.

    Example:
        >>> load_tables().printed("table1_max_lr", architecture="keel", n_sublayers=64)
        '0.0101'
    """
    return PaperTables(MappingProxyType({name: _read(folder / f"{name}.csv", layout) for name, layout in TABLES.items()}))


def _read(path: Path, layout: TableFormat) -> pd.DataFrame:
    import pandas as pd

    try:
        raw = pd.read_csv(path, dtype=str, keep_default_na=False).rename(columns={"layers": "n_sublayers"})
    except (OSError, ValueError) as error:  # pandas' parser errors are ValueErrors
        raise PaperTablesError(f"cannot read '{path}': {error}; {layout.title} is expected there as CSV") from error
    if "narrow" in raw.columns:  # Table 8 has a column per shape
        raw = raw.melt(id_vars="hyper_parameter", var_name="shape", value_name="value")
    columns = [*layout.keys, layout.value]
    if list(raw.columns) != columns:
        raise PaperTablesError(f"'{path}' has the columns {', '.join(raw.columns)}; {layout.title} has {', '.join(columns)}")
    frame = pd.DataFrame({name: _typed(raw[name], kind, path) for name, kind in layout.keys.items()})
    printed = [_decimal(text, layout, path, row) for row, text in zip(raw.values.tolist(), raw[layout.value], strict=True)]
    frame["printed"] = printed
    frame["value"] = frame["printed"].astype(float)
    twice = frame[frame.duplicated(list(layout.keys))]
    if not twice.empty:
        keys = ", ".join(str(twice.iloc[0][name]) for name in layout.keys)
        raise PaperTablesError(f"'{path}' has more than one row for {keys}")
    return frame


def _typed(column: pd.Series[str], kind: type[str] | type[int] | type[float], path: Path) -> pd.Series:
    try:
        return column.astype(kind)
    except ValueError as error:
        raise PaperTablesError(f"'{path}', column {column.name}: {error}; {kind.__name__} is needed") from error


def _decimal(text: str, layout: TableFormat, path: Path, row: Sequence[str]) -> str:
    """The text, if it is a finite decimal number, and a possible one where it is a percentage."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite():
        raise PaperTablesError(f"'{path}' has '{text}' where a number belongs, in the row '{','.join(row)}'")
    if layout.unit == "percent" and not 0 <= number <= _MOST_PERCENT:
        raise PaperTablesError(f"'{path}' has {text} where a percentage from 0 to 100 belongs, in the row '{','.join(row)}'")
    return text
