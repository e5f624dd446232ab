"""Texts on a device are those of the CPU: of every drafter, wherever the layers lie.

A worker on the loopback behaves as a GPU does: the host cannot see its buffers, its work is done
when it is waited for, and tensors lie elsewhere. F32 weights and cache, so that texts are equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.every_drafter import DRAFTERS, named
from support.tiny_models import CHAT, F32

from specrun.bindings.machine.devices import devices
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams

PROMPT = list(b"to be, or not to be, that is the question. to be")
LENGTH = 24
SAMPLED = [
    ("shallow", "none"),
    ("shallow", "draft(FILE:twin, n=4, sampling=argmax)"),
    ("shallow", "draft(FILE:twin, depth=3, topk=2, nodes=5)"),
    ("shallow", "lookahead(window=2, ngram=4, guesses=3)"),
    ("shallow", "ouroboros(draft(FILE:twin, n=3, sampling=argmax))"),
    ("deep", "eagle3(FILE:eagle3, depth=3, topk=3, nodes=7)"),
    ("nextn", "mtp(n=4)"),
    ("hybrid", "mtp(n=3)"),
]
"""Drafters of point masses, which keep the text at any temperature: chains, trees and heads."""


def text(
    files: dict[str, Path], target: str, drafter: str, temperature: float = 0.0, **options: Any
) -> list[int]:
    params = SamplingParams(temperature=temperature, seed=5, top_k=0, top_p=1.0, min_p=0.0)
    settings = {**F32, "n_gpu_layers": "all", "n_gpu_layers_draft": "all", **options}
    with Runtime(files[target], named(drafter, files), **settings) as runtime:
        used = {device.worker for device in runtime.model.placed.offload}
        assert used <= set(options.get("rpc", ()))
        assert bool(used) == ("rpc" in options)
        return runtime.generate(PROMPT, params, max_tokens=LENGTH).token_ids


@pytest.fixture(scope="module")
def plain(files: dict[str, Path]) -> dict[tuple[str, float], list[int]]:
    """Plain decoding on the CPU, by target and temperature, made when it is asked for."""

    class Texts(dict[tuple[str, float], list[int]]):
        def __missing__(self, key: tuple[str, float]) -> list[int]:
            self[key] = text(files, key[0], "none", key[1], devices=["none"])
            return self[key]

    return Texts()


@pytest.mark.parametrize(("target", "drafter"), DRAFTERS)
def test_every_drafter_gives_the_text_of_the_cpu(
    files: dict[str, Path],
    plain: dict[tuple[str, float], list[int]],
    worker: str,
    target: str,
    drafter: str,
) -> None:
    assert text(files, target, drafter, rpc=[worker]) == plain[target, 0.0]


@pytest.mark.parametrize(("target", "drafter"), SAMPLED)
def test_point_masses_give_the_text_of_the_cpu_at_any_temperature(
    files: dict[str, Path],
    plain: dict[tuple[str, float], list[int]],
    worker: str,
    target: str,
    drafter: str,
) -> None:
    assert text(files, target, drafter, 1.0, rpc=[worker]) == plain[target, 1.0]


def test_draws_give_another_text_at_other_temperatures(
    files: dict[str, Path], plain: dict[tuple[str, float], list[int]], worker: str
) -> None:
    """Negative control: drafts that are drawn keep the law, and not the text."""
    drawn = text(files, "shallow", "draft(FILE:twin, n=4)", 1.0, rpc=[worker])
    assert drawn != plain["shallow", 1.0]


def test_another_seed_gives_another_text(plain: dict[tuple[str, float], list[int]]) -> None:
    """Negative control: the texts are long and open enough to tell."""
    texts = [tuple(plain["shallow", temperature]) for temperature in (0.0, 0.8, 1.0)]
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"n_gpu_layers": 1},
        {"n_gpu_layers": 2, "offload_kv": False},
        {"offload_kv": False},
        {"override_tensors": [("ffn_", "CPU")]},
        {"devices_draft": ["none"]},
        {"split_mode": "none"},
        {"shape": "fixed", "flash_attention": "on"},
        {"backend_sampling": "on"},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
@pytest.mark.parametrize(
    "drafter",
    [
        "draft(FILE:twin, tree=2x2)",
        "eagle(FILE:eagle, depth=4, topk=2, nodes=6)",
        "medusa(FILE:medusa, tree=3x2x1)",
    ],
)
def test_wherever_a_part_lies(
    files: dict[str, Path], worker: str, drafter: str, options: dict[str, Any]
) -> None:
    shared = {key: value for key, value in options.items() if key == "flash_attention"}
    wanted = text(files, "shallow", "none", devices=["none"], **shared)
    assert text(files, "shallow", drafter, rpc=[worker], **options) == wanted


@pytest.mark.parametrize("drafter", ["none", "draft(FILE:wide, tree=2x2)", "prompt-lookup"])
def test_quantized_keys_and_values(
    files: dict[str, Path], tmp_path: Path, worker: str, drafter: str
) -> None:
    """Heads of 32 numbers, so that a block of q8_0 is within one."""
    path = tmp_path / "wide.gguf"
    write_random_llama(path, RandomLlama(**{**CHAT, "width": 128}))
    wide = {**files, "wide": path}
    cache = {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attention": "on"}
    wanted = text(wide, "wide", "none", devices=["none"], **cache)
    assert text(wide, "wide", drafter, rpc=[worker], **cache) == wanted


@pytest.mark.parametrize(
    "options",
    [{}, {"tensor_split": [3, 1]}, {"split_mode": "none", "main_gpu": 1}],
    ids=["by memory", "3,1", "the second"],
)
@pytest.mark.parametrize(
    "drafter", ["draft(FILE:small, n=3)", "eagle3(FILE:eagle3, depth=3, topk=3, nodes=7)"]
)
def test_two_devices(
    files: dict[str, Path],
    plain: dict[tuple[str, float], list[int]],
    workers: tuple[str, str],
    drafter: str,
    options: dict[str, Any],
) -> None:
    assert text(files, "deep", drafter, rpc=workers, **options) == plain["deep", 0.0]


def test_target_and_drafter_on_different_devices(
    files: dict[str, Path],
    plain: dict[tuple[str, float], list[int]],
    workers: tuple[str, str],
) -> None:
    names = {device.worker: device.name for device in devices(workers)}
    first, second = (names[worker] for worker in workers)
    for drafter in ("draft(FILE:twin, n=4)", "eagle(FILE:eagle, n=4)"):
        options = {"rpc": workers, "devices": [first], "devices_draft": [second]}
        assert text(files, "shallow", drafter, **options) == plain["shallow", 0.0]


def test_a_cancelled_answer_leaves_the_next_as_it_was(
    files: dict[str, Path], plain: dict[tuple[str, float], list[int]], worker: str
) -> None:
    params = SamplingParams(temperature=0.0)
    with Runtime(
        files["shallow"], named("draft(FILE:twin, tree=2x2)", files), rpc=[worker], **F32
    ) as runtime:
        stream = runtime.stream(PROMPT, params, max_tokens=LENGTH)
        for _ in range(5):
            next(stream)
        stream.close()
        result = runtime.generate(PROMPT, params, max_tokens=LENGTH)
    assert result.token_ids == plain["shallow", 0.0]
