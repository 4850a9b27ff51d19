# %%
r"""The heat maps of ``figures/heat_maps.py`` with a plain FFN (ReLU) in the place of the gated one; all else is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from figures import heat_maps
from figures.heat_maps import compute, draw, finding

__all__ = ["SETTINGS", "compute", "draw", "finding", "main"]

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {preset: MappingProxyType({**settings, "ffns": ["relu"]}) for preset, settings in heat_maps.SETTINGS.items()}
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the heat maps; see :func:`figures.pipeline.run_main`."""
    from figures.pipeline import run_main

    run_main("heat_maps_relu", arguments)


# %%
if __name__ == "__main__":
    main()
