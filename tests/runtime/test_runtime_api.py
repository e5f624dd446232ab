"""The Python interface: what users hold on to (design.md section 7)."""

from __future__ import annotations

import gc
import json
import math
from pathlib import Path

import numpy as np
import pytest
from support.tiny_models import F32, fresh_logits

import specrun.runtime
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import (
    ClosedError,
    FileMissingError,
    ModelError,
    OptionError,
    TemplateError,
)
from specrun.runtime import GenerationResult, Runtime, RuntimeOptions, SamplingParams, TokenEvent
from specrun.runtime.language import quoted

NO_END = {319: -math.inf, 318: -math.inf, 317: -math.inf}
WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logit_bias=NO_END, seed=3)
PROMPT = list(b"the quick brown fox, the quick")
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=["none", "draft", "prompt-lookup"])
def drafter(request, tiny_flat_twin) -> str:
    twin = quoted(str(tiny_flat_twin))
    return {
        "none": "none",
        "draft": f"draft({twin}, n=4)",
        "prompt-lookup": "prompt-lookup(n=4, min_ngram=1)",
    }[request.param]


@pytest.fixture
def runtime(tiny_model, drafter):
    with Runtime(tiny_model, drafter, **F32) as opened:
        yield opened


@pytest.fixture
def plain(tiny_model):
    with Runtime(tiny_model, "none", **F32) as opened:
        yield opened


def test_star_import_equals_all():
    names: dict[str, object] = {}
    exec("from specrun.runtime import *", names)
    assert set(names) - {"__builtins__"} == set(specrun.runtime.__all__)


# -- answers ---------------------------------------------------------------------------------------


def test_events_add_up_to_the_result(runtime):
    stream = runtime.stream(PROMPT, WARM, max_tokens=30)
    events = list(stream)
    result = stream.result
    assert all(isinstance(event, TokenEvent) for event in events)
    assert "".join(event.text for event in events) == result.text
    assert [event.token_id for event in events] == result.token_ids
    assert runtime.vocabulary.detokenize(result.token_ids) == result.text
    assert result.usage.prompt_tokens == len(PROMPT)
    assert result.usage.completion_tokens == len(events) == 30


def test_origins_and_rounds_agree_with_the_statistics(runtime):
    stream = runtime.stream(PROMPT, WARM, max_tokens=30)
    events = list(stream)
    stats = stream.result.stats
    assert sum(event.origin == "drafted" for event in events) == stats.accepted
    assert [event.round for event in events] == sorted(event.round for event in events)
    assert events[-1].round + 1 == stats.rounds
    # Each round ends with the target's own token, unless the answer's length cut it.
    for number in range(stats.rounds):
        assert [event.origin for event in events if event.round == number][-1] == "target"


