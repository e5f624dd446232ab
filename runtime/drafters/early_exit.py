"""Early exit: the first layers of the target draft for all of it, with its own weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.graph import Graph, GraphBuilder, Rope
from specrun.bindings.ggml.tensor import I32, Tensor
from specrun.bindings.ggml.weights import TargetTensors, device_for_heads
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment
from specrun.runtime.drafters.growing.drafter import GrowingDrafter
from specrun.runtime.drafters.growing.source import NodeRows, Source
from specrun.runtime.drafters.tree_options import ChainOptions
from specrun.runtime.heads import FloatRows
from specrun.runtime.heads.graphs import (
    AttentionSizes,
    KeyValueCache,
    LayerWeights,
    LengthGraphs,
    NativeShare,
    decoder_layer,
    fill_places,
    filled_width,
)
from specrun.runtime.language import Expression, options_of
from specrun.runtime.planning.theory import multiplied
from specrun.runtime.round.drafter import DrafterWeights, DraftRequest
from specrun.runtime.round.text import common_prefix

# == The first layers as a ggml graph over the target's own tensors ================================
#
# The output of layer K - 1, normed by the output norm and multiplied by the output matrix, is
# the early exit's distribution of the next token (the logit lens; LayerSkip, PPD). Layer l reads
# the input of layer l alone, so the states of a text are the target's own, and so would be its keys
# and values: they are kept here once more, for these layers, in F32.
#
# For plain Llama layers with attention heads of n_embd / n_heads numbers: the architectures `llama`
# and `qwen2`, without experts and without other scalings of rotary positions than linear ones.


_NEOX = {"llama": False, "qwen2": True}
"""The architectures, and whether their rotary positions pair the halves of a head."""

_PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_PIECE = 64  # tokens of a text in one evaluation
_OPERATIONS = 60  # of a layer


class ExitLayers:
    """The first `n_layers` of a target. Close it between its cells and the target.

    Raises UnsupportedModelError for a target whose layers these graphs do not compute, OptionError
    for a number of layers that it does not have.
    """

    def __init__(self, target: Model, n_layers: int, *, n_threads: int = 0) -> None:
        if not 1 <= n_layers <= target.n_layer:
            has = f"{target.path} has {target.n_layer} layers"
            raise OptionError(f"an exit after {n_layers} layers: {has}")
        self.attention, self._norm_eps = _sizes(target)
        self.n_layers, self.vocab_size = n_layers, target.vocabulary.size
        sizes = {tensor.name: tensor.shape for tensor in target.header.tensors}
        self._known = set(sizes)
        prefixes = tuple(f"blk.{layer}." for layer in range(n_layers))
        layers = (tensor for tensor in target.header.tensors if tensor.name.startswith(prefixes))
        counted = round(multiplied(target.header, layers))
        self.evaluated_params = counted + target.n_embd * self.vocab_size
        self.device = ComputeDevice(device_for_heads(target), n_threads=n_threads)
        self._tensors = TargetTensors(target, self.device)
        try:
            for prefix in prefixes:
                self._require(prefix)
            self.output = self._tensors.output()
        except BaseException:
            self.close()
            raise

    def _require(self, prefix: str) -> None:
        for name in _PROJECTIONS:
            if f"{prefix}{name}.weight" not in self._known:
                problem = f"{prefix}{name}.weight is not among its tensors"
                raise UnsupportedModelError(f"the target's layers are no plain Llama's: {problem}")
            self._tensors.named(f"{prefix}{name}.weight")

    def cells(self, n_cells: int) -> ExitCells:
        """Return room for `n_cells` tokens of one conversation."""
        return ExitCells(self, n_cells)

    def build(self, cache: KeyValueCache, length: int, n: int) -> Graph:
        """Return the graph for n tokens that attend to the first `length` cells."""
        eps, named = self._norm_eps, self._find
        with closing(GraphBuilder(self.device, _OPERATIONS * (self.n_layers + 1))) as builder:
            tokens = builder.input("tokens", I32, n)
            places = cache.places(builder, n, length)
            factors = named("rope_freqs.weight")
            state = builder.get_rows(self._tensors.embedding(), tokens)
            for layer in range(self.n_layers):
                weights = LayerWeights(named, f"blk.{layer}.")
                x = builder.rms_norm(state, weights["attn_norm.weight"], eps)
                state = decoder_layer(builder, weights, x, state, places, eps, factors, layer)
            normed = builder.rms_norm(state, self._tensors.named("output_norm.weight"), eps)
            builder.output("logits", builder.mul_mat(self.output, normed))
            return builder.build()

    def _find(self, name: str) -> Tensor | None:
        return self._tensors.named(name) if name in self._known else None

    def close(self) -> None:
        """Free the device; again does nothing."""
        self._tensors.close()
        self.device.close()


class ExitCells:
    """One conversation's keys and values of the first layers: cell i holds the text's token i.

    `tokens` are those that the cells hold. Close it before the layers.
    """

    def __init__(self, layers: ExitLayers, n_cells: int) -> None:
        self._layers, self.tokens = layers, list[int]()
        self._native = NativeShare(layers.device)
        self._cache = KeyValueCache(layers.device, layers.attention, n_cells, layers.n_layers)
        self._graphs = LengthGraphs(functools.partial(layers.build, self._cache))
        self.n_cells = self._cache.n_cells

    @property
    def native_seconds(self) -> float:
        """Time in this conversation's graphs."""
        return self._native.seconds

    def rows(self, tokens: Sequence[int]) -> FloatRows:
        """Evaluate tokens [n] that follow those in the cells; return their logits [n, vocab].

        They are a view, which dies with the next evaluation.
        """
        n, start = len(tokens), len(self.tokens)
        if start + n > self.n_cells:
            raise OptionError(f"an early exit with {self.n_cells} cells cannot hold {start + n}")
        if min(tokens) < 0 or max(tokens) >= self._layers.vocab_size:
            raise OptionError(f"a token outside the {self._layers.vocab_size} of the target")
        graph = self._graphs.get(self._cache.length(start + n), filled_width(n))
        steps, sees = range(start, start + n), np.tri(n, dtype=np.bool_)
        fill_places(graph, tokens, None, (steps, steps, start, sees), self._cache.spare)
        with self._native:
            graph.compute()
        # Last, so that an interrupt anywhere above leaves a list that is true.
        self.tokens += tokens
        logits: FloatRows = graph.peek("logits")[:n].astype(np.float32, copy=False)
        return logits

    def after(self, text: Sequence[int], shared: int) -> FloatRows:
        """Return the logits [vocab] after a text whose first `shared` tokens the cells hold."""
        del self.tokens[min(shared, len(text) - 1) :]
        row: FloatRows | None = None
        while len(self.tokens) < len(text):
            start = len(self.tokens)
            row = self.rows(list(text[start : start + _PIECE]))[-1]
        assert row is not None
        return row

    def close(self) -> None:
        """Free graphs and cells; again does nothing."""
        self.tokens.clear()
        self._graphs.close()
        self._cache.close()


