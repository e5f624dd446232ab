"""A request for an answer, as every API hands it to the service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specrun.cli.serve.tools.plan import ReplyPlan
from specrun.runtime.laws import SamplingParams

Prompt = str | tuple[int, ...]
"""A text, or its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeChoice:
    """How an answer is drafted where that is not the server's way; None: as the server does.

    `trace` asks for the draft tree of every round.
    """

    drafter: str | None = None
    n_max: int | None = None
    accept: str | None = None
    trace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """What is to be answered: `messages` of a conversation, or `prompts` that are continued.

    There are `n` choices for each prompt; choice k of prompt i is number i * n + k. `max_tokens`
    None goes on until the model ends or the context is full. `logprobs` asks for the target's
    log-probabilities, `top_logprobs` for those of so many likely tokens. `tools` and
    `template_kwargs` are for the chat template; `plan` is what is looked for in the reply. It goes
    on with `prefill`, a text behind the rendered conversation.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    prefill: str = ""
    prompts: Sequence[Prompt] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    plan: ReplyPlan = field(default_factory=ReplyPlan)
    speculative: SpeculativeChoice = field(default_factory=SpeculativeChoice)
