"""Builds `early-exit(layers=4, n=auto)`: the target's first layers, shared by all conversations."""

from __future__ import annotations

from typing import cast, get_args

from specrun.bindings.errors import OptionError
from specrun.runtime.drafter import DrafterWeights
from specrun.runtime.drafters.early_exit.drafter import EarlyExitDrafter, ExitSampling
from specrun.runtime.drafters.early_exit.exit_layers import ExitLayers
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment
from specrun.runtime.language import Expression
from specrun.runtime.methods import options_of
from specrun.runtime.trees import check_p_min


def build_early_exit(
    expression: Expression, env: DraftEnvironment, build: BuildPart
) -> DrafterWeights:
    """Build `early-exit(layers=a third, n=auto, sampling=with, p_min=0)`."""
    options = options_of(expression)
    n, n_layer = options.length("n"), env.target.n_layer
    if n is not None and not 1 <= n < env.context.n_batch:
        most = f"{env.context.n_batch - 1} tokens, as many as a batch holds"
        raise OptionError(f"n is {n}: give 1 to {most}")
    layers = options.integer("layers", max(1, n_layer // 3))
    if not 1 <= layers < n_layer:
        has = f"{env.target.path} has {n_layer}, all of which would be the target itself"
        raise OptionError(f"{expression}: an exit after {layers} layers: {has}")
    schemes = list(get_args(ExitSampling))
    sampling = cast("ExitSampling", options.choice("sampling", schemes, "with"))
    p_min = options.number("p_min", 0.0)
    check_p_min(p_min)
    if env.context.rope.stretches:
        problem = "draws by the rotary positions of the file: leave out the options that scale them"
        raise OptionError(f"{expression} {problem}")
    exit_layers = ExitLayers(env.target, layers, n_threads=env.context.n_threads)
    name, n_cells, n_params = str(expression), env.n_ctx, exit_layers.evaluated_params
    share = n_params / max(1, env.target.n_params)

    def start() -> EarlyExitDrafter:
        cells = exit_layers.cells(n_cells)
        try:
            return EarlyExitDrafter(
                cells,
                n or env.most_drafted,
                sampling=sampling,
                p_min=p_min,
                length=None if n is not None else env.draft_length(share),
                n_params=n_params,
                name=name,
            )
        except BaseException:
            cells.close()
            raise

    pace = env.pace_of(chooses=n is None, draws=sampling != "argmax")
    return DrafterWeights(name, start, [exit_layers], pace)
