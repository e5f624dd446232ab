"""Chats that learn, what they keep, and `specrun learn show` and `forget`; wrong inputs in one
sentence."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from support.tiny_family import Family, question

from specrun.cli.chat.learning import Observer, serve_learning
from specrun.cli.options.drafting import LearnSettings
from specrun.cli.terminal.terminal import Terminal
from specrun.convert import convert_checkpoint
from specrun.runtime import SamplingParams
from specrun.runtime.engine import Engine

from .conftest import Models, Run

pytestmark = pytest.mark.long

OPTIONS = ["-n", 24, "--temp", 1, "--top-k", 0, "--top-p", 1, "--min-p", 0, "-s", 3, "-c", 512]
LEARN = ["--learn-every", 0, "--learn-rate", 0.01]
QUESTIONS = [question(name) for name in ("first", "second", "third", "fourth")]


@pytest.fixture(scope="module")
def pair(family: Family, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    folder = tmp_path_factory.mktemp("pair")
    for name in ("target", "draft"):
        convert_checkpoint(getattr(family, name), folder / f"{name}.gguf", outtype="f32")
    return ["-m", folder / "target.gguf", "--drafter", f"draft('{folder / 'draft.gguf'}', n=3)"]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_chat_learns_says_so_and_forgets(run: Run, pair: list[object], state: Path) -> None:
    lines = [*QUESTIONS, *QUESTIONS, "/learn", *QUESTIONS, "/stats"]
    result = run("chat", *pair, *OPTIONS, *LEARN, "--learn", input="\n".join(lines))
    assert result.exit_code == 0, result.output
    assert "the drafter learns from rejected drafts at /learn\n" in result.stderr
    assert "learnt from " in result.stderr
    assert "the new drafter drafts from the next answer on" in result.stderr
    assert "accepted before the last update" in result.stderr
    assert "learning  1 updates, 1 of them in use" in result.stderr
    assert ", in memory" in result.stderr
    assert not state.exists()


def test_answers_are_kept_shown_and_forgotten(run: Run, pair: list[object], state: Path) -> None:
    """By vocabulary, and only if that is asked for; the second time they are drafted from."""
    options = [*pair[:2], "--drafter", "prompt-lookup(always=yes)", *OPTIONS, "--json"]
    said = []
    for kept in ([], ["--keep-answers"], ["--keep-answers"]):
        said.append(json.loads(run("generate", *options, "-p", QUESTIONS[0], *kept).stdout))
        assert state.exists() == bool(kept)
    assert said[0]["token_ids"] == said[1]["token_ids"] == said[2]["token_ids"]
    assert said[2]["stats"]["rounds"] < said[1]["stats"]["rounds"]
    (facts,) = json.loads(run("learn", "show", "--json").stdout)
    assert (facts["answers"], facts["rejected"], facts["problem"]) == (2, 0, None)
    assert Path(facts["folder"]).parent == state / "specrun" / "answers"
    assert "2 answers of" in run("learn", "show").stdout
    assert run("learn", "forget", *pair[:2]).exit_code == 0
    assert json.loads(run("learn", "show", "--json").stdout) == []
    refused = run("learn", "forget", *pair[:2])
    assert "nothing is kept of" in refused.stderr


def test_updates_come_by_themselves(run: Run, pair: list[object], state: Path) -> None:
    lines = QUESTIONS * 4
    options = ["--learn", "--learn-every", 8, "--learn-rate", 0.01]
    result = run("chat", *pair, *OPTIONS, *options, input="\n".join(lines))
    assert "rejected drafts after every 8 answers" in result.stderr
    assert result.stderr.count("learnt from ") == 2


def test_what_is_kept_is_shown_learnt_from_and_forgotten(
    run: Run, pair: list[object], state: Path, tmp_path: Path
) -> None:
    assert "nothing is kept" in run("learn", "show").stderr
    lines = [*QUESTIONS, *QUESTIONS, "/learn"]
    first = run("chat", *pair, *OPTIONS, *LEARN, "--learn-keep", input="\n".join(lines))
    assert first.exit_code == 0, first.output
    (kept,) = json.loads(run("learn", "show", "--json").stdout)
    assert kept["target"] == "target.gguf"
    assert kept["rejected"] > 20
    assert len(kept["drafters"]) == 1
    shown = run("learn", "show").stdout
    assert f"{kept['rejected']:,} rejected drafts of" in shown
    assert kept["folder"] in shown
    if os.name != "nt":
        assert Path(kept["folder"]).stat().st_mode & 0o077 == 0

    again = run("chat", *pair, *OPTIONS, *LEARN, "--learn-keep", input=QUESTIONS[0])
    assert f"{kept['rejected']:,} rejected drafts are kept in {kept['folder']}" in again.stderr
    assert kept["drafters"][0] in again.stderr  # it drafts now

    buffer, output = Path(kept["folder"]) / "buffer.bin", tmp_path / "out"
    draft = str(pair[3]).split("'")[1]
    trained = run(
        *("train", "drafter", "--online", buffer, "--draft", draft, "-o", output),
        *("--steps", 12, "-lr", 0.01, "--batch-tokens", 200, "--device", "cpu"),
        *("--precision", "float32", "--gguf", tmp_path / "new.gguf", "--json"),
    )
    assert trained.exit_code == 0, trained.output
    facts = json.loads(trained.stdout)
    assert facts["alpha_after"]["rate"] > facts["alpha_before"]["rate"]
    assert facts["gguf"] == str(tmp_path / "new.gguf")
    assert (tmp_path / "new.gguf").is_file()

    other = run("learn", "forget", "-m", draft)
    assert other.exit_code == 2
    assert "nothing is kept of" in other.stderr
    assert run("learn", "forget", "-m", pair[1]).exit_code == 0
    assert not Path(kept["folder"]).exists()
    assert json.loads(run("learn", "show", "--json").stdout) == []
    assert "nothing was kept" in run("learn", "forget", "--all").stderr


def test_another_models_buffer_is_refused(
    run: Run, pair: list[object], models: Models, state: Path
) -> None:
    run("chat", *pair, *OPTIONS, *LEARN, "--learn-keep", input="\n".join(QUESTIONS))
    (folder,) = (state / "specrun" / "learn").iterdir()
    pairs = ["-m", models.target, "--drafter", f"draft('{models.plain}', n=3)"]
    fine = run("chat", *pairs, "-n", 4, "--learn-keep", input="x")
    assert fine.exit_code == 0, fine.output
    (theirs,) = (each for each in (state / "specrun" / "learn").iterdir() if each != folder)
    (theirs / "buffer.bin").write_bytes((folder / "buffer.bin").read_bytes())
    refused = run("chat", *pairs, "-n", 4, "--learn-keep", input="x")
    assert refused.exit_code == 3
    assert "holds rejected drafts for target.gguf" in refused.stderr
    assert "give each target its own" in refused.stderr
    (theirs / "buffer.bin").write_bytes(b"SPECLEARN")
    assert "cut off after 9 bytes" in run("learn", "show").stdout
    assert run("learn", "forget", "--all").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--drafter", "none", "--learn"], "none is no draft model"),
        (["--drafter", "prompt-lookup", "--learn-keep"], "prompt-lookup is no draft model"),
        (["--learn", "--learn-rate", 0], "--learn-rate"),
        (["--learn", "--learn-every", -1], "--learn-every"),
    ],
)
def test_what_cannot_learn_is_a_usage_error(
    run: Run, models: Models, state: Path, arguments: list[object], named: str
) -> None:
    result = run("chat", "-m", models.target, *arguments, input="x")
    assert result.exit_code == 2
    assert named in result.stderr
    assert "Traceback" not in result.stderr


def test_learning_needs_torch_and_says_how_to_get_it(
    run: Run, pair: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specrun.cli.options.drafting.find_spec", lambda name: None if name == "torch" else sys
    )
    result = run("chat", *pair, "--learn", input="x")
    assert result.exit_code == 1
    assert "--learn needs the package torch: run pip install" in result.stderr
    assert run("chat", *pair, "-n", 2, input="x").exit_code == 0


def test_learn_without_the_flag(run: Run, models: Models) -> None:
    result = run("chat", "-m", models.target, "-n", 2, input="/learn\n")
    assert "begin it with --learn" in result.stderr
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["train", "drafter", "--draft", ".", "-o", "out"], 2, "--online BUFFER"),
        (
            ["train", "drafter", "--draft", ".", "-o", "o", "--online", __file__],
            3,
            "holds no rejected drafts",
        ),
        (
            ["train", "drafter", "--draft", ".", "-o", "o", "--online", __file__, "--target", "."],
            2,
            "leave out --target",
        ),
    ],
)
def test_wrong_inputs_of_training(run: Run, arguments: list[object], code: int, named: str) -> None:
    result = run(*arguments)
    assert named in result.stderr
    assert result.exit_code == code
    assert "Traceback" not in result.stderr


# -- one answer, and a server ----------------------------------------------------------------------


def test_single_answers_learn_from_what_was_kept(run: Run, pair: list[object], state: Path) -> None:
    """The second answer makes two; the third is drafted by what was learnt from both."""
    refused = run("generate", *pair, *OPTIONS, "--learn", "-p", QUESTIONS[0])
    assert refused.exit_code == 2
    assert "give --learn-keep" in refused.stderr
    assert not state.exists()
    learn = ["--learn-keep", "--learn-every", 2, "--learn-rate", 0.01]
    sampling = [*OPTIONS[:-4], "-c", 512, "-n", 200]  # enough for 32 rejected drafts
    results = [
        run("generate", *pair, *sampling, "-s", seed, *learn, "-p", QUESTIONS[seed % 4])
        for seed in range(4)
    ]
    assert [result.exit_code for result in results] == [0] * 4
    (kept,) = json.loads(run("learn", "show", "--json").stdout)
    assert kept["answers"] == 4
    learnt = ["learnt from" in result.stderr for result in results]
    assert learnt[0] is learnt[2] is False
    assert learnt[3]
    assert kept["drafters"]


@pytest.fixture
def server(pair: list[object]) -> Iterator[tuple[ExitStack, Engine]]:
    """An engine, and what is closed after it."""
    options = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1}
    with (
        ExitStack() as closed_last,
        Engine(pair[1], pair[3], slots=2, learn=True, **options) as engine,
    ):
        yield closed_last, engine


def learning(every: int, *, learn: bool = True) -> LearnSettings:
    return LearnSettings(learn=learn, learn_keep=False, learn_every=every, learn_rate=0.01)


def answer_all(engine: Engine, params: SamplingParams, tell: Observer) -> None:
    asked = [[{"role": "user", "content": text}] for text in QUESTIONS]
    for stream in [engine.submit_chat(messages, params, max_tokens=24) for messages in asked]:
        tell(stream.result)


def test_a_server_learns_while_it_answers(server: tuple[ExitStack, Engine]) -> None:
    engine = server[1]
    before = engine.draft_file
    with serve_learning(*server, learning(16), Terminal(quiet=True)) as (tell,):
        for seed in range(5):
            params = SamplingParams(seed=seed, top_k=0, top_p=1.0, min_p=0.0)
            answer_all(engine, params, tell)
        wait_until(lambda: engine.draft_file != before)
    assert "drafter-1" in str(engine.draft_file)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--learn", "--learn-every", 0], "--learn-every 0 learns at a chat's /learn"),
        (["--learn", "--drafter", "prompt-lookup"], "prompt-lookup is no draft model"),
    ],
)
def test_servers_that_cannot_learn_say_so_before_they_serve(
    run: Run, pair: list[object], options: list[object], problem: str
) -> None:
    found = run("serve", *pair[:2], *options, "--port", 0, "-t", 1, "-c", 512)
    assert found.exit_code == 2
    assert problem in found.stderr
    assert "http://" not in found.stdout


def test_a_server_that_ends_gives_an_update_up(server: tuple[ExitStack, Engine]) -> None:
    engine = server[1]
    with serve_learning(*server, learning(1, learn=False), Terminal(quiet=True)) as observers:
        assert observers == []
    with serve_learning(*server, learning(1), Terminal(quiet=True)) as (tell,):
        for _ in range(3):
            answer_all(engine, SamplingParams(), tell)
    assert all(each.name != "specrun learning" for each in threading.enumerate())
    assert engine.draft_file.exists()  # whichever was in use in that moment
    assert engine.submit("Still there", max_tokens=4).result.token_ids


def wait_until(found: Callable[[], bool]) -> None:
    """Wait for what a thread does; gives up after a minute."""
    end = time.monotonic() + 60
    while not found() and time.monotonic() < end:
        time.sleep(0.01)
    assert found()
