"""Answers sampled from a torch model: many prompts at once, keys and values cached."""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specrun.bindings.errors import OutOfMemoryError
from specrun.train.data.answers import AskingSettings, Question, Said
from specrun.train.data.tokens import TargetTokens
from specrun.train.target.hf_model import HFModel
from specrun.train.target.shape import ModelShape
from specrun.train.target.states import AnswerStates, FeatureCache
from specrun.train.trainer.memory import free_memory

# == Sampling ======================================================================================


_FEW = 1024  # tokens: they are nine tenths of nearly every distribution
_WORTH_DROPPING = 1 / 8  # of the rows: fewer that have ended are cheaper computed than moved away


def answers_as_they_end(
    model: HFModel,
    prompts: Sequence[Sequence[int]],
    uniforms: Tensor,
    *,
    temperature: float,
    end_ids: Collection[int],
    top_p: float = 1.0,
    vocab_size: int | None = None,
    states: AnswerStates | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Yield answers drawn token by token from softmax(logits / temperature); 0: the likeliest.

    Each comes with the number of its prompt. `uniforms` [n_prompts, n_longest] in [0, 1) are the
    noise: token j of answer i is the one at `uniforms[i, j]` of the cumulative distribution, so an
    answer depends on its prompt and its row alone, not on the others of its batch. An answer ends
    with a token of `end_ids`, which it keeps, or after n_longest tokens. With `top_p` below 1 the
    distribution is cut to the likeliest tokens that make up so much of it (Holtzman et al. 2020),
    and the number is one of that distribution, the likeliest first. `vocab_size` bars the tokens
    from there on (rows of the embeddings that stand for no token, and tokens that another model
    lacks). `states` takes the states of all tokens; those of an answer's last one come after
    it was yielded.
    """
    was_training = model.module.training
    model.module.eval()
    try:
        batch = _Batch(model, prompts, uniforms, states)
        yield from batch.run(temperature, top_p, frozenset(end_ids), vocab_size)
    finally:
        model.module.train(was_training)


def in_order(answers: Iterable[tuple[int, list[int]]]) -> list[list[int]]:
    """Return all of `answers_as_they_end` in the order of their prompts."""
    return [answer for _, answer in sorted(answers)]


def uniform_numbers(keys: Sequence[tuple[int, ...]], n_longest: int) -> Tensor:
    """Return float64 numbers in [0, 1), [len(keys), n_longest]; a key alone decides its row."""
    rows = [np.random.default_rng(key).random(n_longest) for key in keys]
    return torch.from_numpy(np.stack(rows) if rows else np.zeros((0, n_longest)))


def end_tokens(model: HFModel, *more: int | None) -> frozenset[int]:
    """Return the tokens that end an answer by the model's configuration, and `more` of them."""
    found: set[int] = {token for token in more if token is not None}
    for name in ("generation_config", "config"):
        value: Any = getattr(getattr(model.model, name, None), "eos_token_id", None)
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


class _Batch:
    """Prompts padded on the left, so that all answers grow at the same place."""

    def __init__(
        self,
        model: HFModel,
        prompts: Sequence[Sequence[int]],
        uniforms: Tensor,
        states: AnswerStates | None,
    ) -> None:
        self.model, self.states = model, states
        self.device = model.device
        self.uniforms = uniforms.to(self.device)
        longest = max((len(prompt) for prompt in prompts), default=0)
        self.ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        self.mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {row} is empty: there is nothing to continue")
            self.ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
            self.mask[row, longest - len(prompt) :] = 1
        self.ids, self.mask = self.ids.to(self.device), self.mask.to(self.device)
        self.answers: list[list[int]] = [[] for _ in prompts]
        # Which answers the rows still being evaluated belong to, and those of them that go on.
        self.rows = list(range(len(prompts)))
        self.going_on = set(self.rows)

    def run(
        self, temperature: float, top_p: float, end_ids: frozenset[int], vocab_size: int | None
    ) -> Iterator[tuple[int, list[int]]]:
        from specrun.train.target.growing_cache import growing_cache  # transformers takes seconds

        cache: Any = growing_cache(self.model.model.config)
        ids, n_longest = self.ids, self.uniforms.shape[1]
        for step in range(n_longest):
            if not self.going_on:
                break
            going_on = self.going_on.copy()
            logits, cache = self._evaluated(ids, cache, vocab_size)
            tokens = _tokens_at(logits, self.uniforms[self.rows, step], temperature, top_p)
            ids, cache = self._keep(tokens, end_ids, cache)
            yield from ((row, self.answers[row]) for row in sorted(going_on - self.going_on))
        if self.states is not None and self.rows:
            self._evaluated(ids, cache, vocab_size)
        yield from ((row, self.answers[row]) for row in sorted(self.going_on))

    @torch.no_grad()
    def _evaluated(self, ids: Tensor, cache: Any, vocab_size: int | None) -> tuple[Tensor, Any]:  # noqa: ANN401
        """Return the logits [rows, vocab] after more tokens `ids`, and the cache with them."""
        # Padding on the left counts for no position: a prompt begins at 0 whatever its batch.
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        taps = () if self.states is None else self.states.taps
        output: Any = self.model.model.base_model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=bool(taps),
        )
        final: Tensor = output.last_hidden_state
        if self.states is not None:
            tapped = (output.hidden_states[tap] for tap in taps)
            self.states.note(self.rows, torch.cat([final, *tapped], -1))
        return self.model.logits(final[:, -1])[:, :vocab_size], output.past_key_values

    def _keep(self, tokens: Tensor, end_ids: frozenset[int], cache: Any) -> tuple[Tensor, Any]:  # noqa: ANN401
        """Note one more token of each answer, and drop the rows that ended once they are many."""
        before = self.going_on.copy()
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            if row in before:
                self.answers[row].append(token)
                if token in end_ids:
                    self.going_on.remove(row)
        # If states are noted, those of a last token are wanted, too.
        needed = self.going_on if self.states is None else before
        n_ended = len(self.rows) - len(needed)
        if n_ended > _WORTH_DROPPING * len(self.rows) and self.going_on:
            kept = [index for index, row in enumerate(self.rows) if row in needed]
            chosen = torch.tensor(kept, dtype=torch.long, device=self.device)
            self.rows = [self.rows[index] for index in kept]
            self.mask, tokens = self.mask[chosen], tokens[chosen]
            cache.batch_select_indices(chosen)
        self.mask = torch.cat((self.mask, self.mask.new_ones(len(self.rows), 1)), dim=1)
        return tokens[:, None], cache


