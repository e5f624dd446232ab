"""Laws from backend sampling: those of whole rows to the bit, and so the same texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.enumeration import PROMPT, Propose, branching_tree, chain
from support.scripted import LawTable, ScriptedDrafter, conversation_of
from support.tiny_models import F32

from specrun.bench.prove.rules import BranchingNoise, enumerate_law
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.contexts.rows import Candidates, Rows
from specrun.bindings.errors import DecodeFailedError, OptionError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import build_rule
from specrun.runtime.language import quoted
from specrun.runtime.laws import Law, transformed_law
from specrun.runtime.round import Target, TargetModel, backend_laws
from specrun.runtime.round.backend_laws import (
    SPARE,
    BackendSamplingTarget,
    CutRows,
    candidates_needed,
    is_wanted,
    law_of_candidates,
)
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds

VOCABULARY = 400
KINDS = ["plain", "ties", "coarse", "infinite", "few"]


def random_row(kind: str, generator: np.random.Generator) -> np.ndarray:
    logits = (3.0 * generator.standard_normal(VOCABULARY)).astype(np.float32)
    if kind == "ties":
        logits[generator.random(VOCABULARY) < 0.3] = np.sort(logits)[
            -int(generator.integers(1, 40))
        ]
    elif kind == "coarse":
        logits = np.round(2.0 * logits).astype(np.float32) / 2
    elif kind == "infinite":
        logits[generator.random(VOCABULARY) < 0.7] = -math.inf
    elif kind == "few":
        logits[generator.random(VOCABULARY) < 0.98] = -math.inf
        logits[int(generator.integers(VOCABULARY))] = 1.0
    return logits


def best_of(logits: np.ndarray, k: int, generator: np.random.Generator) -> Candidates:
    """The k best logits in no order; which ones of equals is left to chance, as on devices."""
    shuffled = generator.permutation(len(logits))
    kept = shuffled[np.argsort(-logits[shuffled], kind="stable")[:k]]
    tokens = generator.permutation(kept).astype(np.int32)
    return Candidates(tokens, logits[tokens])


def all_params() -> Iterator[SamplingParams]:
    yield SamplingParams(temperature=0.0)
    cuts = itertools.product((1, 3, 40), (1.0, 0.9, 0.3), (0.0, 0.05, 0.5), (0.3, 1.0, 2.0))
    for top_k, top_p, min_p, temperature in cuts:
        yield SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)


def same(law: Law, other: Law) -> bool:
    assert law.ids is not None
    assert other.ids is not None
    same_ids = law.ids.tolist() == other.ids.tolist() and law.ids.dtype == other.ids.dtype
    return same_ids and law.probs.tobytes() == other.probs.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_laws_of_candidates_are_those_of_whole_rows_to_the_bit(kind: str) -> None:
    generator = np.random.default_rng(KINDS.index(kind))
    n_known = n_unknown = 0
    for params in all_params():
        needed = candidates_needed(params, VOCABULARY)
        assert needed is not None
        for _ in range(8):
            logits = random_row(kind, generator)
            law = law_of_candidates(best_of(logits, needed, generator), params)
            n_unknown += law is None
            if law is not None:
                n_known += 1
                assert same(law, transformed_law(logits, params))
    assert n_known > 50
    assert (n_unknown > 0) == (kind in ("ties", "coarse", "few"))


def test_a_tie_that_goes_on_beyond_what_was_sent_is_seen() -> None:
    """Negative control: without that, some laws would be of other tokens than whole rows'."""
    generator, params = np.random.default_rng(1), SamplingParams(top_k=3, top_p=1.0, min_p=0.0)
    logits = random_row("coarse", generator)
    best = np.sort(logits)[-1]
    logits[100:130] = best
    found = best_of(logits, 3 + SPARE, generator)
    assert law_of_candidates(found, params) is None
    naive = transformed_law(found.logits[found.tokens.argsort()], params)
    assert naive.ids is not None
    ids = np.sort(found.tokens)[naive.ids]
    assert ids.tolist() != transformed_law(logits, params).ids.tolist()


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_k=3)])
@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_broken_row_gives_no_law(params: SamplingParams, number: float) -> None:
    """The whole row is asked, and refused, as ever."""
    logits = np.arange(11, dtype=np.float32)
    logits[7] = number
    found = Candidates(np.arange(11, dtype=np.int32), logits)
    try:
        assert law_of_candidates(found, params) is None
    except DecodeFailedError:
        assert number == math.inf


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 0},
        {"top_k": VOCABULARY - SPARE},
        {"logit_bias": {3: 1.0}},
        {"repeat_penalty": 1.1},
        {"presence_penalty": 0.1, "temperature": 0.0},
    ],
)
def test_other_settings_take_whole_rows(changes: dict[str, object]) -> None:
    assert candidates_needed(SamplingParams(**changes), VOCABULARY) is None


