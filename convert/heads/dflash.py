"""Block drafters of all three generations, as llama.cpp's architecture `dflash`, which loads them.

DFlash (z-lab): `fc.weight` [h, taps * h] and `hidden_norm` fuse inputs of some of the target's
layers; `layers.{i}.*` are layers of Qwen 3, which attend to these and to the block; `norm.weight`
ends them. Embeddings and output matrix are the target's, or the checkpoint's own. DFlash2 adds a
convolution around attention and network of each layer and `candidate_selector.*`; DSpark (DeepSeek)
`markov_head.*` and mostly `confidence_head.*`; JetSpec only a causal mask (`causal_head`). A Markov
head with a gate or a state has one small matrix more, which goes into the file's metadata.

Settings lie at the top (DeepSpec), in `dflash_config` (z-lab) or in `transformer_layer_config`
(speculators). `target_layer_ids` name layers by their outputs, `aux_hidden_state_layer_ids` by
their inputs, one more. References: z-lab/dflash, dflash/model.py; deepseek-ai/DeepSpec,
modeling/dspark; vllm-project/speculators, models/dflash and dspark; llama.cpp, conversion/qwen.py
and gemma.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from specrun.bindings.errors import MalformedFileError
from specrun.convert.checkpoint import Checkpoint, JsonObject, ReplacedRow, load_pickle
from specrun.convert.families import steps
from specrun.convert.families.family import Array, TensorRule, unchanged
from specrun.convert.families.rope import describe_rope, llama3_factors, rope_base, rope_settings
from specrun.convert.families.steps import require
from specrun.convert.gguf import Metadata
from specrun.convert.heads.head_kind import (
    HeadKind,
    HeadPlan,
    absolute_ids,
    architectures,
    check_joined,
    check_taps,
    draft_ids,
    known_as,
    matrix_shape,
    whole_numbers,
)
from specrun.convert.heads.target_facts import TargetFacts, misfit, own_layers
from specrun.runtime.drafters.dflash.file import MARKOV_BIAS, MARKOV_KIND, MARKOV_WEIGHT

_DFLASH = frozenset({"DFlashDraftModel", "DFlashSpeculator", "DFlash2DraftModel"})
_DSPARK = frozenset({"Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator"})
_GEMMA4 = "Gemma4DSparkModel"
_DSPARK |= {"Lfm2DSparkDraftModel", "LingDSparkModel", _GEMMA4}
# Those whose graph neither llama.cpp nor the runtime has, by facts or tensors of their checkpoints.
_REFUSED_ARCHITECTURES = {
    "DeepseekV4DSparkModel": "DSpark of DeepSeek-V4, whose layers are that model's own",
    "DominoDraftModel": "a Domino drafter, whose GRU reads the tokens before in the block",
    "MuseGlimmerAssistantForCausalLM": "an assistant of Muse Glimmer, in a layout of its own",
}
_REFUSED_TENSORS = {
    "prefix_gru": "a Domino drafter, whose GRU reads the tokens before in the block",
}
_GATE, _STATE = "markov_head.gate_proj", "markov_head.joint_proj"
_HEADS = {"vanilla": "", "gated": _GATE, "rnn": _STATE}  # by markov_head_type
_RUNS = "neither llama.cpp nor specrun has its graph; DFlash, DFlash2 and DSpark are run"

_W1, _W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_CONFIDENCE, _CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
_SELECTOR, _SELECTOR_HIDDEN = "candidate_selector.", "candidate_selector.hidden_projection.weight"
_EMBEDDING, _OUTPUT, _MAP = "embed_tokens.weight", "lm_head.weight", "d2t"
_LEFT_OUT = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
_MASK_VECTOR = "mask_embedding.pt"
_MASK = "mask_token_id"
_LARGEST_BLOCK = 256
# Values of Qwen3Config that a config of its leaves out.
_QWEN3 = {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 32}
_QWEN3 |= {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32}
_QWEN3 |= {"max_position_embeddings": 32768, "vocab_size": 151936}
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_NO_RANK = 32  # of a Markov head of zeros: a block of any quantized type


def _plan(checkpoint: Checkpoint, target: TargetFacts) -> HeadPlan:
    checkpoint = _usual_names(checkpoint)
    config = _flat_config(checkpoint)
    _require_known(checkpoint, config)
    _check_target(config, target)
    hidden, vocab_size = config.count("hidden_size"), config.count("vocab_size", target.vocab_size)
    checkpoint = _with_mask_vector(checkpoint, config, target)
    taps, is_gemma4 = _taps(checkpoint, config, target), _GEMMA4 in architectures(config)
    metadata, rules = Metadata(), list[TensorRule]()
    steps.describe_decoder(config, metadata, "dflash", key_length=True)
    if is_gemma4:
        metadata.number("dflash.attention.scale", 1.0)
        rules += _gemma4_rope(config, metadata)
    else:
        _describe_rope(checkpoint.config, config, target, metadata)
        rules += llama3_factors(config)
    _describe_block(checkpoint, config, target, metadata)
    _describe_windows(config, metadata)
    metadata.integers("dflash.target_layers", taps)
    if config.text("hidden_act", "silu") != "silu":
        metadata.text("dflash.hidden_activation", config.text("hidden_act"))
    for ours, theirs in (
        ("logit_scale", "output_multiplier"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("embedding_scale", "input_embedding_scale"),
        ("attention.value_scale", "attention_value_scale"),
    ):
        if theirs in config:
            metadata.number(f"dflash.{ours}", config.number(theirs))
    joined = len(taps) * hidden
    rules.append(TensorRule("fc.weight", ("fc.weight",), (hidden, joined)))
    rules.append(TensorRule("enc.output_norm.weight", ("hidden_norm.weight",), (hidden,)))
    rules.append(TensorRule("output_norm.weight", ("norm.weight",), (hidden,)))
    ids = draft_ids(checkpoint, target, _MAP)
    rules += _tokens(checkpoint, config, vocab_size, ids)
    drafted = vocab_size if ids is None else len(ids)
    if _is_dspark(checkpoint, config):
        rules += _markov(checkpoint, config, vocab_size, drafted, metadata)
    for layer in range(config.count("num_hidden_layers")):
        rules += _layer(checkpoint, config, layer)
        rules += _gemma4_layer(config, layer) if is_gemma4 else ()
    if _is_dflash2(checkpoint, config):
        _describe_dflash2(config, metadata)
        rules += _dflash2(config, vocab_size)
    left_out = [*_LEFT_OUT] if ids is not None else [*_LEFT_OUT, _MAP]
    if _W1 in checkpoint.tensors:
        left_out += [f"{_GATE}.", f"{_STATE}."]  # they are in the metadata
    return HeadPlan(metadata, rules, hidden, vocab_size, left_out, checkpoint)


# == The checkpoint: its names, settings, and refused variants =====================================


def _usual_names(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with names as z-lab has them, without `model.` before them."""
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        usual = name.removeprefix("model.").replace("confidence_proj.", "confidence_head.proj.")
        usual = usual.replace("_codebook.weight", "_codebook")
        if usual in tensors:
            raise checkpoint.malformed(f"has {usual} twice, with and without a prefix")
        tensors[usual] = tensor
    return dataclasses.replace(checkpoint, tensors=tensors)


