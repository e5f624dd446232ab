"""Look-ahead embeddings of PaSS and SPACE: folders that `specrun train pass` and `space` leave.

PaSS: `weight` [L, h], an embedding for each of L positions behind a token. SPACE: a whole model
with `space_mask.weight` [1, h] among its tensors, the mask token's embedding. The config names
the kind, and the number of trained positions: `lookahead_kind`, `lookahead_positions`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from specrun.convert.checkpoint import Checkpoint, JsonObject
from specrun.convert.families.family import TensorRule
from specrun.convert.gguf import Metadata
from specrun.convert.heads.head_kind import HeadKind, HeadPlan, matrix_shape
from specrun.convert.heads.target_facts import TargetFacts

_MASK = "space_mask.weight"
_SOURCES = {"pass": "weight", "space": _MASK}
_MOST_POSITIONS = 64  # the runtime's limit


def _planner(kind: str) -> Callable[[Checkpoint, TargetFacts], HeadPlan]:
    def plan(checkpoint: Checkpoint, target: TargetFacts) -> HeadPlan:
        source = _SOURCES[kind]
        rows, hidden = matrix_shape(checkpoint, source)
        positions = checkpoint.config.any("lookahead_positions")
        allowed = (1, positions) if kind == "space" else (positions,)
        whole = isinstance(positions, int) and not isinstance(positions, bool)
        if not whole or not 1 <= positions <= _MOST_POSITIONS or rows not in allowed:
            said = f"{rows} embeddings for lookahead_positions {positions!r}"
            raise checkpoint.unsupported(
                f"has {said}: 1 to {_MOST_POSITIONS} positions of one each, or of one mask, can run"
            )
        vocab_size = checkpoint.config.any("vocab_size")
        sizes = {"embedding_length": hidden, "position_count": positions}
        n_tokens = vocab_size if isinstance(vocab_size, int) else target.vocab_size
        metadata = Metadata()
        metadata.counts(kind, vocab_size=n_tokens, **sizes)
        rule = TensorRule(f"{kind}.embedding.weight", (source,), (rows, hidden), keep_f32=True)
        model = {name for name in checkpoint.tensors if name != source}
        return HeadPlan(metadata, [rule], hidden, n_tokens, model)

    return plan


def _kind(name: str, weights: tuple[str, ...]) -> HeadKind:
    def in_config(config: JsonObject) -> bool:
        # A model with its mask is converted as a model, unless --kind names the mask.
        return bool(config.any("lookahead_kind") == name)

    def in_tensors(names: Collection[str]) -> bool:
        return name == "space" and _MASK in names

    return HeadKind(name, _planner(name), in_tensors, in_config, weights)


PASS = _kind("pass", ("lookahead_embeddings",))
"""PaSS's embeddings."""

SPACE = _kind("space", ())
"""SPACE's mask token, in the folder of its model."""
