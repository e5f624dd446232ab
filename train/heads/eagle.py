"""EAGLE's head (Li et al. 2024) and its training on a frozen target (section 4.2).

From the final states f_1..f_i and the tokens t_2..t_(i+1) the head predicts f_(i+1). The loss is
SmoothL1(f_(i+1), f') + w CE(p, p'), where p and p' are the distributions that the target's output
matrix makes of the two states and w = 0.1. Uniform noise of +-0.1 on the states it reads makes the
head bear its own errors. AdamW .9/.95, gradients clipped to 0.5. With `steps` above 1 the head is
also trained on its own predictions, chains of that depth below every position, as HASS (Zhang et
al. 2024) does.

A head starts `fitted`: `fc` as the linear map of least squares from its inputs to the state that it
has to predict, and a layer that adds nothing yet. docs/measurements.md has the gain.

Tensors are named as in SafeAILab/EAGLE's `cnets`: `fc`, and one layer without an input norm. Token
embedding and output matrix are the target's: neither is part of the head.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.eagle import DRAFT_TOKENS, FEWEST
from specrun.train.data.corpus import TokenBatch, TokenCorpus, choosing, draft_marks
from specrun.train.heads.chains import MEASURED_DEPTH, ChainLearner, ChainRecipe
from specrun.train.heads.draft_laws import LawTokens, check_law_tokens, frequent_tokens
from specrun.train.heads.earlier_head import EarlierHead
from specrun.train.heads.layers import Attention, FeedForward, KeysValues, RMSNorm, added_at
from specrun.train.heads.learner import HeadLearner, best_tokens, law_cross_entropy, rows_at
from specrun.train.heads.run import HeadFiles
from specrun.train.target.hf_model import TargetMatrices
from specrun.train.target.shape import ModelShape
from specrun.train.target.states import Features, FeatureSource
from specrun.train.trainer.learner import Learner, LossPart, ParameterGroup

EagleStart = Literal["fitted", "random"]
_ROWS_A_NUMBER = 64  # of least squares: a bound on its work, for each number that is read
_RIDGE = 1e-4  # of the mean square of the input
_FITTED_RATE = 0.1  # of the learning rate: a higher one would destroy the fit


class _Layer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.post_attention_layernorm = RMSNorm(shape)

    def forward(
        self, states: Tensor, earlier: Sequence[KeysValues], wanted: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        mixed, own = self.self_attn(states, earlier)

        def fed(rows: Tensor) -> Tensor:
            return self.mlp(self.post_attention_layernorm(rows))  # type: ignore[no-any-return]

        return added_at(wanted, states + mixed, fed), own


class EagleHead(nn.Module):
    """Predicts the next final hidden state from the one before and the token in between."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=True)
        self.layers = nn.ModuleList([_Layer(shape)])

    @torch.no_grad()
    def fit(self, products: Tensor) -> None:
        """Let `fc` be the map of least squares, and the layer add nothing.

        `products` [2 h + 1, 3 h + 1] float64 are X^T X and X^T Y of rows X: embedding, state and 1,
        and of the states Y that follow.
        """
        joined = self.fc.in_features
        squares, wanted = products[:, : joined + 1].clone(), products[:, joined + 1 :]
        squares.diagonal().add_(_RIDGE * squares.diagonal().mean())
        found = torch.linalg.solve(squares, wanted)
        self.fc.weight.copy_(found[:joined].T)
        self.fc.bias.copy_(found[joined])
        layer = self.layers[0]
        assert isinstance(layer, _Layer)
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.weight.zero_()

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        earlier: Sequence[KeysValues] = (),
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Return the next states and this step's keys, as of `ChainHead`."""
        # Embeddings first: the order in which upstream's `fc` reads them.
        joined = self.fc(torch.cat((embeddings, states), -1))
        found: tuple[Tensor, KeysValues] = self.layers[0](joined, earlier, wanted)
        return found