def _sizes(target: Model) -> tuple[AttentionSizes, float]:
    """Return the attention of a target's layers, and the epsilon of its norms."""
    name, metadata = target.architecture, target.header.metadata
    refused = f"{target.path} has no early exit: "
    if name not in _NEOX:
        known = " and ".join(_NEOX)
        raise UnsupportedModelError(f"{refused}its architecture is {name}, and not {known}")

    def value(key: str, default: Any = None) -> Any:  # noqa: ANN401 - whatever it holds
        return metadata.get(f"{name}.{key}", default)

    heads = value("attention.head_count")
    kv_heads = value("attention.head_count_kv", heads)
    scaling = value("rope.scaling.type", "none")
    factor = value("rope.scaling.factor", 1.0) if scaling == "linear" else 1.0
    plain = isinstance(heads, int) and isinstance(kv_heads, int) and heads > 0 < kv_heads
    size = target.n_embd // heads if plain else 0
    if not plain or target.n_embd % heads or heads % kv_heads or size % 2:
        raise UnsupportedModelError(f"{refused}its layers differ, or its heads do not divide")
    own = (value("attention.key_length", size), value("attention.value_length", size))
    unusual = {
        "experts": value("expert_count", 0),
        f"rotary positions of {scaling}": scaling not in ("none", "linear"),
        "heads of another size": own != (size, size) or value("rope.dimension_count", size) != size,
        "a scale of its attention": value("attention.scale", 0),
        "factors in its layers": value("residual_scale", 0) or value("logit_scale", 0),
    }
    found = [reason for reason, there in unusual.items() if there]
    if found:
        raise UnsupportedModelError(f"{refused}it has {found[0]}")
    base = float(value("rope.freq_base", 10000.0))
    rope = Rope(size, freq_base=base, freq_scale=1.0 / float(factor), neox=_NEOX[name])
    eps = float(value("attention.layer_norm_rms_epsilon", 1e-5))
    return AttentionSizes(heads, kv_heads, size, rope), eps


