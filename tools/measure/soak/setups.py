"""Random setups of a soak: tiny float32 models, a drafter, an acceptance rule, and what is asked.

All are drawn from one generator, so a seed names a setup. In float32 with one thread an answer
depends on nothing but its prompt, settings and seed, which is what a soak holds every answer to.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.heads.random_heads import write_eagle, write_hydra, write_medusa
from specrun.bench.prove.faults import Fault
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.drafters.retrieval import build_store
from specrun.runtime.language import METHODS, Expression, parse_expression, quoted
from specrun.runtime.laws import SamplingParams

N_VOCAB = 400
_WIDTH = 64  # one attention head of the random heads
CONTEXT: Mapping[str, Any] = {
    "n_ctx": 256,
    "n_threads": 1,
    "flash_attention": "off",
    "cache_type_k": "f32",
    "cache_type_v": "f32",
    "n_gpu_layers": 0,
    "n_gpu_layers_draft": 0,
}
"""Options of every runtime: rounding is all that could tell two evaluations apart."""

_TEXT = "To be, or not to be, that is the question: to be asked again, or not to be asked.\n"
_DRAFTS = (
    "draft(DRAFTER, n=4)",
    "draft(DRAFTER, n=6, p_min=0.3)",
    "draft(DRAFTER, tree=3x2)",
    "draft(DRAFTER, depth=3, topk=2, nodes=5)",
    "draft(SMALLER, n=3)",
)
_HEADS = ("medusa(MEDUSA)", "hydra(HYDRA)", "eagle(EAGLE)", "eagle(EAGLE, nodes=6)")
_POINT_MASSES = (
    "prompt-lookup(min_ngram=1)",
    "rest(STORE, min_match=1)",
    "jacobi",
    "lookahead(window=2, ngram=4, guesses=3)",
    "lookahead(window=2, ngram=3, guesses=2, pool=POOL)",
)
_PAIRS = (
    "cascade({draft}, {other})",
    "relay({draft}@2, {other}@3)",
    "ensemble({draft}, {other})",
    "ouroboros({draft})",
    "auto({draft}, {other})",
)
_EXACT_RULES = ("exact", "exact", "token", "kseq")
# They weigh laws, which these tell; a cascade's drafts depend on what was guessed before.
_TELLING = frozenset(("draft", "medusa", "hydra", "eagle", "relay", "ensemble"))
_PAIR_RULES = (
    *(f"cascade-{rule}(alpha=0.3)" for rule in ("chow", "diff", "opt", "opt-log")),
    *(f"cascade-token-v{number}(alpha=0.5)" for number in (1, 2, 3)),
    *("lossy(alpha=0.5, beta=solve)", "top-beta"),
)
# What these draft next depends on earlier answers, or on how those were timed.
_REMEMBERING = frozenset(
    ("prompt-lookup", "rest", "jacobi", "lookahead", "ouroboros", "auto", "cascade")
)
_DRAWING = frozenset(("draft", "medusa", "hydra", "eagle"))

_WEIGHTS: dict[Fault, int] = {
    "none": 6,
    "cancelled": 2,
    "dropped": 1,
    "interrupted": 3,
    "decode failed": 3,
    "asked": 1,
    "closed": 1,
}


@dataclass(frozen=True, slots=True)
class Setup:
    """A drafter and a rule; `drafter` names the files of `write_files` where it is opened.

    `greedy` setups are asked at temperature 0 only: their drafts may differ from session to
    session, and at other temperatures a text depends on what was drawn as a draft.
    """

    drafter: str
    rule: str
    greedy: bool

    @property
    def is_auto(self) -> bool:
        """Whether rounds choose by time: a comparison has to replay the choices."""
        return self.drafter.startswith("auto")


@dataclass(frozen=True, slots=True)
class Question:
    """What one answer is asked for."""

    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int


def write_files(folder: Path) -> dict[str, Path]:
    """Write a target, two draft models, three kinds of heads and a datastore; return them by name.

    POOL is a file that lookahead makes.
    """
    files = {
        name: folder / f"{name.lower()}.gguf"
        for name in ("TARGET", "DRAFTER", "SMALLER", "MEDUSA", "HYDRA", "EAGLE")
    }
    shape = {"vocab_size": N_VOCAB, "width": _WIDTH, "heads": 2, "ffn": 64, "seed": 1}
    # Fewer layers of the same weights: a draft model that is often right, and often not.
    for name, layers, scale in (("TARGET", 4, 4.0), ("DRAFTER", 2, 3.0), ("SMALLER", 1, 2.5)):
        write_random_llama(files[name], RandomLlama(**shape, layers=layers, scale=scale))  # type: ignore[arg-type]
    write_medusa(files["MEDUSA"], _WIDTH, N_VOCAB, "F32", heads=3)
    write_hydra(files["HYDRA"], _WIDTH, N_VOCAB, "F32", heads=3)
    write_eagle(files["EAGLE"], _WIDTH, N_VOCAB, "F32")
    text, files["STORE"], files["POOL"] = (
        folder / name for name in ("text.txt", "docs.store", "some.pool")
    )
    text.write_text(_TEXT * 4, encoding="utf-8")
    with Model(files["TARGET"], n_gpu_layers=0) as model:
        build_store([text], model.vocabulary, files["STORE"], model="target")
    return files


def with_files(drafter: str, files: Mapping[str, Path]) -> str:
    """Return the expression with the paths of the files that it names."""
    for name, path in files.items():
        drafter = drafter.replace(name, quoted(str(path)))
    return drafter


def random_setup(source: random.Random) -> Setup:
    """Draw a drafter and a rule that can be compared with a fresh session's."""
    drafter = _random_drafter(source)
    atoms = set(_atoms(parse_expression(drafter)))
    # `auto` is told what it chose: what is left is what its members remember.
    remembers = bool((atoms - {"auto"}) & _REMEMBERING)
    rules = list(_EXACT_RULES)
    if not remembers and "auto" not in atoms:  # which no rule takes that is not exact
        rules.append("typical")
    if atoms & set(METHODS) <= _TELLING:  # the others are files
        rules += source.sample(_PAIR_RULES, 4)
    return Setup(drafter, source.choice(rules), remembers and bool(atoms & _DRAWING))


