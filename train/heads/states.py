"""A run's states of its target: from torch, from a GGUF teacher, or from a cache on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from specrun.bindings.errors import SpecrunError
from specrun.train.data.token_corpus import TokenCorpus
from specrun.train.heads.run import HeadRun, StartedHeadRun
from specrun.train.target.feature_cache import (
    CachedFeatures,
    CachePlace,
    FeatureCache,
    cache_bytes,
    check_cache_space,
    fill_cache,
    opened_cache,
    remove_caches,
)
from specrun.train.target.features import FeatureSource
from specrun.train.target.hf_model import TargetMatrices
from specrun.train.target.target_shape import ModelShape, source_identity
from specrun.train.trainer.settings import TrainerSettings

CACHED = "cached states"
"""Of a run's identity: states from disk are float16, so that losses of other runs differ."""


def states_place(
    started: StartedHeadRun, taps: tuple[int, ...], precision: torch.dtype
) -> CachePlace:
    """Return where a run keeps states: a torch target computes them in `precision`."""
    run = started.run
    root = run.features or _private_folder(run)
    computed_in = started.target.computed_in(precision)
    identity = source_identity(run.source)
    return CachePlace.of(root, taps, precision=computed_in, identity=identity)


def _private_folder(run: HeadRun) -> Path:
    return run.state_path.parent / "features"


def remove_private_states(run: HeadRun, source: FeatureSource | None) -> None:
    """Delete the states that a run or its earlier attempts kept; a named folder stays."""
    if run.features is not None:
        return
    if isinstance(source, CachedFeatures):
        source.close()
    remove_caches(_private_folder(run))


def room_for_states(place: CachePlace, corpus: TokenCorpus, shape: ModelShape) -> str:
    """Return how much is kept, as a text; raise SpecrunError unless what is missing has room."""
    size = cache_bytes(corpus, shape.hidden, len(place.taps))
    missing = place.missing_bytes(corpus, shape.hidden)
    # Before hours of evaluation, not when the disk is full.
    check_cache_space(place.folder, missing)
    there = "" if missing == size else f", of which {(size - missing) / 2**20:,.1f} are there"
    return f"{size / 2**20:,.1f} MiB in {place.root}{there}"


def may_cache(run: HeadRun, settings: TrainerSettings, corpus: TokenCorpus) -> bool:
    """Return whether states are kept where there is room: must be, or are read more than once."""
    read = settings.steps * settings.tokens_per_batch / max(1, corpus.n_tokens)
    # llama.cpp would have to be asked again by every measure, and stay in memory beside torch.
    pays = read > 1.5 or run.source.is_file()
    return _must_cache(run) or (run.cache != "no" and pays)


def _must_cache(run: HeadRun) -> bool:
    return run.cache == "yes" or run.features is not None


def wants_cache(
    started: StartedHeadRun, settings: TrainerSettings, place: CachePlace, corpus: TokenCorpus
) -> bool:
    """Return whether states are kept on disk, as asked for or needed, or as `may_cache` finds.

    A resumed run that is left the choice does as before, whatever the disk has room for now.
    """
    run, shape = started.run, started.shape
    if not _may_keep(started, settings, corpus):
        return False
    must = _must_cache(run) or started.earlier.identity.get(CACHED) is True
    try:
        kept = room_for_states(place, corpus, shape)
    except SpecrunError:
        if must:
            raise
        size = cache_bytes(corpus, shape.hidden, len(place.taps))
        much = f"{size / 2**30:.2f} GiB on disk, too much"
        started.listener.note(f"the target's states would take {much}: computed at each step")
        return False
    started.listener.note(f"the target's states are computed once and kept on disk: {kept}")
    return True


def _may_keep(started: StartedHeadRun, settings: TrainerSettings, corpus: TokenCorpus) -> bool:
    """Return whether states are kept, as far as that does not depend on the disk."""
    # States from disk are rounded to float16: a run that changed over would not go on exactly.
    before = started.earlier.identity.get(CACHED)
    if started.run.cache == "no" or (before is False and not _must_cache(started.run)):
        return False
    return before is True or may_cache(started.run, settings, corpus)


def kept_while_answering(
    started: StartedHeadRun, settings: TrainerSettings, place: CachePlace, longest: TokenCorpus
) -> FeatureCache | None:
    """Return where the target leaves the states of what it says, None where it leaves none.

    There must be room for texts as long as the `longest`.
    """
    if not started.target.leaves_states or not _may_keep(started, settings, longest):
        return None
    try:
        check_cache_space(place.folder, cache_bytes(longest, started.shape.hidden, len(place.taps)))
    except SpecrunError:
        return None
    return opened_cache(place)


def filled_cache(
    started: StartedHeadRun,
    place: CachePlace,
    corpus: TokenCorpus,
    source: FeatureSource,
    device: torch.device,
) -> CachedFeatures:
    """Compute the states that are missing on disk and tell the listener how far that is."""

    def tell(done: int, total: int) -> None:
        started.listener.stage("computing the target's states", done, total)

    return fill_cache(place, corpus, source, device, tell)


@contextmanager
def opened_states(
    started: StartedHeadRun, place: CachePlace, corpus: TokenCorpus, cached: bool
) -> Iterator[tuple[TargetMatrices, FeatureSource]]:
    """Yield the target's matrices and the source of its states, computed before where `cached`."""
    target, device, precision = started.target, started.device, started.precision
    kept = None
    with target.states(place.taps, corpus.longest, device, precision) as source:
        if cached:
            kept = filled_cache(started, place, corpus, source, device)
        else:
            yield target.matrices(device, precision), source
        del source
    if kept is not None:  # what computed the states is out of memory now
        yield target.matrices(device, precision), kept
