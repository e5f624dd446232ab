"""Block drafters and their training on a frozen target: DFlash, with DSpark's heads if requested.

`fc` fuses inputs of some of the target's layers. A block is a token of the text, its anchor, and
masks; each layer lets it attend to the fused states of the text before the anchor and, in both
directions, to itself. Slot s predicts the token s + 1 places behind the anchor. In a training step
anchors are drawn at random in each text, and slot s weighs `slot_decay`^s: a wrong token ends a
draft, so that early slots count more (DFlash's weights are e^(-s / gamma)).

DSpark adds a Markov head, w2 w1[token before], to a slot's logits, and a confidence head, which
learns the chance 1 - TV(p, q) that a slot's token is accepted. With these the anchor's own place
predicts the first token; without, the first mask does.

References and names: z-lab/dflash, dflash/model.py; deepseek-ai/DeepSpec, modeling/dspark.
Embeddings are the target's, and without a draft vocabulary so is the output matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specrun.bindings.errors import OptionError
from specrun.train.data.corpus import TokenBatch, TokenCorpus, choice_numbers, draft_marks
from specrun.train.heads.draft_laws import DraftLaws, LawTokens, check_law_tokens, frequent_tokens
from specrun.train.heads.layers import FeedForward, RMSNorm, output_layer, rope_angles, rotate
from specrun.train.heads.learner import HeadLearner, best_tokens, muon_groups
from specrun.train.heads.run import HeadFiles, HeadRecipe
from specrun.train.target.hf_model import TargetMatrices
from specrun.train.target.shape import ModelShape
from specrun.train.target.states import Features, FeatureSource
from specrun.train.trainer.learner import Learner, LossPart, ParameterGroup
from specrun.train.trainer.settings import MatrixOptimizer, TrainingDefaults

_PAPER_RATE, _PAPER_WIDTH = 6e-4, 4096
_LARGEST_BLOCK = 256
_START_TEXTS = 16
_FIRST_SPREAD = 1.0  # of a random network's logits, their standard deviation

# == The network ===================================================================================


@dataclass(frozen=True, slots=True)
class BlockView:
    """The mask of blocks: `hidden` [B, 1, A, 1, T] marks the text from each anchor on.

    `text` and `block` are cosines and sines of positions, [T, d] and [B, 1, A n, d].
    """

    hidden: Tensor
    text: tuple[Tensor, Tensor]
    block: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, shape: ModelShape, anchors: Tensor, length: int, size: int) -> BlockView:
        """Return the view of blocks of `size` tokens at anchors [B, A] in texts of a length."""
        device = anchors.device
        every = torch.arange(length + size, device=device)
        cos, sin = rope_angles(every, shape.head_size, shape.rope_theta)
        places = (anchors[:, :, None] + torch.arange(size, device=device)).flatten(1)[:, None]
        hidden = torch.arange(length, device=device) >= anchors[:, :, None]
        text = cos[:length], sin[:length]
        return cls(hidden[:, None, :, None], text, (cos[places], sin[places]))


class BlockAttention(nn.Module):
    """Attention of blocks to the text before them and to themselves; Qwen 3's norms of heads."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        kv = shape.n_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape, shape.head_size)
        self.k_norm = RMSNorm(shape, shape.head_size)

    def forward(self, block: Tensor, text: Tensor, view: BlockView) -> Tensor:
        """Mix blocks [B, A, n, h] with each other's and the text's states [B, T, h]."""
        batch, anchors, size, _ = block.shape
        shape, length = self.shape, text.shape[1]
        rows = block.flatten(1, 2)
        query = self._heads(self.q_proj(rows), self.q_norm, view.block)
        own, own_values = self._keys_values(rows, view.block)
        keys, values = self._keys_values(text, view.text)

        def blocks(heads: Tensor) -> Tensor:
            return heads.reshape(batch, -1, anchors, size, heads.shape[-1])

        scores = blocks(query @ keys.mT).masked_fill(view.hidden, float("-inf"))
        scaled = torch.cat((scores, blocks(query) @ blocks(own).mT), -1).mul(
            1 / math.sqrt(shape.head_size)
        )
        # One softmax over [text, block]: two would each sum to 1.
        weights = scaled.softmax(-1, dtype=torch.float32).to(query.dtype)
        mixed = weights[..., :length].flatten(2, 3) @ values
        mixed = mixed + (weights[..., length:] @ blocks(own_values)).flatten(2, 3)
        joined = mixed.transpose(1, 2).reshape(batch, anchors, size, shape.hidden)
        found: Tensor = self.o_proj(joined.to(block.dtype))
        return found

    def _keys_values(self, states: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        group = self.shape.n_heads // self.shape.n_kv_heads
        keys = self._heads(self.k_proj(states), self.k_norm, angles)
        values = self._split(self.v_proj(states))
        return keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)

    def _heads(self, states: Tensor, norm: RMSNorm, angles: tuple[Tensor, Tensor]) -> Tensor:
        # Rotation is computed in float32, whatever the precision of products.
        return rotate(norm(self._split(states)), *angles).to(states.dtype)

    def _split(self, states: Tensor) -> Tensor:
        return states.reshape(*states.shape[:2], -1, self.shape.head_size).transpose(1, 2)


