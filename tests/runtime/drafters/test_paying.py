"""Drafters without a model are stopped while they lose time, on a simulated clock: no more than 3 %
of 200 tokens is lost whatever they draft, and what pays goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.enumeration import TOLERANCE, drafter_bias, top_k_points
from support.scripted import PLAIN, LawTable, ScriptedDrafter, outcome_of
from support.tiny_heads import random_medusa
from support.tiny_lookahead import random_embeddings, write_lookahead
from support.tiny_models import F32

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.batching import DraftMeeting
from specrun.runtime.drafters.break_even import TimedDrafter
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.lookahead_positions import Below, LookaheadFile, ParallelDrafter
from specrun.runtime.drafters.retrieval import PromptLookupDrafter
from specrun.runtime.engine import Session
from specrun.runtime.language import parse_expression
from specrun.runtime.laws import SeededNoise
from specrun.runtime.planning import TYPICAL_CPU, TYPICAL_GPU, CostCurve, LiveCurve
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.round.drafter import NOTHING, Pace, RoundOutcome
from specrun.runtime.trees import DraftTree

pytestmark = pytest.mark.timed

TOKENS = 200
# Gemma 3 270M Q4_K_M and SmolLM2-135M Q4_1, one thread, as they were measured.
STEEP = CostCurve.flat([1.0, 2.0, 2.2, 2.3, 3.6, 3.9])
STEEPEST = CostCurve.flat([1.0, 1.95, 2.56, 3.15, 4.08, 4.7, 5.3, 5.5])
CURVES = {"cpu": TYPICAL_CPU, "gpu": TYPICAL_GPU, "steep": STEEP, "steepest": STEEPEST}


class Chains(Drafter):
    """Drafts a chain of n whatever it costs; `pause` is what its own Python takes."""

    def __init__(self, n: int, clock: Clock, pause: float = 0.0) -> None:
        self.name, self.max_nodes = "chains", n
        self._clock, self._pause = clock, pause
        self.proposed = self.observed = 0

    def propose(self, request: DraftRequest) -> DraftTree:
        self.proposed += 1
        self._clock.now += self._pause
        return DraftTree.chain([1] * min(self.max_nodes, request.max_depth, request.max_nodes))

    def observe(self, outcome: RoundOutcome) -> None:
        self.observed += 1


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Played:
    """Tokens and the time they took after each round, and what each round drafted."""

    tokens: list[int]
    seconds: list[float]
    drafted: list[int]

    @property
    def per_token(self) -> float:
        return self.seconds[-1] / self.tokens[-1]


def play(
    drafter: Drafter,
    clock: Clock,
    true: CostCurve,
    accepted: Callable[[int], float],
    *,
    length: int = TOKENS,
    noise: float = 0.0,
    first: float = 1.0,
    rebuilt: float = 0.0,
    seed: int = 0,
    heeds: bool = True,
) -> Played:
    """Decode `length` tokens whose drafts are kept, token by token, with probability
    `accepted(position)`; the first round takes `first` times as long as others, and one of another
    width than the round before `rebuilt` longer. Who `heeds` pauses does not ask in them."""
    generator = np.random.default_rng(seed)
    text, tokens = [3, 1, 4], 0
    drafter.begin(text)
    played = Played([], [], [])
    began = clock.now
    while tokens < length:
        request = DraftRequest(text, PLAIN, SeededNoise(0), 99, drafter.max_nodes)
        asked = not (heeds and drafter.pause.rounds)
        if not asked:
            drafter.pause.rounds -= 1
        tree = drafter.propose(request) if asked else NOTHING
        kept = 0
        while kept < tree.max_depth and generator.random() < accepted(tokens):
            kept += 1
        slow = float(np.exp(noise * generator.standard_normal())) * (first if not tokens else 1.0)
        before = played.drafted[-1] if played.drafted else 0
        clock.now += true.seconds(1 + len(tree)) * slow + rebuilt * (len(tree) != before)
        text += [*([1] * kept), 2]
        if asked:
            drafter.observe(outcome_of(text, tree, tuple(range(kept)), 2))
        tokens += kept + 1
        played.tokens.append(tokens)
        played.seconds.append(clock.now - began)
        played.drafted.append(len(tree))
    return played


def paying(
    n: int, believed: CostCurve = TYPICAL_CPU, pause: float = 0.0
) -> tuple[TimedDrafter, Chains, Clock]:
    clock = Clock()
    chains = Chains(n, clock, pause)
    return TimedDrafter(chains, LiveCurve(believed), clock, "paying"), chains, clock


@pytest.mark.parametrize("true", CURVES)
@pytest.mark.parametrize("believed", ["cpu", "gpu"])
@pytest.mark.parametrize("n", [1, 4, 15])
@pytest.mark.parametrize("share", [0.0, 0.2])
@pytest.mark.parametrize("heeds", [True, False])
def test_200_tokens_cost_3_percent_at_most_where_nothing_pays(
    true: str, believed: str, n: int, share: float, heeds: bool
) -> None:
    """Whatever the curve is believed to be at first, and with one first round that is slow; on the
    flat curve of a GPU a fifth of the drafts is no loss."""
    for first in (1.0, 1.5):
        drafter, _, clock = paying(n, CURVES[believed])
        played = play(drafter, clock, CURVES[true], lambda _: share, first=first, heeds=heeds)
        assert played.seconds[-1] - (first - 1.0) <= 1.03 * played.tokens[-1] + 0.5, (true, first)


def test_without_the_account_it_costs_far_more() -> None:
    """The control: the same drafter, always."""
    clock = Clock()
    assert play(Chains(4, clock), clock, STEEP, lambda _: 0.0).per_token > 3.0


def test_noise_does_not_matter() -> None:
    """Rounds vary by a fifth: in the mean over 20 seeds 200 tokens cost no more than 3 %."""
    ratios = []
    for seed in range(20):
        drafter, _, clock = paying(4)
        played = play(drafter, clock, STEEP, lambda _: 0.1, noise=0.2, seed=seed)
        plain = Clock()
        bare = play(Chains(0, plain), plain, STEEP, lambda _: 0.0, noise=0.2, seed=seed + 100)
        ratios.append(played.per_token / bare.per_token)
    assert float(np.mean(ratios)) < 1.03


@pytest.mark.parametrize("true", ["cpu", "gpu"])
def test_what_pays_goes_on(true: str) -> None:
    """A drafter that is nearly always right loses a few rounds at first, and nothing later."""
    curve = CURVES[true]
    drafter, _, clock = paying(5)
    played = play(drafter, clock, curve, lambda _: 0.95, length=400)
    free = Clock()
    fixed = play(Chains(5, free), free, curve, lambda _: 0.95, length=400)
    assert played.per_token < 1.05 * fixed.per_token
    assert min(played.drafted[10:]) == 5


def test_a_text_that_begins_to_repeat_is_noticed_and_that_it_ends_costs_what_was_saved() -> None:
    """Right from token 100 to 300: used soon after, given up soon after."""
    drafter, _, clock = paying(5)
    right = lambda at: 0.95 if 100 <= at < 300 else 0.0  # noqa: E731
    played = play(drafter, clock, TYPICAL_CPU, right, length=500)
    drafts = dict(zip(played.tokens, played.drafted, strict=True))
    assert all(drafted == 5 for at, drafted in drafts.items() if 200 < at < 300)
    assert sum(drafted > 0 for at, drafted in drafts.items() if at > 350) < 15
    at_300 = next(i for i, tokens in enumerate(played.tokens) if tokens >= 300)
    after = played.seconds[-1] - played.seconds[at_300]
    assert after < 1.02 * (played.tokens[-1] - played.tokens[at_300]) + 12.0


@pytest.mark.parametrize("heeds", [True, False])
def test_a_drafter_that_is_slow_itself_sleeps(heeds: bool) -> None:
    """Its own Python takes a tenth of a plain round, and the loop as much again to ask it: it is
    asked in a twelfth of the rounds."""
    drafter, chains, clock = paying(0, pause=0.1)
    played = play(drafter, clock, TYPICAL_CPU, lambda _: 0.0, length=1000, heeds=heeds)
    assert played.per_token < 1.03
    assert 60 < chains.proposed < 120
    assert chains.observed == chains.proposed
    assert drafter.report()["stopped"] == len(played.drafted) - chains.proposed
    drafter.begin([1])
    assert drafter.report() == {}


@pytest.mark.parametrize("true", ["cpu", "steep"])
@pytest.mark.parametrize("pause", [0.005, 0.017, 0.05])
def test_what_begins_to_repeat_late_is_found_though_asking_costs_all_that_may_be_lost(
    true: str, pause: float
) -> None:
    """SmolLM2-135M in F16: a token takes 7.6 ms and asking prompt lookup 1.6 % of it, of 1.25 % to
    be lost. After 600 tokens of which no draft is right, all are."""
    drafter, _, clock = paying(4, CURVES[true], pause=pause)
    nothing = play(drafter, clock, CURVES[true], lambda _: 0.0, length=600)
    assert nothing.seconds[-1] <= 1.03 * nothing.tokens[-1] + 0.5
    right = play(drafter, clock, CURVES[true], lambda _: 1.0, length=200)
    late = [d for n, d in zip(right.tokens, right.drafted, strict=True) if n > 150]
    assert min(late) == 4


def test_while_it_sleeps_it_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """But once or twice, to fall asleep; whoever does not heed its pauses calls it in vain."""
    calls, propose = [], TimedDrafter.propose
    monkeypatch.setattr(
        TimedDrafter, "propose", lambda self, request: calls.append(1) or propose(self, request)
    )
    for heeds in (True, False):
        drafter, chains, clock = paying(4, pause=0.1)
        calls.clear()
        played = play(drafter, clock, STEEPEST, lambda _: 0.0, length=1000, heeds=heeds)
        n_rounds = len(played.drafted)
        asleep = n_rounds - chains.proposed
        assert asleep > 0.8 * n_rounds
        assert len(calls) <= 3 * chains.proposed if heeds else len(calls) == n_rounds


def test_it_sleeps_on_in_the_next_answer() -> None:
    drafter, chains, clock = paying(4, pause=0.1)
    play(drafter, clock, STEEPEST, lambda _: 0.0, length=1000)
    while not drafter.pause.rounds:
        play(drafter, clock, STEEPEST, lambda _: 0.0, length=1)
    left, asked = drafter.pause.rounds, chains.proposed
    drafter.begin([3, 1, 4])
    assert drafter.pause.rounds == left
    play(drafter, clock, STEEPEST, lambda _: 0.0, length=left)
    assert chains.proposed == asked
    play(drafter, clock, STEEPEST, lambda _: 0.0, length=1)
    assert chains.proposed == asked + 1


def test_where_not_even_one_node_can_be_lost_it_is_not_asked() -> None:
    """Two tokens take as long as two rounds: a node may be lost once in 80 tokens."""
    drafter, chains, clock = paying(4)
    played = play(drafter, clock, STEEP, lambda _: 0.0, length=1000)
    drafted = sum(1 for n in played.drafted if n)
    assert 10 < drafted < 20
    assert chains.proposed < 3 * drafted


def test_the_round_after_a_draft_whose_graph_is_built_anew_is_a_loss_of_the_draft() -> None:
    """Half a plain round for every change of width: 1,000 tokens cost what they may all the
    same, and drafts are fewer than where a change costs nothing."""
    drafted = []
    for rebuilt in (0.0, 0.5):
        drafter, _, clock = paying(4)
        played = play(drafter, clock, TYPICAL_CPU, lambda _: 0.0, length=1000, rebuilt=rebuilt)
        drafted.append(sum(1 for n in played.drafted if n))
        assert played.seconds[-1] <= 1.0125 * played.tokens[-1] + 2.0
    assert drafted[1] < 0.7 * drafted[0]


def test_the_law_is_the_targets_whenever_it_is_stopped() -> None:
    drafts = LawTable(3, 7)

    def make(step: float, pace: Pace) -> Drafter:
        inner = ScriptedDrafter(top_k_points(drafts, 2, 1))
        inner.max_nodes = 8
        clock = Clock()

        def ticking() -> float:
            clock.now += step
            return clock.now

        return TimedDrafter(inner, LiveCurve(TYPICAL_CPU), ticking, pace)

    for step in (0.0, 1.0):
        for pace in ("paying", "compared"):
            bias = drafter_bias(ExactRule(), lambda: make(step, pace), LawTable(3, 1), 3)  # noqa: B023
            assert bias < TOLERANCE


def test_a_lookup_learns_what_the_machine_costs_and_loses_less_than_one_that_does_not() -> None:
    """A text that repeats itself half of the time, on a curve that is steeper than believed."""
    generator = np.random.default_rng(5)
    words = [tuple(generator.integers(0, 50, 3).tolist()) for _ in range(20)]
    whole = [t for _ in range(200) for t in words[int(generator.integers(0, 20))]]

    def seconds(make: Callable[[Clock], Drafter]) -> float:
        clock = Clock()
        drafter, text = make(clock), whole[:60]
        drafter.begin(text)
        while len(text) < 500:
            tree = drafter.propose(DraftRequest(text, PLAIN, SeededNoise(0), 99, 99))
            path, parent = [], -1
            for token in whole[len(text) :]:
                near = [
                    n for n, p in enumerate(tree.parents) if (p, tree.tokens[n]) == (parent, token)
                ]
                if not near:
                    break
                parent = near[0]
                path.append(parent)
            clock.now += STEEP.seconds(1 + len(tree))
            text += whole[len(text) : len(text) + len(path) + 1]
            drafter.observe(outcome_of(text, tree, tuple(path), text[-1]))
        return clock.now / (len(text) - 60)

    def guarded(clock: Clock) -> Drafter:
        live = LiveCurve(TYPICAL_GPU)
        return TimedDrafter(PromptLookupDrafter(costs=live), live, clock, "paying")

    assert seconds(lambda _: PromptLookupDrafter(costs=TYPICAL_GPU)) > 1.1
    assert seconds(guarded) < 1.03


# -- what is timed -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Iterator[Model]:
    with Model(tiny_model) as model:
        yield model


PACES: Sequence[tuple[str, Pace | None]] = [
    ("prompt-lookup", "paying"),
    ("lookahead", "paying"),
    ("jacobi", "paying"),
    ("ensemble(prompt-lookup, jacobi)", "paying"),
    ("relay(prompt-lookup@2, jacobi@2)", "paying"),
    ("prompt-lookup(always=yes)", None),
    ("ensemble(prompt-lookup(always=yes), jacobi)", None),
    ("early-exit(layers=1)", "greedy"),
    ("early-exit(layers=1, sampling=argmax)", "compared"),
    ("early-exit(layers=1, sampling=argmax, always=yes)", None),
    ("early-exit(layers=1, n=3)", None),
    ("auto(prompt-lookup, lookahead)", "timed"),
    ("auto(prompt-lookup(always=yes), lookahead)", None),
    ("none", None),
]


@pytest.mark.parametrize(("expression", "pace"), PACES)
def test_what_draws_nothing_is_timed_unless_it_is_not_to_be(
    model: Model, expression: str, pace: Pace | None
) -> None:
    for by_clock in (True, False):
        environment = DraftEnvironment(model, ContextOptions(n_ctx=64), by_clock=by_clock)
        if expression.startswith("auto") and not by_clock:
            with pytest.raises(OptionError, match="chooses by measured time"):
                build_drafter(expression, environment)
            continue
        assert pace_of(expression, environment) == (pace if by_clock else None)


def pace_of(expression: str, environment: DraftEnvironment) -> Pace | None:
    with closing(build_drafter(expression, environment)) as weights:
        with closing(weights.start()) as drafter:
            assert drafter.name == str(parse_expression(expression))
            return drafter.pace if isinstance(drafter, TimedDrafter) else None


@pytest.mark.parametrize(
    ("options", "pace", "in_auto", "in_ensemble"),
    [
        ("", "greedy", None, None),  # it may draw
        ("sampling=argmax", "compared", "timed", "compared"),
        ("depth=3, nodes=auto", "compared", "timed", "compared"),
        ("n=4", None, None, None),
        ("sampling=argmax, always=yes", None, None, None),
    ],
)
def test_a_model_that_chooses_how_much_it_drafts_is_timed(
    model: Model,
    tiny_drafter: Path,
    options: str,
    pace: Pace | None,
    in_auto: Pace | None,
    in_ensemble: Pace | None,
) -> None:
    environment = DraftEnvironment(model, ContextOptions(n_ctx=64, n_threads=1), n_gpu_layers=0)
    draft = ", ".join(filter(None, (f'draft("{tiny_drafter}"', options))) + ")"
    combined = [draft, f"auto({draft}, prompt-lookup)", f"ensemble({draft}, prompt-lookup)"]
    found = [pace_of(expression, environment) for expression in combined]
    assert found == [pace, in_auto, in_ensemble]


def test_what_the_demo_shows_is_not_stopped(model: Model, tiny_drafter: Path) -> None:
    """A drafter of its own files, even one that chooses how much it drafts; a named file is."""
    options = ContextOptions(n_ctx=64, n_threads=1)
    environment = DraftEnvironment(
        model, options, n_gpu_layers=0, default_files={"draft": tiny_drafter}
    )
    draft = "sampling=argmax, depth=3, nodes=auto)"
    for expression, pace in (
        (f"draft({draft}", None),
        (f'draft("{tiny_drafter}", {draft}', "compared"),
    ):
        assert pace_of(expression, environment) == pace


def test_several_conversations_stop_what_does_not_pay_together(
    model: Model, tiny_drafter: Path
) -> None:
    """They are compared with plain rounds of as many conversations: four that draft 4 tokens each
    take 20 tokens' time, a quarter of which is little beside a plain round of one alone. What was
    learnt while it drafted alone, and was right, is of no use then."""
    together = DraftMeeting(4)
    alone = CostCurve.flat([1.0 + 0.05 * n for n in range(40)])
    shares = CostCurve.flat([alone.seconds(4 * n) / 4 for n in range(1, 10)])
    options = ContextOptions(n_ctx=64, n_threads=1)
    environment = DraftEnvironment(model, options, n_gpu_layers=0, measured=alone, meeting=together)
    taken = []
    for share in (environment.share, lambda: 1.0):
        clock = Clock()
        drafter = TimedDrafter(Chains(4, clock), LiveCurve(alone), clock, "compared", share)
        together.n_drafting = 1
        assert play(drafter, clock, alone, lambda _: 0.9, heeds=False).per_token < 0.5
        together.n_drafting = 4
        played = play(drafter, clock, shares, lambda _: 0.0, length=400, heeds=False)
        taken.append(played.per_token / shares.seconds(1))
    # What was saved, the first two rounds, a share of all tokens, and what the last try takes.
    allowed = 8.0 + 2.0 + 0.0125 * (200 + 400) + 1.95 / 1.15 - 1.0
    assert taken[0] <= 1.0 + allowed / 400
    assert taken[1] > 1.5  # the control
    assert pace_of(f'draft("{tiny_drafter}", sampling=argmax)', environment) == "compared"


@pytest.mark.parametrize("kind", ["pass", "space"])
def test_look_ahead_positions_are_stopped_unless_their_number_is_given(
    model: Model, tmp_path: Path, kind: str
) -> None:
    embeddings = random_embeddings(model.n_embd, 2)
    file = write_lookahead(tmp_path / "ahead.gguf", embeddings, model.vocabulary.size, kind=kind)
    environment = DraftEnvironment(model, ContextOptions(n_ctx=64))
    paces: dict[str, Pace | None] = {
        "": "compared",
        ", topk=2": "compared",
        ", sampling=with": "greedy",
        ", n=2": None,
        ", always=yes": None,
    }
    for options, pace in paces.items():
        assert pace_of(f'{kind}("{file}"{options})', environment) == pace


@pytest.mark.parametrize("below", ["every", "last"])
def test_look_ahead_positions_that_are_never_right_cost_little(
    model: Model, tmp_path: Path, below: Below
) -> None:
    """Positions count as nodes, though nobody may accept them."""
    embeddings = random_embeddings(model.n_embd, 2)
    path = write_lookahead(tmp_path / "ahead.gguf", embeddings, model.vocabulary.size)
    taken = {}
    paces: tuple[Pace, ...] = ("compared", "timed")  # the second is never stopped: the control
    with closing(LookaheadFile(path, "pass", model)) as file:
        for pace in paces:
            clock, curve = Clock(), CURVES["cpu"]
            inner = ParallelDrafter(file, 2, below=below)
            drafter = TimedDrafter(inner, LiveCurve(curve), clock, pace)
            taken[pace] = play(drafter, clock, curve, lambda _: 0.0, heeds=False).per_token
    assert taken["compared"] / curve.seconds(1) <= 1.03
    assert taken["timed"] / curve.seconds(1) > 1.5


class Waits(Chains):
    """Is evaluated with others', in a step more."""

    waits = True

    def __init__(self, n: int, clock: Clock) -> None:
        super().__init__(n, clock)
        self.prepared = 0

    def prepare(self, request: DraftRequest) -> bool:
        self.prepared += 1
        self._clock.now += 0.2  # of a plain round
        return self.prepared % 2 == 0


