"""The drafter's interface: propose a draft tree, then receive its outcome."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from specrun.runtime.laws.noise import NoiseSource
from specrun.runtime.laws.samplers import FRESH, SamplerState
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.round.target import EvaluatedRows, TargetModel
from specrun.runtime.trees.tree import DraftTree

if TYPE_CHECKING:
    from specrun.bindings.contexts.embedding_inputs import EmbeddingInputs

Keep = Literal["nothing", "points", "laws", "rows"]
"""nothing: the draws suffice; points: at temperature 0 the drafted tokens do, drafters with
distributions at hand keep these, as for laws; laws: the drafter's distribution at every place,
also if nothing was drawn from it and after the whole draft; rows: its whole rows of logits
too."""


# Neither requests nor outcomes are frozen: that costs a call for every field, in every round.
@dataclass(slots=True)
class DraftRequest:
    """The facts for a drafter: committed tokens, settings, its own noise, and how much to draft.

    `tokens` is the live list of all committed tokens (do not keep or change it); the first drafted
    token will stand at position len(tokens). Trees deeper than `max_depth` or larger than
    `max_nodes` are an error: their tokens would not fit the context or the answer. After one of
    `end_tokens` nothing is generated, so nodes below one are evaluated for nothing. `keep` names
    the drafter's numbers that the acceptance rule will read: see `DraftTree.rows`. If a rule
    has a `fallback`, a draft goes on while the drafter's largest raw probability reaches it, also
    where n=auto would stop. `state` is the samplers' after the committed tokens: mirostat's moves
    on down the target's tree, and a drafter may leave it where it is.
    """

    tokens: Sequence[int]
    params: SamplingParams
    noise: NoiseSource
    max_depth: int
    max_nodes: int
    end_tokens: frozenset[int] = frozenset()
    keep: Keep = "nothing"
    fallback: float = 0.0
    state: SamplerState = FRESH

    def within(self, max_depth: int, max_nodes: int) -> DraftRequest:
        """Return the request for trees that are also no deeper and no larger than this."""
        return DraftRequest(
            self.tokens,
            self.params,
            self.noise,
            min(max_depth, self.max_depth),
            min(max_nodes, self.max_nodes),
            self.end_tokens,
            self.keep,
            self.fallback,
            self.state,
        )


@dataclass(slots=True)
class RoundOutcome:
    """The outcome of a round: the tree, the accepted path and the target's own token after it.

    `tokens` is the live list of all committed tokens, the new ones included. `next_token` is None
    when the path ended with an end-of-generation token. `rows` are views that die with the next
    evaluation: copy.
    """

    tokens: Sequence[int]
    tree: DraftTree
    path: tuple[int, ...]
    next_token: int | None
    rows: EvaluatedRows

    @property
    def n_new(self) -> int:
        """How many tokens it committed: those of the path and the target's own."""
        return len(self.path) + (self.next_token is not None)

    @property
    def start(self) -> int:
        """The position of the first token that it committed; the one before is its root."""
        return len(self.tokens) - len(self.path) - (self.next_token is not None)

    @property
    def path_rows(self) -> list[int]:
        """The rows of the root and of the accepted nodes, whose logits gave its tokens."""
        return [0, *[node + 1 for node in self.path]] if self.path else [0]


class Pause:
    """Rounds in which a drafter neither proposes nor observes: it would propose nothing.

    `rounds` are those to come. Who decodes counts them down, each of one token, which the drafter
    finds in the next request; a caller may ignore them and let it propose all the same.
    """

    __slots__ = ("_begun", "rounds")

    def __init__(self, rounds: int = 0) -> None:
        self.rounds = self._begun = rounds

    def begin(self, rounds: int) -> None:
        """Pause for so many rounds."""
        self.rounds = self._begun = rounds

    def end(self) -> int:
        """End a pause, be it over or not; return how many rounds it lasted."""
        lasted = self._begun - self.rounds
        self.rounds = self._begun = 0
        return lasted


