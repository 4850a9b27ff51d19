"""The pipeline: frames are computed once per settings, kept whole, and drawn from what is kept."""

import hashlib
import json
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from figures import pipeline, registry
from figures.pipeline import Preset, figure_frame, make_figure, read_preset, run_main, stored_frame
from figures.registry import FigureEntry, FigureError
from probes.errors import OutputError
from probes.sweep import SweepInterrupted

NAME = "made_up"


class _Made(ModuleType):
    """A figure's module that counts its computations."""

    def __init__(self) -> None:
        super().__init__("figures.made_up")
        self.SETTINGS = {"smoke": {"n": 2}, "cpu": {"n": 4}, "gpu": {"n": 8}}
        self.computed: list[int] = []
        self.drawn: list[pd.DataFrame] = []
        self.folders: list = []

    def compute(self, *, folder=None, n: int) -> pd.DataFrame:
        self.computed.append(n)
        self.folders.append(folder)
        frame = pd.DataFrame({"x": np.arange(n), "n": n, "call": len(self.computed)})
        frame.attrs["runs"] = ["how it went"]
        return frame

    def draw(self, frame: pd.DataFrame) -> Figure:
        self.drawn.append(frame)
        figure = Figure()
        figure.add_subplot().plot(frame["x"])
        return figure


@pytest.fixture
def module(monkeypatch, tmp_path) -> _Made:
    """A registered figure, and a package of its own to write into."""
    made = _Made()
    monkeypatch.setattr(registry, "FIGURES", {NAME: FigureEntry(name=NAME, title="Made up")})
    monkeypatch.setattr(FigureEntry, "load", lambda entry: made)
    monkeypatch.setattr(pipeline, "DATA", tmp_path / "package" / "data")
    monkeypatch.setattr(pipeline, "GALLERY", tmp_path / "package" / "gallery")
    return made


def _kept(folder, preset="cpu"):
    return stored_frame(NAME, preset, folder=folder)


def test_frame_is_computed_once_and_then_read(module, tmp_path) -> None:
    first = figure_frame(NAME, "cpu", runs=tmp_path / "runs")
    second = figure_frame(NAME, "cpu", runs=tmp_path / "runs")
    assert module.computed == [4]
    pd.testing.assert_frame_equal(first, second)
    assert module.folders == [tmp_path / "runs" / "cpu" / NAME]


@pytest.mark.parametrize(
    "change",
    [
        lambda module, _: module.SETTINGS["cpu"].update(n=5),
        lambda module, _: setattr(module, "SCHEMA_VERSION", 2),
        lambda module, path: setattr(module, "INPUTS", [path]),
    ],
    ids=["settings", "schema", "inputs"],
)
def test_a_changed_hash_computes_again_and_replaces(module, tmp_path, change) -> None:
    figure_frame(NAME, runs=tmp_path)
    before = _kept(pipeline.DATA).about["key"]
    (tmp_path / "table.csv").write_text("a\n1\n")
    change(module, tmp_path / "table.csv")
    figure_frame(NAME, runs=tmp_path)
    assert len(module.computed) == 2
    assert _kept(pipeline.DATA).about["key"] != before
    figure_frame(NAME, runs=tmp_path)
    assert len(module.computed) == 2


