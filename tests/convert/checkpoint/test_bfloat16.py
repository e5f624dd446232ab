"""Every bfloat16 there is, against numpy's own rounding."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.convert.checkpoint import bfloat16_bits, raw_stored_as, widened

EVERY = np.arange(1 << 16, dtype=np.uint16)


def test_rounding_to_bfloat16_is_to_nearest_and_even() -> None:
    source = np.random.default_rng(0)
    numbers = (source.standard_normal(5000) * 10.0 ** source.integers(-30, 30, 5000)).astype(
        np.float32
    )
    found = widened(bfloat16_bits(numbers))
    below = (numbers.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    above = ((numbers.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(1 << 16)).view(
        np.float32
    )
    nearest = np.where(np.abs(numbers - below) < np.abs(above - numbers), below, above)
    np.testing.assert_array_equal(found, nearest)
    ties = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    np.testing.assert_array_equal(bfloat16_bits(ties), [0x3F80, 0x3F82])
    np.testing.assert_array_equal(bfloat16_bits(widened(EVERY[:0x7F81])), EVERY[:0x7F81])


def test_what_would_be_lost_is_refused_by_name() -> None:
    largest = np.array([0xFF7F], np.uint16)  # the lowest finite bfloat16
    np.testing.assert_array_equal(raw_stored_as(largest, "BF16", "BF16", "w"), largest)
    with pytest.raises(
        UnsupportedModelError, match=r"w holds 3\.38953e\+38, too large for f16: convert to bf16"
    ):
        raw_stored_as(largest, "BF16", "F16", "w")
    just = bfloat16_bits(np.array([65536.0], np.float32))
    with pytest.raises(UnsupportedModelError, match="65536"):
        raw_stored_as(just, "BF16", "F16", "w")
    for bits in (0x7F80, 0xFF80, 0x7FC0):  # infinities and no number
        for kind in ("BF16", "F16", "F32"):
            with pytest.raises(MalformedFileError, match="w holds numbers that are not finite"):
                raw_stored_as(np.array([1, bits], np.uint16), "BF16", kind, "w")
