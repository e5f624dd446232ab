"""Where a run's states come from: the target in torch, a GGUF teacher, or what either has left on
disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from specrun.bindings.errors import SpecrunError
from specrun.bindings.model import Model
from specrun.runtime.offload import resolve_gpu_layers
from specrun.train.data.token_corpus import TokenCorpus
from specrun.train.heads.run import HeadRun
from specrun.train.target.feature_cache import (
    CachedFeatures,
    CachePlace,
    cache_bytes,
    check_cache_space,
    fill_cache,
    remove_caches,
)
from specrun.train.target.features import FeatureSource, ModelFeatures, TargetMatrices
from specrun.train.target.hf_model import load_hf_model
from specrun.train.target.target_shape import TargetShape, source_identity
from specrun.train.target.teacher import TeacherFeatures, teacher_matrices
from specrun.train.trainer.listener import RunListener
from specrun.train.trainer.precision import dtype_name
from specrun.train.trainer.run_checkpoint import EarlierRun
from specrun.train.trainer.settings import TrainerSettings

CACHED = "cached states"
"""Of a run's identity: states from disk are rounded to float16, so that the losses of other runs
are not the same."""


def states_place(
    run: HeadRun, corpus: TokenCorpus, taps: tuple[int, ...], precision: torch.dtype
) -> CachePlace:
    """Return where a run keeps states, which the target computes in `precision`, or a teacher as
    llama.cpp does."""
    root = run.features or _private_folder(run)
    computed_in = "llama.cpp" if run.teacher is not None else dtype_name(precision)
    identity = source_identity(run.teacher or run.target)
    return CachePlace.of(root, corpus, taps, precision=computed_in, identity=identity)


def _private_folder(run: HeadRun) -> Path:
    return run.state_path.parent / "features"


def remove_private_states(run: HeadRun, source: FeatureSource | None) -> None:
    """Delete the states that a run kept for itself alone, and those its earlier attempts left; a
    named folder stays."""
    if run.features is not None:
        return
    if isinstance(source, CachedFeatures):
        source.close()
    remove_caches(_private_folder(run))


def room_for_states(place: CachePlace, shape: TargetShape) -> str:
    """Return in words how much is kept; raise SpecrunError unless there is room for what is not
    there yet."""
    size, missing = (
        cache_bytes(place.corpus, shape.hidden, len(place.taps)),
        place.missing_bytes(shape.hidden),
    )
    check_cache_space(place.folder, missing)
    there = "" if missing == size else f", of which {(size - missing) / 2**20:,.1f} are there"
    return f"{size / 2**20:,.1f} MiB in {place.root}{there}"


def may_cache(run: HeadRun, settings: TrainerSettings, corpus: TokenCorpus) -> bool:
    """Return whether states are to be kept on disk where there is room: each is read more than
    once, or must be."""
    read = settings.steps * settings.tokens_per_batch / max(1, corpus.n_tokens)
    return _must_cache(run) or (run.cache != "no" and read > 1.5)


def _must_cache(run: HeadRun) -> bool:
    return run.teacher is not None or run.cache == "yes" or run.features is not None


def wants_cache(
    run: HeadRun,
    settings: TrainerSettings,
    shape: TargetShape,
    place: CachePlace,
    earlier: EarlierRun,
    listener: RunListener,
) -> bool:
    """Return whether states are kept on disk: where asked for or needed, and where each is read
    more than once.

    A resumed run that is left the choice does as before, whatever the disk has room for now.
    """
    before = earlier.identity.get(CACHED)
    must = _must_cache(run) or before is True
    if run.cache == "no" or not (
        must or (before is None and may_cache(run, settings, place.corpus))
    ):
        return False
    try:
        kept = room_for_states(place, shape)
    except SpecrunError:
        if must:
            raise
        size = cache_bytes(place.corpus, shape.hidden, len(place.taps))
        listener.note(
            f"the target's states would take {size / 2**30:.2f} GiB on disk, too much: computed "
            "at each step"
        )
        return False
    listener.note(f"the target's states are computed once and kept on disk: {kept}")
    return True


@contextmanager
def opened_states(
    run: HeadRun,
    place: CachePlace,
    device: torch.device,
    precision: torch.dtype,
    cached: bool,
    listener: RunListener,
) -> Iterator[tuple[TargetMatrices, FeatureSource]]:
    """Yield the target's matrices and where its states come from; a teacher is closed before
    training begins."""
    corpus, taps = place.corpus, place.taps

    def told(done: int, total: int) -> None:
        listener.stage("computing the target's states", done, total)

    if run.teacher is not None:
        layers = resolve_gpu_layers("auto", run.teacher)
        with (
            Model(run.teacher, n_gpu_layers=layers) as model,
            TeacherFeatures(model, corpus.longest, taps, n_threads=run.n_threads) as teacher,
        ):
            source: FeatureSource = fill_cache(place, teacher, torch.device("cpu"), told)
        yield teacher_matrices(run.teacher, device, precision), source
        return
    target = load_hf_model(run.target, device, precision)
    matrices = TargetMatrices(target.embedding.detach(), target.output.detach(), target.softcap)
    source = ModelFeatures(target, taps)
    if cached:
        source = fill_cache(place, source, device, told)
        del target  # only its matrices are still needed
    yield matrices, source
