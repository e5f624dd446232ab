"""Drafters that learn from what was rejected: laws over kept tokens, updates of a runtime, whole
runs, and files that come back as they were."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_family import ANSWERS, Family, make_family, question
from support.tiny_models import F32, fresh_logits
from support.training import SMALL_RUN, Order, StopsAt, order_of

from specrun.bindings.errors import BusyError, OptionError, PairError, UnsupportedModelError
from specrun.bindings.gguf import read_header
from specrun.bindings.models.model import Model
from specrun.convert import convert_checkpoint, quantize_model
from specrun.convert.gguf import GGUFSource
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.engine import Engine
from specrun.runtime.language import quoted
from specrun.runtime.online import RejectionBuffer, RejectionNotes, likeliest, load_rejections
from specrun.train.distillation.learner import DIVERGENCES
from specrun.train.online import OnlineDrafter, OnlineRecipe, OnlineSettings, open_online_drafter
from specrun.train.online.learner import (
    coarse_log_probs,
    load_drafter,
    online_corpus,
    usual_rate,
    write_drafter,
)

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
QUICK = OnlineSettings(
    learning_rate=1e-2, epochs=12, steps=60, tokens_per_batch=200, least_places=8
)
TOKENS = [5, 9, 270, 33, 120, 121, 299, 4, 1, 77, 80, 12, 200, 6, 6, 6]


@pytest.fixture(scope="module")
def family(one_thread, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def files(family: Family, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    for name in ("target", "draft"):
        convert_checkpoint(getattr(family, name), folder / f"{name}.gguf", outtype="f32")
    return folder / "target.gguf", folder / "draft.gguf"


@pytest.fixture
def chatting(files: tuple[Path, Path]) -> Iterator[Runtime]:
    target, draft = files
    with Runtime(target, f"draft({quoted(str(draft))}, n=3)", learn=True, **F32) as runtime:
        yield runtime


def ask(runtime: Runtime, seed: int, times: int = 1) -> tuple[int, int]:
    """How many drafts of a few answers were made, and how many accepted."""
    drafted = accepted = 0
    for number in range(times):
        for index, name in enumerate(ANSWERS):
            params = SamplingParams(seed=seed + 10 * number + index, top_k=0, top_p=1.0, min_p=0.0)
            asked = [{"role": "user", "content": question(name)}]
            stats = runtime.chat(asked, params, max_tokens=24).stats
            drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
    return drafted, accepted


# -- laws of which some tokens are known by name ---------------------------------------------------


@pytest.mark.parametrize("name", DIVERGENCES)
def test_coarse_laws_diverge_no_more_than_whole_ones(name: str) -> None:
    """Data processing; and they come near it as more tokens are kept."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.log_softmax(2 * torch.randn(5, 40, generator=generator), -1) for _ in range(2))
    whole = DIVERGENCES[name](p, q)
    before = torch.zeros(5)
    for kept in (1, 8, 20, 39):
        ids = p.topk(kept, -1).indices
        found = DIVERGENCES[name](coarse_log_probs(p, ids), coarse_log_probs(q, ids))
        assert (found <= whole + 1e-5).all()
        assert (found >= before - 1e-5).all()
        before = found
    everything = torch.arange(40).expand(5, 40)
    found = DIVERGENCES[name](coarse_log_probs(p, everything), coarse_log_probs(q, everything))
    torch.testing.assert_close(found, whole)


def test_gradients_are_finite_where_nothing_is_left_for_others() -> None:
    logits = torch.zeros(2, 6)
    logits[:, 0] = 200.0
    logits.requires_grad_()
    laws = coarse_log_probs(torch.log_softmax(logits, -1), torch.tensor([[0, 1], [0, 5]]))
    wanted = torch.log_softmax(torch.tensor([[0.0, -1.0, -2.0]] * 2), -1)
    DIVERGENCES["forward-kl"](wanted, laws).mean().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_tokens_that_the_drafter_lacks_have_no_mass() -> None:
    law = torch.log_softmax(torch.zeros(1, 4), -1)
    found = coarse_log_probs(law, torch.tensor([[1, 5]])).exp()
    torch.testing.assert_close(found, torch.tensor([[0.25, 0.0, 0.75]]), atol=1e-6, rtol=0)


