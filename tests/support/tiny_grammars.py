"""A handful of tokens under finite languages: grammars whose masks can be told without a compiler.

`Words` stands for a model's vocabulary. A language is a list of all its texts, so that what may
follow a text is seen by looking through them: the oracle of the tests with llguidance.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specrun.runtime.drafters.combinators.guided import GuidedDrafter
from specrun.runtime.grammar import Grammar
from specrun.runtime.grammar.compiled import GrammarCompiler
from specrun.runtime.laws import SamplingParams
from specrun.runtime.laws.samplers import SamplerState
from specrun.runtime.round import Drafter
from support.enumeration import PROMPT, Propose
from support.scripted import PLAIN, LawTable, ScriptedDrafter


class Words:
    """Tokens with these texts, and after them one that ends the text."""

    bos = None

    def __init__(self, *texts: str) -> None:
        self.texts = [*(text.encode() for text in texts), b"<end>"]
        self.size, self.end = len(self.texts), len(texts)
        self.end_of_generation = frozenset({self.end})

    def named(self, token: int) -> bytes:
        return self.texts[token]

    def is_control(self, token: int) -> bool:
        return token == self.end

    def tokenize_within(self, text: bytes) -> list[int]:
        """The longest token first, as far as there are any."""
        tokens: list[int] = []
        while text:
            fitting = [t for t in range(self.end) if text.startswith(self.texts[t])]
            if not fitting:
                break
            tokens.append(max(fitting, key=lambda t: len(self.texts[t])))
            text = text[len(self.texts[tokens[-1]]) :]
        return tokens

    def spelled(self, tokens: Sequence[int]) -> str:
        return b"".join(self.texts[token] for token in tokens if token != self.end).decode()


@dataclass(frozen=True)
class Language:
    """All texts of a language, after a marker if there is one."""

    words: Words
    texts: tuple[str, ...]
    after: str = ""

    @property
    def grammar(self) -> Grammar:
        return Grammar.lark("start: " + " | ".join(f'"{t}"' for t in self.texts), after=self.after)

    def begun(self, said: str) -> str | None:
        """What was said since the marker; None before it."""
        if not self.after:
            return said
        place = said.find(self.after)
        return None if place < 0 else said[place + len(self.after) :]

    def allows(self, tokens: Sequence[int], token: int) -> bool:
        begun = self.begun(self.words.spelled(tokens))
        if token == self.words.end:
            return begun is None or begun in self.texts
        said = self.begun(self.words.spelled([*tokens, token]))
        return said is None or any(text.startswith(said) for text in self.texts)

    def is_over(self, tokens: Sequence[int]) -> bool:
        begun = self.begun(self.words.spelled(tokens))
        longer = (t for t in self.texts if begun is not None and t.startswith(begun) and t != begun)
        return begun in self.texts and not any(longer)

    def masked(self, law: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        allowed = [self.allows(tokens, token) for token in range(self.words.size)]
        left = np.where(allowed, law, 0.0)
        return left / left.sum()

    def law(self, table: LawTable, length: int) -> dict[tuple[int, ...], float]:
        """The law of texts up to a length: the product of the masked conditional laws."""
        laws = {(): 1.0}
        for _ in range(length):
            longer: dict[tuple[int, ...], float] = {}
            for text, probability in laws.items():
                if text[-1:] == (self.words.end,) or self.is_over(text):
                    longer[text] = longer.get(text, 0.0) + probability
                    continue
                for token, conditional in enumerate(self.masked(table([*PROMPT, *text]), text)):
                    if conditional:
                        longer[*text, token] = probability * conditional
            laws = longer
        return laws

    def start(self) -> SamplerState:
        """The state at the beginning of an answer to the prompt of the enumeration."""
        return SamplerState(grammar=_compiler(self.words).compile(self.grammar).start(len(PROMPT)))

    @property
    def params(self) -> SamplingParams:
        return PLAIN.replace(grammar=self.grammar)


@functools.cache
def _compiler(words: Words) -> GrammarCompiler:
    return GrammarCompiler(words)  # type: ignore[arg-type]


SPELLINGS = Language(Words("a", "b", "ab", "c"), ("ab", "abc", "abcab", "cab", "cb", "ba"))
FORCED = Language(Words("a", "b", "ab", "c"), ("abcabc", "abcac"))
LAZY = Language(Words("x", "y", "xya", "a", "b"), ("bb", "ab", "b"), after="xy")
STRICT = Language(LAZY.words, ("bb", "b"), after="xy")


def guided(propose: Propose) -> Drafter:
    return GuidedDrafter(ScriptedDrafter(propose))
