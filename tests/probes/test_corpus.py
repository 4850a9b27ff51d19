"""The text: a split without leakage, landmarks by hand, a sampler that needs only the step."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from probes.corpus import Corpus, CorpusConfig, build_corpus
from probes.errors import TextError
from probes.ngram_losses import bigram_entropy, unigram_entropy
from tests.probes._runs import small_corpus


def _paragraph(i: int) -> str:
    return f"paragraph number {i} of a text that is long enough to be recognised when it occurs a second time\n"


@pytest.fixture
def folder(tmp_path):
    """Thirty documents; the last is a copy of the first, and all share one paragraph."""
    for i in range(29):
        own = "\n".join(_paragraph(1000 * i + j) + "\n" for j in range(12))
        (tmp_path / f"{i:02d}.txt").write_text(own + "\n\n" + _paragraph(-1) + "\n\nend " + str(i))
    (tmp_path / "99.txt").write_text((tmp_path / "00.txt").read_text())
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\xff")
    return tmp_path


def _text(tokens) -> str:
    return bytes(tokens.astype(np.uint8)).decode()


def test_no_paragraph_is_on_both_sides(folder) -> None:
    corpus = build_corpus(CorpusConfig(sources=(str(folder),), validation_share=0.2))
    train = {p.strip() for p in _text(corpus.train).split("\n\n")}
    validation = [p.strip() for p in _text(corpus.validation).split("\n\n")]
    assert sum(len(p) >= 64 for p in validation) > 20
    assert not [p for p in validation if len(p) >= 64 and p in train]
    assert _paragraph(-1).strip() in train
    assert corpus.shared_share > 0


def test_equal_documents_are_kept_once_and_what_is_not_text_is_counted(folder) -> None:
    corpus = build_corpus(CorpusConfig(sources=(str(folder),), validation_share=0.2))
    assert (corpus.n_documents, corpus.n_duplicates, corpus.n_skipped) == (29, 1, 1)


def test_every_character_of_a_single_file_is_on_exactly_one_side(tmp_path) -> None:
    text = "".join(f"line {i}\n" for i in range(500))
    (tmp_path / "one.txt").write_text(text)
    corpus = build_corpus(CorpusConfig(sources=(str(tmp_path / "one.txt"),), validation_share=0.1))
    assert _text(corpus.train) + _text(corpus.validation) == text
    assert len(corpus.validation) == pytest.approx(0.1 * len(text), abs=10)


def test_the_order_of_the_files_on_disk_does_not_matter(folder) -> None:
    config = CorpusConfig(sources=(str(folder),))
    before = build_corpus(config).content_hash
    for name in ("05.txt", "03.txt"):
        content = (folder / name).read_text()
        (folder / name).unlink()
        (folder / name).write_text(content)
    assert build_corpus(config).content_hash == before
    (folder / "05.txt").write_text("another text\n" * 50)
    assert build_corpus(config).content_hash != before


def test_the_standard_library_is_megabytes_of_text_with_known_landmarks() -> None:
    corpus = build_corpus()
    assert len(corpus.train) > 5e6
    assert corpus.n_documents > 300
    assert 2.9 < corpus.unigram_entropy < 3.6
    assert 2.1 < corpus.bigram_entropy < corpus.unigram_entropy


def test_its_count_models_are_of_the_training_side() -> None:
    corpus = small_corpus()
    whole = torch.from_numpy(corpus.train.astype(np.int64))[None]
    assert corpus.ngram_losses.of(whole)[1] == pytest.approx(corpus.bigram_entropy, rel=1e-12)
    assert corpus.unigram_entropy == unigram_entropy(corpus.train)
    assert corpus.bigram_entropy == bigram_entropy(corpus.train)
    assert corpus.ngram_losses is corpus.ngram_losses  # counted once


def test_what_its_batches_make_of_the_loss_is_known_and_scatters_around_the_entropies() -> None:
    corpus = small_corpus()
    losses = np.array([corpus.ngram_losses.of(corpus.batch(seed=0, step=k, n_windows=8, seq_len=32)) for k in range(1, 401)])
    error = losses.std(axis=0, ddof=1) / np.sqrt(len(losses))
    assert np.isfinite(losses).all()
    assert (np.abs(losses.mean(axis=0) - [corpus.unigram_entropy, corpus.bigram_entropy]) < 4 * error).all()


def test_batches_depend_on_seed_and_step_alone() -> None:
    corpus = small_corpus()
    first = corpus.batch(seed=1, step=7, n_windows=4, seq_len=16)
    corpus.batch(seed=1, step=8, n_windows=4, seq_len=16)
    torch.manual_seed(5)
    assert torch.equal(first, corpus.batch(seed=1, step=7, n_windows=4, seq_len=16))
    assert not torch.equal(first, corpus.batch(seed=2, step=7, n_windows=4, seq_len=16))
    assert not torch.equal(first, corpus.batch(seed=1, step=8, n_windows=4, seq_len=16))
    assert first.shape == (4, 17)


def test_windows_start_anywhere_alike() -> None:
    corpus = replace(small_corpus(), train=np.arange(1001, dtype=np.int32))
    starts = torch.cat([corpus.batch(seed=0, step=k, n_windows=50, seq_len=1)[:, 0] for k in range(1, 201)])
    assert starts.min() >= 0
    assert starts.max() <= 999
    counts = torch.histc(starts.double(), 10, 0, 1000)
    expected = len(starts) / 10
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # 99.9 % of chi squared with 9 degrees of freedom


def test_validation_windows_do_not_overlap() -> None:
    corpus = replace(small_corpus(), validation=np.arange(500, dtype=np.int32))
    batches = list(corpus.validation_batches(n_tokens=160, batch_size=3, seq_len=16))
    starts = torch.cat([b[:, 0] for b in batches])
    assert len(starts) == 10
    assert (starts.diff() >= 16).all()
    assert starts[-1] > 400


def test_a_text_shorter_than_a_window_is_refused(tmp_path) -> None:
    (tmp_path / "short.txt").write_text("a few words\n" * 8)
    corpus = build_corpus(CorpusConfig(sources=(str(tmp_path / "short.txt"),)))
    with pytest.raises(TextError, match=r"token\(s\) for validation, a window of seq_len 64 needs 65"):
        corpus.check_window(64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": ()}, "sources must name at least one text"),
        ({"validation_share": 0.0}, "validation_share must be a number above 0"),
        ({"max_bytes": 0}, "max_bytes must be an integer of at least 1"),
    ],
)
def test_fields_outside_their_domain_are_refused_by_name(changes, message) -> None:
    with pytest.raises(TextError, match=message):
        CorpusConfig(**changes)


def test_configuration_survives_a_dictionary() -> None:
    config = CorpusConfig(sources=("a", "b"), tokenizer="bpe:300")
    assert CorpusConfig.from_dict(config.to_dict()) == config


def test_bpe_sees_the_training_side_only_and_is_stored(folder) -> None:
    config = CorpusConfig(sources=(str(folder),), tokenizer="bpe:300", validation_share=0.2)
    corpus = build_corpus(config)
    assert isinstance(corpus, Corpus)
    assert corpus.tokenizer_json is not None
    assert corpus.train.max() < corpus.vocab_size <= 300
    again = build_corpus(config, tokenizer_json=corpus.tokenizer_json)
    assert again.content_hash == corpus.content_hash
