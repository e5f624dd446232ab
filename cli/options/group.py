"""Commands and their options for click: sections of the help, groups that commands share.

A `Section` declares options, alone or as fields of a dataclass. `option_group` binds several to a
decorator that gives their values to a command as one object, `SectionedCommand` writes the help,
and `LazyGroup` imports a command only when it runs. All options may come from the environment and
the config file.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem
from click.types import OptionHelpExtra

from specrun.bindings.errors import OptionError, SpecrunError
from specrun.cli.options.config_file import config_path, defaults_of, has_model_tables
from specrun.cli.options.types import MODEL_FILE, ModelFileType, ModelName, located
from specrun.cli.terminal.terminal import INTERRUPTED, reported_errors

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ENVIRONMENT_PREFIX = "SPECRUN"
CommandFunction: TypeAlias = Callable[..., Any]
Decorator: TypeAlias = Callable[[CommandFunction], CommandFunction]
Instance = TypeVar("Instance", bound="DataclassInstance")


class SectionedOption(click.Option):
    """An option that stands under a heading in the help, and may come from SPECRUN_<NAME> as well.

    The environment of one command (SPECRUN_CHAT_MODEL) goes before that of all (SPECRUN_MODEL).
    With a `field` the value, made ready by `read`, is that field of a dataclass: see `with_fields`.
    """

    def __init__(
        self,
        *args: Any,  # noqa: ANN401 - click's
        section: str,
        field: str = "",
        read: Callable[[Any], Any] = lambda value: value,
        **attributes: Any,  # noqa: ANN401 - click's
    ) -> None:
        super().__init__(*args, **attributes)
        self.section, self.field, self.read = section, field, read

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the command's own environment variable, or of the common one."""
        value = super().resolve_envvar_value(ctx)
        if value is not None or not self.name or not self.allow_from_autoenv:
            return value
        return os.environ.get(f"{ENVIRONMENT_PREFIX}_{self.name.upper()}") or None

    def process_value(self, ctx: click.Context, value: Any) -> Any:  # noqa: ANN401 - click's
        """Convert the value; the error of one from the config file names that file."""
        try:
            return super().process_value(ctx, value)
        except (click.UsageError, SpecrunError) as error:
            if ctx.get_parameter_source(str(self.name)) is ParameterSource.DEFAULT_MAP:
                text = error.format_message() if isinstance(error, click.UsageError) else error
                raise OptionError(f"{config_path()}: {text}") from error
            raise

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        """Return the brackets of the help: the default, not the range of valid values."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class ModelOption(SectionedOption):
    """An option that names a model; another one names a repository of the hub in its place."""

    def __init__(self, *args: Any, hub: str, **attributes: Any) -> None:  # noqa: ANN401 - click's
        super().__init__(*args, **attributes)
        self._hub = hub

    def consume_value(
        self, ctx: click.Context, opts: Mapping[str, Any]
    ) -> tuple[Any, ParameterSource]:
        """Return the given value, -hf OWNER/REPO as hf:OWNER/REPO, and its source."""
        own, own_source = super().consume_value(ctx, opts)
        hub = next(known for known in ctx.command.params if known.name == self._hub)
        given, source = hub.consume_value(ctx, opts)
        if source is ParameterSource.DEFAULT:
            return own, own_source
        if hub.multiple:
            before = () if own_source is ParameterSource.DEFAULT else own
            return (*before, *(f"hf:{text}" for text in given)), min(source, own_source)
        if source is own_source:
            raise click.UsageError(f"{self.opts[0]} and {hub.opts[0]} exclude each other", ctx)
        return (own, own_source) if own_source < source else (f"hf:{given}", source)

    def value_from_envvar(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's
        """Return the value of the environment: of several models, or of a path with spaces."""
        text = self.resolve_envvar_value(ctx)
        if text and self.multiple and Path(text).expanduser().exists():
            return (text,)
        return super().value_from_envvar(ctx)


def long_names(usage: str) -> tuple[str, ...]:
    """Return the long names in the usage of an option, such as ("predict", "max_tokens")."""
    return tuple(name.replace("-", "_") for name in re.findall(r"--([\w-]+)", usage))


class Section:
    """A heading in the help; its methods return click's decorators for options below it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def option(
        self,
        usage: str,
        help: str,
        kind: click.ParamType[Any] | None = None,
        *,
        dest: str | None = None,
        **attributes: Any,  # noqa: ANN401 - click's
    ) -> Decorator:
        """Declare an option by its usage as the help shows it, such as "-o, --output FILE".

        The command gets the value as `dest`, otherwise by the first long name. A default is shown
        unless `show_default` describes it.
        """
        *names, last = usage.split(", ")
        name, _, metavar = last.partition(" ")
        attributes.setdefault("show_default", attributes.get("default") is not None or None)
        attributes.setdefault("cls", SectionedOption)
        return click.option(
            *(*names, name, *([dest] if dest else [])),
            section=self.name,
            type=kind,
            metavar=metavar or None,
            help=help,
            **attributes,
        )

    def flag(self, usage: str, help: str, **attributes: Any) -> Decorator:  # noqa: ANN401 - click's
        """Declare an option without a value."""
        return self.option(usage, help, is_flag=True, **attributes)

    def setting(
        self,
        usage: str,
        help: str,
        kind: click.ParamType[Any] | None = None,
        **attributes: Any,  # noqa: ANN401 - click's
    ) -> Any:  # noqa: ANN401 - of the field's type
        """Declare a field of a dataclass by its option, for `option_group`."""
        return by_option(self.option(usage, help, kind, **attributes))

    def model(
        self,
        usage: str,
        help: str,
        kind: ModelFileType = MODEL_FILE,
        **attributes: Any,  # noqa: ANN401 - click's
    ) -> Decorator:
        """Declare an option that names a model, and -hf (-hfd for a drafter) in addition."""
        own = usage.split(", ")[0].split()[0]
        names, dest = "-hf, -hfr, --hf-repo", "hf_repo"
        if own == "-md":
            names, dest = "-hfd, -hfrd, --hf-repo-draft", "hf_repo_draft"
        option = self.option(usage, help, kind, cls=ModelOption, hub=dest, **attributes)
        hub = self.option(
            f"{names} OWNER/REPO[:QUANT]",
            f"Short for {own} hf:OWNER/REPO[:QUANT]: a model of the Hugging Face hub, fetched into "
            "the cache; without QUANT its Q4_K_M, Q8_0 or first file.",
            expose_value=False,
            multiple=bool(attributes.get("multiple")),
        )
        return declare(option, hub)

    def threads(self, help: str, *, usage: str = "-t, --threads N", most: int = 512) -> Decorator:
        """Declare -t, by default one thread a core."""
        kind = click.IntRange(0, most)
        return self.option(usage, help, kind, default=0, show_default="one a core")


