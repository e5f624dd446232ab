"""Options are declared once: sampling settings beside their fields, loading by field, the page."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from specrun.bindings.errors import OptionError
from specrun.cli.bench.drafters import drafters, sampling_grid_options
from specrun.cli.chat.conversation import Conversation
from specrun.cli.chat.settings import SETTING_NAMES, change_setting, setting_lines
from specrun.cli.generate import generate
from specrun.cli.options.group import SectionedOption, long_names, with_fields
from specrun.cli.options.model import load_options
from specrun.cli.options.sampling import answer_options, read_breakers
from specrun.runtime import SamplingParams
from specrun.runtime.engine import RuntimeOptions
from specrun.runtime.laws import SETTINGS, Setting

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = [
    path
    for folder in ("bindings", "runtime", "convert", "train", "bench", "cli")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
DECLARED = "runtime/laws/sampling.py"
OTHERS = {
    "seed": {"cli/bench/command.py", "cli/prove.py", "cli/train/options.py"},
    "temp": {"cli/calibrate.py"},
    "temperature": {"cli/calibrate.py"},
    "top_p": {"cli/bench/cascade.py"},
}
"""Options of the same name and another meaning: seeds of other numbers, lists of values."""
USAGE = re.compile(r"(-\w+, )*--[\w-]+(, --?[\w-]+)*( \S+)?")
OPTIONS = [option for option in generate.params if isinstance(option, SectionedOption)]
LOADING = [option for option in OPTIONS if option.field]


def usages(path: Path) -> Iterator[str]:
    """Yield the texts in calls of a file that are usages of options."""
    for node in ast.walk(ast.parse(path.read_text())):
        for text in node.args if isinstance(node, ast.Call) else ():
            if isinstance(text, ast.Constant) and USAGE.fullmatch(str(text.value)):
                yield str(text.value)


def test_every_setting_of_sampling_is_declared_with_its_field() -> None:
    names = [entry.name for entry in dataclasses.fields(SamplingParams)]
    assert [*SETTINGS, "grammar"] == names
    for name, setting in SETTINGS.items():
        assert setting.default == getattr(SamplingParams(), name), name


def test_no_other_file_declares_the_flag_of_a_setting() -> None:
    names = {name for setting in SETTINGS.values() for name in long_names(setting.flags)}
    found: dict[str, set[str]] = {name: set() for name in names}
    flag = re.compile(f"--({'|'.join(names)})\\b".replace("_", "[-_]"))
    for path in (path for path in PRODUCT if flag.search(path.read_text())):
        for name in (name for usage in usages(path) for name in long_names(usage)):
            if name in found:
                found[name].add(path.relative_to(ROOT).as_posix())
    assert found == {name: {DECLARED} | OTHERS.get(name, set()) for name in names}


def test_usages_are_found_in_sources(tmp_path: Path) -> None:
    source = tmp_path / "made_up.py"
    source.write_text(
        'A.option("--dry-base N", "help"), f(1, "-t, --temp, --temperature N")\n'
        'raise UsageError("--samplers and --sampler-seq say the same")\n'
    )
    assert list(usages(source)) == ["--dry-base N", "-t, --temp, --temperature N"]


def test_names_of_settings_are_of_one_setting() -> None:
    flags = [name for setting in SETTINGS.values() for name in long_names(setting.flags)]
    fields = [name for setting in SETTINGS.values() for name in setting.fields]
    variables = [setting.variable for setting in SETTINGS.values()]
    for names in (flags, fields, variables):
        assert len(names) == len(set(names))


@pytest.mark.parametrize("name", [name for name in SETTINGS if SETTINGS[name].kind != "other"])
def test_an_option_takes_what_its_setting_takes(name: str) -> None:
    setting = SETTINGS[name]
    option = next(option for option in OPTIONS if option.name == setting.variable)
    assert (option.help, option.default) == (setting.help, setting.default)
    for number in (-3, -2, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 1000):
        if setting.kind == "count" and number != int(number):
            continue
        try:
            option.type.convert(str(number), option, None)
            taken = True
        except click.UsageError:
            taken = False
        assert taken == (not setting.problem(type(setting.default)(number))), number


def test_set_takes_every_setting_by_the_names_of_its_flags() -> None:
    texts = {"samplers": "top_k", "logit_bias": "5+1", "dry_sequence_breakers": "a"}
    for name, setting in SETTINGS.items():
        for alias in (*long_names(setting.flags), *setting.names):
            conversation = Conversation(SamplingParams())
            text = texts.get(name, "1")
            assert change_setting(conversation, f"--{alias}", text, vocab_size=10) == name
    assert [line.split()[0] for line in setting_lines(conversation)] == [*SETTING_NAMES]
    assert set(SETTING_NAMES) == {*SETTINGS, "grammar", "max_tokens"}


def test_every_option_of_loading_is_a_field_of_its_own() -> None:
    names = [option.field for option in LOADING]
    assert len(names) == len(set(names)) > 25
    loaded = {name.partition(".")[0] for name in names}
    assert loaded < {entry.name for entry in dataclasses.fields(RuntimeOptions)}
    for option in LOADING:
        attrgetter(option.field)(RuntimeOptions())


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


def test_nothing_typed_is_the_default_of_every_field() -> None:
    load = parsed(load_options, "load")
    assert load.options == RuntimeOptions()
    assert set(load.runtime_options()) == {option.field.partition(".")[0] for option in LOADING}
    assert parsed(answer_options, "answer").params == SamplingParams()


def other_value(setting: Setting) -> float:
    """A valid number that is not the default."""
    return int(setting.least or 0) + (1 if setting.kind == "count" else 0.5)


def test_flags_reach_the_settings_of_answers_and_measurements() -> None:
    """The measurements' options have those of penalties, too, except for a few."""
    numbers = {
        name: other_value(setting) for name, setting in SETTINGS.items() if setting.kind != "other"
    }
    flags = {name: SETTINGS[name].flags.split(", ")[-1].split()[0] for name in SETTINGS}
    typed = [word for name, value in numbers.items() for word in (flags[name], str(value))]
    wanted = {"dry_sequence_breakers": ("\n", ";"), "samplers": ("top_k", "temperature")}
    texts = ["--dry-sequence-breaker", "\\n", "--dry-sequence-breaker", ";"]
    texts += ["--samplers", "top-k;temp"]
    params = parsed(answer_options, "answer", *typed, *texts).params
    assert {name: getattr(params, name) for name in (*numbers, *wanted)} == numbers | wanted
    known = {option for each in drafters.params for option in each.opts}
    measured = [(flag, str(numbers[name])) for name, flag in flags.items() if name in numbers]
    measured = [each for each in measured if each[0] in known and each[0] != "--temperature"]
    assert len(measured) > 12
    typed = [word for pair in measured for word in pair]
    settings = parsed(sampling_grid_options, "sampling", "--temp", "0,1", *typed, *texts)
    assert [params.temperature for params in settings] == [0.0, 1.0]
    given = {name for name, flag in flags.items() if flag in dict(measured)}
    for params in settings:
        assert {name: getattr(params, name) for name in given} == {
            name: numbers[name] for name in given
        }
        assert {name: getattr(params, name) for name in wanted} == wanted


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


