"""A target that torch computes, as on a GPU: its answers, states and losses are llama.cpp's."""

from __future__ import annotations

import json
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_targets import ANSWERS, HIDDEN

from specrun.bindings.errors import ModelError, OutOfMemoryError
from specrun.train.data import Answered, AnswerSettings, own_prompts
from specrun.train.data.answers import (
    Answerer,
    AskingSettings,
    FileAnswerer,
    Question,
    answer_prompts,
)
from specrun.train.data.corpus import TokenBatch, corpus_of
from specrun.train.data.documents import Document
from specrun.train.data.tokens import FileTokens, TokenSequence
from specrun.train.heads import EagleRecipe, HeadRun
from specrun.train.heads.states import RunStates
from specrun.train.target import head_target, open_head_target, sampling
from specrun.train.target.from_gguf import llama_file_bytes, load_llama_file
from specrun.train.target.head_target import FileTarget, TorchTarget
from specrun.train.target.sampling import TorchAnswerer
from specrun.train.target.states import FeatureCache, Features, ModelFeatures, text_key
from specrun.train.trainer import train

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
PROMPTS: list[Document] = [Answered(question, None) for question in ANSWERS]


@pytest.fixture(scope="module")
def answerer(taught) -> TorchAnswerer:
    target = TorchTarget(taught.gguf, CPU)
    return TorchAnswerer(load_llama_file(taught.gguf, CPU), target.shape, target.tokens)


def answered(taught, answerer: Answerer, store: Path, **settings) -> list[TokenSequence]:
    return answer_prompts(
        nullcontext(answerer),
        FileTokens(taught.gguf),
        PROMPTS,
        store,
        AnswerSettings(**settings),
        identity={},
        max_length=256,
        n_threads=1,
    )


def test_the_most_likely_answers_are_llama_cpps(taught, answerer, tmp_path: Path) -> None:
    """Tokens, text, and whether they ended, at once and one by one."""
    ours = answered(taught, answerer, tmp_path / "torch.jsonl")
    theirs = answered(taught, FileAnswerer(taught.gguf), tmp_path / "llama.jsonl")
    assert [each.ids.tolist() for each in ours] == [each.ids.tolist() for each in theirs]
    stores = ((tmp_path / f"{name}.jsonl").read_text() for name in ("torch", "llama"))
    first, second = (sorted(map(json.dumps, map(json.loads, s.splitlines()))) for s in stores)
    assert first == second
    assert all(json.loads(line)["whole"] for line in first)


def test_an_answer_is_as_long_as_it_may_be_and_then_not_whole(
    taught, answerer, tmp_path: Path
) -> None:
    cut = answered(taught, answerer, tmp_path / "a.jsonl", longest=3)
    assert {int(each.learnt.sum()) for each in cut} == {3}
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert not any(json.loads(line)["whole"] for line in lines)


def test_chance_goes_by_seed_and_number_whatever_is_asked_at_once(
    taught, answerer, tmp_path: Path, monkeypatch
) -> None:
    def drawn(name: str, seed: int = 0) -> list[list[int]]:
        found = answered(taught, answerer, tmp_path / name, temperature=2.0, seed=seed)
        return [each.ids.tolist() for each in found]

    together = drawn("a.jsonl")
    monkeypatch.setitem(sampling._MOST_ROWS, "cpu", 2)
    assert drawn("b.jsonl") == together
    assert drawn("c.jsonl", seed=1) != together


