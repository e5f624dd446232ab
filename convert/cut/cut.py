"""Layer cuts: a model with fewer layers, to draft for its own target.

Leaving out the last layers is early exit (LayerSkip, Elhoushi et al. 2024); leaving out some in
between is what Draft & Verify (Zhang et al. 2023) drafts with. Both are files like any other here,
so that any drafter can be made of them. The weights that are kept are copied bit by bit, whatever
their type.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from specrun.bindings.errors import OptionError
from specrun.bindings.files import check_target
from specrun.bindings.gguf import PADDED_PARAMETERS, ArrayValue
from specrun.convert.cut.layer_metadata import cut_metadata, lowered_facts, missing_kind
from specrun.convert.cut.layer_rules import RULES, LayerFacts
from specrun.convert.gguf import (
    GGUFSource,
    Metadata,
    PlannedTensor,
    Progress,
    require_whole,
    write_gguf,
)

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
    """What a cut wrote: the layers kept, of `source_layers`, and the parameters that are left."""

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
    exists without `force`; UnsupportedModelError for a model that would not be what it should with
    these layers, and for one part of a split model; FileMissingError, MalformedFileError. Nothing
    is left behind on failure.
    """
    check_target(Path(output), force=force)
    model = LayeredModel(source)
    kept = selected_layers(model.n_layers, layers=layers, skip=skip)
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
        if kind := missing_kind(self._facts, rules, kept):
            raise self._source.unsupported(
                f"is a {name}: one of its layers with {kind} must stay, and "
                f"{range_text(kept)} has none"
            )
        moved = next((index for index in range(count) if not self._in_place(kept, index)), None)
        if moved is not None:
            possible = self.nearest(kept)
            hint = f"; --layers {range_text(possible)} can be kept" if possible else ""
            raise self._source.unsupported(
                f"is a {name}, where a layer's number decides about rope or experts: "
                f"layer {kept[moved]} cannot become layer {moved}{hint}"
            )

    def nearest(self, wanted: Collection[int]) -> tuple[int, ...]:
        """Return the layers that can be kept, wanted ones where possible; () if none can."""
        if self._rules.exit_only:
            kept = list(range(len(wanted)))
        else:
            kept = []
            # Greedy: a wanted layer is left out where it would come to a number of another part.
            for layer in range(self.n_layers):
                if layer in wanted and self._in_place([*kept, layer], len(kept)):
                    kept.append(layer)
        same_kind = self._rules.kind_of(self.n_layers) == self._rules.kind_of(len(kept))
        possible = kept and same_kind and not missing_kind(self._facts, self._rules, kept)
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
        cut_metadata(metadata, self._facts, self._rules, kept)
        self._sign(metadata, kept)
        tensors = list(self._plan(kept))
        name = self._facts.architecture
        n_bytes = write_gguf(
            target, name, metadata, tensors, force=force, progress=progress, source=self.path
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
        return before == self._rules.roles_of(lowered_facts(self._facts, kept), index)

    def _plan(self, kept: Sequence[int]) -> Iterator[PlannedTensor]:
        numbers = {layer: index for index, layer in enumerate(kept)}
        for tensor in self._source.header.tensors:
            match = _BLOCK.fullmatch(tensor.name)
            if match is None:
                yield self._source.unchanged(tensor, tensor.name)
            elif int(match[1]) in numbers:
                yield self._source.unchanged(tensor, f"blk.{numbers[int(match[1])]}.{match[2]}")

    def _sign(self, metadata: Metadata, kept: Sequence[int]) -> None:
        """Record what was cut; a cut of a cut keeps the numbers of the whole model."""
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


def selected_layers(
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
