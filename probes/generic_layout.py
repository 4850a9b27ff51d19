"""The residual stream of a family that is not in the table, block by block, accepted only if a forward pass proves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from probes.errors import UnsupportedModelError
from probes.layout import BlockKind, Boundary, Head, NormSite, Objective, ResidualLayout, Side, SublayerLayout, Tap
from probes.measurable import check_materialised
from probes.taps import input_of, stream_of

__all__ = ["generic_layout"]


class _NotProvedError(Exception):
    """Why a family's stream could not be established."""


class _NotInThisDtypeError(_NotProvedError):
    """The same, where another dtype may do: the family's code widens or narrows what it computes."""


@dataclass
class _Seen:
    """What the trial pass saw at each watched module."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Trial:
    """A tiny pass: the last hidden state (B, T, D), the model's logits (B, T, V) with their graph, what each module saw."""

    hidden: Tensor
    logits: Tensor
    seen: _Seen


@dataclass(frozen=True)
class _Form:
    """A head as it may be: hidden states to logits, the modules that do it, and the linear map and its factor if it is one."""

    logits: Callable[[Tensor], Tensor]
    modules: tuple[nn.Module, ...]
    linear: nn.Linear | None = None
    scale: float = 1.0


_SCALES: dict[str, Callable[[Tensor, float], Tensor]] = {"logit_scale": torch.mul, "logits_scaling": torch.div}
"""Fields of a configuration that hold a constant factor of the logits, and how it is applied."""


def generic_layout(model: nn.Module, family: str, supported: tuple[str, ...]) -> ResidualLayout:
    """Blocks, final norm and head of an unknown family, found by name and proved by one tiny pass, forward and backward.

    Accepted only if exactly one module list has the configuration's number of blocks, each block runs once and in order
    on the tensor the one before it returned, the hidden state that the head reads is the last block's output or a norm
    of it, the head (a linear map, that map times a factor of the configuration, or the modules that the model runs after its
    backbone) gives the model's own logits exactly, the pass can be differentiated, and no token of a causal model reaches
    an earlier one.

    Args:
        model: a ``transformers`` model with a head.
        family: its model type, for messages.
        supported: families of the table, for messages.

    Returns:
        A layout with one sub-layer of kind ``block`` per block.

    Raises:
        UnsupportedModelError: if any of this fails; the message names the family and what failed.
    """
    try:
        return _proved_layout(model, family)
    except _NotInThisDtypeError as error:
        reason, cause = f"{error}{_other_dtype(model)}", error.__cause__ or error
    except _NotProvedError as error:
        reason, cause = str(error), error
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever a family needs that is not known here
        reason, cause = f"a trial pass failed: {_told(error)}{_other_dtype(model)}", error
    raise UnsupportedModelError(
        f"family '{family}' is not supported: {reason}; supported families: {', '.join(supported)}"
    ) from cause


def _told(error: Exception) -> str:
    """What a library says, with the kind of error where the text alone says little."""
    return str(error) if isinstance(error, (RuntimeError, ValueError)) else f"{type(error).__name__}: {error}"


def _other_dtype(model: nn.Module) -> str:
    """What to try where a family computes partly in float32, whatever its weights are."""
    dtype = next(model.parameters()).dtype
    return (
        "" if dtype is torch.float32 else f"; tried in {dtype}, and the family may work in float32 alone: use --dtype float32"
    )


def _proved_layout(model: nn.Module, family: str) -> ResidualLayout:
    check_materialised(model)
    linear, backbone = _head_and_backbone(model)
    blocks, objective = _block_names(model), _objective(model)
    with _finite_weights(model):
        trial = _trial_pass(model, backbone, linear)
        head, seen, hidden = _proved_head(model, backbone, linear, trial), trial.seen, trial.hidden
        _check_chain(blocks, seen, hidden.shape)
        final = _final_norm(blocks, seen, hidden)
        _check_gradient(model, blocks[0], trial, objective)
    return ResidualLayout(
        family=family,
        objective=objective,
        n_blocks=len(blocks),
        boundaries=_boundaries(blocks, final),
        sublayers=tuple(_block_sublayer(i, block) for i, block in enumerate(blocks)),
        embedding_modules=_remaining_owners(model, (*blocks, *head.modules, *(() if final is None else (final,)))),
        final_norm=None if final is None else NormSite(module=final, role="final", unit_offset=_stores_offset(model, final)),
        head=head,
        blocks=blocks,
    )