def test_where_memory_lacks_fewer_are_answered_at_once(
    taught, answerer, tmp_path: Path, monkeypatch
) -> None:
    """Answers that came before memory ran out are not asked for again."""
    whole = answered(taught, answerer, tmp_path / "a.jsonl")
    sample, sizes = sampling.answers_as_they_end, []

    def short_of_memory(model, prompts, *rest, **options):
        sizes.append(len(prompts))
        for done, found in enumerate(sample(model, prompts, *rest, **options)):
            if len(prompts) > most and done == before:
                raise torch.OutOfMemoryError
            yield found

    monkeypatch.setattr(sampling, "answers_as_they_end", short_of_memory)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    most, before = 2, 0
    again = answered(taught, answerer, tmp_path / "b.jsonl")
    assert [each.ids.tolist() for each in again] == [each.ids.tolist() for each in whole]
    assert sizes == [6, 3, 1, 1, 1, 1, 1, 1]
    sizes.clear()
    before = 2
    again = answered(taught, answerer, tmp_path / "c.jsonl")
    assert [each.ids.tolist() for each in again] == [each.ids.tolist() for each in whole]
    assert sizes == [6, 3, 1, 1]
    most, before = 0, 0
    with pytest.raises(OutOfMemoryError, match="no memory on cpu to answer a prompt of"):
        answered(taught, answerer, tmp_path / "d.jsonl")


def test_an_interrupted_batch_keeps_the_answers_that_ended(
    taught, answerer, tmp_path: Path
) -> None:
    """Each is stored when it ends, not when the longest one of its batch does."""
    store, heard = tmp_path / "a.jsonl", []

    def interrupted(done: int, _total: int) -> None:
        heard.append(len(store.read_text().splitlines()))
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_prompts(
            *(nullcontext(answerer), FileTokens(taught.gguf), PROMPTS, store, AnswerSettings()),
            **{"identity": {}, "max_length": 256, "progress": interrupted},
        )
    assert heard == [1, 2, 3]
    whole = answered(taught, answerer, store)
    assert len(store.read_text().splitlines()) == len(whole) == len(PROMPTS)


def test_the_first_answers_are_those_to_the_first_questions(
    taught, answerer, tmp_path: Path, monkeypatch
) -> None:
    """Batch by batch, though a batch is asked by length: who has heard enough stops there."""
    monkeypatch.setitem(sampling._MOST_ROWS, "cpu", 2)
    questions = [
        (number, Question([5] * length, 2, str(number)))
        for number, length in enumerate((9, 3, 1, 7, 2, 8))
    ]
    asking = AskingSettings(AnswerSettings().params, "none", 1, 64)
    order = [number for number, _ in answerer.answers(questions, asking)]
    assert [sorted(order[at : at + 2]) for at in (0, 2, 4)] == [[0, 1], [2, 3], [4, 5]]


def test_rows_go_by_the_memory_that_is_free(taught, answerer, tmp_path: Path, monkeypatch) -> None:
    sample, sizes = sampling.answers_as_they_end, []

    def counted(model, prompts, *rest, **options):
        sizes.append(len(prompts))
        return sample(model, prompts, *rest, **options)

    monkeypatch.setattr(sampling, "answers_as_they_end", counted)
    for free, expected in ((1, [1] * 6), (1 << 40, [6])):
        sizes.clear()
        monkeypatch.setattr(sampling, "free_memory", lambda _device, free=free: free)
        answered(taught, answerer, tmp_path / f"{free}.jsonl")
        assert sizes == expected


def test_prompts_of_its_own_are_drawn_from_the_likeliest_tokens(
    taught, answerer, tmp_path: Path, monkeypatch
) -> None:
    asked = []
    sample = sampling.answers_as_they_end

    def noted(model, prompts, uniforms, **options):
        asked.append((len(prompts), options["temperature"], options["top_p"]))
        return sample(model, prompts, uniforms, **options)

    monkeypatch.setattr(sampling, "answers_as_they_end", noted)
    with suppress(ModelError):  # it has only learnt to answer
        own_prompts(
            nullcontext(answerer), FileTokens(taught.gguf), 3, tmp_path / "p.jsonl", identity={}
        )
    assert asked == [(3, 1.0, 0.9)]


