"""Block drafters and EAGLE-3 heads in 4 to 8 bits: they open, draft, and leave the text alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_dflash import TinyDFlash
from support.tiny_eagle3 import random_eagle3
from support.tiny_models import CHAT, F32

from specrun.bindings.gguf import read_header
from specrun.convert.quantize import quantize_model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams

WIDTH = 256  # one block of a K type
PARAMS = SamplingParams(temperature=0.9, seed=2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A target, and what it says alone."""
    path = tmp_path_factory.mktemp("wide") / "target.gguf"
    write_random_llama(path, RandomLlama(**{**CHAT, "width": WIDTH, "layers": 6}))
    with Runtime(path, **F32) as runtime:
        return path, runtime.generate([5, 6, 7], PARAMS, max_tokens=20).token_ids


@pytest.mark.parametrize(
    ("kind", "bits"), [("dflash2", "Q8_0"), ("dspark", "Q4_K_M"), ("eagle3", "Q4_K_M")]
)
def test_a_quantized_head_drafts_the_same_text(
    target: tuple[Path, list[int]], tmp_path: Path, kind: str, bits: str
) -> None:
    path, text = target
    whole, small = tmp_path / "whole.gguf", tmp_path / "small.gguf"
    method = "eagle3" if kind == "eagle3" else "dflash"
    if kind == "eagle3":
        random_eagle3(WIDTH, 320).write(whole, path)
    else:
        sizes = {"width": WIDTH, "ffn": WIDTH, "rank": WIDTH, "group": 64}
        TinyDFlash(kind, **sizes).write(whole, path)  # type: ignore[arg-type]
    quantize_model(whole, small, bits)
    types = {tensor.name: tensor.type_name for tensor in read_header(small).tensors}
    assert types["fc.weight"] == bits.removesuffix("_M")
    assert "F32" in {types[name] for name in types if "norm" in name or "_base" in name}
    with Runtime(path, drafter=f"{method}({small}, n=4)", **F32) as runtime:
        found = runtime.generate([5, 6, 7], PARAMS, max_tokens=20)
    assert found.token_ids == text
    assert found.stats.drafted > 20