MODEL, PROMPT, DRAFTING, SAMPLING = map(Section, ("Model", "Prompt", "Drafting", "Sampling"))
TEMPLATE, EVALUATION = Section("Chat template"), Section("Context and devices")
OUTPUT = Section("Output")
_OTHER = "Other"
_DRAFTS = ("drafter", "model_draft", "spec_type", "reference")  # options that name a drafter
_ORDER = [
    *(known.name for known in (MODEL, PROMPT, DRAFTING, SAMPLING, TEMPLATE, EVALUATION, OUTPUT)),
    _OTHER,
]


_ARGUMENTS = "specrun.arguments"


class SectionedCommand(click.Command):
    """A command whose help lists its options by section.

    Sections of its own come first, then those of `_ORDER`, which many commands have. If a
    parameter names a model, there is --offline too, and the command gets the model's file.
    """

    def __init__(self, *args: Any, **attributes: Any) -> None:  # noqa: ANN401 - click's
        super().__init__(*args, **attributes)
        if any(isinstance(known.type, ModelFileType) for known in self.params):
            offline_option(self)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; the config file has the defaults."""
        if not ctx.resilient_parsing and not {"-h", "--help"} & set(args):
            ctx.default_map = defaults_of(ctx)
            if has_model_tables():
                ctx.default_map = defaults_of(ctx, self._named_model(ctx, args))
        ctx.meta[_ARGUMENTS] = [*args]
        return super().parse_args(ctx, args)

    def _named_model(self, ctx: click.Context, args: Sequence[str]) -> list[str]:
        """Return the name that -m has, on the command line or elsewhere; none if it has several."""
        given = self.make_parser(ctx).parse_args([*args])[0]
        options = [known for known in self.params if isinstance(known, ModelOption)]
        targets = [known for known in options if known.name == "model" and not known.multiple]
        values = [known.consume_value(ctx, given)[0] for known in targets]
        return [str(value) for value in values if value]

    def again(self, ctx: click.Context, model: Iterable[str], read: click.Command) -> Any:  # noqa: ANN401 - what `read` returns
        """Read the same command line with the config file's options of a model.

        `read` has some of the options of this command, and gets their values.
        """
        with click.Context(self, ctx.parent, ctx.info_name) as own:
            own.default_map = defaults_of(own, model)
            super().parse_args(own, [*ctx.meta[_ARGUMENTS]])
            _locate_models(own)
            names = {known.name for known in read.params}
            assert read.callback is not None
            return read.callback(**{each: own.params[each] for each in names & {*own.params}})

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's
        """Put the files of models in the place of their names, and run the command."""
        _locate_models(ctx)
        return super().invoke(ctx)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write nothing: usage line and text explain the arguments; the manual page lists them."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, one definition list a section."""
        for name, records in options_by_section(ctx).items():
            with formatter.section(name):
                formatter.write_dl(records, col_max=34)


