"""From a docstring to its first sentence: the one fact of an entry that the demo family learns by heart."""

from __future__ import annotations

import inspect
import re

MAX_SENTENCE = 200
"""Longest sentence kept, in characters: long ones cost training tokens and rarely make a good answer."""

_SIGNATURE_LINE = re.compile(r"^[\w.]+\([^()]*(\([^()]*\)[^()]*)*\)\s*(-+>.*|[-=:].*)?$")
_OPEN_SIGNATURE = re.compile(r"^[\w.]+\([^)]*$")
_ARROW = re.compile(r"^[\w.]+\(.*?\)\s*-+>\s*(?:None\b[.\s-]*)?(.*)$")
_SENTENCE_END = re.compile(r"[.!?][\"')\]`]*(?=\s+[^a-z\s]|(?:\s\s+|\n)\S|\s*$)")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|E\.g|I\.e|No|Mr|Dr|St|resp|approx|incl|[A-Z])|\.\.)\.$")
_CODE = re.compile(r" = .*\(|^\S+( \S+)? = |^(\S+ ){0,3}-+> |^.{0,30}\[.*\]|^\w+\(\w+\) |^\w=|^\w, ")
_WORD = re.compile(r"[A-Za-z]{2,}")


def first_sentence(doc: str | None) -> str | None:
    """Return the first sentence of `doc` with its white space collapsed, or None when it has no prose.

    Signature lines, which older C docstrings begin with, are skipped; so are sentences that are longer than
    MAX_SENTENCE characters, announce a list, or are not prose at all.
    """
    text = inspect.cleandoc(doc or "")
    paragraph = _first_prose_paragraph(text)
    if paragraph is None:  # "dict() -> new empty dictionary" is all that some C docstrings have
        arrow = _ARROW.match(text.partition("\n")[0])
        paragraph = arrow.group(1) if arrow else ""
    sentence = " ".join(_cut(paragraph).split())
    return sentence if _is_prose(sentence) else None


def _first_prose_paragraph(text: str) -> str | None:
    """The first paragraph that is left after signatures are taken off, its lines joined."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.strip().splitlines() if set(line.strip()) - set("=-~*#")]
        lines = _without_signatures(lines)
        for index, line in enumerate(lines):
            if line.lstrip().startswith((">>>", "* ", "- ", ":param", "@")):
                lines = lines[:index]
                break
        if lines:
            return "\n".join(line.strip() for line in lines)
    return None


def _without_signatures(lines: list[str]) -> list[str]:
    """Drop leading signature lines ("f(x) -> y") and their continuations; keep a described result."""
    if not lines:
        return []
    arrow = _ARROW.match(lines[0])
    if arrow and len(_WORD.findall(arrow.group(1))) >= 5 and arrow.group(1)[0].isalpha():
        return [arrow.group(1), *lines[1:]]
    if _OPEN_SIGNATURE.match(lines[0]) and "->" in " ".join(lines):
        return []  # a signature that runs over several lines
    rest = list(lines)
    while rest and (_SIGNATURE_LINE.match(rest[0].strip()) or (len(rest) < len(lines) and rest[0][0].isspace())):
        rest.pop(0)
    return rest


def _cut(paragraph: str) -> str:
    """The paragraph up to its first real end of sentence."""
    for match in _SENTENCE_END.finditer(paragraph):
        head = paragraph[: match.end()]
        if not _ABBREVIATION.search(head.rstrip("\"')]`")) or match.end() == len(paragraph):
            return head
    return paragraph


def _is_prose(sentence: str) -> bool:
    """Whether a sentence can stand alone as an answer."""
    if not 8 <= len(sentence) <= MAX_SENTENCE or len(sentence.split()) < 2:
        return False
    if _CODE.search(sentence):
        return False
    if sentence.endswith((":", ",", "...")) or not sentence.isprintable():
        return False
    return sentence[0].isalpha() or sentence[0] in "\"'`*(_"
