"""Memory bandwidth: bytes that evaluations read, and what speculative decoding saves of them.

Where decoding waits for memory, an evaluation takes as long as its bytes: the weights, once for all
its tokens, and the keys and values of the text before them (Leviathan et al. 2023, section 3.4:
reads of both shrink by the expected tokens of a round, while operations grow, theorem 3.11). Two
things break that rule, and both are counted here. The keys and values of a long text are read
besides the weights: a drafter that keeps less of it saves them (TriForce, Sun et al. 2024). And
mixtures of experts read more weights for more tokens, since each token chooses its own experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

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
from specrun.runtime.costs.theory import expected_tokens

_EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.")
_LOOKED_UP = ("token_embd.weight", "embed_tokens.weight")
_BLOCK = 256  # elements of which whole rows of every cache type consist


@dataclass(frozen=True, slots=True)
class MemoryTraffic:
    """What a model's evaluations read.

    `dense` bytes of weights are read in every evaluation. `experts` bytes are those of all
    `n_experts`, of which each token uses `n_used`; 0 where there are none. `per_position` bytes are
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
    one text choose more alike than that, so this is what to expect at most.
    """
    if n_experts < 1 or not 0 <= n_used <= n_experts or n_tokens < 0:
        given = f"{n_used} of {n_experts} experts for each of {n_tokens} tokens"
        raise OptionError(
            f"{given} make no mixture: give 0 <= used <= experts and 0 or more tokens"
        )
    return n_experts * (1.0 - (1.0 - n_used / n_experts) ** n_tokens)


def bytes_per_token(
    target: MemoryTraffic,
    draft: MemoryTraffic,
    acceptance: float,
    n_draft: int,
    *,
    n_context: float = 0.0,
    n_draft_context: float | None = None,
) -> float:
    """Return the bytes that a round of g drafts reads for each of its tokens.

    (T(g + 1) + g D(1)) / E: T and D the bytes of evaluations of target and drafter, E the expected
    tokens of the round (Leviathan et al. 2023, equation 1). The drafter has `n_draft_context`
    tokens cached, None: as many as the target.
    """
    cached = n_context if n_draft_context is None else n_draft_context
    drafting = n_draft * draft.evaluation(1, cached)
    tokens = expected_tokens(acceptance, n_draft)
    return (target.evaluation(n_draft + 1, n_context) + drafting) / tokens


def bytes_ratio(
    target: MemoryTraffic,
    draft: MemoryTraffic,
    acceptance: float,
    n_draft: int,
    *,
    n_context: float = 0.0,
    n_draft_context: float | None = None,
) -> float:
    """Return `bytes_per_token` over plain decoding's: below 1 it is faster where memory decides."""
    spent = bytes_per_token(
        target,
        draft,
        acceptance,
        n_draft,
        n_context=n_context,
        n_draft_context=n_draft_context,
    )
    return spent / target.evaluation(1, n_context)


# -- what files say --------------------------------------------------------------------------------


def memory_traffic(model: Model, options: ContextOptions | None = None) -> MemoryTraffic:
    """Return what a model's evaluations read, with keys and values as these options store them."""
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

    Embeddings are looked up, and are the output matrix where there is no other. Attention over the
    text is left out, and so are NextN blocks, which only draft.
    """
    headers = split_headers(model.path, model.header)
    sizes = {tensor.name: tensor.n_elements for part in headers for tensor in part.tensors}
    total = sum(multiplied(model.header, part.tensors) for part in headers)
    total -= multiplied(model.header, nextn_tensors(model.path, model.header))
    if "output.weight" not in sizes:
        total += sizes.get("token_embd.weight", 0)
    return total or float(model.n_params)


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
    """Return the bytes of the keys and values of one token, in all layers; 0 where no file says.

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
