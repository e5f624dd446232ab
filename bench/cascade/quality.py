"""Quality of answers beside their references: exact match, ROUGE-2, BLEU, by others' libraries.

rouge-score is the program of ROUGE's paper in Python, sacrebleu the usual program of BLEU; both are
in the extra "bench".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrun.bindings.errors import MissingPackageError


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
