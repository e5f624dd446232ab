"""Old spellings of options: they work, from the environment too, and the help shows none."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from specrun.cli.options.group import Section, SectionedCommand


@click.command(cls=SectionedCommand, context_settings={"auto_envvar_prefix": "SPECRUN_TEST"})
@Section("Head").option(
    "--draft-tokens N", "How many.", click.INT, default=5, old_names=("--draft-words",)
)
def command(draft_tokens: int) -> None:
    click.echo(draft_tokens)


@pytest.mark.parametrize("name", ["--draft-tokens", "--draft-words"])
def test_both_spellings_give_the_value(name: str) -> None:
    assert CliRunner().invoke(command, [name, "7"]).output == "7\n"
    assert CliRunner().invoke(command, [f"{name}=8"]).output == "8\n"


@pytest.mark.parametrize("prefix", ["SPECRUN", "SPECRUN_TEST"])
@pytest.mark.parametrize("name", ["DRAFT_TOKENS", "DRAFT_WORDS"])
def test_so_does_the_environment(prefix: str, name: str) -> None:
    assert CliRunner().invoke(command, env={f"{prefix}_{name}": "9"}).output == "9\n"


def test_the_old_spelling_is_hidden() -> None:
    assert "--draft-tokens" in CliRunner().invoke(command, ["--help"]).output
    assert "words" not in CliRunner().invoke(command, ["--help"]).output
    refused = CliRunner().invoke(command, ["--draft-words", "many"])
    assert refused.exit_code == 2
    assert "--draft-tokens" in refused.output
    assert "words" not in refused.output


@pytest.mark.parametrize(
    ("kind", "new", "old"),
    [("eagle3", "--draft-tokens", "--draft-words"), ("eagle", "--token-weight", "--word-weight")],
)
def test_commands_know_them(kind: str, new: str, old: str) -> None:
    from specrun.cli.main import cli

    train = cli.get_command(click.Context(cli), "train")
    assert isinstance(train, click.Group)
    found = train.get_command(click.Context(train), kind)
    assert found is not None
    assert any(
        new in param.opts and old in getattr(param, "old_names", ()) for param in found.params
    )
