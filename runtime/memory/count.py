"""Parts of a runtime that take memory, and their bytes as llama.cpp counts them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from specrun.bindings.contexts import (
    ASSISTANT_ARCHITECTURE,
    BLOCK_ARCHITECTURE,
    AssistantContext,
    BlockContext,
    Context,
    ContextOptions,
    Lender,
    MtpContext,
    block_options,
    needs_lender,
)
from specrun.bindings.gguf import GGUFHeader, read_header
from specrun.bindings.library import quiet_log
from specrun.bindings.machine import Placement, placing
from specrun.bindings.memory_breakdown import HOST as HOST_NAME
from specrun.bindings.memory_breakdown import Breakdown, CountedModel, memory_breakdown
from specrun.bindings.models import ROLLBACK_ARCHITECTURES
from specrun.runtime.language import (
    METHODS,
    Expression,
    method_of_head,
    options_of,
    parse_expression,
)
from specrun.runtime.memory.shape import ModelShape

# == Parts of a runtime that take memory, by drafter expression ====================================
#
# The rows and states that each needs of a context are those of its usual drafters.


TARGET, DRAFT, BLOCKS, HEADS = "target", "draft model", "NextN blocks", "heads"
BLOCK_DRAFTER, ASSISTANT = "block drafter", "assistant"

_ROWS = 16  # the widest round if the expression names no size
_STATE_ROWS = 64  # with hidden states every token of a piece of a prompt has a row
_USUAL_LENGTHS = {"jacobi": 4, "cascade": 5, "ouroboros": 5}  # if no number is given
_BLOCK = 16  # tokens of a block drafter's, if its file names no size
_SPARE_CELLS = 64  # nodes of a tree, behind the text
# Graphs have memory of their own: those that hold logits at once, and those that hold scores, of
# two lengths of a text each.
_GRAPHS, _ATTENDING_GRAPHS = 2, 6
_ATTENDING = 8  # rows that attend at once
_NODES = 32  # rows of the widest graph of a head
USUAL_KEPT = 4
"""Recurrent states of a conversation beside the last one, if no number is given."""
STEP = 256
"""llama.cpp rounds contexts up to multiples of it."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A model with a context of its own; `context.n_ctx` is set by the plan.

    `nextn`: it has a context over its NextN blocks too, or alone without a trunk. `drafts`:
    it lies on the devices of drafts. The plan's context is that of each of `n_texts` conversations;
    if it is `shared`, of all of them together. A block drafter reads matrices of its `lender`, and
    with a `window` has cells for so many positions of a text; an assistant reads its cells.
    """

    title: str
    model: ModelShape
    context: ContextOptions
    n_rollback: int = 0
    nextn: bool = False
    drafts: bool = False
    n_texts: int = 1
    shared: bool = False
    lender: Path | None = None
    window: int = 0

    def with_cache(self, keys: str, values: str) -> ModelPart:
        """Return the same with keys and values of other types."""
        context = dataclasses.replace(self.context, cache_type_k=keys, cache_type_v=values)
        return dataclasses.replace(self, context=context)

    @property
    def alone(self) -> bool:
        """Whether its file holds NextN blocks without a trunk."""
        return self.nextn and (self.model.nextn.alone or not self.model.trunk)

    @property
    def contexts(self) -> list[bool]:
        """Its contexts: False for one of the trunk, True for one of the NextN blocks."""
        return [*([] if self.alone else [False]), *([True] if self.nextn else [])]

    def n_ctx(self, n_ctx: int) -> int:
        """Return the tokens of its context if the plan's has so many."""
        if self.shared:
            return n_ctx
        if self.lender is not None and self.model.architecture == ASSISTANT_ARCHITECTURE:
            return self.n_texts * n_ctx  # as the target has
        if self.lender is not None:  # a block lies behind the text, in cells of its own
            return self.n_texts * (min(n_ctx, self.window or n_ctx) + self.context.n_outputs)
        stretched = self.context.rope.stretches
        return self.n_texts * (n_ctx if stretched else min(n_ctx, self.model.n_ctx_train))


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Heads: bytes of `weights`, of keys and values per `cell`, of graphs, and of those per cell.

    `output` are the bytes of the target's output matrix, which is loaded again if the heads are
    computed on another device; 0 for heads that have their own. `window` as of `ModelPart`.
    """

    title: str
    weights: int
    cell: int
    graphs: int
    graph_cell: int = 0
    output: int = 0
    n_texts: int = 1
    window: int = 0

    def cells(self, n_ctx: int) -> int:
        """Return the bytes of its cells for a context of so many tokens."""
        return self.n_texts * self.cell * self._n_cells(n_ctx)

    def compute(self, n_ctx: int) -> int:
        """Return the bytes of its graphs, which grow with the text that they attend to."""
        return self.n_texts * (self.graphs + self.graph_cell * self._n_cells(n_ctx))

    def _n_cells(self, n_ctx: int) -> int:
        return -(-(min(n_ctx, self.window or n_ctx) + _SPARE_CELLS) // STEP) * STEP + 1


Part = ModelPart | HeadPart


def parts_of(
    target: Path,
    drafter: str,
    context: ContextOptions,
    files: Mapping[str, Path] | None = None,
    n_texts: int = 1,
    n_kept: int = USUAL_KEPT,
) -> list[Part]:
    """Return the parts of a runtime, the target first; raises as reading their files does.

    `files` are the demo's files, by expressions without a path. Of an engine for `n_texts`
    conversations a context that is given is shared by all; one that is chosen is for each.
    A recurrent state is kept for `n_kept` drafted tokens of each, or as many as a drafter names.
    """
    expressions = list(_leaves(parse_expression(drafter)))
    shape = ModelShape.read(target)
    found: list[Part] = []
    has_states = own_blocks = False
    for expression in expressions:
        path = (files or {}).get(expression.atom)
        if expression.arguments:
            path = Path(expression.arguments[0].atom).expanduser()
        if expression.atom == "mtp" and path is None:
            own_blocks = True
        if path is None or not path.is_file() or expression.atom == "rest":
            continue
        header = read_header(path)
        if header.architecture == ASSISTANT_ARCHITECTURE:
            # It has a context, over the target's cells, and none of its own.
            options = dataclasses.replace(context, n_outputs=n_texts * _ROWS)
            model = ModelShape.read(path)
            own = ModelPart(ASSISTANT, model, options, drafts=True, n_texts=n_texts, lender=target)
            found.append(dataclasses.replace(own, shared=n_texts > 1 and context.n_ctx > 0))
        elif method_of_head(header.architecture) is not None:
            blocks = header.architecture == BLOCK_ARCHITECTURE
            has_states = has_states or not blocks
            part = _blocks(path, header, target, context) if blocks else _heads(header, shape)
            window = options_of(expression).length("window") or 0
            found.append(dataclasses.replace(part, n_texts=n_texts, window=window))
        else:
            blocks = expression.atom == "mtp"
            drafts = dataclasses.replace(context, n_outputs=_ROWS if blocks else 1)
            title, model = BLOCKS if blocks else DRAFT, ModelShape.read(path)
            found.append(
                ModelPart(title, model, drafts, nextn=blocks, drafts=True, n_texts=n_texts)
            )
    rows = n_texts * (_STATE_ROWS if has_states else _ROWS)
    options = dataclasses.replace(context, n_outputs=rows, hidden_states=has_states)
    n_rollback = 0
    if any(shape.states) and (shape.architecture in ROLLBACK_ARCHITECTURES or n_texts == 1):
        n_rollback = _drafted(parse_expression(drafter), n_kept)
    shared = n_texts > 1 and context.n_ctx > 0
    if any(shape.states):  # each conversation has a sequence of its own
        options = dataclasses.replace(options, n_sequences=n_texts)
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


def _blocks(path: Path, header: GGUFHeader, target: Path, context: ContextOptions) -> ModelPart:
    """Return the part of a block drafter."""
    size = header.metadata.get(f"{BLOCK_ARCHITECTURE}.block_size", _BLOCK)
    options = block_options(context, size if isinstance(size, int) and size > 0 else _BLOCK)
    return ModelPart(BLOCK_DRAFTER, ModelShape.read(path), options, drafts=True, lender=target)


def _drafted(expression: Expression, n_kept: int) -> int:
    """Return how many tokens a drafter may have to take back of a recurrent target.

    It is the named number, or else as many as there are states for.
    """
    if expression.atom == "none":
        return 0
    given = options_of(expression).length("n")
    if given is not None:
        return given
    members = [(each.count, _drafted(each, n_kept)) for each in expression.arguments]
    method = METHODS.get(expression.atom)
    if method is None or method.members == 0 or not members:
        return min(n_kept, _USUAL_LENGTHS.get(expression.atom, n_kept))
    if expression.atom == "relay":
        return sum(drafted if count is None else count for count, drafted in members)
    if expression.atom in _USUAL_LENGTHS:  # only the outer drafter's tokens are verified
        return options_of(expression.arguments[0]).length("n") or _USUAL_LENGTHS[expression.atom]
    return max(drafted for _, drafted in members)


def _heads(header: GGUFHeader, target: ModelShape) -> HeadPart:
    kind = header.architecture

    def count(name: str, default: int) -> int:
        value = header.metadata.get(f"{kind}.{name}", default)
        return value if isinstance(value, int) and value > 0 else default

    hidden, heads = count("embedding_length", target.n_embd), count("attention.head_count", 0)
    cell = 0
    if heads:
        head = count("attention.key_length", max(1, hidden // heads))
        layers = count("block_count", 1) if kind == "eagle3" else 1
        cell = 2 * 4 * head * count("attention.head_count_kv", heads) * layers
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


# == Counts by llama.cpp ===========================================================================
#
# `MemoryCounts` opens models without their weights on the CPU (`CountedModel`): the graphs there
# take as much as on a card, but for the copies between the two. `count_on_devices` counts on the
# devices of this machine.


_CPU_ONLY = Placement(devices=("none",))


class MemoryCounts(ExitStack):
    """Bytes of weights, cells and compute buffers, each counted once by llama.cpp.

    Models stay open until the end of its `with`. Raises as `Model` does for files that cannot be
    loaded, and `UnsupportedModelError` if this llama.cpp does not export its allocations.
    """

    def __init__(self) -> None:
        super().__init__()
        self._models: dict[tuple[object, bool], CountedModel] = {}
        self._found: dict[tuple[object, ...], Breakdown] = {}

    def weights(self, part: ModelPart) -> int:
        """Return the bytes of all weights in this machine's memory."""
        return self._count(part, STEP, nextn=part.alone).weights

    def compute(self, part: ModelPart, n_ctx: int, *, nextn: bool = False) -> int:
        """Return the bytes of the compute buffers of a context, all on one device."""
        return self._count(part, n_ctx, nextn=nextn).compute

    def lent(self, part: ModelPart) -> Breakdown:
        """Return the bytes of the context through which a block drafter reads its target."""
        if part.lender is None or not needs_lender(self._opened_of(part.model.path)):
            return Breakdown()
        key = part.lender, "lent"
        if key not in self._found:
            with placing(_CPU_ONLY), Lender(self._opened_of(part.lender)) as lent:
                self._found[key] = sum(memory_breakdown(lent).values(), Breakdown())
        return self._found[key]

    def cells(self, part: ModelPart, n_ctx: int, *, nextn: bool = False) -> list[int]:
        """Return the bytes of the cells of each layer, of the NextN blocks alone if `nextn`.

        The cache is unified and holds sliding windows whole (`Context`), so it grows by the same
        bytes in every step; recurrent states do not grow. Both are counted at two lengths, and
        shared out by the layers' widths.
        """
        first, second = (self._count(part, n * STEP, nextn=nextn).cells for n in (1, 2))
        growing, states = second - first, 2 * first - second
        model = part.model
        layers = model.blocks if nextn else model.trunk
        steps = -(-n_ctx // STEP)
        keys = _shared_out(steps * growing, [model.keys[layer] for layer in layers])
        kept = _shared_out(states, [model.states[layer] for layer in layers])
        found = [0] * model.n_layers
        found[layers.start : layers.stop] = map(int.__add__, keys, kept)
        return found

    def _count(self, part: ModelPart, n_ctx: int, *, nextn: bool) -> Breakdown:
        options = dataclasses.replace(part.context, n_ctx=n_ctx, n_rollback=part.n_rollback)
        key = part.model.path, part.nextn, options, nextn
        if key not in self._found:
            with placing(_CPU_ONLY):
                lender = None if part.lender is None else self._opened_of(part.lender)
                model = self._opened_of(part.model.path, nextn=part.nextn)
                found = count_context(model, options, nextn=nextn, lender=lender)
            self._found[key] = sum(found.values(), Breakdown())
        return self._found[key]

    def _opened_of(self, path: Path, *, nextn: bool = False) -> CountedModel:
        model = self._models.get((path, nextn))
        if model is None:
            model = self.enter_context(CountedModel(path, load_nextn=nextn))
            self._models[path, nextn] = model
        return model


@functools.lru_cache(maxsize=16)
def state_bytes(path: Path) -> int:
    """Return the bytes of one recurrent state of a model, of all layers; 0 if it keeps none."""
    part = ModelPart(TARGET, ModelShape.read(path), ContextOptions())
    if not any(part.model.states):
        return 0
    with quiet_log(), MemoryCounts() as counts:
        first, second = (sum(counts.cells(part, n * STEP)) for n in (1, 2))
    return 2 * first - second


def _shared_out(n_bytes: int, widths: Sequence[int]) -> list[int]:
    """Return shares of a sum in proportion to widths, equal ones if all widths are 0."""
    ends = [0, *accumulate(widths if any(widths) else [1] * len(widths))]
    return [n_bytes * b // ends[-1] - n_bytes * a // ends[-1] for a, b in pairwise(ends)]


def count_context(
    model: CountedModel,
    options: ContextOptions,
    *,
    nextn: bool = False,
    lender: CountedModel | None = None,
) -> dict[str, Breakdown]:
    """Return the bytes that a context of a model would take, by device name (`HOST_NAME`: CPU).

    With a `lender` the model is a block drafter or an assistant, and that its target.
    """
    if lender is not None and model.architecture == ASSISTANT_ARCHITECTURE:
        lends = dataclasses.replace(options, n_outputs=1)
        with (
            Context(lender, lends) as lent,
            AssistantContext(model, lent, n_tokens=options.n_outputs) as context,
        ):
            return memory_breakdown(context)
    if lender is not None:
        with (
            Lender(lender) as lent,
            BlockContext(model, options, lent, causal=False) as context,
        ):
            return memory_breakdown(context)
    with (MtpContext if nextn else Context)(model, options) as context:
        return memory_breakdown(context)


def count_on_devices(part: ModelPart, n_ctx: int, n_gpu_layers: int) -> dict[str, Breakdown]:
    """Return the bytes that a part takes on the devices in force (`placing`), by device name."""
    options = dataclasses.replace(part.context, n_ctx=n_ctx, n_rollback=part.n_rollback)
    found: dict[str, Breakdown] = {HOST_NAME: Breakdown()}
    with ExitStack() as opened:
        lends = None if part.lender is None else opened.enter_context(CountedModel(part.lender))
        model = opened.enter_context(
            CountedModel(
                part.model.path,
                n_gpu_layers=n_gpu_layers,
                load_nextn=part.nextn,
                drafts=part.drafts,
            )
        )
        for nextn in part.contexts:
            for name, counts in count_context(model, options, nextn=nextn, lender=lends).items():
                known = found.get(name, Breakdown())
                # A second context shares the weights.
                weights = counts.weights if not known.weights else 0
                found[name] = known + dataclasses.replace(counts, weights=weights)
    return found
