"""Where text comes from, and what is refused."""

import sys
from types import ModuleType, SimpleNamespace

import pandas as pd
import pytest

from probes.errors import TextError
from probes.text_documents import read_documents


def test_folders_come_in_the_order_of_relative_paths_without_hidden_files(tmp_path) -> None:
    for name in ("b/c.txt", "a.txt", "b.txt", ".git/x.txt", ".hidden"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assert read_documents([str(tmp_path)], max_bytes=1000).documents == ("a.txt", "b.txt", "b/c.txt")


def test_reading_stops_at_the_limit_between_characters(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("ééé", encoding="utf-8")
    assert read_documents([str(tmp_path / "a.txt")] * 2, max_bytes=5).documents == ("éé",)


def test_the_standard_library_has_no_tests_and_no_installed_packages(monkeypatch, tmp_path) -> None:
    for name in ("os.py", "test/test_os.py", "site-packages/x.py", "email/architecture.rst", "lib.so"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert read_documents(["stdlib"], max_bytes=1000).documents == ("email/architecture.rst", "os.py")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b" \n", "is empty"), (b"\xff\xfe", "not UTF-8 text"), (b"a\x00b", "NUL character at position 1")],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, content, message) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(TextError, match=message):
        read_documents([str(tmp_path / "f")], max_bytes=1000)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(TextError, match=r"there is no text file or folder .*nowhere"):
        read_documents([str(tmp_path / "nowhere")], max_bytes=1000)


def test_a_folder_without_text_is_refused(tmp_path) -> None:
    with pytest.raises(TextError, match="no text in"):
        read_documents([str(tmp_path)], max_bytes=1000)


def test_data_sets_without_the_library_say_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TextError, match=r"pip install 'keel-dynamics\[data\]', or pip install datasets"):
        read_documents(["hub:some/name"], max_bytes=1000)


class _Library(ModuleType):
    """Stands in for ``datasets`` where what it raises or returns is the point."""

    def __init__(self, rows=(), error=None) -> None:
        super().__init__("datasets")
        self.rows, self.error, self.asked = rows, error, None

    def load_dataset(self, name, subset, split, streaming):
        self.asked = SimpleNamespace(name=name, subset=subset, split=split, streaming=streaming)
        if self.error is not None:
            raise self.error
        return self.rows


def test_a_hub_name_is_streamed_up_to_the_limit(monkeypatch) -> None:
    library = _Library({"text": "0123456789", "id": i} for i in range(10**9))
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert sum(map(len, read_documents(["hub:who/what@sample"], max_bytes=25).documents)) == 25
    assert vars(library.asked) == {"name": "who/what", "subset": "sample", "split": "train", "streaming": True}


def test_an_unreachable_hub_says_what_works_offline(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", _Library(error=ConnectionError("no route")))
    with pytest.raises(TextError, match=r"'who/what' cannot be loaded from the hub \(ConnectionError: no route\); offline"):
        read_documents(["hub:who/what"], max_bytes=25)


def test_a_missing_column_is_named_with_those_there(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", _Library([{"content": "x", "id": 3}]))
    with pytest.raises(TextError, match="no column 'text'; its columns: content, id"):
        read_documents(["hub:who/what"], max_bytes=25)


def test_a_data_set_saved_by_the_library_is_read(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(str(tmp_path / "set"))
    assert read_documents([str(tmp_path / "set")], max_bytes=100).documents == ("one", "two")


def test_a_folder_of_parquet_files_is_streamed_as_the_hub_is(tmp_path) -> None:
    pytest.importorskip("datasets")
    pd.DataFrame({"text": [f"document {i}" for i in range(30)]}).to_parquet(tmp_path / "part.parquet")
    assert len(read_documents([f"hub:{tmp_path}"], max_bytes=10_000).documents) == 30
    assert sum(map(len, read_documents([f"hub:{tmp_path}"], max_bytes=25).documents)) == 25
    with pytest.raises(TextError, match="no column 'content'; its columns: text"):
        read_documents([f"hub:{tmp_path}"], column="content", max_bytes=25)


def test_a_folder_of_parquet_files_alone_says_how_it_is_read(tmp_path) -> None:
    pd.DataFrame({"text": ["document"]}).to_parquet(tmp_path / "part.parquet")
    with pytest.raises(TextError, match="a folder of Parquet files is read as hub:FOLDER"):
        read_documents([str(tmp_path)], max_bytes=25)