def _flat_config(checkpoint: Checkpoint) -> JsonObject:
    """Return the config with the settings that lie inside brought to the top."""
    config = checkpoint.config
    inside = [config.object("transformer_layer_config"), config.object("dflash_config")]
    values = {**config.values}
    if "qwen3" in (config.any("model_type"), inside[0].any("model_type")):
        values = {**_QWEN3, "rms_norm_eps": 1e-6, **values}
    for part in inside:
        values |= {key: value for key, value in part.values.items() if value is not None}
    if _GEMMA4 in architectures(config):
        values |= _gemma4_values(JsonObject(values, config.shown))
    return JsonObject(values, config.shown)


def _gemma4_values(config: JsonObject) -> dict[str, object]:
    """Return the settings of Gemma 4's layers, all of full attention, under their usual names."""
    kinds = {*_layer_types(config)}
    if kinds != {"full_attention"} or not config.flag("attention_k_eq_v", False):
        only = "layers of full attention whose values are their keys"
        raise config.unsupported(f"is DSpark for Gemma 4: llama.cpp has only {only}")
    require(config, "enable_moe_block", False)
    require(config, "final_logit_softcapping", None)
    if config.any("hidden_size_per_layer_input"):
        raise config.unsupported("has inputs of each layer: llama.cpp has none for block drafters")
    return {
        "head_dim": config.count("global_head_dim"),
        "num_key_value_heads": config.count("num_global_key_value_heads"),
        "hidden_act": config.text("hidden_activation", "gelu_pytorch_tanh"),
        "input_embedding_scale": config.count("hidden_size") ** 0.5,
        "use_sliding_window": False,
    }


