"""Distributions of the next token: from a row of logits by samplers and a grammar, and draws.

A `Law` is a distribution over tokens. This room reads rows of logits and does not depend on trees.
"""

from specrun.runtime.laws.law import Law
from specrun.runtime.laws.noise import NoiseSource, SeededNoise
from specrun.runtime.laws.sampling import (
    DEFAULT_ORDER,
    RANDOM_SEED,
    SETTINGS,
    SamplingParams,
    Setting,
    random_if_unset,
    read_sampler_letters,
    read_samplers,
    unknown_name,
)
from specrun.runtime.laws.transform import Logits, transformed_law
