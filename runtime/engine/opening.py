"""Opening of models: the options of a runtime, a target and a drafter's weights, and prompts."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrun.bindings.contexts.context_options import ContextOptions, RopeScaling
from specrun.bindings.errors import OptionError
from specrun.bindings.machine.placement import Placement, placing
from specrun.bindings.models.model import LoraFile, Model
from specrun.bindings.models.trial import trusting_files
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.acceptance import PairRule, Rule, SequentialCascade, build_rule
from specrun.runtime.drafters.batching import DraftMeeting
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.mtp import reads_own_blocks
from specrun.runtime.drafters.retrieval import with_reference
from specrun.runtime.language import parse_expression
from specrun.runtime.laws.sampling import random_if_unset, unknown_option, whole_number
from specrun.runtime.memory import Fitted, Loading, fit_here, noting_plan, plan_in_use
from specrun.runtime.memory.fit import LayerCount, resolve_gpu_layers
from specrun.runtime.online import LearnFrom
from specrun.runtime.round.backend_laws import BackendSampling, is_wanted
from specrun.runtime.round.drafter import DrafterWeights
from specrun.runtime.round.padding import Shape


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
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
    `specrun.train.online.online_drafter.OnlineDrafter` learns from them. A request may choose
    "none", the drafter or one of the drafters `others`, in full or by the name of its method if
    only one has it, and another acceptance rule: any exact one if `accept` is exact, any that is
    not if one of those is among `rules`.
    """

    context: ContextOptions = field(default_factory=lambda: ContextOptions(n_ctx=4096))
    placement: Placement = field(default_factory=Placement)
    n_gpu_layers: LayerCount = "auto"
    n_gpu_layers_draft: LayerCount = "auto"
    use_mmap: bool = True
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
    others: Sequence[str] = ()
    rules: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class OpenModels:
    """A target and its drafter's weights, opened.

    The drafter was built with `environment`; `fitted` is the memory plan that was chosen.
    `memory_note` describes the memory in use.
    """

    model: Model
    weights: DrafterWeights
    rule: Rule | SequentialCascade
    environment: DraftEnvironment
    fitted: Fitted | None
    memory_note: Callable[[], str]


@contextmanager
def opening(
    target: Path,
    drafter: str,
    options: RuntimeOptions,
    files: Mapping[str, Path],
    clock: Callable[[], float] = time.perf_counter,
    meeting: DraftMeeting | None = None,
) -> Iterator[OpenModels]:
    """Open a target and a drafter's weights, which the caller owns afterwards.

    Closes them again if the `with` block fails: the last opened first. Drafters measure their
    rounds by `clock`; at a `meeting` several conversations draft.
    """
    rule = build_rule(options.accept)
    if options.reference is not None:
        drafter = with_reference(drafter, Path(options.reference))
    trust = trusting_files() if options.trust else nullcontext()
    with trust, placing(options.placement):
        loading = Loading(
            target,
            drafter,
            options.context,
            options.n_gpu_layers,
            options.n_gpu_layers_draft,
            dict(files),
            1 if meeting is None else meeting.n_texts,
        )
        fitted = fit_here(loading)
        if fitted is not None:
            loading = fitted.applied_to(loading)
        with noting_plan(loading), ExitStack() as opened:
            model = Model(
                loading.target,
                n_gpu_layers=resolve_gpu_layers(loading.n_gpu_layers, loading.target),
                use_mmap=options.use_mmap,
                use_mlock=options.use_mlock,
                load_nextn=reads_own_blocks(parse_expression(loading.drafter)),
            )
            opened.callback(model.close)
            for text in options.lora:
                model.add_lora(LoraFile.parse(text))
            is_wanted(options.backend_sampling, model)  # raises for a wrong value
            sized = dataclasses.replace(loading.context, n_ctx=loading.context.size_for(model))
            environment = DraftEnvironment(
                target=model,
                context=sized,
                n_gpu_layers=loading.n_gpu_layers_draft,
                use_mmap=options.use_mmap,
                default_files=loading.files,
                clock=clock,
                by_clock=rule.exact,
                keeps_rows=isinstance(rule, PairRule),
                shape=options.shape,
                meeting=meeting,
            )
            weights = build_drafter(loading.drafter, environment)
            opened.callback(weights.close)

            def memory_note() -> str:
                with placing(options.placement):
                    return plan_in_use(loading)

            yield OpenModels(model, weights, rule, environment, fitted, memory_note)
            opened.pop_all()  # the caller's from here on


def prompt_tokens(vocabulary: Vocabulary, prompt: str | Sequence[int]) -> list[int]:
    """Return a prompt's tokens: a text's, or the ids themselves if they are tokens.

    Names of control tokens in a text are control tokens: see `Vocabulary.tokenize_prompt`.
    Raises `OptionError` for anything else.
    """
    if isinstance(prompt, str):
        return vocabulary.tokenize_prompt(prompt)
    if isinstance(prompt, bytes | bytearray | memoryview):  # each byte would be a token
        problem = f"the prompt is of {type(prompt).__name__}, which is neither a text nor tokens"
        raise OptionError(f"{problem}: decode it, as in prompt.decode()")
    try:
        given = list(prompt)
    except TypeError:
        raise OptionError(f"the prompt is {prompt!r}: give a text or token ids") from None
    size, tokens = vocabulary.size, []
    for place, value in enumerate(given):
        token = whole_number(value)
        if token is None:
            advice = "a prompt is a text, or token ids, which are whole numbers"
            raise OptionError(f"prompt token {place} is {value!r}: {advice}")
        if not 0 <= token < size:
            there = f"the vocabulary of {size} tokens"
            raise OptionError(f"prompt token {place} is {token}, outside {there}")
        tokens.append(token)
    return tokens


def parse_options(values: dict[str, Any]) -> RuntimeOptions:
    """Return the options; those of context and placement may be given one by one, too."""
    own = [field.name for field in dataclasses.fields(RuntimeOptions)]
    of_context = ContextOptions.chosen_names()
    of_placement = [field.name for field in dataclasses.fields(Placement)]
    for name in values:
        if name not in own and name not in of_context and name not in of_placement:
            raise unknown_option(name, [*of_context, *of_placement, *own], "Runtime")
    for name, kind, example in (
        ("rope", RopeScaling, "RopeScaling('yarn', scale=2)"),
        ("context", ContextOptions, "ContextOptions(n_ctx=8192)"),
        ("placement", Placement, "Placement(devices=['CUDA0'])"),
    ):
        if name in values and not isinstance(values[name], kind):
            advice = f"give a {kind.__name__}, such as {example}"
            raise OptionError(f"{name} is {values[name]!r}: {advice}")
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
