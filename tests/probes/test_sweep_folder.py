"""A sweep's folder: trials shared by changed sweeps, and an append-only list of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from probes.errors import OutputError
from probes.sweep_folder import SweepFolder
from probes.trial import SweepError
from tests.probes._sweeps import finish, small_sweep


def test_the_present_sweep_comes_back(tmp_path: Path) -> None:
    folder, trials = SweepFolder(tmp_path), small_sweep().trials()
    folder.write("small", trials)
    name, places = folder.read()
    assert name == "small"
    assert tuple(place.trial for place in places) == trials
    assert [place.path.name for place in places] == [trial.key for trial in trials]


def test_every_result_is_listed_once_and_lines_are_only_added(tmp_path: Path) -> None:
    folder, trials = SweepFolder(tmp_path), small_sweep().trials()
    first, second = map(folder.folder, trials)
    finish(first)
    folder.catch_up([first, second])
    before = (tmp_path / "results.jsonl").read_text(encoding="utf-8")
    finish(second)
    folder.catch_up([first, second])
    after = (tmp_path / "results.jsonl").read_text(encoding="utf-8")
    assert after.startswith(before)
    assert [json.loads(line)["key"] for line in after.splitlines()] == [first.trial.key, second.trial.key]


def test_a_line_that_a_kill_cut_short_is_written_again(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    place = folder.folder(small_sweep().trials()[0])
    finish(place)
    (tmp_path / "results.jsonl").write_text('{"key": "' + place.trial.key, encoding="utf-8")
    folder.catch_up([place])
    assert folder.noted() == {place.trial.key}


def test_only_one_scheduler_at_a_time(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    with folder.owned(), pytest.raises(SweepError, match=r"another process runs a sweep in .*; wait for it"), folder.owned():
        pass


@pytest.mark.parametrize(
    ("content", "message"), [(None, r"holds no sweep \(sweep\.json is missing\)"), ("{}", r"field 'name' is missing")]
)
def test_a_folder_without_a_sweep_is_told(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "sweep.json").write_text(content, encoding="utf-8")
    with pytest.raises(SweepError, match=message):
        SweepFolder(tmp_path).read()


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("", encoding="utf-8")
    with pytest.raises(OutputError, match=r"cannot write the sweep to .*taken"), SweepFolder(tmp_path / "taken").owned():
        pass
