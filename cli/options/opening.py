"""Opening of a runtime or an engine by the options' values; the cache of --session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from specrun.bindings.errors import FileMissingError, OptionError
from specrun.bindings.files import check_target, require_writable
from specrun.cli.options.drafting import drafter_expression, is_bare_auto
from specrun.cli.options.group import EVALUATION
from specrun.cli.options.model import DraftSettings, LoadSettings, TemplateSettings
from specrun.cli.options.prompt import check_named
from specrun.cli.options.types import NEW_FILE
from specrun.cli.terminal.screen import bytes_text
from specrun.cli.terminal.terminal import Terminal, read_text
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import build_rule
from specrun.runtime.demo import demo_drafters, demo_target
from specrun.runtime.drafters.combinators import auto_expression
from specrun.runtime.engine import Engine
from specrun.runtime.grammar.compiled import compiled
from specrun.runtime.online import KEEP
from specrun.runtime.planning import ANY, drafter_for, tuned_plan
from specrun.runtime.round import Shape

Opened = TypeVar("Opened", Runtime, Engine)


# == Opening =======================================================================================


PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ '' if message.role == 'user' else '\n' }}{% endfor %}"
)
"""A chat by --no-chat-template: the answer continues the user's text, and ends with a new line."""


@contextmanager
def open_models(
    kind: type[Opened],
    load: LoadSettings,
    draft: DraftSettings,
    template: TemplateSettings,
    params: SamplingParams,
    terminal: Terminal,
    workload: str = ANY,
    **more: Any,  # noqa: ANN401 - of `RuntimeOptions`, and an engine's slots
) -> Iterator[Opened]:
    """Load the models that the options name, for a runtime or an engine, until the end.

    `params` choose among tuned plans and, with the `workload`, in a profile. Raises if their
    grammar does not compile, or if a logit bias names a token that the target lacks.
    """
    check_named(load)
    drafter, shape = chosen_drafter(load, draft, params, terminal, workload)
    is_alone = issubclass(kind, Runtime)
    options = {
        **load.runtime_options(),
        "accept": draft.accept,
        "chat_template": template_text(template),
        "seed": None,
        "reference": draft.reference,
        # A width that tune found is for one conversation.
        "shape": shape if is_alone else draft.shape or "free",
        "answers": KEEP if draft.keep_answers else False,
        **more,
    }
    for path in () if load.model else (demo_target(), *demo_drafters().values()):
        if not path.is_file():
            raise FileMissingError(
                f"the embedded models are not part of this installation ({path.name} is missing): "
                "install specrun again, or name a model with -m"
            )
    with terminal.meanwhile(f"loading {load.model or 'the embedded models'} ..."):
        if load.model is None:
            opened = kind.demo(drafter, **options)
        else:
            opened = kind(load.model, drafter, **options)
    with opened:
        _print_remarks(opened, load, draft, terminal)
        if params.grammar is not None:
            compiled(params.grammar, opened.vocabulary)
        size = opened.vocabulary.size
        for token in params.logit_bias:
            if token >= size:
                names = f"--logit-bias names token {token}"
                raise OptionError(f"{names}: the model has {size} tokens, numbered from 0")
        yield opened


def _print_remarks(
    opened: Runtime | Engine, load: LoadSettings, draft: DraftSettings, terminal: Terminal
) -> None:
    """Print warnings, and what was planned and measured while the models were opened."""
    layers = load.options.n_gpu_layers
    if layers not in ("auto", 0) and opened.model.n_gpu_layers == 0:
        terminal.warn(
            f"-ngl {layers} is ignored, there is no GPU here: `specrun doctor` shows the devices"
        )
    memory = ""
    if isinstance(opened, Runtime):
        memory = opened.memory_line
        ours, theirs = opened.model.n_params, opened.session.drafter.n_params
        if theirs > ours:
            terminal.warn(
                f"the draft model is larger than the target ({theirs:,} parameters against "
                f"{ours:,}): were they swapped? Drafting will cost more than it saves"
            )
    rule = build_rule(draft.accept)
    if not rule.exact:
        terminal.warn(f"not exact: {rule.name}: the text does not have the target's distribution")
    for note in filter(None, (opened.remark, memory, opened.contact_line)):
        terminal.note(note)


