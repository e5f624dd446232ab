"""Candidates of a search: drafters that are there already, cuts, trained heads, and their plans.

Models of the same vocabulary (by its hash) and at most half the size could draft, as `specrun
models` lists them. So could heads that were made for this vocabulary and this width, those that
come with specrun included.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specrun.bench.accelerate.target import FITTED_TOKENS, SearchTarget
from specrun.bench.accelerate.training import TrainingOrder, train_head
from specrun.bindings.errors import OptionError
from specrun.bindings.files import cache_folder
from specrun.bindings.gguf import read_header
from specrun.bindings.models.nextn import NEXTN_ARCHITECTURES, read_nextn
from specrun.runtime.language import method_of_head, parse_expression, quoted
from specrun.runtime.models import (
    ModelEntry,
    StoredModel,
    catalogue,
    could_draft,
    shipped_heads,
    stored_models,
)
from specrun.runtime.planning import profile_file
from specrun.runtime.tuning import TuneOptions, keep_plans, tune

_BESIDE, _OURS = "beside it", "comes with specrun"
_MOST_HEADS, _MOST_MODELS = 4, 3
_PLAN_SECONDS, _CUT_SECONDS = 4.0, 3.0
_MOST_CUTS, _FEWEST_CUTS = 10, 3
_CUT_BUDGET = 25.0  # seconds, at most
_RUNS_OF_A_PLAN = 6  # texts of a plan at a temperature, about, by the time that they take
_FEWEST_FITTED = 16  # tokens of a text that a plan is made from
_WRITTEN = 4e8  # bytes of a cut that are written in a second, about
_EAGLE = ("eagle", "eagle3")
_MOST_BESIDE = 200  # files of a folder that are looked into
_USUAL_RATIO = 20.0  # times smaller than its target: the usually best ones


@dataclass(frozen=True, slots=True)
class FoundDrafter:
    """A file, or the target's own blocks (None), that could draft; `method` is how."""

    path: Path | None
    method: str
    where: str

    @property
    def name(self) -> str:
        """Its name for users."""
        return self.method if self.path is None else self.path.name


@dataclass(frozen=True, slots=True)
class CutFound:
    """A cut of the target's layers: its drafter expression, and its predicted speed-up."""

    drafter: str
    speed_up: float
    layers: str


def found_drafters(target: Path, named: Sequence[Path] = ()) -> list[FoundDrafter]:
    """Return the possible drafters for a file, the likely best first; raises as reading it does.

    Drafters that a user `named` are tried in any case, and before all others.
    """
    asked = [_named(path) for path in dict.fromkeys(named)]
    known = {path.resolve() for path in named}
    others = _looked_up(target)
    return asked + [new for new in others if new.path is None or new.path.resolve() not in known]


def _named(path: Path) -> FoundDrafter:
    header = read_header(path)
    method = method_of_head(header.architecture)
    alone = "mtp" if read_nextn(path, header).alone else "draft"
    return FoundDrafter(path.absolute(), method.name if method else alone, "named")


def _looked_up(target: Path) -> list[FoundDrafter]:
    header = read_header(target)
    blocks = read_nextn(target, header).count and header.architecture in NEXTN_ARCHITECTURES
    own = [FoundDrafter(None, "mtp", "NextN blocks of the file")] if blocks else []
    first, *others = catalogue(_models(target))
    fitting = [entry for entry in others if could_draft(entry, first)]
    heads = [entry for entry in fitting if entry.method is not None]
    models = sorted(
        (entry for entry in fitting if entry.method is None),
        key=lambda entry: abs(math.log(_ratio(first, entry) / _USUAL_RATIO)),
    )
    return own + [_found(entry) for entry in (*heads[:_MOST_HEADS], *models[:_MOST_MODELS])]


def _models(target: Path) -> Sequence[StoredModel]:
    """Return the target and all other files, each once, whatever leads to it."""
    beside = sorted(target.resolve().parent.glob("*.gguf"))[:_MOST_BESIDE]
    near = [StoredModel(path.name, _BESIDE, (path,)) for path in beside if path.is_file()]
    ours = [StoredModel(path.name, _OURS, (path,)) for path in shipped_heads()]
    models = {target.resolve(): StoredModel(target.name, "", (target,))}
    for model in (*near, *ours, *stored_models().models):
        models.setdefault(model.path.resolve(), model)
    return list(models.values())


def _ratio(target: ModelEntry, draft: ModelEntry) -> float:
    return (target.n_parameters or 1) / (draft.n_parameters or 1)


def _found(entry: ModelEntry) -> FoundDrafter:
    store = entry.model.store
    where = store if store in (_BESIDE, _OURS) else f"in the cache of {store}: {entry.model.name}"
    return FoundDrafter(entry.model.path.absolute(), entry.method or "draft", where)


