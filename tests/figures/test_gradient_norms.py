from __future__ import annotations

import matplotlib as mpl
import pandas as pd
import pytest
import torch

from figures.gradient_norms import draw
from probes.gradient_norms import measure_gradient_norms
from probes.model import Transformer
from tests.probes._models import small_config
from tests.probes._tiny import tiny_ids, tiny_model

mpl.use("Agg")


def frame_of(n_blocks: int) -> pd.DataFrame:
    model = Transformer(small_config("keel", n_blocks=n_blocks, compute_dtype="float32", init_std=0.02))
    return measure_gradient_norms(model, [torch.arange(8)[None]]).to_frame()


@pytest.mark.parametrize("n_blocks", [3, 512])
def test_every_sublayer_has_its_mark_on_a_log_axis(n_blocks: int) -> None:
    figure = draw(frame_of(n_blocks))
    above, below = figure.axes
    assert above.get_yscale() == below.get_yscale() == "log"
    labels = {text.get_text() for axes in figure.axes for text in axes.get_legend().get_texts()}
    assert labels >= {"attention", "FFN", "full gradient"}
    marks = [line for line in below.lines if line.get_label() in {"_child0", "_child1"} or line.get_marker() in {"o", "^"}]
    assert sum(len(line.get_xdata()) for line in marks) == 2 * n_blocks
    mpl.pyplot.close(figure)


def test_what_has_no_place_on_a_log_axis_is_named() -> None:
    model = tiny_model("llama", torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(torch.nan)
    figure = draw(measure_gradient_norms(model, [tiny_ids()]).to_frame())
    words = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert any("NaN" in word for word in words)
    mpl.pyplot.close(figure)