def test_the_end_of_a_long_text_is_read_and_its_places_move_with_it() -> None:
    buffer = RejectionBuffer(kept_tokens=4)
    notes = RejectionNotes(buffer)
    row = np.arange(50, dtype=np.float32)
    for position in (3, 70, 90):
        notes.note(position, row)
    notes.end_answer(list(range(100)))
    corpus, places = online_corpus(list(buffer), max_length=30)
    assert corpus.sequences[0].ids.tolist() == list(range(61, 91))
    assert places[0].positions.tolist() == [9, 29]
    assert corpus.sequences[0].ids[places[0].positions].tolist() == [70, 90]
    assert corpus.measured_on_training
    with pytest.raises(OptionError, match="no draft was rejected yet"):
        online_corpus([], max_length=30)


def test_a_text_that_is_measured_on_is_never_learnt_later() -> None:
    buffer, held_out = RejectionBuffer(kept_tokens=4), set()
    notes = RejectionNotes(buffer)
    for number in range(60):
        notes.note(2, np.arange(50, dtype=np.float32))
        notes.end_answer([number, 1, 2])
        corpus, _ = online_corpus(list(buffer), max_length=30)
        if corpus.measured_on_training:
            continue
        now = {int(corpus.sequences[n].ids[0]) for n in corpus.held_out}
        learnt = {int(corpus.sequences[n].ids[0]) for n in corpus.training}
        assert held_out <= now
        assert not held_out & learnt
        held_out = now
    assert 1 <= len(held_out) <= 20


def test_the_usual_rate_is_that_of_wide_drafters() -> None:
    assert usual_rate({"hidden_size": 4096}) == usual_rate({"hidden_size": 8192}) == 3e-5
    assert usual_rate({"hidden_size": 256}) == pytest.approx(4.8e-4)


# -- a runtime that learns between answers ---------------------------------------------------------


def test_acceptance_rises_while_a_runtime_serves(chatting: Runtime) -> None:
    with OnlineDrafter(chatting, QUICK) as online:
        drafted, accepted = ask(chatting, 0, times=5)
        update = online.update()
        assert update.swapped
        assert update.after.rate > update.before.rate + 0.1
        assert update.path == chatting.draft_file
        drafted_after, accepted_after = ask(chatting, 1000, times=5)
        # The negative control is the same questions without an update, which is `drafted` above.
        assert accepted_after / drafted_after > accepted / drafted + 0.1
        online.update()
        assert not update.path.exists()  # the next is in use
        assert chatting.draft_file.exists()
        folder = chatting.draft_file.parent
        chatting.close()
    assert not folder.exists()


def test_acceptance_rises_while_an_engine_serves(files: tuple[Path, Path]) -> None:
    target, draft = files
    params = [SamplingParams(seed=seed, top_k=0, top_p=1.0, min_p=0.0) for seed in range(40)]
    expression = f"draft({quoted(str(draft))}, n=3)"
    options = {**F32, "n_ctx": 1024}
    with (
        Engine(target, expression, slots=2, learn=True, **options) as engine,
        OnlineDrafter(engine, QUICK) as online,
    ):

        def accepted(settings: list[SamplingParams]) -> float:
            streams = [
                engine.submit_chat(
                    [{"role": "user", "content": question(name)}], each, max_tokens=24
                )
                for each in settings
                for name in ANSWERS
            ]
            stats = [stream.result.stats for stream in streams]
            return sum(each.accepted for each in stats) / sum(each.drafted for each in stats)

        before = accepted(params[:5])
        assert online.update().swapped
        assert accepted(params[20:25]) > before + 0.1


def test_the_text_at_temperature_0_is_the_targets_before_and_after(
    chatting: Runtime, files: tuple[Path, Path]
) -> None:
    greedy = SamplingParams(temperature=0.0)
    asked = [{"role": "user", "content": question("second")}]
    with Runtime(files[0], "none", **F32) as plain:
        wanted = plain.chat(asked, greedy, max_tokens=24).token_ids
    with OnlineDrafter(chatting, QUICK) as online:
        ask(chatting, 0, times=3)
        assert chatting.chat(asked, greedy, max_tokens=24).token_ids == wanted
        online.update()
        assert chatting.chat(asked, greedy, max_tokens=24).token_ids == wanted
        chatting.close()