def _require_known(checkpoint: Checkpoint, config: JsonObject) -> None:
    """Raise for a checkpoint of which something could not be computed as it means it."""
    named, known = architectures(config), {*_DFLASH, *_DSPARK}
    refused = known_as(checkpoint, _REFUSED_ARCHITECTURES, _REFUSED_TENSORS)
    head = config.text("markov_head_type", "vanilla")
    if refused is None and head not in _HEADS and _is_dspark(checkpoint, config):
        refused = f"DSpark with a Markov head of type {head!r}"
    if refused is None and config.text("projector_type", "") == "domino":
        refused = _REFUSED_TENSORS["prefix_gru"]
    if refused is None and named and known.isdisjoint(named):
        refused = f"a block drafter of an unknown architecture, {named[0]}"
    if refused is not None:
        raise checkpoint.unsupported(f"is {refused}: {_RUNS}")
    if _W1 in checkpoint.tensors and _is_dflash2(checkpoint, config):
        raise checkpoint.unsupported("has a Markov head and a selector: no generation has both")
    require(config, "attention_bias", False)
    require(config, "mlp_bias", False)
    if config.text("hidden_act", "silu") not in _ACTIVATIONS:
        run = " and ".join(_ACTIVATIONS)
        raise config.unsupported(f"has hidden_act {config.any('hidden_act')!r}: {run} are run")


def _is_dspark(checkpoint: Checkpoint, config: JsonObject) -> bool:
    """Return whether a Markov head is needed: for its bias, its confidence, or the first slot."""
    has_heads = {_W1, _W2, _CONFIDENCE} & checkpoint.tensors.keys()
    named = config.any("markov_rank") not in (None, 0)
    return bool(has_heads) or named or _from_anchor(checkpoint, config)


def _is_dflash2(checkpoint: Checkpoint, config: JsonObject) -> bool:
    named = "DFlash2DraftModel" in architectures(config) or "selector_rank" in config
    return named or any(name.startswith(_SELECTOR) for name in checkpoint.tensors)


def _from_anchor(checkpoint: Checkpoint, config: JsonObject) -> bool:
    """Return whether the slot of the text's last token predicts the first token.

    DeepSpec's do. Newer speculators store it; before, that slot predicted nothing.
    """
    if "sample_from_anchor" in config:
        return config.flag("sample_from_anchor")
    if "transformer_layer_config" in config or "aux_hidden_state_layer_ids" in config:
        return False
    listed = architectures(config)
    return not _DSPARK.isdisjoint(listed) or (not listed and _W1 in checkpoint.tensors)


# == The target: layers that are read, and the mask ================================================


def _check_target(config: JsonObject, target: TargetFacts) -> None:
    """Raise PairError for a drafter whose config names another width or number of layers."""
    layers = own_layers(target)
    stated = config.count("num_target_layers", layers)
    reads = config.count("target_hidden_size", config.count("hidden_size"))
    if stated not in (layers, target.n_layers):
        problem = f"it is for {stated} layers, and the target has {layers}"
        raise misfit(target, config.shown, problem)
    if reads != config.count("hidden_size"):
        sizes = f"reads states of {reads} numbers into {config.count('hidden_size')}"
        raise config.unsupported(f"{sizes}: llama.cpp has only equal ones for block drafters")


def _taps(checkpoint: Checkpoint, config: JsonObject, target: TargetFacts) -> Sequence[int]:
    """Return the layers whose inputs are read, in order; raises PairError for one out of range."""
    outputs, inputs = "target_layer_ids", "aux_hidden_state_layer_ids"
    if config.items(inputs):
        taps = whole_numbers(config, inputs)
    elif config.items(outputs):
        taps = [output + 1 for output in whole_numbers(config, outputs)]
    elif not _DFLASH.isdisjoint(architectures(config)):
        taps = [output + 1 for output in _usual_outputs(config)]
    else:
        raise config.malformed(f"does not name the layers that are read ({outputs})")
    n = own_layers(target)
    check_taps(checkpoint, target, taps, n, n)
    hidden, joined = matrix_shape(checkpoint, "fc.weight")
    check_joined(checkpoint, joined, len(taps), hidden)
    return taps


