"""Theory of speculative decoding: expected tokens, speed-ups, memory bandwidth, chain tables."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import (
    ArrayValue,
    GGUFHeader,
    MetadataValue,
    TensorInfo,
    read_header,
    stored_bytes,
)
from specrun.bindings.models.model import Model
from specrun.bindings.models.nextn import nextn_tensors, split_headers
from specrun.runtime.planning.curves import CostCurve, RoundCosts

# == Formulas ======================================================================================
#
# Notation: alpha (a) is the probability that a drafted token is accepted, g (gamma) the drafted
# tokens of a round, c the cost of one drafter step over one plain target step, T(n) the measured
# time of a target evaluation of n tokens. "Leviathan" is Leviathan et al., "Fast Inference from
# Transformers via Speculative Decoding" (2023).


def expected_tokens(acceptance: float, n_draft: int) -> float:
    """Return the expected tokens of a round, the target's own included: (1 - a^(g+1)) / (1 - a).

    Leviathan, equation 1: a geometric distribution capped at g + 1. Computed as 1 + a + ... + a^g,
    so that a = 1 gives g + 1.
    """
    if not 0.0 <= acceptance <= 1.0:
        raise OptionError(f"acceptance is {acceptance}: it must be between 0 and 1")
    if n_draft < 0:
        raise OptionError(f"n_draft is {n_draft}: it must be 0 or more")
    return math.fsum(acceptance**index for index in range(n_draft + 1))


def wall_clock_improvement(acceptance: float, n_draft: int, cost_ratio: float) -> float:
    """Return tokens per second over plain decoding's: (1 - a^(g+1)) / ((1 - a) (g c + 1)).

    Leviathan, theorem 3.8, if a target evaluation takes as long for g + 1 tokens as for one.
    Drafting pays exactly if a > c, and then gains at least (1 + a) / (1 + c) (corollary 3.9).
    """
    _require_cost("cost_ratio", cost_ratio)
    return expected_tokens(acceptance, n_draft) / (n_draft * cost_ratio + 1.0)


def operation_ratio(acceptance: float, n_draft: int, operation_cost_ratio: float) -> float:
    """Return operations per token over plain decoding's: (1 - a) (g c' + g + 1) / (1 - a^(g+1)).

    Leviathan, theorem 3.11; c' (c-hat) is the drafter's operations per token over the target's.
    """
    _require_cost("operation_cost_ratio", operation_cost_ratio)
    return (n_draft * operation_cost_ratio + n_draft + 1.0) / expected_tokens(acceptance, n_draft)


def _require_cost(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise OptionError(f"{name} is {value}: it must be a number of 0 or more")


# == Memory bandwidth: bytes that evaluations read, and their savings by drafting ==================
#
# If decoding waits for memory, an evaluation takes as long as its bytes: the weights, once for
# all its tokens, and the keys and values of the text before them (Leviathan et al. 2023, section
# 3.4: reads of both shrink by the expected tokens of a round, while operations grow, theorem 3.11).
# Two things break that rule, and both are counted here. The keys and values of a long text are read
# besides the weights: a drafter that keeps less of it saves them (TriForce, Sun et al. 2024). And
# mixtures of experts read more weights for more tokens, since each token chooses its own experts.


_EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.")
_LOOKED_UP = ("token_embd.weight", "embed_tokens.weight")
_BLOCK = 256  # elements of which whole rows of every cache type consist


@dataclass(frozen=True, slots=True)
class MemoryTraffic:
    """The bytes that a model's evaluations read.

    `dense` bytes of weights are read in every evaluation. `experts` bytes are those of all
    `n_experts`, of which each token uses `n_used`; 0 if there are none. `per_position` bytes are
    the keys and values of one cached token in all layers.
    """

    dense: float
    per_position: float
    experts: float = 0.0
    n_experts: int = 0
    n_used: int = 0

    def weights(self, n_tokens: int) -> float:
        """Return the bytes of weights that an evaluation of n tokens reads."""
        if not self.n_experts:
            return self.dense
        read = expected_experts(self.n_experts, self.n_used, n_tokens)
        return self.dense + self.experts * read / self.n_experts

    def evaluation(self, n_tokens: int, n_context: float = 0.0) -> float:
        """Return the bytes of an evaluation of n tokens after `n_context` cached ones."""
        return self.weights(n_tokens) + n_context * self.per_position


def expected_experts(n_experts: int, n_used: int, n_tokens: int) -> float:
    """Return how many experts of a layer n tokens read: E (1 - (1 - k/E)^n).

    Each token uses k of E experts; taken as if each chose independently and all alike. Tokens of
    one text choose more alike than that, so this is the most to expect.
    """
    return n_experts * (1.0 - (1.0 - n_used / n_experts) ** n_tokens)


def bytes_ratio(
    target: MemoryTraffic,
    draft: MemoryTraffic,
    acceptance: float,
    n_draft: int,
    *,
    n_context: float = 0.0,
) -> float:
    """Return the bytes that a round of g drafts reads for a token, over plain decoding's.

    (T(g + 1) + g D(1)) / E over T(1): T and D the bytes of evaluations of target and drafter,
    after `n_context` cached tokens, E the expected tokens of the round (Leviathan, equation 1).
    Below 1 drafting is faster if memory decides.
    """
    read = target.evaluation(n_draft + 1, n_context) + n_draft * draft.evaluation(1, n_context)
    return read / expected_tokens(acceptance, n_draft) / target.evaluation(1, n_context)


# -- facts of files --------------------------------------------------------------------------------


def memory_traffic(model: Model, options: ContextOptions | None = None) -> MemoryTraffic:
    """Return the bytes that a model's evaluations read, with the types of keys and values."""
    header = read_header(model.path)
    own = sum(tensor.n_bytes for tensor in header.tensors) or 1
    experts = sum(tensor.n_bytes for tensor in header.tensors if _EXPERTS.match(tensor.name))
    total = float(model.n_bytes)
    # Of a table of embeddings a few rows are read, unless it is the output matrix, too.
    names = {tensor.name: tensor.n_bytes for tensor in header.tensors}
    if "output.weight" in names:
        total -= names.get("token_embd.weight", 0)
    # A model in several files: the first one's share stands for all.
    mixed = float(model.n_bytes) * experts / own
    n_experts, n_used = mixture(header)
    if not n_experts:
        mixed = 0.0
    return MemoryTraffic(
        max(1.0, total - mixed), bytes_per_position(header, options), mixed, n_experts, n_used
    )


