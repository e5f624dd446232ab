"""The store of answered texts: found again by counts, bounded, one vocabulary's, its owner's."""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tiny_models import F32

from specrun.bindings.errors import MalformedFileError, PairError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.retrieval import (
    AnswerStore,
    PromptLookupDrafter,
    answers_file,
    newest,
    open_answers,
    verify_store,
)
from specrun.runtime.engine import Engine, GenerationStream
from specrun.runtime.laws import SeededNoise
from specrun.runtime.planning import CostCurve
from specrun.runtime.round import DraftRequest, GenerationResult
from specrun.runtime.trees import ROOT

FREE = CostCurve((1, 64), (1.0, 1.0), (1.0, 1.0), (0.0, 0.0))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "target.gguf"
    write_random_llama(path, RandomLlama(vocab_size=64, layers=2, scale=4.0))
    return path


@pytest.fixture(scope="module")
def model(target: Path) -> Iterator[Model]:
    with Model(target) as opened:
        yield opened


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "specrun"


def test_what_was_answered_most_often_is_drafted_first(model: Model) -> None:
    """Children by counts, in a conversation that shares two tokens with each answer."""
    store = AnswerStore(model)
    for last, tail in ((30, 31), (40, 41), (40, 43), (40, 41), (40, 43), (40, 41), (30, 31)):
        store.add([7, 8, 20, 21, last, tail, tail + 1], 2)
    lookup = PromptLookupDrafter(num_draft_tokens=3, answers=store, costs=FREE)
    lookup.begin([1, 20, 21])
    request = DraftRequest([1, 20, 21], SamplingParams(), SeededNoise(0), 9, 9)
    tree = lookup.propose(request)
    at_root = [tree.tokens[node] for node, above in enumerate(tree.parents) if above == ROOT]
    assert at_root[0] == 40
    below = [tree.tokens[node] for node, above in enumerate(tree.parents) if above == 0]
    assert below[0] == 41


def test_a_store_is_bounded_and_the_oldest_go_first(model: Model, tmp_path: Path) -> None:
    texts = [[n, n + 1, n + 2] for n in range(1, 31, 3)]
    assert newest(texts, 12) == texts[7:]
    assert newest([[1, 2], [1, 2]], 99) == [[1, 2], [1, 2]]  # they are counted
    assert newest(texts, 3) == []
    store = AnswerStore(model, tmp_path / "a.store", most=12)
    for text in texts:
        store.add([*text], 0)
    store.save()
    again = AnswerStore(model, tmp_path / "a.store")
    assert len(again) == 3
    assert again.nearest([28], 4, 4, 1) == [(1, [29, 30])]
    assert again.nearest([1], 4, 4, 1) == []
    store.add([5], 0)  # nothing follows it
    store.add([5, 6], 2)  # no answer
    store.save()
    assert len(AnswerStore(model, tmp_path / "a.store")) == 3


def test_two_processes_keep_each_others_answers(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.store"
    stores = [AnswerStore(model, path) for _ in range(2)]
    for number, store in enumerate(stores):
        store.add([number + 10, number + 11, number + 12], 0)
        store.close()
        store.close()  # nothing is new
    assert [len(store) for store in (*stores, AnswerStore(model, path))] == [1, 1, 2]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert verify_store(path)


def test_a_store_of_another_vocabulary_is_refused(target: Path, tmp_path: Path) -> None:
    other, path = tmp_path / "other.gguf", tmp_path / "a.store"
    write_random_llama(other, RandomLlama(vocab_size=80, layers=1))
    with Runtime(target, "prompt-lookup", answers=path, **F32) as runtime:
        runtime.generate(PROMPT, max_tokens=8)
    with pytest.raises(PairError, match=r"another vocabulary \(64 tokens, .* than the target's"):
        Runtime(other, "prompt-lookup", answers=path, **F32)
    with Runtime(other, "prompt-lookup", answers="keep", **F32) as runtime:
        assert len(runtime.generate(PROMPT, max_tokens=8).token_ids) == 8


def test_a_damaged_store_is_put_aside_unless_it_was_named(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = answers_file(model)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"specrun datastore\n" + b"\1" * 400)
    with caplog.at_level(logging.WARNING):
        store = open_answers("keep", model)
    assert store is not None
    assert len(store) == 0
    assert "the kept answers were ignored" in caplog.text
    assert path.with_suffix(".damaged").exists()
    assert not path.exists()
    with pytest.raises(MalformedFileError):
        open_answers(path.with_suffix(".damaged"), model)
    assert open_answers(False, model) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_conversation_is_drafted_from_it_and_keeps_its_text(
    target: Path, temperature: float
) -> None:
    """The second run of a question takes few rounds; its text is plain decoding's own."""
    params = SamplingParams(temperature=temperature, seed=3)
    with Runtime(target, "none", **F32) as plain:
        wanted = plain.generate(PROMPT, params, max_tokens=40).token_ids
    for earlier in (False, True):
        with Runtime(target, "prompt-lookup(always=yes)", answers="keep", **F32) as runtime:
            result = runtime.generate(PROMPT, params, max_tokens=40)
        assert result.token_ids == wanted
        if earlier:
            assert result.stats.accepted >= 30
            assert result.stats.rounds <= 10


def test_slots_share_what_was_answered(target: Path) -> None:
    with Engine(target, "prompt-lookup(always=yes)", slots=2, answers=True, **F32) as engine:
        greedy = SamplingParams(temperature=0.0)
        wanted = _result(engine.submit(PROMPT, greedy, max_tokens=40))
        for stream in [engine.submit(PROMPT, greedy, max_tokens=40) for _ in range(2)]:
            result = _result(stream)
            assert result.token_ids == wanted.token_ids
            assert result.stats.rounds <= 10


def _result(stream: GenerationStream) -> GenerationResult:
    for _ in stream:
        pass
    return stream.result
