"""Fields that chat completions and completions share: how, how much, and how many."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.cli.serve.body import Fields
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.request import AnswerRequest, Prompt
from specrun.cli.serve.sampling import read_length, read_sampling, read_speculative
from specrun.cli.serve.service import AnswerService
from specrun.cli.serve.tools.fields import ChatTurn

MOST_TOP = 20
"""OpenAI's limit of likely tokens beside each."""

_NO_TURN = ChatTurn(())


def read_request(
    fields: Fields,
    service: AnswerService,
    *,
    turn: ChatTurn = _NO_TURN,
    prompts: Sequence[Prompt] = (),
    top_logprobs: int | None,
) -> AnswerRequest:
    """Return what is asked for; raises `RequestError` that names the field.

    `top_logprobs` None asks for no log-probabilities at all.
    """
    settings = service.settings
    n = fields.integer("n", 1, settings.bounds.choices) or 1
    best_of = fields.integer("best_of", 1, settings.bounds.choices)
    if best_of not in (None, n):
        problem = f"best_of is {best_of}: all choices that are made are returned"
        raise RequestError(f"{problem}, so give n alone", "best_of")
    return AnswerRequest(
        messages=turn.messages,
        prompts=prompts,
        params=read_sampling(fields, settings, service.engine.vocabulary),
        max_tokens=read_length(fields, settings),
        n=n,
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
        tools=turn.tools,
        template_kwargs=turn.template_kwargs,
        plan=turn.plan,
        speculative=read_speculative(fields),
    )


def wants_usage(fields: Fields) -> bool:
    """Whether a stream is to end with a chunk about usage."""
    options = fields.fields("stream_options")
    return options is not None and options.flag("include_usage")
