"""Every bfloat16 there is, against numpy's own rounding."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.bindings.quantizer import half_from_bfloat16
from specrun.bindings.quantizer import rows as half_precision

EVERY = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize("block", [1000, 1 << 17])
def test_every_bfloat16_that_float16_holds(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(half_precision, "_BLOCK", block)
    wide = (EVERY.astype(np.uint32) << np.uint32(16)).view(np.float32)
    is_held = np.isfinite(wide) & (np.abs(wide) <= 65504)
    assert is_held.sum() > 36_000
    found = half_from_bfloat16(EVERY[is_held])
    np.testing.assert_array_equal(
        found.view(np.uint16), wide[is_held].astype(np.float16).view(np.uint16)
    )


def test_nothing_is_nothing() -> None:
    assert half_from_bfloat16(EVERY[:0]).shape == (0,)
