"""Ways to measure gradient norms of one causal language model, each as a user of it would write them.

Every contender but the bare pass measures the same: the norm of the loss gradient at the input of every block, and the
gradient norm of every parameter, from one forward and one backward pass. ``autograd`` is the slow and obvious answer the others
are checked against, and is not timed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "CONTENDERS",
    "DEPTH_SEED",
    "Contender",
    "Norms",
    "Pass",
    "depth_pass",
    "load_prepared",
    "prepare_checkpoint",
]

DEPTH_SEED = 0
_DEPTH_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Norms:
    """What a pass found.

    Attributes:
        stream: norm of the loss gradient at the input of each block.
        parameters: gradient norm of all parameters together, a tied one counted once.
    """

    stream: list[float]
    parameters: float


Pass = Callable[[], Norms | None]
"""One forward and backward pass, with the gradients released at its end."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to measure.

    Attributes:
        prepare: (model, ids of shape (B, T)) -> its pass.
        package: distribution that it needs beyond this toolkit's own; None where it needs none.
        module: import name of that distribution.
    """

    prepare: Callable[[nn.Module, Tensor], Pass]
    package: str | None = None
    module: str | None = None

    @property
    def installed(self) -> bool:
        """Whether it can be run here."""
        return self.module is None or find_spec(self.module) is not None


def _blocks(model: nn.Module) -> nn.ModuleList:
    blocks = model.get_submodule("model.layers")
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def _parameter_norm(model: nn.Module) -> float:
    """The loop over ``.grad`` that every user writes; the gradients are released afterwards."""
    norms = [parameter.grad.norm().item() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return math.hypot(*norms)


def _bare(model: nn.Module, ids_BT: Tensor) -> Pass:
    def one_pass() -> None:
        model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return one_pass


def _autograd(model: nn.Module, ids_BT: Tensor) -> Pass:
    """Everything retained; float64 norms of it."""

    def one_pass() -> Norms:
        output = model(input_ids=ids_BT, labels=ids_BT, use_cache=False, output_hidden_states=True)
        streams = output.hidden_states[: len(_blocks(model))]  # the one after them comes after the final norm
        for stream in streams:
            stream.retain_grad()
        output.loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad(set_to_none=True)
        return Norms([_norm(stream.grad) for stream in streams], math.hypot(*map(_norm, gradients)))

    return one_pass


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _keel(model: nn.Module, ids_BT: Tensor) -> Pass:
    from probes.families import describe_model
    from probes.gradient_norms import measure_gradient_norms

    layout = describe_model(model)
    inputs = [min(s.boundary_in for s in layout.sublayers if s.block == i) for i in range(layout.n_blocks)]

    def one_pass() -> Norms:
        result = measure_gradient_norms(model, [ids_BT], layout=layout)
        parts = [sublayer.part for sublayer in result.sublayers] + list(result.parts)
        return Norms(
            [result.boundaries[i].stream_grad.value for i in inputs], math.hypot(*(part.grad_norm.value for part in parts))
        )

    return one_pass


def _hooks(model: nn.Module, ids_BT: Tensor) -> Pass:
    """Hand-written: a hook on each block puts a hook on its input tensor."""

    def one_pass() -> Norms:
        stream: dict[int, float] = {}

        def watch(index: int, tensor: Tensor) -> None:
            def read(gradient: Tensor) -> None:
                stream[index] = gradient.norm().item()

            tensor.register_hook(read)  # type: ignore[no-untyped-call]

        handles = [
            block.register_forward_pre_hook(lambda _, args, index=i: watch(index, args[0]))
            for i, block in enumerate(_blocks(model))
        ]
        try:
            model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()
        finally:
            for handle in handles:
                handle.remove()
        return Norms([stream[i] for i in range(len(handles))], _parameter_norm(model))

    return one_pass


def _nnsight(model: nn.Module, ids_BT: Tensor) -> Pass:
    from nnsight import NNsight

    traced: Any = NNsight(model)
    blocks = traced.model.layers

    def one_pass() -> Norms:
        with traced.trace(input_ids=ids_BT, labels=ids_BT, use_cache=False):
            streams = [block.input for block in blocks]
            loss = traced.output.loss
            norms: Any = list().save()  # type: ignore[attr-defined]  # noqa: C408 - only nnsight's list has save()
            with loss.backward():
                for stream in reversed(streams):  # gradients are asked for in the order in which they come
                    norms.append(stream.grad.norm())
        return Norms([float(norm) for norm in reversed(norms)], _parameter_norm(model))

    return one_pass


def _transformer_lens(model: nn.Module, ids_BT: Tensor) -> Pass:
    from transformer_lens.model_bridge import TransformerBridge

    hugging_face: Any = model
    folder = hugging_face.config._name_or_path
    bridge: Any = TransformerBridge.boot_transformers(folder, hf_model=hugging_face, device="cpu")
    names = [f"blocks.{i}.hook_in" for i in range(len(_blocks(model)))]

    def one_pass() -> Norms:
        stream: dict[str, float] = {}

        def read(gradient: Tensor, hook: Any) -> None:
            stream[hook.name] = gradient.norm().item()

        with bridge.hooks(bwd_hooks=[(name, read) for name in names]):
            bridge(ids_BT, return_type="loss").backward()
        return Norms([stream[name] for name in names], _parameter_norm(model))

    return one_pass


CONTENDERS: Mapping[str, Contender] = {
    "bare": Contender(_bare),
    "keel": Contender(_keel),
    "hooks": Contender(_hooks),
    "nnsight": Contender(_nnsight, "nnsight", "nnsight"),
    "transformer-lens": Contender(_transformer_lens, "transformer-lens", "transformer_lens"),
    "autograd": Contender(_autograd),
}
"""By name. ``bare`` measures nothing; ``autograd`` is the answer to agree with."""


def prepare_checkpoint(folder: Path, seq_len: int) -> None:
    """Write SmolLM2-135M as float32 safetensors, which load in a second, with the first tokens of the default text."""
    from safetensors.torch import save_model

    from probes.checkpoint import load_checkpoint
    from probes.memory import release_free_memory
    from probes.text import checkpoint_batches, default_text

    checkpoint = load_checkpoint("smollm2")
    (batch,) = checkpoint_batches(checkpoint, default_text(), n_tokens=seq_len, seq_len=seq_len)
    (folder / "ids.json").write_text(json.dumps(batch.inputs.tolist()))
    config: Any = checkpoint.model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are float32 now
    config.save_pretrained(folder)
    save_model(checkpoint.model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _any_tokenizer().save_pretrained(folder)
    del checkpoint
    release_free_memory()


def _any_tokenizer() -> Any:
    """A tokenizer of two words: transformer-lens reads one from the folder, although it is given ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, unk_token="a", bos_token="<end>", eos_token="<end>"
    )


def load_prepared(folder: Path) -> tuple[nn.Module, Tensor]:
    """The model in evaluation mode and the ids (1, T), without this toolkit: every contender starts from the same."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval(), torch.tensor(json.loads((folder / "ids.json").read_text()))


def depth_pass(name: str, n_blocks: int) -> Pass:
    """The bare pass, or this toolkit's, over a Keel model of width 16."""
    from probes.config import ModelConfig
    from probes.gradient_norms import measure_gradient_norms
    from probes.model import Transformer, residual_layout

    config = ModelConfig(scheme="keel", n_blocks=n_blocks, width=16, ffn_width=32, n_heads=2, n_kv_heads=1, seed=DEPTH_SEED)
    model = Transformer(config).eval()
    layout = residual_layout(model)
    ids_BT = torch.randint(config.vocab_size, (1, _DEPTH_TOKENS), generator=torch.Generator().manual_seed(DEPTH_SEED))

    def bare() -> None:
        loss = model.loss(ids_BT[:, :-1], ids_BT[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)

    def keel() -> None:
        measure_gradient_norms(model, [ids_BT], layout=layout)

    return {"bare": bare, "keel": keel}[name]
