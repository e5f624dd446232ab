"""Layer cuts: a model with fewer layers, to draft for its own target.

Without the last layers it is an early exit (LayerSkip, Elhoushi et al. 2024); without some in
between it drafts as in Draft & Verify (Zhang et al. 2023). Both are files like any other here, so
any drafter can use them. The weights that remain are copied bit by bit, whatever their type."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gguf import GGUFValueType

from specrun.bindings.errors import MalformedFileError, OptionError, UnsupportedModelError
from specrun.bindings.files import check_target
from specrun.bindings.gguf import PADDED_PARAMETERS, ArrayValue, MetadataValue
from specrun.convert.cut.layer_rules import RULES, LayerFacts, LayerRules
from specrun.convert.gguf import GGUFSource, Metadata, PlannedTensor, Progress, require_whole

# == Metadata of a model with fewer layers: counts lowered, arrays by layer cut ====================


# Keys of llama.cpp that hold one value a layer, if they hold an array.
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
# Keys with the number of first layers that are of another kind.
_LEADING = ("leading_dense_block_count", "hash_layer_count")


def _lowered_facts(facts: LayerFacts, kept: Sequence[int]) -> LayerFacts:
    """Return the facts for rules about the model with these layers only, arrays left out."""
    changed: dict[str, MetadataValue] = dict(facts.metadata)
    for key in _LEADING:
        name = f"{facts.architecture}.{key}"
        if name in changed:
            changed[name] = _leading(facts, key, kept)
    return LayerFacts(facts.architecture, changed, len(kept))


def _missing_kind(facts: LayerFacts, rules: LayerRules, kept: Sequence[int]) -> str:
    """Return the kind of layer that the cut lacks and llama.cpp needs for a cache, "" for none.

    It ends the process if a model with sliding windows has no layer with one, or a hybrid only
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