def _tokens_at(logits: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return the token [rows] at each row's uniform number of cumulative masses [rows, vocab]."""
    if temperature == 0.0:
        return logits.argmax(-1)
    # In float64: rounding of a float32 sum over a whole vocabulary would move its boundaries.
    law = torch.softmax(logits.double() / temperature, -1)
    if top_p == 1.0:
        return _places(law.cumsum(-1), uniforms)
    law, order = _likeliest(law, top_p)
    # The tokens before it have not made up top_p yet: the first token always stays.
    law = law.masked_fill(law.cumsum(-1) - law >= top_p, 0.0)
    return order.gather(-1, _places(law.cumsum(-1), uniforms)[:, None])[:, 0]


def _likeliest(law: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """Return tokens of distributions [rows, vocab] by falling probability, up to a sum of `mass`.

    Sorting a whole vocabulary is most of a draw's time, and a few tokens are nearly all of a
    distribution.
    """
    few = law.topk(min(_FEW, law.shape[-1]), -1)
    if bool((few.values.sum(-1) >= mass).all()):
        return few.values, few.indices
    return law.sort(stable=True, dim=-1, descending=True)


def _places(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """Return the place [rows] of each row's number in its cumulative sums [rows, vocab]."""
    # Scaled by the last sum, 1 but for rounding or a cut; "right" steps over probabilities of 0.
    places = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
    return places[:, 0].clamp(max=cumulative.shape[-1] - 1)


# == Answers of a target that torch computes =======================================================
#
# A GPU takes much the same time for a token of one answer and of a thousand, so that the texts of
# heads, millions of tokens, come a hundred times as fast as from llama.cpp, which answers a
# few conversations at once. A CPU with AVX-512 gains a factor of two, by torch's products of
# matrices (docs/measurements.md has figures).


logger = logging.getLogger(__name__)

Numbered = Sequence[tuple[int, Question]]
_SHARE = 0.5  # of the free memory: caches that grow or move take as much again for a while
_LAW_BYTES = 64  # of a row, for each token: distributions in float64, sorted, added up
# More keep neither busier, and an interrupt loses the answers that a batch has begun.
_MOST_ROWS = {"cpu": 128}
_MOST_ROWS_OF_A_GPU = 8192


class TorchAnswerer:
    """Answers by a model in torch.

    An answer depends on its question, the seed and its number; half precision rounds rows of other
    batches otherwise, so that now and then a token differs if two were nearly as likely. The
    states of prompts and answers stay in `kept`, if there is one, batch by batch.
    """

    def __init__(
        self,
        model: HFModel,
        shape: ModelShape,
        tokens: TargetTokens,
        kept: FeatureCache | None = None,
    ) -> None:
        self._model, self._shape, self._tokens, self._kept = model, shape, tokens, kept
        self._ends = end_tokens(model, *tokens.end_ids)

    def answers(
        self, asked: Sequence[tuple[int, Question]], settings: AskingSettings
    ) -> Generator[tuple[int, Said]]:
        """Yield the answers batch by batch, and of a batch as they end.

        tokens are drawn by `settings`; drafts and how many conversations there are at once
        mean nothing here. Raises OutOfMemoryError if there is none for a single answer.
        """
        most = _MOST_ROWS.get(self._model.device.type, _MOST_ROWS_OF_A_GPU)
        # Prompts of like length fill up little. Only those of a batch change places: who has heard
        # enough, as the first thousand answers, has those to the first thousand questions.
        waiting = [
            each
            for start in range(0, len(asked), most)
            for each in sorted(asked[start : start + most], key=_length)
        ]
        while waiting:
            batch = waiting[: min(most, self._rows(waiting))]
            ended: set[int] = set()
            try:
                for number, said in self._batch(batch, settings):
                    ended.add(number)
                    yield number, said
            except torch.OutOfMemoryError as error:
                if len(batch) == 1:
                    raise OutOfMemoryError(
                        f"no memory on {self._model.device} to answer a prompt of "
                        f"{len(batch[0][1].prompt):,} tokens: lower --max-length or --answer-length"
                    ) from error
                most = len(batch) // 2
                logger.info("no memory for %d answers at once: %d are tried", len(batch), most)
                torch.cuda.empty_cache()
            waiting = [each for each in waiting if each[0] not in ended]

    def _rows(self, waiting: Numbered) -> int:
        """Return how many of the first questions are answered at once."""
        free = _SHARE * free_memory(self._model.device)
        shape, size = self._shape, self._model.output.element_size()
        a_token = 2 * shape.n_layers * shape.n_kv_heads * shape.head_size * size
        if self._kept is not None:  # the inputs of all layers are there for a while
            a_token += (2 + len(self._kept.taps) + shape.n_layers) * shape.hidden * size
        longest = 0
        for count, (_, question) in enumerate(waiting):
            longest = max(longest, len(question.prompt) + question.room)
            row = a_token * longest + _LAW_BYTES * self._model.output.shape[0]
            if (count + 1) * row > free:
                return max(1, count)
        return len(waiting)

    def _batch(self, batch: Numbered, settings: AskingSettings) -> Iterator[tuple[int, Said]]:
        """Yield the answers to questions that are answered at once, as they end."""
        params, longest = settings.params, max(question.room for _, question in batch)
        if params.temperature:
            # By the prompt's length too: prompts of its own and answers are drawn with other noise.
            keys = [(params.seed or 0, number, len(each.prompt)) for number, each in batch]
            uniforms = uniform_numbers(keys, longest)
        else:
            uniforms = torch.zeros(1, 1).expand(len(batch), longest)
        prompts = [question.prompt for _, question in batch]
        kept, said = self._kept, dict[int, list[int]]()
        states = None if kept is None else AnswerStates(prompts, longest, kept.taps)
        try:
            for row, answer in answers_as_they_end(
                self._model,
                prompts,
                uniforms,
                temperature=params.temperature,
                top_p=params.top_p,
                end_ids=self._ends,
                states=states,
            ):
                number, question = batch[row]
                said[row] = answer[: question.room]
                yield number, self._said(said[row])
        finally:  # a reader that stops early, or an interrupt, keeps the finished states, too
            if kept is not None and states is not None:
                whole = [row for row, answer in said.items() if states.has(row, answer)]
                kept.keep(states.of(row, said[row], self._shape.hidden) for row in whole)

    def _said(self, answer: list[int]) -> Said:
        is_whole = bool(answer) and answer[-1] in self._ends
        return Said(answer, self._tokens.text(answer[: len(answer) - is_whole]), is_whole)


def _length(each: tuple[int, Question]) -> tuple[int, int]:
    return len(each[1].prompt), each[0]
