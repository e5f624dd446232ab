"""Parts of a runtime that take memory; cells by headers, compute buffers counted by llama.cpp."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from specrun.bindings.contexts.context import Context, MtpContext
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.gguf import GGUFHeader, read_header
from specrun.bindings.gguf.types import BLOCK_SIZES, stored_bytes
from specrun.bindings.machine.placement import Placement, placing
from specrun.bindings.memory_breakdown import HOST as HOST_NAME
from specrun.bindings.memory_breakdown import Breakdown, CountedModel, memory_breakdown
from specrun.bindings.models.nextn import ROLLBACK_ARCHITECTURES
from specrun.runtime.language import (
    METHODS,
    Expression,
    method_of_head,
    options_of,
    parse_expression,
)
from specrun.runtime.memory.shape import HOST, PROCESSOR, ModelShape

# == Cells of a context: keys and values of each position, and recurrent states, by layer ==========
#
# The cache is unified and holds sliding windows whole (`Context`), so it grows by the same bytes
# with every position, in steps of 256; states do not grow.


STEP = 256
"""llama.cpp rounds contexts up to multiples of it."""


@dataclass(frozen=True, slots=True)
class Cells:
    """Bytes that each layer keeps for `STEP` positions, and whatever the length is (`fixed`)."""

    per_step: tuple[int, ...]
    fixed: tuple[int, ...]

    def of_layers(self, n_ctx: int) -> tuple[int, ...]:
        """Return the bytes of each layer at a context of so many tokens."""
        steps = -(-n_ctx // STEP)
        pairs = zip(self.per_step, self.fixed, strict=True)
        return tuple(steps * growing + kept for growing, kept in pairs)

    def total(self, n_ctx: int) -> int:
        """Return the bytes of all layers."""
        return sum(self.of_layers(n_ctx))


def count_cells(
    model: ModelShape,
    options: ContextOptions,
    *,
    n_rollback: int = 0,
    nextn: bool = False,
    flash: bool = True,
) -> Cells:
    """Return the cells of a context of a model, of its NextN blocks alone if `nextn`.

    `n_rollback` more states are kept for every sequence. Without `flash` attention values are
    stored transposed, all layers' as wide as the widest.
    """
    trunk = model.n_layers - model.n_nextn
    layers = range(trunk, model.n_layers) if nextn else range(trunk)
    widest = max((layer.values for layer in model.layers), default=0)
    growing, kept = [0] * model.n_layers, [0] * model.n_layers
    for number in layers:
        layer = model.layers[number]
        if layer.keys:
            values = layer.values if flash or not layer.values else widest
            growing[number] = _stored(layer.keys, options.cache_type_k) + _stored(
                values, options.cache_type_v
            )
        rows = options.n_sequences * (1 + n_rollback)
        kept[number] = sum(PROCESSOR.padded(4 * size * rows) for size in layer.state)
    return Cells(tuple(growing), tuple(kept))


def widened_cells(model: ModelShape, options: ContextOptions, n_ctx: int) -> int:
    """Return the bytes of F16 copies of one layer's keys and values that are of another type.

    The largest layer's: a copy lives no longer than its layer is computed.
    """
    if options.flash_attention == "off":
        return 0
    wide = (options.cache_type_k != "f16", options.cache_type_v != "f16")
    numbers = max(
        (wide[0] * layer.keys + wide[1] * layer.values for layer in model.layers), default=0
    )
    return 2 * numbers * -(-n_ctx // STEP) * STEP


def spread_cells(n_layers: int, per_step: int, fixed: int) -> Cells:
    """Return cells of which only the sum is known, spread evenly over the layers."""

    def parts(n_bytes: int) -> tuple[int, ...]:
        share, rest = divmod(n_bytes, max(1, n_layers))
        return tuple(share + (number < rest) for number in range(n_layers))

    return Cells(parts(per_step), parts(fixed))


def _stored(numbers: int, cache_type: str) -> int:
    """Return the bytes of `STEP` rows of so many numbers; blocks cut short count as whole."""
    kind = cache_type.upper()
    block = BLOCK_SIZES[kind]
    return STEP * stored_bytes((-(-numbers // block) * block,), kind) if numbers else 0


def cells_by_place(cells: Sequence[int], places: Sequence[int], *, offload: bool) -> dict[int, int]:
    """Return bytes by place: cells lie with their layers, or all here without `offload`."""
    found: dict[int, int] = {}
    for n_bytes, place in zip(cells, places, strict=False):
        where = place if offload else HOST
        found[where] = found.get(where, 0) + n_bytes
    return found


# == Parts of a runtime that take memory, by drafter expression ====================================
#
# What each needs of a context (rows, states) is what its drafters usually ask for.


TARGET, DRAFT, BLOCKS, HEADS = "target", "draft model", "NextN blocks", "heads"

_ROWS = 16  # the widest round where nothing is said
_STATE_ROWS = 64  # with hidden states every token of a piece of a prompt has a row
_RECURRENT_LENGTH = {"mtp": 3, "draft": 5}
_SPARE_CELLS = 64  # nodes of a tree, behind the text
# Graphs have memory of their own: those that hold logits at once, and those that hold scores, of
# two lengths of a text each.
_GRAPHS, _ATTENDING_GRAPHS = 2, 6
_ATTENDING = 8  # rows that attend at once
_NODES = 32  # rows of the widest graph of a head
_STEP = 256


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A model with a context of its own; `context.n_ctx` is set by the plan.

    `nextn` is whether it has a context over its NextN blocks besides, or alone if there is no
    trunk. `drafts` models lie where drafts are to lie. The plan's context is that of each of
    `n_texts` conversations; where it is `shared`, of all of them together.
    """

    title: str
    model: ModelShape
    context: ContextOptions
    n_rollback: int = 0
    nextn: bool = False
    drafts: bool = False
    n_texts: int = 1
    shared: bool = False

    def n_ctx(self, n_ctx: int) -> int:
        """Return the tokens of its context when the plan's has so many."""
        if self.shared:
            return n_ctx
        stretched = self.context.rope.stretches
        return self.n_texts * (n_ctx if stretched else min(n_ctx, self.model.n_ctx_train))


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Heads: bytes of `weights`, of keys and values per `cell`, of graphs, and of those per cell.

    `output` are the bytes of the target's output matrix, which is loaded again where the heads are
    not computed where it lies; 0 for heads that have one of their own.
    """

    title: str
    weights: int
    cell: int
    graphs: int
    graph_cell: int = 0
    output: int = 0
    n_texts: int = 1

    def cells(self, n_ctx: int) -> int:
        """Return the bytes of its cells beside a context of so many tokens."""
        return self.n_texts * self.cell * self._n_cells(n_ctx)

    def compute(self, n_ctx: int) -> int:
        """Return the bytes of its graphs, which grow with the text that they attend to."""
        return self.n_texts * (self.graphs + self.graph_cell * self._n_cells(n_ctx))

    def _n_cells(self, n_ctx: int) -> int:
        return -(-(n_ctx + _SPARE_CELLS) // _STEP) * _STEP + 1


Part = ModelPart | HeadPart


def parts_of(
    target: Path,
    drafter: str,
    context: ContextOptions,
    files: Mapping[str, Path] | None = None,
    n_texts: int = 1,
) -> list[Part]:
    """Return the parts of a runtime, the target first; raises as reading their files does.

    `files` are what the demo's expressions name without a path. Of an engine for `n_texts`
    conversations a context that is given is shared by all; one that is chosen is for each.
    """
    expressions = list(_leaves(parse_expression(drafter)))
    shape = ModelShape.read(target)
    found: list[Part] = []
    has_states = own_blocks = False
    for expression in expressions:
        path = _file_of(expression, files or {})
        if expression.atom == "mtp" and path is None:
            own_blocks = True
        if path is None or not path.is_file() or expression.atom == "rest":
            continue
        header = read_header(path)
        if method_of_head(header.architecture) is not None:
            has_states = True
            found.append(dataclasses.replace(_heads(header, shape), n_texts=n_texts))
        else:
            blocks = expression.atom == "mtp"
            drafts = _drafting(context, blocks=blocks)
            title, model = BLOCKS if blocks else DRAFT, ModelShape.read(path)
            found.append(
                ModelPart(title, model, drafts, nextn=blocks, drafts=True, n_texts=n_texts)
            )
    rows = n_texts * (_STATE_ROWS if has_states else _ROWS)
    options = dataclasses.replace(context, n_outputs=rows, hidden_states=has_states)
    n_rollback = 0
    if shape.architecture in ROLLBACK_ARCHITECTURES:
        n_rollback = max((_recurrent_length(item) for item in expressions), default=0)
    shared = n_texts > 1 and context.n_ctx > 0
    own = ModelPart(TARGET, shape, options, n_rollback, own_blocks, n_texts=n_texts, shared=shared)
    return [own, *found]


def _leaves(expression: Expression) -> Iterator[Expression]:
    """Return the expressions that have files or none, below all combinators."""
    method = METHODS.get(expression.atom)
    if method is not None and method.members != 0:
        for member in expression.arguments:
            yield from _leaves(member)
    else:
        yield expression


def _file_of(expression: Expression, files: Mapping[str, Path]) -> Path | None:
    if expression.arguments:
        return Path(expression.arguments[0].atom).expanduser()
    return files.get(expression.atom)


def _drafting(context: ContextOptions, *, blocks: bool) -> ContextOptions:
    return dataclasses.replace(context, n_outputs=_ROWS if blocks else 1)


def _recurrent_length(expression: Expression) -> int:
    """Return how many tokens a drafter may have to take back of a recurrent target."""
    usual = _RECURRENT_LENGTH.get(expression.atom, 0)
    if usual:
        return options_of(expression).length("n") or usual
    return 0


def _heads(header: GGUFHeader, target: ModelShape) -> HeadPart:
    kind = header.architecture

    def count(name: str, default: int) -> int:
        value = header.metadata.get(f"{kind}.{name}", default)
        return value if isinstance(value, int) and value > 0 else default

    hidden, heads = count("embedding_length", target.n_embd), count("attention.head_count", 0)
    cell = 0
    if heads:
        head = count("attention.key_length", max(1, hidden // heads))
        cell = 2 * 4 * head * count("attention.head_count_kv", heads)
    names = {tensor.name: tensor for tensor in header.tensors}
    own_output = any(f".{name}".endswith(".output.weight") for name in names)
    outputs = [item for item in target.tensors if item.name == "output.weight"] or [
        item for item in target.tensors if item.name == "token_embd.weight"
    ]
    vocab = names["output.weight"].shape[-1] if "output.weight" in names else target.n_vocab
    # Logits, their order and their softmax of every node; a draft's graph and a text's. Those that
    # attend hold a copy of the values, and scores and weights of every row.
    graphs = _GRAPHS * 4 * _NODES * (3 * vocab + 16 * hidden)
    graph_cell = _ATTENDING_GRAPHS * (cell // 2 + 2 * 4 * heads * _ATTENDING)
    weights = sum(-(-tensor.n_bytes // 128) * 128 for tensor in header.tensors)
    output = 0 if own_output or not outputs else outputs[0].n_bytes
    return HeadPart(HEADS, weights, cell, graphs, graph_cell, output)


# == Counts by llama.cpp: compute buffers, and cells that no header gives ==========================
#
# `AskedCounts` opens models without their weights on the CPU (`CountedModel`): the graphs there
# take what they take on a card, but for what passes from one to the other. `DeviceCounts` asks the
# devices that are here.


_CPU_ONLY = Placement(devices=("none",))


class Counts(Protocol):
    """Where a plan has its numbers from."""

    def compute(self, part: ModelPart, n_ctx: int, *, nextn: bool = False) -> int:
        """Return the bytes of the compute buffers of a context, all on one device."""

    def cells(self, part: ModelPart, *, nextn: bool = False) -> Cells:
        """Return the cells of a part's context, layer by layer."""


