"""Execute the notebooks and write them as HTML pages with an index: ``python notebooks/render.py build/docs``.

All pages or none: they are written beside the folder, which is replaced when the last one is done. A notebook that fails, or a
number that is not what the notebook asserts, leaves the pages that were there.
"""

from __future__ import annotations

import argparse
import html
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from traitlets.config import Config

__all__ = ["Page", "RenderError", "main", "render", "render_all"]

NOTEBOOKS = Path(__file__).parent
_TIMEOUT = 600
"""Seconds that one cell may take."""
_RICHEST_FIRST = ["text/html", "text/markdown", "image/svg+xml", "text/latex", "image/png", "text/plain"]
"""No widget among them: a page has no kernel, so a slider's picture is shown."""
_LINK = re.compile(r'href="(\w+)\.ipynb"')
_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Keel dynamics: notebooks</title>
<style>
body {{ font: 16px/1.5 sans-serif; max-width: 44em; margin: 3em auto; padding: 0 1em; }}
dt {{ margin-top: 1em; }}
</style>
</head>
<body>
<h1>Keel dynamics: notebooks</h1>
<p>Executed notebooks, every number checked at the end of its page. Formulas are drawn by MathJax, from the network.</p>
<dl>
{entries}
</dl>
</body>
</html>
"""


class RenderError(Exception):
    """A notebook does not run. The message names it."""


@dataclass(frozen=True, slots=True)
class Page:
    """One executed notebook.

    Attributes:
        name: of its file, without suffix.
        title: first heading.
        summary: first paragraph, as plain text.
        content: HTML.
    """

    name: str
    title: str
    summary: str
    content: str


def render(path: Path) -> Page:
    """Execute a notebook in its own folder and turn it into a page; the file is not changed.

    The client leaves sockets to its kernel open, so this is better called in a process of its own, as :func:`render_all` does.

    Args:
        path: of the notebook.

    Returns:
        The page; links to other notebooks lead to their pages.

    Raises:
        RenderError: if a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook, timeout=_TIMEOUT, store_widget_state=False, resources={"metadata": {"path": str(path.parent)}}
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise RenderError(f"{path.name}: {error.ename}: {error.evalue}") from error
    config = Config({"NbConvertBase": {"display_data_priority": _RICHEST_FIRST}})
    title, summary = _words(notebook)
    exporter = HTMLExporter(config=config)  # type: ignore[no-untyped-call]
    body, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": title}})
    return Page(path.stem, title, summary, _LINK.sub(r'href="\1.html"', body))


def render_all(folder: Path, paths: Sequence[Path], *, n_workers: int = 2) -> list[Path]:
    """Execute notebooks, each from a process of its own, and replace a folder by their pages.

    Args:
        folder: of the pages; what is there is kept until all are done.
        paths: notebooks, in the order of the index.
        n_workers: notebooks executed at a time.

    Returns:
        The files written, the index first.
    """
    with ProcessPoolExecutor(n_workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        pages = list(pool.map(render, paths))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as place:
        new, old = Path(place, "new"), Path(place, "old")
        new.mkdir()
        new.joinpath("index.html").write_text(_index(pages), encoding="utf-8")
        for page in pages:
            new.joinpath(f"{page.name}.html").write_text(page.content, encoding="utf-8")
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    return [folder / "index.html", *(folder / f"{page.name}.html" for page in pages)]


def _words(notebook: NotebookNode) -> tuple[str, str]:
    """First heading and first paragraph of the first cell, without marks."""
    heading, _, rest = notebook.cells[0].source.partition("\n")
    return _plain(heading.lstrip("# ")), _plain(rest.strip().split("\n\n")[0].replace("\n", " "))


def _plain(markdown: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown).translate(str.maketrans("", "", "*`$"))


def _index(pages: Sequence[Page]) -> str:
    entries = (
        f'<dt><a href="{page.name}.html">{html.escape(page.title)}</a></dt>\n<dd>{html.escape(page.summary)}</dd>'
        for page in pages
    )
    return _INDEX.format(entries="\n".join(entries))


def main(arguments: Sequence[str] | None = None) -> None:
    """Render all notebooks of this folder.

    Raises:
        SystemExit: with 1 if one of them fails.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the pages; replaced as a whole")
    options = parser.parse_args(arguments)
    try:
        written = render_all(options.folder, sorted(NOTEBOOKS.glob("*.ipynb")))
    except RenderError as error:
        print(f"render: {error}; no page was changed", file=sys.stderr)
        raise SystemExit(1) from error
    print(*written, sep="\n")


if __name__ == "__main__":
    main()
