import os
from pathlib import Path

import pytest

from probes.cli._io import emit, write_text_atomically
from probes.errors import OutputError


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
