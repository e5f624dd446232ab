"""Traces of rounds: they say what was decided, by which laws, and change nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.every_drafter import DRAFTERS, named
from support.held_engine import held
from support.tiny_models import F32

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.runtime import Grammar, SamplingParams
from specrun.runtime.engine import Engine, RoundTrace
from specrun.runtime.engine.trace import BEST
from specrun.runtime.round import GenerationResult, TokenEvent

WHOLE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
GREEDY = SamplingParams(temperature=0.0)
PENALISED = WHOLE.replace(repeat_penalty=1.3)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
LENGTH = 24
TREE = "draft(FILE:twin, tree=2x2)"
CHAIN = "draft(FILE:twin, n=4)"
LOOKUP = "prompt-lookup(min_ngram=1)"


def open_engine(
    files: dict[str, Path], drafter: str, accept: str = "exact", target: str = "shallow"
) -> Engine:
    options = ContextOptions(**{**F32, "n_ctx": 512})
    expression = named(drafter, files)
    return Engine(files[target], expression, slots=2, context=options, accept=accept)


def traced(
    engine: Engine, params: SamplingParams, prompt: Sequence[int] = PROMPT
) -> tuple[list[TokenEvent], list[RoundTrace], GenerationResult]:
    stream = engine.submit(prompt, params, max_tokens=LENGTH, logprobs=True, trace=True)
    events = list(stream)
    return events, stream.take_traces(), stream.result


EVERY = [
    (target, drafter)
    for target, drafter in DRAFTERS
    if target != "hybrid" and "pass(" not in drafter and "space(" not in drafter
]
"""Every method that drafts for several conversations, and its target."""


@pytest.mark.parametrize(("target", "drafter"), EVERY)
def test_a_trace_changes_no_token_and_no_round(
    files: dict[str, Path], target: str, drafter: str
) -> None:
    """Two engines, because some drafters remember earlier answers."""
    # Measured time decides how much these draft: at temperature 0 the text is the same.
    is_timed = "auto" in drafter or "adaptive" in drafter
    settings = (GREEDY,) if is_timed else (GREEDY, PENALISED)
    told = []
    for trace in (False, True):
        with open_engine(files, drafter, target=target) as engine:
            for params in settings:
                stream = engine.submit(PROMPT, params, max_tokens=LENGTH, trace=trace)
                events = list(stream)
                traces = stream.take_traces()
                told.append([(each.token_id, each.round, each.origin) for each in events])
                if not trace:
                    assert traces == []
                    continue
                assert [each.number for each in traces] == sorted({each.round for each in events})
                assert spelled(traces) == [each.token_id for each in events]
                json.dumps([each.to_dict() for each in traces], allow_nan=False)
    if is_timed:
        told = [[token for token, *_ in each] for each in told]
    assert told[: len(settings)] == told[len(settings) :]


@pytest.mark.parametrize("drafter", [CHAIN, TREE, LOOKUP])
@pytest.mark.parametrize("params", [GREEDY, WHOLE], ids=["greedy", "whole"])
def test_path_and_next_token_spell_the_answer(
    files: dict[str, Path], drafter: str, params: SamplingParams
) -> None:
    with open_engine(files, drafter) as engine:
        _, traces, result = traced(engine, params)
    said: list[int] = []
    for trace in traces:
        assert trace.position == len(PROMPT) + len(said)
        parents = [trace.nodes[node].parent for node in trace.path]
        assert parents == [-1, *trace.path][: len(parents)], "a path goes from parent to child"
        said += [trace.nodes[node].token for node in trace.path]
        if trace.next_token is not None:
            said.append(trace.next_token.token)
        assert trace.tokens == len(said)
    assert said == result.token_ids
    stats = result.stats
    assert traces[-1].acceptance_by_depth == stats.acceptance_by_position
    assert traces[-1].tokens_per_round == stats.mean_accepted_length
    if stats.accepted:
        assert any(trace.path for trace in traces)


def said_probabilities(trace: RoundTrace) -> list[float]:
    """The target's probability of each token that a round kept, by its trace."""
    kept = [trace.nodes[node].target for node in trace.path]
    own = [] if trace.next_token is None else [trace.next_token.probability]
    return [probability for probability in (*kept, *own) if probability is not None]