def test_a_draft_that_waits_is_stopped_and_its_waiting_is_booked() -> None:
    """While it sleeps nobody waits for it; it observes these rounds all the same."""
    clock = Clock()
    waits = Waits(1, clock)
    drafter = TimedDrafter(waits, LiveCurve(TYPICAL_GPU), clock, "compared")
    assert drafter.waits
    text, n_drafts = [3, 1, 4], 0
    for _ in range(400):
        request = DraftRequest(text, PLAIN, SeededNoise(0), 99, 1)
        while not drafter.prepare(request):
            pass
        tree = drafter.propose(request)
        n_drafts += bool(len(tree))
        clock.now += TYPICAL_GPU.seconds(1 + len(tree)) / TYPICAL_GPU.seconds(1)
        text.append(2)
        drafter.observe(outcome_of(text, tree, (), 2))
    assert waits.prepared == 2 * n_drafts
    assert waits.observed == 400
    assert 5 < n_drafts < 400 * 0.0125 / 0.4 + 10
    assert clock.now < 1.03 * 400
    assert drafter.report()["stopped"] == 400 - 2 - n_drafts  # two plain rounds come first


def drafts_by_clock(
    model: Model,
    drafter: str,
    temperature: float,
    drift: float,
    measured: CostCurve | None = None,
) -> tuple[list[int], list[int]]:
    """Return the tokens of two answers and what each drafted.

    Every look at the clock moves it on, ever further by `drift`.
    """
    step, now = 1e-3, 0.0

    def clock() -> float:
        nonlocal step, now
        step *= drift
        now += step
        return now

    params = SamplingParams(temperature=temperature, top_k=0, seed=3)
    options, tokens, drafted = ContextOptions(**F32), list[int](), list[int]()
    environment = DraftEnvironment(model, options, n_gpu_layers=0, clock=clock, measured=measured)
    with closing(build_drafter(drafter, environment)) as weights:
        with Session.open(model, weights.start(), options, ExactRule()) as session:
            for _ in range(2):
                prompt = [3, 1, 4, 1, 5, 9, 2, 6]
                answer = session.stream(prompt, params, seed=3, max_tokens=60).drain()
                tokens += answer.token_ids
                drafted.append(answer.stats.drafted)
    return tokens, drafted


