"""Hydra checkpoints with upstream's names become GGUF files that compute the same as the
reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_checkpoints import safetensors_bytes

from specrun.bindings.errors import (
    MalformedFileError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model
from specrun.convert import convert_head, plan_head, target_facts
from specrun.convert.heads.head_conversion import HEAD_KINDS
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.drafters.hydra import HydraHead, PrefixCells

torch = pytest.importorskip("torch")
from support.tiny_hydra import LAYER, PREFIX, TinyHydra, log_probs, random_hydra  # noqa: E402

HIDDEN, VOCAB = 32, 320
STATES = np.random.default_rng(0).normal(size=(9, HIDDEN)).astype(np.float32)
PATHS = [[[7]], [[7, 3], [7, 9]], [[7, 3, 1], [7, 9, 200]]]
Folder = Callable[..., Path]


def config_of(heads: TinyHydra, **changes: Any) -> dict[str, Any]:
    config = {
        "hydra_num_heads": heads.heads,
        "hydra_num_layers": heads.blocks,
        "hydra_head_arch": "prefix-mlp" if heads.prefixed else "mlp",
        "grounded_heads": heads.grounded,
        "hidden_state_offset": 0,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "transformers_version": "4.35.0",
    }
    return {name: value for name, value in {**config, **changes}.items() if value is not None}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Writes a checkpoint as upstream's training does: the state dict of the heads, with all of
    their modules."""

    def write(
        heads: TinyHydra, *, pickled: bool = True, drop: str = "", add: Any = None, **changes: Any
    ) -> Path:
        place = tmp_path / "hydra-tiny"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config_of(heads, **changes)))
        # Modules that the heads refer to are saved with them.
        weights = {
            "input_embed_fn.weight": torch.zeros(VOCAB, HIDDEN),
            **heads.weights,
            **(add or {}),
        }
        if heads.prefixed:
            weights[f"{PREFIX}embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
            weights[f"{LAYER}self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        if drop:
            weights = {name: weight for name, weight in weights.items() if drop not in name}
        if pickled:
            torch.save(weights, place / "hydra_lm_head.pt")
        else:
            arrays = {name: weight.numpy() for name, weight in weights.items()}
            (place / "hydra_lm_head.safetensors").write_bytes(safetensors_bytes(arrays))
        return place

    return write


def with_shared_blocks(heads: TinyHydra, blocks: int, *, once: bool) -> TinyHydra:
    """The later blocks are one, as upstream repeats it; `once` leaves out the copies."""
    whole = TinyHydra(**{**heads.__dict__, "weights": dict(heads.weights), "blocks": blocks})
    for head in range(heads.heads):
        for block in range(heads.blocks, blocks):
            for part in ("weight", "bias"):
                name = f"{whole.block(head, heads.blocks - 1)}.linear.{part}"
                if not once:
                    whole.weights[f"{whole.block(head, block)}.linear.{part}"] = heads.weights[name]
    return whole


def check(converted: Path, reference: TinyHydra, target: Path, tolerance: float = 1e-4) -> None:
    from gguf import GGUFReader, quants

    tensors = {
        tensor.name: quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in GGUFReader(target).tensors
    }
    embedding, output = tensors["token_embd.weight"], tensors["output.weight"]
    with Model(target) as model:
        head = HydraHead(converted, model, ranks=[VOCAB] * reference.heads, n_threads=1)
        for paths in PATHS:
            best = head.best_laws(STATES[0], paths)
            expected = np.take_along_axis(
                log_probs(reference, STATES[0], paths, embedding, output),
                best.tokens.astype(np.intp),
                1,
            )
            np.testing.assert_allclose(best.log_probs, expected, rtol=tolerance, atol=tolerance)
        assert (head.prefix is not None) == reference.prefixed
        if head.prefix is not None:
            states = reference.double().prefix_states(torch.tensor(STATES, dtype=torch.float64))
            with closing(PrefixCells(head, head.prefix, 16)) as cells:
                np.testing.assert_allclose(
                    cells.evaluate(STATES, 0, 0), states, rtol=tolerance, atol=tolerance
                )
        head.close()


@pytest.mark.parametrize(
    ("heads", "pickled"),
    [
        (random_hydra(HIDDEN, VOCAB), True),
        (random_hydra(HIDDEN, VOCAB, blocks=3, own_output=False), False),
        (random_hydra(HIDDEN, VOCAB, blocks=2, grounded=False), False),
        (random_hydra(HIDDEN, VOCAB, blocks=2, prefix=True), True),
    ],
    ids=["one block", "target's output", "not grounded", "hydra++"],
)
def test_converted_heads_are_the_references(
    folder: Folder, tiny_model: Path, tmp_path: Path, heads: TinyHydra, pickled: bool
) -> None:
    report = convert_head(
        folder(heads, pickled=pickled),
        tmp_path / "h.gguf",
        target=tiny_model,
        outtype="f32",
        allow_pickle=pickled,
    )
    assert read_header(report.output).architecture == "hydra"
    check(report.output, heads, tiny_model)


@pytest.mark.parametrize(("once", "grounded"), [(True, True), (True, False), (False, True)])
def test_blocks_that_share_their_weights(
    folder: Folder, tiny_model: Path, tmp_path: Path, once: bool, grounded: bool
) -> None:
    heads = random_hydra(HIDDEN, VOCAB, blocks=2 if grounded else 1, grounded=grounded, prefix=True)
    source = folder(with_shared_blocks(heads, 4, once=once), hydra_num_layers=4)
    report = convert_head(
        source, tmp_path / "h.gguf", target=tiny_model, outtype="f32", allow_pickle=True
    )
    check(report.output, with_shared_blocks(heads, 4, once=False), tiny_model)


def test_matrices_are_quantized_and_vectors_are_not(
    folder: Folder, tiny_model: Path, tmp_path: Path
) -> None:
    heads = random_hydra(HIDDEN, VOCAB, prefix=True)
    report = convert_head(folder(heads), tmp_path / "h.gguf", target=tiny_model, allow_pickle=True)
    kinds = {tensor.name: tensor.type_name for tensor in read_header(report.output).tensors}
    assert (
        kinds["hydra.0.output.weight"]
        == kinds["hydra.2.skip.weight"]
        == kinds["hydra.prefix.ffn_down.weight"]
        == "Q8_0"
    )
    assert kinds["hydra.0.output.bias"] == kinds["hydra.prefix.attn_norm.weight"] == "F32"
    assert not [name for name in kinds if "embd" in name or "embed" in name]
    check(report.output, heads, tiny_model, 0.3)


def test_the_name_of_the_weights_or_of_the_tensors_is_enough(
    folder: Folder, tiny_model: Path
) -> None:
    """Without a word in the config the layout is read from the tensors."""
    heads = random_hydra(HIDDEN, VOCAB, blocks=2, prefix=True)
    names = (
        "hydra_num_heads",
        "hydra_num_layers",
        "hydra_head_arch",
        "grounded_heads",
        "hidden_state_offset",
    )
    source = folder(heads, pickled=False, **dict.fromkeys(names))
    (source / "hydra_lm_head.safetensors").rename(source / "model.safetensors")
    plan = plan_head(source, target=tiny_model)
    assert plan.architecture == "hydra"
    assert {tensor.name for tensor in plan.tensors} == heads.gguf_tensors().keys()
    assert [kind.name for kind in HEAD_KINDS if kind.in_tensors(heads.weights.keys())] == ["hydra"]


def test_rotary_scaling_is_the_targets(folder: Folder, tiny_model: Path, tmp_path: Path) -> None:
    """Linear scaling and Llama 3.1's divisors come from the target, from which upstream builds the
    prefix layer."""
    heads = random_hydra(
        HIDDEN,
        VOCAB,
        prefix=True,
        rope_base=5000.0,
        rope_factor=2.0,
        rope_divisors=(1.0, 1.0, 4.0, 8.0),
    )
    facts = target_facts(tiny_model)
    settings = {
        **facts.settings,
        "rope.freq_base": 5000.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 2.0,
    }
    settings["attention.layer_norm_rms_epsilon"] = heads.eps
    changed = type(facts)(
        **{
            **{name: getattr(facts, name) for name in facts.__slots__},
            "settings": settings,
            "load_rope_factors": lambda: np.array(heads.rope_divisors, np.float32),
        }
    )
    source = folder(heads)
    report = convert_head(
        source, tmp_path / "h.gguf", target=changed, outtype="f32", allow_pickle=True
    )
    check(report.output, heads, tiny_model)
    settings["rope.scaling.type"] = "yarn"
    with pytest.raises(UnsupportedModelError, match="yarn"):
        plan_head(source, target=changed, allow_pickle=True)


UNSUPPORTED = [
    ({"hydra_head_arch": "cross-attn"}, "hydra_head_arch 'cross-attn'"),
    ({"hydra_head_arch": "eagle-attn"}, "hydra_head_arch 'eagle-attn'"),
    ({"hidden_state_offset": 1}, "hidden_state_offset 1"),
    ({"hydra_num_heads": 2}, r"does not know: hydra_mlp\.2"),
    ({"hydra_num_heads": 33}, "33 heads"),
    ({"add": {"hydra_mlp.0.1.extra": torch.zeros(3)}}, r"hydra_mlp\.0\.1\.extra"),
]
MALFORMED = [
    ({"hydra_head_arch": "mlp"}, "a prefix layer, and hydra_head_arch is 'mlp'"),
    ({"grounded_heads": False}, "has res_connection tensors, and grounded_heads is false"),
    ({"hydra_num_heads": 5}, r"no tensor hydra_mlp\.3"),
    ({"hydra_num_heads": "four"}, "hydra_num_heads = 'four'"),
    ({"hydra_num_layers": 1}, "2 residual blocks of head 0, and hydra_num_layers is 1"),
    ({"drop": "hydra_mlp.1.1.linear.bias"}, r"no tensor hydra_mlp\.1\.1\.linear\.bias"),
    ({"drop": "2.1.res_connection.weight"}, r"no tensor hydra_mlp\.2\.1\.res_connection\.weight"),
    ({"drop": "self_attn.v_proj"}, "no tensor prefix_embeding_layer.layers.0.self_attn.v_proj"),
    ({"drop": "norm.weight"}, "no tensor prefix_embeding_layer"),
    ({"add": {"hydra_mlp.1.1.linear.weight": torch.zeros(HIDDEN, 7)}}, r"\(32, 7\)"),
]


@pytest.mark.parametrize(
    ("changes", "problem", "kind"),
    [
        *((*case, UnsupportedModelError) for case in UNSUPPORTED),
        *((*case, MalformedFileError) for case in MALFORMED),
    ],
)
def test_what_cannot_be_converted_is_refused(
    folder: Folder,
    tiny_model: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    kind: type[SpecrunError],
    problem: str,
) -> None:
    source = folder(random_hydra(HIDDEN, VOCAB, blocks=2, prefix=True), **changes)
    with pytest.raises(kind, match=problem):
        convert_head(source, tmp_path / "h.gguf", target=tiny_model, allow_pickle=True)
    assert not (tmp_path / "h.gguf").exists()


def test_a_prefix_layer_of_another_target_is_refused(folder: Folder, tmp_path: Path) -> None:
    source = folder(random_hydra(HIDDEN, VOCAB, prefix=True))
    other = tmp_path / "other heads.gguf"
    write_random_llama(other, RandomLlama(vocab_size=VOCAB, heads=4, kv_heads=4))
    with pytest.raises(MalformedFileError, match="keys of 16 numbers"):
        plan_head(source, target=other, allow_pickle=True)
