"""/tokenize, /detokenize and /apply-template: what the model reads."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specrun.bindings.contexts.context import TextEmbedder, Vector
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve.body import Fields, read_body
from specrun.cli.serve.chat import read_messages
from specrun.cli.serve.completions import read_prompts
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.lanes import beside_the_loop
from specrun.cli.serve.replies import json_reply
from specrun.cli.serve.service import AnswerRequest, AnswerService
from specrun.cli.serve.tools import read_turn

_PART = 1 << 14  # tokens, which take about a millisecond


async def tokenize(request: Request) -> Response:
    """Return the tokens of `content`, with their texts where `with_pieces` asks for them."""
    return await _answered(request, _tokens_of)


async def detokenize(request: Request) -> Response:
    """Return the text of `tokens`."""
    return await _answered(request, _text_of)


async def apply_template(request: Request) -> Response:
    """Return the prompt that the chat template makes of `messages` and `tools`."""
    service: AnswerService = request.app.state.service
    _, asked = await read_body(request, _read_conversation)
    return json_reply({"prompt": await service.prompts.rendered(asked)})


async def _answered(
    request: Request, read: Callable[[Fields, AnswerService], Callable[[], object]]
) -> Response:
    """Return what a request's own work gives, as JSON, which grows with it."""
    _, work = await read_body(request, read)
    return await beside_the_loop(lambda: json_reply(work()))


def _tokens_of(fields: Fields, service: AnswerService) -> Callable[[], object]:
    content = fields.text("content")
    if content is None:
        raise RequestError("content is missing: give a text", "content")
    add_special = fields.flag("add_special")
    parse_special = fields.flag("parse_special", default=True)
    vocabulary = service.engine.vocabulary
    with_pieces = fields.flag("with_pieces")

    def work() -> object:
        tokens = vocabulary.tokenize(content, add_special=add_special, parse_special=parse_special)
        return {"tokens": _with_pieces(vocabulary, tokens) if with_pieces else tokens}

    return work


def _with_pieces(vocabulary: Vocabulary, tokens: Sequence[int]) -> msgspec.Raw:
    """Return the tokens with their texts as JSON: objects would take gigabytes."""

    @functools.cache
    def entry(token: int) -> bytes:
        return msgspec.json.encode({"id": token, "piece": _piece(vocabulary, token)})

    parts = [b",".join(map(entry, part)) for part in _parts(tokens)]
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def _parts(tokens: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield tokens in parts: between them, not within, other threads have their turn."""
    for start in range(0, len(tokens), _PART):
        yield tokens[start : start + _PART]


def _piece(vocabulary: Vocabulary, token: int) -> str | list[int]:
    """Return a token's text, or its bytes where they are no text."""
    piece = vocabulary.piece(token)
    try:
        return piece.decode() or vocabulary.label(token)
    except UnicodeDecodeError:
        return list(piece)


def _text_of(fields: Fields, service: AnswerService) -> Callable[[], object]:
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

    @functools.cache
    def label(token: int) -> bytes:
        return vocabulary.piece(token) or vocabulary.label(token).encode()

    def work() -> object:
        labels = b"".join([b"".join(map(label, part)) for part in _parts(tokens)])
        return {"content": labels.decode("utf-8", "replace")}

    return work


def _read_conversation(fields: Fields, service: AnswerService) -> AnswerRequest:
    messages = read_messages(fields, service.settings.bounds)
    turn = read_turn(fields, service.engine, messages)
    return AnswerRequest(
        messages=turn.messages, tools=turn.tools, template_kwargs=turn.template_kwargs
    )


# -- Embeddings -----------------------------------------------------------------------------------


_FORMS = ("float", "base64")


async def embeddings(request: Request) -> Response:
    """Return the embeddings of texts."""
    service: AnswerService = request.app.state.service
    fields, asked = await read_body(request, _read_inputs)
    model, options = service.engine.model, service.engine.options.context
    form = _form(fields)
    wanted = fields.integer("dimensions", 1, 2**31 - 1)
    n_ctx = max(service.engine.n_ctx, model.n_ctx_train)  # the embedder's own may be longer
    texts = (await service.prompts.read(asked, n_ctx)).tokens

    def work() -> list[Vector]:
        # A context for each request: nothing is held where nobody asks.
        with TextEmbedder(model, options) as embedder:
            return [embedder.embed(tokens) for tokens in texts]

    vectors = await beside_the_loop(work)
    if wanted not in (None, len(vectors[0])):
        problem = f"dimensions is {wanted}: this model's embeddings have {len(vectors[0])}"
        raise RequestError(f"{problem}, and were not trained to be cut", "dimensions")
    n_tokens = sum(map(len, texts))
    data = [
        {"object": "embedding", "index": index, "embedding": _written(vector, form)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return json_reply(
        {"object": "list", "data": data, "model": service.settings.model, "usage": usage}
    )


def _read_inputs(fields: Fields, service: AnswerService) -> AnswerRequest:
    if service.engine.model.pooling is None:
        problem = f"{service.settings.model} writes texts and makes no embeddings"
        advice = "serve a model that was trained for them"
        raise RequestError(f"{problem}: {advice}", status=HTTPStatus.NOT_IMPLEMENTED)
    return AnswerRequest(prompts=read_prompts(fields, service.settings.bounds, "input"))


def _form(fields: Fields) -> str:
    form = fields.text("encoding_format") or "float"
    if form not in _FORMS:
        raise fields.wrong("encoding_format", " or ".join(_FORMS))
    return form


def _written(vector: Vector, form: str) -> Any:  # noqa: ANN401 - a list of numbers, or a text
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
