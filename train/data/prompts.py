"""Prompts that a target is to answer: of a file, or the built-in ones."""

from __future__ import annotations

from pathlib import Path

from specrun.bindings.errors import ModelError, TemplateError
from specrun.train.data.built_in_prompts import built_in_prompts
from specrun.train.data.data_file import Answered, Document, PlainText, read_documents
from specrun.train.data.target_tokens import TargetTokens


def read_prompts(path: Path) -> list[Document]:
    """Return a file's prompts: one a line, or JSON Lines and arrays as data have them.

    Answers that the file gives are not read. Raises as `read_documents`.
    """
    found: list[Document] = []
    for document in read_documents([path], need_answers=False):
        if not isinstance(document, PlainText):
            found.append(document)
        elif document.origin == path.name:  # the file is a text
            lines = enumerate(document.text.splitlines(), 1)
            found += [
                Answered(line, None, origin=f"line {number} of {path.name}")
                for number, line in lines
                if line.strip()
            ]
    if not found:
        raise ModelError(f"{path} holds no prompts: write one a line")
    return found


def usual_prompts(count: int, tokens: TargetTokens) -> list[Document]:
    """Return `count` built-in prompts; raises TemplateError for a target that is not asked."""
    if tokens.template is None:
        raise TemplateError(
            f"{tokens.path} has no chat template, so it would not answer the built-in prompts: "
            "give texts to learn (--data), or beginnings that it is to go on with (--prompts)"
        )
    return built_in_prompts(count)
