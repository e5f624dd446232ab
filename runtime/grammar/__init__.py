"""Grammar-constrained decoding: grammars that answers follow, and the tokens that may come next."""

from specrun.runtime.grammar.grammar import Grammar, GrammarError
from specrun.runtime.grammar.schema import followed, loosened
from specrun.runtime.grammar.state import GrammarState
