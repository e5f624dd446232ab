"""Python's front door: `import specrun`, its default drafter, and sentences for wrong input."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from support.tiny_models import CHAT, F32

import specrun
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.machine.placement import Placement
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.engine.answer import AnswerOptions
from specrun.runtime.engine.keywords import AnswerKeywords, RuntimeKeywords
from specrun.runtime.planning import ANY, Choice, Profile, describe_settings, save_profile


def fields_of(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_keywords_are_the_fields_of_the_options() -> None:
    loading = fields_of(specrun.RuntimeOptions) | fields_of(Placement)
    assert set(get_type_hints(RuntimeKeywords)) == {*loading, *ContextOptions.chosen_names()}
    assert set(get_type_hints(AnswerKeywords)) == fields_of(AnswerOptions)
    own = get_type_hints(specrun.RuntimeOptions)
    for name, kind in get_type_hints(RuntimeKeywords).items():
        if name in own:
            assert own[name] == kind, name


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("front") / "target.gguf"
    write_random_llama(path, RandomLlama(**CHAT))
    return path


@pytest.mark.parametrize("kind", [specrun.Runtime, specrun.Engine])
def test_without_a_drafter_it_drafts_as_chat_does(
    kind: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with kind(target, **F32) as opened:
        assert opened.slots()[0].drafter.startswith("auto")
        chosen = describe_settings(opened.options)
    save_profile(Profile(chosen, (Choice(0.8, ANY, "prompt-lookup(n=3)", 1.2),)), target)
    with kind(target, **F32) as opened:
        assert opened.slots()[0].drafter == "prompt-lookup(n=3)"
    with kind(target, "none", **F32) as opened:
        assert opened.slots()[0].drafter == "none"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"n_ctx": "abc"}, "n_ctx is 'abc': give a whole number"),
        ({"n_ctx": True}, "n_ctx is True: give a whole number"),
        ({"use_mmap": "no"}, "use_mmap is 'no': give True or False"),
        ({"accept": 3}, "accept is 3: give a text"),
        ({"n_gpu_layers": "most"}, "n_gpu_layers is 'most': give a count of layers, \"auto\""),
        ({"rope": "yarn"}, "rope is 'yarn': give a RopeScaling"),
        ({"ctx": 12}, "Runtime has no option 'ctx': did you mean 'n_ctx'?"),
        ({"drafter": 3}, "an expression is a text, such as 'prompt-lookup', not 3"),
    ],
    ids=str,
)
def test_wrong_options_are_named(target: Path, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(specrun.OptionError) as caught:
        specrun.Runtime(target, **{"drafter": "none", **given})
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"temperature": 0}, "an answer has no option 'temperature': did you mean Samp"),
        (
            {"temp": 0},
            "an answer has no option 'temp': did you mean SamplingParams(temperature=0)",
        ),
        (
            {"repetition_penalty": 2},
            "an answer has no option 'repetition_penalty': did you mean",
        ),
        ({"max_token": 3}, "an answer has no option 'max_token': did you mean 'max_tokens'?"),
        ({"max_tokens": "3"}, "max_tokens is '3': give a whole number"),
        ({"params": {"temperature": 0}}, "the settings of sampling are {'temperature': 0}: give a"),
        ({"params": 0.7}, "the settings of sampling are 0.7: give a SamplingParams"),
    ],
    ids=str,
)
def test_wrong_settings_are_named(target: Path, given: dict[str, Any], sentence: str) -> None:
    with specrun.Runtime(target, "none", **F32) as runtime:
        with pytest.raises(specrun.OptionError) as caught:
            runtime.generate("a", **given)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}, 3])
def test_a_conversation_is_a_list(target: Path, messages: Any) -> None:
    with specrun.Runtime(target, "none", **F32) as runtime:
        with pytest.raises(specrun.OptionError, match=r"give a list of messages, such as"):
            runtime.chat(messages)


def test_an_unknown_setting_of_sampling_names_the_nearest() -> None:
    for given, near in (("temp", "temperature"), ("typ_p", "typical_p"), ("top-k", "top_k")):
        with pytest.raises(specrun.OptionError, match=f"did you mean '{near}'"):
            specrun.SamplingParams(**{given: 1})
    with pytest.raises(specrun.OptionError, match="known are dry_allowed_length"):
        specrun.SamplingParams(**{"zzzz": 1})


def test_results_and_runtimes_have_short_representations(target: Path) -> None:
    with specrun.Runtime(target, "none", **F32) as runtime:
        assert repr(runtime).startswith("<Runtime of target.gguf: drafter 'none', n_ctx ")
        result = runtime.generate("a", specrun.SamplingParams(temperature=0), max_tokens=2)
    assert repr(result) == f"<GenerationResult {result.text!r}: 2 tokens in 2 rounds, length>"
    assert repr(runtime) == "<Runtime, closed>"
