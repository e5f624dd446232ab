"""EAGLE-3's head (Li et al. 2025) and its training on a frozen target: training-time test.

The head reads `fc` of three layers' inputs at its first step and its own states at every later one:
chains of `steps` steps below each position, each seeing the text before it and its own earlier
steps. There is no loss on states: step s adds decay^s CE(p, p'), where p is the target's
distribution among the tokens that can be drafted; positions count if the target's first choice
is among them. The draft vocabulary are the most frequent tokens of the training texts.
Distributions may be compared among some of it (`law_tokens`).

Reference and names: SafeAILab/EAGLE, eagle/traineagle3/cnets.py: `fc`, `midlayer`, `norm`,
`lm_head`. `d2t` are offsets (target token = draft token + d2t), `t2d` marks the target's tokens
that can be drafted. The token embedding is the target's and no part of the head.

Layers' inputs may be of any size: a thousand in one model, a hundredth in another. Norms hide that
from all but the sums, where a layer whose weights start small would add next to nothing to states
of a thousand, or drown small ones. So the layer's sums are multiplied by `scale`, the size of the
inputs, and everything learns as it would at size one; `upstream_tensors` has the factor in the
weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specrun.bindings.errors import ModelError, OptionError
from specrun.train.data.corpus import TokenBatch, TokenCorpus
from specrun.train.heads.chains import MEASURED_DEPTH, ChainLearner, ChainRecipe
from specrun.train.heads.draft_laws import DraftLaws, LawTokens, check_law_tokens, frequent_tokens
from specrun.train.heads.earlier_head import EarlierHead
from specrun.train.heads.layers import (
    Attention,
    FeedForward,
    KeysValues,
    RMSNorm,
    added_at,
    output_layer,
)
from specrun.train.heads.learner import HeadLearner, best_tokens, law_cross_entropy, muon_groups
from specrun.train.heads.run import HeadFiles
from specrun.train.target.hf_model import TargetMatrices
from specrun.train.target.shape import ModelShape
from specrun.train.target.states import Features, FeatureSource
from specrun.train.trainer.learner import Learner, LossPart, ParameterGroup
from specrun.train.trainer.settings import MatrixOptimizer, TrainingDefaults

N_TAPS = 3
# Linear without a bias, and last before the layer's sums: a factor can go into these weights.
_SCALED = ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight")
_SCALE_TEXTS = 16


class _MiddleLayer(nn.Module):
    scale: Tensor

    def __init__(self, shape: ModelShape, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        self.hidden_norm = RMSNorm(shape)
        self.input_layernorm = RMSNorm(shape)
        self.self_attn = Attention(shape, 2 * shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape)
        self.mlp = FeedForward(shape)

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        earlier: Sequence[KeysValues],
        wanted: Tensor | None,
    ) -> tuple[Tensor, KeysValues]:
        # Embeddings first, each half under a norm of its own: upstream's order.
        pair = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(states)), -1)
        mixed, own = self.self_attn(pair, earlier)

        def fed(rows: Tensor) -> Tensor:
            return self.scale * self.mlp(self.post_attention_layernorm(rows))  # type: ignore[no-any-return]

        return added_at(wanted, states + self.scale * mixed, fed), own


class Eagle3Head(nn.Module):
    """Predicts tokens of a draft vocabulary from three layers' inputs, then from its own states.

    `draft_tokens` are the target's ids that can be drafted, rising; `output` [vocab, h] is the
    target's output matrix, whose rows the head's own starts from. `scale` is the usual root mean
    square of the layers' inputs.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, shape: ModelShape, draft_tokens: Tensor, output: Tensor, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.fc = nn.Linear(N_TAPS * shape.hidden, shape.hidden, bias=False)
        self.midlayer = _MiddleLayer(shape, scale)
        self.norm = RMSNorm(shape)
        self.lm_head = output_layer(output, draft_tokens)
        self.register_buffer("d2t", draft_tokens - torch.arange(len(draft_tokens)))
        marks = torch.zeros(output.shape[0], dtype=torch.bool)
        marks[draft_tokens] = True
        self.register_buffer("t2d", marks)

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        earlier: Sequence[KeysValues] = (),
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Return the next states and this step's keys, as of `ChainHead`; step 0 reads `fc`."""
        found: tuple[Tensor, KeysValues] = self.midlayer(embeddings, states, earlier, wanted)
        return found

    def logits(self, states: Tensor, among: Tensor | None = None) -> Tensor:
        """Return the logits of the draft vocabulary after `states`, or of some places in it."""
        if among is None:
            found: Tensor = self.lm_head(self.norm(states))
            return found
        return F.linear(self.norm(states), self.lm_head.weight[among])

    @property
    def draft_tokens(self) -> Tensor:
        """The target's ids of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def upstream_tensors(self) -> dict[str, Tensor]:
        """Return upstream's tensors, from which it computes the same states without a scale."""
        tensors = self.state_dict()
        scale = tensors.pop("midlayer.scale")
        for name in _SCALED:
            tensors[name] = scale * tensors[name]
        return dict(tensors)


