"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and 3.1, in llama.cpp's own layout, which loads them.

`fc.weight` [h, 3 * target's h] makes a state of three layers' inputs; `hidden_norm` and
`input_layernorm` norm it and the token's embedding before attention, whose matrices read both;
`norm.weight` and `lm_head.weight` [draft vocab, h] end the head. Token i of the draft vocabulary is
token i + `d2t`[i] of the target; `t2d`, the inverse, is left out, `embed_tokens.weight` is
optional. EAGLE-3.1 adds `input_norm.weight`, which llama.cpp has too, `fc_norm.{i}.weight` and
`norm_output`, which it has not.

DeepSpec's heads read five layers, `target_layer_ids`, and norm the queries and keys of each head,
which llama.cpp does not. Layers behind the first (speculators) read states alone, as a Llama's do.
P-EAGLE drafts all tokens at once, from pairs of a mask token and `mask_hidden` [1, 1, 3h], in
mostly four layers. SafeAILab's layout has `midlayer.*` and a flat config.json; SpecForge's,
of the same names, an `eagle_config` inside; that of RedHat's speculators `layers.0.*`, and the
sizes in `transformer_layer_config`. Some put `model.` before all names.

References: SafeAILab/EAGLE, eagle/model/cnets.py at 148042c5; vllm-project/speculators,
models/eagle3 and peagle; deepseek-ai/DeepSpec, modeling/eagle3; llama.cpp, conversion/llama.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from operator import methodcaller

from specrun.convert.checkpoint import Checkpoint, JsonObject
from specrun.convert.families import steps
from specrun.convert.families.family import Array, TensorRule
from specrun.convert.families.rope import describe_rope, llama3_factors
from specrun.convert.families.steps import require
from specrun.convert.gguf import Metadata
from specrun.convert.heads.head_kind import (
    HeadKind,
    HeadPlan,
    absolute_ids,
    architectures,
    as_stored,
    check_joined,
    check_taps,
    draft_ids,
    known_as,
    matrix_shape,
    whole_numbers,
)
from specrun.convert.heads.target_facts import TargetFacts, misfit
from specrun.runtime.drafters.eagle import DRAFTED, MASK_FEATURES, MASK_TOKEN

_LAYERS = ("midlayer.", "layers.0.")
_BEGINNINGS = [(prefix, prefix + layer) for prefix in ("", "model.") for layer in _LAYERS]
_ARCHITECTURES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}
_ARCHITECTURES |= {"Eagle3Speculator", "Eagle3DraftModel", "Qwen3Eagle3Model"}
_ARCHITECTURES |= {"PEagleSpeculator", "PEagleDraftModel"}
# Those whose graph neither llama.cpp nor the runtime has, by facts or tensors of their checkpoints.
_FOURTH = "EAGLE-4, which adds a candidate head and a window to EAGLE-3"
_GEMMA4 = "EAGLE-3 with a layer of Gemma 4"
_REFUSED_ARCHITECTURES = {"LlamaForCausalLMEagle4": _FOURTH, "Gemma4Eagle3Model": _GEMMA4}
_REFUSED_TENSORS = {"efficient_lm_head.weight": _FOURTH}
# The map from the target's tokens to the draft's, and tensors that only training uses.
_LEFT_OUT = ("t2d", "model.t2d", "verifier_norm.weight", "verifier_lm_head.weight")

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_OUTPUT_IDS = "target_layer_ids"  # DeepSpec's, named by their outputs
_NESTED = "eagle_config"
_VOCABULARY_MAP = "d2t"
_MASK = "mask_hidden"
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")  # as vLLM looks for them