def _locate_models(ctx: click.Context) -> None:
    """Put the files of models in the place of their names."""
    models = [known.name for known in ctx.command.params if isinstance(known.type, ModelFileType)]
    for name in models:
        _open_set(str(name), ctx.params)
    _name_head(ctx.params)
    # Those in whose favour `load_options` and `draft_options` drop a model.
    instead: dict[str, tuple[str, ...]] = {"model": ("demo",)}
    if "spec_type" in ctx.params:
        instead["model_draft"] = ("drafter", "demo")
    for name, value in ctx.params.items():
        if outvoted([name], by=instead.get(name, ())):
            continue
        if isinstance(value, ModelName):
            ctx.params[name] = located(value)
        elif isinstance(value, tuple) and any(isinstance(item, ModelName) for item in value):
            files = (located(item) if isinstance(item, ModelName) else item for item in value)
            ctx.params[name] = tuple(files)


def _open_set(name: str, given: dict[str, Any]) -> None:
    """Put the target of a model set in the place of its folder, and its drafters if none is named.

    Raises OptionError for a set of which only a file can be meant.
    """
    folder = given.get(name)
    if not isinstance(folder, Path) or not folder.is_dir():
        return
    from specrun.runtime.models import is_set, read_set

    if not is_set(folder):
        return
    if name != "model":
        raise OptionError(f"{folder} is a set of models: name one of its files")
    found = read_set(folder)
    given["model"] = found.model
    if "drafter" in given and not any(given.get(other) for other in _DRAFTS):
        given["drafter"] = found.drafter


def _name_head(given: dict[str, Any]) -> None:
    """Let --spec-type name the drafter's file beside a model of the hub, as llama.cpp does."""
    kind = (given.get("spec_type") or "").removeprefix("draft-") + "-"
    target, named = given.get("model"), given.get("model_draft") or given.get("drafter")
    target = target[0] if isinstance(target, tuple) and len(target) == 1 else target
    if named or kind == "mtp-" or not isinstance(target, ModelName):
        return
    from specrun.runtime.models import HubName, is_hub_name
    from specrun.runtime.models.hub import HEADS, HUB_PREFIX

    if kind in HEADS and is_hub_name(target):
        repo = HubName.parse(target).repo_id
        given["model_draft"] = ModelName(f"{HUB_PREFIX}{repo}:{kind}")