def _head_and_backbone(model: nn.Module) -> tuple[nn.Linear, nn.Module]:
    get_head = getattr(model, "get_output_embeddings", None)
    head, backbone = get_head() if callable(get_head) else None, getattr(model, "base_model", None)
    if not isinstance(head, nn.Linear) or not isinstance(backbone, nn.Module) or backbone is model:
        raise _NotProvedError("it has no linear language-model head over a backbone")
    return head, backbone


def _block_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the blocks: the members of the one outermost module list as long as the configuration says."""
    count = getattr(model.config, "num_hidden_layers", None)
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    outermost = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    if not count or len(outermost) != 1:
        raise _NotProvedError("no single list of blocks of the length num_hidden_layers was found")
    return tuple(f"{outermost[0]}.{i}" for i in range(int(count)))


@contextmanager
def _finite_weights(model: nn.Module) -> Iterator[None]:
    """NaN and infinities are zero for as long as the structure is proved: where the stream runs is no matter of them."""
    kept = [(p, p.data) for p in model.parameters() if not torch.isfinite(p.data).all()]
    try:
        for parameter, values in kept:
            parameter.data = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        yield
    finally:
        for parameter, values in kept:
            parameter.data = values


def _trial_pass(model: nn.Module, backbone: nn.Module, linear: nn.Linear) -> _Trial:
    """A few tokens through the backbone and through the whole model, in the model's own dtype, with the graph."""
    seen = _Seen()
    ids = linear.out_features - 1 - torch.arange(8, device=linear.weight.device).reshape(2, 4) % linear.out_features
    with _watched(model, seen), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        hidden = stream_of(backbone(input_ids=ids, use_cache=False))
        return _Trial(hidden.detach(), _logits(model(input_ids=ids, use_cache=False)), seen)


def _proved_head(model: nn.Module, backbone: nn.Module, linear: nn.Linear, trial: _Trial) -> Head:
    """The first of the known forms of a head that gives the trial's logits from its last hidden state."""
    names = {module: name for name, module in model.named_modules()}
    chain = _modules_after(model, backbone, trial.seen)
    forms = [_Form(linear, (linear,), linear)]
    for scale, apply in _SCALES.items():
        factor = getattr(model.config, scale, None)
        if isinstance(factor, int | float) and factor:
            scaled, one = partial(_scaled, linear, apply, float(factor)), torch.ones((), dtype=torch.float64)
            forms.append(_Form(scaled, (linear,), linear, float(apply(one, float(factor)))))
    forms.append(_Form(nn.Sequential(*chain).forward, chain))
    with _watched(model, _Seen()), torch.no_grad():
        found = next((form for form in forms if _gives(form.logits, trial)), None)
    if found is None and not torch.isfinite(trial.logits).all():
        raise _NotInThisDtypeError("its logits of a few tokens are not finite, so that nothing can be proved from them")
    if found is None:
        raise _NotInThisDtypeError(
            f"its logits are not what its head makes of the last hidden state in {trial.hidden.dtype}: neither a linear map,"
            f" nor that map times a factor of the configuration ({', '.join(_SCALES)}), nor the modules after the backbone"
        )
    return Head(
        backbone=lambda input_ids: stream_of(backbone(input_ids=input_ids, use_cache=False)),
        logits=found.logits,
        linear=found.linear,
        scale=found.scale,
        modules=tuple(names[module] for module in found.modules if any(True for _ in module.parameters())),
    )


def _modules_after(model: nn.Module, backbone: nn.Module, seen: _Seen) -> tuple[nn.Module, ...]:
    """The model's own children outside the backbone, in the order in which the trial ran them."""
    return tuple(child for name in seen.calls if (child := dict(model.named_children()).get(name)) and child is not backbone)


def _scaled(linear: nn.Linear, apply: Callable[[Tensor, float], Tensor], factor: float, hidden: Tensor) -> Tensor:
    return apply(linear(hidden), factor)


def _gives(head: Callable[[Tensor], Tensor], trial: _Trial) -> bool:
    """Whether a head gives the trial's logits, whatever dtype the model returns them in, and takes (N, D) as well."""
    try:
        logits, flat = head(trial.hidden), head(trial.hidden.flatten(0, 1))
    except Exception:  # a form that does not fit, by its shapes or its dtype
        return False
    wide = torch.promote_types(logits.dtype, trial.logits.dtype)
    return flat.shape == logits.flatten(0, 1).shape and torch.equal(logits.to(wide), trial.logits.detach().to(wide))


