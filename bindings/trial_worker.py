"""The process in which an unknown file is tried: started by `trial`, one file, then it ends.

It loads a model, reads and writes some text, and evaluates a few tokens twice: several at once and
then a single one, whose kernels differ. A model with NextN blocks evaluates those as well.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context, MtpContext, StateBatch, can_draft_nextn
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import DecodeMemoryError, OutOfMemoryError, SpecrunError
from specrun.bindings.library import llama
from specrun.bindings.machine.limits import limit_process
from specrun.bindings.memory_breakdown import CountedModel
from specrun.bindings.models.model import Model
from specrun.bindings.models.trial import report, trusting_files
from specrun.bindings.threads import available_cores

_TEXT = "A trial: 1 + 1 = 2,\n\n\tnaïve 水 <|end|>"
_TOKENS = 8
_MAX_THREADS = 4


def run_trial(attempt: Callable[[Sequence[str]], None]) -> None:
    """Limit this process, and report how `attempt` goes with the arguments of the command line."""
    # Ctrl-C reaches the whole group of processes: the parent of this one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    llama()
    given, *arguments = sys.argv[1:]
    limits = json.loads(given)
    # RLIMIT_DATA leaves out mapped files, and so the weights of a mapped model. No core file.
    limit_process(
        {
            "RLIMIT_DATA": limits["memory"],
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": limits["seconds"] * _MAX_THREADS,
        }
    )
    report(opening=arguments)
    try:
        with trusting_files():
            attempt(arguments)
    except (OutOfMemoryError, DecodeMemoryError, MemoryError) as error:
        report(memory=str(error))
    except SpecrunError as error:
        report(refused=str(error))
    else:
        report(done=True)


def try_model(path: str | os.PathLike[str], *, vocab_only: bool = False) -> None:
    """Do with a file the same as its first use does, with reports."""
    with Model(path, vocab_only=vocab_only, load_nextn=not vocab_only) as model:
        vocabulary = model.vocabulary
        tokens = vocabulary.tokenize(_TEXT) + vocabulary.tokenize(_TEXT, parse_special=True)
        vocabulary.detokenize([*tokens, *vocabulary.end_of_generation])
        if vocab_only or not model.can_generate:
            return
        threads = min(available_cores(), _MAX_THREADS)
        options = ContextOptions(n_ctx=256, n_batch=_TOKENS, n_threads=threads, n_outputs=_TOKENS)
        if not model.nextn.alone:
            _evaluate(Context(model, options), Batch(_TOKENS, 1))
        if can_draft_nextn(model):
            _evaluate(MtpContext(model, options), StateBatch(_TOKENS, model.n_embd_out))


def try_counting(path: str | os.PathLike[str]) -> None:
    """Count the memory of a model's contexts."""
    with CountedModel(path, load_nextn=True) as model:
        options = ContextOptions(n_ctx=256, n_batch=_TOKENS, n_threads=1, n_outputs=_TOKENS)
        if model.can_generate and not model.nextn.alone:
            Context(model, options).close()
        if can_draft_nextn(model):
            MtpContext(model, options).close()


def _try(arguments: Sequence[str]) -> None:
    """Try a file in the way that the command line names."""
    path, way = arguments
    if way == "-counted":
        try_counting(path)
    else:
        try_model(path, vocab_only=way == "-vocabulary")


def _evaluate(context: Context, batch: Batch) -> None:
    """Evaluate tokens from all over the vocabulary."""
    size = context.model.vocabulary.size
    tokens = [number * size // _TOKENS for number in range(_TOKENS)]
    with context:
        for several, start in ((tokens, 0), (tokens[-1:], _TOKENS)):
            batch.fill_chain(several, start, [0], len(several))
            context.decode(batch).logits(0)


if __name__ == "__main__":
    run_trial(_try)