def expected_logprobs(runtime: Runtime, tokens: list[int]) -> np.ndarray:
    rows = fresh_logits(runtime.model, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows[np.arange(len(tokens)), tokens]


@pytest.mark.parametrize(
    "when", ["at once", "one event later", "at the end", "after another answer"]
)
def test_logprobs_are_the_targets_whenever_they_are_read(runtime, when):
    """A field bug of other servers: 0.0 for every token under speculation."""
    stream = runtime.stream(PROMPT, WARM, max_tokens=24)
    events, values, previous = [], [], None
    for event in stream:
        events.append(event.token_id)
        if when == "at once":
            values.append(event.logprob)
        elif when == "one event later":
            if previous is not None:
                values.append(previous.logprob)
            previous = event
        else:
            values.append(event)
    if previous is not None:
        values.append(previous.logprob)
    if when == "after another answer":
        runtime.generate(list(b"something else"), WARM, max_tokens=5)
    logprobs = [value.logprob if isinstance(value, TokenEvent) else value for value in values]
    np.testing.assert_allclose(logprobs, expected_logprobs(runtime, events), atol=1e-3)
    assert min(logprobs) < -0.5  # not all near zero: a shifted row would show


def test_a_collected_answer_refers_to_nothing_but_its_texts_and_numbers(runtime):
    events = list(runtime.stream(PROMPT, WARM, max_tokens=24))
    kinds = {type(held) for event in events for held in gc.get_referents(event)}
    assert kinds <= {str, int, float, type(None), type}  # the last one is its class


@pytest.mark.parametrize("ending", ["stop string", "close"])
def test_logprobs_of_an_answer_that_ended_early_survive_the_next_one(runtime, ending):
    params = WARM
    if ending == "stop string":
        letters = dict.fromkeys(range(97, 123), 8.0)
        params = WARM.replace(logit_bias={**NO_END, **letters}, stop=("a", "e", "o", "n", "t"))
    stream = runtime.stream(PROMPT, params, max_tokens=200)
    events = []
    for event in stream:
        events.append(event)
        if ending == "close" and len(events) == 4:
            stream.close()
    expected = expected_logprobs(runtime, [event.token_id for event in events])
    runtime.generate(PROMPT[:7], WARM, max_tokens=5)
    np.testing.assert_allclose([event.logprob for event in events], expected, atol=1e-3)


def test_logprobs_are_those_before_any_transformation(plain):
    biased = WARM.replace(temperature=0.1, top_k=5, logit_bias={**NO_END, 97: 50.0})
    event = next(plain.stream(PROMPT, biased))
    assert event.token_id == 97
    np.testing.assert_allclose(event.logprob, expected_logprobs(plain, [97])[0], atol=1e-3)


def test_results_are_ready_for_json(runtime):
    result = runtime.generate(PROMPT, WARM, max_tokens=10)
    assert isinstance(result, GenerationResult)
    written = json.loads(json.dumps(result.to_dict()))
    assert set(written) == {"text", "token_ids", "finish_reason", "usage", "stats", "seed"}
    assert {"prompt_tokens", "completion_tokens"} <= set(written["usage"])
    assert set(written["stats"]) == {
        *("drafter", "rule", "exact", "rounds", "drafted", "accepted", "acceptance_rate"),
        *("mean_accepted_length", "acceptance_by_position", "tokens_per_second"),
        *("prompt_tokens_per_second", "time_to_first_token_s"),
        *("target_s", "drafter_s", "overhead_s", "wall_s", "non_candidates", "drafting"),
        *("acceptance_given_prefix", "tested_by_position", "width", "rebuilt"),
        *("total_variation", "changed_share", "forced", "forced_accepted"),
    }


def test_statistics_are_consistent(runtime, drafter):
    result = runtime.generate(PROMPT, WARM, max_tokens=30)
    stats = result.stats
    assert stats.drafter == runtime.drafter == drafter
    assert (stats.rule, stats.exact) == ("exact", True)
    assert stats.accepted + stats.rounds == len(result.token_ids)
    assert stats.accepted <= stats.drafted
    assert stats.mean_accepted_length == pytest.approx(30 / stats.rounds)
    if drafter == "none":
        assert stats.drafted == 0
        assert stats.acceptance_rate is None
        assert stats.acceptance_by_position == ()
        assert stats.drafter_s == 0.0
    else:
        assert stats.acceptance_rate == stats.accepted / stats.drafted
        assert len(stats.acceptance_by_position) <= 4
        assert list(stats.acceptance_by_position) == sorted(
            stats.acceptance_by_position, reverse=True
        )
        kept = [
            share * n
            for share, n in zip(
                stats.acceptance_given_prefix, stats.tested_by_position, strict=True
            )
        ]
        assert sum(kept) == pytest.approx(stats.accepted)
    assert stats.wall_s == pytest.approx(stats.target_s + stats.drafter_s + stats.overhead_s)
    assert 0.0 < stats.time_to_first_token_s <= stats.wall_s
    assert stats.tokens_per_second >= 30 / stats.wall_s
    assert stats.prompt_tokens_per_second > 0


def test_time_the_consumer_takes_is_not_counted(plain):
    import time

    stream = plain.stream(PROMPT, WARM, max_tokens=3)
    for _event in stream:
        time.sleep(0.1)
    assert stream.result.stats.wall_s < 0.3  # the answer itself takes a few milliseconds


# -- randomness ------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_answer(runtime, tiny_model, drafter):
    first = runtime.generate(PROMPT, WARM.replace(seed=5), max_tokens=20).token_ids
    assert runtime.generate(PROMPT, WARM.replace(seed=5), max_tokens=20).token_ids == first
    assert runtime.generate(PROMPT, WARM.replace(seed=6), max_tokens=20).token_ids != first
    with Runtime(tiny_model, drafter, **F32, seed=5) as other:
        result = other.generate(PROMPT, WARM.replace(seed=None), max_tokens=20)
    assert (result.token_ids, result.seed) == (first, 5)


@pytest.mark.parametrize(
    ("of_runtime", "of_params"), [({}, None), ({"seed": -1}, None), ({"seed": 5}, -1)], ids=str
)
def test_without_a_seed_answers_differ_and_can_be_repeated(tiny_model, of_runtime, of_params):
    with Runtime(tiny_model, "none", **F32, **of_runtime) as runtime:
        unset = WARM.replace(seed=of_params)
        first, other = (runtime.generate(PROMPT, unset, max_tokens=20) for _ in range(2))
        assert first.token_ids != other.token_ids
        again = runtime.generate(PROMPT, WARM.replace(seed=first.seed), max_tokens=20)
        assert (again.token_ids, again.seed) == (first.token_ids, first.seed)


@pytest.mark.parametrize("seed", [-2, 0, 2**63, 2**70, np.int64(5)])
def test_any_whole_number_is_a_seed(plain, seed):
    params = WARM.replace(seed=seed)
    first = plain.generate(PROMPT, params, max_tokens=8)
    assert plain.generate(PROMPT, params, max_tokens=8).token_ids == first.token_ids
    assert json.loads(json.dumps(first.to_dict()))["seed"] == seed


@pytest.mark.parametrize("seed", [1.5, "7", True], ids=repr)
def test_what_is_no_seed_is_refused(tiny_model, seed):
    for refused in (
        lambda: SamplingParams(seed=seed),
        lambda: Runtime(tiny_model, "none", seed=seed),
    ):
        with pytest.raises(OptionError, match=f"seed is {seed!r}: it must be a whole number"):
            refused()


@pytest.mark.parametrize("index", [-1, 1.0, "0", None, True], ids=repr)
def test_what_is_no_index_is_refused(plain, index):
    for call in (plain.stream, plain.generate):
        with pytest.raises(OptionError, match=f"index is {index!r}: give the number"):
            call(PROMPT, WARM, index=index)
    for call in (plain.stream_chat, plain.chat):
        with pytest.raises(OptionError, match=f"index is {index!r}: give the number"):
            call(MESSAGES, WARM, index=index)


# -- chat ------------------------------------------------------------------------------------------


def test_a_chat_reuses_its_history(runtime):
    greedy = SamplingParams(temperature=0.0, logit_bias={**NO_END, 97: 3.0, 98: 2.0})
    first = runtime.chat(MESSAGES, greedy, max_tokens=8)
    history = [
        *MESSAGES,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "go on"},
    ]
    second = runtime.chat(history, greedy, max_tokens=8)
    assert second.usage.cached_tokens >= len(runtime.chat_prompt(MESSAGES))
    assert second.usage.prompt_tokens == len(runtime.chat_prompt(history))


