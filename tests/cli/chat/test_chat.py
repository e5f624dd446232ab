"""`specrun chat` from a pipe: turns, commands, settings, files, and errors that leave the
conversation whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from specrun.bindings.errors import OptionError
from specrun.cli.chat.commands import COMMAND_NAMES
from specrun.cli.chat.conversation import Conversation
from specrun.cli.chat.settings import change_setting, setting_lines
from specrun.runtime import Runtime, SamplingParams

from ..conftest import CONTROL_TOKENS, ODD_BYTES, READABLE, VOCAB_SIZE, Models, Run

Talk = Callable[..., Result]


@pytest.fixture
def talk(run: Run, models: Models) -> Talk:
    """Chat greedily with the target, 8 tokens an answer, over these lines."""

    def chat(*lines: str, options: tuple[object, ...] = ()) -> Result:
        base = ["chat", "-m", models.target, "-n", 8, "--temp", 0, *READABLE]
        return run(*base, *options, input="".join(f"{line}\n" for line in lines))

    return chat


def saved(path: Path) -> dict[str, object]:
    values: dict[str, object] = json.loads(path.read_text())
    return values


def contents(path: Path) -> list[str]:
    messages = saved(path)["messages"]
    assert isinstance(messages, list)
    return [message["content"] for message in messages]


def test_answers_follow_the_whole_conversation(talk: Talk, models: Models) -> None:
    result = talk("hello", "and again")
    bias = {token: float("-inf") for token in (*ODD_BYTES, *CONTROL_TOKENS)}
    params = SamplingParams(temperature=0, logit_bias=bias)
    messages: list[dict[str, str]] = []
    with Runtime(models.target, "none", n_threads=1, n_threads_batch=1) as runtime:
        for text in ("hello", "and again"):
            messages.append({"role": "user", "content": text})
            messages.append(
                {"role": "assistant", "content": runtime.chat(messages, params, max_tokens=8).text}
            )
    assert result.exit_code == 0
    assert result.stdout == "".join(messages[index]["content"] + "\n" for index in (1, 3))
    assert result.stderr.count(" tok/s\n") == 2


def test_the_banner_names_models_and_settings(talk: Talk) -> None:
    banner = talk().stderr
    assert "random llama 0 (target.gguf, llama, " in banner
    assert "drafter auto · exact · context 512 tokens" in banner
    assert "drafter none · exact" in talk(options=("--drafter", "none")).stderr
    assert "greedy (temp 0) · 165 logit biases · at most 8 tokens" in banner
    assert "tiny" not in banner
    assert talk(options=("-q",)).stderr == ""


def test_the_demo_says_that_it_is_tiny(
    run: Run, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrun.runtime.engine.opening.demo_target", lambda: models.target)
    monkeypatch.setattr(
        "specrun.runtime.engine.opening.demo_drafters", lambda: {"draft": models.plain}
    )
    monkeypatch.setattr("specrun.cli.options.opening.demo_target", lambda: models.target)
    monkeypatch.setattr(
        "specrun.cli.options.opening.demo_drafters", lambda: {"draft": models.plain}
    )
    result = run("chat", "--demo", "--spec-draft-n-max", 3, "-n", 4, input="hello\n")
    assert result.exit_code == 0
    assert "drafting gains no time" in result.stderr
    assert "drafter draft(n=3) " in result.stderr


def test_quotes_hold_several_lines(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    talk('"""', "one", "", '  two"""', '"""three"""', f"/save {path}", '"""four', "five")
    assert contents(path)[::2] == ["one\n\n  two", "three"]
    unfinished = talk('"""four', "five")
    assert unfinished.stdout == talk('"""', "four", "five", '"""').stdout != ""


