"""What the folder of a run of this toolkit says of its ramp and its text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from probes.divergence_criteria import telling_entropy
from probes.logs.json_rows import NOT_JSON

__all__ = ["is_own_run", "known_of_run"]


def is_own_run(log: Path | None) -> bool:
    """Whether a log lies in the folder of a run of this toolkit."""
    return log is not None and log.name == "log.jsonl" and log.with_name("training.json").is_file()


def known_of_run(log: Path | None, notes: list[str]) -> dict[str, Any]:
    """Ramp and text of a run of this toolkit, from the files beside its log.

    Args:
        log: the file that was read.
        notes: files that cannot be read.

    Returns:
        Those of ``ramp_steps``, ``unigram_entropy`` and ``initial_loss`` that are known, as in
        :class:`~probes.logs.run_log.RunLog`.
    """
    if log is None or log.name != "log.jsonl":
        return {}
    config = _object_in(log.with_name("training.json"), notes).get("config")
    if not isinstance(config, dict):
        return {}
    known: dict[str, Any] = {}
    steps = config.get("steps")
    if config.get("schedule") == "ramp" and isinstance(steps, int) and steps > 0:
        known["ramp_steps"] = steps
    corpus = _object_in(log.with_name("result.json"), notes).get("corpus")
    if isinstance(corpus, dict):
        entropy, n_tokens = corpus.get("unigram_entropy"), corpus.get("vocab_size")
        pairs = corpus.get("bigram_entropy", 0.0)
        if isinstance(entropy, float) and isinstance(pairs, float) and math.isfinite(entropy) and math.isfinite(pairs):
            known["unigram_entropy"] = telling_entropy(entropy, pairs)
        if isinstance(n_tokens, int) and n_tokens > 1:
            known["initial_loss"] = math.log(n_tokens)
    return known


def _object_in(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *NOT_JSON) as error:
        notes.append(f"{path.name} beside the log cannot be read and is not used: {error}")
        return {}
    return values if isinstance(values, dict) else {}
