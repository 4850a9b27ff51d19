"""What a sceptic looks for first: every public function says its status and shows a case whose answer is known."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable

import pytest

import keel_theory

FORMULAS = (
    "asymptotics",
    "design",
    "propagation",
    "sublayer",
    "symbolic_layer_norm",
    "symbolic_sublayer",
    "depthwise_training",
    "variance",
)
MODULES = [module.name for module in pkgutil.iter_modules(keel_theory.__path__) if not module.ispkg]
RUN_BY_CLAIMS = {"claim_checks"}  # one function per claim: the claim states, and keel verify shows, what each gives


def _functions(names: list[str]) -> dict[str, Callable[..., object]]:
    modules = {name: importlib.import_module(f"keel_theory.{name}") for name in names}
    return {
        f"{name}.{public}": value
        for name, module in modules.items()
        for public in getattr(module, "__all__", ())
        if inspect.isfunction(value := getattr(module, public)) and value.__module__ == module.__name__
    }


ALL = _functions([name for name in MODULES if name not in RUN_BY_CLAIMS])
WITH_STATUS = _functions(list(FORMULAS))


@pytest.mark.parametrize("name", ALL)
def test_every_public_function_has_an_example(name: str) -> None:
    assert ">>> " in (ALL[name].__doc__ or "")


@pytest.mark.parametrize("name", WITH_STATUS)
def test_every_formula_says_its_status(name: str) -> None:
    assert "Status: " in (WITH_STATUS[name].__doc__ or "")


@pytest.mark.parametrize("module", FORMULAS)
def test_every_module_of_formulas_names_its_source(module: str) -> None:
    documents = [importlib.import_module(f"keel_theory.{module}").__doc__ or ""]
    documents += [value.__doc__ or "" for name, value in WITH_STATUS.items() if name.startswith(f"{module}.")]
    assert any("Source: " in document for document in documents)
