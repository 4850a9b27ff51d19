"""Which column holds what: by the names that programs give to a loss, a learning rate, a step and a gradient norm.

A column's name may begin with a label of its own (``run 7 - train/loss``). Optimizer steps come before log calls:
``global_step`` before ``step`` before ``_step``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from probes.logs.runs import RunChoice
from probes.logs.table import LossLogError, Row, is_known, listing, number_in, words

__all__ = ["OF_BATCH", "QUANTITIES", "Columns", "find_columns", "given_columns", "is_other_column", "is_share_column"]

_NAMES: dict[str, tuple[str, ...]] = {
    quantity: tuple(names.split())
    for quantity, names in {
        "loss": "loss train_loss training_loss loss_train lm_loss train_lm_loss loss_avg train_loss_step training_loss_step "
        "loss_step losses",
        "lr": "lr learning_rate train_lr train_learning_rate lr_0 learning_rate_0 lr_adamw lrs",
        "step": "global_step trainer_global_step train_global_step optimizer_step optimizer_steps num_updates updates "
        "train_step step iteration iter steps",
        "grad_norm": "grad_norm gradient_norm train_grad_norm total_grad_norm total_norm gradnorm global_grad_norm "
        "grad_2_0_norm_total",
        "unigram_loss": "unigram_loss train_unigram_loss",
        "bigram_loss": "bigram_loss train_bigram_loss",
    }.items()
}
OF_BATCH = ("unigram_loss", "bigram_loss")
QUANTITIES = ("loss", "lr", "step", "grad_norm", "run", *OF_BATCH)
_WORDS = {"loss": "losses", "lr": "learning rates"}
_VALIDATION = frozenset({"eval", "val", "valid", "validate", "validation", "test", "dev"})
_NOT_ITS_OWN = {  # words before a name under which it is not the run's own
    "loss": _VALIDATION | {"unigram", "bigram", "aux", "auxiliary", "z", "balancing", "router", "kl", "initial"},
    "lr": _VALIDATION | {"peak", "max", "min", "final", "initial", "base", "best"},
}
_LOG_CALLS = len(_NAMES["step"])  # rank of wandb's _step and Step
_SURE_STEPS = 5  # so many of the first names are steps of the optimizer, whatever stands before them
_AVERAGES = frozenset({"avg", "average", "mean", "ema", "smooth", "smoothed", "running", "total", "epoch", "scale"})
_NO_SECOND_LOSS = _NOT_ITS_OWN["loss"] | _AVERAGES
_RUN_WORD = re.compile(r"(?:run|seed|trial|exp|experiment|replicate)?_?\d+|run|seed|trial")
_NORM = re.compile(r"(?:l?2|l2_?)?norms?")
_GRADIENT_NORM = re.compile(r"g(?:rads?|radients?)?norms?")
_RUN_BEFORE = re.compile(r"\s-\s|:\s")  # between a run's name and a metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The log's own names.

    Attributes:
        names: by quantity, those that were found; of the losses of a batch both or none.
        label: what the loss's name begins with.
        of_several_runs: whether other runs have columns of their own in the same rows.
        norms: further columns of gradient norms, as of parts of a model.
    """

    names: Mapping[str, str]
    label: str
    of_several_runs: bool = False
    norms: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    label: str
    rank: int


def is_other_column(name: str) -> bool:
    """Whether a column is of an evaluation and not of training.

    Example:
        >>> is_other_column("val/loss"), is_other_column("train/loss")
        (True, False)
    """
    return not _VALIDATION.isdisjoint(words(name))


def is_share_column(name: str) -> bool:
    """Whether a column numbers the parts that a step's loss is the mean over: micro-batches or ranks.

    Example:
        >>> is_share_column("micro_batch"), is_share_column("local rank"), is_share_column("run")
        (True, True, False)
    """
    parts = words(name)
    return "rank" in parts or any(part.startswith("micro") for part in parts)


def given_columns(given: Mapping[str, str], columns: Sequence[str], source: str) -> dict[str, str]:
    """The columns that were named for a quantity, as the log spells them.

    Args:
        given: names by quantity.
        columns: of the log.
        source: for messages.

    Raises:
        LossLogError: if the log has no such column, or there is no such quantity.
    """
    spelled = {}
    for quantity, name in given.items():
        if quantity not in QUANTITIES:
            raise LossLogError(f"--column names one of {', '.join(QUANTITIES)}, got '{quantity}'")
        alike = [name] if name in columns else [column for column in columns if words(column) == words(name)]
        if len(alike) != 1:
            raise LossLogError(f"'{source}' has no column '{name}' (--column); columns found are {listing(columns)}")
        spelled[quantity] = alike[0]
    return spelled


