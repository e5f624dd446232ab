"""Kinds of option values beyond numbers and texts.

Option values that are lists: `a,b`, or the option repeated, as in llama-bench.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from specrun.bindings.errors import OptionError
from specrun.cli.terminal.paths import require_file

if TYPE_CHECKING:
    from specrun.runtime.offload import LayerCount

_LOGIT_BIAS = re.compile(r"(\d+)([+-])(inf|\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)", re.IGNORECASE)


class ExistingFile(click.ParamType[Path]):
    """A file that must be there; a wrong name is answered with near ones and exit code 3."""

    name = "FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:  # noqa: ANN401
        """Return the path of an existing file."""
        return require_file(Path(value).expanduser())

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Let the shell complete file names."""
        return [CompletionItem(incomplete, type="file")]


class LayerCountType(click.ParamType["LayerCount"]):
    """The value of -ngl: a number, "auto" or "all"."""

    name = "N|auto|all"

    def convert(
        self,
        value: Any,  # noqa: ANN401
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> LayerCount:
        """Return the count, or the word."""
        from specrun.runtime.offload import parse_layer_count

        try:
            count = parse_layer_count(str(value))
        except OptionError as error:
            self.fail(str(error), param, ctx)
        if isinstance(count, int) and not -1 <= count <= 10_000:
            self.fail(f"{count} layers: give -1 (all), 0 (none) or a count", param, ctx)
        return count


class LogitBiasType(click.ParamType[tuple[int, float]]):
    """The value of --logit-bias: a token id and what is added to its logit."""

    name = "ID(+/-)BIAS"

    def convert(
        self,
        value: Any,  # noqa: ANN401
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[int, float]:
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

    def convert(
        self,
        value: Any,  # noqa: ANN401
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[int, ...]:
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

    def convert(
        self,
        value: Any,  # noqa: ANN401
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[float, ...]:
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

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401
        """Return the count."""
        if isinstance(value, int):
            return value
        from specrun.bench.drafters.padding import parse_parameters
        from specrun.bindings.errors import OptionError

        try:
            return parse_parameters(str(value))
        except OptionError as error:
            self.fail(str(error), param, ctx)
