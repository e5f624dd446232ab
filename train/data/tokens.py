"""A target's tokens: documents to token ids, with marks of the tokens to learn."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import (
    FileMissingError,
    MissingPackageError,
    ModelError,
    TemplateError,
    UnsupportedModelError,
)
from specrun.bindings.models.model import Model
from specrun.runtime.chat import (
    ChatTemplate,
    Message,
    chat_tokens,
    content_text,
    fitted_messages,
    template_of,
)
from specrun.train.data.documents import Answered, Chat, Document, PlainText

# == Documents to tokens; a folder's tokenizer =====================================================
#
# Those of a GGUF file are in `file_tokens`.


_TEXT_PIECE = 1 << 18  # characters: tokenizers slow down on longer texts


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Token ids [n] and, for each, whether it is learnt: it is the model's, not the user's."""

    ids: npt.NDArray[np.int32]
    learnt: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, ids: Sequence[int], n_given: int) -> TokenSequence:
        """Return ids of which all but the first `n_given` are to be learnt."""
        return cls(np.asarray(ids, np.int32), np.arange(len(ids)) >= n_given)

    def __len__(self) -> int:
        return len(self.ids)


def require_folder(folder: Path) -> Path:
    """Return `folder` if it looks like a Hugging Face model; raises FileMissingError otherwise."""
    if not folder.is_dir():
        raise FileMissingError(
            f"{folder} is not a folder: give a Hugging Face model's, with config.json and weights"
        )
    if not (folder / "config.json").is_file():
        raise FileMissingError(f"{folder} has no config.json: give a Hugging Face model's folder")
    return folder


def first_line(error: BaseException) -> str:
    """Return the beginning of a library's error message, its type if there is no message."""
    lines = (line for line in str(error).splitlines() if line.strip())
    return next(lines, type(error).__name__)[:200]


class TargetTokens(ABC):
    """A target's tokenizer and chat template, of the folder or file `path`.

    `template` is its chat template, `eos` the token that ends a text, and `_bos` the one that it
    puts before every text, each None if there is none.
    """

    path: Path
    template: ChatTemplate | None
    eos: int | None
    _bos: int | None

    @abstractmethod
    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""

    @abstractmethod
    def _plain(self, text: str) -> list[int]:
        """Return the tokens of a text, without bos."""

    @abstractmethod
    def _asked(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens after which the model would answer a conversation."""

    @abstractmethod
    def _placed(self, messages: Sequence[Message], text: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a whole conversation, whose `text` the template has rendered.

        The second list holds the character of the text at which each begins; -1 is before it.
        """

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer, as far as the vocabulary has them."""
        return frozenset() if self.eos is None else frozenset({self.eos})

    def encode(self, document: Document) -> TokenSequence:
        """Return the tokens of a document as the runtime would see them, uncut.

        Raises TemplateError, with the document's place in its file, if the template refuses it.
        """
        if isinstance(document, PlainText):
            return TokenSequence.of(self.tokenize(document.text), 0)
        if isinstance(document, Chat) or self.template is not None:
            with _told_where(document):
                return self._chat(_messages(document))
        prompt = self.tokenize(document.prompt)
        answer = self._plain(document.answer or "")
        answer += [self.eos] if document.answer is not None and self.eos is not None else []
        return TokenSequence.of(prompt + answer, len(prompt))

    def prompt(self, document: Document) -> list[int] | None:
        """Return the tokens after which the model would answer, None for texts without a question.

        Of a chat it is everything before the last answer. Raises as `encode`.
        """
        if isinstance(document, PlainText):
            return None
        if isinstance(document, Answered) and self.template is None:
            return self.tokenize(document.prompt)
        messages = _messages(document)
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        with _told_where(document):
            return self._asked(messages) if messages else None

    def opening(self) -> list[int]:
        """Return the tokens before a user's first message, from which a model writes one itself.

        Raises TemplateError without a chat template, or if it does not show the message.
        """
        template, content = self._template(), "What is the time?"
        messages = fitted_messages(template, [{"role": "user", "content": content}])
        text = template.render(messages, add_generation_prompt=False)
        at = text.find(content)
        if at < 0:
            raise TemplateError(f"the chat template of {self.path} does not show messages of users")
        ids, starts = self._placed(messages, text)
        return [token for token, start in zip(ids, starts, strict=True) if start < at]

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, with bos if the model adds one."""
        pieces = [text[start : start + _TEXT_PIECE] for start in range(0, len(text), _TEXT_PIECE)]
        return self._with_bos([token for piece in pieces for token in self._plain(piece)])

    def _chat(self, messages: Sequence[Message]) -> TokenSequence:
        template = self._template()
        messages = fitted_messages(template, messages)
        text = template.render(messages, add_generation_prompt=False)
        spans = _answer_spans(template, messages, text)
        ids, starts = self._placed(messages, text)
        learnt = [any(low <= at < high for low, high in spans) for at in starts]
        return TokenSequence(np.asarray(ids, np.int32), np.asarray(learnt, np.bool_))

    def _template(self) -> ChatTemplate:
        if self.template is None:
            raise TemplateError(
                f"{self.path} has no chat template, and the data are chats: give texts or prompts"
            )
        return self.template

    def _with_bos(self, ids: list[int]) -> list[int]:
        return ids if self._bos is None or ids[:1] == [self._bos] else [self._bos, *ids]


class TargetTokenizer(TargetTokens):
    """A Hugging Face folder's tokenizer and chat template; nothing is downloaded or executed."""

    def __init__(self, folder: Path) -> None:
        self.path = require_folder(folder)
        self._tokenizer = _load_tokenizer(folder)
        source = _template_text(folder, self._tokenizer)
        bos, first = self._tokenizer.bos_token_id, list(self._tokenizer("a")["input_ids"])[:1]
        self._bos = bos if first == [bos] else None  # if it adds one
        self.eos = self._tokenizer.eos_token_id
        names = {"bos": self._tokenizer.bos_token or "", "eos": self._tokenizer.eos_token or ""}
        self.template = ChatTemplate(source, **names) if source else None

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(ids)))

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _asked(self, messages: Sequence[Message]) -> list[int]:
        template = self._template()
        text = template.render(fitted_messages(template, messages))
        return self._with_bos(self._plain(text))

    def _placed(self, messages: Sequence[Message], text: str) -> tuple[list[int], list[int]]:
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = self._with_bos(list(found["input_ids"]))
        starts = [start for start, _ in found["offset_mapping"]]
        return ids, [-1] * (len(ids) - len(starts)) + starts