def test_a_changed_input_file_computes_again(module, tmp_path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("a\n1\n")
    module.INPUTS = [table]
    figure_frame(NAME, runs=tmp_path)
    table.write_text("a\n2\n")
    figure_frame(NAME, runs=tmp_path)
    assert len(module.computed) == 2


def test_recompute_computes_though_the_hash_is_the_same(module, tmp_path) -> None:
    figure_frame(NAME, runs=tmp_path)
    assert figure_frame(NAME, runs=tmp_path, recompute=True)["call"].unique().tolist() == [2]
    assert figure_frame(NAME, runs=tmp_path)["call"].unique().tolist() == [2]


def test_origin_stands_beside_the_frame(module, tmp_path) -> None:
    figure_frame(NAME, runs=tmp_path)
    about = json.loads((pipeline.DATA / "made_up.cpu.json").read_text())
    assert (about["figure"], about["preset"], about["settings"], about["rows"]) == (NAME, "cpu", {"n": 4}, 4)
    assert about["details"] == {"runs": ["how it went"]}
    assert about["seconds"] >= 0
    assert about["device"] == "cpu"
    assert {"versions", "commit", "threads", "time", "key", "schema", "platform"} <= set(about)
    parquet = (pipeline.DATA / "made_up.cpu.parquet").read_bytes()
    assert about["parquet_sha256"] == hashlib.sha256(parquet).hexdigest()


@pytest.mark.parametrize("preset", [Preset.SMOKE, Preset.GPU])
def test_only_the_cpu_preset_writes_into_the_package(module, tmp_path, preset) -> None:
    make_figure(NAME, "cpu", runs=tmp_path / "runs")
    before = {path: path.read_bytes() for path in (tmp_path / "package").rglob("*") if path.is_file()}
    drawn = make_figure(NAME, preset, runs=tmp_path / "runs", recompute=True)
    assert {path: path.read_bytes() for path in (tmp_path / "package").rglob("*") if path.is_file()} == before
    assert drawn.paths == tuple(tmp_path / "runs" / preset.value / "gallery" / f"{NAME}.{end}" for end in ("png", "svg"))
    assert _kept(tmp_path / "runs" / preset.value / "data", preset).about["preset"] == preset.value


def test_a_named_folder_takes_everything_and_the_kept_frame_is_read_all_the_same(module, tmp_path) -> None:
    make_figure(NAME, runs=tmp_path / "runs")
    drawn = make_figure(NAME, runs=tmp_path / "runs", output=tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["made_up.png", "made_up.svg"]
    assert not drawn.computed
    make_figure(NAME, runs=tmp_path / "runs", output=tmp_path / "out", recompute=True)
    assert _kept(tmp_path / "out" / "data").frame["call"].unique().tolist() == [2]
    assert _kept(pipeline.DATA).frame["call"].unique().tolist() == [1]


def test_what_is_drawn_is_what_is_kept(module, tmp_path) -> None:
    make_figure(NAME, runs=tmp_path)
    make_figure(NAME, runs=tmp_path)
    assert module.computed == [4]
    for frame in module.drawn:
        pd.testing.assert_frame_equal(frame, _kept(pipeline.DATA).frame)


@pytest.mark.parametrize("nth", [1, 2], ids=["first file", "second file"])
def test_a_kill_while_writing_leaves_no_half_frame(module, tmp_path, monkeypatch, nth) -> None:
    from probes.run_folder import RunFolder

    figure_frame(NAME, runs=tmp_path)
    plain, calls = RunFolder.write_bytes, []

    def killed(self, name, content) -> None:
        calls.append(name)
        if len(calls) == nth:
            raise KeyboardInterrupt("killed")
        plain(self, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_bytes", killed)
        with pytest.raises(KeyboardInterrupt, match="killed"):
            figure_frame(NAME, runs=tmp_path, recompute=True)
    kept = _kept(pipeline.DATA)
    assert (kept is None) == (nth == 2)  # before the first file the old pair stands; between the two none counts
    expected = 2 if kept is not None else 3
    figure_frame(NAME, runs=tmp_path)
    assert len(module.computed) == expected
    assert not list(pipeline.DATA.glob(".*"))


def _told(tmp_path) -> str:
    """What is said while the frame of four rows is obtained."""
    lines: list[str] = []
    assert len(figure_frame(NAME, runs=tmp_path, tell=lines.append)) == 4
    return "\n".join(lines)


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"not a frame"])
def test_a_damaged_frame_is_computed_again(module, tmp_path, damage) -> None:
    figure_frame(NAME, runs=tmp_path)
    (pipeline.DATA / "made_up.cpu.parquet").write_bytes(damage)
    assert "are not those that made_up.cpu.json names" in _told(tmp_path)
    assert len(module.computed) == 2


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("", "cannot read"),
        ("[]", "does not hold a JSON object"),
        ("{}", "field 'figure' is missing"),
        ('{"key": 1', "cannot read"),
        ("\udce9", "cannot read"),
    ],
    ids=["empty", "list", "no fields", "cut off", "not UTF-8"],
)
def test_a_damaged_origin_is_computed_again(module, tmp_path, damage, why) -> None:
    figure_frame(NAME, runs=tmp_path)
    (pipeline.DATA / "made_up.cpu.json").write_text(damage, encoding="utf-8", errors="surrogateescape")
    assert why in _told(tmp_path)
    assert len(module.computed) == 2


