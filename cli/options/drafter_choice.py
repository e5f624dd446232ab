"""Drafter expressions of -md, --spec-type and the other options named as in llama.cpp.

They are rewritten to the language of --drafter, so that there is one parser.
"""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path

import click

from specrun.bindings.errors import OptionError
from specrun.cli.options.model import DraftSettings
from specrun.cli.options.model_files import located
from specrun.cli.terminal.paths import require_file
from specrun.runtime.drafters.combinators import auto_expression
from specrun.runtime.language import METHODS, Expression, method_of_head, parse_expression, quoted

# llama.cpp's --spec-type names that mean the same here, and our own.
_SPEC_TYPES = {name: method.name for method in METHODS.values() for name in method.spec_types}


def drafter_expression(settings: DraftSettings, *, demo: bool) -> str:
    """Return the drafter expression of the options; with the demo, drafting is the default."""
    if settings.drafter is not None:
        if is_bare_auto(settings.drafter) and settings.model_draft is not None:
            _refuse_beside_drafter(dataclasses.replace(settings, model_draft=None))
            return auto_expression(_draft_call(settings, demo=demo))
        _refuse_beside_drafter(settings)
        return settings.drafter
    name = _method(settings.spec_type)
    if name is None and settings.reference is not None and settings.model_draft is None:
        name = "prompt-lookup"  # who names a text to quote from wants it to be used
    if name is None:
        name = "draft" if demo or settings.model_draft else "none"
    if name == "draft":
        return _draft_call(settings, demo=demo)
    file = METHODS[name].file
    if file is not None and (file.needed or settings.model_draft is not None):
        return _call(name, settings, _file_argument(settings, demo=False))
    if settings.model_draft is not None and name != "none":
        raise click.UsageError(
            f"--spec-type {settings.spec_type} drafts without a model: leave out -md"
        )
    return _call(name, settings, [])


def draft_kind(draft: Path | None) -> str:
    """Return what drafts with a file: a model, a kind of heads, or NextN blocks alone (mtp)."""
    if draft is None or not draft.is_file():
        return "draft"  # what is missing is reported where it is opened
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


def _refuse_beside_drafter(settings: DraftSettings) -> None:
    given = {
        "-md": settings.model_draft,
        "--spec-type": settings.spec_type,
        "--spec-draft-n-max": settings.spec_draft_n_max,
        "--spec-draft-p-min": settings.spec_draft_p_min,
    }
    for name, value in given.items():
        if value is not None:
            raise click.UsageError(
                f"{name} and --drafter say the same thing: put it into the expression"
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


def _draft_call(settings: DraftSettings, *, demo: bool) -> str:
    """Return the call of what drafts with the file of -md."""
    return _call(draft_kind(settings.model_draft), settings, _file_argument(settings, demo=demo))


def _file_argument(settings: DraftSettings, *, demo: bool) -> list[str]:
    if settings.model_draft is not None:
        return [quoted(str(settings.model_draft))]
    if demo:
        return []
    raise click.UsageError(f"--spec-type {settings.spec_type} needs a draft model: -md FILE")


def _call(name: str, settings: DraftSettings, arguments: list[str]) -> str:
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
                f"{option} says nothing without a drafter: give -md, --drafter or --spec-type"
            )
        if not METHODS[name].takes(parameter):
            raise click.UsageError(f"{option} {refusal}")
        arguments = [*arguments, f"{parameter}={value}"]
    return f"{name}({', '.join(arguments)})" if arguments else name
