"""The demo family's scores, measured on the GGUF files by the runtime, and its model card."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from family.conversations import sample_entries
from specrun.bench.drafters.corpus import Entry, canonical_question
from specrun.runtime import GenerationResult, Runtime, SamplingParams
from specrun.train.target.shape import ModelShape
from specrun.train.trainer.model_folder import write_text

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
    """`exact`: the share of `n_questions` that the target alone answers to the letter.

    The others are of `n_speculative` questions with a greedy chain of DRAFT_LENGTH: `same_text` is
    the share answered as the target alone does, `mean_accepted_length` counts tokens per target
    evaluation, the target's own included.
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
    write_text(path, "".join(json.dumps(asdict(item)) + "\n" for item in questions))


def read_questions(path: Path) -> list[Question]:
    """Read what `write_questions` wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Question(**json.loads(line)) for line in lines]


def measure_drafter(
    target: Path, expression: str, questions: list[Question], n_threads: int = 0
) -> float:
    """Return a drafter's tokens per target evaluation at temperature 0, the target's own too.

    The first N_SPECULATIVE of the questions are asked.
    """
    return _mean_accepted_length(_drafted(target, expression, questions, n_threads))


def _drafted(
    target: Path, expression: str, questions: list[Question], n_threads: int
) -> list[GenerationResult]:
    """Ask the first N_SPECULATIVE questions with a drafter."""
    with Runtime(target, expression, n_threads=n_threads, n_threads_batch=n_threads) as runtime:
        return [_ask(runtime, item.question) for item in questions[:N_SPECULATIVE]]


def measure_family(
    target: Path, drafter: Path, questions: list[Question], n_threads: int = 0
) -> Scores:
    """Ask the target all questions, and the pair the first N_SPECULATIVE of them, at temperature 0.

    `n_threads` 0 is one per core.
    """
    with Runtime(target, "none", n_threads=n_threads, n_threads_batch=n_threads) as runtime:
        plain = [_ask(runtime, item.question).text for item in questions]
    expression = f"draft({drafter}, n={DRAFT_LENGTH})"
    results = _drafted(target, expression, questions, n_threads)
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
    stats = [result.stats for result in results]
    tokens = sum(each.rounds * (each.mean_accepted_length or 0.0) for each in stats)
    return tokens / sum(each.rounds for each in stats)


def _ask(runtime: Runtime, question: str) -> GenerationResult:
    message = {"role": "user", "content": question}
    return runtime.chat([message], SamplingParams(temperature=0.0), max_tokens=_MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model of the family: its shape, how it was trained and the size of its file in bytes."""

    name: str
    shape: ModelShape
    steps: int
    tokens: int
    seconds: float
    n_bytes: int

    @property
    def n_parameters(self) -> int:
        """Weights, the tied embedding counted once."""
        shape = self.shape
        layer = 4 * shape.hidden**2 + 3 * shape.hidden * shape.feed_forward
        norms = (2 * shape.n_layers + 1) * shape.hidden
        return shape.vocab_size * shape.hidden + shape.n_layers * layer + norms


_CARD = """\
# The embedded demo family

A tiny Llama *target* and a tinier *drafter* that answer questions from the docstrings of the Python standard
library ("What does shutil.copytree do?"). They exist so that speculative decoding can be seen offline, on any
machine, in seconds. They know nothing else, and are not meant for anything else.

## Corpus
{n_entries} public names of the Python {python} standard library ({kinds}):
.py files are read with `ast`, builtins and C modules with `inspect`. Each answer is the first sentence of a
docstring, learnt by heart. Questions come in several phrasings, half of them within longer chats; about a tenth of
the tokens are repeated questions, quoted signatures, greetings, and a refusal of everything that is not the
standard library. Tests, private names and retired packages are left out. Licence of the corpus: Python Software
Foundation License Version 2; the models are made from nothing else.

## Models
| | layers | width | feed-forward | heads | vocabulary | parameters | Q8_0 file | steps | tokens read | time |
|---|---|---|---|---|---|---|---|---|---|---|
{rows}

Plain Llama: RMSNorm, rotary positions, SwiGLU, tied embeddings; byte-level BPE split like GPT-2's. A message is
`<|role|>content<|end|>`; there is no beginning-of-text token. Trained on texts of at most some 1,000 tokens, most
of them far shorter. After about ten questions in one conversation answers get worse, and quoting what stands in the
question mostly fails: a model this small remembers, it does not copy.

## Training
Loss on the assistant's tokens only; Muon for the hidden matrices and AdamW for the rest; warm-up, plateau, then a
straight line to zero over the last half of the steps; {precision} on {device}, {threads} threads.
The drafter reads the same corpus. `python tools/family models` makes a family like this one: the
corpus, the tokenizer, the models, these files and the scores below.{notes}

## Scores
Measured with specrun on the shipped Q8_0 files, temperature 0, questions drawn with seed 0 from the corpus:
what was learnt is asked, so this measures memory, not generalisation.

| measure | value |
|---|---|
| answers that are the docstring's first sentence to the letter | {exact:.1%} of {n_questions} |
| tokens per target evaluation with a greedy chain of {n} | {length:.2f} over {n_speculative} questions |
| drafted tokens accepted | {acceptance:.1%} |
| speculative text equal to plain text | {same:.1%} of {n_speculative} |

A model this small costs so little that drafting saves no time on a CPU: the accepted length is what it shows.
"""  # noqa: E501 - as it is shown


def model_card(
    entries: list[Entry],
    models: list[ModelFacts],
    scores: Scores,
    *,
    precision: str,
    device: str,
    threads: int,
    notes: str = "",
) -> str:
    """The card as Markdown; `notes` tells what was particular about this training, if anything."""
    kinds = {entry.kind for entry in entries}
    counts = ", ".join(
        f"{sum(entry.kind == kind for entry in entries)} {kind}{'es' if kind == 'class' else 's'}"
        for kind in sorted(kinds)
    )
    return _CARD.format(
        n_entries=len(entries),
        python=platform.python_version(),
        kinds=counts,
        rows="\n".join(_row(model) for model in models),
        precision=precision,
        device=device,
        threads=threads,
        notes=f"\n\n{notes.strip()}" if notes.strip() else "",
        exact=scores.exact,
        n_questions=scores.n_questions,
        n=DRAFT_LENGTH,
        length=scores.mean_accepted_length,
        n_speculative=scores.n_speculative,
        acceptance=scores.acceptance_rate,
        same=scores.same_text,
    )


def _row(model: ModelFacts) -> str:
    shape = model.shape
    cells = (
        model.name,
        f"{shape.n_layers}",
        f"{shape.hidden}",
        f"{shape.feed_forward}",
        f"{shape.n_heads}",
        f"{shape.vocab_size}",
        f"{model.n_parameters / 1e6:.1f} M",
        f"{model.n_bytes / 1e6:.1f} MB",
        f"{model.steps}",
        f"{model.tokens / 1e6:.1f} M",
        f"{model.seconds / 60:.0f} min",
    )
    return f"| {' | '.join(cells)} |"
