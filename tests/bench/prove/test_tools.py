"""`specrun prove --tools`: sound servers pass, and calls that drafts corrupt are found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.commands import run
from support.tiny_nextn import write_tiny_qwen35
from support.tool_templates import HERMES
from support.wrong_rules import KeepsFirst

from specrun.bench.prove import tools
from specrun.bench.prove.prove import Proof, ProofOptions, proof_table, prove
from specrun.bench.prove.tool_requests import CASES, Item, read_stream
from specrun.bench.prove.tools import (
    LookedUpDrafts,
    PlantedDrafts,
    Post,
    ServedTools,
    ToolProof,
    difference,
)
from specrun.bindings.errors import SpecrunError
from specrun.cli.serve.asking import asking
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.chat import ReplyParser
from specrun.runtime.engine import Engine
from specrun.runtime.engine.choices import DrafterMaker
from specrun.runtime.round import Shape, TokenEvent

SECONDS = 1e-3  # each check does its least
SHUT = HERMES[: HERMES.index("{% if enable_thinking")] + "{% endif %}"  # it would think for ever
APIS = ("chat completions", "responses", "messages")


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with Hermes' template."""
    return written(tmp_path_factory.mktemp("tools") / "caller.gguf", SHUT)


def written(path: Path, template: str | None) -> Path:
    shape: dict[str, Any] = {"vocab_size": 320, "width": 16, "layers": 1, "context": 4096}
    write_random_llama(path, RandomLlama(chat_template=template, **shape))
    return path


@pytest.fixture
def one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for required calls behind an earlier one alone, by each API."""
    monkeypatch.setattr(tools, "CASES", CASES[:1])


@pytest.fixture
def short_case(one_case: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for half of the tokens, in which a call begins."""
    monkeypatch.setattr(tools, "_LENGTH", 48)


def opened(path: Path, shape: Shape, slots: int, others: Sequence[DrafterMaker]) -> Engine:
    return Engine(path, "none", slots=slots, shape=shape, others=others, n_threads=1, trust=True)


def statuses(proof: Proof) -> dict[str, str]:
    return {check.name: check.status for check in proof.checks}


def strictly(path: Path, rule: object = None) -> Proof:
    """Check an engine of a fixed shape, with another rule in the place of the exact one."""
    planted = PlantedDrafts(0)
    with opened(path, "fixed", 1, (LookedUpDrafts(), planted)) as engine:
        if rule is not None:
            engine.session.rule = rule  # type: ignore[assignment]
        with asking(engine) as post:
            steps = ServedTools(engine, post, planted).steps(strict=True, several=False, apis=True)
            return prove(engine, ProofOptions(SECONDS), steps=steps)


