"""The README's terminal output is what the commands print."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from figures import heat_maps, table1_max_lr
from figures.paper_check import check_paper
from figures.paper_tables import load_tables
from figures.pipeline import stored_frame
from keel_theory.claims import CLAIMS
from probes.cli import main as entry
from probes.divergence import Landmarks, judge_run
from probes.logs import read_loss_log
from tests._readme import README, readme_words

SESSION = re.compile(r"```console\n\$ (keel [^\n]+)\n(.*?)\n```", re.DOTALL)
SLOW = ("keel verify", "keel grad-norm", "keel max-lr", "keel layer-removal", "keel train", "keel sweep")
SESSIONS = [(command, output) for command, output in SESSION.findall(README.read_text(encoding="utf-8"))]
FAST = [session for session in SESSIONS if not session[0].startswith(SLOW)]


@pytest.mark.parametrize(("command", "output"), FAST, ids=[command for command, _ in FAST])
def test_terminal_output_in_the_readme_is_real(
    command: str, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with contextlib.suppress(SystemExit):
        entry.main()
    assert capsys.readouterr().out.rstrip() == output.rstrip()


def test_every_picture_and_file_that_the_readme_names_is_there() -> None:
    targets = re.findall(r"\]\(([\w./:-]+)\)", README.read_text(encoding="utf-8"))
    local = [target for target in targets if not target.startswith("http")]
    assert local
    assert [target for target in local if not (README.parent / target).exists()] == []


def test_readme_has_fast_sessions_to_check() -> None:
    assert len(FAST) >= 3


def test_table_of_max_lr_in_the_readme_is_that_of_the_committed_frame() -> None:
    stored = stored_frame("table1_max_lr", "cpu")
    assert stored is not None
    text = README.read_text(encoding="utf-8")
    assert table1_max_lr.as_markdown(stored.frame) in text
    found = table1_max_lr.finding(stored.frame)
    assert f"rank correlation of {found['rank_correlation']:.2f}" in text
    assert found["verdict"] == "not reproduced"
    assert found["pairs_against_the_paper"] == [["pre_ln", "keel"]]
    weak = found["order_in_the_paper"][:4]
    assert found["pairs_not_told_apart"] == [list(pair) for pair in itertools.combinations(weak, 2)]
    assert found["order_measured"][-2:] == ["keel", "pre_ln"]


def test_readme_counts_the_papers_contradictions_as_the_check_does() -> None:
    done = check_paper(load_tables())
    assert f"In {len(done.results)} checks it finds {done.summary()}" in readme_words()


def test_readme_counts_the_claims() -> None:
    assert f"checks {len(CLAIMS)} claims three ways" in readme_words()


def test_readme_dates_the_vanishing_gradient_as_the_committed_frame_does() -> None:
    stored = stored_frame("heat_maps", "cpu")
    assert stored is not None
    found = heat_maps.finding(stored.frame)["swiglu"]["post_ln"]["vanishes"]
    text = readme_words()
    assert f"below a thousandth of what it is at the top by step {found['step']}, " in text
    assert f"at a learning rate of {found['lr']:.2g} and a loss of {found['loss']:.2f} nats/token" in text


def test_core_minutes_of_the_table_are_those_of_the_benchmark() -> None:
    record = json.loads((README.parent / "benchmarks/results/early_stopping.json").read_text(encoding="utf-8"))
    minutes = {name: round(seconds / 60) for name, seconds in record["table"]["seconds"].items()}
    words = readme_words()
    assert f"in {minutes['as_committed']} core-minutes ({minutes['to_the_end']} with every ramp run to its end" in words
    assert f"{minutes['stopping_everywhere']} if all were stopped early" in words


def test_the_stress_test_in_the_readme_is_what_the_judge_says_of_its_log() -> None:
    """The steps of the run that was shown are stored; training it again takes half a minute."""
    log = read_loss_log(Path(__file__).parent / "data" / "readme_post_ln.csv")
    assert log.learning_rates is not None
    answer = judge_run(
        log.steps.tolist(),
        log.learning_rates.tolist(),
        log.losses.tolist(),
        batch_losses=log.batch_losses,
        ramp_steps=600,
        landmarks=Landmarks.of_text(unigram_entropy=3.240838860450743, bigram_entropy=2.4279269362564464, vocab_size=256),
    )
    (shown,) = [output for command, output in SESSIONS if command == "keel max-lr --scheme post_ln --preset cpu"]
    assert f"seed 0 ({answer.last_step} steps in " in shown
    assert answer.verdict() in shown
    assert [reason for reason in answer.reasons if f"  {reason}\n" not in shown] == []
    for each in answer.criteria:
        name, status = (value.value.replace("_", " ") for value in (each.criterion, each.status))
        assert re.search(rf"^{name} +{status} .* {each.max_lr:.4g}$", shown, re.MULTILINE)
