"""`specrun inspect --memory`, -ngl auto and -c 0 as users see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from support.sparse_models import Size, write_sparse
from support.tiny_heads import random_medusa
from support.workers import running_worker

from specrun.bindings.contexts.context import Context
from specrun.bindings.errors import decode_error
from specrun.runtime.memory import MemoryDevice, fit

from .conftest import Models, Run

SEVEN = Size(8000, 4096, 32, 32, 8, 128, 14336, 32768, Kind.Q4_K)
SMALL = Size(8000, 2048, 16, 32, 8, 64, 8192, 32768, Kind.Q4_K)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """7 and 1 billion parameters, which take no place on the disk."""
    folder = tmp_path_factory.mktemp("billions")
    target = write_sparse(folder / "7b.gguf", "llama", SEVEN)
    return target, write_sparse(folder / "1b.gguf", "llama", SMALL)


def columns(output: str) -> dict[str, list[str]]:
    """The cells of each row of a table in a pipe, by the row's name."""
    lines = [line.strip() for line in output.splitlines()[1:]]
    parts = [[cell for cell in line.split("  ") if cell] for line in lines]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in parts}


def test_cards_of_four_sizes(run: Run, pair: tuple[Path, Path]) -> None:
    target, draft = pair
    done = run("inspect", "-m", target, "-md", draft, "--memory", "cards")
    assert done.exit_code == 0, done.stderr
    rows = columns(done.stdout)
    assert rows["layers on the card"] == ["all 33"] * 4
    assert rows["context"][1:] == ["32,768 (all)"] * 3
    assert 8192 < int(rows["context"][0].replace(",", "")) < 32768
    assert rows["left free (margin)"] == ["1.00 GiB"] * 4
    assert {"target: weights", "draft model: keys and values"} <= set(rows)
    assert rows["draft model on the card"] == ["yes"] * 4
    assert "A chat takes these layers by itself and this context with -c 0." in done.stdout


def test_cards_that_hold_a_part(run: Run, pair: tuple[Path, Path]) -> None:
    target, draft = pair
    rows = columns(run("inspect", target, "-md", draft, "--memory", "2G,4G").stdout)
    first, second = (int(text.split()[0]) for text in rows["layers on the card"])
    assert 0 < first < second < 33
    facts = json.loads(run("inspect", target, "-md", draft, "--memory", "4G", "--json").stdout)
    (card,) = facts["memory"]
    assert (card["layers_on_card"], card["layers"], card["fits"]) == (second, 33, True)
    assert card["needed"] == sum(row["card"] for row in card["rows"])
    assert card["needed"] + card["margin"] <= card["memory"] == 4 << 30
    assert card["n_ctx"] >= 4096


def test_what_was_asked_for_and_does_not_fit(run: Run, pair: tuple[Path, Path]) -> None:
    arguments = ("inspect", pair[0], "-c", "32768", "-ngl", "all")
    done = run(*arguments, "--memory", "6G")
    assert done.exit_code == 5
    assert columns(done.stdout)["free"] == ["does not fit"]
    for words in (
        *("33 of 33 layers with 32,768 tokens of context need 7.", "6.00 GiB are there"),
        *("-c ", "-ctk q8_0 -ctv q8_0", "-ngl "),
    ):
        assert words in done.stderr
    facts = json.loads(run(*arguments, "--memory", "6G", "--json").stdout)
    ways = facts["memory"][0]["ways_out"]
    assert len(ways) == 3
    # Each really fits: asked again, the plan does.
    for way in ways:
        named = dict(zip(way["options"].split()[::2], way["options"].split()[1::2], strict=True))
        options = {"-c": "32768", "-ngl": "all", **named}
        flat = [text for pair in options.items() for text in pair]
        again = run("inspect", pair[0], *flat, "--memory", "6G", "--json")
        assert again.exit_code == 0
        assert json.loads(again.stdout)["memory"][0]["needed"] == way["needed"]
    # Several sizes are a question, and one answer is enough.
    done = run(*arguments, "--memory", "6G,24G")
    assert done.exit_code == 0
    assert "6 GiB: 33 of 33 layers" in done.stdout
    assert "A chat takes" not in done.stdout  # nothing was chosen


def test_heads_are_counted(run: Run, tmp_path: Path) -> None:
    target = write_sparse(tmp_path / "target.gguf", "llama")
    heads = random_medusa(256, 320).write(tmp_path / "medusa.gguf", 320)
    facts = json.loads(run("inspect", target, "-md", heads, "--memory", "512M", "--json").stdout)
    sizes = {(row["part"], row["kind"]): row["card"] for row in facts["memory"][0]["rows"]}
    assert 0.9 * heads.stat().st_size < sizes["heads", "weights"] < 1.1 * heads.stat().st_size
    assert sizes["heads", "compute"] > 0


# -- chats -----------------------------------------------------------------------------------------


def test_a_context_that_was_chosen_is_told(
    run: Run, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("generate", "-m", models.long, "-p", "hi", "-n", 1, "-dev", "none")
    for size in ("0", "4096"):  # all of the trained context fits; nothing is to be chosen
        done = run(*arguments, "-c", size)
        assert (done.exit_code, "memory:" in done.stderr) == (0, False)
    monkeypatch.setattr(fit, "this_machine", lambda: MemoryDevice("CPU", 8 << 20))
    done = run(*arguments, "-c", 0)
    assert done.exit_code == 0
    assert "tokens of context, what fits: " in done.stderr
    assert " of 8 MiB free (-c N chooses another)" in done.stderr


def test_layers_that_were_chosen_are_told(run: Run, models: Models) -> None:
    with running_worker() as (worker, _):
        done = run("generate", "-m", models.target, "-p", "hi", "-n", 1, "--rpc", worker)
    assert done.exit_code == 0, done.stderr
    assert "memory: all 5 layers of the target with 512 tokens of context" in done.stderr


def test_out_of_memory_while_an_answer_is_made(
    run: Run, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp says that an allocation failed: exit code 5, and the plan."""

    def fail(self: Context, batch: Any) -> Any:
        raise decode_error(-2, batch.n_tokens)

    monkeypatch.setattr(Context, "decode", fail)
    for command in (["generate", "-p", "hi"], ["chat"]):
        done = run(command[0], "-m", models.target, *command[1:], input="hi\n")
        assert done.exit_code == 5
        assert "no memory to evaluate" in done.stderr
        assert "the plan, with 512 tokens of context:" in done.stderr
        assert "this machine:" in done.stderr
