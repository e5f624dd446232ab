"""Types of option values: files, -ngl, logit biases, lists of numbers as in llama-bench, sizes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import click
from click.shell_completion import CompletionItem

from specrun.bindings.errors import OptionError
from specrun.cli.terminal.paths import require_file

if TYPE_CHECKING:
    from specrun.runtime.memory import LayerCount
    from specrun.runtime.round import Shape

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
