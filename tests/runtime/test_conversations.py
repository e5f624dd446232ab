"""Weights and conversation apart: two conversations of one `DrafterWeights` draft as each does
alone.

Everything is compared round by round: the tree, its draws, the accepted path and the target's own
token. Round times, by which `auto` chooses, are those of a clock that counts its readings.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.every_drafter import COMBINED, LEARNING, MODELS, named
from support.tiny_models import F32

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.combinators import combined
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.lookahead import load_pool
from specrun.runtime.engine import Session
from specrun.runtime.laws import SamplingParams, SeededNoise
from specrun.runtime.planning import TYPICAL_GPU, account
from specrun.runtime.round import Drafter, NoDrafter, close_all
from specrun.runtime.round.drafter import DrafterWeights, make_all
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
from specrun.runtime.trees import DraftTree

WHOLE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
GREEDY = SamplingParams(temperature=0.0)
LENGTH = 30
Files = dict[str, Path]
POOL = "lookahead(window=2, ngram=4, guesses=3, pool=FILE:pool)"
DRAFTERS = [*MODELS, *LEARNING, *COMBINED, POOL.replace(")", ", save=no)")]


@dataclass(frozen=True, slots=True)
class Talk:
    """What one conversation asks: a prompt, then further tokens after the answer, and again."""

    prompt: tuple[int, ...]
    more: tuple[tuple[int, ...], ...]
    params: SamplingParams


TALKS = [
    Talk((3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4), ((8, 8), (3, 1, 4)), GREEDY),
    Talk((3, 1, 4, 7, 7, 3, 1, 4, 7), ((9,), (5, 9, 2, 6)), GREEDY),
    Talk((2, 7, 1, 8, 2, 8), ((1, 2, 3), (2, 7)), WHOLE.replace(seed=5)),
]


@pytest.fixture(scope="module")
def pooled(files: Files, model: Model, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files, with a pool that a conversation filled."""
    found = {**files, "pool": tmp_path_factory.mktemp("pools") / "some.pool"}
    alone(weights_of(POOL, found, model), model, Talk((3, 1, 4, 1, 5, 9), (), GREEDY))
    return found


@pytest.fixture(scope="module")
def model(files: Files) -> Iterator[Model]:
    with Model(files["shallow"]) as model:
        yield model


def weights_of(drafter: str, files: Files, model: Model) -> DrafterWeights:
    ticks = itertools.count()
    environment = DraftEnvironment(
        model,
        ContextOptions(**F32),
        n_gpu_layers=0,
        costs=TYPICAL_GPU,
        clock=lambda: float(next(ticks)),
    )
    return build_drafter(named(drafter, files), environment)


Event = tuple[tuple[int, ...], tuple[int, ...], object, tuple[int, ...], int | None]


def conversation(weights: DrafterWeights, model: Model, talk: Talk) -> Iterator[Event]:
    """Yield the rounds of a conversation that is started now, and closed at its end."""
    with Session.open(model, weights.start(), ContextOptions(**F32), ExactRule()) as session:
        target, talked = session.target, session.conversation
        for asked in (talk.prompt, *talk.more):
            talked.begin(target, [*talked.tokens, *asked])
            talked.noise = SeededNoise(talk.params.seed or 0)
            limits = RoundLimits(
                n_ctx=target.context.n_ctx, max_nodes=target.max_nodes, max_tokens=LENGTH
            )
            for one in decode_rounds(
                target, talked, DecodeSettings(ExactRule(), talk.params, limits)
            ):
                yield (
                    one.tree.tokens,
                    one.tree.parents,
                    draws_of(one.tree),
                    one.path,
                    one.next_token,
                )


def draws_of(tree: DraftTree) -> object:
    """The laws that were drawn from, as far as they can be compared."""
    return [
        (
            parent,
            draw.node,
            None if draw.law is None else draw.law.probability(tree.tokens[draw.node]),
        )
        for parent, draws in sorted(tree.draws.items())
        for draw in draws
    ]


def alone(weights: DrafterWeights, model: Model, talk: Talk) -> list[Event]:
    with closing(weights):
        return list(conversation(weights, model, talk))


