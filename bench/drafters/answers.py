"""One side of a comparison: an open runtime that answers prompts, and what its answers add up
to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from specrun.bench.drafters.prompts import Prompt, as_text
from specrun.bindings.errors import SpecrunError
from specrun.runtime.language import Expression, parse_expression
from specrun.runtime.results import GenerationResult
from specrun.runtime.runtime import Runtime
from specrun.runtime.sampling import SamplingParams


class Arm:
    """A runtime with the prompts tokenized; closes the runtime at the end of its `with` block.

    `as_chat` None renders prompts by the model's chat template if it has one.
    """

    def __init__(self, runtime: Runtime, prompts: Sequence[Prompt], as_chat: bool | None) -> None:
        self.runtime = runtime
        self.label = short_label(parse_expression(runtime.drafter))
        try:
            chat = runtime.model.chat_template is not None if as_chat is None else as_chat
            self._prompts = [prompt_ids(runtime, prompt, chat) for prompt in prompts]
        except BaseException:
            runtime.close()
            raise

    def __enter__(self) -> Arm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.runtime.close()

    @property
    def prompt_tokens(self) -> float:
        """The mean length of a prompt in tokens."""
        return sum(map(len, self._prompts)) / len(self._prompts)

    def answer(
        self, number: int, params: SamplingParams, max_tokens: int, *, seed: int
    ) -> GenerationResult:
        """Answer one prompt from an empty cache, so that no arm profits from what came before."""
        self.runtime.session.forget()
        return self.runtime.generate(
            self._prompts[number], params.replace(seed=seed), max_tokens=max_tokens
        )


class Answers:
    """The sum of some answers: tokens, rounds and seconds."""

    def __init__(self) -> None:
        self.token_ids: list[list[int]] = []
        self.tokens = self.rounds = self.drafted = self.accepted = 0
        self.decoding_s = self.overhead_s = 0.0
        self._first_token_s = 0.0
        self._by_position: list[tuple[float, int]] = []
        self._given_prefix: list[tuple[float, int]] = []

    def add(self, result: GenerationResult) -> None:
        """Add an answer."""
        stats, n = result.stats, len(result.token_ids)
        if not n or not stats.tokens_per_second:
            raise SpecrunError(
                "an answer without tokens cannot be timed: is the context (-c) long enough?"
            )
        self.token_ids.append(result.token_ids)
        self.tokens += n
        self.rounds += stats.rounds
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.decoding_s += n / stats.tokens_per_second
        self.overhead_s += stats.overhead_s
        self._first_token_s += stats.time_to_first_token_s or 0.0
        _add_shares(
            self._by_position,
            [(share * stats.rounds, stats.rounds) for share in stats.acceptance_by_position],
        )
        tests = zip(stats.acceptance_given_prefix, stats.tested_by_position, strict=True)
        _add_shares(self._given_prefix, [(share * tested, tested) for share, tested in tests])

    @staticmethod
    def together(several: Sequence[Answers]) -> Answers:
        """Return the sum of sums; it keeps no token ids."""
        total = Answers()
        for answer in several:
            for name in ("tokens", "rounds", "drafted", "accepted"):
                setattr(total, name, getattr(total, name) + getattr(answer, name))
            _add_shares(total._by_position, answer._by_position)
            _add_shares(total._given_prefix, answer._given_prefix)
        return total

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the time from the prompt's end to the answers' ends."""
        return self.tokens / self.decoding_s

    @property
    def time_to_first_token_s(self) -> float:
        """The mean time to the first token."""
        return self._first_token_s / len(self.token_ids)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """The share of rounds that kept a token at each depth; answers weigh by their rounds."""
        return tuple(kept / rounds for kept, rounds in self._by_position)

    @property
    def acceptance_given_prefix(self) -> tuple[float, ...]:
        """The share of the tests at each depth that kept a token: of the rounds that had kept all
        above it."""
        return tuple(kept / tested for kept, tested in self._given_prefix)

    @property
    def tested_by_position(self) -> tuple[int, ...]:
        """How many tests those were."""
        return tuple(tested for _, tested in self._given_prefix)


def _add_shares(total: list[tuple[float, int]], more: Sequence[tuple[float, int]]) -> None:
    """Add counts by depth: how many kept a token, of how many."""
    for index, (kept, tested) in enumerate(more):
        if index == len(total):
            total.append((0.0, 0))
        before = total[index]
        total[index] = (before[0] + kept, before[1] + tested)


def prompt_ids(runtime: Runtime, prompt: Prompt, chat: bool) -> list[int]:
    """Return the tokens of a prompt, with `chat` as the chat template renders it."""
    if chat:
        return runtime.chat_prompt(
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
    return runtime.vocabulary.tokenize(prompt if isinstance(prompt, str) else as_text(prompt))


def short_label(expression: Expression) -> str:
    """Return the expression with files by their name alone: paths would widen every table."""

    def short(expression: Expression) -> Expression:
        atom = (
            Path(expression.atom).name
            if expression.atom.endswith((".gguf", ".pool")) or "/" in expression.atom
            else expression.atom
        )
        arguments = tuple(map(short, expression.arguments))
        return Expression(
            atom,
            arguments,
            tuple((k, short(v)) for k, v in expression.options),
            expression.count,
            expression.is_call,
        )

    return str(short(expression))