def test_torch_computes_a_llama_that_fits_where_it_is_faster(taught, monkeypatch) -> None:
    """No GPU is needed to choose: which kind of target is opened, for which device and memory."""
    size = llama_file_bytes(taught.gguf, 2)
    gpu = torch.device("cuda")
    for device, capability, free, kind in (
        (gpu, "AVX2", 2 * size, TorchTarget),
        (gpu, "AVX512", 2 * size - 1, FileTarget),
        (CPU, "AVX2", 8 * size, FileTarget),
        (CPU, "AVX512", 4 * size, TorchTarget),
        (CPU, "AVX512", 4 * size - 1, FileTarget),
    ):
        monkeypatch.setattr(head_target, "free_memory", lambda _device, free=free: free)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        assert type(open_head_target(taught.gguf, None, device=device)) is kind
    assert type(open_head_target(taught.folder, None, device=gpu)) is TorchTarget
    assert type(open_head_target(taught.folder, taught.gguf, device=gpu)) is FileTarget


@pytest.mark.parametrize(("capability", "answerer"), [("AVX512", "Torch"), ("AVX2", "File")])
def test_a_folder_answers_by_what_is_faster(
    taught, tmp_path: Path, monkeypatch, capability: str, answerer: str
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    target = open_head_target(taught.folder, None, device=CPU)
    with target.answerer(tmp_path, lambda _note: None) as found:
        assert type(found).__name__ == f"{answerer}Answerer"


def test_a_file_that_is_no_llama_is_llama_cpps_on_any_device(tmp_path: Path, taught) -> None:
    from support.renamed_models import as_architecture

    path = as_architecture(taught.gguf, tmp_path / "qwen2.gguf", "qwen2")
    assert type(open_head_target(path, None, device=torch.device("cuda"))) is FileTarget


def test_a_llama_with_more_than_torch_reads_back_is_llama_cpps(
    tmp_path: Path, taught, monkeypatch
) -> None:
    """Biases, for one: found out before anything is loaded."""
    from support.renamed_models import as_architecture

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    plain = as_architecture(taught.gguf, tmp_path / "plain.gguf", "llama")
    assert type(open_head_target(plain, None, device=CPU)) is TorchTarget
    bias = {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    biased = as_architecture(taught.gguf, tmp_path / "biased.gguf", "llama", bias)
    assert type(open_head_target(biased, None, device=CPU)) is FileTarget


@pytest.mark.parametrize("answers", [False, True])
def test_losses_in_torch_are_those_in_llama_cpp(
    taught, tmp_path: Path, monkeypatch, answers: bool
) -> None:
    """To 1e-3 with a file in F32, on given texts and on its own answers to the same prompts."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(ANSWERS))
    given = {"data": (), "prompts": prompts, "own_answers": AnswerSettings()}
    run = {
        **(given if answers else {"data": (taught.data,)}),
        **{"steps": 4, "tokens_per_batch": 128, "max_length": 64, "held_out": 0.2},
        **{"device": "cpu", "precision": "float32", "n_threads": 1, "measures": 1},
    }
    recipe, reports = EagleRecipe(noise=0.0), {}
    for name, capability in (("torch", "AVX512"), ("llama", "AVX2")):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        reports[name] = train(recipe, HeadRun(taught.gguf, output=tmp_path / name, **run))
    for name in ("torch", "llama"):
        card = (tmp_path / name / "README.md").read_text()
        assert f"computed by {name.replace('llama', 'llama.cpp')}." in card
    ours, theirs = (reports[name].result.curves for name in ("torch", "llama"))
    np.testing.assert_allclose(ours.losses, theirs.losses, atol=1e-3)
    assert ours.measures[-1][1].keys() == theirs.measures[-1][1].keys()


# -- states of what is answered --------------------------------------------------------------------


TAPS = (0, 1)


def cache_of(root: Path) -> FeatureCache:
    return FeatureCache(root, TAPS, HIDDEN, precision="float32", identity={})


def keeping(taught, root: Path) -> tuple[TorchAnswerer, FeatureCache]:
    target, cache = TorchTarget(taught.gguf, CPU), cache_of(root).open()
    model = load_llama_file(taught.gguf, CPU)
    return TorchAnswerer(model, target.shape, target.tokens, cache), cache


def computed(taught, texts: list[TokenSequence], root: Path) -> FeatureCache:
    found = cache_of(root)
    source = ModelFeatures(load_llama_file(taught.gguf, CPU), TAPS)
    found.fill(corpus_of(texts), source, CPU)
    return found


@pytest.mark.parametrize(
    ("rows", "settings"), [(1, {}), (2, {"temperature": 2.0}), (128, {}), (128, {"longest": 3})]
)
def test_states_noted_while_answering_are_those_computed_afterwards(
    taught, tmp_path: Path, monkeypatch, rows: int, settings: dict
) -> None:
    """To the last token, whatever is answered at once; of other texts they are others."""
    monkeypatch.setitem(sampling._MOST_ROWS, "cpu", rows)
    answerer, cache = keeping(taught, tmp_path / "noted")
    texts = answered(taught, answerer, tmp_path / "a.jsonl", **settings)
    wanted = computed(taught, texts, tmp_path / "computed")
    assert cache.texts == wanted.texts
    near = {"rtol": 2e-3, "atol": 2e-3}  # float16 on disk
    for text in texts:
        for name in ("final", "taps"):
            noted, there = cache.read(name, text.ids), wanted.read(name, text.ids)
            torch.testing.assert_close(noted, there, **near)
            other = wanted.read(name, texts[text is texts[0]].ids)
            n = min(len(other), len(noted))
            assert not torch.allclose(noted[-n:], other[-n:], **near)


def test_states_of_answers_that_ended_outlive_an_interrupt(taught, tmp_path: Path) -> None:
    answerer, cache = keeping(taught, tmp_path / "noted")
    store = tmp_path / "a.jsonl"

    def interrupted(done: int, _total: int) -> None:
        if done == len(PROMPTS) - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_prompts(
            *(nullcontext(answerer), FileTokens(taught.gguf), PROMPTS, store, AnswerSettings()),
            **{"identity": {}, "max_length": 256, "progress": interrupted},
        )
    there = cache.texts
    lengths = [len(json.loads(line)["answer"]) for line in store.read_text().splitlines()]
    # Not those whose last token was never evaluated: they ended in the last step.
    assert len(there) >= sum(n < max(lengths) for n in lengths) >= 1
    texts = answered(taught, answerer, store)
    assert there < cache.texts | there <= {text_key(text.ids) for text in texts}


def test_states_left_by_answers_are_not_computed_again(taught, tmp_path: Path, monkeypatch) -> None:
    """By a training on a CPU that torch answers on; the losses are those without."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(ANSWERS))
    run = {
        **{"data": (), "prompts": prompts, "own_answers": AnswerSettings(), "steps": 4},
        **{"tokens_per_batch": 128, "max_length": 64, "held_out": 0.2, "cache": "yes"},
        **{"device": "cpu", "precision": "float32", "n_threads": 1, "measures": 1},
    }
    asked, features, losses = [], ModelFeatures.features, []

    def counted(source: ModelFeatures, batch: TokenBatch) -> Features:
        asked.append(batch.numbers)
        return features(source, batch)

    monkeypatch.setattr(ModelFeatures, "features", counted)
    for name, kept in (("kept", RunStates.while_answering), ("not", lambda *_: None)):
        monkeypatch.setattr(RunStates, "while_answering", kept)
        asked.clear()
        report = train(EagleRecipe(noise=0.0), HeadRun(taught.gguf, output=tmp_path / name, **run))
        assert bool(asked) is (name == "not")
        losses.append(report.result.curves.losses)
    np.testing.assert_allclose(*losses, atol=1e-3)
