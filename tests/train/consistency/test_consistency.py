"""Consistency training: trajectories that are the target's own, packed rows that are what decoding
evaluates, both forms of the loss in closed form, and a target that is decoded faster."""

from __future__ import annotations

import dataclasses
import json
import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_models import F32
from support.training import SMALL_RUN, Order, order_of

from specrun.bindings.errors import MalformedFileError, ModelError, OptionError
from specrun.convert import convert_checkpoint
from specrun.runtime import Runtime
from specrun.train.consistency import ConsistencyRecipe
from specrun.train.consistency.training import Block, ConsistencyLearner, pack, packed_states
from specrun.train.consistency.trajectories import (
    GREEDY,
    Trajectory,
    collect_trajectories,
    tokens_per_iteration,
)
from specrun.train.data.answers import asked_prompts
from specrun.train.data.corpus import TokenCorpus
from specrun.train.data.documents import read_documents
from specrun.train.data.tokens import TargetTokenizer, TokenSequence
from specrun.train.target.hf_model import load_hf_model

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
BLOCK, LONGEST = 4, 24
TEXT = [3, 9, 27, 81, 243, 5, 15, 45, 135]


def run_of(taught, output: Path, **changes) -> Order:
    recipe = {"block": BLOCK, "states": 6, "answer_length": 24, **changes.pop("recipe", {})}
    usual = {**SMALL_RUN, "steps": 70, "tokens_per_batch": 512, "learning_rate": 5e-3}
    places = {"target": taught.folder, "data": (taught.data,), "output": output}
    return order_of(ConsistencyRecipe, **{**places, **recipe, **usual, **changes})


@pytest.fixture(scope="module")
def found(taught, tmp_path_factory: pytest.TempPathFactory) -> list[Trajectory]:
    folder = tmp_path_factory.mktemp("trajectories")
    tokenizer = TargetTokenizer(taught.folder)
    prompts = asked_prompts(read_documents([taught.data]), tokenizer, 64)
    return collect(taught, prompts, folder / "found.jsonl")


def collect(taught, prompts, store: Path, progress=None, block: int = BLOCK) -> list[Trajectory]:
    return collect_trajectories(
        nullcontext(taught.gguf),
        prompts,
        store,
        identity={"name": "taught"},
        block=block,
        longest=LONGEST,
        max_length=64,
        n_threads=1,
        progress=progress,
    )


# -- trajectories ----------------------------------------------------------------------------------


def test_iterates_are_the_targets_own_greedy_tokens_and_answers_its_text(taught, found) -> None:
    """The rows behind an iterate, by torch, are the next iterate where it is not filled anew."""
    model = load_hf_model(taught.folder, CPU)
    end = TargetTokenizer(taught.folder).eos
    with Runtime(taught.gguf, "none", **F32) as runtime:
        for each in found:
            prompt = each.ids[: each.n_prompt].tolist()
            answer = runtime.generate(prompt, GREEDY, max_tokens=24).token_ids
            assert each.ids[each.n_prompt :].tolist() == answer
    checked = 0
    for each in found:
        rounds = zip(each.starts, each.iterates, each.starts[1:], each.iterates[1:], strict=False)
        for start, guesses, later, following in rounds:
            ids = torch.tensor([[*each.ids[:start], *guesses]])
            with torch.no_grad():
                rows = model.model(input_ids=ids).logits[0].numpy()[start - 1 :]
            # What follows a guessed end token, or the longest answer, is not evaluated.
            ends = [place for place, token in enumerate(guesses, 1) if token == end]
            room = each.n_prompt + LONGEST - start - 1
            n_rows = max(0, min([BLOCK, room, *ends]) - (later - start - 1))
            for row, token in zip(rows[later - start :][:n_rows], following, strict=False):
                # The cache is float16: behind nonsense two tokens may be equally likely.
                assert row[token] > row.max() - 0.1
                checked += 1
    assert checked > 50


