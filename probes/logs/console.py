"""Losses in what training programs print: one pattern per program says which lines count, one reads the numbers on them."""

from __future__ import annotations

import re

from probes.logs.json_rows import TRAINER_NOTE, json_rows
from probes.logs.table import Row

__all__ = ["console_rows"]

_NUMBER = r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|nan|inf(?:inity)?)"
_VALUE = rf"(?:{_NUMBER}|none|null|nil|n/a|na|<na>|#n/a|missing|unknown|\?|[-–—]{{1,2}}(?=[\s|,;]|$))"  # also one not known
_NAME = r"[a-z][\w./()-]*(?: [a-z(][\w./()-]*)*?"
_PAIR = re.compile(rf"({_NAME})(?:\s*[:=]\s*|\s+)({_VALUE})(?![\w.])", re.IGNORECASE)
_QUOTED_PAIR = re.compile(r"'([^']+)':\s*'?([^',}]*)'?")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_OBJECT = re.compile(r'\{"[^{}]*\}\s*$')
_LINES = {  # of each program: the lines that tell of a step
    "Trainer": re.compile(r"\{[^{}]*'(?:loss|learning_rate)':[^{}]*\}"),
    "Megatron-LM": re.compile(r"\biteration\s+\d+/\s*\d+\s*\|.*\b(?:learning rate|loss):"),
    "torchtitan": re.compile(r"(?<!validate )\bstep:\s*\d+\s+loss:"),
    "nanoGPT": re.compile(r"\biter \d+: loss "),
    "estimates of nanoGPT": re.compile(r"\bstep \d+: train loss "),
}
_ANY_PROGRAM = re.compile(
    rf"^(?!.*\b(?:val|valid|validate|validation|eval|test)\b.*\b(?:step|iter|iteration)\b[\s:=#\[]*\d).*"
    rf"\b(?:step|iter|iteration)\b[\s:=#\[]*\d.*(?:\b|_)(?:loss|loss train|lr|learning rate)\b\s*[:=]?\s*{_VALUE}",
    re.IGNORECASE,
)


def console_rows(text: str, notes: list[str]) -> list[Row]:
    r"""Rows of printed text, by the program whose lines are most; none where no line tells of a step.

    Args:
        text: of the file; colours and progress bars are left out.
        notes: what a Trainer does not print is named here.

    Example:
        >>> console_rows("loading ...\niter 7: loss 4.1250, time 12.34ms, mfu 1.23%", [])
        [{'iter': '7', 'loss': '4.1250', 'mfu': '1.23'}]
    """
    lines = _COLOUR.sub("", text).splitlines()
    found = {program: [line for line in lines if pattern.search(line)] for program, pattern in _LINES.items()}
    program = max(found, key=lambda name: len(found[name]))
    if not found[program]:
        return [_pairs(line) for line in lines if _ANY_PROGRAM.search(line)] or _objects(text, lines)
    if program != "Trainer":
        return [_pairs(line) for line in found[program]]
    notes.append(TRAINER_NOTE)
    pattern = _LINES[program]
    return [dict(_QUOTED_PAIR.findall(match.group())) for line in lines for match in pattern.finditer(line)]


def _objects(text: str, lines: list[str]) -> list[Row]:
    """JSON objects at the ends of lines of other text."""
    if text.lstrip()[:1] in ("{", "["):
        return []
    found = [_OBJECT.search(line) for line in lines]
    return json_rows("", "\n".join(match.group() for match in found if match), []) if any(found) else []


def _pairs(line: str) -> Row:
    return {name: value.replace(",", "") for name, value in _PAIR.findall(line)}