def test_fields_of_inner_dataclasses_are_changed_by_dotted_names() -> None:
    changes = {"context.rope.freq_base": 5.0, "context.n_ctx": 7, "use_mlock": True}
    options = with_fields(RuntimeOptions(), changes)
    context = dataclasses.replace(
        RuntimeOptions().context,
        n_ctx=7,
        rope=dataclasses.replace(RuntimeOptions().context.rope, freq_base=5.0),
    )
    assert options == RuntimeOptions(context=context, use_mlock=True)
    with pytest.raises(OptionError, match="n_ctx is -1"):
        with_fields(RuntimeOptions(), {"context.n_ctx": -1})


def test_the_page_of_options_is_the_generated_one() -> None:
    """In a process of its own: other tests register drafters and rules, which help lists."""
    command = [sys.executable, ROOT / "tools" / "options_page.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (ROOT / "docs" / "options.md").read_text() == done.stdout


def test_the_page_of_samplers_names_the_defaults() -> None:
    """Flags with their defaults, such as `--top-k 40`, in the table of docs/sampling.md."""
    page = (ROOT / "docs" / "sampling.md").read_text()
    shown = re.findall(r"`--([\w-]+) (-?[\d.]+)`", page.partition("## ")[0])
    defaults = {
        name: setting.default
        for setting in SETTINGS.values()
        if setting.kind != "other"
        for name in long_names(setting.flags)
    }
    named = {flag.replace("-", "_"): float(value) for flag, value in shown}
    del named["mirostat"]  # shown with its versions
    assert len(named) > 15
    assert named == {name: defaults[name] for name in named}
