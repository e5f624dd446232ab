"""Clients that nobody here wrote: OpenAI's package and the terminal client `llm`, over a socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.loopback_server import serving

from specrun.runtime.engine import Engine

openai = pytest.importorskip("openai")

QUESTION = "What does shutil.copytree do?"
MESSAGES = [{"role": "user", "content": QUESTION}]
ANSWER = "Recursively copy a directory tree and return the destination directory."
KEY = "a-key"


@pytest.fixture(scope="module")
def address(demo_engine: Engine) -> Iterator[str]:
    with serving(demo_engine, api_keys=(KEY,)) as address:
        yield address


@pytest.fixture
def remote(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_openai_chats(remote: openai.OpenAI) -> None:
    reply = remote.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert reply.usage.completion_tokens_details.accepted_prediction_tokens > 0
    assert reply.usage.prompt_tokens_details.cached_tokens >= 0


def test_openai_streams(remote: openai.OpenAI) -> None:
    stream = remote.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculative": {"n_max": 3}},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWER
    assert chunks[-1].usage.completion_tokens > 10


def test_openai_completes(remote: openai.OpenAI) -> None:
    reply = remote.completions.create(
        model="tiny", prompt=["os.", [300, 301]], max_tokens=3, n=2, logprobs=1, seed=3
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.tokens) <= 3 for choice in reply.choices)
    parts = remote.completions.create(model="tiny", prompt="os.", max_tokens=3, stream=True)
    assert [part.choices[0].finish_reason for part in parts][-1] in ("stop", "length")


def test_openai_reads_errors(remote: openai.OpenAI, address: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        remote.chat.completions.create(model="tiny", messages=MESSAGES, top_p=-1)
    assert refused.value.param == "top_p"
    with openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_llm_in_a_terminal(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = pytest.importorskip("llm.cli").cli
    models = f"- {{model_id: tiny, model_name: tiny, api_base: {address}/v1, api_key_name: tiny}}"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))

    def llm(*arguments: str) -> str:
        done = CliRunner().invoke(program, [*arguments, "-m", "tiny", "--key", KEY])
        assert done.exit_code == 0, done.output
        return done.stdout.strip()

    assert llm(QUESTION, "-o", "temperature", "0") == ANSWER
    assert llm(QUESTION, "-o", "temperature", "0", "--no-stream") == ANSWER
    assert llm("Say it again.", "--continue")