# -- over a model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target, drafter = folder / "target.gguf", folder / "drafter.gguf"
    write_random_llama(target, RandomLlama(vocab_size=VOCABULARY, seed=1, scale=3.0))
    write_random_llama(drafter, RandomLlama(vocab_size=VOCABULARY, seed=1, scale=2.0))
    return target, drafter


@pytest.fixture
def n_cut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the laws that were asked of cut rows, and those that took whole ones after all."""
    counts, law, logits = [0, 0], CutRows.law, CutRows.logits

    def counted(self: CutRows, row: int, params: SamplingParams) -> Law:
        counts[0] += 1
        return law(self, row, params)

    def counted_logits(self: CutRows, row: int) -> np.ndarray:
        counts[1] += 1
        return logits(self, row)

    monkeypatch.setattr(CutRows, "law", counted)
    monkeypatch.setattr(CutRows, "logits", counted_logits)
    return counts


DRAFTERS = [
    "none",
    "draft(FILE, n=1)",
    "draft(FILE, n=4)",
    "draft(FILE, n=3, sampling=argmax)",
    "draft(FILE, tree=3x2)",
    "draft(FILE, tree=2x2x1, sampling=with)",
    "draft(FILE, depth=3, topk=2, nodes=5)",
    "ensemble(draft(FILE, n=2), prompt-lookup)",
]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=1.2, seed=6, top_k=12, top_p=1.0, min_p=0.0),
]


def texts(
    pair: tuple[Path, Path], drafter: str, choice: str, shape: object = "free"
) -> list[object]:
    expression = drafter.replace("FILE", quoted(str(pair[1])))
    found: list[object] = []
    with Runtime(
        pair[0],
        expression,
        **F32 | {"flash_attention": "auto"},
        backend_sampling=choice,
        shape=shape,
    ) as runtime:
        for params, prompt in itertools.product(PARAMS, ([3, 1, 4, 1, 5], [2, 7, 1, 8])):
            result = runtime.generate(prompt, params, max_tokens=40)
            found.append((result.token_ids, result.stats.rounds, result.stats.accepted))
    return found


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_are_those_of_whole_rows(
    pair: tuple[Path, Path], drafter: str, n_cut: list[int]
) -> None:
    wanted = texts(pair, drafter, "off")
    assert n_cut == [0, 0]
    assert texts(pair, drafter, "on") == wanted
    assert n_cut[0] > 10
    assert n_cut[1] == 0


def test_texts_in_a_fixed_shape(pair: tuple[Path, Path], n_cut: list[int]) -> None:
    wanted = texts(pair, DRAFTERS[3], "off", "fixed")
    assert texts(pair, DRAFTERS[3], "on", "fixed") == wanted
    assert n_cut[0] > 20


@pytest.mark.parametrize("drafter", DRAFTERS[:5])
def test_texts_where_every_law_needs_a_second_evaluation(
    pair: tuple[Path, Path], drafter: str, n_cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a spare candidate the k-th may always be one of several."""
    wanted = texts(pair, drafter, "off")
    monkeypatch.setattr(backend_laws, "SPARE", 0)
    assert texts(pair, drafter, "on") == wanted
    assert n_cut[1] > 10


