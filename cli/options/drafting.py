"""Drafters by option: expressions for -md and --spec-type, and learning (--learn).

Options with llama.cpp's names are rewritten to the language of --drafter: there is one parser.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click

from specrun.bindings.errors import MissingPackageError, OptionError
from specrun.cli.options.group import DRAFTING, option_group
from specrun.cli.options.model import DraftSettings
from specrun.cli.options.types import MAX_COUNT, located
from specrun.cli.terminal.terminal import require_file
from specrun.runtime.drafters.combinators import auto_expression
from specrun.runtime.language import METHODS, Expression, method_of_head, parse_expression, quoted
from specrun.runtime.online import KEEP, LearnFrom

# == Expressions ===================================================================================


# llama.cpp's --spec-type names that mean the same here, and our own.
_SPEC_TYPES = {name: method.name for method in METHODS.values() for name in method.spec_types}


def drafter_expression(settings: DraftSettings, *, demo: bool) -> str:
    """Return the drafter expression of the options; with the demo, drafting is the default."""
    draft = settings.model_draft
    if settings.drafter is not None:
        is_auto = draft is not None and is_bare_auto(settings.drafter)
        _refuse_beside_drafter(settings, but_model=is_auto)
        return auto_expression(_call(draft_kind(draft), settings)) if is_auto else settings.drafter
    name = _method(settings.spec_type)
    if name is None and settings.reference is not None and draft is None:
        name = "prompt-lookup"  # a text to quote from is there to be used
    if name is None:
        name = "draft" if demo or draft else "none"
    file = METHODS[name].file
    if draft is None:
        if file is not None and file.needed and not (demo and name == "draft"):
            raise click.UsageError(
                f"--spec-type {settings.spec_type} needs a draft model: -md FILE"
            )
    elif file is None and name != "none":
        raise click.UsageError(
            f"--spec-type {settings.spec_type} drafts without a model: leave out -md"
        )
    return _call(draft_kind(draft) if name == "draft" else name, settings)


def draft_kind(draft: Path | None) -> str:
    """Return the method that drafts with a file: draft, a kind of heads, or mtp."""
    if draft is None or not draft.is_file():
        return "draft"  # the error of a missing file comes when it is opened
    from specrun.bindings.gguf import read_header
    from specrun.bindings.models.nextn import read_nextn

    header = read_header(draft)
    method = method_of_head(header.architecture)
    if method is not None:
        return method.name
    return "mtp" if read_nextn(draft, header).alone else "draft"


def is_bare_auto(drafter: str) -> bool:
    """Whether an expression is `auto` without members; then -md may stand beside it."""
    expression = parse_expression(drafter)
    return expression.atom == "auto" and not (expression.is_call or expression.count)


def measured_drafters(names: Sequence[str], *, demo: bool) -> tuple[str, ...]:
    """Return drafters to measure, each with its file; raises as `require_draft_files`."""
    from specrun.bench.drafters.comparison import with_files
    from specrun.runtime.demo import demo_drafters

    files = demo_drafters() if demo else {}
    expressions = tuple(with_files(name, files) for name in names)
    for expression in expressions:
        require_draft_files(parse_expression(expression))
    return expressions


def require_draft_files(expression: Expression) -> None:
    """Raise with near names if a file named in an expression is missing; fetch those of the hub."""
    method = METHODS.get(expression.atom)
    takes = None if method is None else method.file
    for file in expression.arguments:
        if file.is_call:
            continue
        if takes is not None and takes.is_model:
            located(file.atom)
        elif takes is not None or file.atom.endswith(".gguf"):
            require_file(Path(file.atom).expanduser())
    for name, value in expression.options:
        if not value.is_call and (value.atom.endswith(".gguf") or name == "reference"):
            require_file(Path(value.atom).expanduser())
    for file in (*expression.arguments, *(value for _, value in expression.options)):
        require_draft_files(file)


def _refuse_beside_drafter(settings: DraftSettings, *, but_model: bool) -> None:
    given = {
        "-md": None if but_model else settings.model_draft,
        "--spec-type": settings.spec_type,
        "--spec-draft-n-max": settings.spec_draft_n_max,
        "--spec-draft-p-min": settings.spec_draft_p_min,
    }
    for name, value in given.items():
        if value is not None:
            raise click.UsageError(
                f"{name} and --drafter have the same meaning: put it into the expression"
            )
    require_draft_files(parse_expression(settings.drafter or ""))


def _method(spec_type: str | None) -> str | None:
    if spec_type is None:
        return None
    name = spec_type.strip()
    if "," in name:
        raise click.UsageError(
            f"--spec-type {name}: give one method, or combine drafters with --drafter"
        )
    if name not in _SPEC_TYPES:
        near = difflib.get_close_matches(name, _SPEC_TYPES, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_SPEC_TYPES)}"
        raise OptionError(f"--spec-type {name} does not exist here: {hint}")
    return _SPEC_TYPES[name]


def _call(name: str, settings: DraftSettings) -> str:
    """Return the call of a method with the file of -md and the limits of its drafts."""
    draft = None if name == "none" else settings.model_draft
    arguments = [] if draft is None else [quoted(str(draft))]
    trees, heads = "put nodes= or tree= into --drafter", "draft models and EAGLE heads"
    given = (
        ("n", "n-max", settings.spec_draft_n_max, f"is not known to {name}: {trees}"),
        ("p_min", "p-min", settings.spec_draft_p_min, f"is about {heads}, not {name}"),
    )
    for parameter, suffix, value, refusal in given:
        if value is None:
            continue
        option = f"--spec-draft-{suffix}"
        if name == "none":
            raise click.UsageError(
                f"{option} has no effect without a drafter: give -md, --drafter or --spec-type"
            )
        if not METHODS[name].takes(parameter):
            raise click.UsageError(f"{option} {refusal}")
        arguments.append(f"{parameter}={value}")
    return f"{name}({', '.join(arguments)})" if arguments else name


# == Online speculative decoding: whether a draft model learns, how often, and its files ===========


@dataclass(frozen=True, slots=True)
class LearnSettings:
    """Whether the draft model learns between answers, how often, and whether that is kept."""

    learn: bool = DRAFTING.setting(
        "--learn",
        "Train the draft model (-md) on its rejected drafts between answers. The result is "
        "discarded at the end. The text keeps the target's distribution.",
        is_flag=True,
    )
    learn_keep: bool = DRAFTING.setting(
        "--learn-keep",
        "Like --learn, and keep the rejected drafts and the drafter in the user's state folder "
        "for later calls with this option (specrun learn show, forget).",
        is_flag=True,
    )
    learn_every: int = DRAFTING.setting(
        "--learn-every N",
        "Update after every N answers; 0: only by /learn in a chat.",
        click.IntRange(0, MAX_COUNT),
        default=10,
    )
    learn_rate: float | None = DRAFTING.setting(
        "--learn-rate RATE",
        "The learning rate of updates.",
        click.FloatRange(0, 10, min_open=True),
        show_default="3e-5 times 4096 / width",
    )

    @property
    def wanted(self) -> bool:
        """Whether rejected drafts are collected at all."""
        return self.learn or self.learn_keep

    @property
    def place(self) -> LearnFrom:
        """The store of rejected drafts: `RuntimeOptions.learn`."""
        return KEEP if self.learn_keep else self.learn


learn_options = option_group("learning", LearnSettings)


# == Packages that only training needs =============================================================


_TRAINING = ("torch", "transformers", "safetensors", "gguf")


def require_training(what: str) -> None:
    """Raise MissingPackageError with the command that installs the packages `what` needs."""
    missing = next((name for name in _TRAINING if find_spec(name) is None), None)
    if missing is not None:
        raise MissingPackageError(what, missing, "train")
