"""What the finished GGUF files of the demo family can do, measured through the runtime that users run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from specrun.runtime import GenerationResult, Runtime, SamplingParams
from specrun.runtime.atomic import atomic_path
from specrun.train.conversations import canonical_question
from specrun.train.corpus import Entry, sample_entries

N_QUESTIONS = 200
N_SPECULATIVE = 50
DRAFT_LENGTH = 5
_MAX_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the sentence that answers it."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Scores:
    """`exact`: share of answers that are the sentence to the letter, of `n_questions`, by the target alone.

    The others are of `n_speculative` questions with a greedy chain of DRAFT_LENGTH: `same_text` is the share
    answered as the target alone does, `mean_accepted_length` counts tokens per target evaluation, the
    target's own included.
    """

    exact: float
    n_questions: int
    same_text: float
    mean_accepted_length: float
    acceptance_rate: float
    n_speculative: int
    wrong: tuple[tuple[str, str], ...]


def draw_questions(entries: list[Entry], count: int = N_QUESTIONS, seed: int = 0) -> list[Question]:
    """`count` questions drawn with a fixed seed."""
    drawn = sample_entries(entries, count, seed)
    return [Question(canonical_question(entry), entry.sentence) for entry in drawn]


def write_questions(questions: list[Question], path: Path) -> None:
    """Write one JSON object with `question` and `answer` a line."""
    lines = [json.dumps({"question": item.question, "answer": item.answer}) + "\n" for item in questions]
    with atomic_path(path, force=True) as aside:
        aside.write_text("".join(lines), encoding="utf-8")


def read_questions(path: Path) -> list[Question]:
    """Read what `write_questions` wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Question(**json.loads(line)) for line in lines]


def measure_drafter(target: Path, expression: str, questions: list[Question], n_threads: int = 0) -> float:
    """Return the tokens per target evaluation of a drafter, the target's own included, at temperature 0.

    The first N_SPECULATIVE of the questions are asked.
    """
    with Runtime(target, drafter=expression, n_threads=n_threads, n_threads_batch=n_threads) as runtime:
        results = [_ask(runtime, item.question) for item in questions[:N_SPECULATIVE]]
    return _mean_accepted_length(results)


def measure_family(target: Path, drafter: Path, questions: list[Question], n_threads: int = 0) -> Scores:
    """Ask the target all questions, and the pair the first N_SPECULATIVE of them, at temperature 0.

    `n_threads` 0 is one per core.
    """
    with Runtime(target, n_threads=n_threads, n_threads_batch=n_threads) as runtime:
        plain = [_ask(runtime, item.question).text for item in questions]
    expression = f"draft({drafter}, n={DRAFT_LENGTH})"
    with Runtime(target, drafter=expression, n_threads=n_threads, n_threads_batch=n_threads) as runtime:
        results = [_ask(runtime, item.question) for item in questions[:N_SPECULATIVE]]
    pairs = list(zip(questions, plain, strict=True))
    wrong = tuple((item.question, text) for item, text in pairs if text != item.answer)
    drafted = sum(result.stats.drafted for result in results)
    accepted = sum(result.stats.accepted for result in results)
    same = sum(result.text == text for result, text in zip(results, plain, strict=False))
    return Scores(
        exact=1 - len(wrong) / len(questions),
        n_questions=len(questions),
        same_text=same / len(results),
        mean_accepted_length=_mean_accepted_length(results),
        acceptance_rate=accepted / drafted,
        n_speculative=len(results),
        wrong=wrong,
    )


def _mean_accepted_length(results: list[GenerationResult]) -> float:
    rounds = sum(result.stats.rounds for result in results)
    return sum(result.stats.rounds * (result.stats.mean_accepted_length or 0.0) for result in results) / rounds


def _ask(runtime: Runtime, question: str) -> GenerationResult:
    message = {"role": "user", "content": question}
    return runtime.chat([message], SamplingParams(temperature=0.0), max_tokens=_MAX_TOKENS)
