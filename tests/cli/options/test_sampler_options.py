"""Sampler options: llama.cpp's flags reach `SamplingParams`, in answers and in measurements."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from specrun.cli.bench.drafters import sampling_grid_options
from specrun.cli.options.sampling import answer_options, read_breakers
from specrun.runtime import SamplingParams

FLAGS: dict[str, tuple[list[str], Any]] = {
    "typical_p": (["--typical", "0.9"], 0.9),
    "top_n_sigma": (["--top-n-sigma", "1.5"], 1.5),
    "xtc_probability": (["--xtc-probability", "0.4"], 0.4),
    "xtc_threshold": (["--xtc-threshold", "0.2"], 0.2),
    "dry_multiplier": (["--dry-multiplier", "0.8"], 0.8),
    "dry_base": (["--dry-base", "2"], 2.0),
    "dry_allowed_length": (["--dry-allowed-length", "3"], 3),
    "dry_penalty_last_n": (["--dry-penalty-last-n", "-1"], -1),
    "dry_sequence_breakers": (
        ["--dry-sequence-breaker", "\\n", "--dry-sequence-breaker", ";"],
        ("\n", ";"),
    ),
    "mirostat": (["--mirostat", "2"], 2),
    "mirostat_lr": (["--mirostat-lr", "0.2"], 0.2),
    "mirostat_ent": (["--mirostat-ent", "3"], 3.0),
    "dynatemp_range": (["--dynatemp-range", "0.5"], 0.5),
    "dynatemp_exp": (["--dynatemp-exp", "2"], 2.0),
    "samplers": (["--samplers", "top-k;temp"], ("top_k", "temperature")),
}
EVERY = [word for words, _ in FLAGS.values() for word in words]


def parsed(group: Any, keyword: str, *arguments: str) -> Any:
    """What a command with this group of options gets."""
    taken: dict[str, Any] = {}

    @click.command()
    @group
    def command(**values: Any) -> None:
        taken.update(values)

    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    return taken[keyword]


def test_an_answers_flags_reach_the_settings() -> None:
    params = parsed(answer_options, "answer", *EVERY).params
    assert {name: getattr(params, name) for name in FLAGS} == {
        name: value for name, (_, value) in FLAGS.items()
    }


def test_a_measurements_flags_reach_the_settings() -> None:
    settings = parsed(sampling_grid_options, "sampling", "--temp", "0,1", *EVERY)
    assert [params.temperature for params in settings] == [0.0, 1.0]
    for params in settings:
        assert {name: getattr(params, name) for name in FLAGS} == {
            name: value for name, (_, value) in FLAGS.items()
        }


def test_nothing_typed_is_the_defaults() -> None:
    assert parsed(answer_options, "answer").params == SamplingParams()


@pytest.mark.parametrize("flag", ["--sampler-seq", "--sampling-seq"])
def test_the_short_form_of_an_order(flag: str) -> None:
    order = parsed(answer_options, "answer", flag, "ekt").params.samplers
    assert order == ("penalties", "top_k", "temperature")


@pytest.mark.parametrize(
    ("typed", "breakers"),
    [
        (("none",), ()),
        (("a", "none", "b"), ("b",)),
        (("\\n", "\\t", "\\\\n", '\\"', "a\\nb"), ("\n", "\t", "\\n", '"', "a\nb")),
    ],
)
def test_breakers_are_read_as_llama_reads_them(
    typed: tuple[str, ...], breakers: tuple[str, ...]
) -> None:
    assert read_breakers(typed) == breakers
