"""Grammars with models: of every method the same text as plain, and always in the grammar.

F32 weights and cache, where batches round like single tokens to 1e-5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.every_drafter import DRAFTERS, named
from support.tiny_models import F32

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.runtime import GenerationResult, Grammar, Runtime, SamplingParams
from specrun.runtime.drafters.combinators.guided import USUAL, ForcedLength, ForcedSpelling
from specrun.runtime.engine import Engine
from specrun.runtime.grammar.state import Lexicon
from specrun.runtime.planning import CostCurve

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["function", "class"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # random models like spaces
}
JSON = Grammar.json_schema(SCHEMA)
GREEDY = SamplingParams(temperature=0.0, grammar=JSON)
WHOLE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, grammar=JSON)
PROMPTS: list[list[int]] = [[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4], [2, 7, 1, 8, 2, 8]]
LENGTH = 96  # more than any answer has
_SHAPES = ("nodes", "window=7", "tokens", "sampling", "adaptive", "until", "chunks", "FILE:text")
GUIDED = [pair for pair in DRAFTERS if not any(option in pair[1] for option in _SHAPES)]
"""Those of each method without further shapes: all grow from the same masked rows."""


@pytest.fixture(scope="module")
def plain(files: dict[str, Path]) -> dict[str, list[GenerationResult]]:
    """The answers of plain decoding, by target."""
    return {
        target: answers(files[target], "none", GREEDY)
        for target in dict.fromkeys(target for target, _ in GUIDED)
    }


def sized() -> ContextOptions:
    return ContextOptions(**{**F32, "n_ctx": 256})


def answers(
    target: Path, drafter: str, params: SamplingParams, **options: object
) -> list[GenerationResult]:
    with Runtime(target, drafter, context=sized(), **options) as runtime:
        results = [runtime.generate(prompt, params, max_tokens=LENGTH) for prompt in PROMPTS]
    for result in results:
        require_valid(result)
    return results


def require_valid(result: GenerationResult) -> None:
    assert result.finish_reason == "stop", result.text
    value = json.loads(result.text)
    assert list(value) == ["name", "kind", "tags"]
    assert len(value["name"]) <= 6
    assert value["kind"] in ("function", "class")
    assert 1 <= len(value["tags"]) <= 2


@pytest.mark.parametrize(("target", "drafter"), GUIDED)
def test_drafted_texts_are_plain_decodings(
    files: dict[str, Path],
    plain: dict[str, list[GenerationResult]],
    target: str,
    drafter: str,
) -> None:
    drafted = answers(files[target], named(drafter, files), GREEDY)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain[target]]
    stats = drafted[0].stats
    assert stats.forced_accepted <= stats.forced <= stats.drafted
    if "auto(" not in drafter and drafter != "none" and target != "hybrid":
        assert stats.accepted > 0
        assert stats.rounds < len(drafted[0].token_ids)


POINTS = [
    ("shallow", "prompt-lookup(min_ngram=1)"),
    ("shallow", "draft(FILE:twin, n=4, sampling=argmax)"),
    ("shallow", "medusa(FILE:medusa, tree=3x2x1)"),
    ("shallow", "eagle(FILE:eagle, depth=4, topk=2, nodes=6)"),
    ("shallow", "lookahead(window=2, ngram=4, guesses=3)"),
    ("nextn", "mtp(n=4)"),
]


@pytest.mark.parametrize(("target", "drafter"), POINTS)
def test_point_masses_keep_the_text_at_temperature_1(
    files: dict[str, Path], target: str, drafter: str
) -> None:
    wanted = answers(files[target], "none", WHOLE)
    drafted = answers(files[target], named(drafter, files), WHOLE)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in wanted]


SETTINGS = {
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.2},
    "dry": {"dry_multiplier": 0.8, "repeat_penalty": 1.1},
    "mirostat": {"mirostat": 2, "mirostat_ent": 3.0},
    "bias": {"logit_bias": {40: 3.0}},
    "chain": {
        "samplers": ("top_k", "temperature", "penalties"),
        "top_k": 20,
        "repeat_penalty": 1.2,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_other_samplers_follow_the_mask(files: dict[str, Path], name: str) -> None:
    params = WHOLE.replace(**SETTINGS[name])
    wanted = answers(files["shallow"], "none", params)
    drafted = answers(files["shallow"], "prompt-lookup(min_ngram=1)", params)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in wanted]


RULES = [
    "typical(eps=0.09, delta=0.3)",
    "cascade-opt(alpha=0.3)",
    "cascade-token-v3(alpha=0.5)",
    "kseq",
    "token-cascade(alpha=0.5)",
    "sequence-cascade(alpha=0.9)",
]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_stays_in_the_grammar(files: dict[str, Path], rule: str) -> None:
    answers(files["shallow"], named("draft(FILE:twin, n=4)", files), WHOLE, accept=rule)


@pytest.mark.parametrize(
    "drafter", ["prompt-lookup(min_ngram=1)", "draft(FILE:twin, n=4, sampling=argmax)"]
)
def test_each_slot_of_an_engine_has_a_grammar_of_its_own(
    files: dict[str, Path], drafter: str
) -> None:
    digits = WHOLE.replace(grammar=Grammar.regex("[0-9]{5}"))
    asked = [(prompt, params) for prompt in PROMPTS for params in (WHOLE, digits)]
    with Engine(
        files["shallow"], named(drafter, files), slots=4, context=ContextOptions(**F32)
    ) as engine:
        streams = [engine.submit(prompt, params, max_tokens=LENGTH) for prompt, params in asked]
        texts = [stream.result.text for stream in streams]
    with Runtime(files["shallow"], "none", context=sized()) as runtime:
        alone = [
            runtime.generate(prompt, params, max_tokens=LENGTH).text for prompt, params in asked
        ]
    assert texts == alone
    assert all(text.isdigit() and len(text) == 5 for text in texts[1::2])


def test_an_answer_ends_where_nothing_may_follow(files: dict[str, Path]) -> None:
    """Without an evaluation more: the end of the text is not asked of the model."""
    with Runtime(files["shallow"], "none", context=sized()) as runtime:
        params = GREEDY.replace(grammar=Grammar.regex("[a-f]{3}"))
        result = runtime.generate(PROMPTS[0], params)
    assert len(result.text) == 3
    assert result.finish_reason == "stop"
    assert result.stats.rounds == len(result.token_ids)


def test_a_limit_ends_a_text_within_the_grammar(files: dict[str, Path]) -> None:
    with Runtime(files["shallow"], "none", context=sized()) as runtime:
        result = runtime.generate(PROMPTS[0], GREEDY, max_tokens=5)
    assert result.finish_reason == "length"
    assert result.text.startswith("{")


def test_a_grammar_after_a_marker_begins_inside_drafts(files: dict[str, Path]) -> None:
    """The bias leaves few tokens, so that the marker comes soon, of two tokens."""
    grammar = Grammar.regex("[0-9]{4}", after="ab")
    with Runtime(files["shallow"], "none", context=sized()) as runtime:
        few = runtime.vocabulary.tokenize_within(b"abc0123")
    params = WHOLE.replace(grammar=grammar, logit_bias=dict.fromkeys(few, 30.0))
    drafters = ("none", "prompt-lookup(min_ngram=1)", "draft(FILE:twin, n=4, sampling=argmax)")
    texts = {
        drafter: [each.text for each in answered(files, drafter, params)] for drafter in drafters
    }
    assert len({tuple(each) for each in texts.values()}) == 1
    for text in texts["none"]:
        begun = text.split("ab", 1)[1]
        assert len(begun) == 4
        assert begun.isdigit()


def answered(
    files: dict[str, Path], drafter: str, params: SamplingParams
) -> list[GenerationResult]:
    with Runtime(files["shallow"], named(drafter, files), context=sized()) as runtime:
        return [runtime.generate(prompt, params, max_tokens=LENGTH) for prompt in PROMPTS]


STEEP_COSTS = CostCurve.flat([1.0, 1.8, 2.6, 3.4, 4.2, 5.0])
FLAT_COSTS = CostCurve.flat([1.0 + 0.02 * n for n in range(65)])


@pytest.mark.parametrize("costs", [None, STEEP_COSTS, FLAT_COSTS], ids=["usual", "steep", "flat"])
def test_forced_tokens_that_are_never_right_cost_3_percent(costs: CostCurve | None) -> None:
    """Also if it seems that they would be: their share alone does not decide."""
    length, lost = ForcedLength(costs), 0.0
    curve = costs or USUAL
    for _ in range(200):
        n = length.limit(0.9)
        lost += curve.seconds(1 + n) / curve.seconds(1) - 1.0
        length.learn(n, 0)
    assert 0.0 < lost <= 0.03 * 200


def test_forced_tokens_that_are_right_are_drafted_whole() -> None:
    length, forced = ForcedLength(FLAT_COSTS), []
    for _ in range(20):
        forced.append(length.limit(1.0))
        length.learn(forced[-1], forced[-1], forced[-1] + 1)
    assert forced == [64] * 20
    # By a steep curve half of them right are no gain, and by a flat one some are.
    assert ForcedLength(STEEP_COSTS).limit(0.5) == 0
    assert 2 <= ForcedLength(FLAT_COSTS).limit(0.5) <= 8


class _ForcedPlace:
    """A place where a text is forced, over tokens that are single bytes or whole words."""

    def __init__(self, text: bytes) -> None:
        words = {300: b"hello", 301: b" world", 302: b"wor"}
        spelled = [bytes([n]) if n < 256 else words.get(n, b"") for n in range(320)]
        self._words = _Words()
        self.lexicon = Lexicon(self._words, spelled)  # type: ignore[arg-type]
        self.text = text

    def forced(self, most: int, preference: npt.NDArray[np.float32] | None = None) -> list[int]:
        return self.lexicon.unambiguous_tokens_of(self.text, preference)[:most]


class _Words:
    size, end_of_generation = 320, frozenset[int]()

    def tokenize_within(self, text: bytes) -> list[int]:
        return [{b"hello": 300, b" world": 301}[word] for word in (b"hello", b" world")]


def test_forced_text_is_spelled_as_the_target_spells_it() -> None:
    """The tokenizer's spelling at first, then the tokens that rows prefer; and back again."""
    place: Any = _ForcedPlace(b"hello world")
    spelling, words, letters = ForcedSpelling(), np.zeros(320, "f"), np.zeros(320, "f")
    words[256:], letters[:256] = 1.0, 1.0
    assert spelling.tokens(place, 9) == [300, 301]
    for _ in range(9):
        spelling.tokens(place, 9)
        spelling.learn(ord("h"), letters)
    drafted = spelling.tokens(place, 9)
    assert bytes(drafted) == b"hello wor"  # nine
    assert spelling.share > 0.7
    for _ in range(9):
        spelling.tokens(place, 9)
        spelling.learn(300, words)
    assert spelling.tokens(place, 9) == [300, 301]
