"""Optional packages: what the base install must not need, and the extras that messages name."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {
    extra: [re.split(r"[<>=]", requirement)[0] for requirement in requirements]
    for extra, requirements in PROJECT["optional-dependencies"].items()
}
PACKAGES = sorted(package for packages in EXTRAS.values() for package in packages)
SOURCES = sorted((ROOT / "probes").rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_the_base_install_needs_no_extra(package: str) -> None:
    assert not any(re.match(rf"{package}\b", requirement) for requirement in PROJECT["dependencies"])


@pytest.mark.parametrize("extra", ["sweep", "data", "logs"])
def test_a_message_names_the_extra_that_brings_its_package(extra: str) -> None:
    named = [path for path in SOURCES if f"'keel-dynamics[{extra}]'" in path.read_text(encoding="utf-8")]
    assert named
    for path in named:
        assert any(package in path.read_text(encoding="utf-8") for package in EXTRAS[extra])


def test_no_message_names_an_extra_that_does_not_exist() -> None:
    named = {name for path in SOURCES for name in re.findall(r"keel-dynamics\[(\w+)\]", path.read_text(encoding="utf-8"))}
    assert named <= EXTRAS.keys()


def test_training_and_reading_logs_import_no_optional_package() -> None:
    modules = "probes.training, probes.corpus, probes.text_documents, probes.logs, probes.sweep, probes.cli.main"
    code = f"import sys, {modules}; print([name for name in {PACKAGES} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_every_package_of_the_tree_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    tops = ("keel_theory", "probes", "figures")
    found = {str(path.parent.relative_to(ROOT)).replace("/", ".") for top in tops for path in (ROOT / top).rglob("__init__.py")}
    assert set(listed) == found