@pytest.mark.parametrize("fault", ["tokens", "logits", "twice"])
def test_a_device_that_samples_wrongly_is_found_out(
    pair: tuple[Path, Path], fault: str, n_cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, candidates, faults = texts(pair, DRAFTERS[2], "off"), Rows.candidates, 0

    def wrong(self: Rows, row: int) -> Candidates | None:
        nonlocal faults
        found = candidates(self, row)
        if found is None or row != 2:
            return found
        faults += 1
        tokens, logits = found.tokens.copy(), found.logits.copy()
        if fault == "tokens":
            other = next(token for token in range(VOCABULARY) if token not in tokens)
            tokens[logits.argmin()] = other
        elif fault == "logits":
            logits[0] = np.nextafter(logits[0], np.float32(0.0))
        else:
            tokens[1], logits[1] = tokens[0], logits[0]
        return Candidates(tokens, logits)

    monkeypatch.setattr(Rows, "candidates", wrong)
    assert texts(pair, DRAFTERS[2], "on") == wanted
    assert faults > 0
    assert n_cut == [0, 0]


@pytest.mark.parametrize("drafter", ["jacobi", "lookahead(window=2, ngram=3)"])
def test_drafters_that_read_logits_get_them(
    pair: tuple[Path, Path], drafter: str, n_cut: list[int]
) -> None:
    assert texts(pair, drafter, "on") == texts(pair, drafter, "off")
    assert n_cut == [0, 0]


def test_rules_that_are_not_exact_get_whole_rows(pair: tuple[Path, Path], n_cut: list[int]) -> None:
    options = {**F32, "backend_sampling": "on", "accept": "typical"}
    with Runtime(pair[0], f"draft({quoted(str(pair[1]))})", **options) as runtime:
        runtime.generate([3, 1, 4], SamplingParams(seed=1), max_tokens=24)
        assert n_cut == [0, 0]
        runtime.generate([3, 1, 4], SamplingParams(temperature=0.0), max_tokens=24)
        assert n_cut[0] > 0


def test_log_probabilities_are_kept_where_they_are_asked_for(
    pair: tuple[Path, Path], n_cut: list[int]
) -> None:
    params = SamplingParams(seed=4)
    with (
        Runtime(pair[0], "none", **F32, backend_sampling="on") as cutting,
        Runtime(pair[0], "none", **F32) as runtime,
    ):
        for _ in range(2):  # an answer without them before, and after
            silent = list(cutting.stream([3, 1, 4], params, max_tokens=24, logprobs=False))
            before = n_cut[0]
            events = list(cutting.stream([3, 1, 4], params, max_tokens=24))
            assert n_cut[0] == before > 0
        wanted = list(runtime.stream([3, 1, 4], params, max_tokens=24))
    assert [event.logprob for event in events] == [event.logprob for event in wanted]
    assert [event.text for event in silent] == [event.text for event in wanted]
    with pytest.raises(OptionError, match="without log-probabilities"):
        _ = silent[0].logprob


def test_the_choice_is_checked(tiny_model: Path) -> None:
    with Model(tiny_model) as model:
        assert [is_wanted(choice, model) for choice in ("on", "auto", "off")] == [
            True,
            False,
            False,
        ]
        with pytest.raises(OptionError, match="give auto, on or off"):
            is_wanted("yes", model)  # type: ignore[arg-type]


# -- enumerated ------------------------------------------------------------------------------------

FEW = SamplingParams(temperature=1.3, top_k=2, top_p=1.0, min_p=0.0)


def enumerated(context: Context, propose: Propose, *, cut: bool) -> dict[tuple[int, ...], float]:
    """The exact law of two tokens of the shipped loop over a model."""
    target = TargetModel(context)

    def program(noise: BranchingNoise) -> tuple[int, ...]:
        conversation = conversation_of(ScriptedDrafter(propose), PROMPT, noise)
        conversation.n_cached = 0
        context.memory.clear()
        target.prefill(conversation, len(PROMPT) - 1)
        limits = RoundLimits(n_ctx=64, max_nodes=target.max_nodes, max_tokens=2)
        verifier: Target = BackendSamplingTarget(target, 2 + SPARE) if cut else target
        settings = DecodeSettings(build_rule("exact"), FEW, limits)
        for _ in decode_rounds(verifier, conversation, settings):
            pass
        context.cut_rows(None)
        return tuple(conversation.tokens[len(PROMPT) :])

    return enumerate_law(program)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_the_enumerated_law_is_that_of_whole_rows(
    tmp_path: Path, kind: str, n_cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_laws, "STEADY", 0)
    path, drafts = tmp_path / "model.gguf", LawTable(14, 3, zeros=0.85)
    write_random_llama(path, RandomLlama(vocab_size=14, seed=5, scale=0.7))
    propose = chain(drafts, 2) if kind == "chain" else branching_tree(drafts, [2, 1], True)
    sizes = {"n_sequences": 3, "n_outputs": 8}
    with Model(path) as model, Context(model, ContextOptions(**F32, **sizes)) as context:
        wanted = enumerated(context, propose, cut=False)
        assert n_cut == [0, 0]
        assert enumerated(context, propose, cut=True) == wanted
    assert n_cut[0] > 20
    assert len(wanted) == 4