def _messages(document: Answered | Chat) -> Sequence[Message]:
    """Return a document as a conversation."""
    if isinstance(document, Chat):
        return document.messages
    asked = {"role": "user", "content": document.prompt}
    if document.answer is None:
        return [asked]
    return [asked, {"role": "assistant", "content": document.answer}]


@contextmanager
def _told_where(document: Document) -> Iterator[None]:
    """Name the document in a template's error."""
    try:
        yield
    except TemplateError as error:
        place = f"{document.origin}: " if document.origin else ""
        raise TemplateError(f"{place}{error}") from error


def _answer_spans(
    template: ChatTemplate, messages: Sequence[Message], text: str
) -> list[tuple[int, int]]:
    """Return the spans of the assistant's own tokens in `text`, with their end tokens."""
    spans: list[tuple[int, int]] = []
    cursor = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        span = _added_span(template, messages, index, text)
        if span is None:  # templates that show earlier answers in another form
            answer = content_text(message["content"] or "").strip()
            start = text.find(answer, cursor)
            if start < 0 or not answer:
                continue
            span = (start, start + len(answer) + 1)
        spans.append(span)
        cursor = span[1]
    return spans


def _added_span(
    template: ChatTemplate, messages: Sequence[Message], index: int, text: str
) -> tuple[int, int] | None:
    """Return the span that an answer adds to the text before it; None if the text differs."""
    try:
        before = template.render(messages[:index]) if index else ""
        whole = template.render(messages[: index + 1], add_generation_prompt=False)
    except TemplateError:  # it takes no such part of a conversation
        return None
    is_added = whole.startswith(before) and text.startswith(whole)
    return (len(before), len(whole)) if is_added else None


def _load_tokenizer(folder: Path) -> Any:  # noqa: ANN401 - transformers is untyped
    try:
        import transformers
    except ImportError as error:
        raise MissingPackageError("training", "transformers", "train") from error
    auto: Any = transformers.AutoTokenizer
    try:
        safely = {"local_files_only": True, "trust_remote_code": False}
        tokenizer = auto.from_pretrained(str(folder), **safely)
    except Exception as error:  # whatever its code for this one kind may raise
        raise ModelError(f"the tokens of {folder} cannot be read: {first_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"{folder} has no tokenizer.json: save it with transformers' fast tokenizer"
        )
    return tokenizer


def _template_text(folder: Path, tokenizer: Any) -> str | None:  # noqa: ANN401 - transformers is untyped
    given = tokenizer.chat_template
    if isinstance(given, dict):
        given = given.get("default")
    if isinstance(given, str) and given.strip():
        return given
    file = folder / "chat_template.json"
    if not file.is_file():
        return None
    try:
        text = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except (ValueError, KeyError, TypeError) as error:
        raise TemplateError(f"{file} holds no chat template") from error
    return str(text)


# == The tokens of a GGUF target: its own vocabulary and chat template =============================
#
# llama.cpp does not return the character at which a token begins. It follows from the bytes of
# tokens; if those are not the text, an answer's tokens cannot be separated from its prompt's.


class FileTokens(TargetTokens):
    """A GGUF file's vocabulary and chat template; its weights are not read.

    Raises UnsupportedModelError if llama.cpp does not support the file's vocabulary,
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
        """Return the bytes of a token in the text, for a control token its name."""
        return self.vocabulary.piece(token) or self._label(token).encode()

    def _label(self, token: int) -> str:
        return self.vocabulary.text(token)


def _starts(pieces: Sequence[bytes], text: str) -> list[int] | None:
    """Return the character of `text` at which each piece begins; None if they are not its own.

    Some vocabularies put a space before a text, and leave out spaces behind control tokens.
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
