"""Examples for cascades, and the quality of answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specrun.bench.drafters.prompts import first_text, read_json_lines, read_text, spread
from specrun.bindings.errors import MissingPackageError, ModelError, OptionError
from specrun.runtime.demo import demo_questions

# == Examples: prompts with reference answers, or real text to continue ============================


_PIECE = 1200  # characters of a text, about 300 tokens
_PROMPT = 0.25  # the share of them that is given
_SHORTEST = 80


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, and the text after it. An `is_answer` is a model's right answer; other texts are
    one of many continuations, and measure by their probability alone."""

    prompt: str
    reference: str
    is_answer: bool


def demo_examples(count: int) -> tuple[Example, ...]:
    """Return `count` of the embedded demo's questions with the docstrings that answer them."""
    return tuple(spread(_of_lines(demo_questions()), count))


def read_examples(path: Path, count: int) -> tuple[Example, ...]:
    """Return at most `count` examples of a file, spread evenly over it.

    .jsonl has a "question" (or "prompt") and an "answer" (or "reference") a line. Any other file is
    text, cut at line ends into pieces, whose first quarter is the prompt.
    """
    examples = _of_lines(path) if path.suffix == ".jsonl" else _of_text(path)
    if not examples:
        raise OptionError(f"{path} is too short: a piece of text needs {_SHORTEST} characters")
    return tuple(spread(examples, count))


def _of_lines(path: Path) -> list[Example]:
    examples = []
    for record, where in read_json_lines(path):
        prompt = first_text(record, ("question", "prompt"))
        reference = first_text(record, ("answer", "reference"))
        if not (prompt and reference):
            raise ModelError(f'{where} has no "question" and "answer" that are texts')
        examples.append(Example(prompt, reference, is_answer=True))
    return examples


def _of_text(path: Path) -> list[Example]:
    pieces: list[str] = []
    for line in read_text(path).splitlines(keepends=True):
        if not pieces or len(pieces[-1]) >= _PIECE:
            pieces.append("")
        pieces[-1] += line
    examples = []
    for piece in pieces:
        # At a blank, so that no token of the prompt would have gone on.
        cut = piece.find(" ", int(_PROMPT * len(piece)))
        if len(piece) >= _SHORTEST and cut > 0:
            examples.append(Example(piece[:cut], piece[cut:], is_answer=False))
    return examples


# == Quality of answers by their references: exact match, ROUGE-2, BLEU ============================
#
# rouge-score is the program of ROUGE's paper in Python, sacrebleu the usual program of BLEU; both
# are in the extra "bench".


@dataclass(frozen=True, slots=True)
class Quality:
    """Of some answers: the share that is the reference, ROUGE-2's mean F1 (0 to 1), and BLEU.

    BLEU is sacrebleu's of the whole corpus, 0 to 100.
    """

    exact_match: float
    rouge_2: float
    bleu: float


def check_packages() -> None:
    """Raise before anything is measured if answers could not be scored."""
    for module, package in (("rouge_score", "rouge-score"), ("sacrebleu", "sacrebleu")):
        try:
            __import__(module)
        except ImportError as error:
            raise MissingPackageError("scoring answers", package, "bench") from error


def quality_of(answers: Sequence[str], references: Sequence[str]) -> Quality:
    """Score answers, each against its reference; blanks around them do not count."""
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    said = [answer.strip() for answer in answers]
    wanted = [reference.strip() for reference in references]
    pairs = list(zip(said, wanted, strict=True))
    scorer = RougeScorer(["rouge2"], use_stemmer=False)
    rouge = [scorer.score(reference, answer)["rouge2"].fmeasure for answer, reference in pairs]
    return Quality(
        exact_match=sum(answer == reference for answer, reference in pairs) / len(pairs),
        rouge_2=float(sum(rouge)) / len(pairs),
        bleu=float(sacrebleu.corpus_bleu(said, [wanted]).score),
    )
