"""Trains EAGLE-3's head on a frozen target (Li et al. 2025): training-time test.

The head reads `fc` of three layers' inputs at its first step and its own states at every later one:
chains of `steps` steps below each position, each seeing the text before it and its own earlier
steps. There is no loss on states: step s adds decay^s CE(p, p'), where p is the target's law among
the tokens that can be drafted; positions count where the target's first choice is among them. The
draft vocabulary is the tokens most often said in the training texts. Reference: SafeAILab/EAGLE,
eagle/traineagle3/cnets.py.

EAGLE-3's head (Li et al. 2025), named as SafeAILab/EAGLE's main `cnets`: `fc`, `midlayer`, `norm`,
`lm_head`.

`d2t` are offsets (target token = draft token + d2t), `t2d` marks the target's tokens that can be
drafted. The token embedding is the target's and no part of the head.

Layers' inputs may be of any size: a thousand in one model, a hundredth in another. Norms hide that
from all but the sums, where a layer whose weights start small would add next to nothing to states
of a thousand, or drown small ones. So what the layer adds is multiplied by `scale`, the size of the
inputs, and everything learns as it would at size one; `upstream_tensors` has the factor in the
weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specrun.bindings.errors import ModelError, OptionError
from specrun.train.data.token_corpus import TokenBatch, TokenCorpus, choosing, draft_marks
from specrun.train.family.llama import RMSNorm
from specrun.train.heads.agreement import Agreement, best_tokens, shifted
from specrun.train.heads.attention import Attention, FeedForward, KeysValues, added_at
from specrun.train.heads.eagle import MEASURED_DEPTH, llama_config
from specrun.train.heads.recipe import HeadFiles, HeadRecipe, law_cross_entropy
from specrun.train.heads.unrolled import chain_loss, chain_states
from specrun.train.target.features import FeatureSource, TargetMatrices
from specrun.train.target.target_shape import TargetShape
from specrun.train.trainer.learner import Learner, LossPart
from specrun.train.trainer.run import TrainingDefaults

N_TAPS = 3


class _MiddleLayer(nn.Module):
    scale: Tensor

    def __init__(self, shape: TargetShape, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        self.hidden_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        earlier: Sequence[KeysValues],
        wanted: Tensor | None,
    ) -> tuple[Tensor, KeysValues]:
        pair = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(states)), -1)
        mixed, own = self.self_attn(pair, earlier)
        whole = states + self.scale * mixed
        return added_at(
            wanted, whole, lambda rows: self.scale * self.mlp(self.post_attention_layernorm(rows))
        ), own


class Eagle3Head(nn.Module):
    """Predicts tokens of a draft vocabulary from three layers' inputs, then from its own states.

    `draft_tokens` are the target's ids that can be drafted, rising; `output` [vocab, h] is the
    target's output matrix, whose rows the head's own starts from. `scale` is the usual root mean
    square of the layers' inputs.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, shape: TargetShape, draft_tokens: Tensor, output: Tensor, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.fc = nn.Linear(N_TAPS * shape.hidden, shape.hidden, bias=False)
        self.midlayer = _MiddleLayer(shape, scale)
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, len(draft_tokens), bias=False)
        self.lm_head.weight.data.copy_(output.detach()[draft_tokens.to(output.device)].float())
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
        """Return the states [B, T, h] after the pairs (state, embedding of the token after it), and
        their keys.

        Step 0 reads `fc` of the taps as its states, later ones what the step before returned. Only
        states at `wanted` [B, T] are whole, where it is given.
        """
        found: tuple[Tensor, KeysValues] = self.midlayer(embeddings, states, earlier, wanted)
        return found

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of the draft vocabulary after `states`."""
        found: Tensor = self.lm_head(self.norm(states))
        return found

    @property
    def draft_tokens(self) -> Tensor:
        """The target's ids of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def upstream_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that upstream's head has; it computes the same states from them
        without a scale."""
        tensors = self.state_dict()
        scale = tensors.pop("midlayer.scale")
        for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
            tensors[name] = scale * tensors[name]
        return dict(tensors)


_PAPER_WIDTH, _PAPER_RATE = 4096, 5e-5
_SCALE_TEXTS = 16


@dataclass(frozen=True, slots=True)
class Eagle3Recipe(HeadRecipe):
    """`steps` chained steps, weighing `step_decay` ** s; `draft_tokens` tokens at most can be
    drafted.

    `layers` are the three layers whose inputs are read, None for EAGLE-3's own choice.
    """

    steps: int = 7
    step_decay: float = 0.8
    draft_tokens: int = 32000
    layers: tuple[int, ...] | None = None

    kind = "eagle3"

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 16:
            raise OptionError(f"{self.steps} steps: give 1 to 16")
        if not 0 < self.step_decay <= 1:
            raise OptionError(
                f"a step decay of {self.step_decay:g}: give a number above 0, at most 1"
            )
        if self.draft_tokens < 1:
            raise OptionError(f"{self.draft_tokens} draft tokens: give at least 1")
        if self.layers is not None and len(self.layers) != N_TAPS:
            raise OptionError(f"{len(self.layers)} layers to read: EAGLE-3 reads {N_TAPS}")

    def taps(self, shape: TargetShape) -> tuple[int, ...]:
        """Return the three layers, checked against the target."""
        chosen = self.layers or shape.default_taps()
        for layer in chosen:
            if not 0 <= layer < shape.n_layers:
                raise OptionError(
                    f"layer {layer} is to be read, and the target has layers 0 to "
                    f"{shape.n_layers - 1}"
                )
        return chosen

    def defaults(self, shape: TargetShape) -> TrainingDefaults:
        """Return the reference's settings, with a rate for narrower states."""
        return TrainingDefaults(learning_rate=_PAPER_RATE * max(1.0, _PAPER_WIDTH / shape.hidden))

    def activation_bytes(
        self, shape: TargetShape, vocab_size: int, tokens: int, longest: int, *, recompute: bool
    ) -> int:
        """Return what chains keep, their attention to the text included, and the target's logits
        and laws."""
        drafted = min(self.draft_tokens, vocab_size)
        step = (
            4 * drafted + 24 * shape.hidden + 6 * shape.feed_forward + 3 * shape.n_heads * longest
        )
        whole = step + self.steps * 5 * shape.hidden if recompute else self.steps * step
        return 4 * tokens * (whole + drafted + 2 * vocab_size)

    @property
    def smaller(self) -> str:
        """A smaller output matrix."""
        return "use fewer --draft-tokens, or a smaller target"

    def learner(
        self, shape: TargetShape, target: TargetMatrices, source: FeatureSource, corpus: TokenCorpus
    ) -> Learner:
        """Return a head whose output matrix starts as the target's rows."""
        vocab_size = draft_vocabulary(corpus, target.output.shape[0], self.draft_tokens)
        scale = 1.0 if target.output.is_meta else tap_scale(source, corpus, target.output.device)
        return Eagle3Learner(self, shape, target, source, vocab_size, scale)

    def files(self, learner: Learner, shape: TargetShape, vocab_size: int) -> HeadFiles:
        """Return upstream's layout; the taps stand in the config."""
        assert isinstance(learner, Eagle3Learner)
        tensors = learner.head.upstream_tensors()
        layers = list(self.taps(shape))
        config = {
            **llama_config(shape, vocab_size),
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(tensors["d2t"]),
            "target_hidden_size": shape.hidden,
            "attention_bias": False,
            "eagle_aux_hidden_state_layer_ids": layers,
        }
        if min(layers) > 0:
            # There SGLang names layers by their outputs; vLLM and llama.cpp, at the top, by their
            # inputs.
            outputs = [layer - 1 for layer in layers]
            config["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": outputs,
                "use_aux_hidden_state": True,
            }
        return HeadFiles(config, tensors)