def _usual_outputs(config: JsonObject) -> list[int]:
    """Return the layers that z-lab's program reads if the config names none."""
    n_target, n = config.count("num_target_layers"), config.count("num_hidden_layers")
    if n == 1:
        return [n_target // 2]
    return [round(1 + i * (n_target - 4) / (n - 1)) for i in range(n)]


def _describe_block(
    checkpoint: Checkpoint, config: JsonObject, target: TargetFacts, metadata: Metadata
) -> None:
    """Add the target's tokens, the mask among them, and the size of a block."""
    block_size, mask = config.count("block_size"), config.token(_MASK)
    if not 2 <= block_size <= _LARGEST_BLOCK:
        drafts = f"has a block of {block_size} tokens, the last one of the text included"
        raise config.malformed(f"{drafts}: one of 2 to {_LARGEST_BLOCK} drafts something")
    if mask is None:
        raise config.malformed(f"lacks {_MASK!r}, the token that stands for those to draft")
    if mask >= target.vocab_size:
        size = f"the target has {target.vocab_size} tokens"
        raise misfit(target, config.shown, f"its mask is token {mask}, and {size}")
    metadata.count("dflash.block_size", block_size)
    metadata.add(target.load_tokenizer())
    metadata.count(f"tokenizer.ggml.{_MASK}", mask)
    if _is_dspark(checkpoint, config):
        metadata.flag("dflash.sample_from_anchor", _from_anchor(checkpoint, config))


def _with_mask_vector(
    checkpoint: Checkpoint, config: JsonObject, target: TargetFacts
) -> Checkpoint:
    """Return a checkpoint with the embedding of its mask, if that lies in a file of its own.

    llama.cpp has one matrix of embeddings. So the drafter gets one of its own, the target's in all
    other rows, and with it an output matrix.
    """
    if not (checkpoint.folder / _MASK_VECTOR).exists():
        return checkpoint
    found, tensors, mask = _mask_vector(checkpoint), checkpoint.tensors, config.token(_MASK)
    embedding, output = tensors.get(_EMBEDDING), tensors.get(_OUTPUT)
    if embedding is not None and config.flag("tie_word_embeddings", False):
        output = output or embedding
    if embedding is None or output is None:
        theirs = target.load_matrices()
        embedding, output = embedding or theirs[0], output or theirs[1]
    rows, width = embedding.shape
    if found.size != width or mask is None or mask >= rows:
        problem = f"has {found.size} numbers in {_MASK_VECTOR} for token {mask}"
        raise checkpoint.malformed(f"{problem}, and embeddings of {width} for {rows} tokens")
    masked = ReplacedRow.of(embedding, mask, found)
    matrices = {_EMBEDDING: masked, _OUTPUT: output}
    return dataclasses.replace(checkpoint, tensors={**tensors, **matrices})


def _mask_vector(checkpoint: Checkpoint) -> Array:
    """Return the numbers of the mask's own file, beside the token if it names one."""
    if not checkpoint.allow_pickle:
        problem = f"has the embedding of its mask in {_MASK_VECTOR}, a pickle, which can run code"
        raise checkpoint.unsupported(f"{problem}: --allow-pickle lets it build tensors only")
    path = checkpoint.folder / _MASK_VECTOR
    content = load_pickle(path)
    if isinstance(content, Mapping):
        config = _flat_config(checkpoint)
        token, mask = content.get(_MASK, config.any(_MASK)), config.any(_MASK)
        if token != mask:
            raise MalformedFileError(f"{path} is of token {token}, and the mask is token {mask}")
        content = content.get("embedding")
    if not hasattr(content, "detach"):
        raise MalformedFileError(f"{path} holds no embedding: download it again")
    numbers: Array = content.detach().float().numpy().reshape(-1)
    return numbers


# == Positions and windows =========================================================================


def _describe_rope(
    original: JsonObject, config: JsonObject, target: TargetFacts, metadata: Metadata
) -> None:
    """Write the rotary embedding: one for all layers, over the first numbers of each head."""
    kinds = {*_layer_types(config)} or {"full_attention"}
    settings, scaling = rope_settings(config)
    layers = next((kind for kind in sorted(kinds) if kind in settings), None)
    if layers is not None and len(kinds) > 1:
        # Speculators take this one; for others it would be a guess.
        layers = "sliding_attention"
        if "speculators_model_type" not in original:
            raise settings.unsupported("differs by kind of layer: llama.cpp has one for a drafter")
    settings, scaling = rope_settings(config, layers)
    share = settings.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    width = steps.head_width(config)
    turned = int(width * share)
    if not 0 < turned <= width or turned % 2:
        raise settings.malformed(f"turns {turned} of {width} numbers of a head: an even number")
    if turned < width and scaling == "llama3":
        raise settings.unsupported("is 'llama3' over a part of each head: llama.cpp has only whole")
    plain = {
        **config.values,
        "partial_rotary_factor": None,
        "rope_scaling": None,
        "rope_parameters": {**settings.values, "partial_rotary_factor": None},
    }
    scalings = ("linear", "yarn", "llama3")
    describe_rope(JsonObject(plain, config.shown), metadata, "dflash", scalings=scalings)
    metadata.count("dflash.rope.dimension_count", turned)
    if target.has_sections:
        # A text's tokens turn by one section alone, as those of a target that sees pictures.
        metadata.integers("dflash.rope.dimension_sections", [width // 2, 0, 0, 0])


def _gemma4_rope(config: JsonObject, metadata: Metadata) -> Iterator[TensorRule]:
    """Write Gemma 4's rotary embedding; yield the divisors that keep most pairs of a head still."""
    settings, kind = rope_settings(config, "full_attention")
    if kind not in ("default", "proportional"):
        raise settings.unsupported(f"is {kind!r}: default and proportional are run")
    width = steps.head_width(config)
    metadata.count("dflash.rope.dimension_count", width)
    metadata.number("dflash.rope.freq_base", rope_base(config, settings, 1e6))
    if kind == "proportional":
        turned = int(width * settings.number("partial_rotary_factor", 0.25) / 2)
        factors = np.full(width // 2, 1e30, np.float32)
        factors[:turned] = 1.0
        yield TensorRule("rope_freqs.weight", (), factors.shape, factors.copy)


def _layer_types(config: JsonObject) -> list[str]:
    """Return the kind of attention of each layer, nothing if the config has none."""
    n, types = config.count("num_hidden_layers"), config.items("layer_types")
    if types and len(types) != n:
        raise config.malformed(f"has {len(types)} layer_types for {n} layers")
    return [str(kind) for kind in types]


def _describe_windows(config: JsonObject, metadata: Metadata) -> None:
    """Write which layers see a window, and whether a block's tokens see only those before."""
    everywhere = config.flag("use_swa", False)
    slides = everywhere or config.flag("use_sliding_window", False)
    windows = [everywhere or kind == "sliding_attention" for kind in _layer_types(config)]
    windows = windows or [everywhere] * config.count("num_hidden_layers")
    if slides and any(windows):
        window = config.count("swa_window_size", config.count("sliding_window", 0) or None)
        metadata.count("dflash.attention.sliding_window", window)
        metadata.flags("dflash.attention.sliding_window_pattern", windows)
    default = config.flag("causal", config.flag("causal_head", False))
    causal = config.flag("is_causal", default)
    two_ways = config.flag("sliding_window_non_causal", "speculators_model_type" not in config)
    if slides and any(windows) and not two_ways:
        if not all(windows):
            raise config.unsupported(
                "has a causal mask in some layers (sliding_window_non_causal = False): "
                "llama.cpp has one mask for all"
            )
        causal = True
    if causal:
        metadata.flag("dflash.attention.causal", True)


# == Tensors =======================================================================================


def _tokens(
    checkpoint: Checkpoint, config: JsonObject, vocab_size: int, ids: Array | None
) -> Iterator[TensorRule]:
    """Yield embeddings, output matrix and token map, as far as the checkpoint has its own."""
    hidden, there = config.count("hidden_size"), checkpoint.tensors
    tied = config.flag("tie_word_embeddings", False)
    if _EMBEDDING in there:
        if _OUTPUT not in there and not tied:
            problem = f"has {_EMBEDDING} and no {_OUTPUT}"
            raise checkpoint.unsupported(
                f"{problem}: llama.cpp would take the embeddings as the output matrix"
            )
        yield TensorRule("token_embd.weight", (_EMBEDDING,), (vocab_size, hidden))
    if ids is not None or _OUTPUT in there:
        rows = vocab_size if ids is None else len(ids)
        yield TensorRule("output.weight", (_OUTPUT,), (rows, hidden))
    if ids is not None:
        yield TensorRule("d2t", (_MAP,), ids.shape, absolute_ids, token_ids=True)


def _markov(
    checkpoint: Checkpoint, config: JsonObject, vocab_size: int, drafted: int, metadata: Metadata
) -> Iterator[TensorRule]:
    """Yield the Markov head, of zeros if there is none, and the confidence head.

    llama.cpp has the confidence head, and a first slot that predicts, only beside a Markov head.
    """
    there, rank, hidden = checkpoint.tensors, _NO_RANK, config.count("hidden_size")
    if _W1 in there or _W2 in there:
        rank = matrix_shape(checkpoint, _W1)[1]
        yield TensorRule("markov_w1.weight", (_W1,), (vocab_size, rank))
        yield TensorRule("markov_w2.weight", (_W2,), (drafted, rank))
        _describe_latents(checkpoint, config, hidden, rank, metadata)
    else:
        for name, rows in (("markov_w1", vocab_size), ("markov_w2", drafted)):
            zeros = partial(np.zeros, (rows, rank), np.float32)
            yield TensorRule(f"{name}.weight", (), (rows, rank), zeros)
    metadata.flag("dflash.has_confidence_head", _CONFIDENCE in there)
    if _CONFIDENCE not in there:
        return
    reads = matrix_shape(checkpoint, _CONFIDENCE)[1]
    if reads == hidden:  # without the embedding of the token before
        wide = partial(np.pad, pad_width=((0, 0), (0, rank)))
        shape = 1, hidden + rank
        yield TensorRule("conf_proj.weight", (_CONFIDENCE,), (1, hidden), wide, shape, True)
    else:
        shape = 1, hidden + rank
        yield TensorRule("conf_proj.weight", (_CONFIDENCE,), shape, keep_f32=True)
    if _CONFIDENCE_BIAS in there:
        yield TensorRule("conf_proj.bias", (_CONFIDENCE_BIAS,), (1,))


def _describe_latents(
    checkpoint: Checkpoint, config: JsonObject, hidden: int, rank: int, metadata: Metadata
) -> None:
    """Write the gate of a Markov head, or its state's matrix, of which llama.cpp has no tensors."""
    there = checkpoint.tensors
    found = [kind for kind, name in _HEADS.items() if name and f"{name}.weight" in there]
    kind = config.text("markov_head_type", found[0] if found else "vanilla")
    if found not in ([], [kind]) or (kind != "vanilla" and not found):
        has = f"{found[0]!r}" if found else "no gate and no state"
        raise checkpoint.malformed(f"has a Markov head of type {kind!r} by its config, and {has}")
    if kind == "vanilla":
        return
    parts, own = (1, 1) if kind == "gated" else (3, 2)
    shape = parts * rank, hidden + own * rank
    weight = checkpoint.tensor(f"{_HEADS[kind]}.weight", shape)
    bias = checkpoint.tensor(f"{_HEADS[kind]}.bias", shape[:1])
    metadata.text(f"dflash.{MARKOV_KIND}", kind)
    metadata.numbers(f"dflash.{MARKOV_WEIGHT}", weight.read().reshape(-1).tolist())
    metadata.numbers(f"dflash.{MARKOV_BIAS}", bias.read().tolist())


def _layer(checkpoint: Checkpoint, config: JsonObject, layer: int) -> Iterator[TensorRule]:
    """Yield one layer, of Qwen 3; the halves of a head turn together, as llama.cpp has it here."""
    hidden, wide = config.count("hidden_size"), config.count("intermediate_size")
    heads, shared = config.count("num_attention_heads"), steps.kv_heads(config)
    width = steps.head_width(config)
    ours, theirs = f"blk.{layer}.", f"layers.{layer}."
    pairs = not config.flag("rope_is_neox_style", True)
    turned = partial(_halves, width=width) if pairs else unchanged
    gemma4 = _GEMMA4 in architectures(config)
    norm = "pre_feedforward_layernorm" if gemma4 else "post_attention_layernorm"
    for name, source, shape, change in (
        ("attn_norm", "input_layernorm", (hidden,), unchanged),
        ("attn_q", "self_attn.q_proj", (heads * width, hidden), turned),
        ("attn_k", "self_attn.k_proj", (shared * width, hidden), turned),
        ("attn_v", "self_attn.v_proj", (shared * width, hidden), unchanged),
        ("attn_output", "self_attn.o_proj", (hidden, heads * width), unchanged),
        ("attn_q_norm", "self_attn.q_norm", (width,), turned),
        ("attn_k_norm", "self_attn.k_norm", (width,), turned),
        ("ffn_norm", norm, (hidden,), unchanged),
        ("ffn_gate", "mlp.gate_proj", (wide, hidden), unchanged),
        ("ffn_up", "mlp.up_proj", (wide, hidden), unchanged),
        ("ffn_down", "mlp.down_proj", (hidden, wide), unchanged),
    ):
        if name == "attn_v" and gemma4:
            continue  # values are the keys
        sources = (f"{theirs}{source}.weight",)
        yield TensorRule(f"{ours}{name}.weight", sources, shape, change, moves_only=True)
    for sinks in (f"{theirs}self_attn.sinks", f"{theirs}self_attn.sinks.weight"):
        if sinks in checkpoint.tensors:
            yield TensorRule(f"{ours}attn_sinks.weight", (sinks,), (heads,))


def _gemma4_layer(config: JsonObject, layer: int) -> Iterator[TensorRule]:
    """Yield the additional tensors of a layer of Gemma 4: norms behind its parts, and a factor."""
    hidden, ours, theirs = (config.count("hidden_size"),), f"blk.{layer}.", f"layers.{layer}."
    for name, source in (
        ("post_attention_norm", "post_attention_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    ):
        yield TensorRule(f"{ours}{name}.weight", (f"{theirs}{source}.weight",), hidden)
    yield TensorRule(f"{ours}layer_output_scale.weight", (f"{theirs}layer_scalar",), (1,))


def _halves(array: Array, width: int) -> Array:
    """Put the first of each two neighbours of a head before the second ones."""
    pairs = array.reshape(-1, width // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _describe_dflash2(config: JsonObject, metadata: Metadata) -> None:
    """Write the sizes of convolutions and selector; raises for those that llama.cpp refuses."""
    hidden, group = config.count("hidden_size"), config.count("conv_group_size")
    k = config.count("selector_top_k")
    if hidden % group:
        raise config.malformed(f"has states of {hidden} numbers, in groups of {group}")
    if hidden < k * (k + 1):
        needs = f"{k} candidates need states of {k * (k + 1)} numbers in llama.cpp"
        raise config.unsupported(f"has states of {hidden} numbers: {needs}")
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        metadata.count(f"dflash.{key}", config.count(key))


def _dflash2(config: JsonObject, vocab_size: int) -> Iterator[TensorRule]:
    """Yield selector and convolutions of DFlash2."""
    hidden, rank = config.count("hidden_size"), config.count("selector_rank")
    kernel, groups = config.count("conv_kernel_size"), hidden // config.count("conv_group_size")
    for part in ("predecessor", "successor"):
        source = f"{_SELECTOR}{part}_codebook"
        yield TensorRule(f"selector_{part}.weight", (source,), (vocab_size, rank))
    yield TensorRule("selector_hidden.weight", (_SELECTOR_HIDDEN,), (rank, hidden))
    for layer in range(config.count("num_hidden_layers")):
        for ours, theirs in (("attn", "attention"), ("ffn", "mlp")):
            name, source = f"blk.{layer}.{ours}_conv", f"layers.{layer}.{theirs}_conv"
            base = (f"{source}.base_kernel",)
            yield TensorRule(f"{name}_base", base, (2, kernel, hidden), keep_f32=True)
            projected, rows = (f"{source}.kernel_projection.weight",), 2 * kernel * groups
            yield TensorRule(f"{name}_proj.weight", projected, (rows, hidden))


# == Detection =====================================================================================


def _in_config(config: JsonObject) -> bool:
    if config.any("speculators_model_type") in ("dflash", "dspark"):
        return True
    named = {*_DFLASH, *_DSPARK, *_REFUSED_ARCHITECTURES}
    return "dflash_config" in config or not named.isdisjoint(architectures(config))


def _in_tensors(names: Collection[str]) -> bool:
    return {"fc.weight", "hidden_norm.weight"} <= {name.removeprefix("model.") for name in names}


KIND = HeadKind("dflash", _plan, _in_tensors, _in_config)
"""DFlash, DFlash2, DSpark and JetSpec."""