def _cut_metadata(
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
    """Write the width of a head if llama.cpp takes it from the heads of the first layer."""
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
    lowered = _lowered_facts(facts, kept)
    for pattern in rules.patterns:
        before = pattern.values(facts)
        if before is None or facts.array(pattern.key) is not None:
            continue
        wanted = [before[layer] for layer in kept]
        if wanted != pattern.values(lowered):
            metadata.flags(f"{facts.architecture}.{pattern.key}", wanted)


# == Cuts ==========================================================================================


CUT_LAYERS = "specrun.cut.layers"
"""The metadata key with the numbers, in the whole model, of the layers that a cut kept."""
CUT_SOURCE = "specrun.cut.source"
"""The metadata key with the file name of the whole model."""
CUT_SOURCE_LAYERS = "specrun.cut.source_layers"
"""The metadata key with the whole model's number of layers."""

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_PART = re.compile(r"(\d{1,9})(?:(-)(\d{1,9})?)?")


@dataclass(frozen=True, slots=True)
class CutReport:
    """The result of a cut: the layers kept, of `source_layers`, and the parameters left."""

    output: Path
    layers: tuple[int, ...]
    source_layers: int
    n_parameters: int
    n_bytes: int


def cut_layers(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    layers: str | None = None,
    skip: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> CutReport:
    """Write `source` to `output` with only the layers `layers`, or all but `skip` ("0-3,8,10-").

    Raises OptionError for layers the model has not, for a cut that leaves none, and if `output`
    exists without `force`; UnsupportedModelError for a model that would be of another kind with
    these layers, and for one part of a split model; FileMissingError, MalformedFileError. Nothing
    is left behind on failure.
    """
    check_target(Path(output), force=force)
    model = LayeredModel(source)
    kept = _selected_layers(model.n_layers, layers=layers, skip=skip)
    return model.write(output, kept, force=force, progress=progress)


class LayeredModel:
    """A model to be cut: read once, written as often as wanted.

    `n_layers` does not count the layers at the end that predict further tokens (NextN); cuts leave
    them out.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self._source = GGUFSource(source)
        header = self._source.header
        self.path = self._source.path
        architecture = header.architecture
        rules = RULES.get(architecture)
        if rules is None:
            raise self._source.unsupported(
                f"is a {architecture}: whether its layers depend on their numbers is "
                "not known, so it cannot be cut"
            )
        self._rules = rules
        all_layers = self._source.count(f"{architecture}.block_count")
        facts = LayerFacts(architecture, header.metadata, all_layers)
        self.n_layers = all_layers - facts.number("nextn_predict_layers")
        self._facts = LayerFacts(architecture, header.metadata, self.n_layers)
        self._check_model()
        self._metadata: Metadata | None = None

    def check(self, kept: Sequence[int]) -> None:
        """Raise unless the layers `kept`, ascending, still play their parts; see `cut_layers`."""
        if not kept:
            raise OptionError(f"{self.path} would have no layer: keep one of its {self.n_layers}")
        if list(kept) != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < self.n_layers:
            raise OptionError(f"{self.path} has layers 0 to {self.n_layers - 1}: name each once")
        name, rules, count = self._facts.architecture, self._rules, len(kept)
        if rules.exit_only and tuple(kept) != tuple(range(count)):
            early = range_text(range(count))
            raise self._source.unsupported(
                f"is a {name}, and {rules.exit_only}: only its last layers can go, "
                f"as in --layers {early}"
            )
        if rules.kind_of(self.n_layers) != rules.kind_of(count):
            raise self._source.unsupported(
                f"cannot have {count} layers: llama.cpp takes a {name} of "
                f"{self.n_layers} layers for another kind of model than one of {count}"
            )
        if kind := _missing_kind(self._facts, rules, kept):
            raise self._source.unsupported(
                f"is a {name}: one of its layers with {kind} must stay, and "
                f"{range_text(kept)} has none"
            )
        moved = next((index for index in range(count) if not self._in_place(kept, index)), None)
        if moved is not None:
            possible = self.nearest(kept)
            hint = f"; --layers {range_text(possible)} can be kept" if possible else ""
            raise self._source.unsupported(
                f"is a {name}, in which a layer's number decides about rope or experts: "
                f"layer {kept[moved]} cannot become layer {moved}{hint}"
            )

    def nearest(self, wanted: Collection[int]) -> tuple[int, ...]:
        """Return the layers that can be kept, wanted ones if possible; () if none can."""
        if self._rules.exit_only:
            kept = list(range(len(wanted)))
        else:
            kept = []
            # Greedy: a wanted layer is left out if it would come to a number of another part.
            for layer in range(self.n_layers):
                if layer in wanted and self._in_place([*kept, layer], len(kept)):
                    kept.append(layer)
        same_kind = self._rules.kind_of(self.n_layers) == self._rules.kind_of(len(kept))
        possible = kept and same_kind and not _missing_kind(self._facts, self._rules, kept)
        return tuple(kept) if possible else ()

    def write(
        self,
        output: str | os.PathLike[str],
        kept: Sequence[int],
        *,
        force: bool = False,
        progress: Progress | None = None,
    ) -> CutReport:
        """Write the model with these layers, ascending; see `cut_layers`."""
        target = Path(output)
        self.check(kept)
        if self._metadata is None:
            self._metadata = self._source.metadata()
        metadata = self._metadata.copy()
        _cut_metadata(metadata, self._facts, self._rules, kept)
        self._sign(metadata, kept)
        tensors = list(self._plan(kept))
        n_bytes = self._source.write_changed(
            target, metadata, tensors, force=force, progress=progress
        )
        n_parameters = sum(prod(tensor.shape) for tensor in tensors)
        return CutReport(target, tuple(kept), self.n_layers, n_parameters, n_bytes)

    def _check_model(self) -> None:
        metadata = self._source.header.metadata
        require_whole(self.path, self._source.header)
        if reason := self._rules.refuse(self._facts):
            raise self._source.unsupported(
                f"is a {self._facts.architecture} and cannot be cut: {reason}"
            )
        if "general.tensor_extra.name" in metadata:
            raise self._source.unsupported("has settings for single tensors: a cut would lose them")
        matches = map(_BLOCK.fullmatch, self._source.tensors)
        found = {int(match[1]) for match in matches if match}
        missing = next((layer for layer in range(self.n_layers) if layer not in found), None)
        if self.n_layers < 1 or missing is not None:
            which = "no layers" if missing is None else f"no tensors of layer {missing}"
            raise self._source.malformed(f"has {which}: get the file again, or convert it again")

    def _in_place(self, kept: Sequence[int], index: int) -> bool:
        """Return whether layer `kept[index]` plays the part of layer `index` of the cut model."""
        before = self._rules.roles_of(self._facts, kept[index])
        return before == self._rules.roles_of(_lowered_facts(self._facts, kept), index)

    def _plan(self, kept: Sequence[int]) -> Iterator[PlannedTensor]:
        numbers = {layer: index for index, layer in enumerate(kept)}
        for tensor in self._source.header.tensors:
            match = _BLOCK.fullmatch(tensor.name)
            if match is None:
                yield self._source.unchanged(tensor)
            elif int(match[1]) in numbers:
                yield self._source.unchanged(tensor, f"blk.{numbers[int(match[1])]}.{match[2]}")

    def _sign(self, metadata: Metadata, kept: Sequence[int]) -> None:
        """Record the cut; a cut of a cut keeps the numbers of the whole model."""
        header = self._source.header.metadata
        earlier = header.get(CUT_LAYERS)
        layers = list(kept)
        if isinstance(earlier, ArrayValue) and len(earlier) == self.n_layers:
            layers = [int(earlier[layer]) for layer in kept]
        else:
            metadata.text(CUT_SOURCE, self.path.name)
            metadata.count(CUT_SOURCE_LAYERS, self.n_layers)
        metadata.integers(CUT_LAYERS, layers)
        name = header.get("general.name")
        if isinstance(name, str) and name:
            whole = name.split(", layers ")[0]
            metadata.text("general.name", f"{whole}, layers {range_text(layers)}")
        metadata.remove("general.size_label")  # it would now be wrong
        padded = header.get(PADDED_PARAMETERS)
        if isinstance(padded, int):
            metadata.large_count(PADDED_PARAMETERS, padded * len(kept) // self.n_layers)


def parse_layers(text: str, n_layers: int) -> tuple[int, ...]:
    """Return the layers that "0-11", "0-3,8,10-" or "5" names, ascending; the first layer is 0.

    "10-" ends with the last of the model's `n_layers`. Raises OptionError for a text of another
    form, a layer twice, a range that runs backwards, and numbers that the model has not.
    """
    chosen: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise OptionError(f"{part.strip()!r} is no layer: write numbers and ranges: 0-3,8,10-")
        first = int(match[1])
        last = int(match[3]) if match[3] else (n_layers - 1 if match[2] else first)
        if max(first, last) >= n_layers:
            missing = first if first >= n_layers else last
            there = f"{n_layers} layers, 0 to {n_layers - 1}"
            raise OptionError(f"there is no layer {missing}: the model has {there}")
        if last < first:
            raise OptionError(f"the range {part.strip()} runs backwards: write {last}-{first}")
        chosen += range(first, last + 1)
    twice = next((layer for layer in chosen if chosen.count(layer) > 1), None)
    if twice is not None:
        raise OptionError(f"layer {twice} is named twice in {text!r}: a cut keeps each layer once")
    return tuple(sorted(chosen))


def _selected_layers(
    n_layers: int, *, layers: str | None = None, skip: str | None = None
) -> tuple[int, ...]:
    """Return the layers that remain: `layers`, or all but `skip`; exactly one is given."""
    if (layers is None) == (skip is None):
        raise OptionError("name the layers to keep or the layers to skip, one of the two")
    if layers is not None:
        return parse_layers(layers, n_layers)
    skipped = parse_layers(skip or "", n_layers)
    kept = tuple(layer for layer in range(n_layers) if layer not in skipped)
    if not kept:
        raise OptionError(f"skipping all {n_layers} layers leaves no model: keep at least one")
    return kept


def range_text(layers: Sequence[int]) -> str:
    """Return ascending layers as `parse_layers` reads them: "0-3,8,10-11"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