@dataclass(frozen=True, slots=True)
class Eagle3Recipe(ChainRecipe):
    """At most `draft_tokens` tokens can be drafted.

    Distributions are compared among `law_tokens` of them, 0 for all: three quarters are the most
    frequent ones, the others drawn anew at each step. `layers` are the three layers whose inputs
    are read, None for EAGLE-3's own choice. `optimizer` trains the matrices between states; beside
    Muon, AdamW trains the output matrix and the norms, at half of its rate.
    """

    steps: int = 7
    step_decay: float = 0.8
    draft_tokens: int = 32000
    law_tokens: int = 0
    layers: tuple[int, ...] | None = None
    optimizer: MatrixOptimizer = "adamw"

    kind = "eagle3"
    smaller = "use fewer --draft-tokens, or a smaller target"
    paper_rate = 5e-5

    def __post_init__(self) -> None:
        ChainRecipe.__post_init__(self)  # super() does not work in a class with slots
        if self.draft_tokens < 1:
            raise OptionError(f"{self.draft_tokens} draft tokens: give at least 1")
        check_law_tokens(self.law_tokens)
        if self.layers is not None and len(self.layers) != N_TAPS:
            raise OptionError(f"{len(self.layers)} layers to read: EAGLE-3 reads {N_TAPS}")

    def defaults(self, shape: ModelShape) -> TrainingDefaults:
        """Return the paper's settings for chains, by the chosen optimizer."""
        usual = ChainRecipe.defaults(self, shape)  # super() does not work in a class with slots
        return replace(usual, matrix_optimizer=self.optimizer)

    def taps(self, shape: ModelShape) -> tuple[int, ...]:
        """Return the three layers, checked against the target."""
        return shape.checked_taps(self.layers or shape.default_taps())

    def going_on(self, head: EarlierHead) -> Eagle3Recipe:
        """Return the recipe with the layers and as many draft tokens as the head's, all compared.

        Its file does not contain which of these are the most frequent.
        """
        if self.layers not in (None, head.taps):
            raise OptionError(
                f"layers {self.layers} are to be read, and {head.path} reads {head.taps}"
            )
        count = len(head.weights["lm_head.weight"])
        return replace(self, layers=head.taps, draft_tokens=count, law_tokens=0)

    def activation_bytes(
        self, shape: ModelShape, tokens: int, longest: int, *, recompute: bool
    ) -> int:
        """Return the bytes of chains, and of the target's logits and distributions."""
        drafted = min(self.law_tokens or self.draft_tokens, self.draft_tokens, shape.vocab_size)
        chains = self.chain_numbers(shape, drafted, longest, recompute=recompute)
        return 4 * tokens * (chains + drafted + 2 * shape.vocab_size)

    def learner(
        self, shape: ModelShape, target: TargetMatrices, source: FeatureSource, corpus: TokenCorpus
    ) -> HeadLearner:
        """Return a head whose output matrix starts as the target's rows."""
        drafted = frequent_tokens(corpus, len(target.output), self.draft_tokens).sort().values
        law_tokens = LawTokens.chosen(corpus, target, drafted, self.law_tokens)
        # When memory is estimated there are no states to measure, and only shapes count.
        scale = 1.0 if target.output.is_meta else tap_scale(source, corpus, target.output.device)
        return Eagle3Learner(self, shape, target, source, drafted, scale, law_tokens)

    def files(self, learner: Learner, shape: ModelShape) -> HeadFiles:
        """Return upstream's layout; the taps stand in the config."""
        assert isinstance(learner, Eagle3Learner)
        tensors = learner.head.upstream_tensors()
        layers = list(self.taps(shape))
        config = shape.llama_config(
            num_hidden_layers=1,
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=len(tensors["d2t"]),
            target_hidden_size=shape.hidden,
            attention_bias=False,
            eagle_aux_hidden_state_layer_ids=layers,
        )
        if min(layers) > 0:
            # Here SGLang names layers by their outputs; vLLM and llama.cpp, above, by their inputs.
            outputs = [layer - 1 for layer in layers]
            name = "eagle_aux_hidden_state_layer_ids"
            config["eagle_config"] = {name: outputs, "use_aux_hidden_state": True}
        return HeadFiles(config, tensors)


