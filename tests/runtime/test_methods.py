"""Every row of the method table is true, every list of methods agrees with it, and the page that
shows how to add a method can be run.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.scripted import PLAIN, LawTable, TableTarget, conversation_of

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.cli.convert import KINDS, MODEL
from specrun.cli.train.command import train
from specrun.convert.heads.head_conversion import HEAD_KINDS
from specrun.convert.heads.head_kind import HeadKind
from specrun.convert.quantize import HEAD_ARCHITECTURES
from specrun.runtime import Runtime, SamplingParams, language
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters import build
from specrun.runtime.drafters.build import Builder, build_drafter, load_builder
from specrun.runtime.drafters.draft_model import DraftPair
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.tree_options import ChainOptions, TreeOptions
from specrun.runtime.language import (
    METHODS,
    Expression,
    Method,
    find_method,
    head_kinds,
    method_of_head,
    parse_expression,
)
from specrun.runtime.laws import SeededNoise
from specrun.runtime.round import Drafter, DraftRequest, NoDrafter
from specrun.runtime.round.drafter import DrafterWeights
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
from specrun.runtime.tuning import guess_kinds

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "methods-in-code.md").read_text()
CHOOSING = (ROOT / "docs/choosing.md").read_text()


@pytest.fixture(scope="module")
def environment(tiny_model: Path) -> Iterator[DraftEnvironment]:
    with Model(tiny_model) as model:
        yield DraftEnvironment(model, ContextOptions(n_ctx=64, n_batch=32))


def open_drafter(text: str, environment: DraftEnvironment) -> None:
    """Build a drafter, start it once and close everything."""
    with closing(build_drafter(text, environment)) as weights:
        weights.start().close()


def section(text: str, title: str) -> str:
    """What stands between a heading and the next one of the same level."""
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


# -- the rows --------------------------------------------------------------------------------------


def test_every_row_names_a_builder() -> None:
    parameters, _ = typing.get_args(Builder)
    for name, method in METHODS.items():
        assert name == method.name
        assert re.fullmatch(r"[A-Z].+\.", method.summary), name
        hints = typing.get_type_hints(load_builder(method))
        made = hints.pop("return")
        assert list(hints.values()) == parameters, name
        assert issubclass(made, DrafterWeights), name
    assert len({method.builder_name for method in METHODS.values()}) == len(METHODS)


def test_options_are_those_of_the_row_and_no_others(environment: DraftEnvironment) -> None:
    for method in METHODS.values():
        for option in method.options:
            given = Expression(method.name, options=((option, Expression("1")),), is_call=True)
            assert method.read(given).optional(option) == "1"
        with pytest.raises(OptionError, match=f"{method.name} has no option 'nonsense'"):
            open_drafter(f"{method.name}(nonsense=1)", environment)


def literals_read(module: types.ModuleType) -> set[str]:
    """The names that a module asks its `options` for."""
    calls = (
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call)
    )
    return {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "options"
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }


def readers(module: types.ModuleType) -> Iterator[types.ModuleType]:
    """A module, and those that its functions for reading options come from."""
    yield module
    for value in vars(module).values():
        if value is ChainOptions or value is TreeOptions or value is DraftPair:
            yield sys.modules[value.__module__]
        home = inspect.getmodule(value) if inspect.isfunction(value) else None
        if (
            home is not None
            and home is not module
            and {"options", "expression"} & inspect.signature(value).parameters.keys()
        ):
            yield home


def test_builders_read_the_options_of_their_rows_and_no_others() -> None:
    by_module: dict[str, set[str]] = {}
    for method in METHODS.values():
        by_module.setdefault(method.module, set()).update(method.options)
    # What `build_drafter` reads itself, of every method whose row has it.
    common = literals_read(build)
    assert common == {"always"}
    for name, options in by_module.items():
        module = importlib.import_module(name)
        assert literals_read(module) - common <= options, name
        assert options - common <= set().union(*map(literals_read, readers(module))), name


def test_what_is_no_option_is_checked_too(environment: DraftEnvironment) -> None:
    for method in METHODS.values():
        if method.file is not None and method.file.needed:
            with pytest.raises(
                OptionError, match=re.escape(f"{method.name}: {method.file.request}")
            ):
                open_drafter(method.name, environment)
            assert parse_expression(method.file.example).atom == method.name
        most = method.members if method.file is None else 1
        if most is not None:
            with pytest.raises(OptionError, match=f"takes {most} unnamed arguments at most"):
                open_drafter(f"{method.name}({', '.join(['x'] * (most + 1))})", environment)
        if not method.counts_members:
            with pytest.raises(OptionError, match="@2"):
                open_drafter(f"{method.name}(a@2)", environment)


def test_a_name_that_is_no_method_is_answered_with_the_nearest(
    environment: DraftEnvironment,
) -> None:
    for wrong, near in (
        ("eagle2", "eagle"),
        ("lookahed", "lookahead"),
        ("prompt_lookup", "prompt-lookup"),
    ):
        with pytest.raises(OptionError, match=f"did you mean '{near}'"):
            find_method(wrong)
        with pytest.raises(OptionError, match=f"did you mean '{near}'"):
            open_drafter(f"ensemble(none, {wrong}(x.gguf))", environment)


# -- what reads them -------------------------------------------------------------------------------


def test_a_kind_of_head_exists_once() -> None:
    heads = [method for method in METHODS.values() if method.head is not None]
    assert [method.name for method in heads] == list(head_kinds())
    trained = {method.name for method in heads}
    assert {kind.name for kind in HEAD_KINDS} == set(head_kinds())
    assert (MODEL, *head_kinds()) == KINDS
    # What is drafted at look-ahead positions is no network of its own that could be asked.
    assert set(guess_kinds()) == trained - {"pass", "space"}
    assert set(train.list_commands(None)) - {"drafter", "consistency"} == trained  # type: ignore[arg-type]
    assert set(HEAD_ARCHITECTURES) == {*head_kinds()} - {"eagle3", "dflash"}
    assert method_of_head("eagle") is METHODS["eagle"]
    assert method_of_head("gemma4-assistant") is METHODS["mtp"]
    assert method_of_head("llama") is None
    with pytest.raises(ValueError, match="no method"):
        HeadKind("rnn", lambda *_: pytest.fail("never asked"), lambda _: False)


def test_spec_types_are_told_apart() -> None:
    names = [name for method in METHODS.values() for name in method.spec_types]
    assert sorted(names) == sorted(set(names))


def test_the_table_of_drafters_has_every_method() -> None:
    rows = re.findall(r"^\| (`.*?) \| ", section(CHOOSING, "Every drafter"), re.MULTILINE)
    named = {parse_expression(text).atom for row in rows for text in re.findall(r"`(.+?)`", row)}
    assert named == set(METHODS)


def test_the_map_has_every_method() -> None:
    rows = [
        (
            f"| `{method.name}` | {method.summary} | "
            f"`{method.module.removeprefix('specrun.').replace('.', '/')}.py` |"
        )
        for method in METHODS.values()
    ]
    table = "\n".join(["| name | method | builder |", "|---|---|---|", *rows])
    assert table in section(PAGE, "The methods")


# -- the worked example ----------------------------------------------------------------------------


@pytest.fixture
def repeat(monkeypatch: pytest.MonkeyPatch) -> Method:
    """The page's method: its file as a module, its row in a copy of the table."""
    file, row = re.findall(r"```python\n(.*?)```", section(PAGE, "Adding a method"), re.DOTALL)
    method = eval(row, {"Method": Method})
    assert isinstance(method, Method)
    module = types.ModuleType(method.module)
    exec(compile(file, f"{method.module} in docs/methods-in-code.md", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, method.module, module)
    monkeypatch.setattr(language, "METHODS", {**METHODS, method.name: method})
    return method


def no_parts(expression: Expression, environment: DraftEnvironment) -> typing.NoReturn:
    pytest.fail(f"{expression} is built of nothing")


def text_of(drafter: Drafter, seed: int) -> tuple[list[int], int]:
    """The text of a scripted target of few tokens, sampled, and how many drafts it kept."""
    prompt, limits = [0, 1], RoundLimits(n_ctx=64, max_nodes=16, max_tokens=24)
    drafter.begin(prompt)
    conversation = conversation_of(drafter, prompt, SeededNoise(seed))
    target = TableTarget(LawTable(3, seed, zeros=0.0))
    rounds = decode_rounds(target, conversation, DecodeSettings(ExactRule(), PLAIN, limits))
    kept = sum(len(played.path) for played in rounds)
    return list(conversation.tokens), kept


def test_the_worked_example_drafts_and_keeps_the_text(
    repeat: Method, environment: DraftEnvironment
) -> None:
    assert not (
        ROOT / "runtime" / "drafters" / "repeat.py"
    ).exists()  # otherwise the page shows nothing new
    weights = load_builder(find_method("repeat"))(
        parse_expression("repeat(n=4)"), environment, no_parts
    )
    assert isinstance(weights, DrafterWeights)
    assert weights.name == "repeat(n=4)"
    drafter = weights.start()
    assert drafter is not weights.start()  # one for each conversation
    request = DraftRequest([5, 7], PLAIN, SeededNoise(0), max_depth=9, max_nodes=9)
    assert list(drafter.propose(request).tokens) == [7] * 4
    texts = [text_of(drafter, seed) for seed in range(5)]
    assert [text for text, _ in texts] == [text_of(NoDrafter(), seed)[0] for seed in range(5)]
    assert sum(kept for _, kept in texts) > 0
    assert np.unique([len(text) for text, _ in texts]).tolist() == [2 + 24]
    drafter.close()
    weights.close()


def test_the_worked_example_runs_by_its_name(repeat: Method, tiny_model: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=3)

    def answer(drafter: str) -> tuple[list[int], int]:
        with Runtime(tiny_model, drafter=drafter, n_ctx=128) as runtime:
            result = runtime.generate([65, 66, 66], params, max_tokens=16)
        return result.token_ids, result.stats.drafted

    plain, none = answer("none")
    text, drafted = answer("ensemble(repeat(n=2), none)")
    assert text == plain
    assert drafted > none == 0


def test_the_worked_examples_options_are_those_of_its_row(
    repeat: Method, environment: DraftEnvironment
) -> None:
    for text, problem in (
        ("repeat(m=3)", "repeat has no option 'm': known are n"),
        ("repeat(n=0)", "give 1 to 31"),
        ("repeat(x.gguf)", "takes 0 unnamed arguments"),
        ("repeet", "did you mean 'repeat'"),
    ):
        with pytest.raises(OptionError, match=problem):
            open_drafter(text, environment)


def test_a_rule_of_speculative_cascades_is_no_drafter() -> None:
    """`cascade(a, b)` drafts, `cascade-opt` accepts: who takes them for each other is told."""
    with pytest.raises(OptionError, match=r"cascade-opt is the name of an acceptance rule \(--acc"):
        find_method("cascade-opt")
    with pytest.raises(OptionError, match="did you mean 'cascade'"):
        find_method("cascad")
