"""Suites: questions by category, in the forms of public benchmarks, recognised by their fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bench.drafters.prompts import (
    Prompt,
    Question,
    json_lines,
    read_json,
    read_text,
    spread,
)
from specrun.bench.drafters.scores import (
    FINAL_MARK,
    FinalNumber,
    Reference,
    Tests,
    Texts,
    final_number,
)
from specrun.bindings.errors import ModelError, OptionError

OWN = "own"
"""The name of the suite that specrun has in its package."""
OWN_SUITE = Path(__file__).with_name("own_suite.jsonl")

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Form:
    """A form of records: the fields that it is known by, and the reader of one."""

    name: str
    fields: tuple[str, ...]
    read: Callable[[Record, str], Question]


def read_suite(name: str, per_category: int | None = None) -> tuple[Question, ...]:
    """Return the questions of a file, or of our own suite for the name "own".

    With `per_category`, so many of each category, spread evenly. Raises `ModelError` for a file
    that is no suite.
    """
    path = OWN_SUITE if name == OWN else Path(name)
    questions = [_question(*each, path) for each in _records(path)]
    if not questions:
        raise OptionError(f"{path} holds no questions")
    if per_category is None:
        return tuple(questions)
    kinds = dict.fromkeys(question.category for question in questions)
    groups = ([each for each in questions if each.category == kind] for kind in kinds)
    return tuple(each for group in groups for each in spread(group, per_category))


def has_programs(prompts: Sequence[Prompt]) -> bool:
    """Return whether some answers are to be programs that tests can be run on."""
    questions = [prompt for prompt in prompts if isinstance(prompt, Question)]
    return any(isinstance(each, Tests) for asked in questions for each in asked.references)


def _records(path: Path) -> list[tuple[Any, str]]:
    """Return the records of JSON lines, or of a JSON array, each with its place."""
    text = read_text(path)  # once: it may be a pipe
    if not text.lstrip().startswith("["):
        return [*json_lines(text, path)]
    records = read_json(text, str(path))
    return [(record, f"{path}, record {n}") for n, record in enumerate(records, 1)]


def _question(record: object, where: str, path: Path) -> Question:
    found = record if isinstance(record, Mapping) else {}
    for form in _FORMS:
        if all(found.get(field) is not None for field in form.fields):
            try:
                return form.read(found, _name_of(path))
            except (TypeError, ValueError, KeyError) as error:
                raise ModelError(f"{where} is not as {form.name} has it: {error}") from error
    fields = f"the fields {', '.join(map(str, found))}" if found else "no fields"
    known = "; ".join(f"{form.name} ({', '.join(form.fields)})" for form in _FORMS)
    raise ModelError(f"{where} has {fields}, which no known suite has: {known}")


def _name_of(path: Path) -> str:
    """Return the category of a file whose records name none; EAGLE's have the folder's name."""
    return path.resolve().parent.name if path.stem in ("question", "questions") else path.stem


# == The forms =====================================================================================


def _text(record: Record, field: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{field} is no text")
    return value


def _texts(record: Record, field: str) -> tuple[str, ...]:
    value = record.get(field)
    values = [value] if isinstance(value, str) else value or []
    if not isinstance(values, Sequence) or not all(isinstance(each, str) for each in values):
        raise TypeError(f"{field} is no list of texts")
    return tuple(values)


def _of_turns(record: Record, name: str) -> Question:
    turns = _texts(record, "turns")
    if not turns or not all(turn.strip() for turn in turns):
        raise ValueError("turns holds no text for every turn")
    # SPEED-Bench alone has the source of a question; its tables are by length, too.
    by_length = "src_id" in record or "difficulty" in record
    category = str(record.get("category") or name)
    given = tuple(text for text in _texts(record, "reference") if text.strip())
    return Question(category, turns, _of_references(given, len(turns)), by_length=by_length)


def _of_references(given: tuple[str, ...], n_turns: int) -> tuple[Reference | None, ...]:
    """Return the reference of each turn: several of one turn are alternatives."""
    if not given:
        return ()
    if n_turns > 1:
        return tuple(_reference((text,)) for text in given[:n_turns])
    return (_reference(given),)


def _reference(texts: tuple[str, ...]) -> Reference:
    number = final_number(texts[0]) if FINAL_MARK in texts[0] else None
    return Texts(texts) if number is None else FinalNumber(number)


def _of_human_eval(record: Record, _name: str) -> Question:
    begin, function = _text(record, "prompt"), _text(record, "entry_point")
    tests = f"{_text(record, 'test')}\n\ncheck({function})"
    asked = (
        f"Complete this function. Answer with all of its code.\n\n```python\n{begin.rstrip()}\n```"
    )
    return Question("HumanEval", (asked,), (Tests(tests, begin, function),), continued=begin)


def _of_mbpp(record: Record, _name: str) -> Question:
    asked = _text(record, "text" if "text" in record else "prompt")
    tests = "\n".join(_texts(record, "test_list"))
    if not tests:
        raise ValueError("test_list is empty")
    before = [*_texts(record, "test_setup_code"), *_texts(record, "test_imports")]
    chat = f"{asked}\n\nAnswer with Python code that passes these tests:\n\n```python\n{tests}\n```"
    reference = Tests("\n".join([*filter(None, before), tests]))
    return Question("MBPP", (chat,), (reference,), continued=f'"""\n{asked}\n{tests}\n"""\n')


def _of_gsm8k(record: Record, _name: str) -> Question:
    asked, answer = _text(record, "question"), _text(record, "answer")
    number = final_number(answer) if FINAL_MARK in answer else None
    if number is None:
        raise ValueError(f"answer has no number after {FINAL_MARK}")
    continued = f"Question: {asked}\nAnswer:"
    return Question("GSM8K", (asked,), (FinalNumber(number),), continued=continued)


def _of_alpaca(record: Record, _name: str) -> Question:
    asked = _text(record, "instruction")
    more, answers = record.get("input") or "", _texts(record, "output")
    given = f"\n\n### Input:\n{more}" if more else ""
    return Question(
        str(record.get("category") or "Alpaca"),
        (f"{asked}\n\n{more}" if more else asked,),
        _of_references(tuple(text for text in answers if text.strip()), 1),
        continued=f"### Instruction:\n{asked}{given}\n\n### Response:\n",
    )


_FORMS = (
    _Form("Spec-Bench, MT-bench, EAGLE or SPEED-Bench", ("turns",), _of_turns),
    _Form("HumanEval", ("prompt", "test", "entry_point"), _of_human_eval),
    _Form("MBPP", ("text", "test_list"), _of_mbpp),
    _Form("sanitized MBPP", ("prompt", "test_list"), _of_mbpp),
    _Form("GSM8K", ("question", "answer"), _of_gsm8k),
    _Form("Alpaca", ("instruction",), _of_alpaca),
)
