"""Tiny models, and a way to run the command line in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import Result
from support import commands

from specrun.convert.random_model import RandomLlama, write_random_llama

if TYPE_CHECKING:
    from support.tiny_family import Family

CONTROLS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB_SIZE = 320  # every byte is a token: token i below 256 is byte i
CONTROL_TOKENS = range(VOCAB_SIZE - len(CONTROLS), VOCAB_SIZE)
ODD_BYTES = (*range(32), *range(127, 256))


def forbid(tokens: Iterable[int]) -> list[str]:
    """Return the arguments that keep a model from saying these tokens."""
    return [argument for token in tokens for argument in ("-l", f"{token}-inf")]


ENDLESS = forbid(CONTROL_TOKENS)  # the model never ends on its own
READABLE = forbid((*ODD_BYTES, *CONTROL_TOKENS))  # neither does it, nor does it break lines


@dataclass(frozen=True)
class Models:
    """Files: a target with a chat template, the same without, a larger one, a stranger, and a long
    context."""

    target: Path
    plain: Path
    larger: Path
    stranger: Path
    long: Path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("cli-models")
    shape = {"vocab_size": VOCAB_SIZE, "width": 16, "ffn": 16, "layers": 1, "controls": CONTROLS}
    specs = {
        # wide and deep enough that its answers depend on more than the last tokens
        "target": RandomLlama(
            **{**shape, "width": 32, "layers": 4}, chat_template=TEMPLATE, context=512, scale=2.0
        ),
        "plain": RandomLlama(**shape, context=512, scale=2.0),
        "larger": RandomLlama(**{**shape, "width": 32, "layers": 5}, context=512),
        "stranger": RandomLlama(**{**shape, "vocab_size": 600}, context=512),
        "long": RandomLlama(**{**shape, "layers": 2}, chat_template=TEMPLATE, context=16384),
    }
    for name, spec in specs.items():
        write_random_llama(folder / f"{name}.gguf", spec)
    return Models(**{name: folder / f"{name}.gguf" for name in specs})


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A target that has learnt a few answers and a drafter that hardly has, as folders."""
    pytest.importorskip("transformers")
    from support.tiny_family import make_family

    return make_family(tmp_path_factory.mktemp("family"))


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `specrun` with arguments, the first split at spaces; models have one thread."""
    for name in [*os.environ]:
        if name.startswith("SPECRUN_") or name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SPECRUN_THREADS", "1")
    monkeypatch.setenv("SPECRUN_ANYWAY", "1")  # other tests run beside
    return partial(commands.run, name="specrun")
