"""Peers: servers that are started, asked in turn and ended; no time is asserted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import results_of
from support.commands import run_measure as run
from support.tiny_dflash import TinyDFlash

from measure.peers import comparison
from measure.peers.comparison import PeerBench, PeerResult, measure_peers, peers_table
from measure.peers.servers import Peer
from specrun.bench.drafters.prompts import Question
from specrun.bindings.errors import SpecrunError
from specrun.runtime.laws import SamplingParams
from specrun.runtime.models.packaged import shipped_heads

# A server of four tokens an answer. With "--spec-type ngram-mod" two of them are accepted drafts,
# its answer to anything with "odd" in it is another one, and that to "mute" ends after a token. It
# writes down what it is asked.
FAKE = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
drafts = "ngram-mod" in sys.argv
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open({asked!r}, "a") as out:
            out.write(json.dumps([drafts, body]) + "\\n")
        self.send_response(200); self.end_headers()
        last = body["messages"][-1]["content"]
        words = ["w", "x", "y", "odd" if drafts and "odd" in last else "z"]
        if drafts and "mute" in last:
            words = words[:1]
        for word in words:
            self.say({{"choices": [{{"delta": {{"content": word}}}}]}})
        timings = {{"predicted_n": len(words)}}
        if drafts:
            timings |= {{"draft_n": 3, "draft_n_accepted": 2}}
        self.say({{"choices": [], "timings": timings}})
        self.wfile.write(b"data: [DONE]\\n\\n")
    def say(self, chunk):
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\\n\\n")
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


PLAIN_AND_NGRAM = ("plain", "ngram-mod")


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    path = tmp_path / "llama-server"
    text = FAKE.format(python=sys.executable, asked=str(tmp_path / "asked"))
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def plain_and_ngram(server: Path, *prompts: Question, **options: Any) -> PeerBench:
    kinds = zip(PLAIN_AND_NGRAM, ("none", "ngram-mod"), strict=True)
    peers = [Peer("llama-server", name, (str(server), "--spec-type", kind)) for name, kind in kinds]
    greedy = (SamplingParams(temperature=0.0),)
    return PeerBench(tuple(peers), prompts, greedy, max_tokens=9, **options)


def test_servers_are_asked_in_turn(fake: Path, tmp_path: Path) -> None:
    prompts = Question("chats", ("one", "odd")), Question("code", ("three",))
    results = measure_peers(plain_and_ngram(fake, *prompts, repetitions=2))
    assert [(each.category, each.drafting) for each in results] == [
        (category, drafting) for category in ("", "chats", "code") for drafting in PLAIN_AND_NGRAM
    ]
    everything, chats, code = results[1], results[3], results[5]
    assert (everything.tokens, chats.tokens, code.tokens) == (24, 16, 8)
    assert {each.tokens_per_round for each in results[1::2]} == {2.0}
    assert (chats.n_same, chats.n_answers, code.n_same, code.n_answers) == (1, 2, 1, 1)
    assert results[0].speed_up is None
    assert [each.tokens_per_second.n for each in (everything, chats, code)] == [4, 2, 2]
    assert {each.repetitions for each in results} == {2}
    lines = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line) for line in lines][4:]  # behind the warm-up of two turns each
    order = [drafts for drafts, body in asked if len(body["messages"]) == 1]
    assert order[-8:] == [False, True, True, False, False, True, True, False]
    second = next(body for _, body in asked if len(body["messages"]) == 3)
    assert [message["content"] for message in second["messages"]] == ["one", "wxyz", "odd"]
    assert (second["temperature"], second["max_tokens"]) == (0.0, 9)
    table = peers_table(results)
    assert table.rows[3][table.columns.index("text")] == "1 of 2 differ"
    assert "ngram-mod" in table.notes[1]


def test_a_question_whose_answer_ends_at_once_is_left_out(fake: Path) -> None:
    """It has no speed; the other questions of its category are compared."""
    prompts = Question("chats", ("mute",)), Question("chats", ("one",))
    bench = plain_and_ngram(fake, *prompts, repetitions=1)
    drafted = measure_peers(bench)[3]
    assert (drafted.category, drafted.drafting) == ("chats", "ngram-mod")
    assert drafted.speed_up is not None
    assert drafted.tokens_per_second.n == 1
    assert (drafted.n_answers, drafted.n_same, drafted.tokens) == (2, 1, 5)
    alone = dataclasses.replace(bench, prompts=bench.prompts[:1])
    assert [result.drafting for result in measure_peers(alone)] == ["plain", "plain"]


def test_a_server_that_ends_says_why() -> None:
    bench = PeerBench(
        peers=(Peer("llama-server", "plain", (sys.executable, "-c", "exit('no such model')")),),
        prompts=("a",),
        params=(SamplingParams(temperature=0.0),),
    )
    with pytest.raises(SpecrunError, match="llama-server plain ended at once: no such model"):
        measure_peers(bench)


def test_a_server_that_does_not_start_is_left_out(fake: Path) -> None:
    bench = PeerBench(
        peers=(
            Peer("llama-server", "plain", (str(fake),)),
            Peer("llama-server", "draft-mtp", (sys.executable, "-c", "exit('no blocks')")),
            Peer("llama-server", "ngram-mod", (str(fake), "--spec-type", "ngram-mod")),
        ),
        prompts=("a",),
        params=(SamplingParams(temperature=0.0),),
        repetitions=1,
    )
    warnings: list[str] = []
    results = measure_peers(bench, warn=warnings.append)
    assert [each.drafting for each in results] == ["plain", "ngram-mod"]
    (warning,) = warnings
    assert warning.startswith("llama-server draft-mtp is left out: ")
    assert warning.endswith("no blocks")


def test_all_programs_by_the_command(fake: Path, tiny_model: Path) -> None:
    line = (
        "peers --spec-type ngram-mod --drafter prompt-lookup -p hello -n 6 -r 1 -c 512 -t 1 --json"
    )
    results = results_of(run(line, "-m", tiny_model, "--server", fake))
    assert [(each["program"], each["drafting"]) for each in results] == [
        ("llama-server", "plain"),
        ("llama-server", "ngram-mod"),
        ("llama-cpp-python", "plain"),
        ("llama-cpp-python", "prompt-lookup, 10"),
        ("llama-cpp-python", "prompt-lookup, 2"),
        ("specrun", "plain"),
        ("specrun", "prompt-lookup"),
    ]
    assert [each["tokens"] for each in results[2:]] == [6] * 5
    assert [each["tokens_per_round"] for each in results if each["drafting"] == "plain"] == [
        1.0
    ] * 3


def test_files_are_drafted_with_by_both_servers(
    fake: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file has the arm that either program opens it with; of one kind the second is named."""
    compared: list[PeerBench] = []

    def kept(bench: PeerBench, *_: object) -> list[PeerResult]:
        compared.append(bench)
        return []

    monkeypatch.setattr(comparison, "measure_peers", kept)
    twin = tmp_path / "twin.gguf"
    twin.write_bytes(tiny_model.read_bytes())
    blocks = [
        TinyDFlash(generation, 320).write(tmp_path / f"{generation}.gguf", tiny_model)
        for generation in ("dflash", "dspark")
    ]
    drafts = [tiny_model, twin, shipped_heads()[0], *blocks]
    files = ("-m", tiny_model, *itertools.chain(*(("-md", draft) for draft in drafts)))
    line = "peers --program llama-server --program specrun --spec-type ngram-mod --drafter none"
    results_of(run(line, *files, "--server", fake, "-p", "hello", "--json"))
    (bench,) = compared
    assert [peer.label for peer in bench.peers] == [
        "llama-server plain",
        "llama-server ngram-mod",
        "llama-server draft-simple",
        "llama-server draft-simple twin",
        "llama-server draft-eagle3",
        "llama-server draft-dflash",
        "llama-server draft-dspark",
        "specrun plain",
        "specrun none",
        "specrun draft",
        "specrun draft twin",
        "specrun eagle3",
        "specrun dflash",
        "specrun dflash dspark",
    ]
    ending = ("--spec-type", "draft-eagle3", "-md", str(shipped_heads()[0]))
    assert bench.peers[4].command[-4:] == ending
    for peer, name, file in zip(
        bench.peers[5:7], ("draft-dflash", "draft-dspark"), blocks, strict=True
    ):
        assert peer.command[-4:] == ("--spec-type", name, "-md", str(file))
