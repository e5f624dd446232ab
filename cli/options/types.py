"""Types of option values: files and models, -ngl, sizes, lists of numbers, tensor types."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import click
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
Value = TypeVar("Value")
_Parameter: TypeAlias = click.Parameter | None
_Context: TypeAlias = click.Context | None


class ExistingFile(click.ParamType[Path]):
    """A file that must be there; the error of a wrong name lists near ones (exit code 3)."""

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


class Parsed(click.ParamType[Value]):
    """Values that a function reads from their text; its OptionError becomes a usage error."""

    def __init__(self, name: str, read: Callable[[str], Value]) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: _Parameter, ctx: _Context) -> Value:  # noqa: ANN401
        """Return the value; a tuple was read before."""
        try:
            return cast("Value", value) if isinstance(value, tuple) else self._read(str(value))
        except OptionError as error:
            self.fail(str(error), param, ctx)


def read_layer_count(text: str) -> LayerCount:
    """Return the value of -ngl: a number, "auto" or "all"."""
    from specrun.runtime.memory import parse_layer_count

    count = parse_layer_count(text)
    if isinstance(count, int) and not -1 <= count <= 10_000:
        raise OptionError(f"{count} layers: give -1 (all), 0 (none) or a count")
    return count


def read_shape(text: str) -> Shape:
    """Return the value of --shape: "free", "pairs", "fixed" or a width in tokens."""
    if text in ("free", "pairs", "fixed"):
        return cast("Shape", text)
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"{text!r}: give free, pairs, fixed or a width in tokens") from None


def read_size(text: str) -> int:
    """Return the bytes of 8G, 512M or 1.5G, in binary units as `bytes_text` shows them."""
    match = _SIZE.fullmatch(text.strip())
    n_bytes = int(float(match[1]) * 2 ** _SIZE_UNITS[match[2].upper()]) if match else 0
    if not 0 < n_bytes < 2**60:
        raise OptionError(f"{text!r} is no amount of memory: give such as 8G or 512M")
    return n_bytes


def read_room(text: str) -> int:
    """Return the bytes of a size, or 0 for none."""
    return 0 if text.strip() == "0" else read_size(text)


def read_sizes(text: str) -> tuple[int, ...]:
    """Return the bytes of 8G,12G; "cards" are the sizes of common cards."""
    sizes = "8G,12G,16G,24G" if text.strip() == "cards" else text
    return tuple(map(read_size, sizes.split(",")))


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
    """Return the text that `parse_logit_bias` reads."""
    short = f"{bias:+g}"
    return f"{token}{short if float(short) == bias else format(bias, '+')}"


def read_counts(text: str) -> tuple[int, ...]:
    """Return positive whole numbers, separated by commas."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        problem = f"{text!r} is not a list of whole numbers, such as 32000,128000"
        raise OptionError(problem) from None
    if min(numbers) < 1:
        raise OptionError(f"{text!r}: give numbers from 1 on")
    return numbers


def read_numbers(text: str) -> tuple[float, ...]:
    """Return finite numbers from 0 on, separated by commas."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"{text!r} is not a list of numbers, such as 0,0.8") from None
    if not all(0.0 <= number < float("inf") for number in numbers):
        raise OptionError(f"{text!r}: give numbers from 0 on")
    return numbers


def each_once(
    _context: _Context, _option: _Parameter, several: tuple[tuple[float, ...], ...]
) -> tuple[float, ...]:
    """Return the numbers of a repeated option of lists, none twice: a callback of click."""
    return tuple(dict.fromkeys(number for numbers in several for number in numbers))


def read_parameters(text: str) -> int:
    """Return a number of parameters: 400M, 1.5B, 400000000."""
    from specrun.convert.cut.pad import parse_parameters

    return parse_parameters(text)


def read_tensor_type(text: str) -> tuple[str, str]:
    """Return a regular expression and a tensor type, such as attn_v=Q8_0."""
    pattern, equals, kind = text.rpartition("=")
    if not equals or not pattern or not kind:
        raise OptionError(f"{text!r} is not RE=TYPE, such as attn_v=Q8_0")
    from specrun.convert.quantize import known_tensor_type

    return pattern, known_tensor_type(kind)


LAYER_COUNT = Parsed("N|auto|all", read_layer_count)
SHAPE = Parsed("free|pairs|fixed|N", read_shape)
SIZE = Parsed("SIZE", read_size)
ROOM = Parsed("SIZE", read_room)
SIZES = Parsed("SIZE,...", read_sizes)
LOGIT_BIAS = Parsed("ID(+/-)BIAS", parse_logit_bias)
COUNTS = Parsed("N,N", read_counts)
NUMBERS = Parsed("X,X", read_numbers)
PARAMETERS = Parsed("N", read_parameters)
TENSOR_TYPE = Parsed("RE=TYPE", read_tensor_type)


# == Model files: a path, a name of a stored model, or one of the hub (-hf) ========================
#
# A name is looked up, and a model of the hub fetched, when all options are read: a misspelt option
# is reported before anything is downloaded. Without -hf or `hf:` nothing uses the network.


class ModelName(str):
    """A model that is not named by its path: it is looked up when all options are read."""


class ModelFileType(click.ParamType["Path | ModelName"]):
    """A model: the command gets the path of its file, or with `folder` of a folder.

    A folder that holds a model set stands for its target, and for its drafters.
    """

    name = "FILE|NAME"

    def __init__(self, *, folder: bool = False) -> None:
        self._folder = folder

    def convert(self, value: Any, param: _Parameter, ctx: _Context) -> Path | ModelName:  # noqa: ANN401
        """Return an existing file, or a name that `located` finds later."""
        from specrun.runtime.models import HubName, is_hub_name, is_set, looks_like_path

        if isinstance(value, Path | ModelName):
            return value
        text, path = str(value), Path(value).expanduser()
        if is_hub_name(text):
            HubName.parse(text)  # raises for a name that cannot be one
            return ModelName(text)
        if not looks_like_path(path, text):
            return ModelName(text)
        return path if self._folder or is_set(path) else require_file(path)

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
    """Return the file of a model; a download shows its progress."""
    from specrun.runtime.models import locate_model

    context = click.get_current_context(silent=True)
    given = {} if context is None else context.params
    terminal = Terminal(given.get("color") or "auto", quiet=bool(given.get("quiet")))
    with fetch_progress(terminal) as progress:
        return require_file(locate_model(name, progress=progress, warn=terminal.warn))
