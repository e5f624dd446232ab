"""Answers of a target that torch computes: many prompts at once.

A GPU takes much the same time for a token of one answer and of a thousand, so that what heads learn
from, millions of tokens, comes a hundred times as fast as from llama.cpp, which answers a few
conversations at once. A CPU with AVX-512 gains a factor of two, by torch's products of matrices
(docs/train.md has figures).
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence

import torch

from specrun.bindings.errors import OutOfMemoryError
from specrun.train.data.asking import AskingSettings, Question, Said
from specrun.train.data.target_tokens import TargetTokens
from specrun.train.target.feature_cache import FeatureCache
from specrun.train.target.features import AnswerStates
from specrun.train.target.hf_model import HFModel
from specrun.train.target.sampling import (
    answers_as_they_end,
    end_tokens,
    uniform_numbers,
)
from specrun.train.target.target_shape import ModelShape
from specrun.train.trainer.memory import free_memory

logger = logging.getLogger(__name__)

Numbered = Sequence[tuple[int, Question]]
_SHARE = 0.5  # of the free memory: caches that grow or move take as much again for a while
_LAW_BYTES = 64  # of a row, for each token of the vocabulary: laws in float64, sorted, added up
# More keep neither busier, and an interrupt loses what a batch has begun to answer.
_MOST_ROWS = {"cpu": 128}
_MOST_ROWS_OF_A_GPU = 8192


class TorchAnswerer:
    """Answers by a model in torch.

    An answer depends on its question, the seed and its number; half precision rounds rows of other
    batches otherwise, so that now and then a token differs where two were nearly as likely. The
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

        `settings` say how tokens are drawn; drafts and how many conversations there are at once
        mean nothing here. Raises OutOfMemoryError where there is none for a single answer.
        """
        most = _MOST_ROWS.get(self._model.device.type, _MOST_ROWS_OF_A_GPU)
        # Prompts of like length fill up little. Only those of a batch change places: who has heard
        # enough, as the first thousand answers, has those to the first thousand questions.
        waiting = [
            each
            for start in range(0, len(asked), most)
            for each in sorted(asked[start : start + most], key=_prompt_length)
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
        """Yield the answers to questions that are asked at once, as they end."""
        params, longest = settings.params, max(question.room for _, question in batch)
        if params.temperature:
            # By the prompt's length too: what a target asks and answers is drawn with other noise.
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
        finally:  # who has heard enough, or is interrupted, keeps what there is, too
            if kept is not None and states is not None:
                whole = [row for row, answer in said.items() if states.has(row, answer)]
                kept.keep(states.of(row, said[row], self._shape.hidden) for row in whole)

    def _said(self, answer: list[int]) -> Said:
        is_whole = bool(answer) and answer[-1] in self._ends
        return Said(answer, self._tokens.text(answer[: len(answer) - is_whole]), is_whole)


def _prompt_length(each: tuple[int, Question]) -> tuple[int, int]:
    number, question = each
    return len(question.prompt), number