@pytest.mark.parametrize("drafter", [CHAIN, TREE, LOOKUP])
def test_the_targets_probabilities_are_the_log_probabilities(
    files: dict[str, Path], drafter: str
) -> None:
    """At temperature 1 without cuts the law is the model's, which events tell by another way."""
    with open_engine(files, drafter) as engine:
        events, traces, _ = traced(engine, WHOLE)
    told = [probability for trace in traces for probability in said_probabilities(trace)]
    wanted = [math.exp(event.logprob) for event in events]
    assert told == pytest.approx(wanted, rel=1e-5)
    # The same of the tokens one place on is something else: the comparison can fail.
    assert told[1:] != pytest.approx(wanted[:-1], rel=1e-5)


def test_penalties_are_those_that_acceptance_saw(files: dict[str, Path]) -> None:
    """Laws are read before the round's tokens are committed: later, penalties would see them."""
    with open_engine(files, LOOKUP) as engine:
        _, traces, _ = traced(engine, PENALISED)
        told = [law for trace in traces for law in trace.laws if law.node == -1]
        prompts = [PROMPT + spelled(traces[:number]) for number in range(len(traces))]
        # A round without drafts after the same text reads the same law.
        for law, prompt in zip(told[:6], prompts[:6], strict=True):
            stream = engine.submit(prompt, PENALISED, max_tokens=1, trace=True)
            assert stream.result.token_ids
            (alone,) = stream.take_traces()
            assert [each.token for each in alone.laws[0].target] == [
                each.token for each in law.target
            ]
            wanted = [each.probability for each in alone.laws[0].target]
            assert [each.probability for each in law.target] == pytest.approx(wanted, rel=1e-4)


def spelled(traces: Sequence[RoundTrace]) -> list[int]:
    tokens: list[int] = []
    for trace in traces:
        tokens += [trace.nodes[node].token for node in trace.path]
        tokens += [] if trace.next_token is None else [trace.next_token.token]
    return tokens


def test_a_drafter_with_the_targets_weights_has_the_targets_law(files: dict[str, Path]) -> None:
    expression = f"draft({json.dumps(str(files['shallow']))}, n=3)"
    with open_engine(files, expression) as engine:
        _, traces, _ = traced(engine, WHOLE)
    nodes = [node for trace in traces for node in trace.nodes]
    assert nodes
    assert [node.draft for node in nodes] == pytest.approx(
        [node.target for node in nodes], rel=1e-4
    )
    with open_engine(files, CHAIN) as engine:
        _, traces, _ = traced(engine, WHOLE)
    others = [node for trace in traces for node in trace.nodes]
    assert [node.draft for node in others] != pytest.approx(
        [node.target for node in others], rel=1e-4
    )


def test_point_masses_have_no_draft_law(files: dict[str, Path]) -> None:
    with open_engine(files, LOOKUP) as engine:
        _, traces, _ = traced(engine, WHOLE)
    nodes = [node for trace in traces for node in trace.nodes]
    assert nodes
    assert all(node.draft is None for node in nodes)
    assert all(law.draft == () for trace in traces for law in trace.laws)


@pytest.mark.parametrize("drafter", [CHAIN, TREE, "lookahead(window=3, ngram=3)"])
def test_laws_are_the_best_first_and_at_every_place_that_matters(
    files: dict[str, Path], drafter: str
) -> None:
    with open_engine(files, drafter) as engine:
        _, traces, _ = traced(engine, WHOLE)
    for trace in traces:
        places = {law.node for law in trace.laws}
        assert {node.parent for node in trace.nodes if node.candidate} <= places
        assert (trace.path[-1] if trace.path else -1) in places
        for node in trace.nodes:
            assert (node.target is None) == (not node.candidate)
        for law in trace.laws:
            for named_tokens in (law.target, law.model, law.draft):
                probabilities = [each.probability for each in named_tokens]
                assert len(probabilities) <= BEST
                assert probabilities == sorted(probabilities, reverse=True)
                assert sum(probabilities) <= 1.0 + 1e-9
        json.dumps(trace.to_dict(), allow_nan=False)


