"""Grammars that ended a process, or never ended: compiled, followed and dropped in a child here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.hostile_grammars import deep_objects, endless_schema, overflowing_lark
from support.tiny_grammars import Words

from specrun.bindings.errors import ClosedError
from specrun.bindings.models.model import Model
from specrun.runtime import Grammar, GrammarError
from specrun.runtime.grammar import compiled as compiler
from specrun.runtime.grammar import state
from specrun.runtime.grammar.compiled import GrammarCompiler, compiled
from specrun.runtime.grammar.process import GrammarProcess

DEEP = [
    "Grammar.json_schema(reference_chain(20_000))",
    "Grammar.json_schema(deep_objects(4000))",
    "Grammar.lark(lark_chain(20_000))",
    "Grammar.gbnf(gbnf_chain(8000))",
]
TRY = """
import gc, sys
sys.path.insert(0, {tests!r})
from support.hostile_grammars import *
from specrun.bindings.models.model import Model
from specrun.runtime import Grammar
from specrun.runtime.demo import demo_target
from specrun.runtime.grammar.compiled import compiled
with Model(demo_target(), vocab_only=True) as model:
    for grammar in [{grammars}]:
        made = compiled(grammar, model.vocabulary)
        places = [made.start(0) for _ in range(3)]
        print([place.is_over for place in places])
        del made, places
    gc.collect()
"""


def follows(model: Model, pattern: str, text: str) -> bool:
    place = compiled(Grammar.regex(pattern), model.vocabulary).start(0)
    return not place.after(model.vocabulary.tokenize_within(text.encode())).closed


def test_deep_references_are_compiled_and_end_nothing() -> None:
    code = TRY.format(tests=str(Path(__file__).parents[2]), grammars=", ".join(DEEP))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[False, False, False]"] * len(DEEP)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("(a{1000}){1000}"),
        Grammar.json_schema({"type": "string", "minLength": 10**9}),
        Grammar.json_schema({"type": "array", "minItems": 10**9}),
        Grammar.json_schema({"type": "string", "pattern": "^(a{1000}){1000}$"}),
        Grammar.json_schema({"const": "y" * 200_000}),
        Grammar.json_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        Grammar.json_schema({"anyOf": [{"$ref": "#"}, {"type": "integer"}]}),
        Grammar.lark(
            "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "b"'
        ),
        Grammar.gbnf("root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    ],
)
def test_other_large_ones_are_followed_or_refused(model: Model, grammar: Grammar) -> None:
    said = ""
    try:
        place = compiled(grammar, model.vocabulary).start(0)
        place.allows(model.vocabulary.tokenize_within(b'"')[0])
        place.forced(8)
    except GrammarError as refused:
        said = str(refused)
    assert not said or "cannot be" in said or "allows only" in said
    assert "\n" not in said


def test_a_grammar_that_takes_too_long_is_refused(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.3)
    begun = time.monotonic()
    with pytest.raises(
        GrammarError, match=r"^the JSON schema cannot .* takes longer than 10 s: give"
    ):
        compiled(Grammar.json_schema(endless_schema()), model.vocabulary)
    assert time.monotonic() - begun < 10
    assert follows(model, "ab", "ab")


def test_a_grammar_that_overflows_its_stack_is_refused(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 300.0)  # a busy machine fills a stack slowly
    with pytest.raises(GrammarError, match="takes more stack than 512 MiB, or more memory"):
        compiled(Grammar.lark(overflowing_lark()), model.vocabulary)
    assert follows(model, "ab", "ab")


def test_one_that_nobody_wants_any_more_is_given_up(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[GrammarProcess] = []
    closed = GrammarProcess.close
    monkeypatch.setattr(GrammarProcess, "close", lambda self: (made.append(self), closed(self))[1])
    begun = time.monotonic()
    with pytest.raises(ClosedError):
        compiled(Grammar.json_schema(endless_schema()), model.vocabulary, lambda: False)
    assert time.monotonic() - begun < compiler.COMPILE_SECONDS / 2
    until = time.monotonic() + 10
    while is_running(made[-1]._pid):
        assert time.monotonic() < until
        time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_place_that_takes_too_long_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "PLACE_SECONDS", 0.2)
    words = Words("a", "a" * 400, "b")
    grammar = Grammar.lark('start: s\ns: s s | s s s | s s s s | "a"')
    place = GrammarCompiler(words).compile(grammar).start(0)  # type: ignore[arg-type]
    with pytest.raises(
        GrammarError,
        match=r"cannot be followed any further \(finding the possible next tokens takes",
    ):
        place.after([0, 1, 1, 0]).allows(0)


def test_what_is_kept_is_bounded_in_bytes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarCompiler(model.vocabulary)
    first = grammars.compile(Grammar.json_schema(deep_objects(1000)))
    assert first.n_bytes > 8 << 20
    most = 3 * first.n_bytes
    monkeypatch.setattr(compiler, "_KEPT_BYTES", most)
    small = grammars.compile(Grammar.regex("ab"))
    for n in range(1001, 1005):
        grammars.compile(Grammar.json_schema(deep_objects(n)))
        assert grammars.compile(Grammar.regex("ab")) is small
        assert grammars.kept_bytes <= most
    assert grammars.compile(Grammar.json_schema(deep_objects(1000))) is not first
    assert first.start(0).is_over is False  # who has it still can use it


def test_processes_end_with_what_they_are_for() -> None:
    code = TRY.format(tests=str(Path(__file__).parents[2]), grammars="Grammar.regex('ab')")
    code += "\nimport os\nprint(open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read())"
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    workers = done.stdout.splitlines()[1].split()
    until = time.monotonic() + 10
    while any(is_running(int(worker)) for worker in workers):
        assert time.monotonic() < until
        time.sleep(0.01)