def test_a_chat_without_a_template_says_what_to_do(tiny_small_vocab):
    with (
        Runtime(tiny_small_vocab, "none", **F32) as runtime,
        pytest.raises(TemplateError, match="--chat-template-file") as caught,
    ):
        runtime.chat(MESSAGES)
    assert caught.value.exit_code == 3


def test_a_template_can_be_given(tiny_small_vocab):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with Runtime(tiny_small_vocab, "none", **F32, chat_template=template) as runtime:
        assert runtime.chat_prompt(MESSAGES) == runtime.vocabulary.tokenize("hi")


def test_names_of_control_tokens_in_a_prompt_are_control_tokens_unless_it_is_tokens(plain):
    with_text = plain.generate("a<|end|>", WARM, max_tokens=1)
    assert with_text.usage.prompt_tokens == 2
    tokens = plain.vocabulary.tokenize_prompt("a<|end|>", parse_special=False)
    assert len(tokens) == len("a<|end|>")
    assert plain.generate(tokens, WARM, max_tokens=1).usage.prompt_tokens == len(tokens)


# -- opening and closing ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("n_ctxx", "n_ctx"), ("gpu_layers", "n_gpu_layers"), ("thread", "n_threads"), ("sed", "seed")],
)
def test_an_unknown_option_raises_with_the_nearest_name(tiny_model, wrong, near):
    with pytest.raises(OptionError, match=f"did you mean '{near}'"):
        Runtime(tiny_model, "none", **{wrong: 1})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n_ctx": -1}, "n_ctx is -1"),
        ({"n_batch": 0}, "n_batch is 0"),
        ({"n_threads": -2}, "n_threads is -2"),
        ({"n_threads": 10**6}, "n_threads is 1000000"),
        ({"n_gpu_layers": -7}, "-7"),
        ({"flash_attention": "yes"}, "yes"),
        ({"cache_type_k": "f64"}, "f64"),
        ({"accept": "exakt"}, "exact"),
        ({"accept": "exact(x=1)"}, "exact"),
        ({"accept": "exact("}, "character"),
    ],
    ids=str,
)
def test_a_bad_option_is_refused_and_nothing_stays_open(tiny_model, options, named):
    with pytest.raises(OptionError, match=named) as caught:
        Runtime(tiny_model, "none", **{"n_ctx": 256, "n_threads": 1, **options})
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("drft(a.gguf)", "did you mean 'draft'"),
        ("none(3)", "at most"),
        ("prompt-lookup(n=0)", "n is 0"),
        ("prompt-lookup(n=x)", "not a whole number"),
        ("prompt-lookup(m=3)", "no option 'm'"),
        ("prompt-lookup(min_ngram=17)", "min_ngram <= max_ngram"),
        ("draft", "name the GGUF file"),
        ("draft(a.gguf, b.gguf)", "at most"),
        ("draft(a.gguf, sampling=no)", "no sampling of draft called 'no'"),
        ("draft(", "character 7"),
    ],
)
def test_a_drafter_that_makes_no_sense_is_refused(tiny_model, expression, named):
    with pytest.raises(OptionError, match=named):
        Runtime(tiny_model, expression, **F32)


