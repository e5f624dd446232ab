"""`nodes=auto` in real drafters: texts stay whatever the sizes, and fixed shapes bound them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_heads import random_medusa
from support.tiny_hydra import random_hydra

from specrun.bindings.errors import OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.language import quoted
from specrun.runtime.planning import CostCurve
from specrun.runtime.trees import DraftTree

OPTIONS = {"n_ctx": 512, "n_threads": 1}
QUESTIONS = ["What does math.sqrt do?", "Tell me a story."]
CHEAP = CostCurve((1, 2, 32), (1.0, 1.2, 2.5), (1.0, 1.2, 2.5))


@pytest.fixture(autouse=True)
def _known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sizes depend on no machine."""
    monkeypatch.setattr(DraftEnvironment, "curve", CHEAP)


def sizes_of(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the size of every tree will be added."""
    drafter, sizes = runtime.session.drafter, list[int]()
    propose = drafter.propose

    def noted(*arguments: object) -> DraftTree:
        tree = propose(*arguments)  # type: ignore[arg-type]
        sizes.append(len(tree))
        return tree

    monkeypatch.setattr(drafter, "propose", noted)
    return sizes


@pytest.mark.parametrize(
    "expression",
    [
        "eagle",
        "eagle(depth=4, topk=3, nodes=auto, p_min=.01)",
        "medusa",
        "draft(depth=4, topk=2, nodes=auto)",
    ],
)
def test_texts_stay_whatever_the_sizes(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime.demo("none", **OPTIONS) as plain, Runtime.demo(expression, **OPTIONS) as drafted:
        sizes = sizes_of(drafted, monkeypatch)
        for temperature in (0.0, 0.9):
            params = SamplingParams(temperature=temperature, seed=3)
            for question in QUESTIONS:
                messages = [{"role": "user", "content": question}]
                wanted = plain.chat(messages, params, max_tokens=40)
                found = drafted.chat(messages, params, max_tokens=40)
                assert found.token_ids == wanted.token_ids
    # They differ, which a fixed size's would not.
    assert len(set(sizes)) > 2
    assert max(sizes) <= 15


@pytest.mark.parametrize("shape", [8, "fixed"])
def test_a_fixed_shape_is_filled_and_bounds_the_size(
    shape: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Runtime.demo("eagle", shape=shape, **OPTIONS) as runtime:
        sizes = sizes_of(runtime, monkeypatch)
        result = runtime.generate(QUESTIONS[0], SamplingParams(temperature=0.0), max_tokens=30)
    assert result.stats.width == 8
    assert max(sizes) == 7


def test_hydras_trees_choose_their_size_where_asked(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random heads find no token likely, and so do not draft what a given size would."""
    path = quoted(str(random_hydra(32, 320).write(tmp_path / "hydra.gguf", 320)))
    drafted = []
    for options in ("nodes=auto", "depth=3, nodes=4"):
        with Runtime(tiny_model, drafter=f"hydra({path}, {options})", n_ctx=256) as runtime:
            sizes = sizes_of(runtime, monkeypatch)
            runtime.generate("abc", SamplingParams(temperature=0.0), max_tokens=20)
        drafted.append(max(sizes))
    assert drafted == [0, 4]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("tree=2x2, nodes=auto", "already fixes the shape|names the nodes"),
        ("tree=sequoia, nodes=auto", "only trees of depth= and topk="),
        ("n=3, nodes=auto", "give one of them"),
        ("nodes=aut", "not a whole number"),
    ],
)
def test_what_makes_no_sense_is_refused(options: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Runtime.demo(f"eagle({options})", **OPTIONS)


def test_medusas_given_trees_have_no_size_to_choose(tiny_model: Path, tmp_path: Path) -> None:
    path = quoted(str(random_medusa(32, 320).write(tmp_path / "medusa.gguf", 320)))
    with pytest.raises(OptionError, match="leave out nodes="):
        Runtime(tiny_model, drafter=f"medusa({path}, tree=2x2, nodes=auto)", n_ctx=64)
