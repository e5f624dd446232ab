"""EAGLE-1 (Li et al. 2024, arXiv 2401.15077), EAGLE-2 (2406.16858) and HASS (2408.15766).

One layout: a matrix that joins the embedding of a token and the hidden state before it, `fc.weight`
[h, 2h] with or without `fc.bias`, then one Llama layer without input norm, `layers.0.*`, and no
output matrix: the target's is used. `embed_tokens.weight` may be left out, the target's is then
used. config.json is that of a Llama of one layer, with `bias` for fc. Our trainer adds
`draft_tokens` [n], the ids of the tokens that are drafted (FR-Spec). Layout: SafeAILab/EAGLE,
eagle/model/cnets1.py; HArmonizedSS/HASS, model/cnets_hass.py.
"""

from __future__ import annotations

from collections.abc import Collection

from specrun.convert.checkpoint import Checkpoint, JsonObject
from specrun.convert.families.family import TensorRule
from specrun.convert.families.rope import rope_base, rope_settings
from specrun.convert.families.steps import kv_heads
from specrun.convert.gguf import Metadata
from specrun.convert.heads.head_kind import (
    HeadKind,
    HeadPlan,
    as_stored,
    check_token_ids,
    llama_layer,
    matrix_shape,
    require_one_layer,
    stored_ids,
)
from specrun.convert.heads.target_facts import TargetFacts
from specrun.runtime.drafters.eagle import DRAFT_TOKENS

_LAYER = "layers.0."
_EMBEDDING = "embed_tokens.weight"
_JOINS, _BIAS = "fc.weight", "fc.bias"
_EPSILON = 1e-6  # the reference's, if config.json has none


def _plan(checkpoint: Checkpoint, target: TargetFacts) -> HeadPlan:
    _require_known(checkpoint.config)
    require_one_layer(checkpoint, _LAYER, "EAGLE")
    hidden = _hidden_size(checkpoint)
    config = as_stored(checkpoint, checkpoint.config, _LAYER, hidden)
    heads, shared = config.count("num_attention_heads"), kv_heads(config)
    if hidden % heads or heads % shared or hidden // heads % 2:
        raise config.malformed(f"has {heads} heads over {shared} for hidden states of {hidden}")
    vocab_size = config.count("vocab_size", target.vocab_size)
    if _EMBEDDING in checkpoint.tensors:
        vocab_size = matrix_shape(checkpoint, _EMBEDDING)[0]
    wide = config.count("intermediate_size")
    rope, _ = rope_settings(config)
    metadata = Metadata()
    metadata.counts("eagle", embedding_length=hidden, vocab_size=vocab_size, block_count=1)
    metadata.count("eagle.feed_forward_length", wide)
    metadata.counts("eagle.attention", head_count=heads, head_count_kv=shared)
    epsilon = config.number("rms_norm_eps", _EPSILON)
    metadata.number("eagle.attention.layer_norm_rms_epsilon", epsilon)
    metadata.number("eagle.rope.freq_base", rope_base(config, rope))
    rules = [TensorRule("eagle.fc.weight", (_JOINS,), (hidden, 2 * hidden))]
    if _EMBEDDING in checkpoint.tensors:
        rules.append(TensorRule("token_embd.weight", (_EMBEDDING,), (vocab_size, hidden)))
    if _has_bias(checkpoint):
        rules.append(TensorRule("eagle.fc.bias", (_BIAS,), (hidden,)))
    sizes = (hidden, hidden // heads * shared, wide)
    biased = config.flag("qkv_bias", False)
    rules += llama_layer(checkpoint, "eagle.", _LAYER, sizes, biased=biased)
    if DRAFT_TOKENS in checkpoint.tensors:
        ids = stored_ids(checkpoint, DRAFT_TOKENS)
        check_token_ids(checkpoint, target, DRAFT_TOKENS, ids)
        rules.append(TensorRule(DRAFT_TOKENS, (DRAFT_TOKENS,), ids.shape, token_ids=True))
    return HeadPlan(metadata, rules, hidden, vocab_size)


def _has_bias(checkpoint: Checkpoint) -> bool:
    """Return whether fc has a bias: the tensors count, and the config must agree."""
    there = _BIAS in checkpoint.tensors
    if there and not checkpoint.config.flag("bias", True):
        raise checkpoint.malformed(f"has {_BIAS}, and {checkpoint.config.shown} has bias = false")
    return there or checkpoint.config.flag("bias", False)


def _require_known(config: JsonObject) -> None:
    if config.text("hidden_act", "silu") != "silu":
        raise config.unsupported(f"has hidden_act {config.any('hidden_act')!r}: only silu is run")
    inputs = config.text("eagle_inputs", "both")
    if inputs == "unshifted":
        raise config.unsupported(
            "was trained on tokens that are not shifted, EAGLE's ablation: drafting pairs a state "
            "with the token after it"
        )
    rope, kind = rope_settings(config)
    if kind != "default":
        raise rope.unsupported(f"is {kind!r}: EAGLE heads are run with unscaled positions only")


def _hidden_size(checkpoint: Checkpoint) -> int:
    hidden, joined = matrix_shape(checkpoint, _JOINS)
    if joined != 2 * hidden:
        raise checkpoint.unsupported(
            f"has {_JOINS} of shape {(hidden, joined)}: "
            "EAGLE-1 and 2 join one embedding and one hidden state"
        )
    return hidden


def _in_tensors(names: Collection[str]) -> bool:
    # EAGLE-3 ends with a norm and has tokens of its own.
    has_layer = any(name.startswith(_LAYER) for name in names)
    return _JOINS in names and has_layer and not {"norm.weight", "d2t"} & {*names}


KIND = HeadKind("eagle", _plan, _in_tensors)  # its config is that of a Llama
"""EAGLE-1, EAGLE-2 and HASS."""
