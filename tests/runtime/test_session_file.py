"""Session files: a kept cache answers as a fresh one, and nothing else is taken for one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.tiny_heads import random_medusa
from support.tiny_hybrids import HYBRIDS
from support.tiny_mamba import write_tiny_mamba
from support.tiny_models import EXACT, F32

from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    OptionError,
    PairError,
    SpecrunError,
)
from specrun.runtime import RopeScaling, Runtime, SamplingParams
from specrun.runtime.engine import session_file

PROMPT = list(range(97, 123)) * 6
GREEDY = SamplingParams(temperature=0.0)


@contextmanager
def opened(model: Path, drafter: str = "none", **options: object) -> Iterator[Runtime]:
    with Runtime(model, drafter, **{**F32, **options}) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def kept(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept") / "prompt.session"
    with opened(tiny_model) as runtime:
        runtime.generate(PROMPT, GREEDY, max_tokens=3)
        assert runtime.save_session(path) == len(PROMPT) + 2  # the last token was not evaluated
    return path


def logprobs(runtime: Runtime, prompt: list[int]) -> list[float]:
    events = list(runtime.stream(prompt, GREEDY, max_tokens=6))
    return [event.logprob for event in events]


@pytest.mark.parametrize(
    "drafter", ["none", "prompt-lookup", "draft(FILE, n=3)", "draft(FILE, tree=2x2)", "lookahead"]
)
def test_a_kept_cache_answers_as_a_fresh_one(
    tiny_model: Path, tiny_flat_twin: Path, kept: Path, drafter: str
) -> None:
    expression = drafter.replace("FILE", f'"{tiny_flat_twin}"')
    longer = [*PROMPT, 98, 99]
    with opened(tiny_model, expression) as runtime:
        fresh = logprobs(runtime, longer)
    with opened(tiny_model, expression) as runtime:
        assert runtime.load_session(kept) == len(PROMPT) + 2
        result = runtime.generate(longer, GREEDY, max_tokens=1)
        assert result.usage.cached_tokens >= len(PROMPT)
        np.testing.assert_allclose(logprobs(runtime, longer), fresh, atol=1e-5)


@pytest.mark.parametrize("family", [*HYBRIDS, "mamba"])
def test_a_recurrent_state_is_kept_with_its_checkpoints(tmp_path: Path, family: str) -> None:
    """The text goes on from its end, or from the border of an earlier message."""
    model = (HYBRIDS | {"mamba": write_tiny_mamba})[family](tmp_path / "model.gguf")
    with opened(model) as runtime:
        control = next(t for t in range(runtime.model.vocabulary.size) if is_control(runtime, t))
        message = [*range(2, 40), control]
        runtime.generate([*message, *range(40, 60)], GREEDY, max_tokens=3)
        n_kept = runtime.save_session(tmp_path / "kept.session")
        text = runtime.session.conversation.tokens[:n_kept]
        prompts = [[*text, 7, 8], [*message, 5, 6, 7]]
        fresh = []
        for prompt in prompts:
            runtime.session.forget()
            fresh.append(logprobs(runtime, prompt))
    for prompt, wanted, n_cached in zip(prompts, fresh, (n_kept, len(message) - 1), strict=True):
        with opened(model) as runtime:
            assert runtime.load_session(tmp_path / "kept.session") == n_kept
            result = runtime.generate(prompt, GREEDY, max_tokens=1)
            assert result.usage.cached_tokens == n_cached
            np.testing.assert_allclose(logprobs(runtime, prompt), wanted, atol=1e-4)
    with opened(model, checkpoint_memory=0) as runtime:  # no room for them: all is read again
        runtime.load_session(tmp_path / "kept.session")
        assert runtime.generate(prompts[1], GREEDY, max_tokens=1).usage.cached_tokens == 0


def is_control(runtime: Runtime, token: int) -> bool:
    return runtime.model.vocabulary.is_control(token)


@pytest.mark.parametrize(
    "states", ["x", [1], [[1]], [[1, "2"]], [[0, 4]], [[1, -4]], [[1, 1 << 40]]]
)
def test_checkpoints_of_junk_are_refused(tmp_path: Path, states: object) -> None:
    model = HYBRIDS["lfm2"](tmp_path / "model.gguf")
    with opened(model) as runtime:
        runtime.generate(PROMPT[:9], GREEDY, max_tokens=2)
        runtime.save_session(tmp_path / "kept.session")
        tail, whole = session_file._TAIL, (tmp_path / "kept.session").read_bytes()
        n_facts = tail.unpack(whole[-tail.size :])[0]
        facts = json.loads(whole[-tail.size - n_facts : -tail.size]) | {"checkpoints": states}
        said = json.dumps(facts).encode()
        body = whole[: -tail.size - n_facts] + said
        digest = hashlib.sha256(body).digest()
        junk = tmp_path / "junk.session"
        junk.write_bytes(body + tail.pack(len(said), digest, session_file._MAGIC))
        runtime.session.forget()
        with pytest.raises(MalformedFileError, match="damaged"):
            runtime.load_session(junk)


def test_the_cache_of_another_text_would_be_noticed(tiny_model: Path, kept: Path) -> None:
    """The control of the test above: with other tokens under the same name the answers differ."""
    with opened(tiny_model) as runtime:
        fresh = logprobs(runtime, [*PROMPT[::-1], 98])
    with opened(tiny_model) as runtime:
        runtime.load_session(kept)
        text = runtime.session.conversation
        text.tokens = [*PROMPT[::-1], 98, 99]
        assert np.abs(np.subtract(logprobs(runtime, [*PROMPT[::-1], 98]), fresh)).max() > 1e-3


def test_a_prompt_that_shares_nothing_is_evaluated_whole(tiny_model: Path, kept: Path) -> None:
    with opened(tiny_model) as runtime:
        fresh = logprobs(runtime, [65, 66, 67])
        runtime.load_session(kept)
        np.testing.assert_allclose(logprobs(runtime, [65, 66, 67]), fresh, atol=1e-5)


def test_drafters_of_states_take_nothing(tiny_model: Path, kept: Path, tmp_path: Path) -> None:
    with opened(tiny_model) as runtime:
        width = runtime.model.n_embd
    heads = random_medusa(width, 320).write(tmp_path / "heads.gguf", 320)
    with opened(tiny_model, f'medusa("{heads}")') as runtime:
        assert runtime.load_session(kept) == 0
        assert runtime.generate(PROMPT, GREEDY, max_tokens=2).usage.cached_tokens == 0


def test_another_model_or_settings_are_refused(
    tiny_model: Path, tiny_flat_twin: Path, kept: Path
) -> None:
    with opened(tiny_flat_twin) as runtime, pytest.raises(PairError, match="its model is"):
        runtime.load_session(kept)
    with (
        Runtime(tiny_model, "none", **EXACT) as runtime,
        pytest.raises(PairError, match="cache types"),
    ):
        runtime.load_session(kept)
    with opened(tiny_model, rope=RopeScaling("linear", scale=2)) as runtime:
        with pytest.raises(PairError, match="rope scaling"):
            runtime.load_session(kept)


def test_another_version_is_refused(tiny_model: Path, kept: Path, monkeypatch) -> None:
    monkeypatch.setattr(session_file, "_VERSION", 2)
    with opened(tiny_model) as runtime, pytest.raises(PairError, match="its version is 1"):
        runtime.load_session(kept)


@pytest.mark.parametrize("facts", [b"[" * 50_000, b"[]", b"7", b"\xff", b'{"version": NaN}'])
def test_facts_of_junk_are_refused_though_their_hash_is_right(
    tiny_model: Path, kept: Path, tmp_path: Path, facts: bytes
) -> None:
    tail, whole = session_file._TAIL, kept.read_bytes()
    n_facts = tail.unpack(whole[-tail.size :])[0]
    body = whole[: -tail.size - n_facts] + facts
    path = tmp_path / "junk.session"
    path.write_bytes(
        body + tail.pack(len(facts), hashlib.sha256(body).digest(), session_file._MAGIC)
    )
    with opened(tiny_model) as runtime, pytest.raises(MalformedFileError, match="damaged"):
        runtime.load_session(path)


def test_damaged_files_never_reach_llama_cpp(
    tiny_model: Path, kept: Path, tmp_path: Path, monkeypatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("llama.cpp was asked")

    monkeypatch.setattr(session_file, "load_sequence", refuse)
    whole, path = kept.read_bytes(), tmp_path / "damaged.session"
    with opened(tiny_model) as runtime:
        for place in (0, len(whole) // 2, len(whole) - 70, len(whole) - 40, len(whole) - 1):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(MalformedFileError, match="damaged"):
                runtime.load_session(path)
        for content in (b"", b"x" * 20, whole[:-1], whole[: len(whole) // 2], b"x" * 5000):
            path.write_bytes(content)
            with pytest.raises(MalformedFileError, match="damaged"):
                runtime.load_session(path)
        with pytest.raises(FileMissingError):
            runtime.load_session(tmp_path / "absent")
        with pytest.raises(AssertionError, match="was asked"):
            runtime.load_session(kept)


def test_a_shorter_context_refuses_a_longer_text(tiny_model: Path, kept: Path, tmp_path) -> None:
    path = tmp_path / "long.session"
    with opened(tiny_model, n_ctx=1024) as runtime:
        runtime.generate(PROMPT * 4, GREEDY, max_tokens=1)
        runtime.save_session(path)
    with opened(tiny_model) as runtime:
        with pytest.raises(MalformedFileError, match="does not fit"):
            runtime.load_session(path)
        fresh = runtime.generate(PROMPT, GREEDY, max_tokens=4)  # and goes on as if nothing was
        assert fresh.usage.completion_tokens == 4


def test_saving_replaces_whole_or_not_at_all(tiny_model, tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.session"
    with opened(tiny_model) as runtime:
        runtime.generate(PROMPT, GREEDY, max_tokens=2)
        runtime.save_session(path)
        before = path.read_bytes()
        monkeypatch.setattr(session_file, "MAX_BYTES", 1000)
        with pytest.raises(OptionError, match="above"):
            runtime.save_session(path)
        monkeypatch.setattr(session_file, "MAX_BYTES", 1 << 30)
        monkeypatch.setattr(session_file, "save_sequence", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runtime.save_session(path)
        monkeypatch.setattr(session_file, "require_free_space", _full)
        with pytest.raises(SpecrunError, match="full"):
            runtime.save_session(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def _full(_folder: Path, _n_bytes: int) -> None:
    raise SpecrunError("the disk is full")
