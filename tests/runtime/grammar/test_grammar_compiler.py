"""What grammars may be given as, what the compiler has against them, and limits as one sentence."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest

from specrun.bindings.models.model import Model
from specrun.runtime import Engine, Grammar, GrammarError, Runtime, SamplingParams
from specrun.runtime.demo import demo_target
from specrun.runtime.grammar import GrammarState
from specrun.runtime.grammar import compiled as compiler
from specrun.runtime.grammar.compiled import compiled


def place(model: Model, grammar: Grammar, text: str) -> GrammarState:
    """The place after a text, as the tokenizer spells it."""
    tokens = model.vocabulary.tokenize_within(text.encode())
    return compiled(grammar, model.vocabulary).start(0).after(tokens)


def is_whole(model: Model, grammar: Grammar, text: str) -> bool:
    """Whether a text may end the answer."""
    end = min(model.vocabulary.end_of_generation)
    return place(model, grammar, text).allows(end)


NUMBERS = Grammar.gbnf('root ::= number (", " number)*\nnumber ::= "-"? [0-9]{1,3}')
LARK = Grammar.lark('start: word (" " word)*\nword: /[a-z]{1,5}/')
OPTIONS = Grammar.lark('# words\n%llguidance {"no_forcing": false}\nstart: "yes" | "no"')


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (NUMBERS, "1, -20, 300", "1 2"),
        (LARK, "some words", "Some"),
        (OPTIONS, "yes", "maybe"),
        (Grammar.regex(r"\d{4}-\d\d"), "2026-11", "2026/11"),
        (Grammar.regex("a/b"), "a/b", "a.b"),
        (Grammar.json_schema({"type": "integer"}), "12", "1.5"),
        (Grammar.json_schema('{"enum": ["a", 1]}'), '"a"', '"b"'),
        (Grammar.json_schema(True), "[1, null]", "[,]"),
        (Grammar.json_object(), '{"a": {"b": []}}', "[1]"),
    ],
)
def test_texts_follow_their_grammar(model: Model, grammar: Grammar, good: str, bad: str) -> None:
    assert is_whole(model, grammar, good)
    assert place(model, grammar, bad).closed
    assert not is_whole(model, grammar, bad)


def test_spaces_of_json_are_bounded(model: Model) -> None:
    schema = Grammar.json_schema({"type": "array", "items": {"type": "integer"}})
    assert is_whole(model, schema, "[1, 2]")
    assert is_whole(model, schema, "[\n    1,\n    2\n]")
    assert place(model, schema, "[" + " " * 40).closed
    assert place(model, schema, "[\n" + " " * 40).closed


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.json_schema({"type": "objec"}), "the JSON schema cannot be compiled: .*objec"),
        (Grammar.json_schema({"not": {}}), "the JSON schema cannot be compiled: .*Unsatisfiable"),
        (Grammar.json_schema(False), "the JSON schema cannot be compiled"),
        (Grammar.gbnf("root := x"), "the GBNF grammar cannot be compiled: Expected ::="),
        (
            Grammar.lark("// a\nstart: x"),
            "the Lark grammar cannot be compiled: line 2: unknown name",
        ),
        (Grammar.lark('%llguidance {"a\nstart: "x"'), "the Lark grammar .* no JSON"),
        (Grammar.lark('%llguidance []\nstart: "x"'), "the Lark grammar .* no JSON object"),
        (
            Grammar.regex("a("),
            "the regular expression cannot be compiled: invalid regex .*unclosed",
        ),
    ],
)
def test_what_cannot_be_compiled_is_an_error(model: Model, grammar: Grammar, message: str) -> None:
    with pytest.raises(GrammarError, match=f"^{message}") as raised:
        compiled(grammar, model.vocabulary)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.json_schema("{nope"), "the JSON schema is no JSON: "),
        (lambda: Grammar.json_schema("[" * 5000), "the JSON schema is no JSON: "),
        (lambda: Grammar.json_schema("7"), "the JSON schema is a int: it must be an object"),
        (lambda: Grammar.json_schema({"a": {1}}), "the JSON schema cannot be written as JSON"),
        (lambda: Grammar.regex(" "), "the regular expression is empty"),
        (lambda: Grammar.gbnf("x" * 9_000_000), "the GBNF grammar has 9,000,000 characters"),
        (lambda: Grammar.lark(3), "grammar is int: it must be a text"),
        (lambda: Grammar.lark("start: x", after=3), "after is int: it must be a text"),
        (lambda: SamplingParams(grammar="root"), "grammar is 'root': it must be a Grammar"),
    ],
)
def test_what_is_no_grammar_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


def test_big_schemas_compile(model: Model) -> None:
    """llama.cpp's own grammars fail from about 100 kB on."""
    fields = {
        f"field_{i:04d}": {
            "type": "object",
            "properties": {"a": {"type": "string"}, "kind": {"enum": ["red", f"x{i}"]}},
            "required": ["a"],
            "description": "x" * 40,
        }
        for i in range(700)
    }
    schema = {"type": "object", "properties": fields, "additionalProperties": False}
    assert len(json.dumps(schema)) > 100_000
    grammar = Grammar.json_schema(schema)
    assert is_whole(model, grammar, '{"field_0600": {"a": "b"}}')
    assert place(model, grammar, '{"field_0700').closed


