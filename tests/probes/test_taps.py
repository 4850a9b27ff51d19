from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from probes.errors import UnsupportedModelError
from probes.taps import input_of, stream_of

X = torch.arange(24.0).reshape(2, 3, 4)


@dataclass
class PlainOutput:
    note: str
    hidden: Tensor


WRAPPINGS = {
    "tensor": lambda x: x,
    "one tuple": lambda x: (x,),
    "tensor and cache": lambda x: (x, object()),
    "list": lambda x: [x],
    "cache first": lambda x: (None, x),
    "dataclass": lambda x: PlainOutput(note="n", hidden=x),
    "model output": lambda x: BaseModelOutput(last_hidden_state=x),
    "dict": lambda x: {"hidden_states": x},
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_stream_is_the_whole_batch_whatever_the_wrapping(wrap):
    assert stream_of(wrap(X)) is X
    assert stream_of(wrap(X)).shape == (2, 3, 4)


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_stream_seen_by_a_forward_hook_is_the_whole_batch(wrap):
    class Layer(nn.Module):
        def forward(self, hidden_states: Tensor) -> object:
            return wrap(hidden_states + 1)

    layer, seen = Layer(), []
    layer.register_forward_hook(lambda module, args, output: seen.append(stream_of(output)))
    layer(X)
    assert torch.equal(seen[0], X + 1)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((X,), {}), ((), {"hidden_states": X}), ((None, X), {}), ((X, X + 1), {"hidden_states": X + 2})],
    ids=["positional", "keyword", "after none", "positional wins"],
)
def test_input_is_the_hidden_state(args, kwargs):
    assert input_of(args, kwargs) is X


@pytest.mark.parametrize("value", [None, (), (None,), 3, "text", PlainOutput], ids=str)
def test_output_without_tensor_is_refused(value):
    with pytest.raises(UnsupportedModelError, match="holds no tensor"):
        stream_of(value)


def test_input_without_tensor_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"1 positional arguments, keywords \['mask'\]"):
        input_of((None,), {"mask": X})
