"""The notebooks as they are committed, and the pages that are made of them. What they compute is tested by `make notebooks`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest

from notebooks.render import RenderError, render_all

ROOT = Path(__file__).parents[1]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def test_notebooks_are_numbered_without_gap() -> None:
    assert [path.name[:3] for path in PATHS] == [f"{i:02}_" for i in range(len(PATHS))]
    assert len(PATHS) >= 7


@every_notebook
def test_no_outputs_and_no_execution_counts(path: Path) -> None:
    cells = nbformat.read(path, as_version=nbformat.NO_CONVERT).cells
    carried = [c.id for c in cells if c.get("outputs") or c.get("execution_count") is not None or c.metadata]
    assert carried == [], "run `make notebooks-clear`"


@every_notebook
def test_format_kernel_and_ids(path: Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}, "run `make notebooks-clear`"
    prefix = notebook.cells[0].id.split("-")[0]
    assert all(re.fullmatch(rf"{prefix}-[a-z-]+", cell.id) for cell in notebook.cells)  # chosen, so that diffs stay small
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


@every_notebook
def test_starts_with_prose_and_ends_with_asserted_numbers(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert re.match(r"# \w.*\n\n\w", cells[0].source)
    last = ast.parse(cells[-1].source)
    assert sum(isinstance(node, ast.Assert) for node in ast.walk(last)) >= 4


@every_notebook
def test_links_lead_somewhere(path: Path) -> None:
    prose = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)#]+)\)", prose)
    assert targets
    assert [t for t in targets if not t.startswith("https://") and not (path.parent / t).exists()] == []


@every_notebook
def test_readme_lists_it(path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Notebooks\n")[2].partition("\n## ")[0]
    assert re.search(rf"^\| \[{path.stem[:2]}[^]]*\]\(notebooks/{path.name}\) \| .+ \|$", section, re.MULTILINE)


_PICTURE = """
class Picture:
    def _repr_mimebundle_(self, include=None, exclude=None):
        view = {"version_major": 2, "version_minor": 0, "model_id": "0"}
        return {"application/vnd.jupyter.widget-view+json": view, "image/png": b"\\x89PNG", "text/plain": "no picture"}
Picture()
"""


def _notebook(folder: Path, name: str, *code: str) -> Path:
    first = nbformat.v4.new_markdown_cell("# A *title*\n\nFirst [words](other.ipynb) of\nit.\n\nMore.")
    cells = [first, *map(nbformat.v4.new_code_cell, code)]
    path = folder / f"{name}.ipynb"
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": ""}}), path
    )
    return path


def test_page_has_words_outputs_links_and_pictures_instead_of_widgets(tmp_path: Path) -> None:
    path = _notebook(tmp_path, "one", "print(6 * 7)", _PICTURE)
    before = path.read_bytes()
    index, page = (written.read_text(encoding="utf-8") for written in render_all(tmp_path / "pages", [path]))
    assert '<a href="one.html">A title</a></dt>\n<dd>First words of it.</dd>' in index
    assert "<pre>42\n</pre>" in page
    assert 'href="other.html"' in page
    assert "data:image/png;base64,iVBORw==" in page
    assert 'type="application/vnd.jupyter.widget-view+json"' not in page
    assert path.read_bytes() == before


def test_pages_replace_a_folder_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "pages"
    folder.mkdir(parents=True)
    (folder / "stale.html").write_text("old")
    written = render_all(folder, [_notebook(tmp_path, "a_first", "1"), _notebook(tmp_path, "b_second", "2")])
    assert written == [folder / "index.html", folder / "a_first.html", folder / "b_second.html"]
    assert sorted(folder.iterdir()) == sorted(written)
    assert list(folder.parent.iterdir()) == [folder]
    assert '<a href="b_second.html">A title</a>' in (folder / "index.html").read_text(encoding="utf-8")


def test_a_notebook_that_fails_is_named_and_leaves_the_pages(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "index.html").write_text("old")
    bad = _notebook(tmp_path, "bad", "assert 1 + 1 == 3, 'not three'")
    with pytest.raises(RenderError, match=r"bad\.ipynb: AssertionError: not three"):
        render_all(folder, [_notebook(tmp_path, "good", "1"), bad])
    assert (folder / "index.html").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.ipynb", "good.ipynb", "pages"]
