"""EAGLE-3 checkpoints of every layout become llama.cpp's own: its loader takes them, tensors are as
it wants them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.converted_heads import check_same_tensors, converted, tensors_of
from support.tiny_models import CHAT

from specrun.bindings.errors import (
    MalformedFileError,
    PairError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model
from specrun.convert import convert_head, plan_head
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.drafters.eagle import MASK_FEATURES, Eagle3Head

torch = pytest.importorskip("torch")
from support.tiny_eagle3 import LLAMA3, YARN, Variant, random_eagle3  # noqa: E402

HIDDEN, VOCAB, LAYERS, TAPS = 32, 320, 6, (1, 3, 5)
CONFIG = {"vocab_size": VOCAB}
VARIANTS = {
    "plain": Variant(),
    "speculators": Variant(changes={"norm_before_residual": True}, own_embedding=True),
    "norm_before_fc": Variant(norm_before_fc=True),
    "EAGLE-3.1": Variant(fc_norm=True, changes={"norm_output": True}),
    "llama3 rope": Variant(changes={"rope_scaling": LLAMA3}, n_kv_heads=1),
    "linear rope": Variant(changes={"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "all tokens": Variant(draft_tokens=None),
    "yarn rope": Variant(changes={"rope_scaling": YARN}),
}
# What llama.cpp has no graph for.
OURS = {
    "three layers": Variant(n_layers=3, head_norms=True),
    "biases": Variant(biased=True, n_layers=2),
    "P-EAGLE": Variant(n_layers=4, mask=7, own_embedding=True),
}
VARIANTS |= OURS


LAYOUTS = [("speculators", name) for name in VARIANTS]
# Other names of layers, and settings in another place.
LAYOUTS += [("safeailab", name) for name in ("plain", "three layers", "P-EAGLE")]
LAYOUTS += [("specforge", n) for n in ("speculators", "norm_before_fc", "EAGLE-3.1", "P-EAGLE")]


@pytest.mark.parametrize(("layout", "name"), LAYOUTS)
def test_files_are_those_of_llama_cpps_converter(
    tiny_deep_model: Path, tmp_path: Path, layout: str, name: str
) -> None:
    variant = VARIANTS[name]
    head = random_eagle3(HIDDEN, VOCAB, variant)
    named = {} if layout != "safeailab" else {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    if variant.mask is not None and layout != "speculators":
        named |= {"ptd_token_id": variant.mask}  # as vLLM's configs have it
    folder = head.save(tmp_path / "head", CONFIG, layout, **named)
    output = tmp_path / "head.gguf"
    converted(folder, output, tiny_deep_model, "eagle3")
    theirs = head.write(tmp_path / "theirs.gguf", tiny_deep_model)
    check_same_tensors(output, theirs, rtol=1e-6)
    a, b = read_header(output).metadata, read_header(theirs).metadata
    assert {key for key in b if key not in a} == set()
    for key in b:
        if key not in (
            "general.name",
            "GGUF.tensor_count",
            "GGUF.kv_count",
            "eagle3.target_layers",
        ):
            assert a[key] == b[key] or abs(float(a[key]) - float(b[key])) < 1e-6, key  # type: ignore[arg-type]
    assert list(a["eagle3.target_layers"]) == list(TAPS)  # type: ignore[arg-type]
    if not variant.fc_norm and variant not in OURS.values():
        with Model(output) as model:  # llama.cpp's own loader
            assert model.architecture == "eagle3"
            assert model.vocabulary.size == VOCAB


def test_features_of_a_mask_become_a_vector_with_numpy_2_0(
    tiny_deep_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reshape = np.reshape
    # Its second argument has another name there.
    monkeypatch.setattr(np, "reshape", lambda a, newshape, order="C": reshape(a, newshape, order))
    folder = random_eagle3(HIDDEN, VOCAB, VARIANTS["P-EAGLE"]).save(
        tmp_path / "head", CONFIG, "speculators"
    )
    convert_head(folder, tmp_path / "a.gguf", target=tiny_deep_model, outtype="f32")
    assert tensors_of(tmp_path / "a.gguf")[MASK_FEATURES].shape == (3 * HIDDEN,)


def test_deepspecs_heads_read_five_layers_and_norm_queries_and_keys(
    tiny_deep_model: Path, tmp_path: Path
) -> None:
    taps = {"taps": (0, 2, 3, 4, 5)}
    variant = Variant(head_norms=True, draft_tokens=VOCAB, own_embedding=True, changes=taps)
    head = random_eagle3(HIDDEN, VOCAB, variant)
    weights = {name: array for name, array in head.weights.items() if name not in ("d2t", "t2d")}
    head = dataclasses.replace(head, weights=weights)
    folder = head.save(tmp_path / "head", CONFIG, "deepspec")
    converted(folder, tmp_path / "a.gguf", tiny_deep_model, "eagle3")
    check_same_tensors(tmp_path / "a.gguf", head.write(tmp_path / "b.gguf", tiny_deep_model))
    with Model(tiny_deep_model) as target:
        loaded = Eagle3Head(tmp_path / "a.gguf", target, ranks=3, n_threads=1)
        assert loaded.taps == taps["taps"]
        loaded.close()


def test_the_usual_type_is_q8_0_and_the_runtime_takes_it(
    tiny_deep_model: Path, tmp_path: Path
) -> None:
    folder = random_eagle3(HIDDEN, VOCAB).save(tmp_path / "EAGLE3-tiny", CONFIG, "speculators")
    report = convert_head(folder, tmp_path, target=tiny_deep_model)
    assert report.output.name.startswith("EAGLE3-tiny")
    assert report.tensor_types == {"Q8_0": 9, "F32": 4, "I64": 1}
    with Model(tiny_deep_model) as target:
        head = Eagle3Head(report.output, target, ranks=3, n_threads=1)
        assert head.taps == TAPS
        head.close()
    with Model(report.output):
        pass


def test_layers_are_safeailabs_where_none_are_named(tmp_path: Path) -> None:
    target = tmp_path / "target.gguf"
    write_random_llama(target, RandomLlama(**{**CHAT, "layers": 9}))
    head = random_eagle3(HIDDEN, VOCAB)
    plan = plan_head(head.save(tmp_path / "head", CONFIG), target=target)
    layers = next(value for key, value, _, _ in plan.metadata if key == "eagle3.target_layers")
    assert layers == [2, 4, 6]


def test_pickles_of_safeailab(tiny_deep_model: Path, tmp_path: Path) -> None:
    head = random_eagle3(HIDDEN, VOCAB)
    folder = head.save(tmp_path / "head", CONFIG, eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    (folder / "model.safetensors").unlink()
    tensors = {
        name: torch.tensor(np.ascontiguousarray(weight)) for name, weight in head.weights.items()
    }
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="--allow-pickle"):
        convert_head(folder, tmp_path / "a.gguf", target=tiny_deep_model)
    convert_head(
        folder, tmp_path / "a.gguf", target=tiny_deep_model, outtype="f32", allow_pickle=True
    )
    np.testing.assert_array_equal(tensors_of(tmp_path / "a.gguf")["d2t"], head.target_ids)


def test_a_window_of_all_layers_is_kept(tiny_deep_model: Path, tmp_path: Path) -> None:
    head = random_eagle3(HIDDEN, VOCAB)
    slides = {"layer_types": ["sliding_attention"], "sliding_window": 96}
    plan = plan_head(head.save(tmp_path / "head", CONFIG, **slides), target=tiny_deep_model)
    values = {key: value for key, value, _, _ in plan.metadata}
    assert values["eagle3.attention.sliding_window"] == 96


def test_a_map_to_the_same_ids_is_left_out(tiny_deep_model: Path, tmp_path: Path) -> None:
    head = random_eagle3(HIDDEN, VOCAB, Variant(draft_tokens=VOCAB))
    assert not head.weights["d2t"].any()
    folder = head.save(tmp_path / "head", CONFIG, "speculators")
    convert_head(folder, tmp_path / "a.gguf", target=tiny_deep_model, outtype="f32")
    assert "d2t" not in tensors_of(tmp_path / "a.gguf")
    assert tensors_of(tmp_path / "a.gguf")["output.weight"].shape == (VOCAB, HIDDEN)


Change = Callable[[dict[str, Any], dict[str, Any]], object]
"""Changes the weights and the config of a checkpoint in place."""


def offset(place: int, token: int) -> Change:
    def change(weights: dict[str, Any], _config: dict[str, Any]) -> None:
        offsets = weights["d2t"].copy()
        offsets[place] = token - place
        weights["d2t"] = offsets

    return change


FAULTS: dict[str, tuple[Change, type[SpecrunError], str]] = {
    "a token beyond the target's": (offset(5, 320), PairError, (r"\(d2t\) names token 320, and "
                                                               r"the target has 320")),
    "a token below all": (offset(5, -2), PairError, "names token -2"),
    "a map of other numbers": (
        lambda w, _: w.update(d2t=w["d2t"].astype(np.float32)), MalformedFileError, "d2t of F32",
    ),
    "no map": (lambda w, _: w.pop("d2t"), MalformedFileError, (r"lm_head.weight of shape \(48, "
                                                              r"32\).*\(320, 32\)")),
    "another hidden size": (
        lambda w, c: (c.update(target_hidden_size=64), w.update({"fc.weight": np.zeros((32, 192),
        np.float32)})),
        PairError, "states of 64 numbers, and the target's have 32",
    ),
    "other tokens": (lambda _, c: c.update(vocab_size=999), PairError,
    ("999 tokens, and the target "
                                                                       "has 320")),
    "a layer the target lacks": (
        lambda _, c: c.update(eagle_aux_hidden_state_layer_ids=[1, 3, 6]), PairError,
        ("input of layer 6.* has 6 "
                                                                                      "layers"),
    ),
    "two layers": (
        lambda _, c: c.update(eagle_aux_hidden_state_layer_ids=[1, 3]), MalformedFileError,
        "2 layers of 32",
    ),
    "layers that are no numbers": (
        lambda _, c: c.update(eagle_aux_hidden_state_layer_ids=[1, 3, "x"]), MalformedFileError,
        "no whole numbers",
    ),
    "a missing tensor": (
        lambda w, _: w.pop("midlayer.self_attn.o_proj.weight"), MalformedFileError,
        "no tensor midlayer.self_attn.o_proj.weight",
    ),
    "no layer": (lambda w, _: w.pop("midlayer.hidden_norm.weight"), MalformedFileError,
    "no EAGLE-3 head"),
    "P-EAGLE without a mask": (
        lambda w, _: w.update({"mask_hidden": np.ones((1, 1, 96), np.float32)}),
        MalformedFileError, "lacks the token that stands for those to draft",
    ),
    "a mask of other layers": (
        lambda w, c: (c.update(mask_token_id=7), w.update({"mask_hidden": np.ones((1, 1, 64),
        np.float32)})),
        MalformedFileError, "mask_hidden of 64 numbers, and 96 are read",
    ),
    "a mask outside": (
        lambda w, c: (c.update(mask_token_id=320), w.update({"mask_hidden": np.ones((1, 1, 96),
        np.float32)})),
        PairError, "its mask is token 320",
    ),
    "P-EAGLE without features": (
        lambda _, c: c.update(speculators_model_type="peagle"), MalformedFileError,
        "no tensor mask_hidden",
    ),
    "a window": (
        lambda _, c: c.update(layer_types=["sliding_attention", "full_attention"]),
        UnsupportedModelError, "layers of sliding and of full attention",
    ),
    "a layer behind a gap": (
        lambda w, _: w.update({"layers.2.input_layernorm.weight": np.ones(32, np.float32)}),
        UnsupportedModelError, "does not know: layers.2.input_layernorm.weight",
    ),
    "EAGLE-4": (
        lambda _, c: c.update(architectures=["LlamaForCausalLMEagle4"]), UnsupportedModelError,
        "is EAGLE-4",
    ),
    "Gemma 4's layer": (
        lambda _, c: c.update(architectures=["Gemma4Eagle3Model"]), UnsupportedModelError,
        "a layer of Gemma 4",
    ),
    "promised biases": (lambda _, c: c.update(attention_bias=True), MalformedFileError,
    "no tensor midlayer.self_attn.q_proj.bias"),
    "longrope": (
        lambda _, c: c.update(rope_scaling={"rope_type": "longrope", "factor": 2.0}),
        UnsupportedModelError, "'longrope'",
    ),
    "a promised norm": (lambda _, c: c.update(norm_before_fc=True), MalformedFileError,
    "no tensor input_norm.weight"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "problem"), FAULTS.values(), ids=FAULTS)
def test_what_cannot_be_right_is_refused(
    tiny_deep_model: Path, tmp_path: Path, change: Change, kind: type[SpecrunError], problem: str
) -> None:
    head = random_eagle3(HIDDEN, VOCAB)
    weights = dict(head.weights)
    config: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    change(weights, config)
    folder = dataclasses.replace(head, weights=weights).save(tmp_path / "head", CONFIG, **config)
    with pytest.raises(kind, match=problem):
        convert_head(folder, tmp_path / "out.gguf", target=tiny_deep_model, kind="eagle3")
    assert not (tmp_path / "out.gguf").exists()


COPIED = {"num_hidden_layers": 40, "intermediate_size": 11008, "hidden_size": 4096}


@pytest.mark.parametrize("config", [COPIED, {"eagle_aux_hidden_state_layer_ids": []}])
def test_sizes_and_layers_are_those_of_the_tensors(
    tiny_deep_model: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    head = random_eagle3(HIDDEN, VOCAB)
    found = []
    for name, changes in (("own", {}), ("copied", config)):
        folder = head.save(tmp_path / name, CONFIG, **changes)
        convert_head(folder, tmp_path / f"{name}.gguf", target=tiny_deep_model, outtype="f32")
        metadata = read_header(tmp_path / f"{name}.gguf").metadata
        found.append({key: metadata[key] for key in metadata if key.startswith("eagle3.")})
    assert found[0] == found[1]


def test_five_layers_that_nobody_names_are_not_guessed(
    tiny_deep_model: Path, tmp_path: Path
) -> None:
    head = random_eagle3(HIDDEN, VOCAB)
    weights = {**head.weights, "fc.weight": np.zeros((HIDDEN, 5 * HIDDEN), np.float32)}
    silent = {"target_hidden_size": None}
    head = dataclasses.replace(head, weights=weights)
    folder = head.save(tmp_path / "head", CONFIG, **silent)
    with pytest.raises(UnsupportedModelError, match="reads 5 layers of the target and does not"):
        convert_head(folder, tmp_path / "a.gguf", target=tiny_deep_model)
