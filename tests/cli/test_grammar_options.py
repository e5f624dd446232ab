"""--json-schema, --grammar, --regex, --grammar-after: answers that follow, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specrun.bindings.errors import ModelError, OptionError
from specrun.cli.chat.conversation import Conversation, load_conversation, save_conversation
from specrun.cli.chat.settings import change_setting, describe_sampling, setting_lines
from specrun.runtime import Grammar, SamplingParams

from .conftest import Models, Run

SCHEMA = '{"enum": ["abc", "abd"]}'
GBNF = 'root ::= "x" [0-9] [0-9]'


def said(run: Run, models: Models, *options: object, **settings: Any) -> str:
    result = run("generate", "-m", models.target, "-p", "hello", "-n", 30, *options, **settings)
    assert result.exit_code == 0, result.stderr
    return result.stdout.removesuffix("\n")


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup(min_ngram=1)"])
def test_answers_follow_schemas(run: Run, models: Models, tmp_path: Path, drafter: str) -> None:
    file = tmp_path / "schema.json"
    file.write_text(SCHEMA)
    for given in (SCHEMA, file):
        assert json.loads(said(run, models, "--drafter", drafter, "-j", given)) in ("abc", "abd")
    assert json.loads(said(run, models, "--json-schema", "-", input=SCHEMA)) in ("abc", "abd")


def test_what_a_schema_says_in_vain_is_warned_of(
    run: Run, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specrun.runtime.grammar.schema._said", {}
    )  # by other tests of this process
    given = '{"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": true, "maxItems": 2}'
    result = run("generate", "-m", models.target, "-p", "hello", "-n", 60, "-j", given)
    assert result.exit_code == 0, result.stderr
    warning = "Warning: the JSON schema: uniqueItems at # is not followed: "
    assert result.stderr.count(warning) == 1
    assert set(json.loads(result.stdout)) <= {1, 2}


def test_answers_follow_grammars(run: Run, models: Models, tmp_path: Path) -> None:
    gbnf, lark = tmp_path / "numbers.gbnf", tmp_path / "numbers.lark"
    gbnf.write_text(GBNF)
    lark.write_text("start: /x[0-9]{2}/")
    for given in (GBNF, gbnf, lark):
        text = said(run, models, "--grammar", given)
        assert text[0] == "x"
        assert text[1:].isdigit()
        assert len(text) == 3
    spaced = tmp_path / "spaced.gbnf"
    spaced.write_text('root ::= [0-9]+ ws "!"\nws ::= [ !]{0,4}')
    text = said(run, models, "--grammar", spaced)
    assert text.endswith("!")
    assert text.rstrip(" !").isdigit()
    assert said(run, models, "--regex", "[ab]{4}").strip("ab") == ""


def test_a_grammar_begins_after_a_text(run: Run, models: Models) -> None:
    """The bias leaves two letters: the first "a" is not far."""
    few = ("-l", f"{ord('a')}+30", "-l", f"{ord('b')}+30")
    text = said(run, models, "--regex", "[0-9]{3}", "--grammar-after", "a", *few)
    before, begun = text.split("a", 1)
    assert before.strip("b") == ""
    assert begun.isdigit()
    assert len(begun) == 3


def test_statistics_count_forced_tokens(run: Run, models: Models) -> None:
    given = ("--drafter", "prompt-lookup", "--json", "-j", '{"const": "always the same"}')
    stats = json.loads(said(run, models, *given))["stats"]
    assert stats["forced"] >= stats["forced_accepted"] > 10
    assert stats["rounds"] < 10


def test_a_chat_sets_shows_and_keeps_its_grammar(tmp_path: Path) -> None:
    conversation = Conversation(SamplingParams())
    change_setting(conversation, "grammar", SCHEMA, vocab_size=9)
    assert conversation.params.grammar == Grammar.json_schema(SCHEMA)
    assert "grammar" in "\n".join(setting_lines(conversation))
    assert "by a JSON schema" in describe_sampling(conversation.params, None)
    save_conversation(conversation, tmp_path / "talk.json")
    assert load_conversation(tmp_path / "talk.json").params == conversation.params
    change_setting(conversation, "grammar", "none", vocab_size=9)
    assert conversation.params.grammar is None
    with pytest.raises(OptionError, match="no JSON"):
        change_setting(conversation, "grammar", "{a", vocab_size=9)


def test_a_broken_grammar_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    save_conversation(Conversation(SamplingParams(grammar=Grammar.regex("a"))), path)
    values = json.loads(path.read_text())
    for grammar in (
        "a",
        {"kind": "regex"},
        {"kind": "a", "source": "b"},
        {"kind": "regex", "source": 3},
        [1],
    ):
        values["sampling"]["grammar"] = grammar
        path.write_text(json.dumps(values))
        with pytest.raises(ModelError, match="is not a saved conversation"):
            load_conversation(path)
