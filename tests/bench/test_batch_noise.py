"""Batch noise: its figures by hand, those of quantized and F32 models, and a fixed shape's bits.

Nothing here is drawn: models and texts are fixed. Sizes of noise are those of this machine's
kernels, so tests require only figures with orders of magnitude to spare.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.tiny_mamba import write_tiny_mamba
from support.tiny_models import F32

from specrun.bench.batch_noise import (
    WIDTHS,
    BatchNoise,
    NoiseOptions,
    compare_bits,
    compare_rows,
    measure_batch_noise,
)
from specrun.bindings.contexts import Context, ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models import Model
from specrun.convert.conversion import FIXED_TEXT
from specrun.convert.quantize import quantize_model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.tuning import scored_logits

SHAPE = {"vocab_size": 320, "width": 256, "ffn": 256, "scale": 3.0}
PLAIN = ContextOptions(n_threads=1)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("noise")
    write_random_llama(folder / "f16.gguf", RandomLlama(**SHAPE, file_type="F16"))
    quantize_model(folder / "f16.gguf", folder / "q4.gguf", "Q4_K_M", n_threads=1)
    return folder / "q4.gguf"


@pytest.fixture(scope="module")
def found(quantized: Path) -> BatchNoise:
    return measure_batch_noise(quantized, FIXED_TEXT, NoiseOptions(64, PLAIN))


def test_figures_by_hand() -> None:
    with np.errstate(divide="ignore"):
        alone = np.log(np.float32([[0.5, 0.5, 0], [0.9, 0.1, 0], [0.6, 0.4, 0], [1, 0, 0]]))
        pieces = np.log(np.float32([[0.25, 0.75, 0], [0.9, 0.1, 0], [0.6, 0.4, 0]])) + 5
    noise = compare_rows(3, alone, [pieces, alone[3:]])
    assert (noise.width, noise.n_positions) == (3, 3)  # the fourth was evaluated by itself
    assert noise.logprob_largest == pytest.approx(np.log(2), rel=1e-6)
    assert noise.logprob_mean == pytest.approx((np.log(2) + np.log(1.5)) / 9, rel=1e-6)
    assert noise.variation_largest == pytest.approx(0.25, rel=1e-6)
    assert noise.variation_mean == pytest.approx(0.25 / 3, rel=1e-6)
    assert noise.other_top == pytest.approx(1 / 3)
    assert noise.parts_after == pytest.approx(3)
    assert compare_rows(2, alone, [alone[:2], alone[2:]]).parts_after is None


def test_one_bit_of_one_logit_is_seen() -> None:
    rows = np.zeros((3, 4), np.float32)
    other = rows.copy()
    other[1, 2] = np.nextafter(np.float32(0), np.float32(1))
    other[2, 0] = -0.0
    bits = compare_bits(8, rows, other)
    assert (bits.n_positions, bits.n_equal) == (3, 1)
    assert bits.largest == other[1, 2] > 0
    assert compare_bits(8, rows, rows.copy()).n_equal == 3


def test_a_quantized_model_is_moved_by_width_and_not_in_a_fixed_shape(found: BatchNoise) -> None:
    assert [noise.width for noise in found.widths] == [*WIDTHS]
    assert [noise.n_positions for noise in found.widths] == [64 // n * n for n in WIDTHS]
    assert max(noise.logprob_largest for noise in found.widths) > 1e-4
    assert max(noise.variation_mean for noise in found.widths) < 0.1
    bits = found.fixed_shape
    assert (bits.n_equal, bits.n_positions, bits.left_out) == (60, 60, "")
    assert bits.largest == 0


def test_another_text_is_no_noise(quantized: Path, found: BatchNoise) -> None:
    """Control: rows that have one token less before them are far apart, in law and in bits."""
    with Model(quantized) as model:
        tokens = tuple(model.vocabulary.tokenize(FIXED_TEXT)[:97])
        settings = ContextOptions(n_ctx=128, n_batch=32, n_outputs=16, n_threads=1)
        with Context(model, settings) as context:
            alone, shifted = (
                np.concatenate([*scored_logits(context, tokens[start : start + 96], 32, 1)])
                for start in (0, 1)
            )
    far = compare_rows(63, alone, [shifted])
    assert far.variation_mean > 10 * max(noise.variation_mean for noise in found.widths)
    assert far.other_top > 0.5
    assert far.parts_after is not None
    assert far.parts_after < 2
    assert compare_bits(8, alone, shifted).n_equal == 0


def test_float32_is_moved_by_rounding_alone(tmp_path: Path) -> None:
    write_random_llama(tmp_path / "f32.gguf", RandomLlama(**SHAPE))
    options = NoiseOptions(32, ContextOptions(**F32))
    found = measure_batch_noise(tmp_path / "f32.gguf", FIXED_TEXT, options)
    assert all(noise.logprob_largest < 1e-4 for noise in found.widths)
    assert all(noise.variation_largest < 1e-4 for noise in found.widths)
    assert found.fixed_shape.n_equal == found.fixed_shape.n_positions == 30


def test_a_recurrent_model_leaves_out_the_fixed_shape(tmp_path: Path) -> None:
    path = write_tiny_mamba(tmp_path / "mamba.gguf")
    found = measure_batch_noise(path, "0123456789" * 7, NoiseOptions(context=PLAIN))
    assert found.n_positions == 70 - found.n_before - 1
    assert all(noise.logprob_largest < 1e-3 for noise in found.widths)
    assert "mamba models keep a recurrent state" in found.fixed_shape.left_out
    assert found.fixed_shape.n_positions == 0


def test_what_cannot_be_measured_is_said(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="the text has 5 tokens: 49 are needed"):
        measure_batch_noise(tiny_model, "12345", NoiseOptions(context=PLAIN))
    write_random_llama(tmp_path / "short.gguf", RandomLlama(vocab_size=320, context=48))
    with pytest.raises(OptionError, match="the model has room for 40 tokens"):
        measure_batch_noise(tmp_path / "short.gguf", FIXED_TEXT, NoiseOptions(context=PLAIN))
    with pytest.raises(OptionError, match="n_positions is 15: give 16 or more"):
        NoiseOptions(n_positions=15)