def multiplications(model: Model) -> float:
    """Return how many multiplications with weights a token takes: c-hat is the ratio of two models.

    Those of `multiplications_of`, or one for each parameter if no matrix is known.
    """
    return multiplications_of(model.path, model.header) or float(model.n_params)


def multiplications_of(path: Path, header: GGUFHeader) -> float:
    """Return how many multiplications with weights a token takes by a model's files.

    Embeddings are looked up, and are the output matrix if there is no other. Attention over the
    text is left out, and so are NextN blocks, which only draft.
    """
    headers = split_headers(path, header)
    sizes = {tensor.name: tensor.n_elements for part in headers for tensor in part.tensors}
    total = sum(multiplied(header, part.tensors) for part in headers)
    total -= multiplied(header, nextn_tensors(path, header))
    if "output.weight" not in sizes:
        total += sizes.get("token_embd.weight", 0)
    return total


def multiplied(header: GGUFHeader, tensors: Iterable[TensorInfo]) -> float:
    """Return how many multiplications these tensors take for a token, embeddings none.

    Each element of a matrix is multiplied once; of experts, as the header has them, those in use.
    """
    n_experts, n_used = mixture(header)
    total = 0.0
    for tensor in tensors:
        if len(tensor.shape) < 2 or tensor.name.endswith(_LOOKED_UP):
            continue
        mixed = n_experts and _EXPERTS.match(tensor.name)
        total += tensor.n_elements * (n_used / n_experts if mixed else 1.0)
    return total


