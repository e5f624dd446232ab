"""The metadata of a model with fewer layers: counts lowered, arrays with one value a layer cut."""

from __future__ import annotations

from collections.abc import Sequence

from gguf import GGUFValueType

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.bindings.gguf import ArrayValue, MetadataValue
from specrun.convert.cut.layer_rules import LayerFacts, LayerRules
from specrun.convert.gguf import Metadata

# Keys of llama.cpp that hold one value a layer, where they hold an array.
_PER_LAYER = (
    *("feed_forward_length", "expert_feed_forward_length", "expert_used_count"),
    *("attention.head_count", "attention.head_count_kv"),
    *("attention.sliding_window_pattern", "attention.rope_pattern", "attention.recurrent_layers"),
    *("attention.indexer.types", "attention.compress_ratios", "deepstack_mapping"),
    *("swiglu_clamp_exp", "swiglu_clamp_shexp"),
)
_PER_LAYER_ANYWHERE = ("xielu.alpha_n", "xielu.alpha_p", "xielu.beta", "xielu.eps")
# Arrays of anything else.
_NOT_PER_LAYER = (
    *("rope.dimension_sections", "adapters.token_ids_activate", "adapters.token_ids_substitute"),
    *("classifier.output_labels", "ple.layer_multipliers", "ple.head_offsets"),
    "ple.head_vocab_sizes",
)
# Arrays of layer numbers: only models that can do nothing but exit early have them, so they stay.
_LAYER_NUMBERS = ("ple.layers",)
# Keys that say how many of the first layers are of another kind.
_LEADING = ("leading_dense_block_count", "hash_layer_count")


def lowered_facts(facts: LayerFacts, kept: Sequence[int]) -> LayerFacts:
    """Return what rules read of the model with these layers only, arrays left out."""
    changed: dict[str, MetadataValue] = dict(facts.metadata)
    for key in _LEADING:
        name = f"{facts.architecture}.{key}"
        if name in changed:
            changed[name] = _leading(facts, key, kept)
    return LayerFacts(facts.architecture, changed, len(kept))


def missing_kind(facts: LayerFacts, rules: LayerRules, kept: Sequence[int]) -> str:
    """Return the kind of layer that the cut lacks and llama.cpp needs for a cache, "" for none.

    It ends the process where a model with sliding windows has no layer with one, or a hybrid only
    one kind.
    """
    # Derived from layer numbers, or stated by the file as an array.
    values = {pattern.key: pattern.values(facts) for pattern in rules.patterns}

    def lost(key: str, kind: bool) -> bool:
        flags = values.get(key) or [bool(flag) for flag in facts.array(key) or ()]
        return kind in flags and all(flags[layer] != kind for layer in kept if layer < len(flags))

    if lost("attention.sliding_window_pattern", True):
        return "a sliding window"
    if lost("attention.recurrent_layers", True) or lost("attention.head_count_kv", False):
        return "a recurrent state"
    if lost("attention.recurrent_layers", False) or lost("attention.head_count_kv", True):
        return "attention"
    return ""


def cut_metadata(
    metadata: Metadata, facts: LayerFacts, rules: LayerRules, kept: Sequence[int]
) -> None:
    """Change `metadata`, a copy of the model's own, to that of the layers `kept`.

    Raises MalformedFileError for arrays that are too short, UnsupportedModelError for arrays whose
    meaning is not known, and for layers that are needed and not kept.
    """
    own = f"{facts.architecture}."
    for name, value in facts.metadata.items():
        key = name.removeprefix(own)
        if not isinstance(value, ArrayValue):
            continue
        if name in _PER_LAYER_ANYWHERE or (name.startswith(own) and key in _PER_LAYER):
            _cut_array(metadata, name, value, kept)
        elif name.startswith(own) and key in _LAYER_NUMBERS:
            _require_kept(name, value, kept)
        elif name.startswith(own) and key not in _NOT_PER_LAYER and len(value) >= facts.n_layers:
            raise UnsupportedModelError(f"{name} holds {len(value)} values: is it one a layer?")
    _state_head_width(metadata, facts, kept)
    _write_patterns(metadata, facts, rules, kept)
    for key in _LEADING:
        if own + key in facts.metadata:
            metadata.count(own + key, _leading(facts, key, kept))
    metadata.count(own + "block_count", len(kept))
    if own + "nextn_predict_layers" in facts.metadata:
        metadata.count(own + "nextn_predict_layers", 0)


def _leading(facts: LayerFacts, key: str, kept: Sequence[int]) -> int:
    before = facts.number(key)
    return sum(layer < before for layer in kept)


def _cut_array(metadata: Metadata, name: str, value: ArrayValue, kept: Sequence[int]) -> None:
    if len(value) <= kept[-1]:
        raise MalformedFileError(f"{name} has only {len(value)} values, none for layer {kept[-1]}")
    element = GGUFValueType[value.element_type.upper()]
    metadata.raw(name, [value[layer] for layer in kept], GGUFValueType.ARRAY, element)


def _require_kept(name: str, value: ArrayValue, kept: Sequence[int]) -> None:
    missing = [int(layer) for layer in value if layer not in kept]
    if missing:
        raise UnsupportedModelError(f"{name} needs layer {missing[0]}: keep it")


def _state_head_width(metadata: Metadata, facts: LayerFacts, kept: Sequence[int]) -> None:
    """Write how wide a head is where llama.cpp takes it from the heads of the first layer."""
    heads = facts.array("attention.head_count")
    if heads is None or heads[kept[0]] == heads[0]:
        return
    if 0 in (heads[0], heads[kept[0]]):
        raise UnsupportedModelError(
            f"layer {kept[0]} cannot come first: it has {heads[kept[0]]} heads, not {heads[0]}"
        )
    width = facts.number("embedding_length") // heads[0]
    for key in ("attention.key_length", "attention.value_length"):
        if f"{facts.architecture}.{key}" not in facts.metadata:
            metadata.count(f"{facts.architecture}.{key}", width)


def _write_patterns(
    metadata: Metadata, facts: LayerFacts, rules: LayerRules, kept: Sequence[int]
) -> None:
    """Write the patterns by layer number that the cut breaks; stored arrays are cut already."""
    lowered = lowered_facts(facts, kept)
    for pattern in rules.patterns:
        before = pattern.values(facts)
        if before is None or facts.array(pattern.key) is not None:
            continue
        wanted = [before[layer] for layer in kept]
        if wanted != pattern.values(lowered):
            metadata.flags(f"{facts.architecture}.{pattern.key}", wanted)
