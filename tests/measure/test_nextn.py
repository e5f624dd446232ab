"""The embedded target with a NextN block: its layers compute the same, and the block drafts."""

from __future__ import annotations

from pathlib import Path

import torch

from measure.benchmarks.nextn import NextnBlock, write_target
from specrun.bindings.models import trusting_files
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.demo import demo_target
from specrun.train.target.from_gguf import folder_from_gguf
from specrun.train.target.shape import target_shape
from specrun.train.trainer.model_folder import write_weights

GREEDY = SamplingParams(temperature=0.0)


def test_the_target_with_a_block_answers_as_the_target(tmp_path: Path) -> None:
    """Weights of a random block: 24 greedy tokens are the target's, and rounds have drafts."""
    torch.manual_seed(0)
    shape = target_shape(folder_from_gguf(demo_target(), tmp_path / "target"))
    weights, written = tmp_path / "block.safetensors", tmp_path / "embedded-nextn.gguf"
    write_weights(weights, NextnBlock(shape).state_dict())
    write_target(weights, written)
    question = "What does os.getcwd do?"
    with Runtime(demo_target(), drafter="none") as runtime:
        plain = runtime.chat([{"role": "user", "content": question}], GREEDY, max_tokens=24)
    with trusting_files(), Runtime(written, drafter="mtp(n=2)") as runtime:
        drafted = runtime.chat([{"role": "user", "content": question}], GREEDY, max_tokens=24)
    assert drafted.text == plain.text
    assert drafted.stats.drafted > 0
