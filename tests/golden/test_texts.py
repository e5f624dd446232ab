"""Token ids of thirty settings: drafter, rule, temperature and seed over tiny files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.every_drafter import named, write_all
from support.tiny_models import F32

from golden.record import check
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.engine import Engine

GREEDY: dict[str, Any] = {"temperature": 0.0}
USUAL: dict[str, Any] = {"temperature": 0.8, "seed": 11}
WHOLE: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
PENALTIES: dict[str, Any] = {**USUAL, "repeat_penalty": 1.3, "presence_penalty": 0.4}
MIROSTAT: dict[str, Any] = {"temperature": 1.0, "mirostat": 2, "seed": 3}

SETTINGS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("shallow", "none", "exact", GREEDY),
    ("shallow", "none", "exact", USUAL),
    ("shallow", "none", "exact", MIROSTAT),
    ("shallow", "draft(FILE:twin, n=4)", "exact", GREEDY),
    ("shallow", "draft(FILE:twin, n=4)", "exact", USUAL),
    ("shallow", "draft(FILE:twin, n=4)", "exact", PENALTIES),
    ("shallow", "draft(FILE:twin, n=4)", "block", USUAL),
    ("shallow", "draft(FILE:twin, n=4, p_min=0.3)", "exact", WHOLE),
    ("shallow", "draft(FILE:twin, n=4)", "cascade-opt(alpha=0.1)", USUAL),
    ("shallow", "draft(FILE:twin, n=4)", "lossy(alpha=0.2, beta=solve)", WHOLE),
    ("shallow", "draft(FILE:twin, tree=2x2, sampling=with)", "kseq", WHOLE),
    ("shallow", "draft(FILE:twin, tree=2x2)", "exact", USUAL),
    ("shallow", "draft(FILE:twin, tree=3x2x1, sampling=without)", "exact", WHOLE),
    ("shallow", "draft(FILE:twin, depth=3, topk=2, nodes=5)", "exact", GREEDY),
    ("shallow", "draft(FILE:twin, n=4, vocabulary=text)", "exact", USUAL),
    ("shallow", "partial(sink=2, window=5, n=4)", "exact", USUAL),
    ("shallow", "early-exit(layers=1, n=3)", "exact", USUAL),
    ("shallow", "eagle(FILE:eagle, n=4)", "exact", GREEDY),
    ("shallow", "eagle(FILE:eagle, depth=4, topk=2, nodes=6)", "exact", WHOLE),
    ("shallow", "eagle(FILE:eagle, tree=2x2x1, sampling=without)", "exact", USUAL),
    ("deep", "eagle3(FILE:eagle3, depth=3, topk=3, nodes=7)", "exact", GREEDY),
    ("shallow", "hydra(FILE:hydra++, tree=2x2x1)", "exact", USUAL),
    ("shallow", "medusa(FILE:medusa, tree=3x2x1)", "typical(eps=0.09, delta=0.3)", USUAL),
    ("nextn", "mtp(n=3, sampling=with)", "exact", USUAL),
    ("shallow", "pass(FILE:pass, n=2)", "exact", GREEDY),
    ("shallow", "prompt-lookup(min_ngram=1)", "exact", WHOLE),
    ("shallow", "rest(FILE:store, min_match=1)", "exact", GREEDY),
    ("shallow", "lookahead(window=2, ngram=4, guesses=3)", "exact", WHOLE),
    ("shallow", "cascade(draft(FILE:twin, n=6), draft(FILE:small, tree=2x2))", "exact", USUAL),
    ("shallow", "relay(draft(FILE:twin)@2, draft(FILE:small)@3)", "exact", USUAL),
    ("shallow", "ensemble(draft(FILE:twin), ngram(order=3, n=3))", "exact", WHOLE),
    ("hybrid", "mtp(n=3)", "exact", GREEDY),
]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4], [2, 7, 1, 8, 2, 8]]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep curves away that other tests of this process stored for files of the same bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("golden"))


def test_token_ids(files: dict[str, Path]) -> None:
    found = {}
    for target, drafter, rule, sampling in SETTINGS:
        params = SamplingParams(**sampling)
        with Runtime(files[target], named(drafter, files), accept=rule, **F32) as runtime:
            answers = [runtime.generate(prompt, params, max_tokens=24) for prompt in PROMPTS]
        numbers = [(each.stats.rounds, each.stats.drafted, each.stats.accepted) for each in answers]
        name = f"{target}: {drafter}, {rule}, {sampling}"
        found[name] = {"ids": [each.token_ids for each in answers], "rounds": numbers}
    check("token_ids", found)


def test_token_ids_of_several_conversations(files: dict[str, Path]) -> None:
    found = {}
    for drafter in (
        "none",
        "draft(FILE:twin, n=4)",
        "draft(FILE:twin, tree=2x2)",
        "medusa(FILE:medusa, tree=3x2x1)",
    ):
        with Engine(files["shallow"], named(drafter, files), slots=2, **F32) as engine:
            params = SamplingParams(**USUAL)
            answers = engine.generate_many([*PROMPTS, PROMPTS[0][:4]], params, max_tokens=24)
        found[drafter] = [each.token_ids for each in answers]
    check("token_ids_together", found)
