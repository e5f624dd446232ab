"""A checkpoint's tokenizer to the vocabulary of a GGUF file."""

from specrun.convert.tokenizer.hf_tokenizer import read_vocabulary
from specrun.convert.tokenizer.pre_tokenizer import NAME_BY_HASH, NAMES
from specrun.convert.tokenizer.sentencepiece_model import parse_sentencepiece
from specrun.convert.tokenizer.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    BytePairVocabulary,
    ScoredVocabulary,
)
