"""/tokenize, /detokenize and /apply-template: what the model reads."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve.body import read_body
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.http.server import beside_the_loop
from specrun.cli.serve.openai.messages import read_messages
from specrun.cli.serve.replies import json_reply
from specrun.cli.serve.request import AnswerRequest
from specrun.cli.serve.service import AnswerService
from specrun.cli.serve.tools.fields import read_turn


async def tokenize(request: Request) -> Response:
    """Return the tokens of `content`, with their texts where `with_pieces` asks for them."""
    service: AnswerService = request.app.state.service
    fields = await read_body(request, service.settings.bounds)
    content = fields.text("content")
    if content is None:
        raise RequestError("content is missing: give a text", "content")
    add_special = fields.flag("add_special")
    parse_special = fields.flag("parse_special", default=True)
    vocabulary = service.engine.vocabulary
    with_pieces = fields.flag("with_pieces")

    def work() -> list[Any]:
        tokens = vocabulary.tokenize(content, add_special=add_special, parse_special=parse_special)
        if not with_pieces:
            return list(tokens)
        return [{"id": token, "piece": _piece(vocabulary, token)} for token in tokens]

    return json_reply({"tokens": await beside_the_loop(work)})


def _piece(vocabulary: Vocabulary, token: int) -> str | list[int]:
    """Return a token's text, or its bytes where they are no text."""
    piece = vocabulary.piece(token)
    try:
        return piece.decode() or vocabulary.label(token)
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(request: Request) -> Response:
    """Return the text of `tokens`."""
    service: AnswerService = request.app.state.service
    fields = await read_body(request, service.settings.bounds)
    vocabulary = service.engine.vocabulary
    tokens = fields.items("tokens", service.settings.bounds.body_bytes)
    if tokens is None:
        raise RequestError("tokens is missing: give a list of token ids", "tokens")
    for place, token in enumerate(tokens):
        is_id = isinstance(token, int) and not isinstance(token, bool)
        if not is_id or not 0 <= token < vocabulary.size:
            where = f"tokens[{place}]"
            problem = f"{where} is {token!r}: give token ids from 0 to {vocabulary.size - 1}"
            raise RequestError(problem[:200], where)
    labels = [vocabulary.piece(token) or vocabulary.label(token).encode() for token in tokens]
    return json_reply({"content": b"".join(labels).decode("utf-8", "replace")})


async def apply_template(request: Request) -> Response:
    """Return the prompt that the chat template makes of `messages` and `tools`."""
    service: AnswerService = request.app.state.service
    fields = await read_body(request, service.settings.bounds)
    messages = read_messages(fields, service.settings.bounds)
    turn = read_turn(fields, service.engine, messages)
    asked = AnswerRequest(
        messages=turn.messages, tools=turn.tools, template_kwargs=turn.template_kwargs
    )
    return json_reply({"prompt": await service.prompts.rendered(asked)})
