"""Where a run's states come from: the target in torch, a GGUF teacher, or what either has left on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from specrun.bindings.errors import SpecrunError
from specrun.bindings.model import Model
from specrun.runtime.planning.offload import resolve_gpu_layers
from specrun.train.feature_cache import cache_bytes, check_cache_space, fill_cache
from specrun.train.features import FeatureSource, ModelFeatures, TargetMatrices
from specrun.train.head_run import HeadRun
from specrun.train.hf_model import load_hf_model
from specrun.train.run_listener import RunListener
from specrun.train.source_identity import source_identity
from specrun.train.target_shape import TargetShape
from specrun.train.target_words import TargetWords
from specrun.train.teacher import TeacherFeatures, check_same_words, teacher_matrices
from specrun.train.token_corpus import TokenCorpus
from specrun.train.trainer_settings import TrainerSettings

__all__ = ["cache_folder", "may_cache", "opened_states", "wants_cache"]


def cache_folder(run: HeadRun) -> Path:
    """Return where a run keeps states."""
    return run.features or run.state_path.parent / "features"


def may_cache(run: HeadRun, settings: TrainerSettings, corpus: TokenCorpus) -> bool:
    """Return whether states are to be kept on disk where there is room: each is read more than once, or must be."""
    read = settings.steps * settings.tokens_per_batch / max(1, corpus.n_tokens)
    return _must_cache(run) or (run.cache != "no" and read > 1.5)


def _must_cache(run: HeadRun) -> bool:
    return run.teacher is not None or run.cache == "yes" or run.features is not None


def wants_cache(
    run: HeadRun,
    settings: TrainerSettings,
    corpus: TokenCorpus,
    shape: TargetShape,
    n_taps: int,
    listener: RunListener,
) -> bool:
    """Return whether states are kept on disk: where asked for or needed, and where each is read more than once."""
    size = cache_bytes(corpus, shape.hidden, n_taps)
    folder = cache_folder(run)
    if not may_cache(run, settings, corpus):
        return False
    try:
        check_cache_space(folder, size)
    except SpecrunError:
        if _must_cache(run):
            raise
        listener.note(f"the target's states would take {size / 2**30:.2f} GiB on disk, too much: computed at each step")
        return False
    listener.note(f"the target's states are computed once and kept on disk: {size / 2**20:,.1f} MiB in {folder}")
    return True


@contextmanager
def opened_states(
    run: HeadRun,
    words: TargetWords,
    n_words: int,
    corpus: TokenCorpus,
    taps: tuple[int, ...],
    device: torch.device,
    precision: torch.dtype,
    cached: bool,
    listener: RunListener,
) -> Iterator[tuple[TargetMatrices, FeatureSource]]:
    """Yield the target's matrices and where its states come from; a teacher is closed before training begins."""
    folder = cache_folder(run)

    def told(done: int, total: int) -> None:
        listener.stage("computing the target's states", done, total)

    if run.teacher is not None:
        layers = resolve_gpu_layers("auto", run.teacher)
        with Model(run.teacher, n_gpu_layers=layers) as model:
            check_same_words(model, words, n_words)
            with TeacherFeatures(model, corpus.longest, taps, n_threads=run.n_threads) as teacher:
                cpu = torch.device("cpu")
                source: FeatureSource = fill_cache(folder, corpus, teacher, cpu, source_identity(run.teacher), told)
        yield teacher_matrices(run.teacher, device, precision), source
        return
    target = load_hf_model(run.target, device, precision)
    matrices = TargetMatrices(target.embedding.detach(), target.output.detach(), target.softcap)
    source = ModelFeatures(target, taps)
    if cached:
        source = fill_cache(folder, corpus, source, device, source_identity(run.target), told)
        del target  # only its matrices are still needed
    yield matrices, source
