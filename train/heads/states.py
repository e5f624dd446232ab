"""States of a run's target: computed anew at each step, or once and kept on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from specrun.bindings.errors import SpecrunError
from specrun.train.data.corpus import TokenCorpus
from specrun.train.target.states import (
    CachedFeatures,
    CachePlace,
    FeatureCache,
    FeatureSource,
    cache_bytes,
    check_cache_space,
    fill_cache,
    opened_cache,
    remove_caches,
)
from specrun.train.trainer.learner import RunListener
from specrun.train.trainer.settings import TrainerSettings

CachePolicy = Literal["auto", "yes", "no"]

CACHED = "cached states"
"""Of a run's identity: states from disk are float16, so that losses of other runs differ."""


@dataclass(frozen=True, slots=True)
class RunStates:
    """The choice of a run between computing states of width `hidden` and keeping them in `place`.

    `policy` and a `named` folder are the user's choice. `from_file`: llama.cpp computes the states,
    `before`: an interrupted run kept them; None: nothing is resumed.
    """

    place: CachePlace
    hidden: int
    policy: CachePolicy
    named: bool
    from_file: bool
    before: bool | None
    listener: RunListener

    def pay(self, settings: TrainerSettings, corpus: TokenCorpus) -> bool:
        """Return whether states are kept if the disk has room: must be, or are read often."""
        read = settings.steps * settings.tokens_per_batch / max(1, corpus.n_tokens)
        # Every measure would have to run llama.cpp again, which would stay in memory beside torch.
        pays = read > 1.5 or self.from_file
        return self._must or (self.policy != "no" and pays)

    def kept(self, settings: TrainerSettings, corpus: TokenCorpus) -> bool:
        """Return whether states are kept on disk, and inform the listener.

        A resumed run that is left the choice does as before, whatever room the disk has now.
        """
        if not self._may(settings, corpus):
            return False
        try:
            there = self.room(corpus)
        except SpecrunError:
            if self._must or self.before is True:
                raise
            size = cache_bytes(corpus, self.hidden, len(self.place.taps))
            much = f"{size / 2**30:.2f} GiB on disk, too much"
            self.listener.note(f"the target's states would take {much}: computed at each step")
            return False
        self.listener.note(f"the target's states are computed once and kept on disk: {there}")
        return True

    def while_answering(
        self, settings: TrainerSettings, longest: TokenCorpus
    ) -> FeatureCache | None:
        """Return the cache for the states of answers as they are computed, None without one.

        There must be room for texts as long as the `longest`.
        """
        if not self._may(settings, longest):
            return None
        try:
            size = cache_bytes(longest, self.hidden, len(self.place.taps))
            check_cache_space(self.place.folder, size)
        except SpecrunError:
            return None
        return opened_cache(self.place)

    def room(self, corpus: TokenCorpus) -> str:
        """Return how much is kept, as a text; raise SpecrunError if the disk is too small."""
        size = cache_bytes(corpus, self.hidden, len(self.place.taps))
        missing = self.place.missing_bytes(corpus, self.hidden)
        # Before hours of evaluation, not when the disk is full.
        check_cache_space(self.place.folder, missing)
        there = "" if missing == size else f", of which {(size - missing) / 2**20:,.1f} are there"
        return f"{size / 2**20:,.1f} MiB in {self.place.root}{there}"

    def filled(
        self, corpus: TokenCorpus, source: FeatureSource, device: torch.device
    ) -> CachedFeatures:
        """Compute the states that are missing on disk, and return all of them."""

        def tell(done: int, total: int) -> None:
            self.listener.stage("computing the target's states", done, total)

        return fill_cache(self.place, corpus, source, device, tell)

    def remove(self, source: FeatureSource | None) -> None:
        """Delete the states that the run or its earlier attempts kept; a named folder stays."""
        if self.named:
            return
        if isinstance(source, CachedFeatures):
            source.close()
        remove_caches(self.place.root)

    @property
    def _must(self) -> bool:
        return self.policy == "yes" or self.named

    def _may(self, settings: TrainerSettings, corpus: TokenCorpus) -> bool:
        """Return whether states are kept, as far as that does not depend on the disk."""
        # States from disk are rounded to float16: a run that changed over would not go on exactly.
        if self.policy == "no" or (self.before is False and not self._must):
            return False
        return self.before is True or self.pay(settings, corpus)


def states_root(named: Path | None, state_path: Path) -> Path:
    """Return the folder of a run's caches: the named one, or one beside its checkpoint."""
    return named or state_path.parent / "features"