def test_the_clock_decides_nothing_of_what_is_drawn(model: Model, tiny_drafter: Path) -> None:
    """What is drafted decides which text comes of a seed: neither hangs on the clock, and an answer
    is the same whatever was timed before it."""
    draft = f'draft("{tiny_drafter}")'
    tokens, drafted = drafts_by_clock(model, draft, 0.8, 1.0)
    assert tokens[:60] == tokens[60:]
    assert drafted[0] == drafted[1] > 0
    for drift in (0.9, 1.1):
        assert drafts_by_clock(model, draft, 0.8, drift) == (tokens, drafted)


def test_the_clock_decides_nothing_beside_what_is_drawn(
    model: Model, tiny_drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do earlier answers: favourites of a head beside drawn tokens decide which text comes."""
    size = model.vocabulary.size
    heads = random_medusa(model.n_embd, size).write(tmp_path / "heads.gguf", size)
    times = (1.0, 1.0, 1.2, 1.5)
    flat = CostCurve((1, 8, 16, 64), times, times, (0.01,) * 4)  # measured: believed at once
    draft = f'ensemble(draft("{tiny_drafter}", n=2), medusa("{heads}", nodes=auto))'
    tokens, drafted = drafts_by_clock(model, draft, 0.8, 1.0, flat)
    assert tokens[:60] == tokens[60:]
    assert drafted[0] == drafted[1] > 0
    for drift in (0.9, 1.1):
        assert drafts_by_clock(model, draft, 0.8, drift, flat) == (tokens, drafted)
    monkeypatch.setattr(LiveCurve, "is_timed", LiveCurve.is_told)  # the control
    assert drafts_by_clock(model, draft, 0.8, 1.1, flat) != (tokens, drafted)


def test_at_temperature_0_the_clock_decides_what_is_drafted_and_not_what_is_said(
    model: Model, tiny_drafter: Path
) -> None:
    draft = f'draft("{tiny_drafter}")'
    steady, slower = (drafts_by_clock(model, draft, 0.0, drift) for drift in (1.0, 1.1))
    assert steady[0] == slower[0] == drafts_by_clock(model, "none", 0.0, 1.0)[0]
    assert steady[1] != slower[1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_of_favourites_is_plain_decodings_own_wherever_they_are_stopped(
    model: Model, tiny_drafter: Path, temperature: float
) -> None:
    draft = f'draft("{tiny_drafter}", sampling=argmax)'
    plain, _ = drafts_by_clock(model, "none", temperature, 1.0)
    found = [drafts_by_clock(model, draft, temperature, drift) for drift in (0.95, 1.0, 1.05)]
    assert [tokens for tokens, _ in found] == [plain] * 3
    assert len({tuple(drafted) for _, drafted in found}) > 1


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_two_rounds_of_what_is_compared_are_plain(
    temperature: float, *, draws: bool
) -> None:
    clock = Clock()
    pace: Pace = "greedy" if draws else "compared"
    drafter = TimedDrafter(Chains(3, clock), LiveCurve(TYPICAL_CPU), clock, pace)
    params, text, drafted = SamplingParams(temperature=temperature), [3, 1, 4], []
    drafter.begin(text)
    for _ in range(4):
        tree = drafter.propose(DraftRequest(text, params, SeededNoise(0), 99, 3))
        clock.now += TYPICAL_CPU.seconds(1 + len(tree))
        text.append(2)
        drafter.observe(outcome_of(text, tree, (), 2))
        drafted.append(len(tree))
    # Not what is drawn: which text comes would hang on what was timed before.
    assert drafted == ([3, 3, 3, 3] if draws and temperature else [0, 0, 3, 3])


def test_nothing_is_timed_under_rules_that_are_not_exact(tiny_model: Path) -> None:
    """What is drafted is part of their law."""
    options = {"n_ctx": 64, "n_threads": 1, "n_gpu_layers": 0}
    for rule, timed in (("exact", True), ("block", True), ("typical(eps=0.2)", False)):
        with Runtime(tiny_model, "prompt-lookup", accept=rule, **options) as runtime:
            assert isinstance(runtime.session.drafter, TimedDrafter) is timed


@pytest.mark.parametrize("drafter", ["jacobi", "lookahead(window=2)"])
def test_a_drafter_that_reads_logits_says_so_when_it_is_timed(
    tiny_model: Path, drafter: str
) -> None:
    """Rows that the device cut have none to be read: the answer is to be made of whole ones."""
    prompt, params = [3, 1, 4, 1, 5, 9, 2, 6] * 3, SamplingParams(temperature=0.8, top_k=20, seed=3)
    said = []
    for backend_sampling in ("off", "on"):
        with Runtime(tiny_model, drafter, backend_sampling=backend_sampling, **F32) as runtime:
            assert isinstance(runtime.session.drafter, TimedDrafter)
            assert runtime.session.drafter.reads_logits
            said.append(runtime.generate(prompt, params, max_tokens=40).token_ids)
    assert said[0] == said[1]