# == The source of rows ============================================================================
#
# LayerSkip's self-speculative decoding (Elhoushi et al. 2024) without a file of its own, and
# predictive pipelined decoding (PPD, Yang et al. 2023) on one device. PPD lets the exit's guess
# start on a second device while the deep layers of the first still run. On one device nothing runs
# meanwhile: when an evaluation ends, the exit's distribution of its last position is of a token
# that the target's own row has just decided. So the first layers go on by themselves, over tokens
# that they draft.


class EarlyExitSource(Source):
    """The first layers of the target, which draft chains; it owns the cells.

    The keys and values of accepted drafts stay: the first layers compute them of the text anyway.
    """

    def __init__(self, cells: ExitCells, n_params: int = 0) -> None:
        self._cells, self.n_params, self.depth_params = cells, n_params, n_params

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many cells are left behind the text."""
        return self._cells.n_cells - len(tokens)

    def root(self, request: DraftRequest, highest: int) -> NodeRows:
        """Evaluate the tokens that are not in the cells, at least the last one."""
        cells, tokens = self._cells, request.tokens
        return NodeRows([cells.after(tokens, common_prefix(cells.tokens, tokens))])

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows:
        """Evaluate a token after the last one."""
        return NodeRows([self._cells.rows(tokens)[0]])

    @property
    def native_seconds(self) -> float:
        """Time in the graphs that this conversation ran."""
        return self._cells.native_seconds

    def close(self) -> None:
        """Free the cells."""
        self._cells.close()


# == The builder of `early-exit(layers=4, n=auto)` =================================================


def build_early_exit(
    expression: Expression, env: DraftEnvironment, build: BuildPart
) -> DrafterWeights:
    """Build `early-exit(layers=a third, n=auto, sampling=with, p_min=0)`."""
    chain = ChainOptions.of(expression, "with").within(env.context.n_batch)
    options, n_layer = options_of(expression), env.target.n_layer
    layers = options.integer("layers", max(1, n_layer // 3))
    if not 1 <= layers < n_layer:
        has = f"{env.target.path} has {n_layer}, all of which would be the target itself"
        raise OptionError(f"{expression}: an exit after {layers} layers: {has}")
    if env.context.rope.stretches:
        problem = "draws by the rotary positions of the file: leave out the options that scale them"
        raise OptionError(f"{expression} {problem}")
    drafts = chain.drafts(expression, env)
    exit_layers = ExitLayers(env.target, layers, n_threads=env.context.n_threads)
    n_params = exit_layers.evaluated_params
    share = n_params / max(1, env.target.n_params)

    def start() -> GrowingDrafter:
        source = EarlyExitSource(exit_layers.cells(env.n_ctx), n_params)
        return drafts.drafter(source, share)

    return DrafterWeights(drafts.name, start, [exit_layers], drafts.pace)
