"""The loop: bit-equal after kills, recorded failures, nothing of a step that is not the step's own."""

import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from probes.admin_profile import profile_admin
from probes.errors import CheckpointError, OutputError, TextError
from probes.model import Transformer
from probes.run_folder import read_log
from probes.saving import load_model
from probes.training import Outcome, Trainer, TrainingConfigError, TrainingInterrupted, train
from tests.probes._runs import numbers, small_corpus, small_run


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(folder).named_parameters())


def _assert_same_run(folder: Path, whole: Path) -> None:
    assert numbers(read_log(folder / "log.jsonl")) == numbers(read_log(whole / "log.jsonl"))
    a, b = _weights(folder), _weights(whole)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing has interrupted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(small_run(probe_steps=(1, 20, 50)), corpus=small_corpus(), folder=folder)
    torch.set_num_threads(threads)
    return folder


_CHILD = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from probes import run_folder
from probes.training import train
from tests.probes._runs import small_corpus, small_run

folder, die_at_sync = sys.argv[1], int(sys.argv[2])
sync, calls = run_folder._sync, [0]

def dying(path):
    calls[0] += 1
    if calls[0] == die_at_sync:
        os.kill(os.getpid(), signal.SIGKILL)
    sync(path)

run_folder._sync = dying
train(small_run(probe_steps=(1, 20, 50)), corpus=small_corpus(), folder=folder, save_steps=4,
      on_step=lambda record: print(record.step, flush=True))
"""


def _child(folder: Path, die_at_sync: int = 0) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(folder), str(die_at_sync)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )


@pytest.mark.slow
def test_killed_between_two_saves_it_resumes_bit_for_bit(tmp_path, whole) -> None:
    with _child(tmp_path / "run") as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) == 11:
                child.kill()
                break
    assert child.returncode == -signal.SIGKILL
    assert len(read_log(tmp_path / "run" / "log.jsonl")) >= 10
    result = train(small_run(probe_steps=(1, 20, 50)), corpus=small_corpus(), folder=tmp_path / "run")
    first, second = (session["first_step"] for session in result.sessions)
    assert first == 1
    assert second > 8
    _assert_same_run(tmp_path / "run", whole)


def test_every_step_records_what_count_models_lose_on_its_batch(whole) -> None:
    config, corpus = small_run(), small_corpus()
    for record in read_log(whole / "log.jsonl"):
        batch = corpus.batch(seed=config.seed, step=record.step, n_windows=config.batch_size, seq_len=config.seq_len)
        assert record.batch_losses == corpus.ngram_losses.of(batch)


def test_cutting_a_step_into_micro_batches_changes_nothing_of_its_batch(whole) -> None:
    records = train(small_run(accumulation=2), corpus=small_corpus()).records
    assert [r.batch_losses for r in records] == [r.batch_losses for r in read_log(whole / "log.jsonl")]


def test_a_run_whose_first_steps_were_logged_without_their_batches_goes_on_with_them(tmp_path, whole) -> None:
    def interrupt(record):
        if record.step == 7:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(TrainingInterrupted, match="after step 7"):
        train(small_run(), corpus=small_corpus(), folder=tmp_path, on_step=interrupt)
    log = tmp_path / "log.jsonl"
    old = [replace(record, unigram_loss=None, bigram_loss=None) for record in read_log(log)]
    size = log.stat().st_size
    log.write_text("".join(record.to_json() + "\n" for record in old))
    _pad_first_line(log, size)
    records = train(small_run(), corpus=small_corpus(), folder=tmp_path).records
    assert [record.batch_losses is None for record in records] == [True] * 7 + [False] * 43
    assert [r.loss for r in records] == [r.loss for r in read_log(whole / "log.jsonl")]


def _pad_first_line(log: Path, size: int) -> None:
    """Blanks at the end of a log's first line, up to the size that its saved state knows."""
    first, rest = log.read_text().split("\n", 1)
    log.write_text(first + " " * (size - log.stat().st_size) + "\n" + rest)


# Each save flushes the new file before its rename (odd calls, after the configuration's two) and its folder after it.
@pytest.mark.slow
@pytest.mark.parametrize("die_at_sync", [2, 5, 6])
def test_killed_in_the_middle_of_a_save_it_resumes_bit_for_bit(tmp_path, whole, die_at_sync) -> None:
    with _child(tmp_path / "run", die_at_sync) as child:
        child.communicate()
    assert child.returncode == -signal.SIGKILL
    train(small_run(probe_steps=(1, 20, 50)), corpus=small_corpus(), folder=tmp_path / "run")
    _assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("at", [1, 7, 49])