def test_what_was_collected_is_not_asked_again(taught, found, tmp_path: Path) -> None:
    prompts = [each.ids[: each.n_prompt].tolist() for each in found]
    told: list[tuple[int, int]] = []
    store = tmp_path / "store.jsonl"
    collect(taught, prompts[:4], store, lambda done, total: told.append((done, total)))
    assert told[-1] == (4, 4)
    whole = store.read_bytes()
    store.write_bytes(whole + b'{"key": "cut o')
    told.clear()
    again = collect(taught, prompts, store, lambda done, total: told.append((done, total)))
    assert told == [(5, 6), (6, 6)]
    for ours, theirs in zip(again, found, strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.iterates.tolist() == theirs.iterates.tolist()
    collect(taught, prompts[:1], store, lambda done, total: told.append((done, total)), block=3)
    assert told[-1] == (1, 1)
    store.write_text('{"key": 1}\n')
    with pytest.raises(MalformedFileError, match=r"line 1 of .* is no trajectory"):
        collect(taught, prompts, store)


# -- packed rows -----------------------------------------------------------------------------------


def test_packed_rows_are_what_each_sequence_alone_gives(taught) -> None:
    model = load_hf_model(taught.folder, CPU)
    blocks = [Block(3, [7, 8, 9]), Block(6, [1, 2, 3, 4]), Block(9, [5])]
    packed = pack([TEXT, TEXT[:5]], [blocks, [Block(2, [11, 12])]])
    with torch.no_grad():
        states = packed_states(model, packed)
        for row, (text, own) in enumerate(((TEXT, blocks), (TEXT[:5], [Block(2, [11, 12])]))):
            alone = model.hidden_states(torch.tensor([text]))[0][0]
            torch.testing.assert_close(states[row, : len(text)], alone, atol=1e-4, rtol=1e-4)
            for block, place in zip(own, packed.places[row], strict=True):
                ids = torch.tensor([[*text[: block.start], *block.tokens]])
                alone = model.hidden_states(ids)[0][0, block.start :]
                rows = states[row, place : place + len(block.tokens)]
                torch.testing.assert_close(rows, alone, atol=1e-4, rtol=1e-4)


def test_blocks_that_saw_each_other_would_be_noticed(taught) -> None:
    """The negative control of the test above."""
    model = load_hf_model(taught.folder, CPU)
    packed = pack([TEXT], [[Block(3, [7, 8, 9]), Block(6, [1, 2])]])
    attends = packed.attends.clone()
    attends[0, packed.places[0][1] :, packed.places[0][0]] = True
    leaking = dataclasses.replace(packed, attends=attends)
    with torch.no_grad():
        first, second = (packed_states(model, each) for each in (packed, leaking))
    assert (first - second)[0, packed.places[0][1]].abs().max() > 1e-2


# -- losses ----------------------------------------------------------------------------------------


def a_trajectory() -> Trajectory:
    starts = np.array([3, 4, 6], np.int32)
    iterates = np.array([[7, 8, 9, 10], [9, 11, 12, 13], [15, 45, 14, 6]], np.int32)
    return Trajectory(np.array(TEXT, np.int32), 3, starts, iterates)


def expected_divergence(model, form: str) -> float:
    """Equations 5 and 6, sequence by sequence."""
    each = a_trajectory()

    def log_laws(ids) -> torch.Tensor:
        with torch.no_grad():
            return model.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)

    def state(number: int) -> list[int]:
        return [*TEXT[: each.starts[number]], *each.iterates[number].tolist()]

    terms = []
    for number, start in enumerate(each.starts):
        learns = log_laws(state(number))
        if form == "local" and number + 1 < len(each.starts):
            later, reaches = log_laws(state(number + 1)), each.starts[number + 1] + BLOCK
        else:
            later, reaches = log_laws(TEXT), len(TEXT) - 1
        for position in range(start, min(start + BLOCK, reaches)):
            if position >= len(TEXT) - 1 and not (
                form == "local" and number + 1 < len(each.starts)
            ):
                continue
            p, q = later[position], learns[position]
            terms.append(float((p.exp() * (p - q)).sum()))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("form", ["global", "local"])
def test_the_loss_is_the_texts_own_and_the_weighed_divergence_along_the_trajectory(
    taught, form: str
) -> None:
    model = load_hf_model(taught.folder, CPU)
    text = TokenSequence.of(TEXT, 3)
    batch = TokenCorpus((text,), (0,), (0,), True).batch([0])
    with torch.no_grad():
        log_probs = model.model(input_ids=torch.tensor([TEXT])).logits[0].log_softmax(-1)
    own = -np.mean([float(log_probs[at - 1, TEXT[at]]) for at in range(3, len(TEXT))])
    for weight in (0.0, 1.0, 2.5):
        recipe = ConsistencyRecipe(BLOCK, form, weight, states=8)  # type: ignore[arg-type]
        learner = ConsistencyLearner(recipe, model, [a_trajectory()])
        (part,) = learner.losses(batch, torch.Generator(), 0)
        drift = expected_divergence(model, form)
        assert part.plain == pytest.approx(drift, rel=1e-3)
        assert float(part.value.detach()) == pytest.approx(own + weight * drift, rel=1e-3)
    assert drift > 0.1


