"""Checks of what the text and the captions say about the models against the tables: depths, sizes, resolutions, settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

from figures.paper_places import Cause, Check, Comparison, Kind, Place, Reading, in_words, number_list
from figures.paper_tables import TABLES, PaperTables
from figures.printed_numbers import rounding_interval

__all__ = [
    "BestRateCheck",
    "DepthCheck",
    "EndpointsCheck",
    "GranularityCheck",
    "SettingCheck",
    "SizeCheck",
    "SpikeCheck",
    "StepCheck",
    "ToleratedCheck",
    "WarmupCheck",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthCheck(Check):
    """Depths, or their number, named in words or a caption against the depths of a table or of the text.

    "Layer" is read as the paper's footnote 1 says: sub-layers. Where counting blocks would reconcile the two, the comparison
    says so.

    Attributes:
        stated: depths as named.
        stated_where: where.
        table: whose column ``n_sublayers`` they are held against; empty if ``other`` is given.
        other: depths named elsewhere.
        other_where: where.
        count: the number of depths named, instead of the depths.
    """

    kind = Kind.DEPTH
    stated_where: str
    stated: tuple[int, ...] = ()
    table: str = ""
    other: tuple[int, ...] = ()
    other_where: str = ""
    count: int | None = None

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees if every depth named is one of the others, or the number of them is right."""
        depths = sorted({int(n) for n in tables.frame(self.table)["n_sublayers"]} if self.table else set(self.other))
        against = Reading(number_list(depths), TABLES[self.table].title if self.table else self.other_where)
        if self.count is not None:
            stated = Reading(f"{self.count} depths", self.stated_where)
            note = f"{self.count} of the {len(depths)} depths may be meant" if self.count < len(depths) else ""
            yield Comparison(stated, against, self.count == len(depths), note, Cause.WORDING if note else Cause.NUMBERS)
            return
        agrees = set(self.stated) <= set(depths)
        note = "" if agrees else self._blocks(depths)
        cause = Cause.WORDING if note else Cause.NUMBERS
        note = note if agrees or note else "counting blocks on one side does not reconcile them"
        yield Comparison(Reading(number_list(self.stated), self.stated_where), against, agrees, note, cause)

    def _blocks(self, depths: Sequence[int]) -> str:
        """On which side counting blocks reconciles the depths; nothing if on none."""
        if {2 * n for n in self.stated} <= set(depths):
            return _blocks(self.stated, self.stated_where)
        if set(self.stated) <= {2 * n for n in depths}:
            return _blocks(depths, TABLES[self.table].title if self.table else self.other_where)
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointsCheck(Check):
    """A range of depths named for a figure against the data in it.

    Attributes:
        table: of the data.
        first: the shallowest named, sub-layers.
        last: the deepest named, sub-layers.
    """

    kind = Kind.DEPTH
    table: str
    first: int
    last: int

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees if the data begin and end there."""
        depths = tables.frame(self.table)["n_sublayers"]
        found = (int(depths.min()), int(depths.max()))
        stated = Reading(f"{self.first} to {self.last}", f"description of {TABLES[self.table].title}")
        yield Comparison(stated, Reading(f"{found[0]} to {found[1]}", "its data"), found == (self.first, self.last))


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCheck(Check):
    """A rounded number of parameters against the count from Table 8.

    Attributes:
        printed: for example ``3`` for 3B; billions.
        shape: column of Table 8.
        n_sublayers: depth, attention and FFN counted separately.
        scheme: residual scheme; the schemes differ by their norms only.
    """

    kind = Kind.SIZE
    printed: str
    shape: str
    n_sublayers: int
    scheme: str

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees if the count rounds to the printed number; embedding and head left out, since no vocabulary is printed."""
        n = self._count(tables)
        depth = f"{self.n_sublayers // 2} blocks / {self.n_sublayers} sub-layers"
        against = Reading(f"{n / 1e9:.2f}B ({n})", f"counted: {depth} of Table 8, {self.shape}, without embedding and head")
        interval = rounding_interval(self.printed)
        yield Comparison(Reading(f"{self.printed}B", "the text"), against, interval.low <= n / 10**9 < interval.high)

    def _count(self, tables: PaperTables) -> int:
        from probes.config import ModelConfig, count_parameters

        width, ffn_width, n_heads, n_kv_heads = (
            int(Decimal(tables.printed("table8_model_config", hyper_parameter=name, shape=self.shape)))
            for name in ("hidden_dim", "intermediate_dim", "attention_heads", "kv_heads")
        )
        config = ModelConfig(
            scheme=self.scheme,
            n_blocks=self.n_sublayers // 2,
            width=width,
            ffn_width=ffn_width,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
        )
        return count_parameters(config) - 2 * config.vocab_size * width


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck(Check):
    """Each learning rate of Table 1 against the steps of the ramp it was read off."""

    kind = Kind.RESOLUTION

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees where the entry is the learning rate of a whole step, after the first and before the peak."""
        for row in tables.frame("table1_max_lr").itertuples():
            peak, steps = Decimal(str(row.peak_lr)), int(str(row.warmup_steps))
            step = Decimal(str(row.printed)) * steps / peak
            place = f"Table 1, {in_words('architecture', str(row.architecture))}, {row.n_sublayers} sub-layers"
            resolution = f"{peak / steps:.2e}"
            against = Reading(f"step {step.normalize():f} at {resolution} per step", f"ramp to {peak} in {steps} steps")
            whole = step == step.to_integral_value() and 0 < step < steps
            yield Comparison(Reading(str(row.printed), place), against, whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class GranularityCheck(Check):
    """Scores of a benchmark with few problems: only some percentages exist.

    Attributes:
        benchmark: its name in the tables.
        n_problems: how many it has.
    """

    kind = Kind.RESOLUTION
    benchmark: str
    n_problems: int

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees where some whole number of solved problems gives the printed percentage."""
        for table, printed, place in _scores(tables, self.benchmark):
            interval = rounding_interval(printed)
            solved = round(Decimal(printed) * self.n_problems / 100)
            nearest = min(
                (solved - 1, solved, solved + 1), key=lambda k: abs(Decimal(100 * k) / self.n_problems - Decimal(printed))
            )
            share = Decimal(100 * nearest) / self.n_problems
            agrees = interval.low <= share <= interval.high
            against = Reading(f"{share:.3f}", f"{nearest} of {self.n_problems} problems, the nearest share")
            yield Comparison(Reading(printed, f"{TABLES[table].title}, {place}"), against, agrees)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingCheck(Check):
    """A setting named in the text against a key column of a table.

    Attributes:
        stated: the values named.
        stated_where: where.
        table: the table.
        column: its key column.
        all_used: whether every value named must be there, besides no other one.
    """

    kind = Kind.SETTING
    stated: tuple[float, ...]
    stated_where: str
    table: str
    column: str
    all_used: bool = True

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees if the table has these values."""
        found = {float(value) for value in tables.frame(self.table)[self.column]}
        named = set(self.stated)
        stated = Reading(number_list(self.stated), self.stated_where)
        against = Reading(number_list(sorted(found)), f"{TABLES[self.table].title}, {self.column}")
        yield Comparison(stated, against, found == named if self.all_used else found <= named)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToleratedCheck(Check):
    """The learning rate that a model was trained at against the largest it tolerates.

    Attributes:
        peak_lr: of training.
        limit: place of the largest learning rate tolerated.
    """

    kind = Kind.SETTING
    peak_lr: str
    limit: Place

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees if training stayed at or below it."""
        limit = self.limit.reading(tables)
        agrees = Decimal(self.peak_lr) <= Decimal(limit.text)
        yield Comparison(Reading(self.peak_lr, "peak learning rate of training, training settings"), limit, agrees)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeCheck(Check):
    """The learning rate at which a figure shows a spike against the largest that the same model tolerates.

    Attributes:
        peak_lr: of the run that spikes.
        figure: that shows it.
        limit: place of the largest learning rate tolerated.
    """

    kind = Kind.SETTING
    peak_lr: str
    figure: str
    limit: Place

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees if it lies above what is tolerated."""
        limit = self.limit.reading(tables)
        spike = Reading(f"a spike at {self.peak_lr}", self.figure)
        yield Comparison(spike, limit, Decimal(self.peak_lr) > Decimal(limit.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRateCheck(Check):
    """The learning rate with the best average of a table against the largest that the same model tolerates.

    Attributes:
        table: with averages by peak learning rate.
        architecture: whose averages.
        limit: place of the largest learning rate tolerated.
    """

    kind = Kind.SETTING
    table: str
    architecture: str
    limit: Place

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees if the best one is tolerated."""
        rows = tables.frame(self.table, benchmark="Average", architecture=self.architecture)
        best = rows.sort_values("value", kind="stable").iloc[-1]
        scheme = in_words("architecture", self.architecture)
        where = f"{TABLES[self.table].title}, {scheme}: peak learning rate of the best average ({best['printed']})"
        limit = self.limit.reading(tables)
        yield Comparison(Reading(f"{best['peak_lr']:g}", where), limit, bool(best["peak_lr"] <= float(limit.text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupCheck(Check):
    """The learning rate that a figure names against what a linear warm-up has reached at the last step that it shows.

    Attributes:
        peak_lr: named.
        figure: that names it.
        shown_steps: the last step shown.
        warmup_steps: of the warm-up.
    """

    kind = Kind.SETTING
    peak_lr: str
    figure: str
    shown_steps: int
    warmup_steps: int

    def compare(self, tables: PaperTables) -> Iterator[Comparison]:
        """Agrees if the figure reaches the end of the warm-up."""
        share = Decimal(min(self.shown_steps, self.warmup_steps)) / self.warmup_steps
        reached = f"{(Decimal(self.peak_lr) * share).normalize():.3g}, {100 * share:.0f} % of it"
        against = Reading(reached, f"step {self.shown_steps} of a linear warm-up over {self.warmup_steps} steps")
        yield Comparison(Reading(self.peak_lr, self.figure), against, share == 1)


def _blocks(n_blocks: Sequence[int], where: str) -> str:
    n_sublayers = number_list([2 * n for n in n_blocks])
    return f"counting blocks in {where} reconciles them: {number_list(n_blocks)} blocks are {n_sublayers} sub-layers"


def _scores(tables: PaperTables, benchmark: str) -> Iterator[tuple[str, str, str]]:
    """(table, printed, keys in words) of every score of a benchmark."""
    for table, frame in tables.frames.items():
        if "benchmark" not in frame.columns:
            continue
        keys = [name for name in TABLES[table].keys if name != "shots"]
        for row in frame[frame["benchmark"] == benchmark].to_dict("records"):
            yield table, str(row["printed"]), ", ".join(in_words(name, row[name]) for name in keys)
