"""The keywords of `Runtime`, `Engine` and their answers, for type checkers and editors.

A test holds them to the dataclasses that read and check them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from specrun.bindings.contexts.context_options import ContextOptions, RopeScaling
from specrun.bindings.machine.placement import Placement, SplitMode
from specrun.runtime.chat import ReplyReading
from specrun.runtime.chat.turn import Tool, ToolChoiceValue
from specrun.runtime.engine.choices import DrafterMaker
from specrun.runtime.memory.fit import LayerCount
from specrun.runtime.online import LearnFrom
from specrun.runtime.round.backend_laws import BackendSampling
from specrun.runtime.round.padding import Shape


class RuntimeKeywords(TypedDict, total=False):
    """The fields of `RuntimeOptions`, and one by one those of its `context` and `placement`."""

    # RuntimeOptions
    context: ContextOptions
    placement: Placement
    n_gpu_layers: LayerCount
    n_gpu_layers_draft: LayerCount
    use_mmap: bool
    use_mlock: bool
    accept: str
    chat_template: str | None
    seed: int | None
    reference: str | os.PathLike[str] | None
    trust: bool
    shape: Shape
    backend_sampling: BackendSampling
    lora: Sequence[str]
    learn: LearnFrom
    answers: LearnFrom
    others: Sequence[str | DrafterMaker]
    rules: Sequence[str]
    measure: bool
    # ContextOptions
    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    n_threads_batch: int
    flash_attention: Literal["auto", "on", "off"]
    cache_type_k: str
    cache_type_v: str
    offload_kv: bool
    rope: RopeScaling
    checkpoint_memory: int
    # Placement
    rpc: Sequence[str]
    devices: Sequence[str] | None
    devices_draft: Sequence[str] | None
    split_mode: SplitMode
    tensor_split: Sequence[float]
    main_gpu: int
    override_tensors: Sequence[tuple[str, str]]


class SharedKeywords(TypedDict, total=False):
    """The fields of `AnswerOptions` that may be the same for many answers."""

    logprobs: bool
    top_logprobs: int
    drafter: str | None
    n_max: int | None
    accept: str | None
    trace: bool
    reading: ReplyReading | None


class AnswerKeywords(SharedKeywords, total=False):
    """The fields of `AnswerOptions`."""

    max_tokens: int | None
    index: int


class ChatKeywords(AnswerKeywords, total=False):
    """The keywords of answers to chats."""

    tools: Sequence[Tool]
    tool_choice: ToolChoiceValue
    chat_template_kwargs: Mapping[str, Any] | None