@dataclass(frozen=True, slots=True)
class EagleRecipe(ChainRecipe):
    """`token_weight` is w, `noise` the largest noise on a state; 1 of `steps` is EAGLE's own.

    Distributions are compared among `law_tokens` tokens, 0 for all: three quarters of them the most
    frequent ones, the others drawn anew at each step. Distributions of all tokens are
    most of a step's work if targets are narrow. The head will draft only the `draft_tokens` most
    frequent ones, 0 for all: distributions are then theirs. `start` is how a head begins: "fitted"
    by least squares, or "random" as upstream's.
    """

    token_weight: float = 0.1
    noise: float = 0.1
    law_tokens: int = 0
    draft_tokens: int = 0
    start: EagleStart = "fitted"

    kind = "eagle"
    paper_rate = 3e-5

    def __post_init__(self) -> None:
        ChainRecipe.__post_init__(self)  # super() does not work in a class with slots
        if self.token_weight < 0 or self.noise < 0:
            raise OptionError("a weight or noise below 0: give 0 or more")
        check_law_tokens(self.law_tokens)
        if self.draft_tokens and self.draft_tokens < FEWEST:
            few = f"{self.draft_tokens} draft tokens"
            raise OptionError(f"{few}: give at least {FEWEST}, or 0 for all")
        if self.draft_tokens and self.law_tokens:
            raise OptionError(
                "both draft_tokens and law_tokens are given: distributions are those of the draft "
                "tokens, so leave law_tokens out"
            )
        if self.start not in get_args(EagleStart):
            known = ", ".join(get_args(EagleStart))
            raise OptionError(f"the start is {self.start!r}: use one of {known}")

    def going_on(self, head: EarlierHead) -> EagleRecipe:
        """Return the recipe with the head's draft tokens; its `fc` is not fitted again."""
        drafted = head.draft_tokens
        # If all tokens are drafted distributions may still be those of some.
        law = self.law_tokens if drafted is None else 0
        count = 0 if drafted is None else len(drafted)
        return replace(self, start="random", draft_tokens=count, law_tokens=law)

    def activation_bytes(
        self, shape: ModelShape, tokens: int, longest: int, *, recompute: bool
    ) -> int:
        """Return the bytes of chains, with their attention to the text, and of distributions."""
        every = shape.vocab_size
        vocab = min(self.draft_tokens or self.law_tokens or every, every)
        chains = self.chain_numbers(shape, vocab, longest, recompute=recompute)
        return 4 * tokens * (chains + vocab)

    def learner(
        self, shape: ModelShape, target: TargetMatrices, source: FeatureSource, corpus: TokenCorpus
    ) -> HeadLearner:
        """Return a random head; `start` fits it."""
        vocab, drafted = len(target.output), None
        if 0 < self.draft_tokens < vocab:
            drafted = frequent_tokens(corpus, vocab, self.draft_tokens)
        law_tokens = LawTokens.chosen(corpus, target, None, self.law_tokens)
        return EagleLearner(self, shape, target, source, drafted, law_tokens)

    def new_head(self, shape: ModelShape) -> EagleHead:
        """Return an untrained head."""
        return EagleHead(shape)

    def files(self, learner: Learner, shape: ModelShape) -> HeadFiles:
        """Return upstream's layout: the config of a Llama of one layer, and its tensors."""
        config = shape.llama_config(
            num_hidden_layers=1, bias=True, architectures=["EagleLlamaForCausalLM"]
        )
        tensors = dict(learner.module.state_dict())
        assert isinstance(learner, EagleLearner)
        if learner.drafted is not None:
            tensors[DRAFT_TOKENS] = learner.drafted
        return HeadFiles(config, tensors)


