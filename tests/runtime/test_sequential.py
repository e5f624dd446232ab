"""Sequential cascades: their stated law by enumeration, and what the target is spared.

The law of a token cascade is (1 - delta) S(q) + delta S(p) at every place, with delta from raw
laws; of a sequence cascade Q(y) where y is kept, and otherwise the chance of that times P(y). Each
is compared with the shipped loop to 1e-12, and variants that are wrong must fail.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.enumeration import PROMPT, TOLERANCE
from support.interrupts import Interrupted, sampled_points
from support.scripted import PLAIN, LawTable, TableTarget, conversation_of
from support.tiny_models import F32, fresh_logits

from specrun.bench.prove.rules import BranchingNoise, enumerate_law
from specrun.bindings.errors import OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import SequenceCascade, TokenCascade, build_rule
from specrun.runtime.engine.sequential import sequential_rounds
from specrun.runtime.language import quoted
from specrun.runtime.laws import SeededNoise, transformed_law
from specrun.runtime.round import NoDrafter
from specrun.runtime.round.loop import DecodeSettings, RoundLimits

SIZE, LENGTH = 4, 3
END = frozenset({2})
WARM = PLAIN.replace(temperature=0.6)
CUT = PLAIN.replace(temperature=1.3, top_p=0.8)
GREEDY = PLAIN.replace(temperature=0.0)


class TableSpeaker:
    """A small model that says what a table has, and reads at most `room` tokens."""

    def __init__(self, table: LawTable, room: int = 64) -> None:
        self._table, self._room = table, room
        self.rewound: list[int] = []

    def row_after(self, tokens: list[int]) -> np.ndarray:
        assert self.room(tokens) >= 0
        with np.errstate(divide="ignore"):
            return np.log(self._table(tokens))

    def room(self, tokens: list[int]) -> int:
        return self._room - len(tokens)

    def rewind(self, length: int) -> None:
        self.rewound.append(length)


class CountingTarget(TableTarget):
    """Writes down how many tokens each evaluation had to catch up on."""

    def __init__(self, table: LawTable) -> None:
        super().__init__(table)
        self.missed: list[int] = []

    def catch_up(self, text):
        self.missed.append(len(text.tokens) - text.n_cached)
        return super().catch_up(text)


def tables(seed: int) -> tuple[LawTable, LawTable]:
    """The small model's laws and the target's; every token has mass in both."""
    return LawTable(SIZE, seed + 1000, zeros=0.0), LawTable(SIZE, seed, zeros=0.0)


def rounds_of(rule, noise, seed: int, params=PLAIN, room: int = 64):
    """Run the shipped loop; return the conversation, the target, and the rounds."""
    drafts, targets = tables(seed)
    target, conversation = CountingTarget(targets), conversation_of(NoDrafter(), PROMPT, noise)
    conversation.n_cached = 0
    limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=LENGTH)
    settings = DecodeSettings(rule, params, limits, END)
    speaker = TableSpeaker(drafts, room)
    rounds = list(sequential_rounds(target, conversation, speaker, settings))
    return conversation.tokens[len(PROMPT) :], target, rounds


def emitted(rule, seed: int, params) -> dict[tuple[int, ...], float]:
    def program(noise: BranchingNoise) -> tuple[int, ...]:
        return tuple(rounds_of(rule, noise, seed, params)[0])

    return enumerate_law(program)  # type: ignore[return-value]


def texts() -> list[tuple[int, ...]]:
    """All texts of LENGTH tokens, ending at the first end token."""
    cut = set()
    for text in itertools.product(range(SIZE), repeat=LENGTH):
        ends = [place for place, token in enumerate(text) if token in END]
        cut.add(text[: ends[0] + 1] if ends else text)
    return sorted(cut)


def moved(table: LawTable, prefix, params) -> np.ndarray:
    """S(q) or S(p) after a prefix."""
    law = transformed_law(np.log(table(prefix)), params)
    dense = np.zeros(SIZE)
    dense[np.arange(SIZE) if law.ids is None else law.ids] = law.probs
    return dense


def probability(law_after, text) -> float:
    return float(
        np.prod([law_after([*PROMPT, *text[:place]])[token] for place, token in enumerate(text)])
    )


def error(law, wanted) -> float:
    return max(abs(law.get(text, 0.0) - wanted(text)) for text in texts())


def cascade_law(seed: int, alpha: float, params, *, transformed: bool = False):
    """Return the stated law of a token cascade at a prefix; or the one that is wrong, in which
    delta reads the transformed law."""
    drafts, targets = tables(seed)

    def law_after(prefix) -> np.ndarray:
        read = moved(drafts, prefix, params) if transformed else drafts(prefix)
        spoken = targets if read.max() < 1.0 - alpha else drafts
        return moved(spoken, prefix, params)

    return law_after


@pytest.mark.parametrize("params", [PLAIN, WARM, CUT, GREEDY], ids=["1", "0.6", "top-p", "0"])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.6, 1.0])
def test_a_token_cascade_has_the_law_that_it_states(alpha, params):
    for seed in range(3):
        law_after = cascade_law(seed, alpha, params)
        law = emitted(TokenCascade(alpha), seed, params)
        assert error(law, lambda text, after=law_after: probability(after, text)) < TOLERANCE


def test_deferral_by_transformed_laws_is_seen():
    errors = []
    for seed in range(4):
        wrong = cascade_law(seed, 0.3, WARM, transformed=True)
        law = emitted(TokenCascade(0.3), seed, WARM)
        errors.append(error(law, lambda text, after=wrong: probability(after, text)))
    assert max(errors) > 0.01


def sequence_law(rule: SequenceCascade, seed: int, params, *, shared: bool = False):
    """Return the stated probability of a text; or the one that is wrong, in which the large model
    is not asked where it would say the small one's text."""
    drafts, targets = tables(seed)

    def small(text) -> float:
        return probability(lambda prefix: moved(drafts, prefix, params), text)

    def defers(text) -> bool:
        places = range(len(text))
        return rule.defers([np.log(drafts([*PROMPT, *text[:i]])[text[i]]) for i in places])

    deferred = sum(small(text) for text in texts() if defers(text))

    def wanted(text) -> float:
        anew = deferred * probability(lambda prefix: moved(targets, prefix, params), text)
        return (0.0 if defers(text) and not shared else small(text)) + anew

    return wanted


