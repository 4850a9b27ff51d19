"""Which stored tensors make which parameters, and how: the conversions of ``transformers``, parameter by parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from probes.errors import CheckpointError
from probes.streaming.files import FileReader
from probes.weight_files import StoredTensor, WeightFiles

__all__ = ["Recipe", "SafetensorsRecipe", "safetensors_recipes"]


class Recipe(Protocol):
    """How some parameters of a model come out of a file."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the parameters it fills."""

    @property
    def n_bytes(self) -> int:
        """Bytes that filling them reads."""

    @property
    def has_rows(self) -> bool:
        """Whether rows of its one target can be read alone."""

    def fill(self, outs: Mapping[str, Tensor]) -> None:
        """Write all targets into tensors of their shape, cast to their dtype."""

    def fill_rows(self, out: Tensor, first_row: int) -> None:
        """Write consecutive rows of the one target."""


@dataclass(frozen=True, slots=True)
class SafetensorsRecipe:
    """Parameters from safetensors.

    Attributes:
        reader: of the files.
        sources: names and places of the stored tensors.
        targets: names of the parameters it fills.
        convert: stored tensors by name -> parameters by name; None where the one source is the one target.
    """

    reader: FileReader
    sources: tuple[tuple[str, StoredTensor], ...]
    targets: tuple[str, ...]
    convert: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of all sources."""
        return sum(stored.n_bytes for _, stored in self.sources)

    @property
    def has_rows(self) -> bool:
        """True for a tensor that is stored as it is used."""
        return self.convert is None

    def fill(self, outs: Mapping[str, Tensor]) -> None:
        """Read, convert where the family needs it, and cast."""
        if self.convert is None:
            self.reader.read(self.sources[0][1], outs[self.targets[0]])
            return
        dtype = next(iter(outs.values())).dtype
        read = {name: torch.empty(stored.shape, dtype=dtype) for name, stored in self.sources}
        for name, stored in self.sources:
            self.reader.read(stored, read[name])
        for name, value in self.convert(read).items():
            outs[name].copy_(value)

    def fill_rows(self, out: Tensor, first_row: int) -> None:
        """Read rows and cast them."""
        self.reader.read(self.sources[0][1], out, first_row)


def safetensors_recipes(model: nn.Module, files: WeightFiles, reader: FileReader) -> tuple[list[SafetensorsRecipe], list[str]]:
    """How each parameter and stored buffer of a ``transformers`` model comes out of its files.

    Args:
        model: on the meta device.
        files: the checkpoint.
        reader: of its files.

    Returns:
        The recipes in the order of the model's blocks, and the names of stored tensors that belong to no part of the model.

    Raises:
        CheckpointError: if a tensor has another shape than the configuration asks for.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = cast("Sequence[Any]", get_model_conversion_mapping(cast("Any", model)))
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    expected = model.state_dict()
    prefix = str(getattr(model, "base_model_prefix", ""))
    plain: list[SafetensorsRecipe] = []
    converted: dict[str, _Converted] = {}
    unused = []
    for name in sorted(files.tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:
            target, pattern = name, None
        if target not in expected:
            unused.append(name)
        elif pattern is None:
            plain.append(SafetensorsRecipe(reader, ((name, files.tensors[name]),), (target,)))
        else:
            group = converted.setdefault(target, _Converted(by_pattern[pattern], target, model))
            group.sources.append((name, pattern))
    recipes = plain + [group.recipe(files, reader) for group in converted.values()]
    for shape, name, stored in _shapes(recipes):
        if shape != tuple(expected[name].shape):
            raise CheckpointError(
                f"{stored}: tensor '{name}' has shape {shape}, its configuration asks for {tuple(expected[name].shape)}"
            )
    return recipes, _apart_from_expected_leftovers(model, unused)


class _Converted:
    """Tensors that one converter of ``transformers`` turns into one or more parameters."""

    def __init__(self, converter: Any, target: str, model: nn.Module) -> None:
        self.converter, self.target, self.model = converter, target, model
        self.sources: list[tuple[str, str]] = []

    def recipe(self, files: WeightFiles, reader: FileReader) -> SafetensorsRecipe:
        sources = tuple((name, files.tensors[name]) for name, _ in self.sources)
        shapes = self.convert({name: torch.empty(stored.shape, device="meta") for name, stored in sources})
        return SafetensorsRecipe(reader, sources, tuple(shapes), self.convert)

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.sources:
            converter.add_tensor(self.target, name, pattern, tensors[name])
        made = converter.convert(self.target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _shapes(recipes: Sequence[SafetensorsRecipe]) -> Iterator[tuple[tuple[int, ...], str, str]]:
    """Shape, parameter and file of everything that the recipes make."""
    for recipe in recipes:
        place = str(recipe.sources[0][1].file)
        if recipe.convert is None:
            yield recipe.sources[0][1].shape, recipe.targets[0], place
            continue
        made = recipe.convert({name: torch.empty(stored.shape, device="meta") for name, stored in recipe.sources})
        for name, value in made.items():
            yield tuple(value.shape), name, place


def _apart_from_expected_leftovers(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Names without those that the family is known to leave behind, such as masks stored by old versions."""
    import re

    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]