def test_a_text_too_complex_to_follow_is_one_sentence(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance bounds in how many ways a text may go on."""
    monkeypatch.setitem(compiler._LIMITS, "max_items_in_row", 200)
    fields = {f"f{i}": {"type": "boolean"} for i in range(200)}
    with pytest.raises(GrammarError, match=r"^the JSON schema cannot be ") as raised:
        place(model, Grammar.json_schema({"properties": fields}), '{"f1": true, "f')
    assert "\n" not in str(raised.value)


def test_compiled_grammars_are_kept_and_any_thread_may_compile(model: Model) -> None:
    first = compiled(NUMBERS, model.vocabulary)
    assert compiled(Grammar.gbnf(NUMBERS.source), model.vocabulary) is first
    made: list[object] = []
    threads = [
        threading.Thread(
            target=lambda i=i: made.append(compiled(Grammar.regex(f"a{i}"), model.vocabulary))
        )  # type: ignore[misc]
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, made))) == 4


def test_an_answer_with_a_broken_grammar_never_begins() -> None:
    params = SamplingParams(grammar=Grammar.regex("a("))
    with Runtime.demo("none", n_threads=1) as runtime:
        with pytest.raises(GrammarError):
            runtime.stream("x", params)
        assert runtime.generate("x", max_tokens=2).token_ids
    with Engine.demo("none", slots=1, n_threads=1) as engine:
        with pytest.raises(GrammarError):
            engine.submit("x", params)


def test_bias_that_forbids_all_that_may_follow_names_both() -> None:
    with Runtime.demo("none", n_threads=1) as runtime:
        token = runtime.vocabulary.tokenize_within(b"a")[0]
        params = SamplingParams(grammar=Grammar.regex("a"), logit_bias={token: float("-inf")})
        with pytest.raises(ValueError, match="left after logit_bias and grammar: allow"):
            runtime.generate("x", params)


def test_settings_with_a_grammar_are_copied_whole() -> None:
    params = SamplingParams(grammar=NUMBERS, top_k=3)
    assert pickle.loads(pickle.dumps(params)) == params
    assert SamplingParams.from_dict(params.to_dict()) == params
    assert params.has_penalties
    assert "root" not in repr(params)  # grammars may be long


def test_a_closed_model_is_not_asked() -> None:
    with Model(demo_target(), vocab_only=True) as model:
        here = compiled(Grammar.regex("abc"), model.vocabulary).start(0)
    assert here.forced(3) == []


def test_llguidance_is_imported_by_the_first_grammar() -> None:
    code = (
        "import sys; from specrun.runtime import Grammar, SamplingParams\n"
        "SamplingParams(grammar=Grammar.regex('a')); print('llguidance' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
