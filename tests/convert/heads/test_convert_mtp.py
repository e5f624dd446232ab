"""MTP blocks out of checkpoints draft as those in the target's own file do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.converted_heads import tensors_of
from support.tiny_models import F32
from support.tiny_nextn import write_tiny_glm4moe, write_tiny_qwen35

from specrun.bindings.errors import (
    MalformedFileError,
    PairError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.bindings.gguf import read_header
from specrun.convert import convert_head, plan_head, plan_set, target_facts
from specrun.convert.heads.head_conversion import detect_kind
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.language import quoted

Tensors = dict[str, np.ndarray[Any, Any]]
_QWEN = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
_SPECULATORS = {
    "nextn.eh_proj": "mtp_layers.0.input_proj",
    "nextn.enorm": "mtp_layers.0.token_layernorm",
    "nextn.hnorm": "mtp_layers.0.hidden_layernorm",
    "nextn.shared_head_norm": "mtp_layers.0.final_layernorm",
}
_GLM = {f"nextn.{name}": f"model.layers.3.{name}" for name in ("eh_proj", "enorm", "hnorm")}
_LAYER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.gate",
}
_LAYER |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
_LAYER |= {f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
_LAYER |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_LAYER |= {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}


def published(target: Path, block: int, own: dict[str, str], start: str) -> Tensors:
    """The block of a target's file under the names of a checkpoint, which begin so in its layer."""
    found, is_qwen = Tensors(), "qwen" in target.name
    for name, array in tensors_of(target).items():
        inside = re.fullmatch(rf"blk\.{block}\.(.+)\.(weight|bias)", name)
        if inside is None:
            continue
        short, kind = inside.groups()
        if short == "exp_probs_b":
            found[f"{start}mlp.gate.e_score_correction_bias"] = array
        elif short.endswith("_exps"):
            part = short.removeprefix("ffn_").removesuffix("_exps")
            for i, expert in enumerate(array):
                found[f"{start}mlp.experts.{i}.{part}_proj.weight"] = np.ascontiguousarray(expert)
        else:
            stored = array - 1 if is_qwen and short.endswith("norm") else array
            theirs = own.get(short) or start + _LAYER[short]
            found[f"{theirs}.{kind}"] = np.ascontiguousarray(stored, np.float32)
    return found


def save(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], **config}))
    save_file(tensors, folder / "model.safetensors")
    return folder


WRITERS: dict[str, tuple[Callable[[Path], Path], int]] = {
    "qwen35": (write_tiny_qwen35, 4),
    "glm4moe": (write_tiny_glm4moe, 3),
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mtp")
    return {name: write(folder / f"{name}.gguf") for name, (write, _) in WRITERS.items()}


def drafted(target: Path, drafter: str) -> tuple[list[int], int, int]:
    params = SamplingParams(temperature=0.0)
    with Runtime(target, drafter, **F32) as runtime:
        result = runtime.generate(list(range(40, 60)), params, max_tokens=16)
    return list(result.token_ids), result.stats.drafted, result.stats.accepted


CASES = {
    "Qwen 3.5": ("qwen35", _QWEN, "mtp.layers.0."),
    "speculators": ("qwen35", _SPECULATORS, "mtp_layers.0."),
    "GLM 4.5": ("glm4moe", _GLM, "model.layers.3."),
}


@pytest.mark.parametrize(("name", "whole"), [*((name, False) for name in CASES), ("GLM 4.5", True)])
def test_files_draft_as_the_targets_own_blocks(
    targets: dict[str, Path], tmp_path: Path, name: str, whole: bool
) -> None:
    kind, own, start = CASES[name]
    target, block = targets[kind], WRITERS[kind][1]
    tensors = published(target, block, own, start)
    if whole:  # the layers of the model are not read
        names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")
        tensors |= dict.fromkeys(names, np.ones((4, 4), np.float32))
    folder = save(tmp_path / "checkpoint", tensors)
    found = detect_kind(folder)
    # A model with its blocks is a model, unless a target is named.
    assert (found is None) == whole
    output = tmp_path / "blocks.gguf"
    report = convert_head(folder, output, target=target, outtype="f32")
    assert report.architecture == kind
    ours, theirs = tensors_of(output), tensors_of(target)
    start_of_block = f"blk.{block}."
    wanted = {n for n in theirs if not n.startswith("blk.") or n.startswith(start_of_block)}
    assert ours.keys() == wanted
    for name in wanted:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-6, err_msg=name)
    a, b = read_header(output).metadata, read_header(target).metadata
    for key in b:
        if key.startswith(f"{kind}."):
            assert a[key] == b[key] or list(a[key]) == list(b[key]), key  # type: ignore[arg-type]
    alone = drafted(target, f"mtp({quoted(str(output))}, n=2)")
    assert alone == drafted(target, "mtp(n=2)")
    assert alone[1] > 0