def test_two_slashes_send_one(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    talk("//quit", "quit", "q", f"/save {path}")
    assert contents(path)[::2] == ["/quit", "quit", "q"]


@pytest.mark.parametrize("command", ["/quit", "/bye", "/exit"])
def test_leaving(talk: Talk, command: str) -> None:
    result = talk(command, "hello")
    assert result.exit_code == 0
    assert result.stdout == ""


def test_an_unknown_command_names_the_nearest(talk: Talk) -> None:
    result = talk("/stat", "hello")
    assert "there is no command /stat; did you mean /stats?" in result.stderr
    assert len(result.stdout) > 1
    assert result.exit_code == 2
    assert "write two" in talk("/usr/bin/env").stderr


def test_help_lists_every_command(talk: Talk) -> None:
    shown = talk("/help").stderr
    listed = {line.split()[0] for line in shown.splitlines() if line.startswith("  /")}
    assert listed == {*COMMAND_NAMES} - {"/?", "/bye", "/exit"}
    assert talk("/?").stderr == shown


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("temperature 0.5", "temperature", "0.5"),
        ("temp 0.25", "temperature", "0.25"),
        ("top-k 7", "top_k", "7"),
        ("top_p 0.5", "top_p", "0.5"),
        ("min_p 0.1", "min_p", "0.1"),
        ("repeat_penalty 1.5", "repeat_penalty", "1.5"),
        ("repeat_last_n -1", "repeat_last_n", "-1"),
        ("presence_penalty -1", "presence_penalty", "-1"),
        ("frequency_penalty 0.5", "frequency_penalty", "0.5"),
        ("logit_bias 12+1,13-inf", "logit_bias", "12+1, 13-inf"),
        ("logit_bias none", "logit_bias", "none"),
        ("seed 7", "seed", "7"),
        ("seed -1", "seed", "random"),
        ("stop a\\nb", "stop", "'a\\nb'"),
        ("max_tokens 3", "max_tokens", "3"),
        ("predict -1", "max_tokens", "no limit"),
        ("typical 0.9", "typical_p", "0.9"),
        ("top-nsigma 1.5", "top_n_sigma", "1.5"),
        ("xtc_probability 0.5", "xtc_probability", "0.5"),
        ("dry-multiplier 0.8", "dry_multiplier", "0.8"),
        ("dry_allowed_length 3", "dry_allowed_length", "3"),
        ("dry_sequence_breaker \\n ;", "dry_sequence_breakers", "'\\n', ';'"),
        ("dry_sequence_breakers none", "dry_sequence_breakers", "none"),
        ("mirostat 2", "mirostat", "2"),
        ("mirostat-ent 4", "mirostat_ent", "4"),
        ("dynatemp-range 0.3", "dynatemp_range", "0.3"),
        ("samplers top-k;temp", "samplers", "top_k;temperature"),
        ("sampler-seq ekt", "samplers", "penalties;top_k;temperature"),
    ],
)
def test_set_changes_every_setting(line: str, name: str, value: str) -> None:
    conversation = Conversation(SamplingParams())
    given, _, text = line.partition(" ")
    assert change_setting(conversation, given, text, vocab_size=VOCAB_SIZE) == name
    assert f"{name:21}  {value}" in setting_lines(conversation)


@pytest.mark.parametrize(
    "line", ["temperature warm", "top_p 2", "top_k 1.5", "temprature 1",
    "seed -2", "max_tokens -2", "samplers top_q", "mirostat 3", "dry_base 0.5", "typical 2",
             "logit_bias 999+1", "logit_bias x"]
)  # fmt: skip
def test_set_refuses_nonsense_and_changes_nothing(line: str) -> None:
    conversation = Conversation(SamplingParams())
    before = setting_lines(conversation)
    given, _, text = line.partition(" ")
    with pytest.raises(OptionError):
        change_setting(conversation, given, text, vocab_size=VOCAB_SIZE)
    assert setting_lines(conversation) == before


def test_set_and_show_print_settings(talk: Talk) -> None:
    changed = talk("/set temp 0.25", "/show", options=("-q",))
    assert changed.exit_code == 0
    assert changed.stderr.count(f"  {'temperature':21}  0.25\n") == 2
    for line in ("/set temperature", "/set temperature warm"):
        result = talk("/show", line, "/show", options=("-q",))
        before, error, after = result.stderr.partition("Error: ")
        assert error
        assert after.partition("\n")[2] == before
        assert result.exit_code == 2


def test_settings_take_effect(talk: Talk) -> None:
    plain, short = talk("hello").stdout, talk("/set max_tokens 2", "hello").stdout
    assert len(short.encode()) < len(plain.encode())
    assert talk("/set temperature 2", "/set seed 5", "hello").stdout != plain


