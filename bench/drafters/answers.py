"""Answers of a runtime to the prompts of a comparison, and the tokens and seconds they add up to.

One arm of a comparison is one runtime; its answers of one repetition are added up in `Answers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from specrun.bench.drafters.prompts import Prompt, as_text
from specrun.bindings.errors import SpecrunError
from specrun.runtime.engine import Engine, Runtime
from specrun.runtime.language import parse_expression, short_label
from specrun.runtime.laws import SamplingParams
from specrun.runtime.round import Drafter, GenerationResult, SpecStats


class Arm:
    """A runtime with the prompts tokenized; `as_chat` is that of `prompt_ids`.

    It drafts with `drafter`, None: with the runtime's own. Whoever made it closes it.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompts: Sequence[Prompt],
        as_chat: bool | None,
        drafter: Drafter | None = None,
    ) -> None:
        self.runtime, self._drafter = runtime, drafter
        self.label = short_label(parse_expression(runtime.drafter))
        self._prompts = [prompt_ids(runtime, prompt, as_chat) for prompt in prompts]

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """The prompts' tokens."""
        return self._prompts

    @property
    def prompt_tokens(self) -> float:
        """The mean length of a prompt in tokens."""
        return sum(map(len, self._prompts)) / len(self._prompts)

    def with_answer(self, number: int, answer: str) -> tuple[list[int], int]:
        """Return a prompt's tokens with those of an answer, and how many are the prompt's."""
        prompt = self._prompts[number]
        said = self.runtime.vocabulary.tokenize(answer, add_special=False)
        return [*prompt, *said], len(prompt)

    def answer(
        self, number: int, params: SamplingParams, max_tokens: int, *, seed: int
    ) -> GenerationResult:
        """Answer one prompt from an empty cache, so that no arm profits from what came before."""
        self.runtime.session.forget()
        if self._drafter is not None:
            self.runtime.session.draft_with(self._drafter)
        return self.runtime.generate(
            self._prompts[number], params.replace(seed=seed), max_tokens=max_tokens
        )


class Answers:
    """Some answers and their sums."""

    def __init__(self) -> None:
        self._results: list[GenerationResult] = []
        self.tokens = self.rounds = self.drafted = self.accepted = 0
        self.decoding_s = self.overhead_s = 0.0

    def add(self, result: GenerationResult) -> None:
        """Add an answer; raises SpecrunError if it has no tokens that were timed."""
        stats, n = result.stats, len(result.token_ids)
        if not n or not stats.tokens_per_second:
            raise SpecrunError(
                "an answer without tokens cannot be timed: is the context (-c) long enough?"
            )
        self._results.append(result)
        self.tokens += n
        self.rounds += stats.rounds
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.decoding_s += n / stats.tokens_per_second
        self.overhead_s += stats.overhead_s

    @staticmethod
    def together(several: Sequence[Answers]) -> Answers:
        """Return the answers of several repetitions as one."""
        total = Answers()
        for answers in several:
            for result in answers._results:
                total.add(result)
        return total

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens of each answer."""
        return [result.token_ids for result in self._results]

    @property
    def results(self) -> tuple[GenerationResult, ...]:
        """The answers themselves."""
        return tuple(self._results)

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the time from the prompt's end to the answers' ends."""
        return self.tokens / self.decoding_s

    @property
    def time_to_first_token_s(self) -> float:
        """The mean time to the first token."""
        times = [stats.time_to_first_token_s or 0.0 for stats in self._stats()]
        return sum(times) / len(times)

    def acceptance_by_position(self) -> tuple[float, ...]:
        """Return the share of rounds that kept a token, by depth; answers weigh by their rounds."""
        return _mean_by_depth(
            [(share, stats.rounds) for share in stats.acceptance_by_position]
            for stats in self._stats()
        )[0]

    def acceptance_given_prefix(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Return the share of tests that kept a token, by depth, and the number of tests.

        A depth is tested in the rounds that kept all tokens above it.
        """
        return _mean_by_depth(
            zip(stats.acceptance_given_prefix, stats.tested_by_position, strict=True)
            for stats in self._stats()
        )

    def departures(self) -> tuple[float, float] | None:
        """Return mean total variation and share of changed tokens; None under an exact rule."""
        sums = [0.0, 0.0]
        for result in self._results:
            stats, n = result.stats, len(result.token_ids)
            if stats.total_variation is None or stats.changed_share is None:
                return None
            sums[0] += n * stats.total_variation
            sums[1] += n * stats.changed_share
        return sums[0] / self.tokens, sums[1] / self.tokens

    def _stats(self) -> Iterator[SpecStats]:
        return (result.stats for result in self._results)


def _mean_by_depth(
    answers: Iterable[Iterable[tuple[float, int]]],
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return mean shares by depth, and their weights, of answers that give (share, weight).

    An answer that did not go as deep as others has no weight there.
    """
    depths = list(zip_longest(*answers, fillvalue=(0.0, 0)))
    weights = tuple(sum(weight for _, weight in depth) for depth in depths)
    sums = [sum(share * weight for share, weight in depth) for depth in depths]
    return tuple(kept / weight for kept, weight in zip(sums, weights, strict=True)), weights


def prompt_ids(runtime: Runtime | Engine, prompt: Prompt, as_chat: bool | None) -> list[int]:
    """Return the tokens of a prompt, with `as_chat` as the model's chat template renders it.

    None means True for models that have a chat template.
    """
    if runtime.model.chat_template is not None if as_chat is None else as_chat:
        return runtime.chat_prompt(
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
    return runtime.vocabulary.tokenize(prompt if isinstance(prompt, str) else as_text(prompt))
