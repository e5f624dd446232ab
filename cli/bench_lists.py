"""Option values that are lists: `a,b`, or the option repeated, as in llama-bench."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["CountListType", "NumberListType", "ParametersType"]


class CountListType(click.ParamType[tuple[int, ...]]):
    """Positive whole numbers, separated by commas."""

    name = "N,N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:  # noqa: ANN401
        """Return the numbers."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(one) for one in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers, such as 32000,128000", param, ctx)
        if min(numbers) < 1:
            self.fail(f"{value!r}: give numbers from 1 on", param, ctx)
        return numbers


class NumberListType(click.ParamType[tuple[float, ...]]):
    """Finite numbers from 0 on, separated by commas."""

    name = "X,X"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:  # noqa: ANN401
        """Return the numbers."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(float(one) for one in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers, such as 0,0.8", param, ctx)
        if not all(0.0 <= one < float("inf") for one in numbers):
            self.fail(f"{value!r}: give numbers from 0 on", param, ctx)
        return numbers


class ParametersType(click.ParamType[int]):
    """A number of parameters: 400M, 1.5B, 400000000."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401
        """Return the count."""
        if isinstance(value, int):
            return value
        from specrun.bench.padding import parse_parameters
        from specrun.bindings.errors import OptionError

        try:
            return parse_parameters(str(value))
        except OptionError as error:
            self.fail(str(error), param, ctx)
