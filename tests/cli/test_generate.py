"""`specrun generate`: prompts in, text or JSON out, and what goes to which stream."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from support.scripted_model import write_scripted

from specrun.bindings.models import trial
from specrun.cli import generate as generate_command
from specrun.runtime import Runtime, SamplingParams

from .conftest import ENDLESS, Models, Run

STATS_KEYS = [
    *("drafter", "rule", "exact", "rounds", "drafted", "accepted", "acceptance_rate"),
    *("mean_accepted_length", "acceptance_by_position", "tokens_per_second"),
    *("prompt_tokens_per_second", "time_to_first_token_s", "target_s", "drafter_s"),
    *("overhead_s", "wall_s", "drafting", "non_candidates", "acceptance_given_prefix"),
    *("tested_by_position", "width", "total_variation", "changed_share", "rebuilt"),
    *("forced", "forced_accepted"),
]


def answer(models: Models, messages: list[dict[str, str]], params: SamplingParams, n: int) -> str:
    with Runtime(models.target, "none", n_threads=1, n_threads_batch=1) as runtime:
        return runtime.chat(messages, params, max_tokens=n).text


def test_the_answer_is_the_runtimes_and_alone_on_stdout(run: Run, models: Models) -> None:
    expected = answer(models, [{"role": "user", "content": "hello"}], SamplingParams(seed=3), 24)
    asked = ("generate", "-m", models.target, "-p", "hello", "-n", 24, "-s", 3)
    result = run(*asked, "--drafter", "none")
    assert result.exit_code == 0
    assert result.stdout == expected.removesuffix("\n") + "\n"
    line = (
        r"prompt \d+ tok [\d.]+ tok/s \| gen 24 tok [\d.]+ tok/s \| draft - \| 1\.00 "
        r"tok/round \| TTFT \d+\.\d\d s \| seed 3\n"
    )
    assert re.fullmatch(line, result.stderr)


def test_json_has_the_promised_keys(run: Run, models: Models) -> None:
    result = run("generate", "-m", models.target, "-p", "hello", "-n", 9, "-s", 3, "--json")
    values = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    promised = ["text", "token_ids", "finish_reason", "usage", "stats", "seed"]
    assert list(values) == [*promised, "reasoning", "tool_calls", "raw_text"]
    assert list(values["usage"]) == ["prompt_tokens", "completion_tokens"]
    assert list(values["stats"]) == STATS_KEYS
    assert (values["usage"]["completion_tokens"], values["finish_reason"], values["seed"]) == (
        9,
        "length",
        3,
    )


def test_reasoning_is_no_part_of_an_answer_in_a_pipe(run: Run, tmp_path: Path) -> None:
    model, template = tmp_path / "m.gguf", tmp_path / "t.jinja"
    raw = "<think>\nHm.\n</think>\n\nYes."
    write_scripted(model, [raw], context=512)
    given = ("generate", "-m", model, "-p", "Rain?", "--trust")
    with Runtime(model, trust=True, n_ctx=256) as runtime:
        template.write_text("{# <think> #}" + runtime.chat_template.source)
    chosen = (*given, "--chat-template-file", template)
    assert run(*chosen).stdout == "Yes.\n"
    values = json.loads(run(*chosen, "--json").stdout)
    assert [values[name] for name in ("text", "reasoning", "raw_text")] == ["Yes.", "Hm.", raw]
    assert run("chat", *chosen[1:3], *chosen[5:], "-q", input="Rain?\n").stdout == "Yes.\n"
    assert run(*given).stdout == f"{raw}\n"  # a template whose model thinks without marks
    plain = (*given[:3], "--trust", "--no-chat-template", "-p", "<|turn_0|>")
    assert run(*plain).stdout == f"{raw}\n"
    assert "reasoning" not in json.loads(run(*plain, "--json").stdout)


def test_a_pool_of_ngrams_goes_from_one_run_to_the_next(
    run: Run, models: Models, tmp_path: Path
) -> None:
    pool = tmp_path / "a.pool"
    drafter = f'lookahead(window=2, ngram=4, guesses=3, pool="{pool}")'
    asked = ("generate -p hello -n 40 --temp 0 --json -m", models.target, *ENDLESS)
    plain = json.loads(run(*asked, "--drafter", "none").stdout)
    cold, warm = (json.loads(run(*asked, "--drafter", drafter).stdout) for _ in range(2))
    assert cold["token_ids"] == warm["token_ids"] == plain["token_ids"]
    assert warm["stats"]["rounds"] < cold["stats"]["rounds"]
    assert cold["stats"]["non_candidates"] > 0
    whole = pool.read_bytes()
    pool.write_bytes(whole[:-1])
    result = run(*asked, "--drafter", drafter)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.count("\n") == 1
    assert str(pool) in result.stderr
    assert pool.read_bytes() == whole[:-1]


def test_drafting_keeps_the_tokens(run: Run, models: Models) -> None:
    def tokens(*arguments: object) -> tuple[list[int], int]:
        result = run(
            "generate", "-m", models.target, "-p", "abcabcabcabc", "-n", 40, "--json", *arguments
        )
        values = json.loads(result.stdout)
        return values["token_ids"], values["stats"]["accepted"]

    plain, _ = tokens("--temp", 0, "--drafter", "none")
    drafted, accepted = tokens("--temp", 0, "-md", models.target, "--spec-draft-n-max", 3)
    assert drafted == plain
    assert accepted > 10
    sampled, _ = tokens("--temp", 1, "-s", 7, "--drafter", "none")
    looked_up, _ = tokens("--temp", 1, "-s", 7, "--drafter", "prompt-lookup(min_ngram=1)")
    assert looked_up == sampled != plain


@pytest.mark.parametrize("how", ["file", "stdin", "dash"])
def test_prompts_from_elsewhere_lose_one_newline(
    run: Run, models: Models, tmp_path: Path, how: str
) -> None:
    base = ["generate", "-m", models.plain, "-n", 12, "--temp", 0]
    expected = run(*base, "-p", "one\ntwo\n").stdout
    if how == "file":
        path = tmp_path / "prompt.txt"
        path.write_text("one\ntwo\n\n")
        result = run(*base, "-f", path)
    else:
        result = run(*base, *(["-p", "-"] if how == "dash" else []), input="one\ntwo\n\n")
    assert result.exit_code == 0
    assert result.stdout == expected
    assert result.stdout != run(*base, "-p", "one\ntwo").stdout


def test_the_chat_template_is_used_where_there_is_one(
    run: Run, models: Models, tmp_path: Path
) -> None:
    def prompt_tokens(*arguments: object) -> int:
        result = run("generate", "-p", "abc", "-n", 1, "--json", *arguments)
        assert result.exit_code == 0, result.stderr
        return int(json.loads(result.stdout)["usage"]["prompt_tokens"])

    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1].content }}{{ messages[-1].content }}")
    # <|user|>abc<|end|><|assistant|> are 6 tokens here ("ab" is one), abc alone 2
    raw = prompt_tokens("-m", models.target, "--no-chat-template")
    assert prompt_tokens("-m", models.plain) == raw
    assert prompt_tokens("-m", models.target) == raw + 3
    assert prompt_tokens("-m", models.target, "-sys", "d") == raw + 6
    assert prompt_tokens("-m", models.plain, "--chat-template-file", template) == 2 * raw
    assert prompt_tokens("-m", models.plain, "--chat-template", template.read_text()) == 2 * raw


def test_a_stop_string_ends_the_answer(run: Run, models: Models) -> None:
    base = ["generate", "-m", models.target, "-p", "hello", "--temp", 0, "--json"]
    text = json.loads(run(*base, "-n", 30).stdout)["text"]
    stop = text[7:10]
    cut = json.loads(run(*base, "-n", 30, "-r", stop).stdout)
    assert cut["text"] == text[: text.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_quiet_and_no_timings_leave_stderr_empty(run: Run, models: Models) -> None:
    for flag in ("-q", "--no-show-timings"):
        assert run("generate", "-m", models.target, "-p", "hello", "-n", 4, flag).stderr == ""


def test_a_pipe_gets_the_bytes_the_model_wrote(run: Run, models: Models) -> None:
    result = run("generate", "-m", models.target, "-p", "x", "-n", 5, "--temp", 0, "-l", "27+1000")
    assert result.stdout == "\x1b" * 5 + "\n"


def test_drafted_tokens_are_cyan_only_when_asked(run: Run, models: Models) -> None:
    asked = "generate --spec-draft-n-max 5 -p hello -n 24 --temp 0"
    base = [asked, "-m", models.target, "-md", models.target]
    colored = run(*base, "--show-draft", "--color", "on").stdout
    plain = run(*base, "--show-draft").stdout
    assert "\x1b[36m" in colored
    assert re.sub(r"\x1b\[\d+m", "", colored) == plain
    assert "\x1b[36m" not in run(*base, "--color", "on").stdout


def test_a_full_context_is_said(run: Run, models: Models) -> None:
    result = run("generate", "-m", models.target, "-p", "hello", "-c", 256, *ENDLESS)
    assert result.exit_code == 0
    assert (
        "The context of 256 tokens is full, so the answer ends here; a larger -c gives more room"
        in result.stderr
    )
    whole = run("generate", "-m", models.target, "-p", "hello", *ENDLESS)
    assert (
        "The context of 512 tokens is full, so the answer ends here; the model was trained for "
        "no more"
    ) in whole.stderr
    limited = run("generate", "-m", models.target, "-p", "hello", "-c", 256, "-n", 10, *ENDLESS)
    assert "full" not in limited.stderr


def test_flags_outvote_the_environment(
    run: Run, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECRUN_MODEL", str(models.target))
    monkeypatch.setenv("SPECRUN_MODEL_DRAFT", str(models.plain))
    monkeypatch.setenv("SPECRUN_SPEC_DRAFT_N_MAX", "2")

    def drafter(*arguments: object) -> str:
        result = run("generate", "-p", "hello", "-n", 2, "--json", *arguments)
        assert result.exit_code == 0, result.stderr
        return str(json.loads(result.stdout)["stats"]["drafter"])

    assert drafter() == f"draft({models.plain}, n=2)"
    assert drafter("--spec-draft-n-max", 3) == f"draft({models.plain}, n=3)"
    assert drafter("--drafter", "none") == "none"
    monkeypatch.setenv("SPECRUN_DRAFTER", "prompt-lookup")
    assert drafter("-md", models.target) == f"draft({models.target}, n=2)"
    monkeypatch.delenv("SPECRUN_DRAFTER")
    monkeypatch.setattr(
        "specrun.cli.options.opening.demo_target", lambda: models.target.with_name("no.gguf")
    )
    demo = run("generate", "--demo", "-p", "x")
    assert demo.exit_code == 3
    assert "the embedded models are not part of this installation" in demo.stderr
    monkeypatch.setenv("SPECRUN_DEMO", "1")
    monkeypatch.delenv("SPECRUN_MODEL")
    assert drafter("-m", models.target, "--drafter", "none") == "none"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full disk here")
def test_a_log_file_on_a_full_disk_is_warned_of_once(run: Run, models: Models) -> None:
    result = run("generate", "-m", models.target, "-p", "x", "-n", 1, "--log-file", "/dev/full")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("/dev/full cannot be written (No space left on device)") == 1
    assert "Traceback" not in result.output
    assert "Logging error" not in result.output


def test_the_log_file_gets_the_engines_log(run: Run, models: Models, tmp_path: Path) -> None:
    log = tmp_path / "specrun.log"
    result = run("generate", "-m", models.target, "-p", "x", "-n", 1, "--log-file", log, "-q")
    assert result.stderr == ""
    assert "specrun.llama" in log.read_text()
    assert run("generate", "-m", models.target, "-p", "x", "--log-file", tmp_path).exit_code == 2


def test_very_verbose_logs_to_stderr(run: Run, models: Models) -> None:
    base = ["generate", "-m", models.target, "-p", "x", "-n", 1]
    assert "specrun.llama" in run(*base, "-vv").stderr
    assert "specrun.llama" not in run(*base).stderr


@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (RuntimeError("boom"), 1, "RuntimeError: boom"),
        (MemoryError(), 5, "out of memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "out.txt"), 1, "out.txt: No space left on device"),
    ],
)
def test_surprises_become_a_sentence(
    run: Run,
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    exit_code: int,
    message: str,
) -> None:
    def fail(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr(generate_command, "run_stream", fail)
    result = run("generate", "-m", models.target, "-p", "x")
    assert result.exit_code == exit_code
    assert result.stderr.startswith(f"Error: {message}")
    assert "Traceback" not in result.stderr
    if exit_code == 1 and isinstance(error, RuntimeError):
        assert "run with -vv for the traceback" in result.stderr
        assert "Traceback" in run("generate", "-m", models.target, "-p", "x", "-vv").stderr


@pytest.mark.parametrize("way", ["option", "environment", "neither"])
def test_trusted_files_are_opened_without_a_trial(
    run: Run, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    unknown = tmp_path / "unknown.gguf"
    unknown.write_bytes(models.target.read_bytes())
    tried: list[Path] = []
    monkeypatch.setattr(
        trial, "_tried", lambda _module, _arguments, path, _n_bytes: bool(tried.append(path))
    )
    if way == "environment":
        monkeypatch.setenv("SPECRUN_TRUST", "1")
    given = ["--trust"] if way == "option" else []
    result = run("generate", "-m", unknown, "-p", "a", "-n", 1, *given)
    assert result.exit_code == 0
    assert tried == ([unknown] if way == "neither" else [])
    # Of this command only, not of those that follow in the process.
    monkeypatch.delenv("SPECRUN_TRUST", raising=False)
    assert run("generate", "-m", unknown, "-p", "a", "-n", 1).exit_code == 0
    assert tried


@pytest.mark.parametrize("rule", ["token-cascade(alpha=0.9)", "sequence-cascade(alpha=0.99)"])
def test_a_sequential_cascade_says_that_it_is_not_exact(
    run: Run, models: Models, rule: str
) -> None:
    asked = ("generate -p hello -n 12 -s 3 -m", models.target, "-md", models.target)
    result = run(*asked, "--accept", rule)
    assert result.exit_code == 0, result.stderr
    assert f"not exact: {rule}" in result.stderr
    again = json.loads(run(*asked, "--accept", rule, "--json").stdout)
    assert again["text"].rstrip("\n") == result.stdout.rstrip("\n")
    stats = again["stats"]
    assert (stats["rule"], stats["exact"], stats["total_variation"]) == (rule, False, None)
    assert stats["accepted"] > 0
    refused = run("generate", "-m", models.target, "-p", "hello", "--accept", rule)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "and the drafter is none: name one: -md SMALL" in refused.stderr


def test_the_end_may_be_ignored(run: Run) -> None:
    ask = ("generate", "--demo", "-p", "What does shutil.copytree do?", "--temp", 0, "-n", 40)
    ended, on = (json.loads(run(*ask, "--json", *more).stdout) for more in ([], ["--ignore-eos"]))
    assert ended["finish_reason"] == "stop"
    assert (on["finish_reason"], on["usage"]["completion_tokens"]) == ("length", 40)
    assert on["text"].startswith(ended["text"])


def test_a_home_that_is_no_folder_is_no_obstacle(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "SPECRUN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    result = run("generate", "--demo", "-p", "hi", "-n", 2)
    assert result.exit_code == 0, result.stderr
    assert "Warning" not in result.stderr