@pytest.mark.parametrize("bad", ["n=0", "n=-3", "p_min=2", "p_min=nan"])
@pytest.mark.parametrize("tree", ["", "tree=2x2, "])
def test_a_bad_number_for_a_draft_model_is_refused_before_it_is_opened(
    tiny_model, tiny_drafter, bad, tree, monkeypatch
):
    from specrun.bindings.models.model import Model

    closed: list[Path] = []
    close = Model.close
    monkeypatch.setattr(Model, "close", lambda model: (closed.append(model.path), close(model))[1])
    with pytest.raises(OptionError, match=bad.split("=")[0]):
        Runtime(tiny_model, f"draft({quoted(str(tiny_drafter))}, {tree}{bad})", **F32)
    assert list(dict.fromkeys(closed)) == [tiny_model]


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_a_missing_file_is_named(tiny_model, tmp_path, which):
    missing = tmp_path / "nowhere.gguf"
    with pytest.raises(FileMissingError, match=r"nowhere\.gguf") as caught:
        if which == "target":
            Runtime(missing, "none", **F32)
        else:
            Runtime(tiny_model, f"draft({quoted(str(missing))})", **F32)
    assert caught.value.exit_code == 3


def test_a_path_may_be_a_text(tiny_model):
    with Runtime(str(tiny_model), "none", **F32) as runtime:
        assert runtime.n_ctx == 256


def test_a_folder_as_target(tmp_path):
    with pytest.raises(ModelError):
        Runtime(tmp_path, "none", **F32)


def test_the_context_is_cut_to_the_trained_length(tiny_model):
    with Runtime(tiny_model, "none", n_threads=1, n_ctx=10**6) as runtime:
        assert runtime.n_ctx == 1024
    with Runtime(tiny_model, "none", n_threads=1, n_ctx=0) as runtime:
        assert runtime.n_ctx == 1024


CALLS = {
    "generate": lambda runtime: runtime.generate("a"),
    "stream": lambda runtime: runtime.stream("a"),
    "chat": lambda runtime: runtime.chat(MESSAGES),
    "chat_prompt": lambda runtime: runtime.chat_prompt(MESSAGES),
    "vocabulary": lambda runtime: runtime.vocabulary,
    "n_ctx": lambda runtime: runtime.n_ctx,
    "drafter": lambda runtime: runtime.drafter,
    "session": lambda runtime: runtime.session,
}


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_closed_runtime_raises(tiny_model, call, used_before):
    runtime = Runtime(tiny_model, "none", **F32)
    if used_before:
        runtime.chat(MESSAGES, max_tokens=1)
    runtime.close()
    runtime.close()
    with pytest.raises(ClosedError):
        call(runtime)