@pytest.mark.parametrize("params", [PLAIN, CUT, GREEDY], ids=["1", "top-p", "0"])
@pytest.mark.parametrize("rule", [SequenceCascade(0.5), SequenceCascade(0.7, quantile=0.0)])
def test_a_sequence_cascade_has_the_law_that_it_states(rule, params):
    for seed in range(3):
        wanted = sequence_law(rule, seed, params)
        assert error(emitted(rule, seed, params), wanted) < TOLERANCE


def test_an_answer_that_is_kept_though_it_was_deferred_is_seen():
    rule = SequenceCascade(0.5)
    assert error(emitted(rule, 0, PLAIN), sequence_law(rule, 0, PLAIN, shared=True)) > 0.01


def test_both_scores_read_every_token_of_an_answer():
    sure, doubtful = [np.log(0.9)] * 9, [np.log(0.9)] * 8 + [np.log(0.01)]
    assert not SequenceCascade(0.2).defers(sure)
    assert SequenceCascade(0.2, quantile=0.0).defers(doubtful)
    assert not SequenceCascade(0.5).defers(doubtful)  # exp of the mean is 0.55
    assert not SequenceCascade(0.0).defers([])


def test_the_target_catches_up_in_one_evaluation_and_only_where_it_is_asked():
    for seed in range(20):
        tokens, target, rounds = rounds_of(TokenCascade(0.5), SeededNoise(seed), seed)
        asked = [place for place, one in enumerate(rounds) if one.next_token is not None]
        # What it reads is the prompt and all that was said since it was last asked.
        ends = [len(PROMPT) + place for place in asked]
        assert target.missed == list(np.diff([0, *ends]))
        assert [len(one.new) for one in rounds] == [1] * len(tokens)
        assert [one.is_last for one in rounds] == [False] * (len(tokens) - 1) + [True]


