"""Options that several commands share: declared once as a group, handed to the command as one
object."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import click
from click.core import ParameterSource
from click.types import OptionHelpExtra

ENVIRONMENT_PREFIX = "SPECRUN"
_SECTIONS = (
    "Model",
    "Prompt",
    "Drafting",
    "Sampling",
    "Chat template",
    "Context and devices",
    "Output",
    "Other",
)
CommandFunction: TypeAlias = Callable[..., None]
Decorator: TypeAlias = Callable[[CommandFunction], CommandFunction]


class SectionedOption(click.Option):
    """An option that stands under a heading in the help, and may come from SPECRUN_<NAME> as well.

    The environment of one command (SPECRUN_CHAT_MODEL) goes before that of all (SPECRUN_MODEL).
    `old_names` are earlier spellings: they still work, and neither the help nor a message shows
    them.
    """

    def __init__(
        self,
        *args: Any,  # noqa: ANN401 - click's
        section: str = "Other",
        old_names: Sequence[str] = (),
        **attributes: Any,  # noqa: ANN401 - click's
    ) -> None:
        super().__init__(*args, **attributes)
        self.section, self.old_names = section, tuple(old_names)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:  # noqa: ANN401 - private in click
        """Let the parser know the old spellings, too."""
        super().add_to_parser(parser, ctx)
        for name in self.old_names:
            parser.add_option(
                obj=self, opts=[name], dest=self.name, action="store", nargs=self.nargs
            )

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the first environment variable that is set."""
        value = super().resolve_envvar_value(ctx)
        if value is not None or not self.name or not self.allow_from_autoenv:
            return value
        known = [f"{ENVIRONMENT_PREFIX}_{self.name.upper()}"]
        for name in (old.strip("-").replace("-", "_").upper() for old in self.old_names):
            known += [f"{ctx.auto_envvar_prefix}_{name}", f"{ENVIRONMENT_PREFIX}_{name}"]
        return next((os.environ[name] for name in known if os.environ.get(name)), None)

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        """Return what stands in brackets: the default. What is out of range says so when it is
        given."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class SectionedCommand(click.Command):
    """A command whose help lists its options by section, those that matter to most users first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, one definition list a section, the known ones in their usual order."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                section = parameter.section if isinstance(parameter, SectionedOption) else "Other"
                sections.setdefault(section, []).append(record)
        known = [name for name in _SECTIONS if name in sections]
        for name in [*(name for name in sections if name not in known), *known]:
            with formatter.section(name):
                formatter.write_dl(sections[name], col_max=34)


def option(*names: str, section: str, **attributes: Any) -> Decorator:  # noqa: ANN401 - click's
    """Return click's option decorator for an option of a section."""
    return click.option(*names, cls=SectionedOption, section=section, **attributes)


def option_group(keyword: str, build: Callable[..., object], *options: Decorator) -> Decorator:
    """Return a decorator that adds options and passes `build(**their values)` to the command as
    `keyword`."""

    def decorate(command: CommandFunction) -> CommandFunction:
        names = _names_of(options)

        @functools.wraps(command)
        def wrapper(*args: Any, **values: Any) -> None:  # noqa: ANN401 - whatever click passes
            own = {name: values.pop(name) for name in names}
            command(*args, **values, **{keyword: build(**own)})

        decorated: CommandFunction = wrapper
        for decorator in reversed(options):
            decorated = decorator(decorated)
        return decorated

    return decorate


def outvoted(losers: Collection[str], *, by: Collection[str]) -> set[str]:
    """Return the `losers` that come from the environment where one of `by` is given on the command
    line."""
    context = click.get_current_context()

    def came_from(name: str, source: ParameterSource) -> bool:
        return context.get_parameter_source(name) is source

    if not any(came_from(name, ParameterSource.COMMANDLINE) for name in by):
        return set()
    return {name for name in losers if came_from(name, ParameterSource.ENVIRONMENT)}


def _names_of(options: tuple[Decorator, ...]) -> list[str]:
    """Return the parameter names that options pass on, by declaring them on a function of no
    use."""

    def probe() -> None: ...

    for decorator in options:
        decorator(probe)
    parameters: list[click.Parameter] = probe.__click_params__  # type: ignore[attr-defined]
    return [parameter.name for parameter in parameters if parameter.expose_value and parameter.name]