def options_by_section(context: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Return usage and help of a command's options, by heading in the order of the help."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for option in context.command.get_params(context):
        record = option.get_help_record(context)
        if isinstance(option, click.Option) and record is not None:
            name = option.section if isinstance(option, SectionedOption) else _OTHER
            sections.setdefault(name, []).append(record)
    return {name: sections[name] for name in sorted(sections, key=place_of_section)}


def _set_offline(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        from specrun.runtime.models import without_hub

        context.with_resource(without_hub())


offline_option = MODEL.flag(
    "--offline",
    "Take models of the hub only from the cache, without the network.",
    expose_value=False,
    callback=_set_offline,
)


def place_of_section(section: str) -> int:
    """Return the position of a heading in the help; a command's own come first."""
    return _ORDER.index(section) if section in _ORDER else -1


def by_option(*options: Decorator) -> Any:  # noqa: ANN401 - of the field's type
    """Declare a field of a dataclass by the option that gives its value, for `option_group`."""
    return dataclasses.field(metadata={"options": options})


def options_of(settings: type[DataclassInstance]) -> list[Decorator]:
    """Return the options that declare the fields of a dataclass."""
    fields = dataclasses.fields(settings)
    return [option for each in fields for option in each.metadata["options"]]


def option_group(keyword: str, build: Callable[..., object], *options: Decorator) -> Decorator:
    """Return a decorator that adds options; the command gets `build(**values)` as `keyword`.

    Without `options`, `build` is a dataclass whose fields are declared by their options. Values of
    options with a `field` of their own come as one mapping, `fields`.
    """
    options = options or tuple(options_of(cast("type[DataclassInstance]", build)))
    # Only click has the names of the options' values: declare them on a command.
    probe = click.Command(None)
    for add in options:
        add(probe)
    known = {str(option.name): option for option in probe.params if option.expose_value}
    bound = {
        name: option
        for name, option in known.items()
        if isinstance(option, SectionedOption) and option.field
    }

    def decorate(command: CommandFunction) -> CommandFunction:
        @functools.wraps(command)
        def wrapper(*args: Any, **values: Any) -> Any:  # noqa: ANN401 - whatever click passes
            own = {name: values.pop(name) for name in known}
            if bound:
                own["fields"] = {
                    option.field: option.read(own.pop(name)) for name, option in bound.items()
                }
            return command(*args, **values, **{keyword: build(**own)})

        return declare(*options)(wrapper)

    return decorate


def declare(*options: Decorator) -> Decorator:
    """Return a decorator that adds options, or groups of them, in this order."""

    def decorate(command: CommandFunction) -> CommandFunction:
        for add in reversed(options):
            command = add(command)
        return command

    return decorate


def with_fields(default: Instance, values: Mapping[str, Any]) -> Instance:
    """Return a dataclass with these fields changed; "context.n_ctx" is inside of `context`."""
    changes: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        outer, _, rest = name.partition(".")
        if rest:
            inner.setdefault(outer, {})[rest] = value
        else:
            changes[outer] = value
    for name, several in inner.items():
        changes[name] = with_fields(getattr(default, name), several)
    return dataclasses.replace(default, **changes)


def outvoted(losers: Collection[str], *, by: Collection[str]) -> set[str]:
    """Return the `losers` that one of `by` overrides.

    The command line overrides the environment, and that the config file.
    """
    context = click.get_current_context()

    def source(name: str) -> ParameterSource:
        return context.get_parameter_source(name) or ParameterSource.DEFAULT

    first = min(map(source, by), default=ParameterSource.DEFAULT)
    return {name for name in losers if first < source(name) < ParameterSource.DEFAULT}


# == Groups that import a command only when it runs: help and completion stay fast =================


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command by its module and name, and its line in the group's help.

    `attribute` is its name in the module, if Python does not allow its own.
    """

    module: str
    name: str
    short_help: str
    attribute: str = ""


class LazyGroup(click.Group):
    """A group over a table of commands, of which those exist whose module is installed."""

    def __init__(self, *args: Any, lazy: Sequence[LazyCommand], **attributes: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **attributes)
        known = (command for command in lazy if importlib.util.find_spec(command.module))
        self._lazy = {command.name: command for command in known}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the table's order."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, imported now, or None; Ctrl-C meanwhile ends quietly."""
        known = self._lazy.get(cmd_name)
        if known is None:
            return None
        try:
            module = importlib.import_module(known.module)
        except KeyboardInterrupt:  # nothing has begun
            raise click.exceptions.Exit(INTERRUPTED) from None
        command: click.Command = getattr(module, known.attribute or known.name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.short_help) for name, command in self._lazy.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of commands without importing them."""
        found = [
            CompletionItem(name, help=command.short_help)
            for name, command in self._lazy.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; an unknown one is answered with the nearest."""
        if args[0] not in self._lazy and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], self._lazy, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(self._lazy)}."
            ctx.fail(f"No such command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the group's own options, --help and --version among them."""
        with reported_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's
        """Run the command; every error it raises is reported in one place."""
        with reported_errors(ctx):
            return super().invoke(ctx)
