"""Grammar-constrained decoding: grammars that answers follow, and the tokens that may come next."""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.runtime.grammar.grammar import Grammar, GrammarError
    from specrun.runtime.grammar.schema import SPACES, any_of, followed, loosened, warn_once
    from specrun.runtime.grammar.state import GrammarState

__getattr__, __dir__ = lazy_face(__name__)