def _check_gradient(model: nn.Module, first: str, trial: _Trial, objective: Objective) -> None:
    """The logits of the first tokens, differentiated down to the first block; in a causal model later tokens have no share."""
    stream = trial.seen.inputs[first]
    parameters = [p for p in model.get_submodule(first).parameters() if p.requires_grad]
    if not stream.requires_grad:
        stream, parameters = trial.seen.outputs[first], []  # a frozen embedding
    if not stream.requires_grad:
        return  # all of it is frozen
    early = trial.logits.shape[1] // 2
    try:
        with torch.enable_grad():  # whatever mode the caller is in
            gradient = torch.autograd.grad(trial.logits[:, :early].sum(), [stream, *parameters], allow_unused=True)[0]
    except Exception as error:
        raise _NotInThisDtypeError(f"it cannot be differentiated in {trial.logits.dtype}: {error}") from error
    if gradient is None:
        raise _NotProvedError(f"its logits do not depend on the stream at '{first}'")
    if objective is Objective.CAUSAL and gradient[:, early:].any():
        raise _NotProvedError("it is not causal: a token has a share in the logits of an earlier one")


@contextmanager
def _watched(model: nn.Module, seen: _Seen) -> Iterator[None]:
    """Record every module's stream in evaluation mode, then put hooks and modes back."""
    modes = {module: module.training for module in model.modules()}
    hooks = [m.register_forward_hook(partial(_record, seen, n), with_kwargs=True) for n, m in model.named_modules() if n]
    try:
        model.eval()
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training


def _record(seen: _Seen, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
    seen.calls.append(name)
    try:
        seen.inputs[name], seen.outputs[name] = input_of(args, kwargs), stream_of(output)
    except UnsupportedModelError:  # a module without a stream, such as a rotary table
        return


def _logits(output: object) -> Tensor:
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else stream_of(output)


def _check_chain(blocks: tuple[str, ...], seen: _Seen, shape: torch.Size) -> None:
    if [call for call in seen.calls if call in set(blocks)] != [*blocks, *blocks]:
        raise _NotProvedError("its blocks do not run once each, in order")
    for before, after in pairwise(blocks):
        if before not in seen.outputs or after not in seen.inputs or seen.outputs[before].shape != shape:
            raise _NotProvedError(f"'{before}' does not return the residual stream")
        if not torch.equal(seen.outputs[before], seen.inputs[after]):
            raise _NotProvedError(f"the output of '{before}' is not the input of '{after}'")


def _final_norm(blocks: tuple[str, ...], seen: _Seen, hidden: Tensor) -> str | None:
    last = seen.outputs[blocks[-1]]
    if torch.equal(last, hidden):
        return None
    for name, value in seen.outputs.items():
        if not name.startswith(blocks) and torch.equal(seen.inputs[name], last) and torch.equal(value, hidden):
            return name
    raise _NotInThisDtypeError("what lies between its last block and its head is not one norm")


def _stores_offset(model: nn.Module, name: str) -> bool:
    """Whether a norm's gain is 1 + w: measured on a vector of mean 0 and mean square 1."""
    norm = model.get_submodule(name)
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1:
        return False
    with torch.no_grad():
        signs = torch.ones_like(weight)
        signs[1::2] = -1
        gain = (norm(signs) - norm(-signs)) / 2 * signs
        return bool((gain - 1 - weight).abs().nansum() < (gain - weight).abs().nansum())


def _objective(model: nn.Module) -> Objective:
    name = type(model).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return Objective.CAUSAL
    if name.endswith("ForMaskedLM"):
        return Objective.MASKED
    raise _NotProvedError(f"{name} is neither a causal nor a masked language model")


def _boundaries(blocks: tuple[str, ...], final: str | None) -> tuple[Boundary, ...]:
    places = [Boundary(name="embedding", block=-1, tap=Tap(blocks[0], Side.INPUT))]
    places += [Boundary(name=f"block {i}", block=i, tap=Tap(block, Side.OUTPUT)) for i, block in enumerate(blocks)]
    if final is not None:
        places.append(Boundary(name="final norm", block=len(blocks) - 1, tap=Tap(final, Side.OUTPUT)))
    return tuple(places)


def _block_sublayer(index: int, block: str) -> SublayerLayout:
    return SublayerLayout(
        block=index,
        kind=BlockKind.BLOCK,
        boundary_in=index,
        boundary_out=index + 1,
        branch=None,
        modules=(block,),
        shortcut_known=False,
    )


def _remaining_owners(model: nn.Module, taken: tuple[str, ...]) -> tuple[str, ...]:
    """Modules outside the given ones that hold parameters themselves: all of them run before the first block."""
    inside = tuple(f"{name}." for name in taken)
    return tuple(
        name
        for name, module in model.named_modules()
        if name not in taken and not name.startswith(inside) and any(True for _ in module.parameters(recurse=False))
    )
