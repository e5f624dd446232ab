"""N-gram laws: smoothed counts that are drawn from (Leviathan et al. 2023, bigram drafters)."""

from specrun.runtime.drafters.ngram.drafter import NgramDrafter, transformed, without_penalties
from specrun.runtime.drafters.ngram.smoothing import NgramLaw
from specrun.runtime.drafters.ngram.text_counts import TextCounts