def test_no_update_in_the_middle_of_an_answer_or_of_too_little(chatting: Runtime) -> None:
    with OnlineDrafter(chatting, QUICK) as online:
        assert not online.can_update
        with pytest.raises(OptionError, match="0 drafts were rejected so far: an update needs 8"):
            online.update()
        ask(chatting, 0, times=3)
        assert online.can_update
        stream = chatting.stream(question("first"), SamplingParams(seed=1))
        next(stream)
        with pytest.raises(BusyError):
            online.update()
        stream.close()
        assert online.updates == []
        chatting.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_update_that_is_stopped_leaves_the_drafter_as_it_was(chatting: Runtime, error) -> None:
    def stops(status) -> None:
        if status.step == 3:
            raise error

    with OnlineDrafter(chatting, QUICK) as online:
        ask(chatting, 0, times=3)
        before = chatting.session.drafter
        weights = copy.deepcopy(online._draft.module.state_dict())
        with pytest.raises(error):
            online.update(stops)
        assert chatting.session.drafter is before
        assert list(online._folder.iterdir()) == []
        after = online._draft.module.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())
        ask(chatting, 0)
        chatting.close()


def test_an_update_that_makes_it_worse_is_not_used(chatting: Runtime) -> None:
    wild = dataclasses.replace(QUICK, learning_rate=3.0)
    with OnlineDrafter(chatting, wild) as online:
        ask(chatting, 0, times=8)
        before = chatting.session.drafter
        update = online.update()
        assert not update.swapped
        assert update.after.rate < update.before.rate
        assert chatting.session.drafter is before
        chatting.close()


