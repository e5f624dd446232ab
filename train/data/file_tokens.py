"""The tokens of a GGUF target: its own vocabulary and chat template, as the runtime reads them.

llama.cpp does not say at which character a token begins. It follows from the bytes that tokens
stand for, and where those are not the text, nobody can tell an answer's tokens from its prompt's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specrun.bindings.errors import UnsupportedModelError
from specrun.bindings.models.model import Model
from specrun.runtime.chat import Message, chat_tokens, template_of
from specrun.train.data.target_tokens import TargetTokens


class FileTokens(TargetTokens):
    """A GGUF file's vocabulary and chat template; its weights are not read.

    Raises UnsupportedModelError where the file has no vocabulary that llama.cpp knows,
    FileMissingError, MalformedFileError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._model = Model(path, vocab_only=True)  # the vocabulary lives as long as its model
        self.vocabulary = self._model.vocabulary
        self._bos = self.vocabulary.bos if self.vocabulary.adds_bos else None
        self.eos = self.vocabulary.eos
        source = self._model.chat_template
        self.template = template_of(source, self.vocabulary) if source else None

    @property
    def end_ids(self) -> frozenset[int]:
        """All tokens that end an answer for the runtime."""
        return self.vocabulary.end_of_generation

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, control tokens by name."""
        return b"".join(map(self._bytes, ids)).decode("utf-8", "replace")

    def _plain(self, text: str) -> list[int]:
        return self.vocabulary.tokenize(text, add_special=False)

    def _asked(self, messages: Sequence[Message]) -> list[int]:
        return chat_tokens(self._template(), self.vocabulary, messages)

    def _placed(self, messages: Sequence[Message], text: str) -> tuple[list[int], list[int]]:
        template = self._template()
        ids = chat_tokens(template, self.vocabulary, messages, add_generation_prompt=False)
        given = int(self._bos is not None and not text.startswith(self._label(self._bos)))
        starts = _starts([self._bytes(token) for token in ids[given:]], text)
        if starts is None:
            raise UnsupportedModelError(
                f"{self.path} ({self.vocabulary.kind}) changes a text that it reads, so that the "
                "answers of chats cannot be marked: let the target answer (--answers target)"
            )
        return ids, [-1] * given + starts

    def _bytes(self, token: int) -> bytes:
        """Return what stands in the text for a token, a control token's name for itself."""
        return self.vocabulary.piece(token) or self._label(token).encode()

    def _label(self, token: int) -> str:
        return self.vocabulary.text(token)


def _starts(pieces: Sequence[bytes], text: str) -> list[int] | None:
    """Return the character of `text` at which each piece begins; None where they are not its own.

    Some vocabularies put a space before what they read, and leave out spaces behind control tokens.
    """
    data = text.encode()
    starts, end = [], 0
    for piece in pieces:
        wanted = piece if data.startswith(piece, end) else piece.removeprefix(b" ")
        at = data.find(wanted, end)
        if at < 0 or data[end:at].strip():
            return None
        starts.append(at)
        end = at + len(wanted)
    if data[end:].strip():
        return None
    return _characters(data, starts)


def _characters(data: bytes, places: Sequence[int]) -> list[int]:
    """Return how many characters begin before each byte of `places`, which rise.

    A piece may begin within a character: it belongs to the one that it ends.
    """
    found, seen, characters = [], 0, 0
    for place in places:
        characters += sum(byte & 0xC0 != 0x80 for byte in data[seen:place])
        seen = place
        inside = place < len(data) and data[place] & 0xC0 == 0x80
        found.append(characters - inside)
    return found
