"""GGUF files give the numbers of their safetensors twins, or are refused by name."""

from __future__ import annotations

import pytest
import torch

from probes.checkpoint import load_checkpoint
from tests.probes._gguf import ARCHITECTURES, gguf_model, write_gguf
from tests.probes._tiny import VOCAB


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("n_tokens", [16, 128])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_twin(arch, n_tokens, tmp_path):
    original = gguf_model(arch, max_position_embeddings=128)
    original.save_pretrained(tmp_path / "folder")
    file = write_gguf(tmp_path / "model.gguf", original, arch)
    ids = torch.randint(VOCAB, (2, n_tokens))
    plain = load_checkpoint(tmp_path / "folder").model
    read = load_checkpoint(file)
    assert read.warnings == ()
    torch.testing.assert_close(logits(read.model, ids), logits(plain, ids), rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(plain, ids), logits(original, ids), rtol=0, atol=1e-5)
