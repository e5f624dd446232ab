"""The vocabularies of target and drafter compared: a drafter speaks in its target's ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.errors import PairError
from specrun.bindings.models.model import Model
from specrun.convert.checkpoint import open_checkpoint
from specrun.convert.tokenizer import UNUSED, read_vocabulary

# As for drafting: embeddings are rounded up to different numbers of rows within a family.
_MAX_SIZE_DIFFERENCE = 128


@dataclass(frozen=True, slots=True)
class ModelVocabulary:
    """A model's vocabulary by id; `is_used` says whether an id stands for a token at all."""

    path: Path
    size: int
    text: Callable[[int], str]
    is_used: Callable[[int], bool]


def folder_vocabulary(folder: Path) -> ModelVocabulary:
    """Return the vocabulary of a Hugging Face folder, as a GGUF file of it would state them.

    Raises FileMissingError, MalformedFileError or UnsupportedModelError, as converting the folder
    would.
    """
    vocabulary = read_vocabulary(open_checkpoint(folder))
    tokens, types = vocabulary.tokens, vocabulary.types
    return ModelVocabulary(
        folder, len(tokens), lambda token: tokens[token], lambda token: types[token] != UNUSED
    )


def gguf_vocabulary(model: Model) -> ModelVocabulary:
    """Return the vocabulary of an open GGUF model."""
    return ModelVocabulary(
        model.path, model.vocabulary.size, model.vocabulary.text, lambda _token: True
    )


def check_same_vocabulary(target: ModelVocabulary, draft: ModelVocabulary) -> int:
    """Return how many ids both models have; raise PairError with the first token that differs.

    Ids that stand for no token in one of them may be anything in the other, and one may have up to
    128 more of them.
    """
    pair = f"{draft.path} cannot draft for {target.path}"
    n_shared = min(target.size, draft.size)
    for token in range(n_shared):
        ours, theirs = target.text(token), draft.text(token)
        if ours != theirs and target.is_used(token) and draft.is_used(token):
            raise PairError(
                f"{pair}: token {token} is {ours!r} for the target and {theirs!r} for the drafter. "
                "Use a drafter of the same model family"
            )
    if abs(target.size - draft.size) > _MAX_SIZE_DIFFERENCE:
        raise PairError(
            f"{pair}: the target has {target.size} tokens, the drafter {draft.size}; "
            f"at most {_MAX_SIZE_DIFFERENCE} may be missing. Use a drafter of the same model family"
        )
    return n_shared
