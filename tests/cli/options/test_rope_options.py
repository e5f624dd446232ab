"""Options for contexts beyond the trained length: what they ask for, what they refuse, and what is
said of it."""

from __future__ import annotations

import json
from pathlib import Path

from support.commands import run

LONG = "word " * 300


def test_an_answer_goes_on_beyond_the_trained_context_and_says_so(
    tiny_model: Path, tmp_path: Path
) -> None:
    prompt = tmp_path / "long.txt"
    prompt.write_text(LONG)
    asked, files = "generate -t 1 --no-chat-template -n 4 --temp 0", (tiny_model, "-f", prompt)
    refused = run(f"{asked} -m", *files)
    assert refused.exit_code == 5
    assert "trained for no more" in refused.stderr
    longer = "-c 4096 --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 1024"
    done = run(f"{asked} {longer} -m", *files)
    assert done.exit_code == 0, done.output
    assert "beyond the 1,024 tokens it was trained for" in done.stderr


def test_the_benchmark_says_that_its_context_is_longer_than_trained(tiny_model: Path) -> None:
    quick = "bench drafters -t 1 -n 4 -r 1 --questions 1 --json --workload repeated --context 1100"
    done = run(quick, "--rope-freq-scale", 0.5, "-m", tiny_model)
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)["results"]
    assert (
        "beyond the 1,024 tokens of context that the target was trained for (rope x2)"
        in results[0]["workload"]
    )
    assert results[0]["prompt_tokens"] > 1024
    assert results[1]["text"]["n_same"] == 1
