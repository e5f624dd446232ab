"""Where a copied text goes on behind an edit, and what of a match is evidence."""

from __future__ import annotations

import random

from specrun.runtime.drafters.retrieval import NgramIndex, Realignment

SOURCE = list(range(100, 120))


def resumed(written: list[int]) -> tuple[int, int] | None:
    """Copy the source up to its twelfth token, then write something else, and ask where it goes
    on."""
    index, source = NgramIndex(2, 16), Realignment()
    index.extend([*SOURCE, 1, *SOURCE[:12]])
    place, match = index.matches(1)[0]
    source.follow(place, match, len(index.tokens))
    index.extend(written)
    found = source.resume(index)
    return None if found is None else (index.tokens[found[0]], found[1])


def test_one_token_replaced_by_one() -> None:
    assert resumed([5]) == (113, 0)
    assert resumed([5, 113]) == (114, 1)
    assert resumed([5, 113, 114]) == (115, 2)


def test_tokens_left_out_and_put_in() -> None:
    assert resumed([115]) == (116, 1)
    assert resumed([5, 6, 7, 112]) == (113, 1)
    assert resumed([5, 6]) is None  # two new tokens in a row: nobody knows where this goes


def test_a_source_is_given_up() -> None:
    assert resumed([5] * 20 + [113]) is None
    index = NgramIndex(2, 16)
    index.extend([*SOURCE, *SOURCE[:3], 5])
    source = Realignment()
    source.follow(3, 3, 23)  # three tokens are no copy
    assert source.resume(index) is None
    source.follow(3, 10, 23)
    assert source.resume(index) is not None
    source.forget()
    assert source.resume(index) is None


def test_the_nearest_of_the_longest_matches_wins() -> None:
    index, source = NgramIndex(2, 16), Realignment()
    index.extend([*range(50, 60), 7, 8, 9, 7, 3, 8, 9, 4, 1, *range(50, 60), 2, 8, 9])
    source.follow(10, 10, 29)
    assert source.resume(index) == (
        13,
        2,
    )  # both "8 9" match twice; this one is where the copy would be


def test_since_fork_agrees_with_its_definition() -> None:
    rng = random.Random(3)
    for _ in range(40):
        tokens = [rng.randrange(3) for _ in range(60)]
        index = NgramIndex(2, 8)
        index.extend(tokens)
        for match in (2, 3, 5, 9):
            assert index.since_fork(match, visited=1000) == since_fork(tokens, match)


def since_fork(tokens: list[int], match: int) -> int:
    for back in range(1, min(match, 5)):
        sizes = [size for size in (2, 4, 8) if size <= match - back]
        if not sizes:
            break
        end = len(tokens) - back
        gram = tokens[end - sizes[-1] : end]
        followed = {
            tokens[at] for at in range(sizes[-1], end) if tokens[at - sizes[-1] : at] == gram
        }
        if followed - {tokens[end]}:
            return back
    return match


def test_a_formula_is_no_evidence_but_what_came_after_it_is() -> None:
    formula = [90, 91, 92, 93]
    index = NgramIndex(2, 16)
    for answer in ([1, 2], [3, 4], [5, 6]):
        index.extend([*formula, *answer])
    index.extend([*formula, 3])
    assert index.matches(1)[0][1] == 5
    assert index.since_fork(5) == 1