def test_what_is_kept_goes_on_in_the_next_runtime(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    target, draft = files
    drafter = f"draft({quoted(str(draft))}, n=3)"
    stored = draft.read_bytes()
    with Runtime(target, drafter, learn="keep", **F32) as runtime:
        online = open_online_drafter(runtime, QUICK, keep=True)
        ask(runtime, 0, times=3)
        first = online.update().path
        places = runtime.rejections.buffer.n_places
    assert first is not None
    assert first.is_relative_to(tmp_path)
    with Runtime(target, drafter, learn="keep", **F32) as runtime:
        assert runtime.rejections.buffer.n_places == places
        online = open_online_drafter(runtime, QUICK, keep=True)
        assert runtime.draft_file == first
        ask(runtime, 50)
        second = online.update().path
        assert not first.exists()
        third = online.update().path
        assert len({first, second, third}) == 3
        assert runtime.draft_file == third
    assert draft.read_bytes() == stored  # the user's own file is never written
    with Runtime(target, drafter, **F32) as runtime:
        assert runtime.draft_file == draft


def test_who_cannot_learn_is_told_why(files: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = files
    drafter = f"draft({quoted(str(draft))}, n=3)"
    with Runtime(target, drafter, **F32) as runtime, pytest.raises(OptionError, match="learn=True"):
        OnlineDrafter(runtime)
    with (
        Runtime(target, "prompt-lookup", learn=True, **F32) as runtime,
        pytest.raises(OptionError, match=r"prompt-lookup is no draft model: give one, as in draft"),
    ):
        OnlineDrafter(runtime)
    other = tmp_path / "other.gguf"
    write_random_llama(other, RandomLlama(vocab_size=320, scale=3.0))
    with (
        Runtime(target, f"draft({quoted(str(other))}, n=3)", learn=True, **F32) as runtime,
        pytest.raises(PairError),
    ):
        OnlineDrafter(runtime)


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ftype", ["F32", "F16", "Q8_0", "Q4_0"])
def test_a_drafter_that_learnt_nothing_is_written_as_it_was(
    files: tuple[Path, Path], tmp_path: Path, ftype: str
) -> None:
    """Q4_0 too: its numbers are exact multiples of their blocks' scales, and find them again."""
    source = files[1]
    if ftype != "F32":
        source = tmp_path / "source.gguf"
        quantize_model(files[1], source, ftype)
    output = tmp_path / "again.gguf"
    write_drafter(load_drafter(source, CPU), source, output)
    ours, theirs = read_header(source), read_header(output)
    assert [(t.name, t.type_name, t.shape) for t in ours.tensors] == [
        (t.name, t.type_name, t.shape) for t in theirs.tensors
    ]
    assert ours.metadata.keys() == theirs.metadata.keys()
    with Model(source) as before, Model(output) as after:
        scale = {"Q4_0": 0.2}.get(ftype, 2e-3)
        np.testing.assert_allclose(
            fresh_logits(after, TOKENS), fresh_logits(before, TOKENS), atol=scale
        )


def test_what_was_learnt_is_in_the_file(files: tuple[Path, Path], tmp_path: Path) -> None:
    draft = load_drafter(files[1], CPU)
    with torch.no_grad():
        for parameter in draft.module.parameters():
            parameter.add_(0.01)
    write_drafter(draft, files[1], tmp_path / "new.gguf")
    with torch.no_grad():
        wanted = draft.model(input_ids=torch.tensor([TOKENS])).logits[0].numpy()
    with Model(tmp_path / "new.gguf") as model:
        np.testing.assert_allclose(fresh_logits(model, TOKENS), wanted, atol=1e-3)


def test_drafters_that_cannot_be_read_back_are_named_with_a_way_out(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    source = GGUFSource(files[1])
    metadata = source.metadata()
    metadata.text("llama.rope.scaling.type", "linear")
    from specrun.convert.gguf import write_gguf

    other = tmp_path / "other.gguf"
    tensors = [source.unchanged(tensor, tensor.name) for tensor in source.header.tensors]
    write_gguf(other, "llama", metadata, tensors)
    with pytest.raises(UnsupportedModelError, match="--online BUFFER --draft DIR"):
        load_drafter(other, CPU)


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def buffer(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, draft = files
    path = tmp_path_factory.mktemp("buffer") / "rejected.bin"
    with Runtime(target, f"draft({quoted(str(draft))}, n=3)", learn=path, **F32) as runtime:
        ask(runtime, 0, times=6)
    return path


def run_of(buffer: Path, draft: Path, output: Path, **changes) -> Order:
    usual = {
        **SMALL_RUN,
        "steps": 20,
        "learning_rate": 1e-2,
        "tokens_per_batch": 200,
        "measures": 2,
    }
    places = {"target": Path("target"), "data": (), "output": output}
    return order_of(OnlineRecipe, **places, draft=draft, buffer=buffer, **{**usual, **changes})


def test_a_run_from_a_buffer_to_a_drafter(
    buffer: Path, files: tuple[Path, Path], family: Family, tmp_path: Path
) -> None:
    report = run_of(buffer, files[1], tmp_path / "out", gguf=tmp_path / "new.gguf").train()
    assert report.after.rate > report.before.rate + 0.1
    assert report.n_places == _places(buffer)
    assert report.gguf is not None
    assert report.gguf.read_bytes() == (tmp_path / "new.gguf").read_bytes()
    assert "rejected" in (tmp_path / "out" / "README.md").read_text()
    # A folder of any architecture learns alike, and is written as one.
    again = run_of(buffer, family.draft, tmp_path / "folder").train()
    assert again.gguf is None
    assert again.after.rate == pytest.approx(report.after.rate, abs=1e-3)
    convert_checkpoint(tmp_path / "folder", tmp_path / "folder.gguf", outtype="f32")


def _places(path: Path) -> int:
    _, buffer = load_rejections(path)
    return buffer.n_places


def test_a_resumed_run_is_one_that_was_never_stopped(
    buffer: Path, files: tuple[Path, Path], tmp_path: Path
) -> None:
    whole = run_of(buffer, files[1], tmp_path / "whole", steps=10).train()
    run = run_of(buffer, files[1], tmp_path / "cut", steps=10)
    with pytest.raises(KeyboardInterrupt):
        run.train(StopsAt(5))
    assert not (run.run.output / "drafter.gguf").exists()
    rest = run.but(resume=True).train()
    assert rest.result.resumed_at == 5
    assert rest.result.curves.losses == pytest.approx(whole.result.curves.losses, abs=1e-6)
    assert (run.run.output / "drafter.gguf").read_bytes() == (
        whole.gguf or run.run.output
    ).read_bytes()
    with pytest.raises(OptionError, match=r"already holds drafter.gguf"):
        run.train()
    with pytest.raises(OptionError, match="with divergence forward-kl, and --resume needs"):
        run.but(resume=True, divergence="reverse-kl").train()


def test_a_drafter_of_another_vocabulary_is_refused(buffer: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    write_random_llama(other, RandomLlama(vocab_size=600, scale=3.0))
    with pytest.raises(PairError, match=r"another vocabulary \(600 tokens\) than target.gguf"):
        run_of(buffer, other, tmp_path / "out").train()
    assert not (tmp_path / "out").exists()


def test_rows_are_laws_at_temperature_1() -> None:
    """Whatever temperature an answer was sampled at."""
    row = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    ids, logs = likeliest(row, 3)
    assert ids.tolist() == [0, 1, 2]
    np.testing.assert_allclose(np.exp(logs[:3].astype(float)), [0.5, 0.3, 0.2], atol=1e-3)
