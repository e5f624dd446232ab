"""Answers of a runtime to the prompts of a comparison, with their tokens and seconds.

One arm of a comparison is one runtime; its answers of one repetition are added up in `Answers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

from specrun.bench.drafters.prompts import Prompt, Question, as_text
from specrun.bindings.errors import OptionError, SpecrunError
from specrun.runtime.chat import think_tags_of
from specrun.runtime.engine import Engine, Runtime
from specrun.runtime.language import parse_expression, short_label
from specrun.runtime.laws import SamplingParams
from specrun.runtime.round import Drafter, GenerationResult, SpecStats


class Arm:
    """A runtime with the prompts tokenized; `as_chat` is that of `prompt_ids`.

    It drafts with `drafter`, None: with the runtime's own. The caller closes it.
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
        self._questions, self._as_chat = prompts, as_chat
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
        """Answer one prompt from an empty cache, so that no arm profits from earlier prompts."""
        self.runtime.session.forget()
        if self._drafter is not None:
            self.runtime.session.draft_with(self._drafter)
        return self.runtime.generate(
            self._prompts[number], params.replace(seed=seed), max_tokens=max_tokens
        )

    def answer_turns(
        self, number: int, params: SamplingParams, max_tokens: int, *, seed: int
    ) -> list[GenerationResult]:
        """Answer all turns of a prompt, each after this arm's own answers to those before."""
        results = [self.answer(number, params, max_tokens, seed=seed)]
        question = self._questions[number]
        if not isinstance(question, Question):
            return results
        said: list[Mapping[str, str]] = [{"role": "user", "content": question.turns[0]}]
        for turn in question.turns[1:]:
            said.append({"role": "assistant", "content": self.content(results[-1])})
            said.append({"role": "user", "content": turn})
            tokens = prompt_ids(self.runtime, tuple(said), self._as_chat)
            settings = params.replace(seed=seed)
            results.append(self.runtime.generate(tokens, settings, max_tokens=max_tokens))
        return results

    def content(self, answer: GenerationResult) -> str:
        """Return the text of an answer behind its reasoning, as chats and scores have it."""
        template = self.runtime.model.chat_template
        tags = think_tags_of(template) if template and self._as_chat is not False else None
        if tags is None:
            return answer.text
        _, last, content = answer.text.rpartition(tags.last)
        return "" if not last and tags.first in content else content

    def require_room(self, max_tokens: int) -> None:
        """Raise `OptionError` for the first question whose turns may not fit into the context."""
        for number, question in enumerate(self._questions):
            if isinstance(question, Question):
                later = ["", *question.turns[1:]]
                turns = [self.runtime.vocabulary.tokenize(turn) for turn in later]
                needed = len(self._prompts[number]) + sum(map(len, turns)) + max_tokens * len(turns)
                if needed > self.runtime.n_ctx:
                    raise OptionError(
                        f"question {number + 1} ({question.category}) may need {needed} tokens, "
                        f"and the context has {self.runtime.n_ctx}: raise it (-c), or give fewer "
                        "tokens an answer (-n)"
                    )


class Answers:
    """Some answers and their sums."""

    def __init__(self) -> None:
        self._results: list[GenerationResult] = []
        self._timed: list[GenerationResult] = []
        self.tokens = self.rounds = self.drafted = self.accepted = 0
        self.decoding_s = self.overhead_s = 0.0

    def add(self, result: GenerationResult) -> None:
        """Add an answer; one without tokens that were timed has no part in the sums."""
        self._results.append(result)
        stats, n = result.stats, len(result.token_ids)
        if not n or not stats.tokens_per_second:
            return
        self._timed.append(result)
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
        for result in self._timed:
            stats, n = result.stats, len(result.token_ids)
            if stats.total_variation is None or stats.changed_share is None:
                return None
            sums[0] += n * stats.total_variation
            sums[1] += n * stats.changed_share
        return sums[0] / self.tokens, sums[1] / self.tokens

    def _stats(self) -> Iterator[SpecStats]:
        return (result.stats for result in self._timed)


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


def timed_speed(result: GenerationResult) -> float:
    """Return the tokens a second of an answer; raises SpecrunError if it has no timed tokens."""
    speed = result.stats.tokens_per_second
    if not result.token_ids or not speed:
        raise SpecrunError(
            "an answer without tokens cannot be timed: is the context (-c) long enough?"
        )
    return speed


def prompt_ids(runtime: Runtime | Engine, prompt: Prompt, as_chat: bool | None) -> list[int]:
    """Return the tokens of a prompt, with `as_chat` as the model's chat template renders it.

    None means True for models that have a chat template. Of a question it is the first turn.
    """
    chat = runtime.model.chat_template is not None if as_chat is None else as_chat
    if isinstance(prompt, Question):
        prompt = prompt.turns[0] if chat else prompt.continued or prompt.turns[0]
    if chat:
        return runtime.chat_prompt(
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
    return runtime.vocabulary.tokenize(prompt if isinstance(prompt, str) else as_text(prompt))
