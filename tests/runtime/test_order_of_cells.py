"""Trees and chains give plain decoding's rows and texts, with the flags and weights that users run.

Default flash attention and cache types, quantized weights and real text: attention then adds up in
half precision, cell by cell, and the next layer quantizes its activations again. A text whose cells
lie in another order has rows that differ by up to a nat, so its cells must lie in plain order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.demo import demo_questions
from specrun.runtime.round import CachedText, TargetModel
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder

ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1}
DEPTH = 3


def questions(n: int) -> list[str]:
    lines = demo_questions().read_text().splitlines()
    return [json.loads(line)["question"] for line in lines[:n]]


@pytest.fixture(scope="module")
def demo() -> Iterator[Runtime]:
    with Runtime.demo("draft(tree=2x2x2)", **ONE_THREAD) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def texts(demo: Runtime) -> list[tuple[int, list[int]]]:
    """The lengths of prompts, and their tokens with greedy answers: the target's own text."""
    found = []
    for question in questions(12):
        prompt = demo.chat_prompt([{"role": "user", "content": question}])
        answer = demo.generate(prompt, SamplingParams(temperature=0.0), max_tokens=40)
        found.append((len(prompt), [*prompt, *answer.token_ids]))
    return found


def chain(coming: list[int]) -> DraftTree:
    return DraftTree.chain(coming)


def second_child(coming: list[int]) -> DraftTree:
    """A tree whose first child at every depth is wrong: the path to keep is never the first."""
    builder, parent = TreeBuilder(), ROOT
    for token in coming:
        builder.add(parent, token + 1)
        parent = builder.add(parent, token)
    return builder.build()


def forced_rows(
    target: TargetModel, n_prompt: int, tokens: list[int], tree_of: object
) -> list[bytes]:
    """Take a text through rounds of `tree_of(coming tokens)`; return the bits of its rows."""
    target.rewind(text := CachedText(), 0)
    text.tokens = tokens[:n_prompt]
    target.prefill(text, n_prompt - 1)
    bits: list[bytes] = []
    while len(text.tokens) < len(tokens):
        coming = tokens[len(text.tokens) :][:DEPTH]
        tree = tree_of(coming)
        rows = target.evaluate(text, tree)
        path = tree.path_to(len(tree) - 1)
        bits += [rows.logits(node + 1).tobytes() for node in (ROOT, *path)]
        target.commit(text, tree, path)
        text.tokens += tokens[len(text.tokens) :][:1]
    return bits


class LevelByLevel(TargetModel):
    """Wrong: nodes lie as drafters number them, and later cells fill the holes between them."""

    def evaluate(self, text, tree):
        return self._evaluate_at(text.n_cached, [text.tokens[-1], *tree.tokens], tree.parents)

    def commit(self, text, tree, path):
        self._keep_at(text.n_cached, tree.parents, path)
        text.commit(map(tree.tokens.__getitem__, path))


def test_rows_behind_other_branches_have_the_bits_of_chains(
    demo: Runtime, texts: list[tuple[int, list[int]]]
) -> None:
    """The control, cells as they were before the order was kept, moves rows by tenths of a nat."""
    target, n_rows, n_wrong, moved = demo.session.target, 0, 0, []
    wrong = LevelByLevel(target.context)
    for n_prompt, tokens in texts:
        wanted = forced_rows(target, n_prompt, tokens, chain)
        assert forced_rows(target, n_prompt, tokens, second_child) == wanted
        found = forced_rows(wrong, n_prompt, tokens, second_child)
        for ours, theirs in zip(wanted, found, strict=True):
            rows = np.frombuffer(ours, np.float32), np.frombuffer(theirs, np.float32)
            moved.append(float(np.abs(rows[0] - rows[1]).max()))
            n_wrong += ours != theirs
        n_rows += len(wanted)
    target.rewind(CachedText(), 0)
    assert n_rows > 150
    assert n_wrong > n_rows / 2
    assert max(moved) > 0.3


def plain(coming: list[int]) -> DraftTree:
    return DraftTree()


@pytest.mark.parametrize("shape", ["free", "pairs"])
def test_pairs_keep_single_rows_from_being_summed_in_parts(shape: str) -> None:
    """Two threads and more than 256 cells: a single token's attention is summed in a part for each
    thread. In the shape "pairs" no token is evaluated alone, and chains have plain bits again."""
    options = {"n_threads": 2, "n_threads_batch": 2, "shape": shape}
    wanted: list[bytes] = []
    for drafter, tree_of in (("none", plain), ("draft(n=3)", chain)):
        with Runtime.demo(drafter, **options) as runtime:
            text = " ".join(questions(60))
            tokens = runtime.vocabulary.tokenize(text)[:298]
            found = forced_rows(runtime.session.target, 290, tokens, tree_of)
            runtime.session.target.rewind(CachedText(), 0)
        wanted = wanted or found
    assert len(found) == len(wanted) == 8
    assert (found == wanted) == (shape == "pairs")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["draft(tree=3x2x1, sampling=argmax)", "medusa(tree=2x2x2)"])
def test_texts_of_trees_are_plain_texts(drafter: str, temperature: float) -> None:
    answers: list[list[list[int]]] = []
    n_kept = 0
    for expression in ("none", drafter):
        with Runtime.demo(expression, **ONE_THREAD) as runtime:
            given: list[list[int]] = []
            for question in questions(40):
                params = SamplingParams(temperature, seed=7, top_k=0, top_p=1.0, min_p=0.0)
                messages = [{"role": "user", "content": question}]
                answer = runtime.chat(messages, params, max_tokens=24)
                given.append(answer.token_ids)
                n_kept += answer.stats.accepted
            answers.append(given)
    assert n_kept > 100
    assert [a == b for a, b in zip(*answers, strict=True)] == [True] * 40
