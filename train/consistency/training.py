"""Consistency training (CLLM, Kou et al. 2024): a new target that Jacobi decoding decodes faster.

The folder of a run is a whole model: a *new* target, with texts of its own, not those of the old
one. `training/` in it has the checkpoint and the trajectories.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from specrun.bindings.errors import OptionError
from specrun.train.consistency.trajectories import (
    Trajectory,
    collect_trajectories,
    tokens_per_iteration,
)
from specrun.train.data.answers import asked_prompts, runnable_target
from specrun.train.data.corpus import TokenBatch, TokenCorpus, corpus_of
from specrun.train.data.documents import read_documents
from specrun.train.data.tokens import TargetTokenizer, TokenSequence
from specrun.train.distillation.learner import DIVERGENCES, check_divergence
from specrun.train.heads.learner import token_cross_entropy
from specrun.train.target.hf_model import HFModel, load_hf_model, write_model_folder
from specrun.train.target.shape import checkpoint_size, source_digest, source_identity, target_shape
from specrun.train.trainer.learner import Learner, LossPart, RunListener
from specrun.train.trainer.memory import MemoryNeed
from specrun.train.trainer.model_folder import model_card, training_lines
from specrun.train.trainer.run import Training, TrainingReport, TrainingRun
from specrun.train.trainer.settings import TrainerSettings, TrainingDefaults

# == Texts packed with iterates of their trajectories: one evaluation for all of them ==============
#
# A row holds a text and, behind it, blocks of guesses. A block attends to the text before the place
# it guesses from, and to itself; nothing attends to it. So its rows are those of the text up to
# there followed by the guesses alone, as `jacobi` evaluates them.


@dataclass(frozen=True, slots=True)
class Block:
    """`tokens` guessed from position `start` of the text on."""

    start: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Rows [B, L] of texts and blocks, their positions, and their mask of attention [B, L, L].

    `places[b][k]` is the column of the first token of block k of row b.
    """

    ids: Tensor
    positions: Tensor
    attends: Tensor
    places: list[list[int]]


def pack(texts: Sequence[Sequence[int]], blocks: Sequence[Sequence[Block]]) -> PackedTexts:
    """Return texts, each with its blocks behind it."""
    lengths = [
        len(text) + sum(len(block.tokens) for block in own)
        for text, own in zip(texts, blocks, strict=True)
    ]
    width = max(lengths)
    ids = np.zeros((len(texts), width), np.int64)
    positions = np.zeros((len(texts), width), np.int64)
    # Padding attends to itself, for a softmax over nothing is no number.
    attends = np.broadcast_to(np.eye(width, dtype=np.bool_), (len(texts), width, width)).copy()
    places: list[list[int]] = []
    for row, (text, own) in enumerate(zip(texts, blocks, strict=True)):
        n = len(text)
        ids[row, :n], positions[row, :n] = text, np.arange(n)
        attends[row, :n, :n] = np.tri(n, dtype=np.bool_)
        column, starts = n, []
        for block in own:
            size = len(block.tokens)
            rows = slice(column, column + size)
            ids[row, rows], positions[row, rows] = block.tokens, block.start + np.arange(size)
            attends[row, rows, : block.start] = True
            attends[row, rows, rows] = np.tri(size, dtype=np.bool_)
            starts.append(column)
            column += size
        places.append(starts)
    return PackedTexts(
        torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(attends), places
    )


def packed_states(model: HFModel, packed: PackedTexts) -> Tensor:
    """Return the final states [B, L, h] of packed texts."""
    device = model.device
    dtype = next(model.module.parameters()).dtype
    refused = torch.finfo(dtype).min
    mask = torch.zeros(packed.attends.shape, dtype=dtype, device=device)
    mask.masked_fill_(~packed.attends.to(device), refused)
    found = model.model.base_model(
        input_ids=packed.ids.to(device),
        attention_mask=mask[:, None],
        position_ids=packed.positions.to(device),
        use_cache=False,
    )
    states: Tensor = found.last_hidden_state
    return states


# == The learner ===================================================================================
#
# A row behind guesses learns the distribution of the row behind the right tokens. With y* the fixed
# point (the text) and y a state of the trajectory, the global form is E sum_i D(Q(. | x, y*_<i) ||
# Q(. | x, y_<i)), equation 5; the local form has the next state of the trajectory in the place of
# y*, equation 6. No gradient flows into the labels. To it is added L_AR, the cross-entropy
# of the text's own tokens, without which the text would be lost: the loss is L_AR + w
# L_consistency.


