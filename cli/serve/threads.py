"""Threads beside the event loop, for work that would hold up all streams: few, and always the same.

A request can make templates, tokenizers and grammars busy for long; more of them than these wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Result = TypeVar("_Result")
_THREADS = ThreadPoolExecutor(4, "specrun request")


async def beside_the_loop(work: Callable[[], _Result]) -> _Result:
    """Return what `work` returns, in another thread; raises what it raises."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
