"""The trainer: exact resumption, faults that keep the last checkpoint, the schedule."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.ctrl_c import hearing_ctrl_c
from torch import nn

from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    OptionError,
    OutOfMemoryError,
    SpecrunError,
)
from specrun.train.data.corpus import TokenBatch, TokenCorpus
from specrun.train.data.tokens import TokenSequence
from specrun.train.trainer.learner import Learner, LossPart, ParameterGroup
from specrun.train.trainer.settings import TrainerSettings
from specrun.train.trainer.trainer import (
    check_same_run,
    earlier_run,
    load_state,
    save_state,
    train_learner,
)

pytestmark = pytest.mark.long

VOCAB = 11
SETTINGS = TrainerSettings(
    steps=24,
    learning_rate=0.02,
    tokens_per_batch=24,
    warmup_steps=4,
    measure_every=5,
    save_seconds=0.0,
)


def corpus(count: int = 9) -> TokenCorpus:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        ids = rng.integers(0, VOCAB, rng.integers(5, 12)).astype(np.int32)
        made.append(TokenSequence(ids, np.ones(len(ids), np.bool_)))
    return TokenCorpus(
        tuple(made), tuple(range(count - 2)), (count - 2, count - 1), measured_on_training=False
    )


def throw(error: Exception) -> None:
    raise error


class Bigrams(Learner):
    """A table of logits, trained with noise on it; `hook` is called at the start of every step."""

    def __init__(self, seed: int = 0, hook=lambda step: None) -> None:
        torch.manual_seed(seed)
        self.module = nn.Embedding(VOCAB, VOCAB)
        self.second = nn.Parameter(torch.zeros(VOCAB))
        self.module.register_parameter("bias", self.second)
        self.device = torch.device("cpu")
        self.hook = hook

    def groups(self) -> list[ParameterGroup]:
        return [
            ParameterGroup([self.module.weight]),
            ParameterGroup([self.second], rate=0.5, starts_at=6),
        ]

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        factor = self.hook(step)
        for name, weight in (("even", 0.7), ("odd", 0.3)):
            logits = self.module(batch.ids[:, :-1]) + self.second
            logits = logits + 0.1 * torch.randn(logits.shape, generator=noise)
            marks = batch.valid[:, 1:] & ((batch.ids[:, 1:] % 2 == 0) == (name == "even"))
            if marks.any():
                loss = nn.functional.cross_entropy(logits[marks], batch.ids[:, 1:][marks])
                yield LossPart(
                    name, weight * loss * (1.0 if factor is None else factor), float(loss.detach())
                )

    def measure(self, batches) -> dict[str, float]:
        right = sum(
            int((self.module(b.ids[:, :-1]).argmax(-1) == b.ids[:, 1:])[b.valid[:, 1:]].sum())
            for b in batches
        )
        return {"right": float(right)}


@pytest.fixture(scope="module")
def usual():
    """The losses of a run that nothing stops."""
    return pytest.approx(train_learner(Bigrams(), corpus(), SETTINGS).curves.losses, abs=1e-6)


def test_a_resumed_run_is_an_uninterrupted_one(tmp_path: Path) -> None:
    """Stopped by Ctrl-C within a step and between epochs; the loss of every step agrees to 1e-6,
    the weights too."""
    whole, learner = None, Bigrams()
    whole = train_learner(learner, corpus(), SETTINGS)
    path = tmp_path / "state.pt"

    def stop_at(step: int):
        def hook(now: int) -> None:
            if now == step:
                raise KeyboardInterrupt

        return hook

    for number, stop in enumerate((7, 8, 19)):
        with pytest.raises(KeyboardInterrupt):
            stopped = Bigrams(seed=number, hook=stop_at(stop))
            train_learner(stopped, corpus(), SETTINGS, path, resume=number > 0)
    resumed = Bigrams(seed=9)
    rest = train_learner(resumed, corpus(), SETTINGS, path, resume=True)
    assert rest.resumed_at == 19
    assert rest.curves.losses == pytest.approx(whole.curves.losses, abs=1e-6)
    assert rest.curves.measures == whole.curves.measures
    assert [step for step, _ in rest.curves.measures] == [5, 10, 15, 20, 24]
    torch.testing.assert_close(resumed.module.weight, learner.module.weight, atol=1e-6, rtol=0)
    again = train_learner(Bigrams(), corpus(), SETTINGS, path, resume=True)
    assert (again.resumed_at, again.curves.losses) == (24, rest.curves.losses)


def test_a_run_stopped_within_any_measure_loses_no_step(tmp_path: Path, monkeypatch) -> None:
    """Also in the last one, with no checkpoint before: the measures are made up for when it goes
    on."""
    settings = replace(SETTINGS, save_seconds=1e9)
    whole = train_learner(Bigrams(), corpus(), settings)
    measure = Bigrams.measure
    path = tmp_path / "state.pt"
    for number, (stopped_at, measures_before) in enumerate(((5, 0), (24, 4))):
        made: list[int] = []

        def stops(learner, batches, made=made, last=measures_before):
            if len(made) == last:
                raise KeyboardInterrupt
            made.append(0)
            return measure(learner, batches)

        monkeypatch.setattr(Bigrams, "measure", stops)
        with pytest.raises(KeyboardInterrupt):
            train_learner(Bigrams(seed=number), corpus(), settings, path, resume=number > 0)
        assert load_state(path)["place"]["step"] == stopped_at
    monkeypatch.setattr(Bigrams, "measure", measure)
    rest = train_learner(Bigrams(seed=9), corpus(), settings, path, resume=True)
    assert rest.resumed_at == 24
    assert rest.curves.measures == whole.curves.measures
    assert rest.curves.losses == pytest.approx(whole.curves.losses, abs=1e-6)


def test_steps_are_saved_before_the_last_measure(tmp_path: Path, monkeypatch) -> None:
    """What no handler hears, such as a kill, loses the measure alone."""
    path = tmp_path / "state.pt"
    seen = []
    monkeypatch.setattr(
        Bigrams, "measure", lambda learner, batches: seen.append(path.exists()) or {"right": 0.0}
    )
    train_learner(Bigrams(), corpus(), replace(SETTINGS, save_seconds=1e9), path)
    assert seen == [False] * 4 + [True]
    assert [step for step, _ in load_state(path)["curves"]["measures"]] == [5, 10, 15, 20, 24]


def test_ctrl_c_within_an_update_is_heard_after_it(tmp_path: Path, monkeypatch, usual) -> None:
    """Half of the parameters changed is no state to save: the step is finished, saved, and then the
    run ends."""
    path = tmp_path / "state.pt"
    update = torch.optim.AdamW.step
    updates = []

    def interrupted(optimizer):
        updates.append(optimizer)
        if len(updates) == 7:
            signal.raise_signal(signal.SIGINT)
        update(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)
    with hearing_ctrl_c():
        with pytest.raises(KeyboardInterrupt):
            train_learner(Bigrams(), corpus(), replace(SETTINGS, save_seconds=1e9), path)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (len(updates), load_state(path)["place"]["step"]) == (7, 7)
    rest = train_learner(Bigrams(seed=3), corpus(), SETTINGS, path, resume=True)
    assert rest.curves.losses == usual


def test_training_needs_no_main_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(train_learner, Bigrams(), corpus(), replace(SETTINGS, steps=3)).result()
    assert len(found.curves.losses) == 3


@pytest.mark.parametrize(
    "shortage",
    [
        lambda: torch.empty(1 << 60, dtype=torch.uint8),  # what the CPU's allocator says
        lambda: np.zeros(1 << 48),  # a MemoryError
        lambda: throw(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
        lambda: throw(
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            )
        ),
    ],
    ids=["torch", "numpy", "cuda", "cublas"],
)
def test_a_step_without_memory_saves_those_before_it(tmp_path: Path, shortage, usual) -> None:
    path = tmp_path / "state.pt"
    settings = replace(SETTINGS, save_seconds=1e9)
    short = Bigrams(hook=lambda step: shortage() if step == 10 else None)
    with pytest.raises(
        OutOfMemoryError, match=r"RAM .* after step 10.* keeps step 10; .*--force .*--batch-tokens"
    ) as e:
        train_learner(short, corpus(), settings, path)
    assert e.value.exit_code == 5
    rest = train_learner(Bigrams(seed=3), corpus(), settings, path, resume=True)
    assert rest.resumed_at == 10
    assert rest.curves.losses == usual


def test_an_update_without_memory_saves_nothing_that_is_not_whole(
    tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "state.pt"
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda optimizer: throw(MemoryError()))
    with pytest.raises(OutOfMemoryError, match="no checkpoint was made"):
        train_learner(Bigrams(), corpus(), SETTINGS, path)
    assert not path.exists()


def test_other_errors_are_not_taken_for_a_lack_of_memory(tmp_path: Path) -> None:
    wrong = Bigrams(hook=lambda step: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        train_learner(wrong, corpus(), SETTINGS, tmp_path / "state.pt")


def test_another_seed_is_another_run() -> None:
    first, other = (
        train_learner(Bigrams(), corpus(), replace(SETTINGS, seed=seed)) for seed in (0, 1)
    )
    assert first.curves.losses != pytest.approx(other.curves.losses, abs=1e-3)


def test_parts_add_up_and_groups_begin_when_they_should() -> None:
    learner = Bigrams()
    result = train_learner(learner, corpus(), replace(SETTINGS, steps=6))
    assert not learner.second.any()
    found = [
        0.7 * even + 0.3 * odd
        for even, odd in zip(*(result.curves.parts[n] for n in ("even", "odd")), strict=True)
    ]
    assert result.curves.losses == pytest.approx(found, rel=1e-5)
    train_learner(learner, corpus(), replace(SETTINGS, steps=8))
    assert learner.second.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(
    tmp_path: Path, value: float, usual
) -> None:
    path = tmp_path / "state.pt"
    spoilt = Bigrams(hook=lambda step: value if step == 10 else None)
    with pytest.raises(SpecrunError, match=r"the loss at step 11 is (nan|inf).*keeps step 10"):
        train_learner(spoilt, corpus(), SETTINGS, path)
    with pytest.raises(
        SpecrunError, match=r"train anew, with --force or into another folder, .*--learning-rate"
    ):
        train_learner(spoilt, corpus(), SETTINGS, path, resume=True)
    rest = train_learner(Bigrams(), corpus(), SETTINGS, path, resume=True)
    assert rest.curves.losses == usual
    with pytest.raises(SpecrunError, match="no checkpoint was made"):
        train_learner(spoilt, corpus(), SETTINGS)


def test_settings_that_most_runs_leave_alone_are_not_part_of_their_identity() -> None:
    """So that checkpoints go on which were made before there were such settings."""
    assert not {"decay", "matrix_optimizer", "save_seconds", "precision"} & SETTINGS.identity.keys()
    assert (SETTINGS.identity["steps"], SETTINGS.identity["final_rate"]) == (24, 0.0)
    plateau = replace(SETTINGS, decay=0.5, matrix_optimizer="muon").identity
    assert (plateau["decay"], plateau["matrix_optimizer"]) == (0.5, "muon")
    assert "steps" not in plateau  # it may be lengthened


def test_checkpoints_are_not_overwritten_or_mixed_up(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with pytest.raises(FileMissingError, match="to resume"):
        train_learner(Bigrams(), corpus(), SETTINGS, path, resume=True)
    train_learner(Bigrams(), corpus(), SETTINGS, path, identity={"data": "a"})
    with pytest.raises(OptionError, match="holds an earlier run"):
        train_learner(Bigrams(), corpus(), SETTINGS, path, identity={"data": "a"})
    with pytest.raises(OptionError, match=r"learning rate 0\.02, and --resume needs 0\.03"):
        faster = replace(SETTINGS, learning_rate=0.03)
        train_learner(Bigrams(), corpus(), faster, path, resume=True, identity={"data": "a"})
    with pytest.raises(OptionError, match="data a, and --resume needs b"):
        train_learner(Bigrams(), corpus(), SETTINGS, path, resume=True, identity={"data": "b"})
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(MalformedFileError, match="not a checkpoint"):
        train_learner(Bigrams(), corpus(), SETTINGS, path, resume=True)
    path.write_text("hello")
    with pytest.raises(MalformedFileError, match="not a checkpoint"):
        train_learner(Bigrams(), corpus(), SETTINGS, path, resume=True)


def test_a_checkpoint_tells_of_its_run_before_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    identity = {"data": "a"}
    train_learner(
        Bigrams(), corpus(), replace(SETTINGS, precision=torch.bfloat16), path, identity=identity
    )
    found = earlier_run(path, resume=True)
    assert (found.precision, found.identity["data"]) == ("bfloat16", "a")
    # Another precision is no other run.
    check_same_run(path, found.identity, {**SETTINGS.identity, "data": "a"})
    train_learner(Bigrams(), corpus(), SETTINGS, path, resume=True, identity=identity)
    with pytest.raises(OptionError, match="data a, and --resume needs b"):
        check_same_run(path, found.identity, {**SETTINGS.identity, "data": "b"})
    check_same_run(path, earlier_run(path, resume=False).identity, {"data": "b"})
    state = load_state(path)
    del state["precision"]  # as checkpoints were written before
    save_state(path, state)
    assert earlier_run(path, resume=True).precision is None
    assert earlier_run(path, resume=False).precision is None
    path.write_text("hello")
    with pytest.raises(MalformedFileError, match="not a checkpoint"):
        earlier_run(path, resume=True)


KILLED = """
import sys
sys.path[:0] = sys.argv[2:4]
import torch, pathlib
torch.set_num_threads(1)
from dataclasses import replace
from test_trainer import SETTINGS, Bigrams, corpus
from specrun.train.trainer.trainer import train_learner
def hook(step):
    if step == 12:
        print("twelve", flush=True)
        import time
        time.sleep(60)