_MISSING = object()


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        *((name, _MISSING, f"field '{name}' is missing") for name in pipeline._ORIGIN),
        ("seconds", "long", "field 'seconds' must be a finite number"),
        ("figure", "another", "is of another, preset cpu"),
        ("preset", "gpu", "is of made_up, preset gpu"),
        ("rows", 5, "does not have the 5 rows or the columns that made_up.cpu.json names"),
        ("columns", ["score"], "does not have the 4 rows or the columns that made_up.cpu.json names"),
        ("key", "0" * 64, "is of other settings"),
    ],
)
def test_an_origin_that_does_not_fit_is_told_of_and_computed_again(module, tmp_path, field, value, why) -> None:
    figure_frame(NAME, runs=tmp_path)
    origin = pipeline.DATA / "made_up.cpu.json"
    about = json.loads(origin.read_text())
    about = {name: old for name, old in about.items() if name != field} | ({} if value is _MISSING else {field: value})
    origin.write_text(json.dumps(about))
    assert (_kept(pipeline.DATA) is None) == (why != "is of other settings")
    assert why in _told(tmp_path)
    assert len(module.computed) == 2


@pytest.mark.parametrize("content", [b"", b"not a frame", b"PAR1" + b"0" * 40 + b"PAR1"])
def test_bytes_that_their_origin_names_but_are_no_frame_are_computed_again(module, tmp_path, content) -> None:
    figure_frame(NAME, runs=tmp_path)
    origin = pipeline.DATA / "made_up.cpu.json"
    about = json.loads(origin.read_text()) | {"parquet_sha256": hashlib.sha256(content).hexdigest()}
    origin.write_text(json.dumps(about))
    (pipeline.DATA / "made_up.cpu.parquet").write_bytes(content)
    assert _kept(pipeline.DATA) is None
    assert "is no Parquet file" in _told(tmp_path)
    assert len(module.computed) == 2


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_all_written_or_none(module, tmp_path, suffix) -> None:
    (tmp_path / f"made_up.{suffix}").mkdir()
    with pytest.raises(OutputError, match=rf"cannot write '.*made_up\.{suffix}'.*name a folder with -o"):
        make_figure(NAME, runs=tmp_path / "runs", output=tmp_path)
    assert [path.name for path in tmp_path.glob("*made_up*")] == [f"made_up.{suffix}"]


@pytest.mark.parametrize("raised", [SweepInterrupted("stopped; go on"), KeyboardInterrupt()], ids=["sweep", "Ctrl-C"])
def test_main_says_130_where_it_is_stopped(module, tmp_path, monkeypatch, capsys, raised) -> None:
    def stopped(**_):
        raise raised

    monkeypatch.setattr(module, "compute", stopped)
    with pytest.raises(SystemExit, match="130"):
        run_main(NAME, ["--runs", str(tmp_path)])
    assert capsys.readouterr().err.endswith("python -m figures.made_up: stopped" + ("; go on" if raised.args else "") + "\n")


def test_unwritable_place_is_an_error_before_anything_is_computed(module, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot make the folder.*name another with -o"):
        make_figure(NAME, runs=tmp_path, output=tmp_path / "file")
    assert module.computed == []


def test_unknown_names_and_presets_are_answered_with_what_exists(module, tmp_path) -> None:
    with pytest.raises(FigureError, match="no figure 'other'; figures: made_up"):
        make_figure("other", runs=tmp_path)
    with pytest.raises(FigureError, match="no preset 'big'; presets: smoke, cpu, gpu"):
        read_preset("big")
    del module.SETTINGS["gpu"]
    with pytest.raises(FigureError, match="'made_up' has no preset 'gpu'; it has smoke, cpu"):
        make_figure(NAME, "gpu", runs=tmp_path)


def test_main_prints_paths_and_ends_with_2_after_a_users_error(module, tmp_path, capsys) -> None:
    run_main(NAME, ["--preset", "smoke", "--runs", str(tmp_path / "runs"), "-o", str(tmp_path / "out")])
    captured = capsys.readouterr()
    assert captured.out.split() == [str(tmp_path / "out" / f"made_up.{end}") for end in ("png", "svg")]
    assert "made_up: computing (smoke)" in captured.err
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        run_main(NAME, ["--preset", "smoke", "-o", str(tmp_path / "file" / "below")])


@pytest.mark.parametrize("name", registry.FIGURES)
def test_committed_frame_is_that_of_the_present_settings(name: str) -> None:
    """So that drawing needs no computing from a fresh clone."""
    entry = registry.FIGURES[name]
    kept = stored_frame(name)
    assert kept is not None
    assert kept.about["key"] == pipeline.settings_key(name, entry.load(), Preset.CPU)
    assert kept.about["rows"] == len(kept.frame)
