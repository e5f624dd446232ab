"""What a depth of a draft multiplies, by hand: the matrices of the target that a head reads, too.

The embedded family has 256 dimensions, a feed-forward width of 1,024 and 4,096 tokens; target and
draft model are tied, so that their table of embeddings is their output matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.tiny_nextn import TinyNextN

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.gguf import read_header
from specrun.bindings.models.model import Model
from specrun.runtime.demo import demo_drafters, demo_target
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.mtp import multiplied_of_block
from specrun.runtime.models.packaged import SMOLLM2
from specrun.runtime.planning import memory_traffic
from specrun.runtime.planning.theory import multiplications, multiplied
from specrun.runtime.tuning import DrawnAlpha, drafting_shares

SQUARE, FEED_FORWARD, OUTPUT = 256 * 256, 3 * 256 * 1024, 256 * 4096
LAYER = 4 * SQUARE + FEED_FORWARD
TARGET = 6 * LAYER + OUTPUT
EAGLE = 2 * SQUARE + LAYER  # and the target's output matrix
# Its layer reads features and embeddings side by side; it has an output matrix of its own.
EAGLE3 = 3 * SQUARE + 3 * 2 * SQUARE + SQUARE + FEED_FORWARD + OUTPUT
MEDUSA = 2 * SQUARE + OUTPUT
DEPTHS = {
    "draft(n=3)": 2 * LAYER + OUTPUT,
    "eagle": EAGLE + OUTPUT,
    "eagle(depth=3, topk=4, nodes=8)": EAGLE + OUTPUT,
    "eagle(draft_tokens=all)": EAGLE + OUTPUT,
    "eagle(draft_tokens=512)": EAGLE + 256 * 512,
    "eagle3": EAGLE3,
    "medusa": MEDUSA,
    "early-exit(layers=4, n=3)": 4 * LAYER + OUTPUT,
    "partial(n=2)": TARGET,
    "pass": 0,
    "prompt-lookup": 0,
    "none": 0,
    "cascade(draft(n=3), prompt-lookup)": 2 * LAYER + OUTPUT,
    "auto(eagle, prompt-lookup)": EAGLE + OUTPUT,
}


@pytest.fixture(scope="module")
def target() -> Iterator[Model]:
    with Model(demo_target()) as model:
        yield model


def depth_params(target: Model, drafter: str) -> float:
    context = ContextOptions(n_ctx=256, n_threads=1, n_threads_batch=1)
    environment = DraftEnvironment(target, context, default_files=demo_drafters())
    with (
        closing(build_drafter(drafter, environment)) as weights,
        closing(weights.start()) as started,
    ):
        return started.depth_params


@pytest.mark.parametrize("drafter", DEPTHS)
def test_a_depth_multiplies_what_it_reads(target: Model, drafter: str) -> None:
    assert depth_params(target, drafter) == DEPTHS[drafter]


def test_c_hat_and_bytes_of_a_head_that_shares_the_output_matrix(target: Model) -> None:
    """c-hat .304, where the head alone would be .161; bytes beside those of the tensors."""
    assert multiplications(target) == TARGET
    found = DrawnAlpha("eagle", 0.7, 100, 0, 0.001, depth_params(target, "eagle"))
    operations, read = drafting_shares(found, memory_traffic(target), target)
    assert operations == pytest.approx((EAGLE + OUTPUT) / TARGET, abs=1e-6)
    assert operations == pytest.approx(0.304, abs=0.001)
    assert pytest.approx(0.161, abs=0.001) == EAGLE / TARGET
    own = sum(tensor.n_bytes for tensor in read_header(demo_drafters()["eagle"]).tensors)
    shared = next(t.n_bytes for t in target.header.tensors if t.name == "token_embd.weight")
    assert read.weights(1) == pytest.approx(own + shared, rel=0.002)


def test_a_nextn_block_reads_the_output_matrix(tmp_path: Path) -> None:
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32
    with Model(TinyNextN(blocks=1).write(tmp_path / "nextn.gguf")) as model:
        assert multiplied_of_block(model) == layer + 64 * 32 + 320 * 32
        assert multiplications(model) == 2 * layer + 320 * 32


def test_a_shipped_head_with_a_short_output_matrix() -> None:
    header = read_header(SMOLLM2.shipped_head)
    attention = 1152 * 576 + 2 * 1152 * 192 + 576 * 576
    own = 3 * 576 * 576 + attention + 3 * 576 * 1536 + 576 * 8192
    assert multiplied(header, header.tensors) == own  # the map of its tokens is looked up
