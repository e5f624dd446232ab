"""Contexts beyond the trained length: the parameters for llama.cpp, and their effect."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from specrun.bindings.contexts import AS_TRAINED, Batch, Context, ContextOptions, RopeScaling
from specrun.bindings.errors import OptionError
from specrun.bindings.models import Model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.draft_model import draft_context_options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "ntk"}, "use model, none, linear, yarn"),
        ({"scale": -1.0}, "rope scale is -1"),
        ({"scale": float("nan")}, "rope scale is nan"),
        ({"freq_base": float("inf")}, "frequency base"),
        ({"kind": "none", "scale": 2.0}, "linear or yarn"),
        ({"yarn_orig_ctx": -1}, "yarn_orig_ctx"),
        ({"yarn_beta_slow": -2.0}, "yarn_beta_slow"),
        ({"kind": "linear", "scale": 2.0, "yarn_ext_factor": 0.5}, "yarn_ext_factor is about YaRN"),
        ({"kind": "linear", "scale": 2.0, "yarn_orig_ctx": 2048}, "yarn_orig_ctx is about YaRN"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        RopeScaling(**options)


def test_contexts_grow_only_where_positions_are_stretched() -> None:
    assert AS_TRAINED.context_size(0, 2048) == AS_TRAINED.context_size(4096, 2048) == 2048
    assert RopeScaling(scale=2.0).context_size(0, 2048) == 4096
    assert RopeScaling(scale=2.0).context_size(5000, 2048) == 5000
    assert RopeScaling(freq_base=1e6).context_size(5000, 2048) == 5000
    assert RopeScaling(kind="none").context_size(5000, 2048) == 2048


def test_a_files_own_scaling_is_not_made_worse() -> None:
    """llama.cpp lets a scale replace the file's factor, and ignores it if the file has none."""
    assert RopeScaling(scale=8.0).context_size(0, 131072, 4.0) == 262144
    RopeScaling(scale=8.0).check("yarn", 4.0)
    AS_TRAINED.check("none", 1.0)
    RopeScaling("yarn", scale=2.0).check("none", 1.0)
    RopeScaling("yarn").check("yarn", 4.0)
    with pytest.raises(OptionError, match="positions are not scaled"):
        RopeScaling(scale=2.0).check("none", 1.0)
    with pytest.raises(OptionError, match="give more than 4"):
        RopeScaling(scale=2.0).check("yarn", 4.0)
    with pytest.raises(OptionError, match="by no factor"):
        RopeScaling("yarn").check("", 1.0)


def test_runtime_takes_no_word_for_a_scaling(tiny_model: Path) -> None:
    with pytest.raises(OptionError, match="rope is 'yarn'"):
        Runtime(tiny_model, "none", rope="yarn")


def test_llama_cpp_is_asked_for_it() -> None:
    params = SimpleNamespace()
    RopeScaling("yarn", 4.0, 5e5, 1024, 0.5, 1.5, 2.0, 30.0).apply(params)
    assert vars(params) == {
        "rope_scaling_type": 2,
        "rope_freq_base": 5e5,
        "rope_freq_scale": 0.25,
        "yarn_orig_ctx": 1024,
        "yarn_ext_factor": 0.5,
        "yarn_attn_factor": 1.5,
        "yarn_beta_slow": 2.0,
        "yarn_beta_fast": 30.0,
    }
    AS_TRAINED.apply(params)
    assert (params.rope_scaling_type, params.rope_freq_base, params.rope_freq_scale) == (
        -1,
        0.0,
        0.0,
    )


def test_positions_are_stretched_and_the_trained_length_stays(tiny_model: Path) -> None:
    """Linear scaling by 1 changes nothing, by 4 it does; and llama.cpp overwrites its own note of
    the length."""
    with Model(tiny_model) as model:
        trained, rows = model.n_ctx_train, []
        for rope in (
            AS_TRAINED,
            RopeScaling("linear", 1.0),
            RopeScaling("linear", 4.0),
            RopeScaling("yarn", 4.0),
        ):
            options = ContextOptions(
                n_ctx=256, n_threads=1, rope=rope, cache_type_k="f32", cache_type_v="f32"
            )
            with Context(model, options) as context:
                batch = Batch(context.n_batch, 1)
                batch.fill_chain([5, 6, 7, 8, 9, 10], 0, [0], 1)
                rows.append(context.decode(batch).logits(0).copy())
            assert model.n_ctx_train == trained
        assert np.array_equal(rows[0], rows[1])
        assert not np.allclose(rows[0], rows[2])
        assert not np.allclose(rows[2], rows[3])


def test_a_draft_model_is_stretched_where_it_must_be(tiny_model: Path) -> None:
    with Model(tiny_model) as model:
        yarn = RopeScaling("yarn", 2.0)
        far = draft_context_options(ContextOptions(n_ctx=model.n_ctx_train + 100, rope=yarn), model)
        assert (far.n_ctx, far.rope) == (model.n_ctx_train + 100, yarn)
        shorter = draft_context_options(
            ContextOptions(n_ctx=5 * model.n_ctx_train, rope=yarn), model
        )
        assert shorter.rope == RopeScaling(
            "yarn", 5.0
        )  # the target's own factor would leave it short
        near = draft_context_options(ContextOptions(n_ctx=model.n_ctx_train, rope=yarn), model)
        assert (near.n_ctx, near.rope) == (model.n_ctx_train, AS_TRAINED)


def test_a_runtime_goes_on_beyond_the_trained_length(tiny_model: Path) -> None:
    prompt, greedy = [5 + number % 50 for number in range(1100)], SamplingParams(temperature=0.0)
    texts = []
    for drafter in ("none", "prompt-lookup"):
        with Runtime(
            tiny_model, drafter, n_threads=1, n_ctx=1280, rope=RopeScaling("yarn", 2.0)
        ) as runtime:
            assert runtime.n_ctx == 1280 > runtime.model.n_ctx_train
            texts.append(runtime.generate(prompt, greedy, max_tokens=12).token_ids)
    assert texts[0] == texts[1]
