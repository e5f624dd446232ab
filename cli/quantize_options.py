"""The options of `specrun quantize`, and its table of types."""

from __future__ import annotations

from typing import Any

import click

from specrun.bindings.errors import OptionError
from specrun.bindings.quantize_types import FILE_TYPES

__all__ = ["TensorTypeParameter", "type_table"]


class TensorTypeParameter(click.ParamType[tuple[str, str]]):
    """The value of --tensor-type: a regular expression and a tensor type."""

    name = "RE=TYPE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:  # noqa: ANN401
        """Return the expression and the type."""
        pattern, equals, kind = str(value).rpartition("=")
        if not equals or not pattern or not kind:
            self.fail(f"{value!r} is not RE=TYPE, such as attn_v=Q8_0", param, ctx)
        from specrun.convert.quantize import known_tensor_type

        try:
            return pattern, known_tensor_type(kind)
        except OptionError as error:
            self.fail(str(error), param, ctx)


def type_table() -> str:
    """Return the file types with the bits a weight takes, in columns, for the help."""
    cells = [
        f"{name + ('*' if kind.needs_importance else ''):<10}{kind.bits_per_weight:>6.2f}"
        for name, kind in FILE_TYPES.items()
    ]
    rows = -(-len(cells) // 5)
    lines = ["   ".join(cells[row::rows]) for row in range(rows)]
    return "\n".join(f"  {line}" for line in lines)
