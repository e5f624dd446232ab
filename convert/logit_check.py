"""Logits of a converted file, compared with those transformers computes from the checkpoint.

The fixed text has prose, talk, code, numbers and a list, as people give them to models. It never
changes: figures taken with it at different times can be compared. Its perplexity says little about
a model by itself, since it is short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import ModelError, SpecrunError
from specrun.bindings.models.model import Model
from specrun.bindings.models.trial import trusting_files

FIXED_TEXT = Path(__file__).with_name("fixed_text.txt").read_text(encoding="utf-8")
LARGEST_ERRORS = {"F32": 1e-4, "F16": 2e-2, "BF16": 1e-1}
"""The allowed error over the largest logit: float32's by its rounding, the others' by weights'."""

_MOST_TOKENS = 64
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LogitCheck:
    """Whether logits were compared, and how.

    `relative_error` is the largest difference over the largest logit, `same_top` the share of
    positions whose most likely token is the same, both over `n_tokens` tokens of the fixed text.
    `reason` says why nothing was compared, and is empty where something was.
    """

    relative_error: float | None
    largest_allowed: float
    same_top: float | None
    n_tokens: int
    reason: str = ""


def check_logits(
    path: Path, folder: Path, type_name: str, *, allow_pickle: bool = False, n_threads: int = 0
) -> LogitCheck:
    """Compare the file's logits with those of the checkpoint in `folder`, both in float32.

    Raises SpecrunError if they are further apart than LARGEST_ERRORS allows for `type_name`. Where
    transformers is not installed, or cannot open the checkpoint, the result says so.
    """
    allowed = LARGEST_ERRORS[type_name]
    # It was just written here, and may have no name yet that another process could open.
    with trusting_files(), Model(path) as model:
        length = max(1, min(_MOST_TOKENS, model.n_ctx_train))
        tokens = model.vocabulary.tokenize(FIXED_TEXT)[:length]
        try:
            wanted = _reference(folder, tokens, allow_pickle=allow_pickle)
        except _CannotCompareError as error:
            return LogitCheck(None, allowed, None, 0, str(error))
        try:
            found = _logits(model, tokens, n_threads)
        except ModelError as error:
            return LogitCheck(None, allowed, None, 0, f"llama.cpp cannot evaluate it here: {error}")
    if found.shape != wanted.shape:
        raise SpecrunError(f"it gives {found.shape[1]} logits, the checkpoint {wanted.shape[1]}")
    error_found = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    if not error_found <= allowed:  # not a number is no match either
        raise SpecrunError(
            f"the logits of the file are not the checkpoint's: off by {error_found:.1e} of the "
            f"largest, and {allowed:g} is allowed for {type_name}; nothing was kept (--no-verify "
            "keeps it all the same)"
        )
    same = float(np.mean(found.argmax(axis=1) == wanted.argmax(axis=1)))
    return LogitCheck(error_found, allowed, same, len(tokens))


class _CannotCompareError(Exception):
    """There is nothing to compare with; the message says why."""


def _logits(model: Model, tokens: list[int], n_threads: int) -> Logits:
    n = len(tokens)
    options = ContextOptions(
        n_ctx=max(64, n),
        n_outputs=n,
        n_threads=n_threads,
        flash_attention="off",
        cache_type_k="f32",
        cache_type_v="f32",
    )
    with Context(model, options) as context:
        batch = Batch(n, 1)
        batch.fill_chain(tokens, 0, [0], n)
        rows = context.decode(batch)
        return np.stack([rows.logits(row) for row in range(n)])


def _reference(folder: Path, tokens: list[int], *, allow_pickle: bool) -> Logits:
    """Return transformers' logits of the checkpoint in float32; no code of the checkpoint runs."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise _CannotCompareError("transformers is not installed") from error
    auto: Any = transformers.AutoModelForCausalLM
    quiet: Any = transformers.utils.logging
    level, bar = quiet.get_verbosity(), quiet.is_progress_bar_enabled()
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    try:
        options: dict[str, Any] = {} if allow_pickle else {"use_safetensors": True}
        model = auto.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, **options
        ).eval()
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0].float().numpy()
    except MemoryError:
        raise
    except Exception as error:  # whatever its code for this one architecture may raise
        lines = (line for line in str(error).splitlines() if line.strip())
        reason = next(lines, type(error).__name__)[:200]
        raise _CannotCompareError(f"transformers cannot open the checkpoint ({reason})") from error
    finally:
        quiet.set_verbosity(level)
        if bar:
            quiet.enable_progress_bar()
    if not math.isfinite(float(np.abs(logits).max())):
        raise _CannotCompareError("transformers computes logits that are not finite")
    found: Logits = np.ascontiguousarray(logits)
    return found