def test_the_usual_type_and_joined_experts(targets: dict[str, Path], tmp_path: Path) -> None:
    tensors = published(targets["glm4moe"], 3, _GLM, "model.layers.3.")
    start = "model.layers.3.mlp.experts."
    apart = {n: tensors.pop(n) for n in [*tensors] if n.startswith(start)}
    parts = {
        part: np.stack([apart[f"{start}{i}.{part}_proj.weight"] for i in range(3)])
        for part in ("gate", "up", "down")
    }
    tensors[f"{start}gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
    tensors[f"{start}down_proj"] = parts["down"]
    folder = save(tmp_path / "checkpoint", tensors)
    output = tmp_path / "blocks.gguf"
    report = convert_head(folder, output, target=targets["glm4moe"])
    assert report.type_name == "Q8_0"
    assert report.tensor_types["Q8_0"] > 6
    assert drafted(targets["glm4moe"], f"mtp({quoted(str(output))}, n=2)")[1] > 0
    convert_head(folder, output, target=targets["glm4moe"], outtype="f32", force=True)
    ours, theirs = tensors_of(output), tensors_of(targets["glm4moe"])
    for name in ("gate", "up", "down"):
        key = f"blk.3.ffn_{name}_exps.weight"
        np.testing.assert_array_equal(ours[key], theirs[key])


Change = Callable[[Tensors], object]
FAULTS: dict[str, tuple[Change, type[SpecrunError], str]] = {
    "a tensor less": (
        lambda t: t.pop("mtp.layers.0.self_attn.k_proj.weight"), MalformedFileError,
        r"without attn_k\.weight",
    ),
    "no joining matrix": (
        lambda t: t.pop("mtp.fc.weight"), MalformedFileError, r"without nextn\.eh_proj\.weight",
    ),
    "an unknown tensor": (
        lambda t: t.update({"mtp.layers.0.gate.weight": np.ones((2, 2), np.float32)}),
        UnsupportedModelError, r"does not know: gate\.weight",
    ),
    "another width": (
        lambda t: t.update({"mtp.fc.weight": np.ones((32, 64), np.float32)}), PairError,
        r"mtp|fc\.weight for a nextn\.eh_proj\.weight of \[32, 64\].*\[64, 128\]",
    ),
    "two blocks": (
        lambda t: t.update({"mtp.layers.1.input_layernorm.weight": np.ones(64, np.float32)}),
        UnsupportedModelError, "holds 2 MTP blocks",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "problem"), FAULTS.values(), ids=FAULTS)
def test_what_cannot_be_right_is_refused(
    targets: dict[str, Path], tmp_path: Path, change: Change, kind: type[SpecrunError], problem: str
) -> None:
    tensors = published(targets["qwen35"], 4, _QWEN, "mtp.layers.0.")
    change(tensors)
    folder = save(tmp_path / "checkpoint", tensors)
    with pytest.raises(kind, match=problem):
        plan_head(folder, target=targets["qwen35"])


def test_targets_without_such_blocks(
    targets: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    tensors = published(targets["qwen35"], 4, _QWEN, "mtp.layers.0.")
    folder = save(tmp_path / "checkpoint", tensors)
    with pytest.raises(UnsupportedModelError, match=r"target is a llama.*--mtp makes the file"):
        plan_head(folder, target=target_facts(tiny_model))
    # A target whose file was made without its blocks, as many are.
    bare = write_tiny_qwen35(tmp_path / "bare.gguf", blocks=0)
    reports, made = plan_set(bare, [folder], tmp_path / "set").convert()
    assert [report.architecture for report in reports] == ["qwen35"]
    assert made.drafter == f"mtp({quoted(str(reports[0].output))})"
    assert drafted(bare, made.drafter)[1] > 0
