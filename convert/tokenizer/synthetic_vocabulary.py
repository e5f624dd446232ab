"""Byte-level BPE vocabularies of any size without a corpus, for models with random weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, product

from specrun.bindings.errors import OptionError
from specrun.convert.tokenizer.vocabulary import CONTROL, NORMAL, BytePairVocabulary, byte_tokens

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# What a vocabulary too small for every byte keeps first: enough to write words and lines.
_PREFERRED = " \n" + _LETTERS + ".,?!'-" + "0123456789" + _LETTERS.upper()


def synthetic_vocabulary(
    size: int,
    *,
    controls: Sequence[str] = ("<|end|>",),
    eos: str = "<|end|>",
    chat_template: str | None = None,
) -> BytePairVocabulary:
    """Return a vocabulary of exactly `size` tokens, the control tokens `controls` last.

    With room for all 256 bytes, token i < 256 is byte i, and made-up tokens of two letters and more
    follow with the merges that build them. A smaller one has the space, the newline, letters and so
    on, as far as there is room; text outside it is left out by the tokenizer. Raises OptionError
    for sizes without room for one token, and if `eos` is not one of `controls`.
    """
    if eos not in controls:
        raise OptionError(f"the end token {eos!r} is not among the controls {', '.join(controls)}")
    if len(set(controls)) != len(controls):
        raise OptionError(f"a control token is there twice: {', '.join(controls)}")
    room = size - len(controls)
    if room < 1:
        raise OptionError(
            f"a vocabulary of {size} tokens has no room beside {len(controls)} control tokens"
        )
    end = room + list(controls).index(eos)
    tokens, merges = _with_all_bytes(room) if room >= 256 else (_few_bytes(room), [])
    return BytePairVocabulary(
        tokens=(*tokens, *controls),
        types=(NORMAL,) * room + (CONTROL,) * len(controls),
        merges=tuple(merges),
        # Where a file names no bos, llama.cpp would take token 11; as in GPT-2, eos serves as both.
        special_ids={"bos": end, "eos": end},
        chat_template=chat_template,
    )


def _few_bytes(room: int) -> list[str]:
    table = byte_tokens()
    preferred = list(_PREFERRED.encode())
    rest = (byte for byte in range(256) if byte not in preferred)
    return [table[byte] for byte in islice(chain(preferred, rest), room)]


def _with_all_bytes(room: int) -> tuple[list[str], list[str]]:
    pairs = list(islice(_merges(byte_tokens()[ord(" ")]), room - 256))
    if len(pairs) < room - 256:
        raise OptionError(f"a synthetic vocabulary has at most {len(pairs) + 256}, not {room}")
    tokens = [*byte_tokens(), *(left + right for left, right in pairs)]
    return tokens, [f"{left} {right}" for left, right in pairs]


def _merges(space: str) -> Iterator[tuple[str, str]]:
    """Yield all merges, each of two tokens that are there before it; short tokens come first."""
    twos = [a + b for a, b in product(_LETTERS, repeat=2)]
    yield from product(_LETTERS, _LETTERS)
    yield from product([space], _LETTERS)
    yield from product([space], twos)
    yield from product(twos, _LETTERS)
    yield from product([space], (two + letter for two, letter in product(twos, _LETTERS)))
    yield from product(twos, twos)
