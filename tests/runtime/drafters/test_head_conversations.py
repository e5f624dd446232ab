"""Two conversations share a drafter's weights and nothing else: each drafts what it would draft
alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_models import F32

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import ClosedError
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.dflash.source import build_dflash
from specrun.runtime.drafters.eagle import PairHead, build_eagle, build_eagle3
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.hydra import HydraHead, build_hydra
from specrun.runtime.drafters.medusa import build_medusa
from specrun.runtime.drafters.mtp import build_mtp
from specrun.runtime.language import Expression, parse_expression
from specrun.runtime.laws import SamplingParams, SeededNoise
from specrun.runtime.round import (
    Conversation,
    Drafter,
    DraftRequest,
    TargetModel,
    target_context_options,
)
from specrun.runtime.round.drafter import DrafterWeights, RoundOutcome
from specrun.runtime.trees import ROOT

torch = pytest.importorskip("torch")
from support.every_drafter import HEADS, named  # noqa: E402

BUILDERS: dict[str, Callable[..., DrafterWeights]] = {
    "dflash": build_dflash,
    "eagle": build_eagle,
    "eagle3": build_eagle3,
    "hydra": build_hydra,
    "medusa": build_medusa,
    "mtp": build_mtp,
}
PARAMS = SamplingParams(temperature=1.0, seed=1)

Draft = tuple[tuple[int, ...], tuple[int, ...]]
"""A tree's tokens and parents."""


def no_parts(expression: Expression, environment: DraftEnvironment) -> Drafter:
    raise AssertionError(f"{expression} has no parts")


@contextmanager
def opened(
    files: dict[str, Path], target: str, expression: str
) -> Iterator[tuple[Model, DrafterWeights]]:
    """A target and a drafter's weights over it."""
    parsed = parse_expression(named(expression, files))
    with Model(files[target], load_nextn=parsed.atom == "mtp") as model:
        environment = DraftEnvironment(model, ContextOptions(**F32))
        with closing(BUILDERS[parsed.atom](parsed, environment, no_parts)) as weights:
            yield model, weights


class Talk:
    """Rounds over a target's context of its own, in which any of the drafts is accepted, and any
    token follows."""

    def __init__(self, model: Model, weights: DrafterWeights, seed: int) -> None:
        self.drafter = weights.start()
        options = target_context_options(ContextOptions(**F32), self.drafter)
        self.target = TargetModel(Context(model, options))
        self.drafter.take_target(self.target)
        self.text = Conversation(self.drafter)
        self.drafts: list[Draft] = []
        self._random = np.random.default_rng(seed)

    def say(self, length: int, *, keep: int | None = None) -> None:
        """Go on with a prompt: after the first `keep` tokens of the text, so many others."""
        more = self._random.integers(5, 250, length).tolist()
        self.text.begin(self.target, [*self.text.tokens[:keep], *more])

    def round(self) -> None:
        tokens = self.text.tokens
        noise = SeededNoise(3).for_drafting(len(tokens))
        tree = self.drafter.propose(DraftRequest(tokens, PARAMS, noise, 8, 16))
        self.drafts.append((tuple(tree.tokens), tuple(tree.parents)))
        rows = self.target.evaluate(self.text, tree)
        path = tuple(tree.path_to(int(self._random.integers(ROOT, len(tree)))))
        self.target.commit(self.text, tree, path)
        following = int(self._random.integers(5, 250))
        tokens.append(following)
        self.drafter.observe(RoundOutcome(tokens, tree, path, following, rows))

    def close(self) -> None:
        self.drafter.close()
        self.target.context.close()


def steps(talk: Talk, start: int) -> Iterator[None]:
    """Two answers of some rounds, the second after a prompt that goes on from part of the first."""
    talk.say(start)
    yield
    for number in range(14):
        if number == 8:
            talk.say(5, keep=len(talk.text.tokens) - 6)
            yield
        talk.round()
        yield


def alone(
    files: dict[str, Path], target: str, expression: str, seed: int, start: int
) -> list[Draft]:
    with opened(files, target, expression) as (model, weights):
        with closing(Talk(model, weights, seed)) as talk:
            for _ in steps(talk, start):
                pass
            return talk.drafts


def together(files: dict[str, Path], target: str, expression: str) -> list[list[Draft]]:
    with opened(files, target, expression) as (model, weights):
        with (
            closing(Talk(model, weights, 1)) as first,
            closing(Talk(model, weights, 2)) as second,
        ):
            for _ in zip(steps(first, 9), steps(second, 20), strict=True):
                pass
            return [first.drafts, second.drafts]


@pytest.mark.parametrize(
    ("target", "expression"),
    # These heads are random: where only what pays is drafted, nothing is.
    [(target, expression) for target, expression in HEADS if "nodes=auto" not in expression],
)
def test_conversations_of_one_head_draft_what_each_would_alone(
    files: dict[str, Path], target: str, expression: str
) -> None:
    lone = [alone(files, target, expression, 1, 9), alone(files, target, expression, 2, 20)]
    assert together(files, target, expression) == lone
    for drafts in lone:
        assert all(len(tokens) for tokens, _ in drafts)
        assert len(set(drafts)) > 4
    assert lone[0] != lone[1]


@pytest.mark.parametrize("kind", ["eagle", "hydra++"])
def test_cells_that_two_conversations_share_are_caught(
    files: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a head that hands out the same cells twice."""
    expression = f"{kind.removesuffix('++')}(FILE:{kind}, n=3)"
    lone = [alone(files, "shallow", expression, 1, 9), alone(files, "shallow", expression, 2, 20)]
    made: dict[int, Any] = {}
    for head in (PairHead, HydraHead):
        cells: Any = head.cells
        again = lambda self, n, cells=cells: made.setdefault(id(self), cells(self, n))  # noqa: E731
        monkeypatch.setattr(head, "cells", again)
    assert together(files, "shallow", expression) != lone


ONE_OF_EACH = [
    *{(target, text.split(",")[0]): (target, text) for target, text in HEADS[::-1]}.values()
]
"""A drafter of each file."""


@pytest.mark.parametrize(("target", "expression"), ONE_OF_EACH)
def test_a_conversation_outlives_another_and_counts_its_own_time(
    files: dict[str, Path], target: str, expression: str
) -> None:
    lone = alone(files, target, expression, 2, 20)
    with opened(files, target, expression) as (model, weights):
        first, second = Talk(model, weights, 1), Talk(model, weights, 2)
        with closing(second):
            with closing(first):
                first.say(9)
                first.round()
                taken = first.drafter.native_seconds
                assert taken > 0.0
                assert second.drafter.native_seconds == 0.0
            for _ in steps(second, 20):
                pass
            assert second.drafts == lone
            assert second.drafter.native_seconds > 0.0
            assert first.drafter.native_seconds == taken
            assert first.drafter.n_params == second.drafter.n_params > 0


def test_a_model_of_blocks_outlives_the_conversations_that_read_it(files: dict[str, Path]) -> None:
    with opened(files, "nextn", "mtp(FILE:blocks, n=3)") as (_, weights):
        drafter = weights.start()
        *_, model = weights.owned  # last: after the contexts
        with pytest.raises(ClosedError, match="close the 1 contexts"):
            model.close()
        drafter.close()
        drafter.close()
        weights.close()
        weights.close()
        assert isinstance(model, Model)
        with pytest.raises(ClosedError):
            _ = model.handle
