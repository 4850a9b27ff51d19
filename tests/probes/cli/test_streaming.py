"""The streaming options of ``keel grad-norm`` and ``keel layer-removal``, from the shell's side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests._cli import run_keel as run

COMMANDS = ("grad-norm", "layer-removal")
SHORT = ("--tokens", "96", "--seq-len", "16", "--tokenizer", "bytes", "--json")
TOLERANCE = 1e-5


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Wide enough for bytes as tokens, which are asked for: a tiny Llama in shards, float32."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    folder = tmp_path / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="12KB")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "keel-dynamics"


def values(out: str) -> list[float]:
    return [row["value"] for row in json.loads(out)["rows"] if row["value"] is not None]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_streamed_command_prints_the_numbers_of_the_one_in_memory(command, checkpoint, cache, monkeypatch, capsys) -> None:
    more = ("--estimates", "--together", "--threshold", "1e9") if command == "layer-removal" else ()
    code, here, err = run(monkeypatch, capsys, command, checkpoint, *SHORT, *more, "--no-stream")
    assert code == 0, err
    code, there, err = run(monkeypatch, capsys, command, checkpoint, *SHORT, *more, "--stream")
    assert code == 0, err
    expected, got = (
        {(row.get("kind"), row["place"], row["metric"]): row["value"] for row in json.loads(out)["rows"]}
        for out in (here, there)
    )
    assert expected.keys() == got.keys()
    assert len(got) > 12
    for key in got:
        if expected[key] is None:
            assert got[key] is None
        else:
            assert got[key] == pytest.approx(expected[key], rel=1e-3, abs=TOLERANCE)
    assert not list(cache.glob(".keel-run-*"))


DEFAULTS = {"block_influence", "angular_distance", "relative_contribution"}


@pytest.mark.parametrize(
    ("options", "metrics", "kinds"),
    [
        ((), DEFAULTS, {"model", "unit"}),
        (("--no-estimates",), set(), {"model", "unit"}),
        (("--estimates",), DEFAULTS | {"taylor"}, {"model", "unit"}),
        (("--together", "--threshold", "1e9"), DEFAULTS, {"model", "unit", "joint"}),
    ],
    ids=["by default", "no estimates", "estimates", "together"],
)
def test_what_costs_more_reads_is_streamed_only_when_asked_for(
    options, metrics, kinds, checkpoint, monkeypatch, capsys
) -> None:
    code, out, err = run(monkeypatch, capsys, "layer-removal", checkpoint, *SHORT, "--stream", *options)
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert {row["metric"] for row in rows if row["kind"] == "unit"} == metrics | {
        "delta_loss",
        "delta_perplexity",
        "loss_without",
    }
    assert {row["kind"] for row in rows} == kinds


def test_a_dry_run_counts_what_is_asked_for(checkpoint, monkeypatch, capsys) -> None:
    arguments = ("layer-removal", checkpoint, *SHORT, "--dry-run")
    plain, taylor, together = (
        json.loads(run(monkeypatch, capsys, *arguments, *more)[1]) for more in ((), ("--estimates",), ("--together",))
    )
    blocks = together["bytes_read"] - plain["bytes_read"]
    assert taylor["bytes_read"] - plain["bytes_read"] > 1.5 * blocks > 0
    assert (plain["exact_bytes"], together["exact_bytes"]) == (True, False)
    text = tuple(argument for argument in arguments if argument != "--json")
    lines = run(monkeypatch, capsys, *text, "--together")[1].splitlines()
    assert [line.split(":")[0] for line in lines if "at most" in line] == [
        "bytes read",
        "on disk while it runs",
        "arithmetic",
        "time",
    ]


def test_it_is_chosen_where_the_weights_exceed_the_memory_allowed(checkpoint, monkeypatch, capsys) -> None:
    _, _, err = run(monkeypatch, capsys, "grad-norm", checkpoint, *SHORT, "--max-memory", "10KB")
    assert "GB: one block is in memory at a time" in err
    _, _, err = run(monkeypatch, capsys, "grad-norm", checkpoint, *SHORT, "--max-memory", "1GB")
    assert "one block" not in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_dry_run_says_what_a_run_costs_and_leaves_nothing(command, checkpoint, tmp_path, cache, monkeypatch, capsys) -> None:
    out_folder = tmp_path / "out"
    code, out, err = run(monkeypatch, capsys, command, checkpoint, *SHORT[:-1], "--dry-run", "-o", out_folder)
    assert code == 0, err
    starts = ("bytes read: ", "peak memory: about ", "on disk while it runs: ", "arithmetic: ", "time: about ")
    assert [line.startswith(start) for line, start in zip(out.splitlines(), starts, strict=True)] == [True] * 5
    assert not out_folder.exists()
    assert not cache.exists()
    _, out, _ = run(monkeypatch, capsys, command, checkpoint, *SHORT, "--dry-run")
    assert json.loads(out)["bytes_read"] > 0


@pytest.mark.parametrize("command", COMMANDS)
def test_placement_by_accelerate_gives_the_same_numbers(command, checkpoint, monkeypatch, capsys) -> None:
    _, here, _ = run(monkeypatch, capsys, command, checkpoint, *SHORT)
    code, there, err = run(monkeypatch, capsys, command, checkpoint, *SHORT, "--placement", '{"": "cpu"}')
    assert code == 0, err
    assert values(there) == pytest.approx(values(here), rel=1e-5, abs=TOLERANCE)


def _half_on_disk(n_blocks: int = 6) -> str:
    ends = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    return json.dumps(ends | {f"model.layers.{i}": ("cpu", "disk")[i % 2] for i in range(n_blocks)})


@pytest.mark.parametrize("command", COMMANDS)
def test_blocks_on_the_disk_are_left_to_streaming(command, checkpoint, monkeypatch, capsys) -> None:
    code, _, err = run(monkeypatch, capsys, command, checkpoint, *SHORT, "--placement", _half_on_disk())
    assert code == 2
    assert "the placement leaves blocks of" in err
    assert "use --stream, which reads them from where they are" in err


PLACES = {
    "one device": ({"": "cpu"}, []),
    "two devices": ({"a": 0, "b": 1}, []),
    "device and CPU": ({"a": 0, "b": "cpu"}, ["0", "cpu"]),
    "device and disk": ({"a": 0, "b": "disk", "c": 0}, ["0", "disk"]),
}


@pytest.mark.parametrize(("places", "expected"), PLACES.values(), ids=PLACES)
def test_weights_that_are_taken_away_get_no_backward_pass(places, expected) -> None:
    from probes.cli._streaming import _check_placement, offloaded
    from probes.errors import CheckpointError

    loaded = SimpleNamespace(model=SimpleNamespace(hf_device_map=places), source="there")
    assert offloaded(loaded) == expected
    _check_placement(loaded, gradients=False)
    if not expected:
        _check_placement(loaded, gradients=True)
        return
    with pytest.raises(CheckpointError, match=r"takes weights on the CPU or disk away after the forward pass.*use --stream"):
        _check_placement(loaded, gradients=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--placement", "everywhere"), "is no placement"),
        (("--placement", '{"": "banana"}'), "device 'banana' cannot be used"),
        (("--placement", '{"": "cuda:77"}'), "device 'cuda:77' cannot be used"),
        (("--placement", '{"": "meta"}'), "device 'meta' cannot be used"),
        (("--placement", '{"": 77}'), "device '77' cannot be used"),
        (("--placement", '{"": true}'), "true is no device"),
        (("--placement", '{"": null}'), "null is no device"),
        (("--placement", '{"nope": "cpu"}'), "the placement names 'nope', and LlamaForCausalLM has no such module; nearest: '"),
        (("--placement", '{"": "cpu", "model.layer.5": "cpu"}'), "no such module; nearest: 'model.layers.5', 'model.layers"),
        (("--placement", '{"model.layers.6": "cpu"}'), "the placement names 'model.layers.6'"),
        (("--placement", '{"model": "cpu"}'), "no device to 1 parameter(s) of LlamaForCausalLM, first 'lm_head.weight'"),
        (("--placement", "{}"), "first 'model.embed_tokens.weight'; add 'model.embed_tokens', or '' for the whole model"),
        (("--placement", '{"": -1}'), "-1 is no device"),
        (("--dry-run", "--no-stream"), "leave out --no-stream"),
        (("--dry-run", "--placement", "auto"), "leave out --placement"),
        (("--dry-run", "--save", "there", "--remove", "1"), "nothing is saved by --dry-run"),
        (("--placement", "auto", "--stream"), "either streamed or placed"),
        (("--max-memory", "lots"), "is no amount of memory"),
        (("--stream", "--save", "there", "--remove", "1"), "saved from memory"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments, message, checkpoint, monkeypatch, capsys) -> None:
    code, _, err = run(monkeypatch, capsys, "layer-removal", checkpoint, *SHORT, *arguments)
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())


def test_one_token_is_refused(checkpoint, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "text").write_text("a")
    code, _, err = run(
        monkeypatch, capsys, "grad-norm", checkpoint, "--stream", "--tokenizer", "bytes", "--text", tmp_path / "text"
    )
    assert code == 2
    assert "has 1 token(s); at least two are needed" in err


def _stopped_after(step: int, monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """A command that is interrupted when so many steps are done."""
    from probes.streaming.run_state import RunState

    finish = RunState.finish_step

    def interrupted(self: RunState, *args: object, **kwargs: object) -> None:
        finish(self, *args, **kwargs)
        if self.n_steps == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunState, "finish_step", interrupted)
        return run(patch, capsys, *arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_keeps_the_state_and_says_so(command, checkpoint, cache, monkeypatch, capsys) -> None:
    _, expected, _ = run(monkeypatch, capsys, command, checkpoint, *SHORT, "--stream")
    code, out, err = _stopped_after(5, monkeypatch, capsys, command, checkpoint, *SHORT, "--stream")
    assert (code, out) == (130, "")
    assert "interrupted after step 5; the same command goes on from there" in err
    assert len(list(cache.glob(".keel-run-*"))) == 1
    code, again, err = run(monkeypatch, capsys, command, checkpoint, *SHORT, "--stream")
    assert code == 0
    assert "goes on after step 5 of an interrupted run" in err
    assert json.loads(again)["rows"] == json.loads(expected)["rows"]
    assert not list(cache.glob(".keel-run-*"))


_SLOWLY = """
import sys, time
from probes.streaming.run_state import RunState
finish = RunState.finish_step
def slowly(self, *args, **kwargs):
    finish(self, *args, **kwargs)
    time.sleep(0.3)