train_learner(Bigrams(hook=hook), corpus(), SETTINGS, pathlib.Path(sys.argv[1]))
"""


@pytest.mark.skipif(os.name == "nt", reason="needs a signal that cannot be caught")
def test_a_killed_run_leaves_a_usable_checkpoint(tmp_path: Path, usual) -> None:
    path = tmp_path / "state.pt"
    here = Path(__file__).parent
    command = [sys.executable, "-c", KILLED, str(path), str(here), str(here.parents[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "twelve"
        child.send_signal(signal.SIGKILL)
    rest = train_learner(Bigrams(seed=3), corpus(), SETTINGS, path, resume=True)
    assert rest.resumed_at == 12
    assert rest.curves.losses == usual
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]


def test_the_rate_rises_then_falls_as_a_cosine() -> None:
    settings = TrainerSettings(steps=110, learning_rate=1.0, warmup_steps=10)
    assert settings.rate_factor(0) == pytest.approx(1 / 11)
    assert settings.rate_factor(10) == 1.0
    assert settings.rate_factor(60) == pytest.approx(0.5)
    assert settings.rate_factor(110) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"steps": 0}, "0 steps"),
        ({"learning_rate": 0.0}, "a learning rate of 0"),
        ({"tokens_per_batch": 0}, "0 tokens in a batch"),
        ({"decay": 0.0}, "a decay over 0 of the steps"),
        ({"matrix_optimizer": "sgd"}, "optimizer is 'sgd': use one of adamw, muon"),
    ],
)
def test_settings_that_cannot_be(wrong: dict, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        replace(SETTINGS, **wrong)


class Weighed(Bigrams):
    """Measures what no two steps have in common."""

    def measure(self, batches) -> dict[str, float]:
        return {"weight": float(self.module.weight.detach().norm())}


def test_a_learner_knows_how_long_it_learns() -> None:
    seen: list[tuple[int, int]] = []
    learner = Bigrams(hook=lambda step: seen.append((step, learner.n_updates)))
    train_learner(learner, corpus(), SETTINGS)
    assert seen == [(step, SETTINGS.steps) for step in range(SETTINGS.steps)]


def test_progress_is_told() -> None:
    heard = []
    learner = Weighed()
    train_learner(learner, corpus(), SETTINGS, report=heard.append)
    assert [note.step for note in heard if note.step <= 24][:24] == list(range(1, 25))
    assert heard[-1].measures == learner.measure([])
    assert heard[3].measures == {}
    assert (
        len({note.measures["weight"] for note in heard[4:]}) == 5
    )  # after steps 5, 10, 15, 20 and 24
    assert heard[-1].seconds_left == 0
    assert heard[3].seconds_left > 0