def mixture(header: GGUFHeader) -> tuple[int, int]:
    """Return how many experts a layer has and how many of them a token uses; (0, 0) without."""
    n_experts, n_used = (_count(header, f"expert_{name}count") for name in ("", "used_"))
    return (n_experts, min(max(n_used, 0), n_experts)) if n_experts > 1 else (0, 0)


def bytes_per_position(header: GGUFHeader, options: ContextOptions | None = None) -> float:
    """Return the bytes of the keys and values of one token, in all layers; 0 if no file has it.

    Sliding windows are counted as whole layers: a cache that takes tokens back keeps all of them.
    """
    options = options or ContextOptions()
    layers, heads = _count(header, "block_count"), _count(header, "attention.head_count")
    if not layers or not heads:
        return 0.0
    groups = _sum_over_layers(header, "attention.head_count_kv", layers, heads)
    rank = _count(header, "attention.kv_lora_rank")
    if rank and _count(header, "attention.key_length_mla"):
        # Multi-head latent attention keeps one compressed vector, and no values.
        width = rank + _count(header, "rope.dimension_count")
        return layers * _stored(width, options.cache_type_k)
    width = _count(header, "embedding_length") // heads
    key = _count(header, "attention.key_length") or width
    value = _count(header, "attention.value_length") or width
    pair = _stored(key, options.cache_type_k) + _stored(value, options.cache_type_v)
    return groups * pair


def _stored(width: int, cache_type: str) -> float:
    return width * stored_bytes([_BLOCK], cache_type.upper()) / _BLOCK


def _value(header: GGUFHeader, key: str) -> MetadataValue | None:
    return header.metadata.get(f"{header.architecture}.{key}")


def _count(header: GGUFHeader, key: str) -> int:
    value = _value(header, key)
    if isinstance(value, ArrayValue):
        value = max((number for number in value if isinstance(number, int)), default=0)
    return value if isinstance(value, int) else 0


def _sum_over_layers(header: GGUFHeader, key: str, layers: int, default: int) -> int:
    value = _value(header, key)
    if isinstance(value, ArrayValue):
        return sum(int(number) for number in value[:layers] if isinstance(number, int))
    # No list of the layers: a damaged file may claim any number of them.
    return layers * (value if isinstance(value, int) else default)


# == Theory of chains: tokens a round, speed-up, operations and bytes by draft length ==============
#
# All are relative to plain decoding, from alpha (the chance that a drafted token is accepted), c (a
# drafted token's time over a plain one's), c-hat (its operations over the target's) and, if they
# are known, the measured T(n) and the bytes that evaluations read.


LONGEST = 64
"""The longest chain that is looked at."""

_LONGEST_TUNED = 16


@dataclass(frozen=True, slots=True)
class ChainInputs:
    """alpha, c and c-hat; T(n) as a curve, and the bytes that target and drafter read, if known.

    `n_context` tokens are cached in both. Raises `OptionError` for numbers that make no sense.
    """

    acceptance: float
    cost_ratio: float
    operation_cost_ratio: float
    curve: CostCurve | None = None
    traffic: tuple[MemoryTraffic, MemoryTraffic] | None = None
    n_context: float = 0.0

    def __post_init__(self) -> None:
        wall_clock_improvement(self.acceptance, 1, self.cost_ratio)
        operation_ratio(self.acceptance, 1, self.operation_cost_ratio)