RunState.finish_step = slowly
from probes.cli.main import main
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal here")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_killed_run_goes_on_with_the_same_numbers(command, checkpoint, tmp_path, monkeypatch, capsys) -> None:
    out_folder = tmp_path / "out"
    arguments = [command, str(checkpoint), *SHORT, "--stream"]
    _, expected, _ = run(monkeypatch, capsys, *arguments)
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOWLY, *arguments, "-o", str(out_folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 300  # a busy machine starts slowly
    while not _n_lines(out_folder) >= 3:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.communicate()
    code, again, err = run(monkeypatch, capsys, *arguments, "-o", out_folder)
    assert code == 0, err
    assert "of an interrupted run" in err
    assert json.loads(again)["rows"] == json.loads(expected)["rows"]
    assert not list(out_folder.glob(".keel-run-*"))


def _n_lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.glob(".keel-run-*/steps.jsonl"))


@pytest.mark.parametrize(
    ("command", "file"), [("grad-norm", "block_inputs"), ("layer-removal", "variants"), ("layer-removal", "before_block")]
)
def test_a_state_without_its_streams_is_refused(command, file, checkpoint, cache, monkeypatch, capsys) -> None:
    arguments = (command, checkpoint, *SHORT, "--stream")
    _stopped_after(5, monkeypatch, capsys, *arguments)
    (found,) = cache.glob(f".keel-run-*/{file}.streams")
    found.unlink()
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert f"{file}.streams" in err
    assert "delete that folder to start anew" in err