def test_at_temperature_0_the_law_is_certain_and_the_models_is_told_beside_it(
    files: dict[str, Path],
) -> None:
    with open_engine(files, LOOKUP) as engine:
        _, traces, _ = traced(engine, GREEDY)
    for trace in traces:
        assert trace.greedy
        for law in trace.laws:
            assert [each.probability for each in law.target] == [1.0]
            assert law.model[0].token == law.target[0].token
            assert law.model[0].probability < 1.0


def test_rules_that_weigh_the_drafters_laws_are_traced(files: dict[str, Path]) -> None:
    with open_engine(files, CHAIN, accept="lossy(alpha=0.2)") as engine:
        events, traces, result = traced(engine, WHOLE)
    assert spelled(traces) == result.token_ids == [event.token_id for event in events]
    assert {trace.rule for trace in traces} == {result.stats.rule}


def test_seconds_add_up_and_evaluations_are_counted(files: dict[str, Path]) -> None:
    with open_engine(files, CHAIN) as engine:
        with held(engine):
            streams = [
                engine.submit([seed, *PROMPT], WHOLE, max_tokens=LENGTH, trace=True)
                for seed in (1, 2, 3)
            ]
        results = [stream.result for stream in streams]
    texts = set()
    for stream, result in zip(streams, results, strict=True):
        traces = stream.take_traces()
        for name, total in (("target", result.stats.target_s), ("drafter", result.stats.drafter_s)):
            spent = [getattr(trace.seconds, name) for trace in traces]
            assert min(spent) >= 0.0
            assert sum(spent) <= total + 1e-9
        for trace in traces:
            cost = trace.evaluation
            assert cost.tokens == 1 + len(trace.nodes) <= cost.together
            assert cost.single_s > 0.0
            texts.add(cost.texts)
    assert texts == {1, 2}, "two slots, three answers: together, and the last one alone"


def test_laws_under_a_grammar_are_masked_as_acceptance_saw_them(files: dict[str, Path]) -> None:
    """The state moves on when tokens are committed: read later, the masks would be others."""
    pytest.importorskip("llguidance")
    schema = {"enum": ["left", "right"]}
    params = WHOLE.replace(grammar=Grammar.json_schema(schema))
    with open_engine(files, CHAIN) as engine:
        _, traces, result = traced(engine, params)
        befores = [engine.vocabulary.detokenize(spelled(traces[:n])) for n in range(len(traces))]
    assert result.text in ('"left"', '"right"')
    wanted = ('"left"', '"right"')
    for before, trace in zip(befores, traces, strict=True):
        root = next(law for law in trace.laws if law.node == -1)
        assert all(each.probability > 0.0 for each in root.target)
        texts = [each.text for each in root.target]
        if before not in wanted:
            assert all(any(full.startswith(before + text) for full in wanted) for text in texts)
            assert set(texts) != {each.text for each in root.model}, "the model's law has no mask"


def test_rounds_of_auto_name_the_drafter_that_it_chose(files: dict[str, Path]) -> None:
    with open_engine(files, f"auto({LOOKUP}, {CHAIN})") as engine:
        _, traces, result = traced(engine, GREEDY)
    drafting = result.stats.drafting
    names = [arm["drafter"] for arm in drafting["arms"]]
    chosen = [names[index] for index, rounds in drafting["choices"] for _ in range(rounds)]
    assert [trace.drafter for trace in traces] == chosen
    assert len(set(chosen)) > 1


def test_an_answer_that_ends_has_no_next_token(files: dict[str, Path]) -> None:
    """With a bias that makes the end likely, accepted drafts may end the answer."""
    with open_engine(files, f"draft({json.dumps(str(files['shallow']))}, n=3)") as engine:
        (end, *_) = engine.vocabulary.end_of_generation
        params = WHOLE.replace(logit_bias={end: 6.0})
        last = []
        for seed in range(20):
            _, traces, result = traced(engine, params.replace(seed=seed))
            assert spelled(traces) == result.token_ids
            last.append((traces[-1], result))
    cut = [trace for trace, result in last if result.finish_reason == "stop" and trace.path]
    ended = [trace for trace in cut if trace.next_token is None]
    assert ended
    assert all(trace.nodes[trace.path[-1]].token == end for trace in ended)
