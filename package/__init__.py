"""specrun: speculative decoding of GGUF models, with exactly the target's distribution.

    from specrun import Runtime, SamplingParams

All names are those of `specrun.runtime`. Importing it loads neither llama.cpp nor torch; the first
`Runtime` does.
"""

from typing import TYPE_CHECKING

from specrun.runtime import __all__, __dir__, __getattr__

if TYPE_CHECKING:
    from specrun.runtime import *  # noqa: F403 - the names of __all__, for type checkers

__version__ = "0.1.0"