class AskedCounts:
    """Counts for `Counts`, asked of llama.cpp once each. A context manager: it keeps models open.

    Raises as `Model` does for files that cannot be loaded, and `UnsupportedModelError` where
    llama.cpp does not tell what it allocates.
    """

    def __init__(self) -> None:
        self._opened = ExitStack()
        self._models: dict[tuple[object, bool], CountedModel] = {}
        self._found: dict[tuple[object, ...], Breakdown] = {}
        self._cells: dict[tuple[object, ...], Cells] = {}

    def __enter__(self) -> AskedCounts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the models; what was asked stays known."""
        self._opened.close()
        self._models.clear()

    def compute(self, part: ModelPart, n_ctx: int, *, nextn: bool = False) -> int:
        """See `Counts`."""
        return self._ask(part, n_ctx, nextn=nextn).compute

    def cells(self, part: ModelPart, *, nextn: bool = False) -> Cells:
        """See `Counts`; spread evenly where llama.cpp counts otherwise than the header does."""
        key = part.model.path, part.context, part.n_rollback, nextn
        known = self._cells.get(key)
        if known is None:
            first, second = (self._ask(part, n * STEP, nextn=nextn).cells for n in (1, 2))
            flash = part.context.flash_attention != "off"
            counted = count_cells(
                part.model, part.context, n_rollback=part.n_rollback, nextn=nextn, flash=flash
            )
            if (counted.total(STEP), counted.total(2 * STEP)) == (first, second):
                known = counted
            else:
                known = spread_cells(part.model.n_layers, second - first, 2 * first - second)
            self._cells[key] = known
        return known

    def _ask(self, part: ModelPart, n_ctx: int, *, nextn: bool) -> Breakdown:
        options = dataclasses.replace(part.context, n_ctx=n_ctx, n_rollback=part.n_rollback)
        key = part.model.path, options, nextn
        if key not in self._found:
            with placing(_CPU_ONLY):
                model = self._model(part)
                self._found[key] = sum_of(asked_breakdown(model, options, nextn=nextn))
        return self._found[key]

    def _model(self, part: ModelPart) -> CountedModel:
        key = part.model.path, part.nextn
        model = self._models.get(key)
        if model is None:
            model = CountedModel(part.model.path, load_nextn=part.nextn)
            self._models[key] = self._opened.enter_context(model)
        return model


def sum_of(found: Mapping[str, Breakdown]) -> Breakdown:
    """Return the sum over all devices."""
    return sum(found.values(), Breakdown())


def asked_breakdown(
    model: CountedModel, options: object, *, nextn: bool = False
) -> dict[str, Breakdown]:
    """Return what a context of a model would take, by device name (`HOST_NAME`: the CPU)."""
    with (MtpContext if nextn else Context)(model, options) as context:  # type: ignore[arg-type]
        return memory_breakdown(context)


def asked_on_devices(part: ModelPart, n_ctx: int, n_gpu_layers: int) -> dict[str, Breakdown]:
    """Return what a part takes on the devices in force (`placing`), asked of llama.cpp."""
    options = dataclasses.replace(part.context, n_ctx=n_ctx, n_rollback=part.n_rollback)
    found: dict[str, Breakdown] = {HOST_NAME: Breakdown()}
    with CountedModel(
        part.model.path, n_gpu_layers=n_gpu_layers, load_nextn=part.nextn, drafts=part.drafts
    ) as model:
        alone = part.model.n_nextn == part.model.n_layers or model.nextn.alone
        for nextn in [*([] if alone else [False]), *([True] if part.nextn else [])]:
            for name, counts in asked_breakdown(model, options, nextn=nextn).items():
                known = found.get(name, Breakdown())
                # A second context shares the weights.
                weights = counts.weights if not known.weights else 0
                found[name] = known + dataclasses.replace(counts, weights=weights)
    return found