ConsistencyForm = Literal["global", "local"]


@dataclass(frozen=True, slots=True)
class ConsistencyRecipe:
    """The loss: its `form`, its `weight` w beside L_AR, and the number of `states` of a text.

    Blocks have `block` guesses; decode with jacobi(n=block). The answers that are learnt have at
    most `answer_length` tokens.
    """

    block: int = 16
    form: ConsistencyForm = "global"
    weight: float = 1.0
    divergence: str = "forward-kl"
    states: int = 4
    answer_length: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.block <= 128:
            raise OptionError(f"blocks of {self.block} tokens: give 1 to 128")
        if self.form not in get_args(ConsistencyForm):
            raise OptionError(f"the form is {self.form!r}: use global or local")
        if self.weight < 0 or self.states < 1:
            raise OptionError("a weight below 0, or no state of a text: give 0 or more, and 1")
        check_divergence(self.divergence)
        if self.answer_length < 2:
            raise OptionError(f"answers of {self.answer_length} tokens: give at least 2")

    def training(self, run: TrainingRun, listener: RunListener | None) -> ConsistencyTraining:
        """Return the training of a run, begun."""
        return ConsistencyTraining(self, run, listener)


class ConsistencyLearner(Learner):
    """`model` learns from trajectories, known by the numbers of the corpus that batches are of."""

    def __init__(
        self, recipe: ConsistencyRecipe, model: HFModel, trajectories: Sequence[Trajectory]
    ) -> None:
        self.recipe = recipe
        self.model, self._trajectories = model, trajectories
        self.device = model.device
        self.module = model.module.requires_grad_()

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield L_AR + w times the divergence along trajectories: they share the model's states."""
        chosen = [
            _drawn(len(self._trajectories[number].starts), self.recipe.states, noise)
            for number in batch.numbers
        ]
        states, learning, teaching = self._evaluated(batch, chosen)
        own = self._text_loss(batch, states)
        if not len(learning):
            yield LossPart("text", own, float(own.detach()))
            return
        with torch.no_grad():
            wanted = torch.log_softmax(self.model.logits(teaching), -1)
        found = torch.log_softmax(self.model.logits(learning), -1)
        drift = DIVERGENCES[self.recipe.divergence](wanted, found).mean()
        yield LossPart("consistency", own + self.recipe.weight * drift, float(drift.detach()))

    def _evaluated(
        self, batch: TokenBatch, chosen: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states of texts with the chosen iterates, [B, L, h].

        Of these also the rows [P, h] that learn, and those that they learn from, without gradients.
        """
        local = self.recipe.form == "local"
        found = [self._trajectories[number] for number in batch.numbers]
        blocks = [
            [
                Block(int(each.starts[state]), each.iterates[state].tolist())
                for first in rounds
                for state in ((first, first + 1) if local else (first,))
                if state < len(each.starts)
            ]
            for each, rounds in zip(found, chosen, strict=True)
        ]
        packed = pack([each.ids.tolist() for each in found], blocks)
        learn: list[tuple[int, int]] = []
        teach: list[tuple[int, int]] = []
        for row, (each, own) in enumerate(zip(found, blocks, strict=True)):
            step = 0
            while step < len(own):
                block, place = own[step], packed.places[row][step]
                later, step = None, step + 1
                if local and step < len(own) and own[step].start > block.start:
                    later, step = (own[step], packed.places[row][step]), step + 1
                for guess in range(len(block.tokens)):
                    source = _teacher(block.start + guess, len(each.ids), later)
                    if source is not None:
                        learn.append((row, place + guess))
                        teach.append((row, source))
        states = packed_states(self.model, packed)
        places = torch.tensor([learn, teach], dtype=torch.long, device=self.device)
        places = places.view(2, len(learn), 2)
        learning, teaching = (states[each[:, 0], each[:, 1]] for each in places)
        return states, learning, teaching.detach()

    def _text_loss(self, batch: TokenBatch, states: Tensor) -> Tensor:
        marks = batch.learnt[:, 1:]
        width = batch.ids.shape[1]
        # Rows of texts come first in packed rows; position t chooses the token at t + 1.
        logits = self.model.logits(states[:, : width - 1][marks])
        return token_cross_entropy(logits, batch.ids[:, 1:][marks])

    def measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Return the share of guessed places whose row ranks the text's token first, and the loss.

        Guesses are the trajectories' of the model as it was.
        """
        right = places = 0
        losses, count = 0.0, 0
        for batch in batches:
            chosen = [
                list(range(len(self._trajectories[number].starts))) for number in batch.numbers
            ]
            states, learning, teaching = self._evaluated(
                batch, [every[:: max(1, len(every) // 8)] for every in chosen]
            )
            n = int(batch.learnt[:, 1:].sum())
            losses, count = losses + n * float(self._text_loss(batch, states)), count + n
            if len(learning):
                ours, theirs = (self.model.logits(rows).argmax(-1) for rows in (learning, teaching))
                right, places = right + int((ours == theirs).sum()), places + len(ours)
        return {"consistent rows": right / max(1, places), "text loss": losses / max(1, count)}


def _drawn(n: int, most: int, noise: torch.Generator) -> list[int]:
    """Return at most so many of n states, drawn without replacement, ascending."""
    order = torch.randperm(n, generator=noise, device=noise.device)[:most]
    return sorted(order.tolist())


def _teacher(position: int, length: int, later: tuple[Block, int] | None) -> int | None:
    """Return the column that teaches the row after `position`; None: there is none.

    It is the text's own, or with a `later` block (and its column) that one's if it reaches so far.
    """
    if later is not None:
        block, place = later
        offset = position - block.start
        if 0 <= offset < len(block.tokens):
            return place + offset
    # The row after a text's last token has nothing to learn from.
    return position if position < length - 1 else None


# == The run =======================================================================================


_MOST_DECODED = 64  # held-out prompts that are answered anew, before and after


@dataclass(frozen=True, slots=True)
class ConsistencyReport(TrainingReport):
    """`before` and `after`: tokens of greedy answers per evaluation, with jacobi(n=block).

    They are of `n_decoded` held-out prompts, whose answers are now `same_answers` times the same
    tokens as before.
    """

    before: float
    after: float
    n_decoded: int
    same_answers: int


class ConsistencyTraining(Training[ConsistencyReport]):
    """A run that trains a copy of the target along its trajectories; the target's folder stays.

    The data's prompts are its own; answers of the data are not read.
    """

    # The paper's rate, for models of 7B; narrower ones bear more.
    usual = TrainingDefaults(learning_rate=2e-5, betas=(0.9, 0.999), clip_norm=1.0)

    def __init__(
        self, recipe: ConsistencyRecipe, run: TrainingRun, listener: RunListener | None
    ) -> None:
        super().__init__(run, listener, (run.target,))
        self.recipe = recipe
        self._shape, self._tokenizer = target_shape(run.target), TargetTokenizer(run.target)

    def texts(self) -> TokenCorpus:
        """Return the target's answers by Jacobi decoding; raises ModelError without prompts."""
        run, recipe = self.run, self.recipe
        documents = read_documents(run.data, need_answers=False)
        prompts = asked_prompts(documents, self._tokenizer, run.max_length)
        self.require_memory(self._need())
        self.open_output()
        self._found = self._collected(run.target, prompts, "trajectories")
        texts = [TokenSequence.of(each.ids.tolist(), each.n_prompt) for each in self._found]
        corpus = corpus_of(texts, held_out=run.held_out, seed=run.seed)
        # Batches have room for the blocks behind the texts.
        blocks = recipe.states * (2 if recipe.form == "local" else 1)
        widths = tuple(len(text) + blocks * recipe.block for text in texts)
        corpus = dataclasses.replace(corpus, widths=widths)
        self.note_texts(corpus)
        return corpus

    def _need(self) -> MemoryNeed:
        """Return the memory: 16 bytes for a trained number, and the numbers kept by a step."""
        run, shape = self.run, self._shape
        tokens, longest = run.tokens_per_batch, run.max_length
        layers = shape.n_layers * shape.layer_numbers
        attention = shape.n_layers * 2 * shape.n_heads * min(longest, tokens)
        return MemoryNeed(
            {
                "target": 16 * checkpoint_size(run.target),
                "a step": 4 * tokens * (layers + attention + 6 * shape.vocab_size),
            },
            {"target": "use a smaller target", "a step": "lower --batch-tokens or --max-length"},
        )

    def _collected(
        self, folder: Path, prompts: Sequence[Sequence[int]], name: str
    ) -> list[Trajectory]:
        """Let a folder's model answer prompts by Jacobi decoding; keep the trajectories."""
        run, place = self.run, self.run.state_path.parent
        place.mkdir(parents=True, exist_ok=True)
        what = "the target answers" if name == "trajectories" else "the new target answers"
        return collect_trajectories(
            runnable_target(folder, place, self.listener.note),
            prompts,
            place / f"{name}.jsonl",
            identity=source_identity(folder),
            block=self.recipe.block,
            longest=self.recipe.answer_length,
            max_length=run.max_length,
            n_threads=run.n_threads,
            progress=functools.partial(self.listener.stage, what),
        )

    def identity(self, corpus: TokenCorpus, settings: TrainerSettings) -> dict[str, Any]:
        """Return the facts that a resumed run must share: the recipe, data and target."""
        named = dataclasses.asdict(self.recipe)
        length = named.pop("answer_length")
        return {
            "kind": "consistency",
            **{f"consistency {name}": value for name, value in named.items()},
            "answer length": length,
            "data": corpus.digest[:16],
            "target": source_digest(self.run.target),
        }

    def learner(self, corpus: TokenCorpus, settings: TrainerSettings) -> ConsistencyLearner:
        """Return the learner of the model, which is loaded."""
        self._decoded = [self._found[number] for number in corpus.held_out[:_MOST_DECODED]]
        self._before = tokens_per_iteration(self._decoded)
        guessed = f"{self.recipe.block} guessed"
        self.listener.note(f"before: {self._before:.3f} tokens per iteration, {guessed}")
        model = load_hf_model(self.run.target, self.device)
        return ConsistencyLearner(self.recipe, model, self._found)

    def finished(
        self, learner: ConsistencyLearner, corpus: TokenCorpus, report: TrainingReport
    ) -> ConsistencyReport:
        """Write the new model, let it answer held-out prompts, and complete its card."""
        run, decoded = self.run, self._decoded
        # Written first: the folder itself is measured, and a long run is safe then.
        partial = report.extended(
            ConsistencyReport, before=self._before, after=math.nan, n_decoded=0, same_answers=0
        )
        card = _card(self.recipe, run, partial)
        write_model_folder(learner.model, run.target, run.output, card)
        prompts = [each.ids[: each.n_prompt].tolist() for each in decoded]
        again = self._collected(run.output, prompts, "after")
        same = sum(
            new.ids.tolist() == old.ids.tolist() for new, old in zip(again, decoded, strict=True)
        )
        after, count = tokens_per_iteration(again), len(decoded)
        whole = dataclasses.replace(partial, after=after, n_decoded=count, same_answers=same)
        card = _card(self.recipe, run, whole)
        (run.output / "README.md").write_text(card, encoding="utf-8")
        return whole


def _card(recipe: ConsistencyRecipe, run: TrainingRun, report: ConsistencyReport) -> str:
    target, block = run.target.resolve().name, recipe.block
    losses = report.result.curves.losses
    settings = {
        **{k: v for k, v in dataclasses.asdict(recipe).items() if k != "answer_length"},
        "longest answer": recipe.answer_length,
        "tokens per batch": run.tokens_per_batch,
        "seed": run.seed,
        "precision": report.precision,
    }
    speed = f"{report.before:.3f} before, {report.after:.3f} after"
    return model_card(
        f"{target}, trained for Jacobi decoding",
        tags="jacobi, consistency-llm",
        base_model=target,
        made=f"**A new model, not {target}.** Made by `specrun train consistency` (CLLM, Kou et "
        f"al. 2024): {report.n_trained:,} trained parameters. Its text is its own: "
        f"verification keeps the tokens of this model, not those of {target}.",
        sections={
            "Data": [
                f"{', '.join(path.name for path in run.data)}: {report.n_sequences:,} prompts, "
                f"answered by {target}. The licences of the data and of {target} apply."
            ],
            "Training": training_lines(
                report, f"the loss fell from {losses[0]:.4f} to {losses[-1]:.4f}.", settings
            ),
            "Tokens per iteration": [
                f"{speed}, with jacobi(n={block}) at temperature 0 on {report.n_decoded} held-out "
                f"prompts, {report.same_answers} of which have the same answer as before."
            ],
        },
        commands=(
            "specrun convert FOLDER -o target.gguf",
            f'specrun chat -m target.gguf --drafter "jacobi(n={block})" --temp 0',
        ),
    )
