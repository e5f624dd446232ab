"""A drafter that pauses is neither asked nor told, and nothing else comes of it."""

from __future__ import annotations

from contextlib import closing
from itertools import cycle
from pathlib import Path

import pytest
from support.enumeration import TOLERANCE, drafter_bias, top_k_points
from support.every_drafter import named
from support.scripted import PLAIN, LawTable, ScriptedDrafter, TableTarget, conversation_of
from support.tiny_models import F32

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.models.model import Model
from specrun.runtime import SamplingParams
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.break_even import TimedDrafter
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.engine import Session
from specrun.runtime.laws import SeededNoise
from specrun.runtime.planning import TYPICAL_CPU, Account, LiveCurve
from specrun.runtime.round import Drafter, DraftRequest, NoDrafter
from specrun.runtime.round.drafter import Pause, RoundOutcome
from specrun.runtime.round.loop import DecodeSettings, Round, RoundLimits, decode_rounds
from specrun.runtime.trees import DraftTree

TABLE = LawTable(5, 3)


class Pausing(Drafter):
    """Drafts what `inner` does, and pauses for `rounds` after every round that it was asked in."""

    name, max_nodes, finds_text = "pausing", 8, True

    def __init__(self, inner: Drafter, rounds: int) -> None:
        self.pause, self._inner, self._rounds = Pause(), inner, rounds
        self.seen: list[int] = []
        self.lasted: list[int] = []
        self.n_told = 0

    def propose(self, request: DraftRequest) -> DraftTree:
        self.lasted.append(self.pause.end())
        self.seen = [*request.tokens]
        return self._inner.propose(request)

    def observe(self, outcome: RoundOutcome) -> None:
        self.n_told += 1
        self.pause.begin(self._rounds)


def guesses() -> Drafter:
    return ScriptedDrafter(lambda request: DraftTree.chain([1, 2][: request.max_depth]))


def decoded(drafter: Drafter, length: int = 24) -> tuple[list[int], list[Round]]:
    conversation = conversation_of(drafter, [1, 2], SeededNoise(5))
    limits = RoundLimits(n_ctx=64, max_nodes=8, max_tokens=length)
    settings = DecodeSettings(ExactRule(), PLAIN, limits)
    rounds = [each for each in decode_rounds(TableTarget(TABLE), conversation, settings) if each]
    return conversation.tokens, rounds


@pytest.mark.parametrize("n", [0, 1, 3])
def test_it_is_asked_after_every_pause_and_the_text_is_the_same(n: int) -> None:
    drafter = Pausing(guesses(), n)
    tokens, rounds = decoded(drafter)
    assert tokens == decoded(NoDrafter())[0]
    drafted = [bool(each.tree.tokens) for each in rounds]
    expected = [index % (n + 1) == 0 for index in range(len(rounds))]
    # The last token of all leaves no room for a draft.
    assert drafted[:-1] == expected[:-1]
    assert drafter.n_told == len(drafter.lasted) == sum(expected)
    assert drafter.lasted == [0] + [n] * (sum(expected) - 1)


def test_what_comes_while_it_pauses_is_in_the_next_request() -> None:
    drafter = Pausing(guesses(), 2)
    tokens, _ = decoded(drafter)
    assert drafter.seen == tokens[: len(drafter.seen)]
    assert len(drafter.seen) > len(tokens) - 6


def test_a_pause_goes_on_in_the_next_answer() -> None:
    drafter = Pausing(guesses(), 5)
    decoded(drafter, 2)
    n_asked = len(drafter.lasted)
    left = drafter.pause.rounds
    assert left
    decoded(drafter, left)
    assert len(drafter.lasted) == n_asked
    assert not drafter.pause.rounds
    decoded(drafter, 1)
    assert len(drafter.lasted) == n_asked + 1


def test_who_does_not_heed_pauses_may_ask_all_the_same() -> None:
    pause = Pause()
    pause.begin(7)
    pause.rounds -= 3
    assert pause.end() == 3
    assert not pause.rounds
    assert pause.end() == 0


def test_the_law_is_the_targets_whatever_pauses_come() -> None:
    drafts = LawTable(3, 7)
    for rounds in (0, 1, 2):

        def make(rounds: int = rounds) -> Drafter:
            return Pausing(ScriptedDrafter(top_k_points(drafts, 2, 1)), rounds)

        assert drafter_bias(ExactRule(), make, LawTable(3, 1), 3) < TOLERANCE


def test_who_never_drafts_is_never_asked() -> None:
    class Asked(NoDrafter):
        def propose(self, request: DraftRequest) -> DraftTree:
            raise AssertionError("it was asked")

        def observe(self, outcome: RoundOutcome) -> None:
            raise AssertionError("it was told")

    assert len(decoded(Asked())[1]) == 24
    # The control: without its pause it would have been.
    awake = Asked()
    awake.pause = Pause()
    with pytest.raises(AssertionError, match="asked"):
        decoded(awake)


# -- drafters with a model, which observe the rounds that they sleep in ---------------------------


def proposals(
    files: dict[str, Path],
    target: str,
    drafter: str,
    monkeypatch: pytest.MonkeyPatch,
    rests: list[int],
) -> tuple[list[int], dict[int, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return a text, and the trees that were proposed below so many tokens of it."""
    pattern, found, prompt = cycle(rests), {}, [3, 1, 4, 1, 5, 9, 2, 6]
    monkeypatch.setattr(Account, "rest", lambda self: next(pattern))
    options, params = ContextOptions(**F32), SamplingParams(temperature=0.0)
    with Model(files[target]) as model:
        environment = DraftEnvironment(model, options, n_gpu_layers=0, by_clock=False)
        with closing(build_drafter(named(drafter, files), environment)) as weights:
            inner = weights.start()
            propose = inner.propose

            def noted(request: DraftRequest) -> DraftTree:
                tree = propose(request)
                found[len(request.tokens)] = tuple(tree.tokens), tuple(tree.parents)
                return tree

            inner.propose = noted  # type: ignore[method-assign]
            drafter_ = TimedDrafter(inner, LiveCurve(TYPICAL_CPU), lambda: 0.0, "compared")
            with Session.open(model, drafter_, options, ExactRule()) as session:
                answer = session.stream(prompt, params, seed=3, max_tokens=60).drain()
    return answer.token_ids, found


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("shallow", "eagle(FILE:eagle, n=4)"),
        ("deep", "eagle3(FILE:eagle3, depth=3, topk=3, nodes=7)"),
        ("shallow", "hydra(FILE:hydra++, tree=2x2x1)"),
        ("shallow", "medusa(FILE:medusa, tree=3x2x1)"),
        ("shallow", "dflash(FILE:dspark, n=3)"),
        ("shallow", "draft(FILE:small, n=4)"),
        ("shallow", "early-exit(layers=1, n=3)"),
        ("gemma4", "mtp(FILE:assistant, n=3)"),
        ("nextn", "mtp(FILE:blocks, n=3)"),
    ],
)
def test_what_slept_drafts_what_it_would_have_drafted_awake(
    files: dict[str, Path], target: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seen the states of the rounds in between: seven in a row, then one, then none."""
    text, awake = proposals(files, target, drafter, monkeypatch, [0])
    again, slept = proposals(files, target, drafter, monkeypatch, [0, 7, 0, 1, 0])
    assert again == text
    both = sorted(awake.keys() & slept.keys())
    assert len(both) >= 5
    assert len(slept) < len(text) / 2
    assert [slept[place] for place in both] == [awake[place] for place in both]
