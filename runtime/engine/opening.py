"""Opening of models: the options of a runtime, a target, drafters' weights, and slots."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_type_hints

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions, RopeScaling
from specrun.bindings.errors import OptionError
from specrun.bindings.machine.placement import Placement, placing
from specrun.bindings.models.model import LoraFile, Model
from specrun.bindings.models.trial import trusting_files
from specrun.runtime.acceptance import PairRule, Rule, SequentialCascade, build_rule
from specrun.runtime.demo import demo_drafters, demo_target
from specrun.runtime.drafters.batching import DraftMeeting
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.mtp import reads_own_blocks
from specrun.runtime.drafters.retrieval import open_answers, with_reference
from specrun.runtime.engine.choices import Choices, DrafterMaker
from specrun.runtime.engine.keywords import RuntimeKeywords
from specrun.runtime.engine.session import Session
from specrun.runtime.engine.slots import EvaluationCost, SharedEvaluation, SlotClock
from specrun.runtime.language import parse_expression
from specrun.runtime.laws.sampling import (
    SamplingParams,
    random_if_unset,
    unknown_option,
    whole_number,
)
from specrun.runtime.memory import (
    Fitted,
    Loading,
    LoadOptions,
    fit_here,
    layers_of,
    noting_plan,
    plan_in_use,
)
from specrun.runtime.memory.fit import LayerCount
from specrun.runtime.models.names import locate_model
from specrun.runtime.online import (
    LearnFrom,
    RejectionNotes,
    RejectionStore,
    open_rejections,
)
from specrun.runtime.planning import Contact, CostCurve, contact_curve, drafter_for
from specrun.runtime.planning.kept_states import kept_states_of
from specrun.runtime.round.backend_laws import BackendSampling, is_wanted
from specrun.runtime.round.drafter import Owned
from specrun.runtime.round.padding import Shape


@dataclass(frozen=True, slots=True)
class RuntimeOptions(LoadOptions):
    """How models are loaded and evaluated.

    `context` has the settings of contexts, the target's and the draft model's; the needs of
    drafting (rows, sequences, states) are added to it. Its `n_ctx` 0 takes as much of the length
    the target was trained with as there is memory for; larger values than that are cut to it,
    unless `rope` stretches positions, which then holds for the draft model too. `placement` has the
    devices of models, of this machine and of others; without one, every GPU of this machine.
    `n_gpu_layers` is a count, "all" or "auto" (as many as fit, with the context, the drafter and a
    margin: `Runtime.memory_line`). `seed` None or -1 picks one at random for every answer, which
    its result names. `accept` names the acceptance rule: exact ones, or "typical(eps=0.09,
    delta=0.3)", which is not. `reference` is a text file that prompt lookup reads too: short for
    `prompt-lookup(reference=FILE)` wherever the drafter has a prompt lookup. `trust` opens files
    that were not seen before without trying them in another process. `shape` "fixed", or a width in
    tokens, evaluates as many tokens whatever is drafted, so that a text is the same to the bit with
    any drafter of point masses of that width; "pairs" evaluates two tokens at least.
    `backend_sampling` "on", or "auto" if a GPU has the whole target, sends only the best logits of
    each row to the host, in answers without log-probabilities that keep a top k; one GPU was tried.
    `lora` are adapters for the target, each a FILE or FILE:SCALE; the drafter stays as it is, so
    its acceptance may fall. `learn` True keeps rejected drafts in a buffer (`Runtime.rejections`),
    "keep" in the user's state folder, a path in that file; only a
    `specrun.train.online.online_drafter.OnlineDrafter` learns from them. `answers` True keeps
    answers for prompt lookups of later ones, "keep" in the user's state folder, a path in
    that file. A request may choose
    "none", the drafter or one of the drafters `others` (expressions, or makers of drafters of one's
    own), in full or by the name of its method if only one has it, and another acceptance rule: any
    exact one if `accept` is exact, any that is not if one of those is among `rules`. `measure`
    times evaluations when a file is loaded for the first time here, if a token takes more than 2 ms
    and anything drafts (`Runtime.contact_line`).
    """

    context: ContextOptions = field(default_factory=lambda: ContextOptions(n_ctx=4096))
    use_mlock: bool = False
    accept: str = "exact"
    chat_template: str | None = None
    seed: int | None = None
    reference: str | os.PathLike[str] | None = None
    trust: bool = False
    shape: Shape = "free"
    backend_sampling: BackendSampling = "off"
    lora: Sequence[str] = ()
    learn: LearnFrom = False
    answers: LearnFrom = False
    others: Sequence[str | DrafterMaker] = ()
    rules: Sequence[str] = ()
    measure: bool = True


@contextmanager
def loading_with(options: RuntimeOptions) -> Iterator[None]:
    """Load models where the options place them, tried before or trusted."""
    trust = trusting_files() if options.trust else nullcontext()
    with trust, placing(options.placement):
        yield


def _default_drafter(target: Path, options: RuntimeOptions) -> str:
    """Return the drafter of a target if none is named, as `specrun chat` chooses it."""
    warm = SamplingParams().temperature
    given = options.shape == "free"  # another shape may be too narrow for the drafter of a profile
    chosen = drafter_for(target, warm, options=options, accept=options.accept, use_profile=given)
    return chosen.expression


@dataclass(frozen=True, slots=True)
class OpenSlots:
    """The slots of an engine, open, and their common parts.

    `owned` is closed after all slots, in this order. `shared` evaluates for several slots.
    """

    options: RuntimeOptions
    model: Model
    fitted: Fitted | None
    rejections: RejectionStore | None
    choices: Choices
    owned: Sequence[Owned]
    sessions: Sequence[Session]
    shared: SharedEvaluation | None
    contact_line: str = ""


def open_slots(
    target: str | os.PathLike[str] | None,
    drafter: str | None,
    values: Mapping[str, Any],
    n_slots: int = 1,
) -> OpenSlots:
    """Open a target with drafters and slots; None: the embedded family's target.

    `values` are the fields of `RuntimeOptions`, of its context and its placement.
    """
    options = parse_options(values)
    _require_slots(n_slots, options)
    path, files = (demo_target(), demo_drafters()) if target is None else (locate_model(target), {})
    rule = build_rule(options.accept)
    if drafter is None:
        drafter = _default_drafter(path, options)
    if options.reference is not None:
        drafter = with_reference(drafter, Path(options.reference))
    with loading_with(options):
        loading = Loading(path, drafter, options, files, n_slots)
        loading = dataclasses.replace(loading, n_kept=kept_states_of(loading))
        fitted = fit_here(loading)
        if fitted is not None:
            loading = fitted.applied_to(loading)
        # Opened parts are closed again if the rest fails: the last opened first.
        with noting_plan(loading), ExitStack() as opened:
            model = _open_model(loading, options)
            opened.callback(model.close)
            contact = _first_contact(loading, options, model)
            answers = open_answers(options.answers, model)
            environment = _environment(loading, options, model, rule, contact.curve)
            environment = dataclasses.replace(environment, answers=answers)
            weights = build_drafter(loading.drafter, environment)
            opened.callback(weights.close)
            choices = Choices(weights, rule, environment, n_slots, options.others, options.rules)
            opened.callback(choices.close)
            rejections = open_rejections(options.learn, model)
            shared = None if n_slots == 1 else _share(choices, model, options, n_slots)
            targets = [choices.open_target(model)] if shared is None else shared.slots
            context = targets[0].context
            opened.callback(context.close)
            kept = [store for store in (rejections, answers) if store is not None]
            # Before the model, whose vocabulary they are written with.
            owned: Sequence[Owned] = (choices, context, *kept, model)
            sessions = []
            for each, drafters in zip(targets, choices.slots, strict=True):
                own = drafters.get(drafters.own)
                session = Session(each, own, rule, model.vocabulary, owned, drafters)
                session.costs = environment.known
                session.memory_note = functools.partial(_memory_note, loading)
                if shared is None or session.slot is None:
                    session.backend_sampling = is_wanted(options.backend_sampling, model)
                    session.cost_of = _cost_alone(environment)
                else:
                    session.slot.text = session.conversation
                    session.clock, session.cost_of = shared.clock, shared.last_cost
                session.answers = answers
                if rejections is not None:
                    session.rejections = RejectionNotes(rejections.buffer)
                sessions.append(session)
            opened.pop_all()  # the caller's from here on
    return OpenSlots(
        options, model, fitted, rejections, choices, owned, sessions, shared, contact.line
    )


def _first_contact(loading: Loading, options: RuntimeOptions, model: Model) -> Contact:
    """Return the cost of evaluations, measured now if a drafter of an unknown file needs it."""
    drafts = any(name != "none" for name in (loading.drafter, *options.others))
    # Adapters cost something, too, and belong to no file.
    measures = options.measure and drafts and not options.lora
    context = loading.options.context
    context = dataclasses.replace(context, n_ctx=context.size_for(model))
    return contact_curve(model, context, measures=measures)


def _open_model(loading: Loading, options: RuntimeOptions) -> Model:
    """Open the target with its adapters."""
    model = Model(
        loading.target,
        n_gpu_layers=layers_of(loading.target, loading.options),
        use_mmap=options.use_mmap,
        use_mlock=options.use_mlock,
        load_nextn=reads_own_blocks(parse_expression(loading.drafter)),
    )
    try:
        for text in options.lora:
            model.add_lora(LoraFile.parse(text))
        is_wanted(options.backend_sampling, model)  # raises for a wrong value
    except BaseException:  # Ctrl-C as well: it owns native memory
        model.close()
        raise
    return model


def _environment(
    loading: Loading,
    options: RuntimeOptions,
    model: Model,
    rule: Rule | SequentialCascade,
    measured: CostCurve | None,
) -> DraftEnvironment:
    """Return the environment of drafters; those of several slots meet, and share a clock."""
    context = loading.options.context
    sharing: dict[str, Any] = {}
    if loading.n_texts > 1:
        sharing = {"clock": SlotClock(), "meeting": DraftMeeting(loading.n_texts)}
    return DraftEnvironment.of(
        model,
        dataclasses.replace(context, n_ctx=context.size_for(model)),
        loading.options,
        default_files=loading.files,
        by_clock=rule.exact,
        keeps_rows=isinstance(rule, PairRule),
        shape=options.shape,
        n_kept=loading.n_kept,
        measured=measured,
        **sharing,
    )


def _share(
    choices: Choices, model: Model, options: RuntimeOptions, n_slots: int
) -> SharedEvaluation:
    """Return the evaluation that several slots share, in one context."""
    environment = choices.environment
    longest = environment.context.n_ctx
    n_ctx = options.context.n_ctx or longest * n_slots
    context = Context(model, choices.context_options(model, n_slots, n_ctx))
    clock, meeting = cast("SlotClock", environment.clock), environment.meeting
    longest = min(n_ctx, longest)
    widths = choices.widths(n_slots)
    curve, wider = environment.known, environment.wider
    return SharedEvaluation(context, n_slots, longest, curve, clock, meeting, widths, wider)


def _memory_note(loading: Loading) -> str:
    """Describe the memory in use, for errors of memory."""
    with placing(loading.options.placement):
        return plan_in_use(loading)


def _require_slots(slots: int, options: RuntimeOptions) -> None:
    """Raise `OptionError` for a number of slots that is none, or too large for the options."""
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
        raise OptionError(f"slots is {slots!r}: give how many conversations go on at once")
    if slots > 1 and options.shape != "free":
        why = "every round of several conversations has a width of its own"
        raise OptionError(f"shape is {options.shape!r}: {why}; leave it free, or give slots=1")
    if slots > 1 and options.backend_sampling == "on":
        raise OptionError("backend_sampling is for one conversation at a time: give slots=1")


def _cost_alone(environment: DraftEnvironment) -> Callable[[int], EvaluationCost]:
    """Return the cost of evaluations that a single slot has for itself."""
    known = functools.cache(lambda: environment.known)

    def cost_of(n_tokens: int) -> EvaluationCost:
        seconds = known().seconds
        return EvaluationCost(n_tokens, n_tokens, 1, seconds(n_tokens), seconds(1))

    return cost_of


_KINDS: dict[object, tuple[Callable[[object], bool], str]] = {
    int: (lambda value: whole_number(value) is not None, "a whole number"),
    bool: (lambda value: isinstance(value, bool), "True or False"),
    str: (lambda value: isinstance(value, str), "a text"),
    LayerCount: (
        lambda value: whole_number(value) is not None or value in ("auto", "all"),
        'a count of layers, "auto" or "all"',
    ),
    RopeScaling: (
        lambda value: isinstance(value, RopeScaling),
        "a RopeScaling, such as RopeScaling('yarn', scale=2)",
    ),
    ContextOptions: (
        lambda value: isinstance(value, ContextOptions),
        "a ContextOptions, such as ContextOptions(n_ctx=8192)",
    ),
    Placement: (
        lambda value: isinstance(value, Placement),
        "a Placement, such as Placement(devices=['CUDA0'])",
    ),
}


def _wanted_kind(value: object, kind: object) -> str:
    """Return the rule for options of this kind that the value breaks, "" if it is valid."""
    fits, wanted = _KINDS.get(kind, (lambda _: True, ""))
    return "" if fits(value) else wanted


def parse_options(values: Mapping[str, Any]) -> RuntimeOptions:
    """Return the options; those of context and placement may be given one by one, too."""
    kinds = get_type_hints(RuntimeKeywords)
    for name, value in values.items():
        if name not in kinds:
            raise unknown_option(name, list(kinds), "Runtime")
        wanted = _wanted_kind(value, kinds[name])
        if wanted:
            raise OptionError(f"{name} is {value!r}: give {wanted}")
    own = [field.name for field in dataclasses.fields(RuntimeOptions)]
    of_context = ContextOptions.chosen_names()
    of_placement = [field.name for field in dataclasses.fields(Placement)]
    options = RuntimeOptions(**{name: value for name, value in values.items() if name in own})
    if isinstance(options.lora, str | os.PathLike):
        raise OptionError(f"lora is {options.lora!r}: give a list of files, as ['a.gguf:0.5']")
    random_if_unset(options.seed)  # raises for a wrong seed, before a model is opened
    chosen = {name: value for name, value in values.items() if name in of_context}
    placed = {name: value for name, value in values.items() if name in of_placement}
    return dataclasses.replace(
        options,
        context=dataclasses.replace(options.context, **chosen),
        placement=dataclasses.replace(options.placement, **placed),
    )
