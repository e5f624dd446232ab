"""From a drafter expression to a drafter: one builder per name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.context import Context, ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.model import Model
from specrun.runtime.drafters.draft_model import DraftModelDrafter, DraftSampling
from specrun.runtime.drafters.draft_tree import DraftTreeDrafter, draft_size
from specrun.runtime.drafters.drafter import Drafter, NoDrafter
from specrun.runtime.drafters.ensemble import EnsembleDrafter
from specrun.runtime.drafters.expression import Expression, parse_expression
from specrun.runtime.drafters.prompt_lookup import PromptLookupDrafter
from specrun.runtime.drafters.proposals import TreeSampling
from specrun.runtime.drafters.topology import Topology
from specrun.runtime.drafters.tree_options import TreeOptions
from specrun.runtime.pairing import check_draftable, check_pair
from specrun.runtime.planning.offload import LayerCount, resolve_gpu_layers
from specrun.runtime.planning.sequoia import best_tree, typical_acceptance
from specrun.runtime.planning.tuned import measured_acceptance
from specrun.runtime.sampling import unknown_option

__all__ = ["DraftEnvironment", "build_drafter", "draft_context_options", "drafter_names"]


@dataclass(frozen=True, slots=True)
class DraftEnvironment:
    """What builders may need: the target, how contexts are made, and the demo's default files by name."""

    target: Model
    context: ContextOptions
    n_gpu_layers: LayerCount = "auto"
    use_mmap: bool = True
    default_files: Mapping[str, Path] | None = None


def build_drafter(text: str, environment: DraftEnvironment) -> Drafter:
    """Return the drafter that an expression describes.

    Raises `OptionError` for an expression or option that makes no sense, `PairError` for a model that does
    not fit the target, `ModelError` for a file that cannot be used.
    """
    return _build(parse_expression(text), environment)


def _build(expression: Expression, environment: DraftEnvironment) -> Drafter:
    builder = _BUILDERS.get(expression.atom)
    if builder is None:
        raise unknown_option(expression.atom, drafter_names(), "the drafter language")
    if expression.atom != "none":
        check_draftable(environment.target)
    return builder(expression, environment)


def drafter_names() -> list[str]:
    """Return the names an expression may begin with."""
    return list(_BUILDERS)


class _Options:
    """Reads the options of one expression by type, and refuses those nobody asked for."""

    def __init__(self, expression: Expression, known: list[str], n_arguments: int) -> None:
        self._name = expression.atom
        self._values = dict(expression.options)
        for name in self._values:
            if name not in known:
                raise unknown_option(name, known, self._name)
        if len(expression.arguments) > n_arguments:
            raise OptionError(f"{expression}: {self._name} takes {n_arguments} unnamed arguments at most")

    def integer(self, name: str, default: int) -> int:
        value = self.optional_integer(name)
        return default if value is None else value

    def optional_integer(self, name: str) -> int | None:
        text = self.optional(name)
        if text is None:
            return None
        try:
            return int(text)
        except ValueError:
            raise OptionError(f"{self._name}: {name} is {text!r}, which is not a whole number") from None

    def number(self, name: str, default: float) -> float:
        text = self.text(name, str(default))
        try:
            return float(text)
        except ValueError:
            raise OptionError(f"{self._name}: {name} is {text!r}, which is not a number") from None

    def text(self, name: str, default: str) -> str:
        value = self.optional(name)
        return default if value is None else value

    def optional(self, name: str) -> str | None:
        return self._values[name].atom if name in self._values else None

    def choice(self, name: str, allowed: list[str], default: str) -> str:
        text = self.text(name, default)
        if text not in allowed:
            raise unknown_option(text, allowed, f"{self._name}: {name}")
        return text


def _build_none(expression: Expression, environment: DraftEnvironment) -> Drafter:
    _Options(expression, [], 0)
    return NoDrafter()


def _build_prompt_lookup(expression: Expression, environment: DraftEnvironment) -> Drafter:
    options = _Options(expression, ["n", "max_ngram", "min_ngram"], 0)
    return PromptLookupDrafter(
        num_draft_tokens=options.integer("n", 5),
        max_ngram=options.integer("max_ngram", 4),
        min_ngram=options.integer("min_ngram", 2),
        name=str(expression),
    )