def test_clear_forgets_and_system_stays(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    result = talk("/system Be brief.", "hello", "/clear", "hello", f"/save {path}")
    first, second = result.stdout.splitlines()
    assert first == second
    assert saved(path)["system"] == "Be brief."
    assert talk("hello").stdout != f"{first}\n"
    assert talk("/system x", "/system", "hello").stdout == talk("hello").stdout


def test_regen_answers_again_with_another_seed(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    options = ("--temp", 2, "-s", 4)
    result = talk("hello", "/regen", "/regen", f"/save {path}", options=options)
    answers = result.stdout.splitlines()
    assert len(set(answers)) == 3
    assert contents(path) == ["hello", answers[2]]
    assert talk("hello", "/regen", "/regen", options=options).stdout == result.stdout
    greedy = talk("hello", "/regen")
    assert "the same answer" in greedy.stderr
    assert len(set(greedy.stdout.splitlines())) == 1
    assert talk("/regen").exit_code == 2


def test_stats_add_up(talk: Talk) -> None:
    assert "no answer yet" in talk("/stats").stderr
    shown = talk("hello", "again", "/stats").stderr
    assert "2 answers, 16 tokens in 16 rounds, drafts 0/0 accepted" in shown
    assert "overhead" in shown


def test_a_saved_conversation_goes_on_elsewhere(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    whole = talk("/system s", "hello", "again").stdout.splitlines()
    talk("/system s", "hello", "/set top_k 3", "/set samplers kt", f"/save {path}")
    resumed = talk(f"/load {path}", "again", "/show")
    assert resumed.stdout.splitlines() == whole[1:]
    assert f"{'top_k':21}  3\n" in resumed.stderr
    assert f"{'samplers':21}  top_k;temperature\n" in resumed.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["chat.json"]


def test_save_overwrites_only_when_told(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text("mine")
    refused = talk("hello", f"/save {path}")
    assert path.read_text() == "mine"
    assert f"/save! {path} overwrites it" in refused.stderr
    assert talk("hello", f"/save! {path}").exit_code == 0
    assert contents(path)[0] == "hello"
    assert talk(f"/save {tmp_path / 'no' / 'chat.json'}").exit_code == 3
    assert talk("/save").exit_code == 2


def test_a_file_that_is_no_conversation_changes_nothing(talk: Talk, tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    talk("hello", f"/save {good}")
    values = saved(good)

    def with_messages(*said: tuple[str, object]) -> str:
        messages = [{"role": role, "content": content} for role, content in said]
        return json.dumps({**values, "messages": messages})

    broken = [
        "no json",
        "[]",
        json.dumps({**values, "version": 2}),
        json.dumps({**values, "more": 1}),
        with_messages(("user", "x")),
        with_messages(("system", "x"), ("user", "x")),
        with_messages(("user", 1), ("assistant", "x")),
        json.dumps({**values, "sampling": {"temperature": "x"}}),
        json.dumps({**values, "sampling": {"seed": "x"}}),
        json.dumps({**values, "system": 3}),
        json.dumps({**values, "max_tokens": -4}),
        "[" * 100_000,
    ]
    bad, said = tmp_path / "bad.json", talk("hello").stdout
    for text in broken:
        bad.write_text(text)
        result = talk(f"/load {bad}", "hello")
        assert result.exit_code == 3, text[:100]
        assert "is not a saved conversation" in result.stderr
        assert "Traceback" not in result.stderr
        assert result.stdout == said
    assert "Did you mean" in talk(f"/load {tmp_path / 'god.json'}").stderr


def test_a_full_context_keeps_the_conversation(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    result = talk("hello", "x-" * 300, f"/save {path}", "/clear", "again", options=("-c", 256))
    assert "/clear starts over" in result.stderr
    assert len(contents(path)) == 2
    assert len(result.stdout.splitlines()) == 2
    assert result.exit_code == 5


def test_an_answer_cut_by_the_context_says_so(talk: Talk) -> None:
    result = talk("hello", options=("-n", -1, "-c", 256))
    assert "The context of 256 tokens is full" in result.stderr
    assert result.exit_code == 0
    assert "full" not in talk("hello").stderr


def test_a_template_that_refuses_leaves_the_chat_usable(talk: Talk, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% if 'weather' in messages[-1].content %}{{ raise_exception('no weather') }}{% endif %}"
        "{{ messages[-1].content }}"
    )
    result = talk("weather?", "hello", options=("--chat-template-file", template))
    assert "no weather" in result.stderr
    assert result.stdout == talk("hello", options=("--chat-template-file", template)).stdout


def test_a_template_without_a_system_role_has_its_text_before_the_users(
    talk: Talk, tmp_path: Path
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    options = ("--chat-template-file", template)
    result = talk("/system Be kind.", "hello", options=options)
    assert result.stderr.count("the system's text is before the user's") <= 1
    whole = tmp_path / "whole.jinja"
    whole.write_text("Be kind.\n\n{{ messages[0].content }}")
    assert result.stdout == talk("hello", options=("--chat-template-file", whole)).stdout


def test_the_colour_legend_is_shown_once(talk: Talk, models: Models) -> None:
    options = ("-md", models.target, "--num-draft-tokens", "3", "--show-draft", "--color", "on")
    result = talk("hello", "again", options=options)
    assert result.stderr.count("drafted and accepted") == 1
    assert "\x1b[36m" in result.stdout
    assert "drafted and accepted" not in talk("hello", options=options[:5]).stderr


def test_a_model_without_a_template_continues_the_text(run: Run, models: Models) -> None:
    """Turn by turn: what it is given is the text so far."""
    given = ("-m", models.plain, "-n", 8, "--temp", 0, *READABLE)
    result = run("chat", *given, input="Once upon\nAnd\n/thinking\n")
    assert "plain.gguf has no chat template: it continues the text" in result.stderr
    assert "the last answer came without thinking" in result.stderr
    first, second = result.stdout.splitlines()
    alone = run("generate", *given, "-p", "Once upon")
    assert alone.stdout == f"{first}\n"
    both = run("generate", *given, "-p", f"Once upon{first}\nAnd")
    assert both.stdout == f"{second}\n"
