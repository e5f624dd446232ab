"""Types of option values: files and models, -ngl, sizes, lists of numbers, tensor types."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from specrun.bindings.errors import OptionError
from specrun.cli.terminal.screen import fetch_progress
from specrun.cli.terminal.terminal import Terminal, require_file

if TYPE_CHECKING:
    from specrun.runtime.memory import LayerCount
    from specrun.runtime.round import Shape


# == Values ========================================================================================


_LOGIT_BIAS = re.compile(r"(\d+)([+-])(inf|\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)", re.IGNORECASE)
_SIZE = re.compile(r"(\d+\.?\d*|\.\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_SIZE_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_Parameter: TypeAlias = click.Parameter | None
_Context: TypeAlias = click.Context | None


class ExistingFile(click.ParamType[Path]):
    """A file that must be there; a wrong name is answered with near ones and exit code 3."""

    name = "FILE"

    def convert(self, value: Any, param: _Parameter, ctx: _Context) -> Path:  # noqa: ANN401
        """Return the path of an existing file."""
        return require_file(Path(value).expanduser())

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Let the shell complete file names."""
        return [CompletionItem(incomplete, type="file")]


FILE = ExistingFile()
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
PATH = click.Path(path_type=Path)
MAX_COUNT = 2**31 - 1
SHARE = click.FloatRange(0, 1)
SHARE_BELOW_ONE = click.FloatRange(0, 1, max_open=True)


class LayerCountType(click.ParamType["LayerCount"]):
    """The value of -ngl: a number, "auto" or "all"."""

    name = "N|auto|all"

    def convert(self, value: Any, param: _Parameter, ctx: _Context) -> LayerCount:  # noqa: ANN401
        """Return the count, or the name."""
        from specrun.runtime.memory import parse_layer_count

        try:
            count = parse_layer_count(str(value))
        except OptionError as error:
            self.fail(str(error), param, ctx)
        if isinstance(count, int) and not -1 <= count <= 10_000:
            self.fail(f"{count} layers: give -1 (all), 0 (none) or a count", param, ctx)
        return count


class ShapeType(click.ParamType["Shape"]):
    """The value of --shape: "free", "pairs", "fixed" or a width in tokens."""

    name = "free|pairs|fixed|N"

    def convert(self, value: Any, param: _Parameter, ctx: _Context) -> Shape:  # noqa: ANN401
        """Return the width, or the name."""
        if value in ("free", "pairs", "fixed"):
            return cast("Shape", value)
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r}: give free, pairs, fixed or a width in tokens", param, ctx)


class SizeType(click.ParamType[int]):
    """An amount of memory in bytes: 8G, 512M, 1.5G; binary units, as `bytes_text` shows them."""

    name = "SIZE"

    def convert(self, value: Any, param: _Parameter, ctx: _Context) -> int:  # noqa: ANN401
        """Return the bytes."""
        match = _SIZE.fullmatch(str(value).strip())
        n_bytes = int(float(match[1]) * 2 ** _SIZE_UNITS[match[2].upper()]) if match else 0
        if not 0 < n_bytes < 2**60:
            self.fail(f"{value!r} is no amount of memory: give such as 8G or 512M", param, ctx)
        return n_bytes


class MemorySizesType(click.ParamType[tuple[int, ...]]):
    """Amounts of memory, separated by commas: 8G,12G; "cards" are those of common cards."""

    name = "SIZE,..."

    def convert(self, value: Any, param: _Parameter, ctx: _Context) -> tuple[int, ...]:  # noqa: ANN401
        """Return the bytes of each."""
        if isinstance(value, tuple):
            return value
        text = "8G,12G,16G,24G" if str(value).strip() == "cards" else str(value)
        size = SizeType()
        return tuple(size.convert(part, param, ctx) for part in text.split(","))


class LogitBiasType(click.ParamType[tuple[int, float]]):
    """The value of --logit-bias: a token id and what is added to its logit."""

    name = "ID(+/-)BIAS"

    def convert(self, value: Any, param: _Parameter, ctx: _Context) -> tuple[int, float]:  # noqa: ANN401
        """Return the token id and the bias."""
        try:
            return parse_logit_bias(str(value))
        except OptionError as error:
            self.fail(str(error), param, ctx)


def parse_logit_bias(text: str) -> tuple[int, float]:
    """Return (token id, bias) of "15043+1", "15043-0.5" or "15043-inf"."""
    match = _LOGIT_BIAS.fullmatch(text.strip())
    if match is None:
        raise OptionError(
            f"{text!r} is not a token id with a bias, such as 15043+1, 15043-0.5 or 15043-inf"
        )
    bias = float(match[2] + match[3])
    if bias == float("inf"):
        raise OptionError(f"{text!r}: an infinite bias can only forbid a token (15043-inf)")
    return int(match[1]), bias


def format_logit_bias(token: int, bias: float) -> str:
    """Return what `parse_logit_bias` reads."""
    short = f"{bias:+g}"
    return f"{token}{short if float(short) == bias else format(bias, '+')}"


class CountListType(click.ParamType[tuple[int, ...]]):
    """Positive whole numbers, separated by commas."""

    name = "N,N"

    def convert(self, value: Any, param: _Parameter, ctx: _Context) -> tuple[int, ...]:  # noqa: ANN401
        """Return the numbers."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers, such as 32000,128000", param, ctx)
        if min(numbers) < 1:
            self.fail(f"{value!r}: give numbers from 1 on", param, ctx)
        return numbers


class NumberListType(click.ParamType[tuple[float, ...]]):
    """Finite numbers from 0 on, separated by commas."""

    name = "X,X"

    def convert(self, value: Any, param: _Parameter, ctx: _Context) -> tuple[float, ...]:  # noqa: ANN401
        """Return the numbers."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers, such as 0,0.8", param, ctx)
        if not all(0.0 <= number < float("inf") for number in numbers):
            self.fail(f"{value!r}: give numbers from 0 on", param, ctx)
        return numbers


class ParametersType(click.ParamType[int]):
    """A number of parameters: 400M, 1.5B, 400000000."""

    name = "N"

    def convert(self, value: Any, param: _Parameter, ctx: _Context) -> int:  # noqa: ANN401
        """Return the count."""
        if isinstance(value, int):
            return value
        from specrun.convert.cut.pad import parse_parameters

        try:
            return parse_parameters(str(value))
        except OptionError as error:
            self.fail(str(error), param, ctx)


class TensorTypeParameter(click.ParamType[tuple[str, str]]):
    """The value of --tensor-type: a regular expression and a tensor type."""

    name = "RE=TYPE"

    def convert(self, value: Any, param: _Parameter, ctx: _Context) -> tuple[str, str]:  # noqa: ANN401
        """Return the expression and the type."""
        pattern, equals, kind = str(value).rpartition("=")
        if not equals or not pattern or not kind:
            self.fail(f"{value!r} is not RE=TYPE, such as attn_v=Q8_0", param, ctx)
        from specrun.convert.quantize import known_tensor_type

        try:
            return pattern, known_tensor_type(kind)
        except OptionError as error:
            self.fail(str(error), param, ctx)


# == Model files: a path, a name of a stored model, or one of the hub (-hf) ========================
#
# A name is looked up, and a model of the hub fetched, when all options are read: a misspelt option
# is reported before anything is downloaded. Without -hf or `hf:` nothing uses the network.


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