def chosen_drafter(
    load: LoadSettings,
    draft: DraftSettings,
    params: SamplingParams,
    terminal: Terminal,
    workload: str = ANY,
) -> tuple[str, Shape]:
    """Return how to draft, and in which shape: as named, planned, in the profile, or `auto`."""
    drafter, shape = _tuned(load, draft, params, terminal)
    # A given shape may be too narrow for the drafter of a profile.
    if not drafter and load.model is not None and not draft.is_named and draft.shape is None:
        chosen = drafter_for(
            load.model,
            params.temperature,
            workload,
            options=load.options,
            accept=draft.accept,
            use_profile=not draft.no_profile,
            warn=terminal.warn,
        )
        if chosen.note:
            terminal.note(chosen.note)
        drafter = chosen.expression
    return drafter or drafter_expression(draft, demo=load.demo), shape


def _tuned(
    load: LoadSettings, draft: DraftSettings, params: SamplingParams, terminal: Terminal
) -> tuple[str | None, Shape]:
    """Return the plan of `specrun tune` for this pair, if -md alone names the drafter."""
    explicit = (draft.spec_type, draft.spec_draft_n_max, draft.spec_draft_p_min, draft.reference)
    choosing = draft.drafter is not None and is_bare_auto(draft.drafter)
    shape = draft.shape or "free"
    if load.model is None or draft.model_draft is None or explicit != (None,) * 4:
        return None, shape
    if draft.drafter is not None and not choosing:
        return None, shape
    plan = tuned_plan(load.model, draft.model_draft, params, load.options, warn=terminal.warn)
    expression = None if plan is None else plan.expression(draft.model_draft)
    # auto measures again, so a plan that found plain decoding faster only leaves the default shape
    if choosing:
        return (None if expression in (None, "none") else auto_expression(expression)), shape
    if expression == "none":
        terminal.note(
            "specrun tune found that drafting does not pay for this pair here: decoding plainly"
        )
    if plan is not None and plan.width and draft.shape is None:
        shape = plan.width
        terminal.note(
            f"every evaluation has {shape} tokens, which specrun tune found no slower: the text "
            "does not depend on the drafter (--shape free: as many as needed)"
        )
    return expression, shape


def template_text(template: TemplateSettings) -> str | None:
    """Return the text of the chat template of the options; None: the model's own."""
    text, file = template.chat_template, template.chat_template_file
    if (text is not None) + (file is not None) + template.no_chat_template > 1:
        raise click.UsageError(
            "give one of --chat-template, --chat-template-file and --no-chat-template"
        )
    if template.no_chat_template:
        return PLAIN_TEMPLATE
    if file is not None:
        return read_text(file)
    if text is not None and "{" not in text:
        raise click.UsageError(
            f"--chat-template {text!r} is not Jinja text: there are no built-in templates by name; "
            "for a file use --chat-template-file"
        )
    return text


# == --session: the cache of a long prompt, kept in a file for the next run ========================


session_option = EVALUATION.option(
    "--session FILE",
    "Load the cache from FILE if it exists, and save it there at the end, so that a prompt is "
    "evaluated only once. A file of another model or of other settings is refused.",
    NEW_FILE,
)


@contextmanager
def kept_session(
    opened: Callable[[], Runtime], path: Path | None, terminal: Terminal
) -> Iterator[None]:
    """Take up the cache of a file, and keep the cached part at the end of the block.

    `opened` returns the runtime; if it has another model in the end, the file stays as it was.
    """
    if path is None:
        yield
        return
    path, runtime = path.expanduser(), opened()
    model = runtime.model.path
    check_target(path, force=True)
    require_writable(path)
    if path.exists():
        n_tokens = runtime.load_session(path)
        if n_tokens:
            terminal.note(f"{path}: {n_tokens:,} tokens of an earlier run are cached")
        else:
            why = f"{runtime.drafter} reads the target's states of the whole prompt"
            terminal.note(f"{path} is not taken up: {why}")
    yield
    runtime = opened()
    if runtime.model.path != model:
        terminal.note(f"{path} stays as it was: it is another model's now that answers")
        return
    n_tokens = runtime.save_session(path)
    terminal.note(f"{path}: {n_tokens:,} tokens kept, {bytes_text(path.stat().st_size)}")