def find_columns(
    rows: Sequence[Row],
    source: str,
    *,
    given: Mapping[str, str],
    choice: RunChoice,
    notes: list[str],
    need_rates: bool,
) -> Columns:
    """Choose a column for each quantity.

    Args:
        rows: of one log.
        source: for messages.
        given: names that stand, by quantity.
        choice: of a run, where several have columns of their own.
        notes: columns that were passed over are named here.
        need_rates: refuse a log without learning rates.

    Raises:
        LossLogError: if losses, or learning rates where they are needed, are missing, or several columns could be meant.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    found = {quantity: _candidates(quantity, columns) for quantity in _NAMES}
    names = {quantity: name for quantity, name in given.items() if quantity != "run"}
    label, several = "", False
    if "loss" in names:
        named = _candidate(names["loss"], "loss", _NAMES["loss"])
        label = "" if named is None else named.label
    else:
        label, several = _label_of_loss(found, columns, source, choice)
        names["loss"] = next(each.name for each in found["loss"] if each.label == label)
        if not several:
            _refuse_more_losses(rows, columns, names["loss"], found["loss"], source)
    if "lr" not in names:
        rate = _rate_column(found["lr"], label, source, notes)
        if rate is None and need_rates:
            raise _missing("lr", source, columns)
        names |= {} if rate is None else {"lr": rate}
    norms = () if "grad_norm" in names else _gradient_columns(rows, columns, found["grad_norm"], label, several)
    if norms:
        names["grad_norm"] = norms[0]
        _note_norms(norms, notes)
    if "step" not in names:
        names |= _step_column(found["step"], label, rows, names, notes)
    twice = next(((a, b) for a, b in itertools.combinations(names, 2) if names[a] == names[b]), None)
    if twice is not None:
        raise LossLogError(
            f"column '{names[twice[0]]}' of '{source}' is taken for both {' and '.join(twice)}\n"
            f"name another for one of them, such as --column {twice[1]}=NAME"
        )
    return Columns(
        names=names | _batch_columns(found, label, names, notes), label=label, of_several_runs=several, norms=norms[1:]
    )


def _candidates(quantity: str, columns: Iterable[str]) -> list[_Candidate]:
    """Columns whose name ends in a known one (for learning rates begins in one), the best known first."""
    known = _NAMES[quantity]
    found = []
    for name in columns:
        each = _candidate(name, quantity, known)
        if each is not None and _NOT_ITS_OWN.get(quantity, frozenset()).isdisjoint(words(each.label)):
            found.append(each)
    return sorted(found, key=lambda each: each.rank)


def _candidate(name: str, quantity: str, known: Sequence[str]) -> _Candidate | None:
    parts = [(match.group().lower(), match.start()) for match in re.finditer(r"[^\W_]+", name)]
    for first, (_, start) in enumerate(parts):
        end = "_".join(part for part, _ in parts[first:])
        if end in known:
            before = name[:start]
            counts_calls = end == "step" and (before.endswith("_") or name == "Step")
            return _Candidate(name, before.rstrip(" -_/:.|"), _LOG_CALLS if counts_calls else known.index(end))
    plain = "_".join(part for part, _ in parts)
    if quantity == "lr" and plain.startswith(("lr_", "learning_rate_")):
        return _Candidate(name, "", len(known))
    return None


def _label_of_loss(
    found: Mapping[str, Sequence[_Candidate]], columns: Sequence[str], source: str, choice: RunChoice
) -> tuple[str, bool]:
    """Label of the loss to be read, and whether it is that of one run among several."""
    losses = {each.label: each.name for each in found["loss"]}
    if not losses:
        raise _missing("loss", source, columns)
    if "" in losses:
        return "", False
    if len(losses) == 1:
        return next(iter(losses)), False
    rates = {each.label for each in found["lr"]}
    ordered = sorted(losses, key=lambda label: columns.index(losses[label]))
    apart = all(_RUN_BEFORE.match(losses[label][len(label) :]) or _RUN_BEFORE.search(label) for label in ordered)
    if apart or len(rates & losses.keys()) > 1:
        return choice.among(ordered, source, "the names of their columns"), True
    raise _ambiguous("loss", list(losses.values()), source)


def _refuse_more_losses(
    rows: Sequence[Row], columns: Sequence[str], chosen: str, found: Sequence[_Candidate], source: str
) -> None:
    """Refuse a second column that could be the loss as well: of another known name, or of the same with a run's number."""
    label = next(each.label for each in found if each.name == chosen)
    alike = {each.name for each in found if each.label == label}
    others = [name for name in columns if name != chosen and (name in alike or _is_of_other_run(name, chosen))]
    others = [name for name in others if _NO_SECOND_LOSS.isdisjoint(words(name)) and _differs(rows, name, chosen)]
    if others:
        raise _ambiguous("loss", [chosen, *others], source)


def _is_of_other_run(name: str, chosen: str) -> bool:
    parts, own = words(name), words(chosen)
    n = len(own)
    more = parts[n:] if parts[:n] == own else parts[:-n] if parts[-n:] == own else []
    return bool(more) and all(_RUN_WORD.fullmatch(part) for part in more)


