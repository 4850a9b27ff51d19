"""Model families: for each, a few lines that say where its residual stream runs.

A description is data, with names relative to the model or to a block; :func:`describe_model` turns it into the
:class:`~probes.layout.ResidualLayout` of one loaded model. ``description.py`` says what a description holds; ``dense.py``,
``parallel.py``, ``experts.py`` and ``encoders.py`` are the tables, ``describe.py`` the mechanism. A family that is in no
table is described at block level by ``probes/generic_layout.py`` where that can be verified, and refused otherwise.
"""

from __future__ import annotations

from probes.families.describe import OWN_FAMILY, SUPPORTED_FAMILIES, describe_model, effective_gain, owned_names
from probes.families.description import Family, Part

__all__ = ["OWN_FAMILY", "SUPPORTED_FAMILIES", "Family", "Part", "describe_model", "effective_gain", "owned_names"]
