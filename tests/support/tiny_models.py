"""Sizes of tiny models, and contexts in float32, so that rounding hides no difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.models.model import Model

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTROLS = ("<|user|>", "<|assistant|>", "<|end|>")
CHAT: dict[str, Any] = {
    "vocab_size": 320,
    "controls": CONTROLS,
    "chat_template": TEMPLATE,
    "context": 1024,
    "scale": 3.0,
}
EXACT: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "flash_attention": "off"}
F32: dict[str, Any] = {**EXACT, "cache_type_k": "f32", "cache_type_v": "f32"}


def fresh_logits(model: Model, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Logits after each token, from one evaluation in a context of its own, float32 throughout."""
    n = len(tokens)
    with Context(model, ContextOptions(**{**F32, "n_ctx": 512}, n_outputs=n)) as context:
        batch = Batch(n, 1)
        batch.fill_chain(tokens, 0, [0], n)
        rows = context.decode(batch)
        return np.stack([rows.logits(row) for row in range(n)])
