"""``keel figures``: from the command line to pictures."""

import json

import pytest
from typer.testing import CliRunner

from figures import pipeline
from figures.registry import FIGURES
from probes.cli.main import app
from probes.errors import KeelError


@pytest.fixture
def run():
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, ["figures", *map(str, arguments)])


def test_list_names_every_figure_and_its_place(run) -> None:
    rows = json.loads(run("--list", "--json").stdout)
    assert [row["name"] for row in rows] == list(FIGURES)
    assert rows[0] == {
        "name": "fig1a_stability",
        "paper": "Figure 1a",
        "title": "Training stability at an aggressive learning rate",
    }
    text = run("--list").stdout
    assert all(name in text for name in FIGURES)


def test_pictures_are_written_and_their_paths_printed(run, tmp_path) -> None:
    done = run("phase_diagram", "--preset", "smoke", "--runs", tmp_path / "runs", "-o", tmp_path)
    assert done.exit_code == 0
    assert done.stdout.split() == [str(tmp_path / f"phase_diagram.{end}") for end in ("png", "svg")]
    assert (tmp_path / "phase_diagram.png").stat().st_size > 10_000
    assert "phase_diagram: computing (smoke)" in done.stderr


def test_json_says_whether_it_was_computed(run, tmp_path) -> None:
    arguments = ("phase_diagram", "--preset", "smoke", "-o", tmp_path, "--json")
    computed = [json.loads(run(*arguments, *more).stdout)[0]["computed"] for more in ((), (), ("--recompute",))]
    assert computed == [True, False, True]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fig9",), "no figure 'fig9'; figures: fig1a_stability"),
        (("phase_diagram", "--preset", "huge"), "no preset 'huge'; presets: smoke, cpu, gpu"),
        (("--list", "fig9"), "no figure 'fig9'"),
    ],
)
def test_unknown_names_are_errors_that_name_what_exists(run, arguments, said) -> None:
    done = run(*arguments)
    assert isinstance(done.exception, KeelError)
    assert said in str(done.exception)


def test_one_figure_that_fails_does_not_stop_the_others(run, tmp_path, monkeypatch) -> None:
    plain = pipeline.make_figure

    def failing(name, *arguments, **options):
        if name == "heat_maps":
            raise KeelError("no corpus")
        return plain(name, *arguments, **options)

    monkeypatch.setattr(pipeline, "make_figure", failing)
    done = run("heat_maps", "phase_diagram", "--preset", "smoke", "-o", tmp_path)
    assert done.exit_code == 2
    assert "heat_maps: no corpus" in done.stderr
    assert (tmp_path / "phase_diagram.svg").exists()