class Candidates:
    """The possible drafters for the target of a search, as drafter expressions planned for it."""

    def __init__(self, target: SearchTarget) -> None:
        self._target = target

    def look(self) -> list[FoundDrafter]:
        """Return the possible drafters: in the file, beside it and in the caches."""
        return found_drafters(self._target.path, self._target.options.drafts)

    def plans(self, found: FoundDrafter, seconds: float) -> list[str]:
        """Return the expressions of a file: those of `tune` for a model, chains and trees else."""
        if found.path is None:
            return [found.method]
        file = quoted(str(found.path))
        self._target.check_memory(f"{found.method}({file})")
        if found.method == "draft":
            return [*self._tuned(found.path, seconds), f"draft({file})"]
        has_chain = found.method in (*_EAGLE, "dflash")
        chain = [f"{found.method}({file}, n=auto)"] if has_chain else []
        return [f"{found.method}({file})", *chain]

    def _tuned(self, draft: Path, seconds: float) -> list[str]:
        """Return the fastest plan for each temperature, if one drafts; all are kept."""
        target = self._target
        answers = _RUNS_OF_A_PLAN * len(target.options.params)
        affordable = int((seconds - _PLAN_SECONDS) / (answers * target.token_seconds))
        options = TuneOptions(
            target.path,
            draft,
            target.options.params,
            n_tokens=min(FITTED_TOKENS, max(_FEWEST_FITTED, affordable)),
            seconds=_PLAN_SECONDS,
            loading=dataclasses.replace(target.options.runtime, context=target.context),
        )
        result = tune(options, target.fitting_tokens)
        keep_plans(options, result)
        # Measured ones stand first, fastest first.
        found = (
            next((plan.options for plan in setting.candidates if plan.options), None)
            for setting in result.settings
        )
        fastest = [options for options in found if options]
        return [f"draft({quoted(str(draft))}, {plan})" for plan in dict.fromkeys(fastest)]

    def cut(self, seconds: float) -> CutFound:
        """Search for layers to skip, and write the best cut if a gain is expected."""
        from specrun.bench.layer_search import LayerSearchOptions, search_layers
        from specrun.convert import LayeredModel
        from specrun.convert.cut import range_text

        target = self._target
        greedy = min(target.options.params, key=lambda params: params.temperature)
        options = LayerSearchOptions(
            target.path,
            greedy,
            evaluations=self._affordable_cuts(min(_CUT_BUDGET, seconds)),
            n_tokens=FITTED_TOKENS,
            seconds=_CUT_SECONDS,
            most_seconds=min(_CUT_BUDGET, seconds),
            loading=dataclasses.replace(target.options.runtime, context=target.context),
        )
        result = search_layers(options, target.fitting_tokens)
        if result.interrupted:
            raise KeyboardInterrupt
        best = result.best
        path = cut_file(target.path)
        if best.speed_up > 1.0:
            path.parent.mkdir(parents=True, exist_ok=True)
            LayeredModel(target.path).write(path, best.kept, force=True)
        expression = f"draft({quoted(str(path))}, n={best.n_draft}, sampling={best.sampling})"
        return CutFound(expression, best.speed_up, range_text(best.skipped(result.n_layers)))

    def _affordable_cuts(self, seconds: float) -> int:
        """Return how many cuts can be judged; raises OptionError if they would take too long."""
        written = self._target.path.stat().st_size / _WRITTEN
        each = 0.5 + written + FITTED_TOKENS * self._target.token_seconds
        count = int(seconds / each)
        if count < _FEWEST_CUTS:
            problem = f"judging one takes about {each:.0f} seconds"
            raise OptionError(f"{problem}: specrun tune --layer-skip takes that time")
        return min(_MOST_CUTS, count)

    def train(self, hours: float) -> list[str]:
        """Train a head from the file alone, on prompts of which none is held out."""
        target = self._target
        own = target.prompts.fitting if target.options.prompts is not None else ()
        threads = target.context.n_threads
        found = self.look()
        heads = tuple(each.path for each in found if each.path and each.method in _EAGLE)
        order = TrainingOrder(target.path, hours, own, threads, heads, target.curve)
        head = train_head(order)
        return self.plans(FoundDrafter(head, method_of_file(head), "trained"), 0.0)


def method_of_file(head: Path) -> str:
    """Return the drafting method of a head's file."""
    method = method_of_head(read_header(head).architecture)
    if method is None:
        raise OptionError(f"{head} holds no heads")
    return method.name


def cut_file(target: Path) -> Path:
    """Return where the cut of a search is kept."""
    return cache_folder() / "cuts" / f"{profile_file(target).stem}.gguf"


def is_drafted_by(drafter: str, file: Path) -> bool:
    """Whether a drafter expression names a file."""
    return str(file) in files_in(drafter)


def files_in(drafter: str) -> list[str]:
    """Return the files that a drafter expression names."""
    found, left = [], [parse_expression(drafter)]
    while left:
        expression = left.pop()
        left += [*expression.arguments, *(value for _, value in expression.options)]
        if not expression.is_call and Path(expression.atom).is_file():
            found.append(expression.atom)
    return sorted(set(found))
