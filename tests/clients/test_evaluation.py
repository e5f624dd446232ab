"""lm-evaluation-harness measures a model by /v1/completions: `echo` with `logprobs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.client_desk import Desk, program
from support.tiny_models import fresh_logits

from specrun.bindings.models.model import Model
from specrun.runtime.demo import demo_target

pytestmark = pytest.mark.clients
QUESTIONS = [
    {"question": "What does shutil.copytree do?", "choices": ["Recursively copy", "Parse"]},
    {"question": "def add(a, b):", "choices": [" return a + b", "\n    return naïve", " x"]},
]
TASK = """\
task: {kind}_task
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{rest}
"""
CHOICES = 'doc_to_choice: "{{choices}}"\ndoc_to_target: 0\n'
TEXTS = (
    'doc_to_target: ""\ngeneration_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}\n'
    "metric_list: [{metric: exact_match}]\n"
)


def evaluated(
    desk: Desk, model: str, kind: str, rest: str, questions: list[Any] = QUESTIONS
) -> list[dict[str, Any]]:
    """Run one task over the questions; return what was logged for each of them."""
    lm_eval = program("python", "bin", "lm_eval")
    data = desk.folder / "questions.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in questions))
    (desk.folder / f"{kind}.yaml").write_text(TASK.format(kind=kind, data=data, rest=rest))
    path = "chat/completions" if model == "local-chat-completions" else "completions"
    desk.run(
        *(lm_eval, "run", "--model", model, "--tasks", f"{kind}_task", "--include_path", "."),
        *("--model_args", f"model=local,base_url={desk.server.address}/v1/{path}"),
        *("--output_path", "found", "--log_samples"),
        *(["--apply_chat_template"] if "chat" in model else []),
        HF_DATASETS_OFFLINE="1",
        HF_HUB_OFFLINE="1",
    )
    (samples,) = Path(desk.folder, "found").rglob("samples_*.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]


def test_log_likelihoods_are_the_models_own(desk: Desk) -> None:
    with desk.served(
        demo_target(), "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-c", 512
    ) as server:
        samples = evaluated(desk, "local-completions", "multiple_choice", CHOICES)
    assert server.failed == []
    with Model(demo_target()) as model:
        for sample in samples:
            doc = sample["doc"]
            for choice, response in zip(doc["choices"], sample["resps"], strict=True):
                tokens = model.vocabulary.tokenize(f"{doc['question']} {choice}")
                logits = fresh_logits(model, tokens).astype(np.float64)
                logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
                n_before = len(model.vocabulary.tokenize(doc["question"]))
                given = range(n_before, len(tokens))
                expected = sum(logprobs[k - 1, tokens[k]] for k in given)
                greedy = all(logprobs[k - 1].argmax() == tokens[k] for k in given)
                likelihood, is_greedy = response[0]
                assert float(likelihood) == pytest.approx(expected, abs=1e-3)
                assert str(is_greedy) == str(greedy)


@pytest.mark.parametrize("model", ["local-completions", "local-chat-completions"])
def test_texts_are_generated(desk: Desk, model: str) -> None:
    with desk.served(demo_target(), "-c", 1024) as server:
        samples = evaluated(desk, model, "generate_until", TEXTS)
    assert server.failed == []
    if "chat" in model:
        assert "copy a directory tree" in samples[0]["resps"][0][0]
    assert all(isinstance(sample["resps"][0][0], str) for sample in samples)


def test_a_published_model_prefers_what_is_true(desk: Desk, published: Path) -> None:
    facts = {"The capital of France is": "Paris Berlin", "Water freezes to": "ice gold"}
    questions = [{"question": text, "choices": facts[text].split()} for text in facts]
    with desk.served(published, "-c", 2048) as server:
        samples = evaluated(desk, "local-completions", "multiple_choice", CHOICES, questions)
    assert server.failed == []
    assert [sample["acc"] for sample in samples] == [1.0, 1.0]