def draft_vocabulary(corpus: TokenCorpus, vocab_size: int, most: int) -> Tensor:
    """Return the ids, rising, of the `most` tokens said most often in the training texts; ties go
    to the lower id.

    Where fewer were said, the lowest other ids fill up: they cost little and can be learnt later.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for number in corpus.training:
        sequence = corpus.sequences[number]
        counts += torch.bincount(
            torch.from_numpy(sequence.ids[sequence.learnt].astype("int64")), minlength=vocab_size
        )
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:most].sort().values


def tap_scale(source: FeatureSource, corpus: TokenCorpus, device: torch.device) -> float:
    """Return the usual size of the tapped layers' inputs in the first training texts.

    That is the median over positions of their root mean square: the first position of a text may
    have states a thousand times larger (attention sinks), and the layer adds to the others, too.
    """
    sizes = []
    for number in corpus.training[
        :_SCALE_TEXTS
    ]:  # one by one: all together may be more than a batch
        taps = source.features(corpus.batch([number]).to(device)).taps
        assert taps is not None
        sizes.append(taps.float().square().mean(-1).sqrt().flatten())
    size = float(torch.cat(sizes).median())
    if not 0 < size < math.inf:
        raise ModelError(
            f"the inputs of layers {source.taps} have a usual size of {size}: no head can learn "
            "from them"
        )
    return size


class Eagle3Learner(Learner):
    """A head over given taps, which are of the size `scale`; the token embedding is the target's
    and stays as it is."""

    def __init__(
        self,
        recipe: Eagle3Recipe,
        shape: TargetShape,
        target: TargetMatrices,
        source: FeatureSource,
        draft_tokens: Tensor,
        scale: float = 1.0,
    ) -> None:
        self.recipe = recipe
        self.device = target.output.device
        self.head = Eagle3Head(shape, draft_tokens, target.output, scale).to(self.device)
        self.module = self.head
        self._target, self._source = target, source

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield the sum over all steps: later ones depend on the states of earlier ones."""
        found = self._source.features(batch)
        assert found.taps is not None
        drafted, laws = self._wanted(found.final[choosing(batch.learnt)])

        def loss(predicted: Tensor, numbers: Tensor) -> Tensor:
            """The mean cross-entropy over rows [n, h], zero where the target's first choice cannot
            be drafted."""
            counted = drafted[numbers]
            if not counted.any():
                return 0.0 * predicted.sum()
            share = float(counted.float().mean())
            return share * law_cross_entropy(
                self.head.logits(predicted[counted]), laws[numbers[counted]]
            )

        chains = chain_states(
            self.head,
            self._target.embedding,
            batch.ids,
            self.head.fc(found.taps[:, :-1]),
            self.recipe.steps,
            learnt=batch.learnt,
            recompute=self.recompute,
        )
        whole = chain_loss(
            chains, batch.learnt, loss, self.recipe.step_decay, recompute=self.recompute
        )
        if whole is not None:
            yield whole

    def _wanted(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether the target's first choices [n] can be drafted, and its laws
        [n, draft vocab] among those."""
        logits = self._target.logits(states)
        return self.head.t2d[logits.argmax(-1)], logits[:, self.head.draft_tokens].softmax(-1)

    def measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Return how often chains agree with the target by depth; tokens that cannot be drafted
        count as missed."""
        agreement = Agreement(MEASURED_DEPTH, "depth")
        tokens = self.head.draft_tokens
        for batch in batches:
            found = self._source.features(batch)
            if batch.ids.shape[1] < 2 or found.taps is None:
                continue
            start = draft_marks(batch.learnt, 0)
            drafted, chosen, counted = [], [], []
            states = self.head.fc(found.taps[:, :-1])
            chains = chain_states(
                self.head, self._target.embedding, batch.ids, states, MEASURED_DEPTH
            )
            for depth, predicted in enumerate(chains):
                drafted.append(
                    tokens[best_tokens(self.head.logits(predicted[:, : start.shape[1]][start]))]
                )
                ahead = shifted(found.final, depth + 1, start.shape[1])
                chosen.append(self._target.logits(ahead[start]).argmax(-1))
                counted.append(shifted(draft_marks(batch.learnt, depth), 0, start.shape[1])[start])
            agreement.add(drafted, chosen, counted)
        return agreement.measures()
