"""Checks that a drafter fits a target: llama.cpp's rules, with the first difference named."""

from __future__ import annotations

from specrun.bindings.errors import PairError, UnsupportedModelError
from specrun.bindings.models import Model

# The constants of llama.cpp's speculative decoding: vocabularies may differ by this many tokens,
# and the first ids (unknown, bos, eos, padding) may have other texts.
_MAX_SIZE_DIFFERENCE = 128
_FIRST_COMPARED_TOKEN = 5
_CHAINS = "mtp, draft(small.gguf, n=5), jacobi or prompt-lookup(branches=1)"


def check_draftable(target: Model) -> None:
    """Raise `UnsupportedModelError` if trees of drafts for this target could not be rolled back."""
    check_verifiable(target, "what this command drafts", max_leaves=2)


def check_verifiable(target: Model, name: str, max_leaves: int) -> None:
    """Raise `UnsupportedModelError` if it cannot verify trees of so many leaves, by `name`."""
    if max_leaves > 1 and not target.can_branch:
        kind = f"{target.path} is a hybrid model ({target.architecture})"
        problem = f"it can verify one chain of drafts, and {name} may branch"
        raise UnsupportedModelError(f"{kind}: {problem}. Use {_CHAINS}")


def check_pair(target: Model, draft: Model) -> None:
    """Raise `PairError` for another vocabulary, `UnsupportedModelError` if it cannot draft."""
    check_can_draft(draft)
    check_vocabularies(target, draft)


def check_can_draft(draft: Model) -> None:
    """Raise `UnsupportedModelError` for a model whose cache cannot drop tokens."""
    if not draft.can_branch:
        kind = f"{draft.path} is a recurrent or hybrid model ({draft.architecture})"
        raise UnsupportedModelError(f"{kind}: it cannot take back rejected drafts")


def check_vocabularies(target: Model, draft: Model) -> None:
    """Raise `PairError` unless a drafter uses the target's vocabulary."""
    ours, theirs = target.vocabulary, draft.vocabulary
    pair = f"{draft.path} cannot draft for {target.path}"
    if ours.kind != theirs.kind:
        kinds = f"the target's vocabulary is of kind {ours.kind}, the drafter's {theirs.kind}"
        raise PairError(f"{pair}: {kinds}")
    for name in ("bos", "eos"):
        a, b = getattr(ours, f"adds_{name}"), getattr(theirs, f"adds_{name}")
        if a != b:
            which = f"(target {a}, drafter {b})"
            raise PairError(f"{pair}: one adds a {name} token and the other does not {which}")
        if a and getattr(ours, name) != getattr(theirs, name):
            ids = f"target {getattr(ours, name)}, drafter {getattr(theirs, name)}"
            raise PairError(f"{pair}: their {name} tokens differ ({ids})")
    advice = "Use a drafter of the same model family"
    if abs(ours.size - theirs.size) > _MAX_SIZE_DIFFERENCE:
        sizes = f"the target has {ours.size} tokens, the drafter {theirs.size}"
        limit = f"at most {_MAX_SIZE_DIFFERENCE} may be missing"
        raise PairError(f"{pair}: {sizes}; {limit}. {advice}")
    token = ours.first_difference(theirs, _FIRST_COMPARED_TOKEN)
    if token is not None:
        texts = f"{ours.text(token)!r} for the target, {theirs.text(token)!r} for the drafter"
        raise PairError(f"{pair}: token {token} is {texts}. {advice}")


def check_blocks(target: Model, blocks: Model) -> None:
    """Raise `PairError` unless a file's NextN blocks were made for a model like the target."""
    pair = f"{blocks.path} cannot draft for {target.path}"
    if blocks.architecture != target.architecture:
        kinds = f"made for {blocks.architecture}, and the target is a {target.architecture} model"
        raise PairError(f"{pair}: it is {kinds}")
    read, given = blocks.n_embd_out, target.n_embd_out
    if read != given:
        widths = f"states of {read} numbers, and the target's have {given}"
        raise PairError(f"{pair}: its NextN blocks read {widths}")
    check_vocabularies(target, blocks)
    predicted, known = blocks.vocabulary.size, target.vocabulary.size
    if predicted != known:
        raise PairError(f"{pair}: it predicts {predicted} tokens, and the target has {known}")


def check_same_vocabulary(first: Model, other: Model) -> None:
    """Raise `PairError` with the first difference unless both models have one vocabulary."""
    ours, theirs = first.vocabulary, other.vocabulary
    pair = f"{first.path} and {other.path} cannot be compared"
    if ours.kind != theirs.kind:
        raise PairError(f"{pair}: their vocabularies are of kind {ours.kind} and {theirs.kind}")
    token = ours.first_difference(theirs, 0)
    if token is not None:
        texts = f"{ours.text(token)!r} in the first, {theirs.text(token)!r} in the other"
        raise PairError(f"{pair}: token {token} is {texts}")
    if ours.size != theirs.size:
        raise PairError(f"{pair}: the first has {ours.size} tokens, the other {theirs.size}")