def test_no_gradient_flows_into_what_is_learnt_from(taught) -> None:
    """With right guesses all agrees: the divergence's gradient is 0, the text's is not."""
    model = load_hf_model(taught.folder, CPU)
    right = Trajectory(
        np.array(TEXT, np.int32), 3, np.array([3], np.int32), np.array([TEXT[3:7]], np.int32)
    )
    batch = TokenCorpus((TokenSequence.of(TEXT, 3),), (0,), (0,), True).batch([0])
    gradients = []
    for weight in (0.0, 100.0):
        learner = ConsistencyLearner(ConsistencyRecipe(BLOCK, weight=weight), model, [right])
        (part,) = learner.losses(batch, torch.Generator(), 0)
        model.module.zero_grad()
        part.value.backward()
        gradients.append(model.output.grad.clone())
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-2)


# -- whole runs ------------------------------------------------------------------------------------


def test_a_target_becomes_one_that_converges_sooner(taught, tmp_path: Path) -> None:
    """By .35 tokens an iteration, where the control gains less than .2; how far a short run comes
    hangs on how many threads add up its sums. The old target's folder stays."""
    before = (taught.folder / "model.safetensors").read_bytes()
    report = run_of(taught, tmp_path / "out").train()
    assert report.before < 1.2
    assert report.after > report.before + 0.35
    assert report.n_decoded == 6
    card = (tmp_path / "out" / "README.md").read_text()
    assert "**A new model, not target" in card
    assert f"{report.after:.3f} after" in card
    assert (taught.folder / "model.safetensors").read_bytes() == before
    # What was measured is what the files do, and is exact to the new target's own text.
    convert_checkpoint(tmp_path / "out", tmp_path / "new.gguf", outtype="f32")
    prompts = asked_prompts(read_documents([taught.data]), TargetTokenizer(taught.folder), 64)
    rounds = tokens = 0
    for expression in ("none", f"jacobi(n={BLOCK}, always=yes)"):
        with Runtime(tmp_path / "new.gguf", expression, **F32) as runtime:
            answers = [runtime.generate(prompt, GREEDY, max_tokens=24) for prompt in prompts]
        if expression == "none":
            wanted = [answer.token_ids for answer in answers]
        else:
            assert [answer.token_ids for answer in answers] == wanted
            rounds = sum(answer.stats.rounds for answer in answers)
            tokens = sum(len(answer.token_ids) for answer in answers)
    assert tokens / rounds == pytest.approx(report.after, rel=0.1)


def test_without_the_divergence_nothing_converges_sooner(taught, tmp_path: Path) -> None:
    """The negative control: as many steps on the same texts, L_AR alone."""
    run = run_of(taught, tmp_path / "out", recipe={"weight": 0.0})
    report = run.train()
    assert report.after < report.before + 0.2
    assert report.same_answers >= 4
    with pytest.raises(OptionError, match=r"consistency weight 0.0, and --resume needs 2.0"):
        run.but(resume=True, weight=2.0, force=True).train()


def test_tokens_per_iteration_are_those_of_all_answers() -> None:
    each = a_trajectory()
    assert tokens_per_iteration([each, each]) == pytest.approx(6 / 3)


def test_data_that_ask_nothing(taught, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Nothing is asked here. " * 9)
    with pytest.raises(ModelError, match="the data has no prompts"):
        run_of(taught, tmp_path / "out").but(data=(text,)).train()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"block": 0}, "blocks of 0 tokens"),
        ({"form": "universal"}, "the form is 'universal'"),
        ({"weight": -1.0}, "a weight below 0"),
        ({"divergence": "distance"}, "the divergence is 'distance'"),
    ],
)
def test_recipes_that_cannot_be(changes, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        ConsistencyRecipe(**changes)
    assert json.dumps(dataclasses.asdict(ConsistencyRecipe()))
    assert math.isfinite(ConsistencyRecipe().weight)