def test_interrupted_after_any_step_it_resumes_bit_for_bit(tmp_path, whole, at) -> None:
    def interrupt(record):
        if record.step == at:
            signal.raise_signal(signal.SIGINT)

    config = small_run(probe_steps=(1, 20, 50))
    with pytest.raises(TrainingInterrupted, match=f"stopped after step {at} of 50; its state is saved"):
        train(config, corpus=small_corpus(), folder=tmp_path, on_step=interrupt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    torch.manual_seed(at)  # what others draw in between does not matter
    result = train(config, corpus=small_corpus(), folder=tmp_path)
    assert result.outcome is Outcome.FINISHED
    _assert_same_run(tmp_path, whole)
    assert result.dynamics().equals(train(config, corpus=small_corpus(), folder=whole).dynamics())


def test_a_finished_run_is_read_not_repeated(whole, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(Trainer, "advance", lambda self: pytest.fail("trained again"))
    result = train(small_run(probe_steps=(1, 20, 50)), corpus=small_corpus(), folder=whole, on_step=seen.append)
    assert numbers(seen) == numbers(result.records)
    assert len(seen) == 50
    assert not (whole / "state").exists()


def test_on_step_hears_the_steps_of_earlier_processes_and_can_end_the_run(tmp_path) -> None:
    config = small_run()

    def interrupt(record):
        if record.step == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(TrainingInterrupted, match="after step 5"):
        train(config, corpus=small_corpus(), folder=tmp_path, on_step=interrupt)
    heard = []

    def stop(record):
        heard.append(record.step)
        return record.step == 9

    result = train(config, corpus=small_corpus(), folder=tmp_path, on_step=stop)
    assert heard == list(range(1, 10))
    assert result.outcome is Outcome.STOPPED
    assert result.to_dict()["steps_done"] == 9


def test_a_full_disk_loses_nothing_that_was_saved(tmp_path, whole) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    config = small_run(probe_steps=(1, 20, 50))

    def fill(record):
        if record.step == 10:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))

    try:
        with pytest.raises(OutputError, match="what was saved before is unharmed, free some space and resume"):
            train(config, corpus=small_corpus(), folder=tmp_path, on_step=fill, save_steps=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    result = train(config, corpus=small_corpus(), folder=tmp_path)
    assert result.sessions[1]["first_step"] == 9
    _assert_same_run(tmp_path, whole)


def test_memory_and_folder_give_the_same_numbers(whole) -> None:
    result = train(small_run(), corpus=small_corpus())
    assert numbers(result.records) == numbers(read_log(whole / "log.jsonl"))  # nor do profiles change them
    assert result.records[-1].loss < result.records[0].loss - 1


def test_a_loss_that_is_no_number_is_a_result(tmp_path, monkeypatch) -> None:
    loss = Trainer._gradient

    def breaking(self, micro_batches):
        value, norm = loss(self, micro_batches)
        return (math.nan, norm) if self.step == 3 else (value, norm)

    monkeypatch.setattr(Trainer, "_gradient", breaking)
    result = train(small_run(), corpus=small_corpus(), folder=tmp_path)
    assert result.outcome is Outcome.NON_FINITE
    assert [math.isnan(r.loss) for r in result.records] == [False, False, True]
    assert result.validation_loss is None
    assert result.to_dict()["final_loss"] is None
    assert all(torch.isfinite(p).all() for p in _weights(tmp_path).values())
    again = train(small_run(), corpus=small_corpus(), folder=tmp_path)
    assert again.outcome is Outcome.NON_FINITE


def test_a_real_overflow_is_a_result() -> None:
    result = train(small_run(peak_lr=1e30, clip=0.0, scheme="pre_ln"), corpus=small_corpus())
    assert result.outcome is Outcome.NON_FINITE
    assert len(result.records) < 50


def test_micro_batches_share_one_step_its_data_and_its_rate() -> None:
    one = train(small_run(), corpus=small_corpus())
    four = train(small_run(accumulation=4), corpus=small_corpus())
    assert [r.lr for r in four.records] == [r.lr for r in one.records] == [0.02 * k / 50 for k in range(1, 51)]
    assert four.records[0].loss == pytest.approx(one.records[0].loss, rel=1e-6)
    assert four.records[0].grad_norm == pytest.approx(one.records[0].grad_norm, rel=1e-5)
    assert [r.loss for r in four.records[:20]] == pytest.approx([r.loss for r in one.records[:20]], rel=1e-2)


def test_the_step_is_that_of_plain_torch() -> None:
    config, corpus = small_run(weight_decay=0.1, clip=0.5), small_corpus()
    trainer, plain = Trainer(config, corpus), Trainer(config, corpus).model
    optimizer = torch.optim.AdamW(plain.parameters(), betas=(0.9, 0.95), weight_decay=0.1, foreach=False, fused=False)
    for step in range(1, 6):
        record = trainer.advance()
        ids = corpus.batch(seed=0, step=step, n_windows=4, seq_len=16)
        optimizer.param_groups[0]["lr"] = config.learning_rate(step)
        loss = plain.loss(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        assert record.loss == pytest.approx(loss.item(), rel=1e-5)
        assert record.grad_norm == pytest.approx(norm.item(), rel=1e-4)


def test_recomputed_activations_change_no_bit() -> None:
    plain = train(small_run(), corpus=small_corpus())
    lean = train(small_run(activation_checkpointing=True), corpus=small_corpus())
    assert numbers(lean.records) == numbers(plain.records)


def test_bfloat16_branches_train_beside_a_float32_stream() -> None:
    result = train(small_run(compute_dtype="bfloat16"), corpus=small_corpus())
    exact = train(small_run(), corpus=small_corpus())
    assert result.records[0].loss == pytest.approx(exact.records[0].loss, rel=1e-2)
    assert result.records[0].loss != exact.records[0].loss
    assert result.records[-1].loss < result.records[0].loss - 1


def test_admin_is_profiled_on_the_first_steps_windows() -> None:
    config = small_run(scheme="admin")
    scales = [float(s.shortcut_scale.detach().mean()) for s in Trainer(config, small_corpus()).model.sublayers()]
    windows = small_corpus().batch(seed=0, step=1, n_windows=4, seq_len=16)
    assert scales == pytest.approx(profile_admin(Transformer(config.model), [windows[:, :-1]]))
    assert len(set(scales)) == 4


def test_validation_loss_is_the_mean_over_held_out_windows() -> None:
    trainer = Trainer(small_run(), small_corpus())
    stream = torch.tensor(small_corpus().validation.astype(int))
    (chosen,) = small_corpus().validation_batches(n_tokens=64, batch_size=4, seq_len=16)
    assert all(any(torch.equal(stream[s : s + 17], row) for s in range(len(stream) - 16)) for row in chosen)
    expected = trainer.model.loss(chosen[:, :-1], chosen[:, 1:]).item()
    assert trainer.validation_loss() == pytest.approx(expected, rel=1e-6)
    assert Trainer(small_run(validation_tokens=0), small_corpus()).validation_loss() is None


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused() -> None:
    config = small_run()
    with pytest.raises(TrainingConfigError, match=r"model\.vocab_size 100 is smaller than the tokenizer's 256"):
        Trainer(replace(config, model=replace(config.model, vocab_size=100)), small_corpus())


def test_windows_longer_than_the_text_are_refused() -> None:
    with pytest.raises(TextError, match="a window of seq_len 5000 needs 5001"):
        Trainer(small_run(seq_len=5000), small_corpus())


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(TrainingConfigError, match="device 'abacus' cannot be used"):
        Trainer(small_run(device="abacus"), small_corpus())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"device": "cuda:77"}, TrainingConfigError, "device 'cuda:77' cannot be used"),
        ({"device": "meta"}, TrainingConfigError, "device 'meta' cannot be used"),
        ({"seq_len": 5000}, TextError, "a window of seq_len 5000 needs 5001"),
        ({"vocab_size": 100}, TrainingConfigError, r"model\.vocab_size 100 is smaller"),
    ],
)
def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path, changes, error, message) -> None:
    config = small_run(**{name: value for name, value in changes.items() if name != "vocab_size"})
    config = replace(config, model=replace(config.model, vocab_size=changes.get("vocab_size", 256)))
    with pytest.raises(error, match=message):
        train(config, corpus=small_corpus(), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_breaks_before_its_first_step_claims_nothing(tmp_path, monkeypatch) -> None:
    def too_large(config, corpus):
        raise MemoryError("no room for the model")

    with monkeypatch.context() as patch:
        patch.setattr("probes.training.Trainer", too_large)
        with pytest.raises(MemoryError, match="no room"):
            train(small_run(), corpus=small_corpus(), folder=tmp_path / "run")
    assert not (tmp_path / "run" / "training.json").exists()
    train(small_run(peak_lr=0.01), corpus=small_corpus(), folder=tmp_path / "run")


def test_a_finished_run_is_read_where_its_device_is_not(whole, monkeypatch) -> None:
    def gone(name, *, error):
        raise error(name)

    monkeypatch.setattr("probes.training.resolve_device", gone)
    assert len(train(small_run(probe_steps=(1, 20, 50)), corpus=small_corpus(), folder=whole).records) == 50


def test_a_run_of_another_configuration_is_refused_by_its_field(whole) -> None:
    with pytest.raises(CheckpointError, match=r"weight_decay is 0\.01 there, 0\.5 here"):
        train(small_run(probe_steps=(1, 20, 50), weight_decay=0.5), corpus=small_corpus(), folder=whole)


def test_result_says_what_was_done(whole) -> None:
    result = train(small_run(probe_steps=(1, 20, 50)), corpus=small_corpus(), folder=whole)
    frame = result.to_frame()
    assert len(frame) == 5 * 50
    assert set(frame["metric"]) == {"loss", "lr", "grad_norm", "unigram_loss", "bigram_loss"}
    assert result.corpus["content_hash"] == small_corpus().content_hash
    assert 0 < result.corpus["unigram_entropy"] < math.log(256)
    assert result.best_loss < result.records[0].loss
