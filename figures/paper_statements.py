"""Every statement of the paper that its own tables can be held against, one frozen check each.

Source: Chen & Wei 2026, arXiv:2601.19895 (v2). ``source`` says where the paper makes the statement; "implied" marks what a
table says by its form (an average is the mean of its column). A ``premise`` marks what the tables do not print and what would
have to be so for a difference to be a contradiction. Which statement fails is written nowhere: running the checks finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from figures.paper_check_numbers import (
    GainCheck,
    GroupCheck,
    GrowthCheck,
    MeanCheck,
    OrdersCheck,
    PercentCheck,
    SameNumbersCheck,
    ShotsCheck,
)
from figures.paper_check_settings import (
    BestRateCheck,
    DepthCheck,
    EndpointsCheck,
    GranularityCheck,
    SettingCheck,
    SizeCheck,
    SpikeCheck,
    StepCheck,
    ToleratedCheck,
    WarmupCheck,
)
from figures.paper_places import Check, Column, Place, average_column, combinations
from figures.paper_tables import Key

__all__ = ["CHECKS"]

_BOTH = ("pre_ln", "keel")
_DEPTHS = (64, 128, 512, 1024)
_BENCHMARKS = (
    "Average",
    "CMMLU",
    "C-Eval",
    "MMLU",
    "ARC-Easy",
    "ARC-Challenge",
    "HellaSwag",
    "LAMBADA",
    "PIQA",
    "AGI-Eval",
    "Winogrande",
    "CommonsenseQA",
    "GSM-8K",
    "HumanEval",
    "MBPP",
)
_CAPABILITIES = {
    "multilingual": ("CMMLU", "C-Eval"),
    "general_knowledge": (*_BENCHMARKS[3:12],),
    "math_and_code": ("GSM-8K", "HumanEval", "MBPP"),
}
"""Which benchmarks a bar of Fig. 1b stands for, by what the benchmarks test: Chinese; mathematics and code; the rest."""

_AVERAGES: dict[str, tuple[dict[str, Sequence[Key]], ...]] = {
    "table2_learning_rate": ({"architecture": _BOTH, "peak_lr": (0.0015, 0.003, 0.006)},),
    "table3_depth_scaling": ({"architecture": _BOTH, "n_sublayers": _DEPTHS},),
    "table4_data_scaling": ({"architecture": _BOTH, "tokens_billion": (10, 40)},),
    "table5_deeper_vs_wider": (
        {"architecture": _BOTH, "n_sublayers": (512,), "hidden_dim": (1024,)},
        {"architecture": ("pre_ln",), "n_sublayers": (128,), "hidden_dim": (2048,)},
    ),
    "table6_pretraining_1t": ({"architecture": _BOTH},),
    "table7_sft": ({"architecture": _BOTH},),
}
"""Which columns the tables have."""


def _average(table: str, where: tuple[tuple[str, Key], ...]) -> Place:
    return Place(table, (("benchmark", "Average"), *where))


def _name(where: tuple[tuple[str, Key], ...]) -> str:
    return "-".join(str(value) for _, value in where)


def _columns() -> Iterator[tuple[str, tuple[tuple[str, Key], ...]]]:
    for table, groups in _AVERAGES.items():
        for group in groups:
            for where in combinations(**group):
                yield table, where


def _averages() -> Iterator[Check]:
    for table, where in _columns():
        place = _average(table, where)
        yield MeanCheck(
            id=f"{table.split('_')[0]}-average-{_name(where)}",
            statement="the average is the mean of the benchmarks above it",
            source="implied by the table",
            place=place,
            column=average_column(place),
        )


def _gains() -> Iterator[Check]:
    """What Keel gains on average, wherever a table has a Pre-LN column beside it."""
    for table, where in _columns():
        if where[0][1] == "keel":
            ours, baseline = (_average(table, (("architecture", name), *where[1:])) for name in ("keel", "pre_ln"))
            yield GainCheck(
                id=f"{table.split('_')[0]}-gain-{_name(where)}",
                statement="Keel's gain in the averages is its gain in the benchmarks",
                source="implied by the table",
                ours=ours,
                baseline=baseline,
                our_column=average_column(ours),
                baseline_column=average_column(baseline),
            )


def _figure_1b() -> Iterator[Check]:
    table = "table6_pretraining_1t"
    for capability, benchmarks in _CAPABILITIES.items():
        bars = [Place("figure1b_capabilities", (("capability", capability), ("architecture", name))) for name in _BOTH]
        columns = [Column(table, (("architecture", name),), benchmarks) for name in _BOTH]
        for name, bar, column in zip(_BOTH, bars, columns, strict=True):
            yield GroupCheck(
                id=f"figure1b-{capability}-{name}",
                statement="the bar is the mean of its benchmarks in Table 6",
                source="Fig. 1b; the benchmarks by what they test",
                place=bar,
                column=column,
            )
        yield GainCheck(
            id=f"figure1b-gain-{capability}",
            statement="Keel's gain in the figure is its gain in Table 6",
            source="Fig. 1b; the benchmarks by what they test",
            ours=bars[1],
            baseline=bars[0],
            our_column=columns[1],
            baseline_column=columns[0],
        )
    for name in _BOTH:
        bar = Place("figure1b_capabilities", (("capability", "overall"), ("architecture", name)))
        yield SameNumbersCheck(
            id=f"figure1b-overall-{name}",
            statement="the overall bar is the average of Table 6",
            source="Fig. 1b",
            pairs=((bar, _average(table, (("architecture", name),))),),
        )


def _figure_1c() -> Iterator[Check]:
    for where in combinations(architecture=_BOTH, n_sublayers=_DEPTHS):
        yield SameNumbersCheck(
            id=f"figure1c-{_name(where)}",
            statement="the point is the average of Table 3",
            source="Fig. 1c",
            pairs=((Place("figure1c_depth_scaling", where), _average("table3_depth_scaling", where)),),
        )
    for depth in _DEPTHS:
        ours, baseline = ((("architecture", name), ("n_sublayers", depth)) for name in ("keel", "pre_ln"))
        yield GainCheck(
            id=f"figure1c-gain-{depth}",
            statement="Keel's gain in the figure is its gain in Table 3",
            source="Fig. 1c",
            ours=Place("figure1c_depth_scaling", ours),
            baseline=Place("figure1c_depth_scaling", baseline),
            our_column=Column("table3_depth_scaling", ours),
            baseline_column=Column("table3_depth_scaling", baseline),
        )
    yield EndpointsCheck(
        id="figure1c-depths",
        statement="the figure shows depths 64 to 1,024",
        source="Fig. 1c",
        table="figure1c_depth_scaling",
        first=64,
        last=1024,
    )


def _same_runs() -> Iterator[Check]:
    for name in _BOTH:
        deep = (("architecture", name), ("n_sublayers", 512))
        deep_narrow = Column("table5_deeper_vs_wider", (*deep, ("hidden_dim", 1024)))
        at_6e3 = Column("table2_learning_rate", (("architecture", name), ("peak_lr", 0.006)))
        yield SameNumbersCheck(
            id=f"table2-table5-{name}",
            statement="512 sub-layers are trained at 6e-3: Table 5's deep model is Table 2's at that learning rate",
            source="training settings, peak learning rates by depth",
            pairs=tuple((at_6e3.place(benchmark), deep_narrow.place(benchmark)) for benchmark in _BENCHMARKS),
        )
        yield SameNumbersCheck(
            id=f"table3-table5-{name}",
            statement="512 sub-layers are trained at 6e-3: Table 3's model of that depth is Table 5's deep one",
            source="training settings, peak learning rates by depth",
            premise="width and training tokens of Table 3 are those of Table 5; the tables do not print them",
            pairs=tuple(
                (Column("table3_depth_scaling", deep).place(benchmark), deep_narrow.place(benchmark))
                for benchmark in _BENCHMARKS
            ),
        )
    for benchmark in (*_BENCHMARKS[1:],):
        yield ShotsCheck(
            id=f"shots-{benchmark}",
            statement="a benchmark is given with the same number of examples in every table",
            source="implied by the tables",
            benchmark=benchmark,
        )


def _depths() -> Iterator[Check]:
    footnote = "footnote 1: a layer is a sub-layer unless said otherwise"
    yield DepthCheck(
        id="table1-caption",
        statement="Table 1's caption names a depth that the table has",
        source=f"caption of Table 1; {footnote}",
        stated=(256,),
        stated_where="caption of Table 1",
        table="table1_max_lr",
    )
    yield DepthCheck(
        id="figure4-captions",
        statement="the captions of Figs. 4a and 4b name the depths of the text",
        source=f"captions of Figs. 4a, 4b; {footnote}",
        stated=(256, 512),
        stated_where="captions of Figs. 4a, 4b",
        other=(512, 1024),
        other_where="text on Fig. 4",
    )
    yield DepthCheck(
        id="figure5-captions",
        statement="the captions of Fig. 5 name the depth of Table 4",
        source=f"captions of Fig. 5; {footnote}",
        stated=(512,),
        stated_where="captions of Fig. 5",
        other=(256,),
        other_where="Table 4",
    )
    yield DepthCheck(
        id="figure8-captions",
        statement="the captions of Fig. 8 name the depths of Table 5",
        source=f"captions of Fig. 8; {footnote}",
        stated=(256, 64),
        stated_where="captions of Fig. 8",
        table="table5_deeper_vs_wider",
    )
    yield DepthCheck(
        id="section5.3-three",
        statement="Section 5.3 compares three depths",
        source="Section 5.3",
        count=3,
        stated_where="Section 5.3, in words",
        table="table3_depth_scaling",
    )
    yield DepthCheck(
        id="table3-depths",
        statement="the depths that the text gives a peak learning rate are in Table 3",
        source="training settings, peak learning rates by depth",
        stated=_DEPTHS,
        stated_where="training settings",
        table="table3_depth_scaling",
    )


def _sizes() -> Iterator[Check]:
    for scheme in _BOTH:
        yield SizeCheck(
            id=f"size-narrow-512-{scheme}",
            statement="512 sub-layers of the narrow shape are the paper's 3B model",
            source="the text's 3B; Table 8",
            printed="3",
            shape="narrow",
            n_sublayers=512,
            scheme=scheme,
        )
    yield SizeCheck(
        id="size-wide-128-pre_ln",
        statement="the wide model beside it in Table 5 has 3B parameters as well",
        source="Tables 5 and 8",
        premise="deeper and wider are compared at one size",
        printed="3",
        shape="wide",
        n_sublayers=128,
        scheme="pre_ln",
    )


def _settings() -> Iterator[Check]:
    text = "Section 5.1"
    for column, value in (("warmup_steps", 5000.0), ("peak_lr", 5e-2)):
        yield SettingCheck(
            id=f"table1-{column.replace('_', '-')}",
            statement="the ramp goes from 0 to 5e-2 over 5,000 steps",
            source=text,
            stated=(value,),
            stated_where=text,
            table="table1_max_lr",
            column=column,
        )
    yield SettingCheck(
        id="table4-learning-rates",
        statement="learning rates on FineWeb-EDU are chosen from {1, 1.5, 3, 4.5}e-3",
        source="training settings of FineWeb-EDU",
        stated=(1e-3, 1.5e-3, 3e-3, 4.5e-3),
        stated_where="training settings",
        table="table4_data_scaling",
        column="peak_lr",
        all_used=False,
    )
    yield SettingCheck(
        id="table4-tokens",
        statement="FineWeb-EDU runs see 10B or 40B tokens",
        source="training settings of FineWeb-EDU; Fig. 5",
        stated=(10.0, 40.0),
        stated_where="training settings",
        table="table4_data_scaling",
        column="tokens_billion",
    )
    yield SettingCheck(
        id="table5-widths",
        statement="the models are 1,024 or 2,048 wide",
        source="training settings; Table 8",
        stated=(1024.0, 2048.0),
        stated_where="training settings",
        table="table5_deeper_vs_wider",
        column="hidden_dim",
    )
    for name, n_sublayers, peak_lr in (
        ("pre_ln", 64, "9e-3"),
        ("keel", 64, "9e-3"),
        ("pre_ln", 512, "6e-3"),
        ("keel", 512, "6e-3"),
    ):
        yield ToleratedCheck(
            id=f"tolerated-{name}-{n_sublayers}",
            statement="a model is trained at a learning rate that it tolerates",
            source="training settings, peak learning rates by depth; Table 1",
            premise="the limit of Table 1, on a ramp to 5e-2 in 5,000 steps, also holds on training's warm-up of 2,500 steps",
            peak_lr=peak_lr,
            limit=_max_lr(name, n_sublayers),
        )
    yield SpikeCheck(
        id="figure4-spike",
        statement="Pre-LN spikes at a learning rate above the one that it tolerates",
        source="Fig. 4; Table 1",
        premise="Fig. 4's spike is a divergence, and the limit of Table 1, on a ramp to 5e-2 in 5,000 steps, also holds there",
        peak_lr="4.5e-3",
        figure="Fig. 4, Pre-LN, 512 sub-layers (a caption's 256 blocks)",
        limit=_max_lr("pre_ln", 512),
    )
    yield BestRateCheck(
        id="table2-best-rate",
        statement="Pre-LN's best learning rate is one that it tolerates",
        source="Tables 1 and 2",
        premise="Table 2's models are the 512 sub-layers of Table 5, whose numbers they have, and the limit of Table 1 also "
        "holds on training's warm-up of 2,500 steps",
        table="table2_learning_rate",
        architecture="pre_ln",
        limit=_max_lr("pre_ln", 512),
    )
    yield WarmupCheck(
        id="figure1a-warmup",
        statement="Fig. 1a compares training at a learning rate of 4.5e-3",
        source="Fig. 1a, first 1,000 steps; training settings",
        premise="its runs have the warm-up of 2,500 steps that the training settings name",
        peak_lr="4.5e-3",
        figure="Fig. 1a",
        shown_steps=1000,
        warmup_steps=2500,
    )


def _resolutions() -> Iterator[Check]:
    yield StepCheck(
        id="table1-steps",
        statement="Max LR is the learning rate at one step of the ramp",
        source="Section 5.1",
    )
    for benchmark, n_problems, source in (("HumanEval", 164, "arXiv:2107.03374"), ("MBPP", 500, "arXiv:2108.07732")):
        yield GranularityCheck(
            id=f"granularity-{benchmark}",
            statement=f"a score of {benchmark} is a share of {n_problems} problems",
            source=f"{source}, which defines it",
            premise="each problem was tried once",
            benchmark=benchmark,
            n_problems=n_problems,
        )


def _max_lr(architecture: str, n_sublayers: int) -> Place:
    return Place("table1_max_lr", (("architecture", architecture), ("n_sublayers", n_sublayers)))


def _words() -> Iterator[Check]:
    yield OrdersCheck(
        id="orders-of-magnitude",
        statement="Keel's Max LR is nearly two orders of magnitude above Post-LN's at 64 sub-layers",
        source="the text; Table 1",
        premise='"nearly two orders of magnitude" means at least half of a hundred times',
        words="nearly two orders of magnitude",
        orders=2,
        larger=_max_lr("keel", 64),
        smaller=_max_lr("post_ln", 64),
    )
    yield PercentCheck(
        id="max-lr-percent",
        statement="Keel's Max LR is 32 % above Pre-LN's at 64 sub-layers",
        source="the text; Table 1",
        stated="32",
        larger=_max_lr("keel", 64),
        smaller=_max_lr("pre_ln", 64),
    )
    yield GrowthCheck(
        id="table3-gap",
        statement="Keel's advantage grows with depth",
        source="the text on Fig. 1c and Table 3",
        premise="from each depth to the next, not only from the shallowest to the deepest",
        points=_gaps("table3_depth_scaling", "n_sublayers", _DEPTHS),
    )
    yield GrowthCheck(
        id="table4-gap",
        statement="Keel's lead grows with the number of tokens",
        source="Fig. 5",
        premise="scores follow the training loss, which is what Fig. 5 shows",
        points=_gaps("table4_data_scaling", "tokens_billion", (10, 40)),
    )


def _gaps(table: str, key: str, values: Sequence[Key]) -> tuple[tuple[Place, Place], ...]:
    """Keel's and Pre-LN's averages at each value of a key."""
    return tuple(
        (_average(table, (("architecture", "keel"), (key, value))), _average(table, (("architecture", "pre_ln"), (key, value))))
        for value in values
    )


CHECKS: tuple[Check, ...] = (
    *_averages(),
    *_gains(),
    *_figure_1b(),
    *_figure_1c(),
    *_same_runs(),
    *_depths(),
    *_sizes(),
    *_settings(),
    *_resolutions(),
    *_words(),
)
"""All checks, in the order of the report."""
