"""A head with a draft vocabulary counted on texts: its rows, its text, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.tiny_dflash import TinyDFlash
from support.tiny_eagle import random_eagle
from support.tiny_eagle3 import Variant, random_eagle3
from support.tiny_heads import random_medusa
from support.tiny_models import CHAT, F32

from specrun.bindings.contexts import ContextOptions
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.models import Model
from specrun.cli.main import cli
from specrun.convert.heads.draft_vocabulary import DraftVocabulary, limit_vocabulary
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.dflash.drafter import BlockDrafter
from specrun.runtime.drafters.dflash.source import BlockState

SIZE, N = 320, 60


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write_random_llama(path, RandomLlama(**{**CHAT, "layers": 6}))
    return path


Writer = Callable[[Path, Path], Path]
HEADS: dict[str, Writer] = {
    "eagle": lambda path, target: random_eagle(32).write(path, SIZE),
    "eagle3": lambda path, target: random_eagle3(32, SIZE, Variant(draft_tokens=None)).write(
        path, target
    ),
    **{
        generation: lambda path, target, generation=generation: TinyDFlash(generation).write(  # type: ignore[misc]
            path, target
        )
        for generation in ("dflash", "dflash2", "dspark")
    },
    "own rows": lambda path, target: TinyDFlash("dspark", own_tokens=True).write(path, target),
}


def vocabulary() -> DraftVocabulary:
    texts = [np.random.default_rng(seed).integers(100, 200, 80).tolist() for seed in range(3)]
    return DraftVocabulary.counted([*texts, [7] * 9], SIZE, N, always=(250,))


def test_the_most_frequent_come_first_then_the_lowest_ids() -> None:
    found = DraftVocabulary.counted([[9, 9, 9, 4], [4, 30]], 40, 16, always=(39,))
    assert found.tokens.tolist() == [39, 9, 4, 30, 0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13]
    assert found.coverage([[9, 4, 20, 21]]) == 0.5
    for few in (15, 40):
        with pytest.raises(OptionError, match=f"vocabulary of {few} tokens: give 16 to 39"):
            DraftVocabulary.counted([[1]], 40, few)


@pytest.mark.parametrize("name", ["dflash", "dspark", "own rows"])
def test_rows_of_what_is_drafted_stay_as_they_are(target: Path, tmp_path: Path, name: str) -> None:
    whole = HEADS[name](tmp_path / "whole.gguf", target)
    limit_vocabulary(whole, target, vocabulary(), tmp_path / "few.gguf")
    random, rows = np.random.default_rng(0), []
    tokens = random.integers(6, 300, 12).tolist()
    features = random.standard_normal((11, 64)).astype(np.float32)
    with Model(target) as model:
        for path in (whole, tmp_path / "few.gguf"):
            with (
                closing(BlockDrafter(path, model, n_threads=1)) as drafter,
                closing(drafter.cells(ContextOptions(**F32), 5)) as cells,
            ):
                state = BlockState(cells)
                state.learn(0, features, tokens)
                block = state.block(tokens, 5)
                assert block is not None
                named = [block.after(slot, tokens[-1 - slot :][:1]).whole for slot in (0, 2)]
                rows.append(np.array([row[0].copy() for row in named if row is not None]))
    drafted = np.sort(vocabulary().tokens)
    assert np.abs(rows[0][:, drafted] - rows[1][:, drafted]).max() < 1e-4
    assert np.isneginf(np.delete(rows[1], drafted, axis=1)).all()


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash2"])
def test_the_text_is_plain_decodings_own(target: Path, tmp_path: Path, name: str) -> None:
    """And every draft is of the vocabulary: with drawn drafts the distribution is kept, too."""
    whole, few = HEADS[name](tmp_path / "whole.gguf", target), tmp_path / "few.gguf"
    limit_vocabulary(whole, target, vocabulary(), few)
    method = name if name in ("eagle", "eagle3") else "dflash"
    params = SamplingParams(temperature=0.9, seed=5)
    texts = []
    for drafter in ("none", f"{method}({few}, n=3)"):
        with Runtime(target, drafter=drafter, **F32) as runtime:
            found = runtime.generate([*range(6, 30)], params, max_tokens=30)
            texts.append(found.token_ids)
    assert texts[0] == texts[1]
    assert found.stats.drafted > 20


def test_other_heads_are_refused(target: Path, tmp_path: Path) -> None:
    heads = random_medusa(32, SIZE).write(tmp_path / "medusa.gguf", SIZE)
    for path, problem in (
        (heads, "is a medusa: Medusa's heads each have an output matrix of their own"),
        (target, "is a llama: only EAGLE's heads and block drafters have graphs"),
        (
            TinyDFlash(draft_tokens=70).write(tmp_path / "few.gguf", target),
            r"has a draft vocabulary already \(d2t\)",
        ),
    ):
        with pytest.raises(UnsupportedModelError, match=problem):
            limit_vocabulary(path, target, vocabulary(), tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_the_command_measures_both_on_texts_that_it_did_not_count(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    head, few = HEADS["dspark"](tmp_path / "whole.gguf", target), tmp_path / "few.gguf"
    common = ["calibrate", "-m", target, "-md", head, "-c", "256", "--seconds", "0", "-t", "1"]
    common += ["-n", "120", "--draft-tokens", N, "--no-chat-template"]
    prompts = [part for text in "abcd" for part in ("-p", text * 9)]

    def run(*more: str | Path) -> tuple[int, str]:
        found = CliRunner().invoke(cli, [str(each) for each in (*common, *more)])
        return found.exit_code, found.output

    assert run(*prompts)[0] == 2  # without a place for it
    code, shown = run(*prompts, "-o", few)
    assert code == 0, shown
    assert re.search(r"all tokens.*\n.*60 tokens", shown)
    assert "% of the tokens at" in shown
    code, shown = run("-p", "abc", "-o", tmp_path / "other.gguf")
    assert code == 2
    assert "give more of them" in shown
