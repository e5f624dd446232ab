"""Builds `mtp(...)`: NextN blocks of the target, or of a file that holds them apart.

The blocks are shared; every conversation has a context over them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specrun.bindings.errors import OptionError
from specrun.bindings.model import Model
from specrun.bindings.mtp_context import MtpContext, check_nextn
from specrun.runtime.drafters.drafter import DrafterWeights
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment
from specrun.runtime.drafters.expression import Expression
from specrun.runtime.drafters.mtp import MtpDrafter, MtpSampling
from specrun.runtime.drafters.tree_laws import check_p_min
from specrun.runtime.methods import options_of
from specrun.runtime.pairing import check_blocks
from specrun.runtime.planning.offload import resolve_gpu_layers

__all__ = ["build_mtp", "reads_own_blocks"]

_DEFAULT_TOKENS = 3  # llama.cpp's --spec-draft-n-max


def build_mtp(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `mtp(n=3, sampling=argmax, p_min=0)`, or `mtp(mtp-blocks.gguf, ...)`."""
    options = options_of(expression)
    n = options.optional_integer("n")
    if n is not None and not 1 <= n < environment.context.n_batch:
        raise OptionError(f"n is {n}: give 1 to {environment.context.n_batch - 1} tokens, as many as a batch holds")
    schemes: dict[str, MtpSampling] = {"argmax": "argmax", "with": "with"}
    sampling = schemes[options.choice("sampling", list(schemes), "argmax")]
    p_min = options.number("p_min", 0.0)
    check_p_min(p_min)
    owns_model = bool(expression.arguments)
    model = _open(Path(expression.arguments[0].atom).expanduser(), environment) if owns_model else environment.target
    try:
        n_tokens = _n_tokens(expression, model, n)
        check_nextn(model)
    except BaseException:
        if owns_model:
            model.close()
        raise
    name, n_params = str(expression), model.n_params if owns_model else model.nextn.n_parameters
    context = dataclasses.replace(environment.context, n_sequences=1, n_outputs=n_tokens + 1)

    def start() -> MtpDrafter:
        opened = MtpContext(model, context)
        try:
            return MtpDrafter(
                opened,
                num_draft_tokens=n_tokens,
                sampling=sampling,
                p_min=p_min,
                n_params=n_params,
                name=name,
            )
        except BaseException:
            opened.close()
            raise

    return DrafterWeights(name, start, [model] if owns_model else [])


def reads_own_blocks(expression: Expression) -> bool:
    """Whether a drafter may draft with the target's own NextN blocks: the target must then be loaded with them.

    Bare `auto` does where the target has some.
    """
    if expression.atom in ("mtp", "auto") and not expression.arguments:
        return True
    inner = (*expression.arguments, *(value for _, value in expression.options))
    return any(map(reads_own_blocks, inner))


def _n_tokens(expression: Expression, model: Model, n: int | None) -> int:
    """Return how many tokens to draft: as asked, and with several blocks no more than there are."""
    blocks = model.nextn.count
    if blocks < 2:
        return n or _DEFAULT_TOKENS
    if n is not None and n > blocks:
        raise OptionError(
            f"{expression}: {model.path} has {blocks} NextN blocks, one for each token, so n is at most {blocks}"
        )
    return n or min(_DEFAULT_TOKENS, blocks)


def _open(path: Path, environment: DraftEnvironment) -> Model:
    """Open a file of NextN blocks; raises `PairError` unless they were made for a model like the target."""
    layers = resolve_gpu_layers(environment.n_gpu_layers, path)
    model = Model(path, n_gpu_layers=layers, use_mmap=environment.use_mmap, load_nextn=True)
    try:
        check_nextn(model)
        check_blocks(environment.target, model)
    except BaseException:
        model.close()
        raise
    return model