class EagleLearner(ChainLearner):
    """Trains an EAGLE head on given final states.

    `drafted` are the tokens that it drafts, the most frequent first, None for all. Distributions
    are compared among these, or among `law_tokens`.
    """

    head: EagleHead
    recipe: EagleRecipe

    def __init__(
        self,
        recipe: EagleRecipe,
        shape: ModelShape,
        target: TargetMatrices,
        source: FeatureSource,
        drafted: Tensor | None = None,
        law_tokens: LawTokens | None = None,
    ) -> None:
        self.recipe, self.head = recipe, recipe.new_head(shape)
        super().__init__(self.head, target, source, MEASURED_DEPTH)
        self.drafted = None if drafted is None else drafted.to(self.device)
        self._law_tokens = law_tokens

    def go_on_from(self, head: EarlierHead) -> None:
        """Take the head's weights and its draft tokens."""
        head.put_into(self.module, {})
        if head.draft_tokens is not None:
            self.drafted = head.draft_tokens.to(self.device)

    def groups(self) -> list[ParameterGroup]:
        """Return all parameters; a fitted `fc` learns more slowly."""
        if self.recipe.start != "fitted":
            return super().groups()
        fitted = ParameterGroup(list(self.head.fc.parameters()), _FITTED_RATE)
        return [fitted, ParameterGroup(list(self.head.layers.parameters()))]

    def start(self, corpus: TokenCorpus) -> None:
        """Let `fc` be the linear map that predicts best, by least squares over the states of texts.

        As many texts as determine so many numbers, drawn evenly; the layer adds nothing to the
        output of `fc` until it has learnt something.
        """
        if self.recipe.start != "fitted":
            return
        width = self.head.fc.out_features
        products = torch.zeros(2 * width + 1, 3 * width + 1, dtype=torch.float64)
        count, numbers = 0, list(corpus.training)
        random.Random(0).shuffle(numbers)
        for number in numbers:
            rows = self._pairs(corpus.batch([number]).to(self.device))
            count += len(rows)
            products += (rows[:, : 2 * width + 1].T @ rows).double().cpu()
            if count >= _ROWS_A_NUMBER * (2 * width + 1):
                break
        if count:
            self.head.fit(products)

    @torch.no_grad()
    def _pairs(self, batch: TokenBatch) -> Tensor:
        """Return rows [P, 3 h + 1]: embedding, state, 1, and the state to be predicted."""
        states = self._source.features(batch).final.float()
        marks = draft_marks(batch.learnt, 0)
        embeddings = rows_at(self._target.embedding[batch.ids].float(), marks, 1)
        ones = embeddings.new_ones(len(embeddings), 1)
        return torch.cat((embeddings, rows_at(states, marks), ones, rows_at(states, marks, 1)), 1)

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield the loss of states and tokens, of all steps if chains are trained."""
        states = self._source.features(batch).final
        uniform = 2 * torch.rand(states.shape, generator=noise, device=self.device) - 1
        # Only the head's inputs are shaken, not the states that it has to predict.
        shaken = states + self.recipe.noise * uniform
        # Only states that choose a token to be learnt are compared; chains refer to them by number.
        wanted = states[choosing(batch.learnt)]
        compared = self._compared(noise)
        laws = compared.law(wanted) if self.recipe.token_weight else None

        def loss(predicted: Tensor, numbers: Tensor) -> Tensor:
            """SmoothL1 + w CE over rows [n, h]."""
            distance = F.smooth_l1_loss(predicted.float(), wanted[numbers])
            if laws is None:
                return distance
            tokens = law_cross_entropy(compared.logits(predicted), laws[numbers])
            return distance + self.recipe.token_weight * tokens

        # The last state has no next token.
        yield from self.chain_losses(batch, shaken[:, :-1], loss, step)

    def _compared(self, noise: torch.Generator) -> TargetMatrices:
        """Return the target with the rows of its output matrix that this step compares.

        None are drawn if the others will never be drafted.
        """
        if self._law_tokens is None:
            return self._drafts
        return self._target.among(self._law_tokens.drawn(noise))

    @functools.cached_property
    def _drafts(self) -> TargetMatrices:
        """The target with the rows of its output matrix whose tokens can be drafted."""
        return self._target.among(self.drafted)

    def first_states(self, found: Features) -> Tensor:
        """Return the target's final states."""
        return found.final[:, :-1]

    def best(self, states: Tensor) -> Tensor:
        """Return the best tokens by the target's output matrix: of those that can be drafted."""
        best = best_tokens(self._drafts.logits(states))
        return best if self.drafted is None else self.drafted[best]
