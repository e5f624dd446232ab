"""A model whose weights say what a script says: turn by turn, whatever was asked.

No layer adds anything, so the last token alone decides the next. The template counts the
assistant's turns and writes a mark for each; the mark's most likely successor is the first piece of
that turn. Each piece is a token of its own, so that each has one successor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specrun.convert.gguf import GGUFSource, Metadata, PlannedTensor, write_gguf
from specrun.convert.tokenizer import BytePairVocabulary
from specrun.convert.tokenizer.vocabulary import CONTROL, USER_DEFINED
from specrun.runtime.demo import demo_target

WIDTH, HEAD = 128, 16
CERTAINTY = 80.0  # the logit of the next piece
CONTROLS = ("<|im_start|>", "<|im_end|>")

_TOKENIZER = ("tokens", "token_type", "merges")

TEMPLATE = """\
{%- set turn = namespace(number=0) %}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer <tool_call>{"name": <name>, "arguments": <object>}</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
MARK{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% set turn.number = turn.number + 1 %}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
MARK{% endif %}"""
"""Hermes' form, as Qwen's templates have it, with a mark at the begin of each assistant's turn."""


def write_scripted(
    path: Path,
    turns: Sequence[str],
    *,
    aside: str | None = None,
    aside_if: str = "not tools",
    before: int = 0,
    context: int = 65536,
) -> None:
    """Write a model that says `turns` in order, and the last one again behind them.

    If the template's condition `aside_if` holds it says `aside`, if that is given: clients ask for
    titles between turns. `before` is how many of the assistant's turns a client makes up, as
    examples. Raises ValueError if a text is part of another, piece by piece.
    """
    texts = [*turns, *([] if aside is None else [aside])]
    marks = [f"<|turn_{number}|>" for number in range(len(texts))]
    demo = {key: value for key, value, *_ in GGUFSource(demo_target()).metadata()}
    known, kinds, merges = (demo[f"tokenizer.ggml.{key}"] for key in _TOKENIZER)
    taken = set(known)
    split = [pieces(text, taken) for text in texts]
    says = [piece for text in split for piece in text]
    controls = (*CONTROLS, *marks)
    tokens = (*known, *controls, *says)
    types = (*kinds, *(CONTROL,) * len(controls), *(USER_DEFINED,) * len(says))
    ids = {token: number for number, token in enumerate(tokens)}
    end = ids["<|im_end|>"]
    successors = [
        pair
        for mark, text in zip(marks, split, strict=True)
        for pair in zip([mark, *text], [*text, "<|im_end|>"], strict=True)
    ]
    vocabulary = BytePairVocabulary(
        tokens,
        types,
        tuple(merges),
        {"eos": end, "bos": end},
        chat_templates={"default": _template(len(turns), before, aside_if if aside else None)},
    )
    metadata = Metadata()
    metadata.text("general.name", "scripted")
    metadata.counts("llama", vocab_size=len(tokens), context_length=context, block_count=1)
    metadata.counts("llama", embedding_length=WIDTH, feed_forward_length=WIDTH)
    metadata.counts("llama.attention", head_count=1, head_count_kv=1)
    metadata.number("llama.attention.layer_norm_rms_epsilon", 1e-5)
    metadata.counts("llama.attention", key_length=HEAD, value_length=HEAD)
    metadata.count("llama.rope.dimension_count", HEAD)
    vocabulary.describe(metadata)
    arrays = _weights(len(tokens), [(ids[a], ids[b]) for a, b in successors])
    write_gguf(path, "llama", metadata, list(_planned(arrays)))


def pieces(text: str, taken: set[str]) -> list[str]:
    """Split a text at the ends of words into pieces that are not `taken`, and take them."""
    found, piece = [], ""
    for part in re.findall(r"\s*(?:\w+|[^\w\s]+)|\s+$", text):
        piece += part
        if len(piece) > 3 and piece not in taken:
            found.append(piece)
            taken.add(piece)
            piece = ""
    while piece:
        if piece not in taken:
            taken.add(piece)
            return [*found, piece]
        if not found:
            raise ValueError(f"another turn has all of {text!r}: say it in other words")
        piece = found.pop() + piece
    return found


def _template(n_turns: int, before: int, aside_if: str | None) -> str:
    chosen = f"([[turn.number - {before}, 0] | max, {n_turns - 1}] | min)"
    if aside_if is not None:
        chosen = f"({n_turns} if {aside_if} else {chosen})"
    return TEMPLATE.replace("MARK", f"{{{{ '<|turn_' ~ {chosen} ~ '|>' }}}}")


def _weights(
    size: int, successors: Sequence[tuple[int, int]]
) -> dict[str, npt.NDArray[np.float32]]:
    rows = np.random.default_rng(0).standard_normal((size, WIDTH)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    output = np.zeros_like(rows)
    for token, following in successors:
        output[following] += rows[token] * np.float32(CERTAINTY / WIDTH**0.5)
    for token, following in successors:
        logits = output @ rows[token] * np.float32(WIDTH**0.5)
        assert np.delete(logits, following).max() < logits[following] - 20, "not what follows"
    ones, shapes = np.ones(WIDTH, np.float32), {"attn_output": (WIDTH, HEAD)}
    shapes |= dict.fromkeys(("attn_q", "attn_k", "attn_v"), (HEAD, WIDTH))
    shapes |= dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), (WIDTH, WIDTH))
    return {
        "token_embd": rows,
        "output_norm": ones,
        "output": output,
        "blk.0.attn_norm": ones,
        "blk.0.ffn_norm": ones,
        **{f"blk.0.{name}": np.zeros(shape, np.float32) for name, shape in shapes.items()},
    }


def _planned(arrays: dict[str, npt.NDArray[np.float32]]) -> Iterator[PlannedTensor]:
    for name, array in arrays.items():
        yield PlannedTensor(f"{name}.weight", array.shape, "F32", lambda array=array: array)
