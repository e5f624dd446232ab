"""Heads from a GGUF file alone, on a published model: SmolLM2-135M-Instruct in Q4_1, which
`make test-real` gets. What is trained here is far too little to draft well."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrun.convert.gguf import GGUFSource
from specrun.convert.heads.head_conversion import convert_head
from specrun.runtime import Runtime, SamplingParams
from specrun.train.data import AnswerSettings
from specrun.train.data.documents import Chat
from specrun.train.data.tokens import FileTokens
from specrun.train.heads import EagleRecipe, HeadRun
from specrun.train.target.shape import file_shape
from specrun.train.trainer import train

pytestmark = pytest.mark.real


def test_answers_are_marked_in_its_own_template(published: Path) -> None:
    tokens = FileTokens(published)
    user, said = "Naïve 東京 👋?", "Yes: 42 (or  so)\n\n\tindeed."
    chat = Chat(({"role": "user", "content": user}, {"role": "assistant", "content": said}))
    found = tokens.encode(chat)
    assert tokens.text(found.ids[found.learnt].tolist()).startswith(f"{said}<|im_end|>")
    assert user in tokens.text(found.ids[~found.learnt].tolist())
    prompt = tokens.prompt(chat)
    assert prompt == found.ids[: len(prompt or [])].tolist()


def test_its_sizes_are_the_published_ones(published: Path) -> None:
    shape = file_shape(GGUFSource(published))
    sizes = (shape.hidden, shape.n_layers, shape.n_heads, shape.n_kv_heads, shape.vocab_size)
    assert sizes == (576, 30, 9, 3, 49152)
    assert (shape.feed_forward, shape.rope_theta, shape.norm_eps) == (1536, 100000.0, 1e-5)


def test_a_head_is_trained_and_the_text_stays(published: Path, tmp_path: Path) -> None:
    answers = AnswerSettings(longest=16)
    run = HeadRun(
        published, (), tmp_path / "head", own_answers=answers, n_prompts=6, steps=4,
        tokens_per_batch=256, learning_rate=1e-3, held_out=0.2, measures=1,
        device="cpu", precision="float32", n_threads=1,
    )  # fmt: skip
    report = train(EagleRecipe(law_tokens=8192), run)
    assert all(0 < loss < 20 for loss in report.result.curves.losses)
    convert_head(report.output, tmp_path / "head.gguf", target=published)
    texts = {}
    for drafter in ("none", f"eagle({tmp_path / 'head.gguf'}, n=3)"):
        options = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "shape": 16}
        with Runtime(published, drafter=drafter, **options) as runtime:
            found = runtime.chat(
                [{"role": "user", "content": "How does a refrigerator work?"}],
                SamplingParams(temperature=0.0),
                max_tokens=24,
            )
        texts[drafter] = found.token_ids
    plain, drafted = texts.values()
    assert plain == drafted
