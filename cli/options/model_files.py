"""Model files as options name them: a path, a name of a stored model, or one of the hub (-hf).

A name is looked up, and a model of the hub fetched, when all options are read: what is misspelt
behind it is said before anything is downloaded. Without -hf or `hf:` nothing asks the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from specrun.cli.terminal.paths import require_file
from specrun.cli.terminal.progress import fetch_progress
from specrun.cli.terminal.terminal import Terminal


class ModelName(str):
    """A model that is not named by its path: it is looked up when all options are read."""


class ModelFileType(click.ParamType["Path | ModelName"]):
    """A model: the command gets the path of its file, or of its `folder` where that is one, too."""

    name = "FILE|NAME"

    def __init__(self, *, folder: bool = False) -> None:
        self._folder = folder

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Path | ModelName:
        """Return an existing file, or the name of what `located` finds later."""
        from specrun.runtime.models import is_hub_name, looks_like_path

        if isinstance(value, Path | ModelName):
            return value
        text, path = str(value), Path(value).expanduser()
        if is_hub_name(text):
            from specrun.runtime.models import HubName

            HubName.parse(text)  # raises for what cannot be one
            return ModelName(text)
        if not looks_like_path(path, text):
            return ModelName(text)
        return path if self._folder else require_file(path)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Let the shell complete file names, and offer the names of stored models."""
        files = [CompletionItem(incomplete, type="file")]
        if not incomplete or "/" in incomplete[:1] or incomplete.startswith("."):
            return files
        from specrun.runtime.models import stored_models

        names = (model.name for model in stored_models().models)
        found = [name for name in names if name.casefold().startswith(incomplete.casefold())]
        return [CompletionItem(name) for name in found] or files


MODEL_FILE = ModelFileType()
MODEL_OR_FOLDER = ModelFileType(folder=True)


def located(name: str) -> Path:
    """Return the file of a model; what is fetched shows its progress."""
    from specrun.runtime.models import locate_model

    context = click.get_current_context(silent=True)
    given = {} if context is None else context.params
    terminal = Terminal(given.get("color") or "auto", quiet=bool(given.get("quiet")))
    with fetch_progress(terminal) as progress:
        return require_file(locate_model(name, progress=progress, warn=terminal.warn))


def locate_all(context: click.Context, unused: Callable[[str], bool]) -> None:
    """Put the files of models in the place of their names, but for options that are `unused`."""
    for name, value in context.params.items():
        if isinstance(value, ModelName) and not unused(name):
            context.params[name] = located(value)
        elif isinstance(value, tuple) and any(isinstance(item, ModelName) for item in value):
            files = (located(item) if isinstance(item, ModelName) else item for item in value)
            context.params[name] = tuple(files)


def with_hub_value(
    context: click.Context,
    options: Mapping[str, Any],
    own: tuple[Any, ParameterSource],
    name: str,
    hub: click.Option,
) -> tuple[Any, ParameterSource]:
    """Return the value of a model's option where -hf may stand in its place, and its source."""
    given, source = hub.consume_value(context, options)
    value, own_source = own
    if source is ParameterSource.DEFAULT:
        return own
    if hub.multiple:
        named = [f"hf:{text}" for text in given]
        before = list(value) if own_source is not ParameterSource.DEFAULT else []
        return (*before, *named), min(source, own_source)
    if source is own_source:
        raise click.UsageError(f"{name} and {hub.opts[0]} exclude each other", context)
    return own if own_source < source else (f"hf:{given}", source)


def set_offline(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    """Take models from the cache only, until the command ends."""
    if wanted:
        from specrun.runtime.models import without_hub

        context.with_resource(without_hub())
