"""What holds on any device: run on a GPU by `pytest -m gpu`, and on the CPU with all others.

Everything is put on a GPU where there is one (-ngl 99). Kernels round by the number of rows, so
nothing here asks for equal bits but the fixed shape, which is made for them: rows may move by
`MOST_VARIATION`, and texts may part where two tokens are as near as `NEAREST` nats.
"""

from __future__ import annotations

import pytest

from specrun.bench.batch_noise import NoiseOptions, measure_batch_noise
from specrun.bench.prove.texts import answer, parting, sampled
from specrun.bindings.contexts import ContextOptions
from specrun.runtime import Runtime
from specrun.runtime.demo import demo_questions, demo_target

pytestmark = pytest.mark.gpu

ALL_LAYERS = 99
MOST_VARIATION = 0.05
"""Total variation of a law from that of one token at a time, at the worst position: F16 sums."""
NEAREST = 0.1
"""Nats of logits within which either of two tokens may be the first."""
DRAFTERS = (
    "draft(n=4, sampling=argmax)",
    "draft(depth=4, topk=2, nodes=8)",
    "eagle3(nodes=8)",
    "medusa(nodes=8)",
    "prompt-lookup(always=yes)",
)
SEED = 5
QUESTION = "What does shutil.copytree do?"


@pytest.mark.parametrize("attention", ["on", "off"])
def test_wide_evaluations_have_the_laws_of_narrow_ones(attention: str) -> None:
    text = demo_questions().read_text(encoding="utf-8")[:400]
    context = ContextOptions(flash_attention=attention)
    options = NoiseOptions(n_positions=32, context=context, n_gpu_layers=ALL_LAYERS)
    noise = measure_batch_noise(demo_target(), text, options)
    assert [each.width for each in noise.widths if each.variation_largest > MOST_VARIATION] == []
    fixed = noise.fixed_shape
    assert fixed.left_out or fixed.n_equal == fixed.n_positions


def test_drafted_texts_are_plain_ones_up_to_near_ties() -> None:
    """At temperature 0 and 0.8, by point masses: the same draws."""
    with Runtime.demo("none", n_ctx=512, n_gpu_layers=ALL_LAYERS) as plain:
        prompt = plain.model.vocabulary.tokenize(QUESTION)
        for expression in DRAFTERS:
            with Runtime.demo(expression, n_ctx=512, n_gpu_layers=ALL_LAYERS) as drafted:
                for temperature in (0.0, 0.8):
                    params = sampled(temperature)
                    ours, own = (
                        answer(each.session, prompt, params, SEED, 24) for each in (drafted, plain)
                    )
                    apart = parting(plain.session, prompt, (ours, own), temperature, SEED)
                    assert apart is None or apart < NEAREST, (expression, temperature)


def test_everything_is_on_the_device() -> None:
    """Layers go where -ngl puts them, and a context of the trained length has room."""
    with Runtime(demo_target(), n_gpu_layers="auto", n_ctx=0) as runtime:
        assert runtime.generate(QUESTION, max_tokens=4).token_ids