@pytest.mark.parametrize("prompt", [[320], [-1], [5, 10**12]], ids=str)
def test_a_prompt_token_outside_the_vocabulary_is_refused(plain, prompt):
    with pytest.raises(OptionError, match="outside the vocabulary of 320"):
        plain.generate(prompt)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([1.7, 2], "prompt token 0 is 1.7: a prompt is a text, or token ids"),
        ([5, 2.0], "prompt token 1 is 2.0"),
        ([5, True], "prompt token 1 is True"),
        ([5, np.True_], "prompt token 1 is np.True_"),
        (["ab", 5], "prompt token 0 is 'ab'"),
        ([5, None], "prompt token 1 is None"),
        (np.array([5.5]), r"prompt token 0 is np.float64\(5.5\)"),
        (np.array([[5, 6]]), r"prompt token 0 is array\(\[5, 6\]\)"),
        (np.array(5), r"the prompt is array\(5\): give a text or token ids"),
        (None, "the prompt is None: give a text or token ids"),
        (b"ab", r"the prompt is of bytes, .*: decode it, as in prompt\.decode\(\)"),
        (bytearray(b"ab"), "the prompt is of bytearray"),
        (5, "the prompt is 5"),
    ],
    ids=repr,
)
def test_a_prompt_of_anything_but_text_and_whole_numbers_is_refused(plain, prompt, problem):
    for call in (plain.generate, plain.stream):
        with pytest.raises(OptionError, match=problem):
            call(prompt, WARM, max_tokens=1)


def test_prompts_may_hold_the_integers_of_numpy(plain):
    expected = plain.generate(PROMPT, WARM, max_tokens=5).token_ids
    for prompt in (np.array(PROMPT), np.array(PROMPT, np.uint16), list(np.array(PROMPT))):
        assert plain.generate(prompt, WARM, max_tokens=5).token_ids == expected


def test_a_bias_that_forbids_everything_is_named_and_the_next_answer_goes_on(runtime):
    nothing = WARM.replace(logit_bias=dict.fromkeys(range(320), -math.inf))
    expected = runtime.generate(PROMPT, WARM, max_tokens=8).token_ids
    with pytest.raises(OptionError, match="none of 320 tokens is left after logit_bias"):
        runtime.generate(PROMPT, nothing)
    assert runtime.generate(PROMPT, WARM, max_tokens=8).token_ids == expected


def test_options_have_the_defaults_of_llama():
    context = RuntimeOptions().context
    assert (context.n_ctx, context.n_batch, context.n_ubatch, context.n_threads) == (
        4096,
        512,
        512,
        0,
    )
    assert (context.cache_type_k, context.cache_type_v, RuntimeOptions().accept) == (
        "f16",
        "f16",
        "exact",
    )


def test_options_of_a_context_may_be_given_one_by_one_or_as_one(tiny_model):
    whole = ContextOptions(n_ctx=512, n_threads=1, cache_type_k="f32")
    with Runtime(tiny_model, "none", context=whole, cache_type_v="f32") as runtime:
        assert runtime.options.context == ContextOptions(
            n_ctx=512, n_threads=1, cache_type_k="f32", cache_type_v="f32"
        )
        assert (runtime.n_ctx, runtime.session.target.context.options.cache_type_k) == (512, "f32")
    with Runtime(tiny_model, "none", n_threads=1, flash_attention="on") as runtime:
        assert runtime.options == RuntimeOptions(
            ContextOptions(n_ctx=4096, n_threads=1, flash_attention="on")
        )


@pytest.mark.parametrize(
    "wrong", ["n_outputs", "n_sequences", "hidden_states", "layer_inputs", "n_rollback"]
)
def test_what_follows_from_the_drafter_is_no_option(tiny_model, wrong):
    with pytest.raises(OptionError, match=f"no option {wrong!r}"):
        Runtime(tiny_model, "none", **{wrong: 1})


@pytest.mark.parametrize("options", [{"context": {"n_ctx": 5}}, {"rope": "yarn"}], ids=str)
def test_an_option_of_the_wrong_kind_is_refused(tiny_model, options):
    with pytest.raises(OptionError, match=r"give a (ContextOptions|RopeScaling), such as"):
        Runtime(tiny_model, "none", **options)


def test_further_drafters_learn_for_themselves_and_change_no_word(tiny_model: Path) -> None:
    params = SamplingParams(temperature=0.0)
    with Runtime(tiny_model, "prompt-lookup", n_ctx=256, n_threads=1, trust=True) as runtime:
        first, other = runtime.session.drafter, runtime.start_drafter()
        said = runtime.generate("abcabc", params, max_tokens=12).token_ids
        runtime.session.draft_with(other)
        assert runtime.session.drafter is other is not first
        assert runtime.generate("abcabc", params, max_tokens=12).token_ids == said
        first.close()
    with pytest.raises(ClosedError):
        runtime.start_drafter()
