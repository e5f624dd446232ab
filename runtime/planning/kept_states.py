"""How many tokens to draft at most if each keeps one more recurrent state.

llama.cpp takes drafts back from a recurrent state by keeping the states of the last few tokens, and
how many is fixed when a context is made. So the longest draft is chosen before anything is drafted:
as long as it would pay on the target's cost curve if nearly all drafts were right, and no longer
than a part of the memory beside the weights has room for. Every round drafts as much of that as
pays then (`draft_plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specrun.bindings.errors import ModelLoadError, SpecrunError
from specrun.bindings.machine import Device, current_placement, resolve_placement
from specrun.bindings.models import ROLLBACK_ARCHITECTURES
from specrun.runtime.memory.count import USUAL_KEPT, state_bytes
from specrun.runtime.memory.fit import Loading, layers_of, state_room
from specrun.runtime.memory.shape import ModelShape
from specrun.runtime.planning.curves import CostCurve
from specrun.runtime.planning.draft_plan import MOST_DRAFTED
from specrun.runtime.planning.profile import known_curve
from specrun.runtime.planning.theory import ChainInputs, best_lengths

_GOOD_ACCEPTANCE = 0.9  # of a passage that is easy to draft for
_LEAST_STEP = 0.02  # of a plain round: a drafted token of a small drafter
_SHARE_OF_MEMORY = 4  # a quarter of the free memory beside the weights


def kept_states(
    target: Path, curve: CostCurve, devices: Sequence[Device] = (), n_texts: int = 1
) -> int:
    """Return how many drafted tokens of each conversation may be taken back, at least 1."""
    chains = ChainInputs(_GOOD_ACCEPTANCE, _LEAST_STEP, 0.0, curve)
    longest = best_lengths(chains, MOST_DRAFTED).measured or 0
    shape = ModelShape.read(target)
    if shape.architecture not in ROLLBACK_ARCHITECTURES:  # accepted tokens are evaluated again
        return max(1, longest)
    state, weights = n_texts * state_bytes(target), sum(item.n_bytes for item in shape.tensors)
    room = max(0, state_room(devices) - weights) // _SHARE_OF_MEMORY
    return max(1, min(longest, room // state))


def kept_states_of(loading: Loading) -> int:
    """Return `kept_states` of a runtime that is to be opened on the devices in force.

    Raises `ModelLoadError` for a file that llama.cpp cannot load; others that cannot be read are
    left to whoever opens them.
    """
    target, options = loading.target, loading.options
    try:
        if not any(ModelShape.read(target).states):
            return USUAL_KEPT
        curve = known_curve(target, options.context, layers_of(target, options))
        devices = resolve_placement(current_placement()).offload
        # llama.cpp computes more tokens at once than are taken back: one that stays, and one more.
        most = max(1, min(options.context.n_batch, options.context.n_ubatch) - 2)
        return min(most, kept_states(target, curve, devices, loading.n_texts))
    except ModelLoadError:
        raise
    except SpecrunError:
        return USUAL_KEPT
