"""`specrun serve` as a command: what it prints, who may reach it, and its end by signals."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx2
import openai
import pytest
from support.commands import run
from support.ctrl_c import hearing_ctrl_c

posix = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
PROGRAM = [sys.executable, "-c", "from specrun.cli.main import main; main()"]
SERVE = ("serve", "--trust", "--port", "0", "-np", "1")
DEMO = ("--demo",)
ENDLESS = {"prompt": "os.", "ignore_eos": True, "max_tokens": 3000, "stream": True}


@contextmanager
def served(
    *options: str, models: tuple[str, ...] = DEMO, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process, and the address that it printed."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("SPECRUN_")}
    with hearing_ctrl_c():
        process = subprocess.Popen(
            [*PROGRAM, *SERVE, *models, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**own, "SPECRUN_THREADS": "1", **environment},
            text=True,
        )
    with process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            if process.poll() is None:
                process.kill()


@posix
def test_it_says_where_it_is_and_ends_when_it_is_told(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\n\nsecond\n")
    options = ("--api-key-file", str(keys), "-a", "mine", "--drain", "60", "-v")
    with served(*options) as (process, address):
        assert httpx2.get(f"{address}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer second"}
        listed = httpx2.get(f"{address}/v1/models", headers=headers).json()
        assert listed["data"][0]["id"] == "mine"
        body = {**ENDLESS, "max_tokens": 20, "stream": False}
        with httpx2.stream(
            "POST", f"{address}/v1/completions", json={**body, "stream": True}, headers=headers
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            data = [line for line in lines if line.startswith("data: ")]
        assert data[-1] == "data: [DONE]"
        assert json.loads(data[-2][6:])["choices"][0]["finish_reason"] == "length"
        output, messages = process.communicate(timeout=30)
    assert process.returncode == 0, messages
    assert output == ""
    for word in ("drafter", "slots", "key", "required (2)", f"{address}/v1", "ended"):
        assert word in messages
    assert "GET /v1/models 401" in messages  # the access log, with -v
    assert "second" not in messages.replace("seconds", "")  # keys are never shown


@posix
def test_the_second_ctrl_c_ends_it_at_once() -> None:
    with served("--drain", "3600") as (process, address):
        with httpx2.stream("POST", f"{address}/v1/completions", json=ENDLESS) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            assert process.poll() is None  # it waits for the answer
            process.send_signal(signal.SIGINT)
            _, messages = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in messages
    assert "GET" not in messages


@posix
def test_a_folder_is_served_model_by_model(
    tmp_path: Path, tiny_model: Path, tiny_deep_model: Path
) -> None:
    folder, config = tmp_path / "all", tmp_path / "config.toml"
    (folder / "deep").mkdir(parents=True)
    shutil.copy(tiny_model, folder / "one-Q8_0.gguf")
    shutil.copy(tiny_deep_model, folder / "deep" / "two.gguf")
    (folder / "bad.gguf").write_bytes(b"GGUF, or so it says")
    config.write_text('[models.TWO]\nalias = "second"\nctx-size = 256\npredict = 3\n')
    models = (str(folder), "-m", str(folder / "one-Q8_0.gguf"))  # which is one of the folder's
    environment = {"SPECRUN_CONFIG": str(config), "SPECRUN_LOGIT_BIAS": "317-inf 318-inf 319-inf"}
    with served("--drafter", "none", models=models, **environment) as (process, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["one-Q8_0", "bad", "second"]
        for name, n_tokens in (("two.gguf", 3), ("one-Q8_0", 5)):
            more = {"max_tokens": 5} if n_tokens == 5 else {}
            done = client.completions.create(model=name, prompt="a", **more)
            assert done.model == {"two.gguf": "second"}.get(name, name)
            assert done.usage is not None
            assert done.usage.completion_tokens == n_tokens
        for name, kind in (("bad", openai.InternalServerError), ("on-Q8_0", openai.NotFoundError)):
            with pytest.raises(kind, match=r"bad was not loaded|did you mean 'one-Q8_0'"):
                client.completions.create(model=name, prompt="a")
        second = httpx2.get(f"{address}/props?model=second").json()
        assert second["default_generation_settings"]["n_ctx"] == 256
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate(timeout=30)
    assert process.returncode == 0, messages
    for words in (
        "3 models, each loaded on request",
        "bad (cannot be read)",
        "second (llama",
        "ended",
    ):
        assert words in messages
    assert str(folder) not in messages.replace(f"{folder / 'bad.gguf'} ", "")


@posix
def test_the_only_model_sleeps_and_wakes(tiny_model: Path) -> None:
    models = ("-m", str(tiny_model))
    with served("--drafter", "none", models=models) as (process, address):
        post = partial(httpx2.post, timeout=60)
        body = {"prompt": "a", "max_tokens": 2, "seed": 1}
        first = post(f"{address}/v1/completions", json={**body, "model": "any"}).json()
        post(f"{address}/models/unload", json={})
        assert httpx2.get(f"{address}/props").json()["is_sleeping"] is True
        assert httpx2.get(f"{address}/api/ps").json() == {"models": []}
        again = post(f"{address}/v1/completions", json=body).json()
        assert again["choices"] == first["choices"]
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate(timeout=30)
    assert process.returncode == 0, messages


def test_other_machines_reach_nothing_without_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        done = run("serve --demo --host", host)
        assert (done.exit_code, "--api-key" in done.stderr) == (2, True)


def test_a_port_in_use_is_said_before_a_model_is_loaded() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = run("serve --demo --port", port)
    assert done.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "choose another --port" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--host no.such.host.invalid --api-key k", "no address here"),
        ("--api-key=", "--api-key is empty"),
        ("--api-key-file {empty}", "has no key"),
        ("--slots 0", "--slots"),
        ("--offer medusaa", "medusaa"),
        ("--accept cascade", "cascade"),
        ("--shape fixed", "shape"),
        ("nowhere", "nowhere"),
        ("{folder}", "--demo and -m exclude each other"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(tmp_path: Path, options: str, words: str) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    given = options.format(empty=empty, folder=tmp_path)
    done = run(f"serve --demo --port 0 -t 1 {given}")
    assert done.exit_code == (3 if options == "nowhere" else 2), done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.output


def test_models_need_names_of_their_own(tmp_path: Path, tiny_model: Path) -> None:
    done = run("serve --port 0", tmp_path)
    assert (done.exit_code, "there is no model in" in done.stderr) == (3, True)
    for name in ("a", "b"):
        shutil.copy(tiny_model, tmp_path / f"{name}.gguf")
    done = run("serve --port 0 -a mine", tmp_path)
    assert done.exit_code == 2
    assert "-a mine is the name of one model, and 2 are served: put alias into" in done.stderr


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str, *more: str) -> object:
        return None if name == "sse_starlette" else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    done = run("serve --demo")
    assert done.exit_code == 1
    assert "sse-starlette" in done.stderr
    assert "[serve]" in done.stderr


def test_the_help_loads_nothing_that_serving_needs() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from specrun.cli.main import cli;"
        "done = CliRunner().invoke(cli, ['serve', '--help']); assert done.exit_code == 0;"
        "print(sorted({'starlette', 'uvicorn', 'sse_starlette', 'llama_cpp'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
