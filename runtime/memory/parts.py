"""Parts of a runtime that take memory: target, draft models, NextN blocks and heads, by expression.

What each needs of a context (rows, states) is what its drafters usually ask for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.gguf import GGUFHeader, read_header
from specrun.bindings.models.nextn import ROLLBACK_ARCHITECTURES
from specrun.runtime.language import Expression, parse_expression
from specrun.runtime.memory.model_shape import ModelShape
from specrun.runtime.methods import METHODS, method_of_head, options_of

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