def _build_draft(expression: Expression, environment: DraftEnvironment) -> Drafter:
    options = _Options(expression, ["n", "sampling", "p_min", "tree", "depth", "topk", "nodes"], 1)
    tree = TreeOptions(
        tree=options.optional("tree"),
        depth=options.optional_integer("depth"),
        topk=options.optional_integer("topk"),
        nodes=options.optional_integer("nodes"),
        n=options.optional_integer("n"),
    )
    p_min = options.number("p_min", 0.0)
    if tree.asks_for_tree:
        return _build_draft_tree(expression, environment, options, tree, p_min)
    sampling: DraftSampling = "argmax" if options.choice("sampling", ["with", "argmax"], "with") == "argmax" else "with"
    n = options.integer("n", 5)
    return _with_draft_model(
        _file_of(expression, environment),
        environment,
        lambda context: DraftModelDrafter(
            context,
            target_vocab_size=environment.target.vocabulary.size,
            num_draft_tokens=n,
            sampling=sampling,
            p_min=p_min,
            name=str(expression),
        ),
    )


def _build_draft_tree(
    expression: Expression, environment: DraftEnvironment, options: _Options, tree: TreeOptions, p_min: float
) -> Drafter:
    schemes: dict[str, TreeSampling] = {"with": "with", "without": "without", "argmax": "argmax"}
    sampling = schemes[options.choice("sampling", list(schemes), "argmax" if tree.is_dynamic else "without")]
    path = _file_of(expression, environment)

    def plan(nodes: int, depth: int) -> Topology:
        measured = measured_acceptance(environment.target.path, path, sampling)
        return best_tree(measured or typical_acceptance(sampling), nodes, depth)

    shape = tree.shape(environment.context.n_batch, plan)
    return _with_draft_model(
        path,
        environment,
        lambda context: DraftTreeDrafter(
            context,
            target_vocab_size=environment.target.vocabulary.size,
            shape=shape,
            sampling=sampling,
            p_min=p_min,
            name=str(expression),
        ),
        *draft_size(shape),
    )


def _build_ensemble(expression: Expression, environment: DraftEnvironment) -> Drafter:
    _Options(expression, [], len(expression.arguments))
    members: list[Drafter] = []
    try:
        members += (_build(one, environment) for one in expression.arguments)
        return EnsembleDrafter(members, name=str(expression))
    except BaseException:
        for member in members:
            member.close()
        raise


def _with_draft_model(
    path: Path,
    environment: DraftEnvironment,
    build: Callable[[Context], Drafter],
    n_sequences: int = 1,
    n_outputs: int = 1,
) -> Drafter:
    """Open a draft model with a context of this size, and close both again if anything fails."""
    layers = resolve_gpu_layers(environment.n_gpu_layers, path)
    model = Model(path, n_gpu_layers=layers, use_mmap=environment.use_mmap)
    context: Context | None = None
    try:
        check_pair(environment.target, model)
        options = draft_context_options(environment.context, model)
        context = Context(model, dataclasses.replace(options, n_sequences=n_sequences, n_outputs=n_outputs))
        return build(context)
    except BaseException:
        if context is not None:
            context.close()
        model.close()
        raise


def draft_context_options(options: ContextOptions, model: Model) -> ContextOptions:
    """Return the target's context settings, no longer than the draft model was trained for."""
    return ContextOptions(
        n_ctx=min(options.n_ctx or model.n_ctx_train, model.n_ctx_train),
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        n_threads=options.n_threads,
        n_threads_batch=options.n_threads_batch,
        flash_attention=options.flash_attention,
        cache_type_k=options.cache_type_k,
        cache_type_v=options.cache_type_v,
    )


def _file_of(expression: Expression, environment: DraftEnvironment) -> Path:
    if expression.arguments:
        return Path(expression.arguments[0].atom).expanduser()
    default = (environment.default_files or {}).get(expression.atom)
    if default is None:
        raise OptionError(f"{expression}: name the GGUF file, as in {expression.atom}(small.gguf, n=5)")
    return default


_BUILDERS: dict[str, Callable[[Expression, DraftEnvironment], Drafter]] = {
    "none": _build_none,
    "draft": _build_draft,
    "ensemble": _build_ensemble,
    "prompt-lookup": _build_prompt_lookup,
}
