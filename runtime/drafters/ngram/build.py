"""Builds `ngram(order=2, file=FILE, pool=FILE)`: counts of files are shared by conversations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

from specrun.bindings.errors import OptionError
from specrun.runtime.drafter import DrafterWeights
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment
from specrun.runtime.drafters.lookahead.pool_store import load_pool
from specrun.runtime.drafters.ngram.drafter import NgramDrafter, NgramSampling
from specrun.runtime.drafters.ngram.text_counts import TextCounts, check_order
from specrun.runtime.drafters.retrieval.datastore import read_reference_tokens
from specrun.runtime.language import Expression
from specrun.runtime.methods import options_of

ORDER = 2
"""Bigrams, as in Leviathan et al. (2023)."""


def build_ngram(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `ngram(order=2, file=F, pool=F, n=auto, sampling=with, p_min=0)`.

    Raises OptionError for an order that is not counted, and what reading the files raises.
    """
    options = options_of(expression)
    order, n = options.integer("order", ORDER), options.length("n")
    check_order(order)
    schemes = list(get_args(NgramSampling))
    sampling = cast("NgramSampling", options.choice("sampling", schemes, "with"))
    p_min = options.number("p_min", 0.0)
    vocabulary = env.target.vocabulary
    texts: list[Sequence[int]] = []
    file, pool = options.optional("file"), options.optional("pool")
    if file is not None:
        texts.append(read_reference_tokens(Path(file).expanduser(), vocabulary))
    if pool is not None:
        texts += load_pool(Path(pool).expanduser(), vocabulary)
    sources = [TextCounts(texts, order, vocabulary.size)] if texts else []

    count = env.most_drafted if n is None else n
    if count + 1 > env.context.n_batch:
        raise OptionError(
            f"{expression}: a chain of {count} tokens and its root do not fit a batch of "
            f"{env.context.n_batch}: lower n, or raise the batch size (-b)"
        )

    def start() -> NgramDrafter:
        return NgramDrafter(
            order,
            sources,
            num_draft_tokens=count,
            sampling=sampling,
            p_min=p_min,
            length=env.draft_length(0.0) if n is None else None,
            name=str(expression),
        )

    return DrafterWeights(str(expression), start)
