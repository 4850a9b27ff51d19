import contextlib
import io
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from probes.cli import main as cli
from probes.cli._io import emit, output_folder, write_text_atomically
from probes.errors import OutputError
from probes.sweep import SweepInterrupted


def test_writes_utf8_and_replaces(tmp_path):
    path = tmp_path / "out.txt"
    write_text_atomically(path, "α = L\n")
    write_text_atomically(path, "α = 1\n")
    assert path.read_bytes() == "α = 1\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "out.txt"
    path.write_text("before")

    def no_space(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", no_space)
    with pytest.raises(OutputError, match=r"cannot write '.*out.txt': No space left on device; name a file"):
        write_text_atomically(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_interruption_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(self, target):
        raise KeyboardInterrupt("stop")

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stop"):
        write_text_atomically(tmp_path / "out.txt", "after")
    assert list(tmp_path.iterdir()) == []


def test_device_is_not_replaced():
    with pytest.raises(OutputError, match="a folder or a device"):
        write_text_atomically(Path(os.devnull), "x")
    assert not Path(os.devnull).is_file()


def test_emit_prints_or_writes_the_same(tmp_path, capsys):
    emit("text", None)
    emit("text", tmp_path / "out")
    assert capsys.readouterr().out == (tmp_path / "out").read_text() == "text\n"


def _keel(*arguments: str, **options: object) -> subprocess.Popen[str]:
    code = "from probes.cli.main import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True, **options)


COMMANDS = [("theory", "phase", "--json"), ("theory", "limits"), ("schemes",), ("--help",), ("theory", "gain", "--help")]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_closed_pipe_ends_quietly(arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    process = _keel(*arguments, stdout=write)
    os.close(write)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 141)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_full_device_is_one_message(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        process = _keel(*arguments, stdout=full)
        message = process.communicate(timeout=60)[1]
    assert (message, process.returncode) == ("keel: cannot write to stdout: No space left on device; name a file with -o\n", 2)


def test_an_interrupted_command_says_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("keel_theory.propagation.shortcut_log_product", interrupted)
    monkeypatch.setattr(sys, "argv", ["keel", "theory", "gain", "--scheme", "keel", "--sublayers", "8"])
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert "Traceback" not in capsys.readouterr().err


def test_work_that_was_stopped_is_one_message_and_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise SweepInterrupted("stopped; the same command goes on")

    monkeypatch.setattr("figures.pipeline.make_figure", stopped)
    monkeypatch.setattr(sys, "argv", ["keel", "figures", "heat_maps", "-o", str(tmp_path)])
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert capsys.readouterr().err == "keel: stopped; the same command goes on\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("figures", "phase_diagram", "-o", ""),
        ("figures", "phase_diagram", "--output="),
        ("figures", "phase_diagram", "--runs", ""),
        ("train", "--steps", "60", "--output", ""),
    ],
    ids=" ".join,
)
def test_an_empty_path_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["keel", *arguments])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "is given an empty path; name a place, '.' for the working folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_stdout_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stdout
    monkeypatch.setattr(sys, "argv", ["keel", "schemes", "nonesuch"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert sys.stdout is before


def test_a_full_stream_is_an_output_error() -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(28, "No space left on device")

    with (
        pytest.raises(OutputError, match="cannot write to stdout: No space left on device"),
        contextlib.redirect_stdout(Full()),
    ):
        emit("text", None)


@pytest.mark.skipif(os.name != "posix", reason="closing a descriptor in the shell")
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_closed_stdout_is_one_message(arguments: tuple[str, ...]) -> None:
    process = _keel(*arguments, preexec_fn=lambda: os.close(1))
    message = process.communicate(timeout=60)[1]
    assert (message, process.returncode) == ("keel: stdout is closed; send it to a file or to /dev/null\n", 2)


def test_a_folder_whose_name_is_too_long_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write into .*: File name too long"), output_folder(tmp_path / ("x" * 300)):
        pass


WAITING = """
import sys, time
from pathlib import Path
from probes.cli._io import output_folder
with output_folder(Path(sys.argv[1])) as work:
    (work / "half").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


def _waiting(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", WAITING, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_terminated_run_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    folder, number = tmp_path / "out", getattr(signal, name)
    process = _waiting(folder)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not folder.exists()


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_the_next_run_removes_what_a_killed_one_has_left_and_nothing_else(tmp_path: Path) -> None:
    other = tmp_path / f".partial-1-{platform.node()}-of-a-running-process"
    elsewhere = tmp_path / ".partial-1-of.another.machine-x"
    other.mkdir()
    elsewhere.mkdir()
    killed = _waiting(tmp_path)
    running = _waiting(tmp_path)
    killed.kill()
    killed.communicate(timeout=60)
    [left] = tmp_path.glob(f".partial-{killed.pid}-*")
    with output_folder(tmp_path):
        assert not left.exists()
        assert list(tmp_path.glob(f".partial-{running.pid}-*/half"))
    running.terminate()
    running.communicate(timeout=60)
    assert sorted(tmp_path.iterdir()) == sorted([other, elsewhere])


def test_signal_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with output_folder(tmp_path):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