def test_a_deferred_answer_is_the_target_alone_with_its_own_noise():
    always, never = SequenceCascade(0.0), TokenCascade(0.0)
    for seed in range(20):
        noise = SeededNoise(seed)
        assert rounds_of(always, noise, seed)[0] == rounds_of(never, noise, seed)[0]


def test_a_small_model_without_room_leaves_the_rest_to_the_target():
    room = len(PROMPT)  # for the first token's row only
    for seed in range(5):
        _, target, rounds = rounds_of(TokenCascade(1.0), SeededNoise(seed), seed, room=room)
        spoken = [one.next_token is None for one in rounds]
        assert spoken == [True] + [False] * len(target.missed)
        _, target, rounds = rounds_of(SequenceCascade(1.0), SeededNoise(seed), seed, room=room)
        assert not any(one.next_token is None for one in rounds[:1]) or len(rounds) == 1


# -- with models -----------------------------------------------------------------------------------

SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
TEXT = list(b"the quick brown fox, the quick")


def drafted_by(path) -> str:
    return f"draft({quoted(str(path))})"


def test_extremes_are_the_models_themselves(tiny_model, tiny_flat_twin):
    small = drafted_by(tiny_flat_twin)
    answers = {}
    for name, target, drafter, accept in (
        ("large", tiny_model, "none", "exact"),
        ("small", tiny_flat_twin, "none", "exact"),
        ("never", tiny_model, small, "token-cascade(alpha=1)"),
        ("always", tiny_model, small, "token-cascade(alpha=0)"),
        ("kept", tiny_model, small, "sequence-cascade(alpha=1)"),
        ("anew", tiny_model, small, "sequence-cascade(alpha=0)"),
    ):
        with Runtime(target, drafter, accept=accept, **F32) as runtime:
            answers[name] = runtime.generate(TEXT, SAMPLED, max_tokens=24)
    said = {name: result.token_ids for name, result in answers.items()}
    assert said["never"] == said["small"]
    assert said["always"] == said["anew"] == said["large"]
    assert said["small"] != said["large"]
    stats = {name: result.stats for name, result in answers.items()}
    assert (stats["never"].rounds, stats["never"].target_s) == (0, 0.0)
    assert (stats["kept"].accepted, stats["kept"].mean_accepted_length) == (24, None)
    assert (stats["anew"].rounds, stats["anew"].drafted, stats["anew"].accepted) == (24, 24, 0)
    assert stats["anew"].prompt_tokens_per_second is None
    assert not stats["never"].exact
    assert stats["never"].rule == "token-cascade(alpha=1)"


def test_the_cache_is_that_of_the_text_after_a_mixed_answer(tiny_model, tiny_flat_twin):
    accept = "token-cascade(alpha=0.7)"
    options = {**F32, "n_ctx": 512}
    with Runtime(tiny_model, drafted_by(tiny_flat_twin), accept=accept, **options) as runtime:
        result = runtime.generate(TEXT * 12, SAMPLED, max_tokens=40)  # more than one piece
        assert 0 < result.stats.rounds < 40
        again = runtime.generate(TEXT * 12, SAMPLED, max_tokens=40)
        assert again.token_ids == result.token_ids
        text = runtime.session.conversation
        rows = runtime.session.target.catch_up(text)
        fresh = fresh_logits(runtime.model, text.tokens)[-1]
        shifted = fresh_logits(runtime.model, text.tokens[1:])[-1]
        assert np.abs(rows.logits(0) - fresh).max() < 1e-5
        assert np.abs(rows.logits(0) - shifted).max() > 1e-2


def test_a_stream_goes_on_after_it_was_dropped_and_tells_who_spoke(tiny_model, tiny_flat_twin):
    accept = "token-cascade(alpha=0.7)"
    with Runtime(tiny_model, drafted_by(tiny_flat_twin), accept=accept, **F32) as runtime:
        whole = [*runtime.stream(TEXT, SAMPLED, max_tokens=24)]
        for event in runtime.stream(TEXT, SAMPLED, max_tokens=24):
            if event.round == 5:
                break
        assert [event.token_id for event in runtime.stream(TEXT, SAMPLED, max_tokens=24)] == [
            event.token_id for event in whole
        ]
    assert {event.origin for event in whole} == {"drafted", "target"}
    for event in whole:
        if event.origin == "target":
            assert event.logprob < 0.0
        else:
            with pytest.raises(OptionError, match="the target never saw it"):
                _ = event.logprob