class BlockLayer(nn.Module):
    """Attention and feed-forward of blocks, each on a normed input and added to the states."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape)
        self.mlp = FeedForward(shape)

    def forward(self, block: Tensor, text: Tensor, view: BlockView) -> Tensor:
        """[B, A, n, h] to the same shape."""
        block = block + self.self_attn(self.input_layernorm(block), text, view)
        found: Tensor = block + self.mlp(self.post_attention_layernorm(block))
        return found


class MarkovBias(nn.Module):
    """DSpark's Markov head, which begins without a bias."""

    def __init__(self, vocab_size: int, drafted: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, before: Tensor, among: Tensor | None) -> Tensor:
        """Return the biases [n, drafted] after tokens [n], or those at some places."""
        weight = self.markov_w2.weight
        return F.linear(self.markov_w1(before), weight if among is None else weight[among])


class _Confidence(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class BlockHead(nn.Module):
    """The network of a block drafter for a target; see the module.

    `drafted` are the target's tokens that it drafts, rising, with an output matrix of their own
    that begins as the target's rows; None: all, by the target's `output`.
    """

    def __init__(
        self, recipe: DFlashRecipe, shape: ModelShape, output: Tensor, drafted: Tensor | None
    ) -> None:
        super().__init__()
        self._shape, self._first = shape, recipe.first
        hidden, size = shape.hidden, output.shape[0] if drafted is None else len(drafted)
        self.fc = nn.Linear(len(recipe.taps(shape)) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(shape)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(recipe.n_layers))
        self.norm = RMSNorm(shape)
        self.lm_head: nn.Linear | None = None
        if drafted is not None:
            self.lm_head = output_layer(output, drafted)
            self.register_buffer("d2t", drafted - torch.arange(size))
        self.markov_head: MarkovBias | None = None
        self.confidence_head: _Confidence | None = None
        if recipe.markov_rank:
            self.markov_head = MarkovBias(output.shape[0], size, recipe.markov_rank)
        if recipe.confidence:
            self.confidence_head = _Confidence(hidden + recipe.markov_rank)

    def forward(
        self, embeddings: Tensor, taps: Tensor, anchors: Tensor, *, recompute: bool = False
    ) -> Tensor:
        """Return the states [B, A, slots, h] of blocks, by their embeddings [B, A, n, h].

        `taps` are the inputs of the target's layers [B, T, k h], of which those from an anchor on
        are not read. With `recompute` a layer's insides are computed again for gradients.
        """
        text = self.hidden_norm(self.fc(taps))
        view = BlockView.of(self._shape, anchors, taps.shape[1], embeddings.shape[2])
        block = embeddings
        for layer in self.layers:
            if recompute and torch.is_grad_enabled():
                block = checkpoint(layer, block, text, view, use_reentrant=False)
            else:
                block = layer(block, text, view)
        states: Tensor = self.norm(block[:, :, self._first :])
        return states

    def logits(
        self, states: Tensor, before: Tensor, output: Tensor, among: Tensor | None = None
    ) -> Tensor:
        """Return the logits after states [n, h] and the tokens before, or those at some places."""
        weight = output if self.lm_head is None else self.lm_head.weight
        weight = weight if among is None else weight[among]
        # The target's matrix may be in bfloat16, where measures have states in float32.
        rows = F.linear(states.to(weight.dtype), weight).float()
        return rows if self.markov_head is None else rows + self.markov_head(before, among)

    def confidences(self, states: Tensor, before: Tensor) -> Tensor:
        """Return the logits [n] of the chance that the token after the one before is accepted."""
        assert self.confidence_head is not None
        if self.markov_head is not None:
            states = torch.cat((states, self.markov_head.markov_w1(before)), -1)
        found: Tensor = self.confidence_head.proj(states)[:, 0]
        return found


# == The recipe ====================================================================================


@dataclass(frozen=True, slots=True)
class DFlashRecipe(HeadRecipe):
    """Blocks of `block_size` tokens, the anchor included, through `n_layers` layers.

    In each text one anchor is drawn for every `anchor_every` places. `draft_tokens` (0: all) are
    the most frequent ones; distributions are compared among `law_tokens` (0: all). `layers` are
    those whose inputs are read, None for EAGLE-3's choice; `mask` is the token that masks are, None
    for the least frequent one. `markov_rank` and `confidence` are those of DSpark's heads.
    """

    block_size: int = 8
    n_layers: int = 2
    slot_decay: float = 0.78
    anchor_every: int = 4
    markov_rank: int = 0
    confidence: bool = False
    draft_tokens: int = 0
    law_tokens: int = 0
    layers: tuple[int, ...] | None = None
    mask: int | None = None
    optimizer: MatrixOptimizer = "adamw"

    kind = "dflash"
    smaller = "use fewer --layers or --draft-tokens, or a smaller target"

    def __post_init__(self) -> None:
        if not 2 <= self.block_size <= _LARGEST_BLOCK:
            few = f"a block of {self.block_size} tokens"
            raise OptionError(f"{few}: give 2 to {_LARGEST_BLOCK}, the anchor included")
        if self.n_layers < 1 or self.anchor_every < 1:
            raise OptionError("no layers or no anchors: give at least 1")
        if not 0 < self.slot_decay <= 1:
            decay = f"a slot decay of {self.slot_decay:g}"
            raise OptionError(f"{decay}: give a number above 0, at most 1")
        if self.confidence and not self.markov_rank:
            raise OptionError("a confidence head needs a Markov head: give its rank, too")
        check_law_tokens(self.law_tokens)

    @property
    def first(self) -> int:
        """The first place of a block that predicts a token."""
        return 0 if self.markov_rank else 1

    @property
    def n_slots(self) -> int:
        """How many tokens a block drafts."""
        return self.block_size - self.first

    def defaults(self, shape: ModelShape) -> TrainingDefaults:
        """Return DeepSpec's rate, scaled to the width."""
        rate = _PAPER_RATE * max(1.0, _PAPER_WIDTH / shape.hidden) ** 0.5
        return TrainingDefaults(rate, matrix_optimizer=self.optimizer)

    def taps(self, shape: ModelShape) -> tuple[int, ...]:
        """Return the layers whose inputs are read, checked against the target."""
        return shape.checked_taps(self.layers or shape.default_taps())

    def activation_bytes(
        self, shape: ModelShape, tokens: int, longest: int, *, recompute: bool
    ) -> int:
        """Return the bytes of blocks, their attention to the text, and of distributions."""
        drafted = min(self.draft_tokens or shape.vocab_size, shape.vocab_size)
        compared = min(self.law_tokens or drafted, drafted)
        rows = tokens * self.block_size / self.anchor_every
        layer = shape.layer_numbers + 3 * shape.n_heads * (longest + self.block_size)
        layers = layer + self.n_layers * 5 * shape.hidden if recompute else self.n_layers * layer
        blocks = rows * (layers + 5 * compared)
        return int(4 * (blocks + tokens * (compared + 2 * shape.vocab_size)))

    def learner(
        self, shape: ModelShape, target: TargetMatrices, source: FeatureSource, corpus: TokenCorpus
    ) -> HeadLearner:
        """Return a random block drafter, whose output matrix begins as the target's rows."""
        vocab, drafted = len(target.output), None
        if 0 < self.draft_tokens < vocab:
            drafted = frequent_tokens(corpus, vocab, self.draft_tokens).sort().values
        law_tokens = LawTokens.chosen(corpus, target, drafted, self.law_tokens)
        mask = self.mask
        if mask is None:  # if memory is estimated only shapes count
            mask = 0 if target.output.is_meta else rarest_token(corpus, target.embedding)
        return DFlashLearner(self, shape, target, source, mask, drafted, law_tokens)

    def files(self, learner: Learner, shape: ModelShape) -> HeadFiles:
        """Return the layout of z-lab, or with a Markov head DeepSpec's."""
        assert isinstance(learner, DFlashLearner)
        tensors = dict(learner.head.state_dict())
        taps = self.taps(shape)
        settings: dict[str, object] = {"mask_token_id": learner.mask}
        config = shape.llama_config(
            model_type="qwen3",
            architectures=["Qwen3DSparkModel" if self.markov_rank else "DFlashDraftModel"],
            num_hidden_layers=self.n_layers,
            head_dim=shape.head_size,
            attention_bias=False,
            tie_word_embeddings=False,
            block_size=self.block_size,
            num_target_layers=shape.n_layers,
            markov_rank=self.markov_rank,
            markov_head_type="vanilla",
            enable_confidence_head=self.confidence,
            confidence_head_with_markov=self.confidence,
            sample_from_anchor=bool(self.markov_rank),
            draft_vocab_size=len(tensors.get("d2t", learner.output)),
            mask_token_id=learner.mask,
        )
        if min(taps) > 0:  # these programs name layers by their outputs
            settings["target_layer_ids"] = [tap - 1 for tap in taps]
            config["target_layer_ids"] = settings["target_layer_ids"]
        else:
            config["aux_hidden_state_layer_ids"] = list(taps)
        return HeadFiles({**config, "dflash_config": settings}, tensors)


def rarest_token(corpus: TokenCorpus, embedding: Tensor) -> int:
    """Return the least frequent token that has an embedding, the last of equals."""
    counts = torch.zeros(len(embedding), dtype=torch.long)
    for sequence in corpus.sequences:
        ids = torch.from_numpy(sequence.ids.astype("int64"))
        counts += torch.bincount(ids, minlength=len(embedding))
    # A row of zeros, as of ids that stand for no token, would look at nothing in the first layer.
    empty = ~embedding.detach().any(-1).cpu()
    counts[empty] = torch.iinfo(torch.long).max
    return int(len(counts) - 1 - counts.flip(0).argmin())


# == Training ======================================================================================


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks in a batch: `anchors` [B, A], of which those `kept` [B, A] are real.

    `labels` [B, A, slots] are the positions of the tokens to predict, cut to the text, and `learnt`
    marks those that the model chose, like all before them in the block.
    """

    anchors: Tensor
    kept: Tensor
    labels: Tensor
    learnt: Tensor

    @classmethod
    def at(cls, chosen: Tensor, learnt: Tensor, n_slots: int) -> Blocks:
        """Return the blocks behind the anchors that `chosen` [B, T] marks, in reading order."""
        count = max(1, int(chosen.sum(-1).max()))
        # Marked places first, each group in order.
        anchors = torch.argsort((~chosen).to(torch.int8), dim=-1, stable=True)[:, :count]
        kept = chosen.gather(1, anchors)
        anchors = anchors.clamp(min=1)  # one that is not kept must see something, too
        labels = anchors[:, :, None] + 1 + torch.arange(n_slots, device=chosen.device)
        inside = labels < learnt.shape[1]
        labels = labels.clamp(max=learnt.shape[1] - 1)
        said = learnt.gather(1, labels.flatten(1)).view_as(labels) & inside & kept[:, :, None]
        return cls(anchors, kept, labels, said.cumprod(-1).bool())


class DFlashLearner(HeadLearner):
    """Trains a block drafter on given taps; `mask` is the token of its masks.

    `law_tokens` are the places in the draft vocabulary whose distributions are compared, None: all.
    """

    label = "slot"

    def __init__(
        self,
        recipe: DFlashRecipe,
        shape: ModelShape,
        target: TargetMatrices,
        source: FeatureSource,
        mask: int,
        drafted: Tensor | None = None,
        law_tokens: LawTokens | None = None,
    ) -> None:
        if not 0 <= mask < target.embedding.shape[0]:
            tokens = f"the target has {target.embedding.shape[0]} tokens"
            raise OptionError(f"token {mask} is to be the mask, and {tokens}")
        self.recipe, self.mask, self.output = recipe, mask, target.output
        self.head = BlockHead(recipe, shape, target.output, drafted)
        super().__init__(self.head, target, source, recipe.n_slots)
        self._drafted = None if drafted is None else drafted.to(self.device)
        self._laws = DraftLaws(target, self._drafted, law_tokens)

    def groups(self) -> list[ParameterGroup]:
        """Return all weights; if Muon trains those between states, these and the rest."""
        if self.recipe.optimizer == "adamw":
            return super().groups()
        return muon_groups(self.head, lambda name: name.startswith(("fc.", "layers.")))

    @torch.no_grad()
    def start(self, corpus: TokenCorpus) -> None:
        """Begin with states like those that the output matrix reads, number by number.

        States of a random network are smaller by a factor: distributions are to be nearly even at
        first.
        """
        squares, count = torch.zeros_like(self.head.norm.weight), 0
        for number in corpus.training[:_START_TEXTS]:
            final = self._source.features(corpus.batch([number]).to(self.device)).final[0]
            squares += final.float().square().sum(0)
            count += len(final)
        if count and torch.isfinite(squares).all() and squares.any():
            usual = (squares / count).sqrt()
            rows = self.output if self.head.lm_head is None else self.head.lm_head.weight
            spread = float((rows.float().square() @ usual.square()).mean().sqrt())
            self.head.norm.weight.copy_(usual * min(1.0, _FIRST_SPREAD / spread))

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield the loss of all slots behind anchors that are drawn anew."""
        found = self._source.features(batch)
        laws = self._laws.of(batch, found.final, noise)
        blocks = self._drawn(batch.learnt, noise)
        states = self._states(batch, found, blocks)
        numbers = _at(choice_numbers(batch.learnt), blocks.labels - 1)
        counted = blocks.learnt & laws.counted[numbers.clamp(min=0)]
        if not counted.any():
            return
        numbers, rows = numbers[counted], states[counted]
        before = _at(batch.ids, blocks.labels - 1)[counted]
        decays = self.recipe.slot_decay ** torch.arange(self.depth, device=self.device)
        weights = decays.expand_as(counted)[counted]

        def loss(rows: Tensor) -> Tensor:
            """[mean of weighted losses, mean of plain ones]."""
            logits = self.head.logits(rows, before, self.output, laws.among).float()
            law = laws.rows[numbers]
            each = -(law * logits.log_softmax(-1)).sum(-1)
            total = each
            if self.head.confidence_head is not None:
                accepted = torch.minimum(law, logits.detach().softmax(-1)).sum(-1)
                sure = self.head.confidences(rows.detach(), before).float()
                total = each + F.binary_cross_entropy_with_logits(sure, accepted, reduction="none")
            return torch.stack(((weights * total).sum() / weights.sum(), each.detach().mean()))

        if self.recompute:
            value, plain = checkpoint(loss, rows, use_reentrant=False)
        else:
            value, plain = loss(rows)
        yield LossPart("slots", value, float(plain.detach()))

    def _drawn(self, learnt: Tensor, noise: torch.Generator) -> Blocks:
        """Return blocks behind anchors drawn with `noise`, a share of those possible in a text."""
        possible = F.pad(draft_marks(learnt, 0), (1, learnt.shape[1]))[:, : learnt.shape[1]]
        keys = torch.rand(learnt.shape, generator=noise, device=learnt.device)
        ranks = keys.masked_fill(~possible, 2.0).argsort(-1).argsort(-1)
        most = -(-possible.sum(-1, keepdim=True) // self.recipe.anchor_every)
        return Blocks.at(possible & (ranks < most), learnt, self.depth)

    def _states(self, batch: TokenBatch, found: Features, blocks: Blocks) -> Tensor:
        """Return the states [B, A, slots, h] of blocks."""
        assert found.taps is not None
        embedding, size = self._target.embedding, self.recipe.block_size
        tokens = batch.ids.gather(1, blocks.anchors)[:, :, None]
        tokens = F.pad(tokens, (0, size - 1), value=self.mask)
        dtype = self.head.norm.weight.dtype
        given = embedding[tokens].to(dtype), found.taps.to(dtype), blocks.anchors
        states: Tensor = self.head(*given, recompute=self.recompute)
        return states

    def drafts(self, batch: TokenBatch, found: Features, start: Tensor) -> Iterator[Tensor]:
        """Yield the best tokens of each slot behind the text's own tokens."""
        # A draft at mark p is made behind the token p + 1.
        chosen = F.pad(start, (1, batch.ids.shape[1]))[:, : batch.ids.shape[1]]
        blocks = Blocks.at(chosen, batch.learnt, self.depth)
        states = self._states(batch, found, blocks)
        before = _at(batch.ids, blocks.labels - 1)
        for slot in range(self.depth):
            rows = states[:, :, slot][blocks.kept], before[:, :, slot][blocks.kept]
            best = best_tokens(self.head.logits(*rows, self.output))
            yield best if self._drafted is None else self._drafted[best]


def _at(rows: Tensor, positions: Tensor) -> Tensor:
    """Return the entries of `rows` [B, T] at positions [B, A, slots]."""
    return rows.gather(1, positions.flatten(1)).view_as(positions)