def _random_drafter(source: random.Random) -> str:
    kind = source.randrange(10)
    if kind < 2:
        return source.choice(_DRAFTS)
    if kind < 4:
        return source.choice(_HEADS)
    if kind < 6:
        return source.choice((*_POINT_MASSES, "none"))
    return source.choice(_PAIRS).format(
        draft=source.choice(_DRAFTS), other=source.choice((*_DRAFTS, *_POINT_MASSES))
    )


def _atoms(expression: Expression) -> list[str]:
    return [expression.atom, *(atom for inner in expression.arguments for atom in _atoms(inner))]


def random_question(source: random.Random, setup: Setup, text: tuple[int, ...]) -> Question:
    """Draw what is asked after `text`, the last prompt and answer: often it goes on from there."""
    kind = source.randrange(6)
    more = tuple(source.randrange(3, N_VOCAB) for _ in range(source.randrange(1, 12)))
    if kind < 2 or not text:
        prompt = more * source.choice((1, 1, 3))
    elif kind < 4:
        prompt = text + more
    elif kind == 4:  # an old beginning was dropped, as chats do
        prompt = text[source.randrange(len(text)) :] + more
    else:
        prompt = text[: source.randrange(1, len(text) + 1)]
    greedy = setup.greedy or source.random() < 0.3
    params = SamplingParams(
        temperature=0.0 if greedy else source.choice((0.5, 0.8, 1.0, 1.5)),
        top_k=source.choice((0, 0, 40)),
        top_p=source.choice((1.0, 0.9)),
        min_p=source.choice((0.0, 0.05)),
        repeat_penalty=source.choice((1.0, 1.0, 1.0, 1.2)),
        seed=source.randrange(1 << 30),
    )
    # Some answers run into the end of the context.
    return Question(prompt[-200:], params, source.choice((8, 16, 24, 40, 100)))


def random_fault(source: random.Random) -> Fault:
    """Draw a fault, often none."""
    return source.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