def in_turn(rounds: Sequence[Iterator[Event]]) -> list[list[Event]]:
    """Take a round of each in turn until all are over."""
    events: list[list[Event]] = [[] for _ in rounds]
    for step in itertools.zip_longest(*rounds):
        for kept, event in zip(events, step, strict=True):
            kept += [] if event is None else [event]
    return events


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_conversations_draft_as_each_does_alone(
    drafter: str, pooled: Files, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Draft models cost about as much as so small a target: `auto` would draft nothing.
    monkeypatch.setattr(account, "START", 100.0)
    wanted = [alone(weights_of(drafter, pooled, model), model, talk) for talk in TALKS]
    assert drafter == "none" or sum(len(event[0]) for events in wanted for event in events) > 20
    with closing(weights_of(drafter, pooled, model)) as weights:
        assert in_turn([conversation(weights, model, talk) for talk in TALKS]) == wanted


@pytest.mark.parametrize(
    "drafter", ["draft(FILE:twin, tree=3x2)", "cascade(draft(FILE:twin, n=6), draft(FILE:small))"]
)
def test_a_conversation_goes_on_when_another_is_closed(
    drafter: str, files: Files, model: Model
) -> None:
    wanted = alone(weights_of(drafter, files, model), model, TALKS[1])
    with closing(weights_of(drafter, files, model)) as weights:
        first, second = (conversation(weights, model, talk) for talk in TALKS[:2])
        begun = [[next(first), next(second)][1] for _ in range(5)]
        first.close()  # type: ignore[attr-defined] # a generator: the end of its blocks
        assert [*begun, *second] == wanted


def test_one_drafter_for_two_conversations_is_seen(files: Files, model: Model) -> None:
    """Negative control: had the weights kept the state, the drafts would be others."""
    drafter = "lookahead(window=2, ngram=4, guesses=3)"
    wanted = [alone(weights_of(drafter, files, model), model, talk) for talk in TALKS[:2]]
    with closing(weights_of(drafter, files, model)) as weights:
        started = weights.start()
        shared = DrafterWeights(weights.name, lambda: started)
        assert in_turn([conversation(shared, model, talk) for talk in TALKS[:2]]) != wanted


def test_a_pool_with_a_file_is_shared_and_saved_with_the_weights(
    files: Files, model: Model, tmp_path: Path
) -> None:
    """Each conversation drafts what any of them wrote: a second one with the same text is as one
    that starts warm."""
    files = {**files, "pool": tmp_path / "new.pool"}
    first, second = (Talk(talk.prompt, (), talk.params) for talk in TALKS[:2])
    with closing(weights_of(POOL, files, model)) as weights:
        texts = in_turn([conversation(weights, model, talk) for talk in (first, second)])
        again = list(conversation(weights, model, first))
        before = files["pool"].stat().st_size  # saved as the third began
    assert len(again) < len(texts[0])
    pool = load_pool(files["pool"], model.vocabulary)
    assert files["pool"].stat().st_size >= before
    for talk, events in zip((first, second, first), [*texts, again], strict=True):
        text = [*talk.prompt, *(token for event in events for token in written(event))]
        assert tuple(text[-4:]) in set(pool)
        assert tuple(text[:4]) in set(pool)


def test_a_second_conversation_drafts_as_one_that_reads_the_first_ones_file(
    files: Files, model: Model, tmp_path: Path
) -> None:
    together, apart = (
        {**files, "pool": tmp_path / name} for name in ("together.pool", "apart.pool")
    )
    with closing(weights_of(POOL, together, model)) as weights:
        events = [list(conversation(weights, model, talk)) for talk in TALKS[:2]]
    assert events == [alone(weights_of(POOL, apart, model), model, talk) for talk in TALKS[:2]]
    pools = [[*load_pool(each["pool"], model.vocabulary)] for each in (together, apart)]
    assert pools[0] == pools[1]


def written(event: Event) -> list[int]:
    tokens, _, _, path, own = event
    return [*(tokens[node] for node in path), *([] if own is None else [own])]


# -- starting and closing --------------------------------------------------------------------------


class Closing(NoDrafter):
    """Writes down when it is closed; may fail then."""

    def __init__(self, name: str, closed: list[str], *, fails: bool = False) -> None:
        self.name, self._closed, self._fails = name, closed, fails

    def close(self) -> None:
        self._closed.append(self.name)
        if self._fails:
            raise OptionError(f"{self.name} cannot be closed")


def failing() -> Drafter:
    raise OptionError("it cannot start")


def test_members_that_were_started_are_closed_when_one_fails() -> None:
    closed: list[str] = []
    members = [
        DrafterWeights("a", lambda: Closing("a", closed, fails=True)),
        DrafterWeights("b", lambda: Closing("b", closed)),
        DrafterWeights("c", failing),
        DrafterWeights("d", lambda: Closing("d", closed)),
    ]
    with pytest.raises(OptionError, match="a cannot be closed") as caught:
        combined("all", members, lambda _: NoDrafter()).start()
    assert "it cannot start" in str(caught.value.__context__)
    assert closed == ["a", "b"]


def test_members_are_closed_when_they_cannot_be_combined() -> None:
    closed: list[str] = []
    members = [DrafterWeights(name, lambda name=name: Closing(name, closed)) for name in "ab"]  # type: ignore[misc]
    refuse: Callable[[Sequence[Drafter]], Drafter] = lambda _: failing()  # noqa: E731
    with pytest.raises(OptionError, match="it cannot start"):
        combined("all", members, refuse).start()
    assert closed == ["a", "b"]


def test_weights_close_what_they_own_once_whatever_fails() -> None:
    closed: list[str] = []
    owned = [Closing("a", closed), Closing("b", closed, fails=True), Closing("c", closed)]
    weights = combined("all", [DrafterWeights("inner", failing, owned)], lambda _: NoDrafter())
    with pytest.raises(OptionError, match="b cannot be closed"):
        weights.close()
    assert closed == ["a", "b", "c"]
    weights.close()
    assert closed == ["a", "b", "c"]


def test_everything_is_closed_and_made_in_order() -> None:
    closed: list[str] = []
    made = make_all(lambda name=name: Closing(name, closed) for name in "abc")  # type: ignore[misc]
    assert [one.name for one in made] == ["a", "b", "c"]
    close_all(made)
    assert closed == ["a", "b", "c"]
    close_all(())
