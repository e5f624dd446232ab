"""Tokens of texts that grow or change are those of the whole text, and old ones are not read."""

from __future__ import annotations

import random

import pytest

from specrun.bindings.models import Vocabulary
from specrun.runtime.chat.template import TokenMemory


def tokens_of(text: str, vocabulary: Vocabulary) -> list[int]:
    return vocabulary.tokenize(text, add_special=False, parse_special=True)


@pytest.mark.parametrize("seed", range(6))
def test_changed_conversations_are_tokenized_as_a_whole(vocabulary: Vocabulary, seed: int) -> None:
    rng = random.Random(seed)
    specials = [*vocabulary.special_texts]
    # Begins and ends of names beside whole ones: changes fall within them, too.
    scraps = [name[:4] for name in specials] + [name[2:] for name in specials] + ["  ", "\n", "é☕"]

    def piece() -> str:
        words = " ".join(rng.choice(["copy", "os.path", "a", "\tdef", "日本"]) for _ in range(20))
        return rng.choice(specials) + words + rng.choice(scraps)

    memory = TokenMemory()
    parts = [piece() for _ in range(60)]
    for _ in range(60):
        change = rng.randrange(4)
        if change == 0:
            parts = [*parts, piece()]
        elif change == 1:
            parts[rng.randrange(len(parts))] = piece()
        elif change == 2:
            parts = parts[: rng.randrange(30, len(parts))] + [piece() for _ in range(10)]
        text = "".join(parts)
        if change == 3:
            text = text[: rng.randrange(len(text))]
        assert memory.tokenize(text, vocabulary) == tokens_of(text, vocabulary)


def test_only_the_end_of_a_longer_conversation_is_read(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = "<|user|>" + "What does shutil.copytree do? " * 10 + "<|end|>"
    memory, text = TokenMemory(), turn * 40
    memory.tokenize(text, vocabulary)
    read: list[int] = []
    real = vocabulary.tokenize

    def counted(text: str, **options: bool) -> list[int]:
        read.append(len(text))
        return real(text, **options)

    monkeypatch.setattr(vocabulary, "tokenize", counted)
    longer = text + turn
    found = memory.tokenize(longer, vocabulary)
    assert sum(read) <= 2 * len(turn)
    assert found == real(longer, add_special=False, parse_special=True)
    memory.tokenize("x" + longer, vocabulary)  # nothing is shared
    assert read[-1] == len(longer) + 1


def test_few_texts_are_kept(vocabulary: Vocabulary) -> None:
    memory = TokenMemory()
    for n in range(40):
        memory.tokenize(f"{n}<|user|>" + "copy " * 1000, vocabulary)
    assert len(memory._kept) == 16
    long = "<|user|>" + "copy " * 500_000
    memory.tokenize(long, vocabulary)
    assert sum(len(each.text) for each in memory._kept) <= 4 << 20
