"""Grammar-constrained decoding: what a user asks for, and the places of a text that follow it."""

from specrun.runtime.grammar.grammar import Grammar, GrammarError
from specrun.runtime.grammar.state import GrammarState

__all__ = ["Grammar", "GrammarError", "GrammarState"]