def _another_rope(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (checkpoint / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_does_not_go_on_under_another_configuration(command, checkpoint, monkeypatch, capsys) -> None:
    arguments = (command, checkpoint, *SHORT, "--stream")
    _stopped_after(5, monkeypatch, capsys, *arguments)
    _another_rope(checkpoint)
    code, changed, err = run(monkeypatch, capsys, *arguments)
    assert code == 0, err
    assert "goes on after" not in err
    _, expected, _ = run(monkeypatch, capsys, *arguments)
    assert json.loads(changed)["rows"] == json.loads(expected)["rows"]


@pytest.mark.parametrize("package", ["keel-dynamics", "torch", "transformers"])
def test_a_run_does_not_go_on_with_other_versions(package, checkpoint, monkeypatch, capsys) -> None:
    from importlib import metadata

    version = metadata.version
    arguments = ("grad-norm", checkpoint, *SHORT, "--stream")
    _stopped_after(5, monkeypatch, capsys, *arguments)
    monkeypatch.setattr(metadata, "version", lambda name: "0.0" if name == package else version(name))
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 0, err
    assert "goes on after" not in err


def test_a_configuration_written_in_another_order_is_the_same(checkpoint, monkeypatch, capsys) -> None:
    arguments = ("grad-norm", checkpoint, *SHORT, "--stream")
    _stopped_after(5, monkeypatch, capsys, *arguments)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert "goes on after step 5" in run(monkeypatch, capsys, *arguments)[2]


def _states(cache: Path) -> list[Path]:
    return list(cache.glob(".keel-run-*"))


def _touch_a_shard(checkpoint: Path) -> None:
    os.utime(next(checkpoint.glob("*.safetensors")), ns=(1, 1))


@pytest.mark.parametrize("change", [_touch_a_shard, _another_rope], ids=["shard", "configuration"])
def test_the_state_of_a_checkpoint_that_has_changed_is_removed(change, checkpoint, cache, monkeypatch, capsys) -> None:
    arguments = ("grad-norm", checkpoint, *SHORT, "--stream")
    _stopped_after(5, monkeypatch, capsys, *arguments)
    assert len(_states(cache)) == 1
    change(checkpoint)
    assert run(monkeypatch, capsys, *arguments)[0] == 0
    assert not _states(cache)


def test_the_state_of_another_run_stays_and_is_named(checkpoint, cache, monkeypatch, capsys) -> None:
    _stopped_after(5, monkeypatch, capsys, "grad-norm", checkpoint, *SHORT, "--stream")
    (state,) = _states(cache)
    for more in (("--dtype", "float64"), ("--text", __file__)):
        _, _, err = run(monkeypatch, capsys, "grad-norm", checkpoint, *SHORT, "--stream", *more)
        assert "1 other run(s) have left" in err
        assert str(state) in err
    assert _states(cache) == [state]


@pytest.mark.parametrize("command", COMMANDS)
def test_streams_that_do_not_fit_leave_nothing(command, checkpoint, tmp_path, cache, monkeypatch, capsys) -> None:
    import shutil

    free = SimpleNamespace(free=20_000, total=0, used=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    for place in ((), ("-o", tmp_path / "out")):
        code, _, err = run(monkeypatch, capsys, command, checkpoint, *SHORT, "--stream", *place)
        assert code == 2
        assert "name a folder on another disk (-o, or XDG_CACHE_HOME without it)" in err
    assert not cache.exists()
    assert not (tmp_path / "out").exists()


def test_a_signal_that_ends_a_run_says_what_is_kept(checkpoint, monkeypatch, capsys) -> None:
    from probes.streaming.run_state import RunState

    finish = RunState.finish_step

    def ended(self: RunState, *args: object, **kwargs: object) -> None:
        finish(self, *args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(RunState, "finish_step", ended)
        code, out, err = run(patch, capsys, "grad-norm", checkpoint, *SHORT, "--stream")
    assert (code, out) == (128 + signal.SIGTERM, "")
    assert "interrupted after step 1; the same command goes on from there" in err


def test_an_interruption_before_the_first_step_keeps_nothing(checkpoint, cache, monkeypatch, capsys) -> None:
    from probes.streaming.run_state import RunState

    def interrupted(self: RunState, *args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunState, "finish_step", interrupted)
    code, _, err = run(monkeypatch, capsys, "grad-norm", checkpoint, *SHORT, "--stream")
    assert code == 130
    assert "before the first step was done; nothing is kept" in err
    assert not cache.exists()


def test_a_dry_run_of_what_fits_into_memory_says_so(checkpoint, monkeypatch, capsys) -> None:
    arguments = ("grad-norm", checkpoint, *SHORT, "--dry-run")
    assert "what a run with --stream costs" in run(monkeypatch, capsys, *arguments)[2]
    for more in (("--stream",), ("--max-memory", "10KB")):
        assert "what a run with --stream costs" not in run(monkeypatch, capsys, *arguments, *more)[2]
