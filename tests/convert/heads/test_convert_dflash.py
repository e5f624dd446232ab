"""Block drafters of every published layout become llama.cpp's `dflash` files, and draft alike."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.converted_heads import check_same_tensors, converted, recognised, tensors_of
from support.saved_dflash import Layout, published_config, published_tensors, save_published
from support.tiny_dflash import TinyDFlash, token_matrices, variant
from support.tiny_models import CHAT, F32

from specrun.bindings.contexts import ContextOptions
from specrun.bindings.errors import (
    MalformedFileError,
    PairError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.bindings.gguf import ArrayValue, read_header
from specrun.bindings.models import Model
from specrun.convert import convert_head, plan_head, target_facts
from specrun.convert.checkpoint import read_safetensors
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.dflash.drafter import BlockDrafter
from specrun.runtime.drafters.dflash.source import BlockState
from specrun.runtime.language import quoted

DFLASH = TinyDFlash(taps=(1, 3), spread=0.2)
DFLASH2 = variant(DFLASH, generation="dflash2")
DSPARK = variant(DFLASH, generation="dspark")
OWN = variant(DSPARK, own_tokens=True)
FEW = variant(DSPARK, draft_tokens=96)
CASES: dict[str, tuple[Layout, TinyDFlash, dict[str, Any]]] = {
    "z-lab's DFlash": ("z-lab", DFLASH, {}),
    "of windows": ("z-lab", variant(DFLASH, window=8), {}),
    "JetSpec": ("z-lab", variant(DFLASH, causal=True), {}),
    "z-lab's DFlash2": ("z-lab", DFLASH2, {}),
    "DeepSpec's DSpark": ("deepspec", OWN, {}),
    "no confidence": ("deepspec", variant(OWN, confidence=False), {}),
    "DSpark of five layers": ("deepspec", variant(OWN, taps=(0, 1, 2, 3, 5), layers=3), {}),
    "a gated Markov head": ("deepspec", variant(OWN, head="gated"), {}),
    "a recurrent one": ("speculators", variant(FEW, head="rnn", from_anchor=False), {}),
    "speculators' DFlash": ("speculators", variant(DFLASH, draft_tokens=96), {}),
    "all windows, causal": (
        "speculators",
        variant(DFLASH, window=8, whole_window=True, causal=True),
        {},
    ),
    "speculators' DSpark": ("speculators", FEW, {}),
    "the first slot unused": ("speculators", variant(FEW, from_anchor=False), {}),
    "as it was at first": (
        "speculators",
        variant(FEW, from_anchor=False),
        {"sample_from_anchor": None},
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write_random_llama(path, RandomLlama(**{**CHAT, "layers": 6}))
    return path


def metadata_of(path: Path) -> dict[str, Any]:
    found = read_header(path).metadata
    own = {key: value for key, value in found.items() if key.startswith(("dflash.", "tokenizer."))}
    return {key: list(v) if isinstance(v, ArrayValue) else v for key, v in own.items()}


@pytest.mark.parametrize(("layout", "drafter", "changes"), CASES.values(), ids=CASES)
def test_files_are_the_tiny_writers(
    target: Path, tmp_path: Path, layout: Layout, drafter: TinyDFlash, changes: dict[str, Any]
) -> None:
    folder = save_published(tmp_path / "drafter", drafter, layout, **changes)
    output = tmp_path / "drafter.gguf"
    converted(folder, output, target, "dflash")
    theirs = drafter.write(tmp_path / "theirs.gguf", target)
    check_same_tensors(output, theirs)
    assert metadata_of(output) == metadata_of(theirs)
    with Model(output) as model:  # llama.cpp's own loader
        assert model.vocabulary.size == drafter.vocab_size


def drafts(target: Path, file: Path) -> tuple[list[int], int, int]:
    """The text and the counts of drafts of a greedy run."""
    params = SamplingParams(temperature=0.0, logit_bias={319: float("-inf")})
    with Runtime(target, f"dflash({quoted(str(file))}, n=4)", **F32) as runtime:
        result = runtime.generate(list(b"the quick brown fox, the quick"), params, max_tokens=24)
    assert result.stats.drafted > 0
    return list(result.token_ids), result.stats.drafted, result.stats.accepted


# -- what llama.cpp has only in another form -------------------------------------------------------


def test_a_first_slot_without_a_markov_head_gets_one_of_zeros(target: Path, tmp_path: Path) -> None:
    """DeepSpec's own DFlash: its block predicts from the last token's place on."""
    own = variant(DFLASH, own_tokens=True)
    changes = {"markov_rank": 0, "markov_head_type": None, "enable_confidence_head": False}
    folder = save_published(tmp_path / "drafter", own, "deepspec", **changes)
    output = tmp_path / "a.gguf"
    convert_head(folder, output, target=target, outtype="f32")
    found = tensors_of(output)
    assert not found["markov_w1.weight"].any()
    assert not found["markov_w2.weight"].any()
    assert metadata_of(output)["dflash.sample_from_anchor"] is True
    assert drafts(target, output)


def test_a_confidence_of_states_alone_is_widened_by_zeros(target: Path, tmp_path: Path) -> None:
    weight = np.arange(32, dtype=np.float32)[np.newaxis]
    folder = save_published(
        tmp_path / "drafter", OWN, "deepspec", weights={"confidence_head.proj.weight": weight},
        confidence_head_with_markov=False,
    )  # fmt: skip
    output = tmp_path / "a.gguf"
    convert_head(folder, output, target=target)
    found = tensors_of(output)["conf_proj.weight"]
    np.testing.assert_array_equal(found[0, :32], weight[0])
    assert found.shape == (1, 40)
    assert not found[0, 32:].any()
    assert drafts(target, output)


def test_neighbours_that_turn_together_become_halves(target: Path, tmp_path: Path) -> None:
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm")
    tensors = published_tensors(DFLASH)
    changed = {}
    for layer in range(2):
        for name in names:
            key = f"layers.{layer}.{name}.weight"
            halves = tensors[key].reshape(-1, 2, 4, *tensors[key].shape[1:])
            changed[key] = halves.swapaxes(1, 2).reshape(tensors[key].shape)
    folder = save_published(
        tmp_path / "drafter", DFLASH, "z-lab", weights=changed, rope_is_neox_style=False
    )
    convert_head(folder, tmp_path / "a.gguf", target=target, outtype="f32")
    theirs = tensors_of(DFLASH.write(tmp_path / "b.gguf", target))
    for name, array in tensors_of(tmp_path / "a.gguf").items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


def test_positions_of_a_target_with_sections_turn_by_one(target: Path, tmp_path: Path) -> None:
    facts = dataclasses.replace(target_facts(target), has_sections=True)
    folder = save_published(tmp_path / "drafter", DFLASH, "z-lab")
    convert_head(folder, tmp_path / "a.gguf", target=facts, outtype="f32")
    theirs = variant(DFLASH, mrope=True).write(tmp_path / "b.gguf", target)
    assert metadata_of(tmp_path / "a.gguf") == metadata_of(theirs)
    assert drafts(target, tmp_path / "a.gguf")


def test_names_may_begin_with_model(target: Path, tmp_path: Path) -> None:
    tensors = published_tensors(OWN)
    moved = dict.fromkeys(tensors) | {f"model.{n}": a for n, a in tensors.items()}
    folder = save_published(tmp_path / "drafter", OWN, "deepspec", weights=moved)
    plan = plan_head(folder, target=target)
    assert {tensor.name for tensor in plan.tensors} == OWN.tensors().keys()


def test_codebooks_may_be_embeddings(target: Path, tmp_path: Path) -> None:
    books = {n: a for n, a in published_tensors(DFLASH2).items() if n.endswith("_codebook")}
    assert len(books) == 2
    moved = dict.fromkeys(books) | {f"{name}.weight": array for name, array in books.items()}
    folder = save_published(tmp_path / "drafter", DFLASH2, "z-lab", weights=moved)
    plan = plan_head(folder, target=target)
    assert {tensor.name for tensor in plan.tensors} == DFLASH2.tensors().keys()


def test_z_labs_usual_layers_are_computed_as_its_program_does(target: Path, tmp_path: Path) -> None:
    config = published_config(DFLASH, "z-lab")
    inner = {**config["dflash_config"], "target_layer_ids": None}
    folder = save_published(
        tmp_path / "drafter", DFLASH, "z-lab", dflash_config=inner, num_target_layers=6
    )
    plan = plan_head(folder, target=target)
    values = {key: value for key, value, _, _ in plan.metadata}
    assert values["dflash.target_layers"] == [2, 4]  # outputs of layers 1 and 3


def test_settings_of_the_logits_and_the_rope(target: Path, tmp_path: Path) -> None:
    config = published_config(DFLASH, "z-lab")
    inner = {**config["dflash_config"], "final_logit_softcapping": 30.0, "output_multiplier": 0.5}
    inner |= {"input_embedding_scale": 4.0, "use_swa": True, "swa_window_size": 16}
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    folder = save_published(
        tmp_path / "drafter", DFLASH, "z-lab", dflash_config=inner, rope_scaling=rope,
        hidden_act="gelu_pytorch_tanh", partial_rotary_factor=0.5,
    )  # fmt: skip
    convert_head(folder, tmp_path / "a.gguf", target=target)
    found = metadata_of(tmp_path / "a.gguf")
    assert found["dflash.final_logit_softcapping"] == 30.0
    assert found["dflash.logit_scale"] == 0.5
    assert found["dflash.embedding_scale"] == 4.0
    assert found["dflash.attention.sliding_window"] == 16
    assert found["dflash.attention.sliding_window_pattern"] == [True, True]
    assert found["dflash.rope.scaling.type"] == "yarn"
    assert found["dflash.rope.dimension_count"] == 4
    assert found["dflash.hidden_activation"] == "gelu_pytorch_tanh"
    assert drafts(target, tmp_path / "a.gguf")


# -- layers of Gemma 4 -----------------------------------------------------------------------------


WIDE, HEADS, HEAD = 48, 4, 16
GEMMA4 = {
    "architectures": ["Gemma4DSparkModel"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": HEAD,
    "attention_k_eq_v": True,
    "intermediate_size": WIDE,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "layer_types": ["full_attention"] * 2,
    "sliding_window": 512,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "block_size": 6,
    "mask_token_id": 5,
    "target_layer_ids": [0, 2],
    "markov_rank": 0,
    "enable_confidence_head": False,
}


def gemma4_weights() -> dict[str, np.ndarray[Any, Any]]:
    """Random weights of such a drafter, by the names of DeepSpec's program."""
    random = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (32, 64)}
    shapes |= {"embed_tokens.weight": (320, 32), "lm_head.weight": (320, 32)}
    shapes |= {"norm.weight": (32,), "hidden_norm.weight": (32,)}
    for layer in range(2):
        own: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (HEADS * HEAD, 32),
            "self_attn.k_proj": (HEAD, 32),
            "self_attn.o_proj": (32, HEADS * HEAD),
            "mlp.gate_proj": (WIDE, 32),
            "mlp.up_proj": (WIDE, 32),
            "mlp.down_proj": (32, WIDE),
        }
        own |= {f"self_attn.{part}_norm": (HEAD,) for part in "qk"}
        parts = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        own |= {f"{part}_layernorm": (32,) for part in parts}
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in own.items()}
        shapes[f"layers.{layer}.layer_scalar"] = (1,)
    return {
        name: (
            random.standard_normal(shape) * shape[-1] ** -0.5
            if len(shape) > 1
            else 1.0 + 0.2 * random.standard_normal(shape)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }


def gemma4_logits(features: np.ndarray[Any, Any], last: int) -> np.ndarray[Any, Any]:
    """The block's logits by deepseek-ai/DeepSpec, modeling/dspark/gemma4/modeling.py."""
    w = {name: array.astype(np.float64) for name, array in gemma4_weights().items()}

    def rms(x: Any, weight: Any = 1.0) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight

    def turned(x: Any) -> Any:
        frequencies = np.zeros(HEAD // 2)
        frequencies[: HEAD // 8] = 1e6 ** (-2 * np.arange(HEAD // 8) / HEAD)
        angles = np.arange(start, start + len(x))[:, None, None] * frequencies
        one, other = x[..., : HEAD // 2], x[..., HEAD // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([one * cos - other * sin, one * sin + other * cos], -1)

    text = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = w["embed_tokens.weight"][[last] + [5] * 5] * 32**0.5
    for layer in range(2):
        own = {k.split(".", 2)[2]: v for k, v in w.items() if k.startswith(f"layers.{layer}.")}
        normed = rms(x, own["input_layernorm.weight"])
        start = len(text)
        query = (normed @ own["self_attn.q_proj.weight"].T).reshape(6, HEADS, HEAD)
        query = turned(rms(query, own["self_attn.q_norm.weight"]))
        plain = np.concatenate([text, normed]) @ own["self_attn.k_proj.weight"].T
        start = 0
        key = turned(rms(plain[:, None], own["self_attn.k_norm.weight"]))[:, 0]
        scores = np.einsum("qhd,kd->hqk", query, key)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,kd->qhd", shares, rms(plain)).reshape(6, -1)
        mixed = mixed @ own["self_attn.o_proj.weight"].T
        x = x + rms(mixed, own["post_attention_layernorm.weight"])
        normed = rms(x, own["pre_feedforward_layernorm.weight"])
        # ggml takes this function from a table in F16.
        gate = (normed @ own["mlp.gate_proj.weight"].T).astype(np.float16).astype(np.float64)
        gate = 0.5 * gate * (1 + np.tanh(0.7978845608028654 * (gate + 0.044715 * gate**3)))
        gate = gate.astype(np.float16)
        wide = (gate * (normed @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
        x = (x + rms(wide, own["post_feedforward_layernorm.weight"])) * own["layer_scalar"]
    return np.asarray(rms(x, w["norm.weight"]) @ w["lm_head.weight"].T)


def save_gemma4(folder: Path, **changes: Any) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**GEMMA4, **changes}))
    save_file(gemma4_weights(), folder / "model.safetensors")
    return folder


def test_gemma4s_layers_compute_what_the_reference_does(target: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.gguf"
    convert_head(save_gemma4(tmp_path / "drafter"), output, target=target, outtype="f32")
    features = np.random.default_rng(1).standard_normal((9, 64)).astype(np.float32)
    text = [*range(20, 29), 7]
    with Model(target) as model:
        drafter = BlockDrafter(output, model, n_threads=1)
        assert drafter.file.generation == "DSpark"
        assert drafter.file.taps == (1, 3)
        cells = drafter.cells(ContextOptions(**{**F32, "n_ctx": 64}), 6)
        state = BlockState(cells)
        state.begin(text)
        state.learn(0, features, text)
        rows = state.block(text, 6)
        assert rows is not None
        wanted = gemma4_logits(features.astype(np.float64), 7)
        for slot in range(6):
            whole = rows.after(slot, [11]).whole
            assert whole is not None
            np.testing.assert_allclose(whole[0], wanted[slot], rtol=1e-4, atol=1e-4)
        cells.close()
        drafter.close()
    assert drafts(target, output)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention_k_eq_v": False}, "whose values are their keys"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "full attention"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"enable_moe_block": True}, "enable_moe_block = True"),
        ({"hidden_size_per_layer_input": 8}, "inputs of each layer"),
    ],
)
def test_what_gemma4s_graph_lacks_is_refused(
    target: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=problem):
        plan_head(save_gemma4(tmp_path / "drafter", **changes), target=target)


# -- what does not fit -----------------------------------------------------------------------------


ONES = np.ones(8, np.float32)
FAULTS: dict[str, tuple[Layout, dict[str, Any], type[SpecrunError], str]] = {
    "a layer the target lacks": (
        "deepspec", {"target_layer_ids": [1, 6]}, PairError, "input of layer 7.* has 6 layers",
    ),
    "another number of taps": (
        "deepspec", {"target_layer_ids": [0, 1, 2]}, MalformedFileError, "3 layers of 32 are read",
    ),
    "layers that are no numbers": (
        "deepspec", {"target_layer_ids": [0, "x"]}, MalformedFileError, "no whole numbers",
    ),
    "no layers": ("deepspec", {"target_layer_ids": None}, MalformedFileError, "name the layers"),
    "another target's layers": (
        "deepspec", {"num_target_layers": 36}, PairError, "for 36 layers, and the target has 6",
    ),
    "another width": (
        "deepspec", {"target_hidden_size": 64}, UnsupportedModelError, "64 numbers into 32",
    ),
    "other tokens": ("deepspec", {"vocab_size": 999}, PairError, "999 tokens.* has 320"),
    "a mask outside": ("deepspec", {"mask_token_id": 320}, PairError, "mask is token 320"),
    "no mask": ("deepspec", {"mask_token_id": None}, MalformedFileError, "mask_token_id"),
    "a block of one": ("deepspec", {"block_size": 1}, MalformedFileError, "block of 1 tokens"),
    "no block": ("deepspec", {"block_size": None}, MalformedFileError, "block_size"),
    "biases": ("deepspec", {"attention_bias": True}, UnsupportedModelError, "attention_bias"),
    "relu": ("deepspec", {"hidden_act": "relu"}, UnsupportedModelError, "hidden_act 'relu'"),
    "a gate that is not stated": (
        "deepspec", {"weights": {"markov_head.gate_proj.weight": ONES}}, MalformedFileError,
        "type 'vanilla' by its config, and 'gated'",
    ),
    "a gate of another size": (
        "deepspec", {"weights": {"markov_head.gate_proj.weight": ONES}, "markov_head_type": None},
        MalformedFileError, r"gate_proj.weight of shape \(8,\), and \(8, 40\) is needed",
    ),
    "a gate by its name": (
        "deepspec", {"markov_head_type": "gated"}, MalformedFileError, "no gate and no state",
    ),
    "another head": (
        "deepspec", {"markov_head_type": "lstm"}, UnsupportedModelError, "type 'lstm'",
    ),
    "Domino": (
        "z-lab", {"architectures": ["DominoDraftModel"]}, UnsupportedModelError, "Domino",
    ),
    "DeepSeek-V4": (
        "deepspec", {"architectures": ["DeepseekV4DSparkModel"]}, UnsupportedModelError,
        "DSpark of DeepSeek-V4",
    ),
    "an unknown one": (
        "z-lab", {"architectures": ["DFlash9DraftModel"]}, UnsupportedModelError,
        "unknown architecture, DFlash9DraftModel",
    ),
    "a tensor more": (
        "deepspec", {"weights": {"reranker.weight": ONES}}, UnsupportedModelError,
        "does not know: reranker.weight",
    ),
    "a tensor less": (
        "deepspec", {"weights": {"layers.1.self_attn.q_norm.weight": None}}, MalformedFileError,
        "no tensor layers.1.self_attn.q_norm.weight",
    ),
    "embeddings alone": (
        "deepspec", {"weights": {"lm_head.weight": None}}, UnsupportedModelError,
        "embed_tokens.weight and no lm_head.weight",
    ),
    "half a Markov head": (
        "deepspec", {"weights": {"markov_head.markov_w1.weight": None}}, MalformedFileError,
        "no tensor markov_head.markov_w1.weight",
    ),
    "a mask of its own kind in some layers": (
        "speculators", {"sliding_window_non_causal": False}, UnsupportedModelError,
        "one mask for all",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layout", "changes", "kind", "problem"), FAULTS.values(), ids=FAULTS)
def test_what_cannot_be_right_is_refused(
    target: Path,
    tmp_path: Path,
    layout: Layout,
    changes: dict[str, Any],
    kind: type[SpecrunError],
    problem: str,
) -> None:
    drafter = variant(FEW, window=8) if layout == "speculators" else OWN
    drafter = DFLASH if layout == "z-lab" else drafter
    folder = save_published(tmp_path / "drafter", drafter, layout, **changes)
    assert recognised(folder) == "dflash"
    with pytest.raises(kind, match=problem):
        plan_head(folder, target=target)


# -- an embedding of the mask in a file of its own ------------------------------------------------


VECTOR = np.linspace(-2.0, 2.0, 32, dtype=np.float32)


@pytest.mark.parametrize("form", ["named", "bare", "of a folder", "of its own matrices"])
def test_a_mask_embedding_replaces_a_row_of_the_targets(
    target: Path, tmp_path: Path, form: str
) -> None:
    torch = pytest.importorskip("torch")
    own = form == "of its own matrices"
    drafter = variant(DFLASH2, own_tokens=own)
    folder = save_published(tmp_path / "drafter", drafter, "z-lab")
    vector = torch.tensor(VECTOR)
    content = {"mask_token_id": drafter.mask, "embedding": vector}
    torch.save(vector[None] if form == "bare" else content, folder / "mask_embedding.pt")
    with pytest.raises(UnsupportedModelError, match=r"of its mask in .*--allow-pickle"):
        plan_head(folder, target=target)
    facts: Any = target
    embedding, output = token_matrices(target)
    if form == "of a folder":  # as the facts of a folder have them, in the checkpoint's own type
        path = tmp_path / "matrices.safetensors"
        save_file({"a": embedding.astype(np.float16), "b": output.astype(np.float16)}, path)
        matrices = read_safetensors(path)
        facts = dataclasses.replace(
            target_facts(target), load_matrices=lambda: (matrices["a"], matrices["b"])
        )
    made = tmp_path / "a.gguf"
    convert_head(folder, made, target=facts, outtype="f32", allow_pickle=True)
    found = tensors_of(made)
    if own:
        embedding, output = (drafter.tensors()[f"{n}.weight"] for n in ("token_embd", "output"))
    wanted = embedding.copy()
    wanted[drafter.mask] = VECTOR
    exact = {"rtol": 1e-3 if form == "of a folder" else 0.0, "atol": 0.0}
    np.testing.assert_allclose(found["token_embd.weight"], wanted, **exact)
    np.testing.assert_allclose(found["output.weight"], output, **exact)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"mask_token_id": 7, "embedding": VECTOR}, "of token 7, and the mask is token 5"),
        ({"mask_token_id": 5, "embedding": VECTOR[:9]}, "has 9 numbers .* embeddings of 32"),
        ({"mask_token_id": 5}, "holds no embedding"),
    ],
)
def test_mask_embeddings_that_cannot_be_right(
    target: Path, tmp_path: Path, content: dict[str, Any], problem: str
) -> None:
    torch = pytest.importorskip("torch")
    folder = save_published(tmp_path / "drafter", DFLASH, "z-lab")
    content = {k: torch.tensor(v) if k == "embedding" else v for k, v in content.items()}
    torch.save(content, folder / "mask_embedding.pt")
    with pytest.raises(MalformedFileError, match=problem):
        plan_head(folder, target=target, allow_pickle=True)


def test_a_drafter_that_is_quantized_already(target: Path, tmp_path: Path) -> None:
    """As published ones in NVFP4, whose scales are numbers of one byte."""
    import torch
    from safetensors.torch import load_file, save_file

    method = {"quant_method": "fp8"}
    folder = save_published(tmp_path / "drafter", DFLASH2, "z-lab", quantization_config=method)
    plan_head(folder, target=target)  # such settings are often the target's
    tensors = load_file(folder / "model.safetensors")
    scale = "layers.0.self_attn.q_proj.weight_scale"
    save_file(
        tensors | {scale: torch.ones(4).to(torch.float8_e4m3fn)}, folder / "model.safetensors"
    )
    with pytest.raises(UnsupportedModelError, match="is quantized already"):
        plan_head(folder, target=target)


def test_another_width_of_the_target(tmp_path: Path) -> None:
    other = tmp_path / "wide.gguf"
    write_random_llama(other, RandomLlama(**{**CHAT, "layers": 6, "width": 64}))
    folder = save_published(tmp_path / "drafter", DFLASH, "z-lab")
    with pytest.raises(PairError, match="states of 32 numbers, and the target's have 64"):
        plan_head(folder, target=other)