def test_the_next_prompt_shares_what_both_models_have_read(tiny_model, tiny_flat_twin):
    accept = "token-cascade(alpha=0.7)"
    with Runtime(tiny_model, drafted_by(tiny_flat_twin), accept=accept, **F32) as runtime:
        first = runtime.generate(TEXT, SAMPLED, max_tokens=12)
        longer = [*TEXT, *first.token_ids, *TEXT]
        second = runtime.generate(longer, SAMPLED, max_tokens=12)
    with Runtime(tiny_model, drafted_by(tiny_flat_twin), accept=accept, **F32) as runtime:
        fresh = runtime.generate(longer, SAMPLED, max_tokens=12)
    assert second.token_ids == fresh.token_ids
    assert second.usage.cached_tokens >= len(TEXT)
    assert fresh.usage.cached_tokens == 0


@pytest.mark.parametrize("accept", ["token-cascade(alpha=0.7)", "sequence-cascade(alpha=0.97)"])
def test_an_interrupt_at_any_line_leaves_a_session_that_answers_as_a_fresh_one(
    tiny_model, tiny_flat_twin, accept, whole_sweep
):
    def fresh() -> Runtime:
        return Runtime(tiny_model, drafted_by(tiny_flat_twin), accept=accept, **F32)

    with fresh() as runtime:
        wanted = runtime.generate(TEXT, SAMPLED, max_tokens=8).token_ids
    other = [*TEXT[:20], *TEXT]
    with fresh() as runtime:
        runtime.generate(other, SAMPLED, max_tokens=8)
        with Interrupted() as counted:
            runtime.generate(TEXT, SAMPLED, max_tokens=8)
    hits = 0
    with fresh() as runtime:
        for at in sampled_points(counted.lines, 60, whole=whole_sweep):
            runtime.generate(other, SAMPLED, max_tokens=8)
            with Interrupted(at) as interrupted:
                runtime.generate(TEXT, SAMPLED, max_tokens=8)
            hits += interrupted.happened
            assert runtime.generate(TEXT, SAMPLED, max_tokens=8).token_ids == wanted
    assert hits > 50


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("token-cascade(alpha=1.5)", "token-cascade: alpha is 1.5: give 0 to 1"),
        ("token-cascade(alpha=nan)", "alpha is nan: give 0 to 1"),
        ("sequence-cascade(quantile=-1)", "sequence-cascade: quantile is -1: give 0 to 1"),
        ("sequence-cascade(quantil=1)", "did you mean 'quantile'"),
        ("token-cascade(beta=1)", "token-cascade has no option 'beta'"),
        ("tokn-cascade", "did you mean 'token-cascade'"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(text, problem):
    with pytest.raises(OptionError, match=problem.replace("(", r"\(")) as caught:
        build_rule(text)
    assert "\n" not in str(caught.value)


def test_names_build_the_same_again():
    for text in ("token-cascade(alpha=0.25)", "sequence-cascade(alpha=0.5, quantile=0.1)"):
        rule = build_rule(text)
        assert (rule.name, build_rule(rule.name), rule.exact) == (text, rule, False)
    assert build_rule("sequence-cascade").name == "sequence-cascade(alpha=0.5)"


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup"])
def test_without_a_small_model_nobody_could_speak(tiny_model, drafter):
    with pytest.raises(OptionError, match=f"the drafter is {drafter}: name one: -md SMALL"):
        Runtime(tiny_model, drafter, accept="token-cascade", **F32)


def test_a_fixed_shape_is_refused(tiny_model, tiny_flat_twin):
    with pytest.raises(OptionError, match="give --shape free"):
        Runtime(
            tiny_model, drafted_by(tiny_flat_twin), accept="token-cascade", shape="fixed", **F32
        )