def tap_scale(source: FeatureSource, corpus: TokenCorpus, device: torch.device) -> float:
    """Return the usual size of the tapped layers' inputs in the first training texts.

    That is the median over positions of their root mean square: the first position of a text may
    have states a thousand times larger (attention sinks), and the layer adds to the others, too.
    """
    sizes = []
    for number in corpus.training[:_SCALE_TEXTS]:  # one by one: together they may exceed a batch
        taps = source.features(corpus.batch([number]).to(device)).taps
        assert taps is not None
        sizes.append(taps.float().square().mean(-1).sqrt().flatten())
    size = float(torch.cat(sizes).median())
    if not 0 < size < math.inf:
        inputs = f"the inputs of layers {source.taps}"
        raise ModelError(f"{inputs} have a usual size of {size}: no head can learn from them")
    return size


class Eagle3Learner(ChainLearner):
    """Trains an EAGLE-3 head on given taps, which are of the size `scale`.

    `law_tokens` are the places in the draft vocabulary whose distributions are compared, None: all.
    """

    recipe: Eagle3Recipe
    head: Eagle3Head

    def __init__(
        self,
        recipe: Eagle3Recipe,
        shape: ModelShape,
        target: TargetMatrices,
        source: FeatureSource,
        draft_tokens: Tensor,
        scale: float = 1.0,
        law_tokens: LawTokens | None = None,
    ) -> None:
        self.recipe, self._law_tokens = recipe, law_tokens
        self.head = Eagle3Head(shape, draft_tokens, target.output, scale)
        super().__init__(self.head, target, source, MEASURED_DEPTH)

    def groups(self) -> list[ParameterGroup]:
        """Return all weights; if Muon trains those between states, these and the rest."""
        if self.recipe.optimizer == "adamw":
            return super().groups()
        return muon_groups(self.head, lambda name: name != "lm_head.weight")

    def go_on_from(self, head: EarlierHead) -> None:
        """Take the head's weights and its draft tokens; how large inputs are is the target's."""
        own = self.head.state_dict()
        tokens = head.draft_tokens
        if tokens is None:
            tokens = torch.arange(len(own["t2d"]))
        marks = torch.zeros_like(own["t2d"])
        marks[tokens.to(marks.device)] = True
        scale = own["midlayer.scale"]
        weights = {**head.weights}
        for name in _SCALED:  # the file has the factor in its weights
            weights[name] = weights[name] / scale.cpu()
        offsets = tokens - torch.arange(len(tokens))
        known = {"d2t": offsets, "t2d": marks, "midlayer.scale": scale}
        replace(head, weights=weights).put_into(self.head, known)

    @functools.cached_property
    def _laws(self) -> DraftLaws:
        """The distributions to learn, of the head's draft tokens (perhaps an earlier head's)."""
        return DraftLaws(self._target, self.head.draft_tokens, self._law_tokens)

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield the sum over all steps: later ones depend on the states of earlier ones."""
        found = self._source.features(batch)
        laws = self._laws.of(batch, found.final, noise)

        def loss(predicted: Tensor, numbers: Tensor) -> Tensor:
            """The mean cross-entropy over rows [n, h], zero if the choice cannot be drafted."""
            counted = laws.counted[numbers]
            # A sum times 0, as a number alone has no gradient.
            if not counted.any():
                return 0.0 * predicted.sum()
            # The mean is over all rows: those that do not count add 0 to it.
            share = float(counted.float().mean())
            shown = self.head.logits(predicted[counted], laws.among)
            return share * law_cross_entropy(shown, laws.rows[numbers[counted]])

        yield from self.chain_losses(batch, self.first_states(found), loss, step)

    def first_states(self, found: Features) -> Tensor:
        """Return `fc` of the taps."""
        assert found.taps is not None
        states: Tensor = self.head.fc(found.taps[:, :-1])
        return states

    def best(self, states: Tensor) -> Tensor:
        """Return the target's ids of the best draft tokens: others are missed."""
        return self.head.draft_tokens[best_tokens(self.head.logits(states))]
