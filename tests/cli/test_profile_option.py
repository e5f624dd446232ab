"""Who names no drafter drafts by the file's profile, or by `auto`; a flag turns the profile off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny_mamba import write_tiny_mamba

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.runtime.memory import LoadOptions
from specrun.runtime.planning import (
    ANY,
    Choice,
    Profile,
    describe_settings,
    save_profile,
)

from .conftest import Models, Run

pytestmark = pytest.mark.usefixtures("own_cache")

LOOKUP = "prompt-lookup(min_ngram=1)"
CONTEXT = ContextOptions(n_threads=1)


@pytest.fixture
def profile(models: Models) -> Path:
    choices = (
        Choice(0.0, ANY, LOOKUP, 1.5),
        Choice(0.0, "questions", "lookahead", 1.2),
        Choice(0.8, ANY, "none", 1.0, "the curve is steep"),
    )
    settings = describe_settings(LoadOptions(CONTEXT))
    return save_profile(Profile(settings, choices), models.long)


def test_generate_drafts_by_the_profile_and_says_so(
    run: Run, models: Models, profile: Path
) -> None:
    asked = ("generate", "-m", models.long, "-n", 4, "--json", "--no-show-timings")
    result = run(*asked, "-p", "hello", "--temp", 0)
    assert json.loads(result.stdout)["stats"]["drafter"] == "lookahead"
    assert result.stderr == (
        "profile: lookahead, 1.20 times plain decoding when measured (--no-profile: without it)\n"
    )
    # A long prompt is a text to edit, for which there is no choice of its own.
    long = run(*asked, "-p", "hello " * 220, "-c", 4096, "--temp", 0)
    assert json.loads(long.stdout)["stats"]["drafter"] == LOOKUP
    warm = run(*asked, "-p", "hello " * 220, "--temp", 0.8)
    assert json.loads(warm.stdout)["stats"]["drafter"] == "none"
    assert "the curve is steep" in warm.stderr
    assert run(*asked, "-p", "hello", "-q").stderr == ""


def test_flags_leave_the_profile_out(run: Run, models: Models, profile: Path) -> None:
    asked = ("generate", "-m", models.long, "-p", "hello", "-n", 4, "--temp", 0, "--json")
    for flags, drafter in (
        (("--no-profile",), "auto"),
        (("--drafter", "none"), "none"),
        (("--shape", "4"), "none"),
        (("-md", models.long, "--spec-draft-n-max", 2), f"draft({models.long}, n=2)"),
        (("--spec-type", "ngram-simple"), "prompt-lookup"),
    ):
        result = run(*asked, *flags)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["stats"]["drafter"] == drafter
        assert "profile" not in result.stderr


def test_a_rule_that_is_not_exact_never_meets_a_profile(
    run: Run, models: Models, profile: Path
) -> None:
    asked = ("generate", "-m", models.long, "-p", "hello", "-n", 4, "--json")
    result = run(*asked, "--accept", "typical")
    assert json.loads(result.stdout)["stats"]["drafter"] == "none"
    assert "profile" not in result.stderr


def test_a_chat_says_so_too(run: Run, models: Models, profile: Path) -> None:
    result = run("chat", "-m", models.long, "-n", 4, "--temp", 0, input="hello\n")
    assert f"profile: {LOOKUP}, 1.50 times" in result.stderr
    assert f"drafter {LOOKUP} · exact" in result.stderr


def test_a_server_drafts_by_the_profile_says_so_and_takes_auto_without_one(
    run: Run, models: Models, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette")
    # What it says before it answers is all that is asked for.
    monkeypatch.setattr("specrun.cli.serve.server.run_server", lambda *all: all[-1]())
    asked = ("serve", "-m", models.long, "--port", 0, "-np", 1, "-c", 512)
    result = run(*asked, "--temp", 0)
    assert result.exit_code == 0, result.stderr
    assert f"profile: {LOOKUP}, 1.50 times" in result.stderr
    assert f"drafter  {LOOKUP} · exact" in result.stderr
    assert "decoding plainly" in run(*asked, "--temp", 0.8).stderr
    without = run(*asked, "--no-profile").stderr
    assert "profile" not in without
    assert "drafter  auto · exact" in without
    lossy = run(*asked, "--accept", "typical").stderr
    assert "profile" not in lossy
    assert "drafter  none · " in lossy


def test_a_profile_of_other_settings_is_ignored_with_one_sentence(
    run: Run, models: Models, profile: Path
) -> None:
    asked = ("generate", "-m", models.long, "-p", "hello", "-n", 4, "--json", "-t", 2)
    result = run(*asked, "--no-show-timings")
    assert json.loads(result.stdout)["stats"]["drafter"] == "auto"
    assert result.stderr.count("\n") == 1
    assert "threads 1, not 2" in result.stderr


def test_a_recurrent_model_is_still_decoded(run: Run, tmp_path: Path) -> None:
    model = write_tiny_mamba(tmp_path / "mamba.gguf")
    result = run("generate", "-m", model, "-p", "a", "-n", 4, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["stats"]["drafter"] == "auto"


def test_the_text_of_a_seed_does_not_hang_on_who_drafts(run: Run, models: Models) -> None:
    def tokens(*flags: object) -> list[int]:
        asked = ("generate", "-m", models.long, "-p", "abcabcabc", "-n", 40, "-s", 5, "--json")
        found: list[int] = json.loads(run(*asked, "--temp", 1, *flags).stdout)["token_ids"]
        return found

    assert tokens() == tokens("--drafter", "none")