def test_a_sound_server_passes(caller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_LENGTH", 48)
    monkeypatch.setattr(tools, "_LEAST", 1)
    monkeypatch.setattr(tools, "CASES", CASES[:4])

    @contextmanager
    def opening(
        shape: Shape, slots: int, others: Sequence[DrafterMaker]
    ) -> Iterator[tuple[Engine, Post]]:
        with opened(caller, shape, slots, others) as engine, asking(engine) as post:
            yield engine, post

    checking = ToolProof(opening, ProofOptions(SECONDS))
    proof = checking.run(lambda _: None)
    found = statuses(proof)
    assert found.pop("cache") in ("passed", "left out")  # few texts
    wanted = (*APIS, "log-probabilities", "several at once")
    assert found == dict.fromkeys(wanted, "passed"), proof
    first, second = proof_table([proof], checking.verdict).heading
    assert first.startswith("Drafting did not change ")
    assert "in a fixed shape, 12 of 12 streams byte by byte; 3 at once, " in first
    made, drafted = second.split("random-trees ")[1].rstrip(".").replace(",", "").split(" of ")
    assert 100 < int(made) < int(drafted)  # some right, some wrong
    figures = {check.name: check.figure for check in proof.checks}
    assert [figures[name] for name in (*APIS, "log-probabilities")] == [0.0] * 4


@pytest.mark.usefixtures("one_case")
def test_a_rule_that_keeps_drafts_corrupts_calls(caller: Path) -> None:
    proof = strictly(caller, KeepsFirst())
    found = statuses(proof)
    assert [found[api] for api in APIS] == ["failed"] * 3
    notes = [check.note for check in proof.checks if check.status == "failed"]
    assert any("the call of" in note and "in place of" in note for note in notes)
    assert all("random-trees" in note for note in notes[:3])


@pytest.mark.usefixtures("short_case")
def test_a_stream_that_loses_a_token_of_a_long_round_is_found(
    caller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ReplyParser.read
    monkeypatch.setattr(
        ReplyParser, "read", lambda reader, events: read(reader, [*events[:1], *events[2:]])
    )
    found = statuses(strictly(caller))
    assert [found[api] for api in APIS] == ["failed"] * 3
    assert found["log-probabilities"] == "passed"


@pytest.mark.usefixtures("short_case")
def test_log_probabilities_of_drafts_that_are_zero_are_found(
    caller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = TokenEvent.logprob
    assert isinstance(sound, property)
    monkeypatch.setattr(
        TokenEvent,
        "logprob",
        property(lambda event: 0.0 if event.origin == "drafted" else sound.__get__(event)),
    )
    found = statuses(strictly(caller))
    assert found == dict.fromkeys(APIS, "passed") | {"log-probabilities": "failed"}


def test_streams_say_the_same_in_other_rounds() -> None:
    def chunk(**delta: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": delta.pop("finish", None)}
        return b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n"

    def call(text: str, **more: Any) -> Any:
        return [{"index": 0, "function": {"arguments": text, **more}}]

    begun, end = chunk(tool_calls=call("", name="f")), chunk(finish="tool_calls")
    parts = begun + chunk(tool_calls=call('{"a": ')) + chunk(tool_calls=call("1}")) + end
    whole = begun + chunk(tool_calls=call('{"a": 1}')) + end + b"data: [DONE]\n\n"
    ours, plain = read_stream("chat completions", parts), read_stream("chat completions", whole)
    assert plain.items == [Item("call", "f", '{"a": 1}')]
    assert difference(ours, plain) == ""
    other = read_stream("chat completions", begun + chunk(tool_calls=call('{"a": 2}')) + end)
    assert difference(other, plain) == """the call of f has '{"a": 2}' in place of '{"a": 1}'"""
    twice = read_stream("chat completions", whole.replace(end, begun + end))
    assert difference(twice, plain) == "2 parts in place of 1"
    with pytest.raises(SpecrunError, match="without a reason"):
        read_stream("chat completions", begun)


@pytest.mark.usefixtures("short_case")
def test_the_command_says_two_lines_and_a_table(caller: Path) -> None:
    line = "prove --tools --minutes 0.001 -t 1 -o md --shape fixed"
    done = run(line, "-m", caller, "--drafter", "prompt-lookup")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Drafting did not change ")
    assert lines[1].startswith("Drafts that were accepted: prompt-lookup ")
    assert lines[3].startswith("| check")
    assert "| messages " in done.stdout


@pytest.mark.usefixtures("short_case")
def test_calls_of_a_hybrid_with_its_own_blocks_stay_whole(tmp_path: Path) -> None:
    """Others say that MTP corrupts calls. A recurrent state takes no fixed shape; slots have 2,048
    tokens each, or the prompt would not fit."""
    hybrid = write_tiny_qwen35(tmp_path / "qwen35.gguf", context=4096, chat_template=SHUT)
    line = "prove --tools --minutes 0.001 -t 1 -c 2048 -o json"
    done = run(line, "-m", hybrid, "--drafter", "mtp(n=3)")
    assert done.exit_code == 0, done.output
    (proof,) = json.loads(done.stdout)["results"]
    found = {check["name"]: check["status"] for check in proof["checks"]}
    wanted = ("cache", *APIS, "log-probabilities", "several at once")
    assert found == dict.fromkeys(wanted, "passed") | {"fixed shape": "left out"}
    assert all("mtp(n=3)" in check["tested"] for check in proof["checks"] if check["name"] in APIS)


@pytest.mark.usefixtures("short_case")
def test_a_proof_that_compared_nothing_has_not_passed(caller: Path) -> None:
    done = run("prove --tools --minutes 0.001 -t 1 -c 512", "-m", caller)
    assert done.exit_code == 1
    assert "Nothing was compared: after a call: the instructions and tools alone" in done.stdout


def test_a_proof_that_was_interrupted_at_once_has_not_failed(caller: Path) -> None:
    """It ends with Ctrl-C's own status."""
    with opened(caller, "free", 1, ()) as engine:
        proof = prove(engine, ProofOptions(SECONDS), steps=[])
    assert not proof.passed
    assert dataclasses.replace(proof, interrupted=True).passed


def test_a_model_without_a_template_is_told_so_in_a_sentence(tmp_path: Path) -> None:
    mute = written(tmp_path / "mute.gguf", None)
    done = run("prove --tools --minutes 0.001 -t 1", "-m", mute)
    assert done.exit_code == 3
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert "has no chat template, so nothing shows it tools" in sentence