class Drafter(ABC):
    """Proposes the draft trees of one conversation.

    Owns the native memory that the conversation needs, such as a context of a draft model:
    `close()` it before the weights that started it.
    """

    name: str
    """The expression that made it, such as "draft(a.gguf, n=5)"."""

    max_leaves: int = 1
    """The most root-to-leaf paths of a proposal: sequence ids that the target's context needs."""

    max_nodes: int = 0
    """The most nodes of a proposal: output rows that the target's context needs beside the root."""

    max_filled: int = 0
    """How many of these only fill a block up: they cost the drafter nothing."""

    n_params: int = 0
    """How many parameters the drafter's own models have; 0 if it has none."""

    depth_params: float = 0.0
    """How many parameters a depth of a draft multiplies; 0 if it evaluates nothing of its own.

    Matrices of the target that the drafter reads, such as the output matrix, are among them.
    """

    needs_hidden_states: bool = False
    """Whether it reads the target's final hidden states from the rows of an outcome."""

    layer_inputs: tuple[int, ...] = ()
    """The layers of the target, ascending, whose inputs it reads from the rows of an outcome."""

    needs_nextn_states: bool = False
    """Whether it reads the inputs of the target's NextN blocks, from the rows of an outcome."""

    reads_logits: bool = False
    """Whether it reads the target's logits from the rows of an outcome: they are to be whole."""

    embedding_inputs: EmbeddingInputs | None = None
    """The meaning of its trees' nodes beyond the vocabulary: look-ahead positions, no candidates.

    None: all nodes are tokens. It belongs to the weights.
    """

    remark: str = ""
    """A note for the user on its drafting; "" if there is none."""

    keeps_rows: bool = False
    """Whether its trees have `rows`, if a request needs them."""

    finds_text: bool = False
    """Whether it need not receive rounds without a draft: it finds their tokens in
    the next request, or in the next outcome that it receives."""

    begins_alike: bool = False
    """Whether every answer begins as if it was the first. If a seed's text depends on the length of
    drafts, other answers must not change it."""

    forecasts: bool = False
    """Whether `forecast` returns the expected gain of a proposal."""

    pause: Pause = Pause()
    """When it need not propose: one's own, or of those that never pause the one they share."""

    @property
    def reads_target(self) -> bool:
        """Whether it reads more of the target than its logits; then it is shown prompts, too."""
        return self.needs_hidden_states or self.needs_nextn_states or bool(self.layer_inputs)

    def take_target(self, target: TargetModel) -> None:  # noqa: B027
        """Take the target that evaluates the conversation, if its cache is read.

        Called before the first text, and with the cache empty.
        """

    def begin(self, tokens: Sequence[int]) -> None:  # noqa: B027 - most drafters keep no state
        """Start an answer to a whole prompt, which may continue or contradict earlier ones."""

    def take_over(self, other: Drafter, length: int) -> int:
        """Take over the states that another conversation's drafter has of a text's first tokens.

        Returns how many of the first `length` tokens the target need not show it. Both drafters
        have the same weights.
        """
        return 0 if self.reads_target else length

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:  # noqa: B027
        """Learn the target's states at prompt tokens `start`, `start + 1`, ...: `count` rows.

        Called after `begin`, in pieces, for the part of the prompt that was not cached, if it
        `reads_target`; the prompt's last token is the root of the first round. Rows have no logits
        unless `needs_hidden_states`.
        """

    def read_along(self, tokens: Sequence[int], end: int) -> None:  # noqa: B027
        """Read a prompt that the target has read up to `end`, if others wait for pieces of it.

        Called after every piece, after `begin` and `learn_prompt`. The rest is read when it is
        drafted for.
        """

    waits: bool = False
    """Whether `prepare` has to be called before it proposes."""

    def prepare(self, request: DraftRequest) -> bool:
        """Draft a step further, if that waits for other conversations' drafts; True: propose.

        False: an evaluation is waited for that serves several drafters; call again when it was
        made, with the same request. Whoever does not pass this on has its drafts made alone.
        """
        return True

    @abstractmethod
    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a tree of guesses below the last committed token; empty to propose nothing."""

    def forecast(self, request: DraftRequest) -> float:
        """Return, cheaply, the speed-up over plain decoding of a proposal now; 0 if unknown.

        It proposes nothing, and may be called any number of times.
        """
        return 0.0

    def observe(self, outcome: RoundOutcome) -> None:  # noqa: B027
        """Receive the accepted path, and the target's rows at every node."""

    def rewind(self, length: int) -> None:  # noqa: B027
        """Forget the tokens from position `length` on: this drafter had gone on from guesses.

        If drafters draft for drafters, or one after the other, `DraftRequest.tokens` ends with
        tokens that are drafted, not committed. Before any other call, the combinator takes
        back those that were rejected. Drafters that keep facts by position must drop them here.
        """

    def report(self) -> dict[str, Any]:
        """Return facts about the answer since `begin`, as JSON; empty if nothing."""
        return {}

    @property
    def native_seconds(self) -> float:
        """Time spent inside native evaluation of the drafter's own models so far."""
        return 0.0

    def close(self) -> None:  # noqa: B027
        """Free the conversation's native memory, not the weights; again does nothing."""


class Owned(Protocol):
    """Something with native memory or an open file, such as a model, a head or a datastore."""

    def close(self) -> None:
        """Free it; calling it again does nothing."""


Pace = Literal["counted", "timed", "compared", "greedy", "paying"]
"""The decisions about drafts that measured time may make. counted: nothing; timed: the expected
cost of evaluations; compared: the same, the first rounds being plain; greedy: as compared at
temperature 0, and nothing if tokens are drawn; paying: also when to stop, which only drafters of
point masses leave to others."""


@dataclass(slots=True)
class DrafterWeights:
    """The common part of all conversations of a drafter: models, heads, stores, and measured costs.

    `start` makes the drafter of one conversation: its cache positions, its state, its counts.
    `owned` is closed with the weights, first to last; every drafter that was started is closed
    before. `pace` holds the decisions that measured time may make.
    """

    name: str
    start: Callable[[], Drafter]
    owned: Sequence[Owned] = ()
    pace: Pace = "counted"

    def close(self) -> None:
        """Free everything owned, whatever goes wrong with a part of it."""
        owned, self.owned = self.owned, ()
        close_all(owned)


def close_all(owned: Sequence[Owned]) -> None:
    """Close everything, first to last, even if some fail; then raise the last error."""
    if owned:
        try:
            owned[0].close()
        finally:
            close_all(owned[1:])


_Part = TypeVar("_Part", bound=Owned)


def make_all(makers: Iterable[Callable[[], _Part]]) -> list[_Part]:
    """Return the result of each; if one fails, those already made are closed."""
    made: list[_Part] = []
    try:
        for make in makers:
            made.append(make())  # a list comprehension would lose those made before an error
    except BaseException:
        close_all(made)
        raise
    return made


NOTHING = DraftTree.of_points((), ())
"""The tree of a round in which nothing is drafted."""


class NoDrafter(Drafter):
    """Proposes nothing: plain decoding is the same loop with empty trees."""

    name = "none"

    def __init__(self) -> None:
        self.pause = Pause(sys.maxsize)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the empty tree."""
        return NOTHING
