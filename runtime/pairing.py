"""Whether a draft model fits a target: llama.cpp's rule, with the first difference named."""

from __future__ import annotations

from specrun.bindings.errors import PairError, UnsupportedModelError
from specrun.bindings.model import Model

__all__ = ["check_draftable", "check_pair", "check_same_words"]

# The constants of llama.cpp's speculative decoding: vocabularies may differ by this many words, and the
# first ids (unknown, bos, eos, padding) may have other texts.
_MAX_SIZE_DIFFERENCE = 128
_FIRST_COMPARED_TOKEN = 5


def check_draftable(target: Model) -> None:
    """Raise `UnsupportedModelError` if drafts for this target could not be rolled back."""
    if not target.can_branch:
        raise UnsupportedModelError(
            f"{target.path} is a recurrent or hybrid model ({target.architecture}): its state cannot drop rejected "
            "drafts, so it runs without a drafter only (--drafter none)"
        )


def check_pair(target: Model, draft: Model) -> None:
    """Raise `PairError` unless the draft model's words are the target's, `UnsupportedModelError` if it cannot draft."""
    if not draft.can_branch:
        raise UnsupportedModelError(
            f"{draft.path} is a recurrent or hybrid model ({draft.architecture}): it cannot take back rejected drafts"
        )
    ours, theirs = target.vocabulary, draft.vocabulary
    pair = f"{draft.path} cannot draft for {target.path}"
    if ours.kind != theirs.kind:
        raise PairError(f"{pair}: the target's vocabulary is of kind {ours.kind}, the drafter's {theirs.kind}")
    for name, adds, special in (("bos", "adds_bos", "bos"), ("eos", "adds_eos", "eos")):
        a, b = getattr(ours, adds), getattr(theirs, adds)
        if a != b:
            raise PairError(f"{pair}: one adds a {name} token and the other does not (target {a}, drafter {b})")
        if a and getattr(ours, special) != getattr(theirs, special):
            ids = f"target {getattr(ours, special)}, drafter {getattr(theirs, special)}"
            raise PairError(f"{pair}: their {name} tokens differ ({ids})")
    if abs(ours.size - theirs.size) > _MAX_SIZE_DIFFERENCE:
        raise PairError(
            f"{pair}: the target has {ours.size} words, the drafter {theirs.size}; "
            f"at most {_MAX_SIZE_DIFFERENCE} may be missing. Use a drafter of the same model family"
        )
    token = ours.first_difference(theirs, _FIRST_COMPARED_TOKEN)
    if token is not None:
        texts = f"{ours.text(token)!r} for the target, {theirs.text(token)!r} for the drafter"
        raise PairError(f"{pair}: token {token} is {texts}. Use a drafter of the same model family")


def check_same_words(one: Model, other: Model) -> None:
    """Raise `PairError` unless both models have the same vocabulary, word for word: the first difference is named."""
    ours, theirs = one.vocabulary, other.vocabulary
    pair = f"{one.path} and {other.path} cannot be compared"
    if ours.kind != theirs.kind:
        raise PairError(f"{pair}: their vocabularies are of kind {ours.kind} and {theirs.kind}")
    token = ours.first_difference(theirs, 0)
    if token is not None:
        raise PairError(
            f"{pair}: token {token} is {ours.text(token)!r} in the first, {theirs.text(token)!r} in the other"
        )
    if ours.size != theirs.size:
        raise PairError(f"{pair}: the first has {ours.size} words, the other {theirs.size}")