def _differs(rows: Sequence[Row], name: str, chosen: str) -> bool:
    """Whether a column is as full as another, and says something else."""
    beside = [row for row in rows if is_known(row.get(chosen))]
    known = [row for row in beside if is_known(row.get(name))]
    return 2 * len(known) > len(beside) and any(str(row[name]) != str(row[chosen]) for row in known)


def _rate_column(rates: Sequence[_Candidate], label: str, source: str, notes: list[str]) -> str | None:
    own = [each for each in rates if each.label == label] or [each for each in rates if not each.label]
    if not own and len({each.label for each in rates}) > 1:
        raise _ambiguous("lr", [each.name for each in rates], source)
    own = own or list(rates)
    if not own:
        return None
    if len(own) > 1 and own[0].rank == own[1].rank:
        notes.append(f"the learning rate is that of '{own[0].name}', the first of {len(own)} columns")
    return own[0].name


def _gradient_columns(
    rows: Sequence[Row], columns: Sequence[str], found: Sequence[_Candidate], label: str, several: bool
) -> tuple[str, ...]:
    """Columns of numbers that are named as norms of gradients are, those of a known name first."""
    named = [each.name for each in found]
    named += [name for name in columns if name not in named and _is_norm(name)]
    named = [name for name in named if not is_other_column(name) and _holds_numbers(rows, name)]
    own = [name for name in named if label and name.startswith(label)]
    without = {each.name for each in found if not each.label}
    return tuple(own or [name for name in named if name in without or not several])


def _is_norm(name: str) -> bool:
    parts = words(name)
    norm = any(_NORM.fullmatch(part) for part in parts)
    return (
        any(_GRADIENT_NORM.fullmatch(part) for part in parts)
        or (norm and any(part.startswith("grad") for part in parts))
        or (parts[-1:] == ["norm"] and set(parts[:-1]) <= {"train", "training", "total", "global"})
    )


def _holds_numbers(rows: Sequence[Row], name: str) -> bool:
    try:
        numbers = [number_in(row.get(name), "") for row in rows]
    except LossLogError:
        return False
    return any(number is not None for number in numbers)


def _note_norms(norms: Sequence[str], notes: list[str]) -> None:
    if len(norms) > 1:
        notes.append(f"gradient norms are those of {listing(norms)}: not finite where one of them is not")


def _step_column(
    steps: Sequence[_Candidate], label: str, rows: Sequence[Row], names: Mapping[str, str], notes: list[str]
) -> dict[str, str]:
    """The best known that changes and stands beside every loss, rate and gradient norm; else the one beside most of them."""
    own = [each for each in steps if each.label in ("", label)] or [each for each in steps if each.rank < _SURE_STEPS]
    told = [names[quantity] for quantity in ("loss", "lr", "grad_norm") if quantity in names]
    of_steps = [row for row in rows if any(is_known(row.get(name)) for name in told)]
    beside = {each.name: [row[each.name] for row in of_steps if is_known(row.get(each.name))] for each in own}
    useful = [each for each in own if len(set(map(str, beside[each.name]))) > min(1, len(of_steps) - 1)] or own[:1]
    if not useful:
        return {}
    chosen = next((each for each in useful if len(beside[each.name]) == len(of_steps)), None)
    chosen = chosen or max(useful, key=lambda each: len(beside[each.name]))
    if chosen.rank > own[0].rank and own[0].name != chosen.name:
        missing = len(of_steps) - len(beside[own[0].name])
        why = f"is missing in {missing} of {len(of_steps)} rows" if missing else "does not change"
        notes.append(f"steps are those of '{chosen.name}', for '{own[0].name}' {why}")
    return {"step": chosen.name}


def _batch_columns(
    found: Mapping[str, Sequence[_Candidate]], label: str, names: Mapping[str, str], notes: list[str]
) -> dict[str, str]:
    """The columns of the losses of a batch, where a log has both; a note where it has only one of them."""
    chosen = {}
    for quantity in OF_BATCH:
        own = [each for each in found[quantity] if each.label in ("", label)] or list(found[quantity])
        if quantity in names:
            chosen[quantity] = names[quantity]
        elif len({each.label for each in own}) == 1:
            chosen[quantity] = own[0].name
    missing = [quantity for quantity in OF_BATCH if quantity not in chosen]
    if len(missing) == 1:
        (name,) = chosen.values()
        notes.append(f"column '{name}' is not used: there is no {missing[0]} beside it")
    return {} if missing else chosen


def _missing(quantity: str, source: str, columns: Sequence[str]) -> LossLogError:
    cure = " or --ramp START:PEAK:STEPS" if quantity == "lr" else ""
    return LossLogError(
        f"'{source}' has no {_WORDS[quantity]}: columns found are {listing(columns)}\n"
        f"name one with --column {quantity}=NAME{cure}; known names are {', '.join(_NAMES[quantity][:7])}"
    )


def _ambiguous(quantity: str, names: Sequence[str], source: str) -> LossLogError:
    return LossLogError(
        f"'{source}' has several columns that could hold its {_WORDS[quantity]}: {listing(names)}\n"
        f"choose one with --column {quantity}=NAME"
    )
