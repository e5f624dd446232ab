"""States of a run's target: computed anew at each step, or once and kept on disk."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from specrun.bindings.errors import SpecrunError
from specrun.train.data.corpus import TokenCorpus
from specrun.train.target.states import FeatureCache, FeatureSource, remove_caches
from specrun.train.trainer.learner import RunListener
from specrun.train.trainer.settings import TrainerSettings

CachePolicy = Literal["auto", "yes", "no"]

CACHED = "cached states"
"""Of a run's identity: states from disk are float16, so that losses of other runs differ."""


@dataclass(frozen=True, slots=True)
class RunStates:
    """The choice of a run between computing states and keeping them in a `cache`.

    `policy` and a `named` folder are the user's choice. `from_file`: llama.cpp computes the states,
    `before`: an interrupted run kept them; None: nothing is resumed.
    """

    cache: FeatureCache
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
            much = f"{self.cache.bytes_of(corpus) / 2**30:.2f} GiB on disk, too much"
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
            self.cache.require_space(self.cache.bytes_of(longest))
        except SpecrunError:
            return None
        return self.cache.open()

    def room(self, corpus: TokenCorpus) -> str:
        """Return how much is kept, as a text; raise SpecrunError if the disk is too small."""
        size, missing = self.cache.bytes_of(corpus), self.cache.missing_bytes(corpus)
        # Before hours of evaluation, not when the disk is full.
        self.cache.require_space(missing)
        there = "" if missing == size else f", of which {(size - missing) / 2**20:,.1f} are there"
        return f"{size / 2**20:,.1f} MiB in {self.cache.root}{there}"

    def filled(
        self, corpus: TokenCorpus, source: FeatureSource, device: torch.device
    ) -> FeatureCache:
        """Compute the states that are missing on disk, and return all of them."""
        tell = functools.partial(self.listener.stage, "computing the target's states")
        self.cache.fill(corpus, source, device, tell)
        return self.cache

    def remove(self) -> None:
        """Delete the states that the run or its earlier attempts kept; a named folder stays."""
        self.cache.close()
        if not self.named:
            remove_caches(self.cache.root)

    @property
    def _must(self) -> bool:
        return self.policy == "yes" or self.named

    def _may(self, settings: TrainerSettings, corpus: TokenCorpus) -> bool:
        """Return whether states are kept, as far as that does not depend on the disk."""
        # States from disk are rounded to float16: a run that changed over would not go on exactly.
        if self.policy == "no" or (self.before is False and not self._must):
            return False
        return self.before is True or self.pay(settings, corpus)