def _plan(checkpoint: Checkpoint, target: TargetFacts) -> HeadPlan:
    config = _flat_config(checkpoint.config)
    _require_known(checkpoint, config)
    prefix, beginnings = _beginnings(checkpoint)
    hidden, joined = matrix_shape(checkpoint, f"{prefix}fc.weight")
    config = as_stored(checkpoint, config, beginnings[0], hidden)
    config = JsonObject({**config.values, "num_hidden_layers": len(beginnings)}, config.shown)
    reads = config.count("target_hidden_size", target.hidden_size)
    layers = _target_layers(checkpoint.config, target, joined // reads)
    check_taps(checkpoint, target, layers, target.n_layers - 1, target.n_layers)
    check_joined(checkpoint, joined, len(layers), reads)
    vocab_size = config.count("vocab_size", target.vocab_size)
    ids = draft_ids(checkpoint, target, _vocabulary_map(checkpoint))
    metadata = Metadata()
    steps.describe_decoder(config, metadata, "eagle3", key_length=True)
    describe_rope(config, metadata, "eagle3", scalings=("linear", "llama3", "yarn"))
    _describe_window(config, metadata)
    metadata.integers("eagle3.target_layers", layers)
    metadata.count("eagle3.target_hidden_size", reads)
    metadata.flag("eagle3.norm_before_residual", _has_setting(config, "norm_before_residual"))
    there = checkpoint.tensors
    all_normed = f"{prefix}input_norm.weight" in there
    all_normed = all_normed or _has_setting(config, "norm_before_fc")
    metadata.flag("eagle3.norm_before_fc", all_normed)
    each_normed = f"{prefix}fc_norm.0.weight" in there or _has_setting(config, "fc_norm")
    if each_normed:
        metadata.flag("eagle3.fc_norm", True)
    if _has_setting(config, "norm_output"):
        metadata.flag("eagle3.norm_output", True)
    metadata.add(target.load_tokenizer())
    rules = [
        *llama3_factors(config),
        *_ends(checkpoint, prefix, hidden, vocab_size, ids),
        *_fusion(prefix, (hidden, joined), len(layers), all_normed, each_normed),
        *_parallel(checkpoint, prefix, joined, target, metadata),
    ]
    for number, beginning in enumerate(beginnings):
        rules += _layer(checkpoint, config, number, beginning)
    # A map to the same tokens is no map.
    left_out = _LEFT_OUT if ids is not None else (*_LEFT_OUT, _vocabulary_map(checkpoint))
    return HeadPlan(metadata, rules, reads, vocab_size, left_out)


def _describe_window(config: JsonObject, metadata: Metadata) -> None:
    """Write how far back the layers see, if all of them slide."""
    kinds = {*map(str, config.items("layer_types"))}
    if "sliding_attention" not in kinds:
        return
    if len(kinds) > 1:
        mixed = "layers of sliding and of full attention: specrun has one kind for a head"
        raise config.unsupported(f"has {mixed}, and llama.cpp has full ones alone")
    metadata.count("eagle3.attention.sliding_window", config.count("sliding_window"))


def _flat_config(config: JsonObject) -> JsonObject:
    """Return the config with the settings that speculators wrap brought to the top."""
    wrapped = config.object("transformer_layer_config")
    return JsonObject({**config.values, **wrapped.values}, config.shown)


def _beginnings(checkpoint: Checkpoint) -> tuple[str, list[str]]:
    """Return the beginning of all names but the output matrix's, and those of each layer's.

    Raises MalformedFileError for no EAGLE-3 head.
    """
    for prefix, layer in _BEGINNINGS:
        if f"{layer}hidden_norm.weight" in checkpoint.tensors:
            # No layer is passed over: those behind a gap are unknown tensors.
            more = [layer]
            while f"{prefix}layers.{len(more)}.input_layernorm.weight" in checkpoint.tensors:
                more.append(f"{prefix}layers.{len(more)}.")
            return prefix, more
    raise checkpoint.malformed(
        "has no tensor midlayer.hidden_norm.weight or "
        "layers.0.hidden_norm.weight: it is incomplete, or no EAGLE-3 head"
    )


def _has_setting(config: JsonObject, name: str) -> bool:
    """Return a setting that may lie inside `eagle_config`; false if it is nowhere."""
    return config.flag(name, config.object(_NESTED).flag(name, False))


def _target_layers(config: JsonObject, target: TargetFacts, n_read: int) -> Sequence[int]:
    """Return the layers whose inputs the head reads.

    At the top of a config (speculators, vLLM, llama.cpp) layers are named by their inputs, inside
    `eagle_config` (SpecForge, SGLang, ModelOpt) and as `target_layer_ids` (DeepSpec) by their
    outputs, one less. If none are named, and `n_read` is three, they are SafeAILab's; raises
    UnsupportedModelError for another number.
    """
    nested = config.object(_NESTED)
    n = target.n_layers
    layers = [2, n // 2, n - 3]  # low, middle and high features
    if config.items(_LAYER_IDS):
        layers = whole_numbers(config, _LAYER_IDS)
    elif nested.items(_LAYER_IDS):
        layers = [output + 1 for output in whole_numbers(nested, _LAYER_IDS)]
    elif config.items(_OUTPUT_IDS):
        layers = [output + 1 for output in whole_numbers(config, _OUTPUT_IDS)]
    elif n_read != len(layers):
        problem = f"reads {n_read} layers of the target and does not name them"
        raise config.unsupported(f"{problem}: add their numbers as {_LAYER_IDS}")
    return layers


def _vocabulary_map(checkpoint: Checkpoint) -> str:
    """Return the name of the tensor that maps the draft vocabulary."""
    return _VOCABULARY_MAP if _VOCABULARY_MAP in checkpoint.tensors else f"model.{_VOCABULARY_MAP}"


def _ends(
    checkpoint: Checkpoint, prefix: str, hidden: int, vocab_size: int, ids: Array | None
) -> Iterator[TensorRule]:
    """Yield embedding, last norm, output matrix and token map; the target has the absent ones."""
    embedding = f"{prefix}embed_tokens.weight"
    if embedding in checkpoint.tensors:
        yield TensorRule("token_embd.weight", (embedding,), (vocab_size, hidden))
    yield TensorRule("output_norm.weight", (f"{prefix}norm.weight",), (hidden,))
    if ids is not None or "lm_head.weight" in checkpoint.tensors:
        rows = vocab_size if ids is None else len(ids)
        yield TensorRule("output.weight", ("lm_head.weight",), (rows, hidden))
    if ids is not None:
        source = _vocabulary_map(checkpoint)
        yield TensorRule("d2t", (source,), ids.shape, absolute_ids, token_ids=True)


def _fusion(
    prefix: str, shape: tuple[int, int], n_layers: int, all_normed: bool, each_normed: bool
) -> Iterator[TensorRule]:
    """Yield the tensors that make a state of the layers' inputs."""
    joined = shape[1]
    yield TensorRule("fc.weight", (f"{prefix}fc.weight",), shape)
    if all_normed:
        yield TensorRule("enc.output_norm.weight", (f"{prefix}input_norm.weight",), (joined,))
    for i in range(n_layers if each_normed else 0):
        source = f"{prefix}fc_norm.{i}.weight"
        yield TensorRule(f"fc_norm.{i}.weight", (source,), (joined // n_layers,))


def _parallel(
    checkpoint: Checkpoint,
    prefix: str,
    joined: int,
    target: TargetFacts,
    metadata: Metadata,
) -> Iterator[TensorRule]:
    """Yield P-EAGLE's features of the mask, and write the token and how many are drafted."""
    source, config = f"{prefix}{_MASK}", checkpoint.config
    stored = checkpoint.tensors.get(source)
    if stored is None:
        if config.any("speculators_model_type") == "peagle":
            raise checkpoint.malformed(f"has no tensor {source}, from which P-EAGLE drafts")
        return
    if stored.n_elements != joined:
        problem = f"has {source} of {stored.n_elements} numbers, and {joined} are read"
        raise checkpoint.malformed(problem)
    stated = [config.object("dflash_config").token(_MASK_TOKENS[0])]
    stated += [config.token(key) for key in _MASK_TOKENS]
    mask = next((token for token in stated if token is not None), None)
    if mask is None:
        keys = ", ".join(_MASK_TOKENS)
        raise config.malformed(f"lacks the token that stands for those to draft ({keys})")
    if mask >= target.vocab_size:
        problem = f"its mask is token {mask}, and the target has {target.vocab_size}"
        raise misfit(target, config.shown, problem)
    metadata.count(MASK_TOKEN, mask)
    methods = config.object("speculators_config").items("proposal_methods")
    stated_tokens = JsonObject(methods[0] if methods else {}, config.shown)
    if "speculative_tokens" in stated_tokens:
        metadata.count(f"eagle3.{DRAFTED}", stated_tokens.count("speculative_tokens"))
    flat = methodcaller("reshape", joined)
    yield TensorRule(MASK_FEATURES, (source,), stored.shape, flat, (joined,), keep_f32=True)


def _layer(
    checkpoint: Checkpoint, config: JsonObject, number: int, beginning: str
) -> Iterator[TensorRule]:
    """Yield a layer; rows of q and k move, because llama.cpp rotates neighbours.

    The first reads the token's embedding beside the state, and norms both.
    """
    hidden, wide = config.count("hidden_size"), config.count("intermediate_size")
    heads, shared = config.count("num_attention_heads"), steps.kv_heads(config)
    width, there, block = steps.head_width(config), checkpoint.tensors, f"blk.{number}."
    reads = hidden if number else 2 * hidden
    attention, network = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    for name, source, shape, rope_heads, biased in (
        ("attn_q", "self_attn.q_proj", (heads * width, reads), heads, attention),
        ("attn_k", "self_attn.k_proj", (shared * width, reads), shared, attention),
        ("attn_v", "self_attn.v_proj", (shared * width, reads), 0, attention),
        ("attn_output", "self_attn.o_proj", (hidden, heads * width), 0, attention),
        ("ffn_gate", "mlp.gate_proj", (wide, hidden), 0, network),
        ("ffn_up", "mlp.up_proj", (wide, hidden), 0, network),
        ("ffn_down", "mlp.down_proj", (hidden, wide), 0, network),
    ):
        theirs = beginning + source
        bias = biased or f"{theirs}.bias" in there
        yield from steps.with_bias(block + name, theirs, shape, bias=bias, rope_heads=rope_heads)
    norms = [("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")]
    for name, source in norms if number else [*norms, ("attn_norm_2", "hidden_norm")]:
        yield TensorRule(f"{block}{name}.weight", (f"{beginning}{source}.weight",), (hidden,))
    for part in "qk":
        source = f"{beginning}self_attn.{part}_norm.weight"
        if source in there:
            turned = partial(steps.interleave_halves, heads=1)
            yield TensorRule(f"{block}attn_{part}_norm.weight", (source,), (width,), turned)


def _require_known(checkpoint: Checkpoint, config: JsonObject) -> None:
    refused = known_as(checkpoint, _REFUSED_ARCHITECTURES, _REFUSED_TENSORS)
    if refused is not None:
        has = "neither llama.cpp nor specrun has its graph; EAGLE-3, 3.1 and P-EAGLE are run"
        raise checkpoint.unsupported(f"is {refused}: {has}")
    require(config, "hidden_act", "silu")


def _in_config(config: JsonObject) -> bool:
    if "speculators_model_type" in config:
        return config.text("speculators_model_type") in ("eagle3", "peagle")
    named = not {*_ARCHITECTURES, *_REFUSED_ARCHITECTURES}.isdisjoint(architectures(config))
    return named or ("draft_vocab_size" in config and config.any("num_hidden_layers") == 1)


def _in_tensors(names: Collection[str]) -> bool:
    return any(f"{layer}hidden_norm.weight" in names for _, layer in _BEGINNINGS)


KIND = HeadKind("eagle3", _plan, _in_tensors, _in_config)
"""EAGLE-3, 3.1 and P-EAGLE."""