@dataclass(frozen=True, slots=True)
class ChainRow:
    """Chains of `n_draft`: tokens of a round, and over plain decoding the rest.

    `improvement` is of tokens a second if verifying more tokens costs nothing, `measured` with
    the curve: E T(1) / (T(g + 1) + g c T(1)), E the tokens. `operations` and `bytes` are those of a
    token. None: not known.
    """

    n_draft: int
    tokens: float
    improvement: float
    operations: float
    measured: float | None
    bytes: float | None


def chain_row(inputs: ChainInputs, n_draft: int) -> ChainRow:
    """Return the results of the formulas for chains of so many drafts; 0 is plain decoding."""
    alpha, curve, measured, read = inputs.acceptance, inputs.curve, None, None
    tokens = expected_tokens(alpha, n_draft)
    if curve is not None:
        plain = curve.seconds(1)
        seconds = curve.seconds(n_draft + 1) + n_draft * inputs.cost_ratio * plain
        measured = tokens * plain / seconds
    if inputs.traffic is not None:
        read = bytes_ratio(*inputs.traffic, alpha, n_draft, n_context=inputs.n_context)
    return ChainRow(
        n_draft,
        tokens,
        wall_clock_improvement(alpha, n_draft, inputs.cost_ratio),
        operation_ratio(alpha, n_draft, inputs.operation_cost_ratio),
        measured,
        read,
    )


@dataclass(frozen=True, slots=True)
class BestLengths:
    """The best chains: `flat` if more tokens cost nothing, by T(n), and by the bytes read."""

    flat: int
    measured: int | None
    by_bytes: int | None


def best_lengths(inputs: ChainInputs, most: int = LONGEST) -> BestLengths:
    """Return the lengths of 0 to `most` that gain most, the shortest of equals.

    T has steps where kernels change, so that the gain has several peaks: every length is tried.
    """
    rows = [chain_row(inputs, n_draft) for n_draft in range(most + 1)]

    def best(gain: Callable[[ChainRow], float | None]) -> int | None:
        found = [(value, -row.n_draft) for row in rows if (value := gain(row)) is not None]
        return -max(found)[1] if found else None

    flat = best(lambda row: row.improvement)
    assert flat is not None
    return BestLengths(
        flat,
        best(lambda row: row.measured),
        best(lambda row: None if row.bytes is None else -row.bytes),
    )


@dataclass(frozen=True, slots=True)
class ChainTheory:
    """Leviathan et al. (2023) for one acceptance rate: `acceptance` is alpha, `cost_ratio` c.

    `flat_length` and `flat_improvement` are for a machine on which verifying more tokens costs
    nothing (theorem 3.8); `length` and `improvement` for this one, with the measured T(g + 1).
    `expected_tokens` (equation 1) and `operations` (theorem 3.11) are those of `length`.
    Improvements are over plain decoding; a length of 0 is plain decoding.
    """

    acceptance: float
    cost_ratio: float
    flat_length: int
    flat_improvement: float
    length: int
    improvement: float
    expected_tokens: float
    operations: float


def chain_theory(acceptance: float, costs: RoundCosts, operation_cost_ratio: float) -> ChainTheory:
    """Return the best chains of a tuned pair; `operation_cost_ratio` is c-hat."""
    # T(1) is plain decoding, which pays for no tree and no drafted node.
    verifying = map(costs.verify_seconds, range(1, _LONGEST_TUNED + 1))
    curve = CostCurve.flat([costs.plain_seconds, *verifying])
    # c counts Python's share on both sides: it is the ratio of measured times.
    ratio = costs.depth_seconds(1, None) / costs.plain_seconds
    inputs = ChainInputs(acceptance, ratio, operation_cost_ratio, curve)
    best = best_lengths(inputs, _LONGEST_TUNED)
    flat, row = chain_row(inputs, best.flat), chain_row(inputs, best.measured or 0)
    assert row.measured is not None
    return ChainTheory(
        acceptance,
        ratio,
        flat.n_draft,
        flat.improvement,
        row.n_draft,
        row.measured,
        row.tokens,
        row.operations,
    )
