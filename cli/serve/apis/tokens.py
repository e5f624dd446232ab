"""Texts as the model reads them: /tokenize, /detokenize, /apply-template and /v1/embeddings."""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from specrun.bindings.contexts.context import TextEmbedder, Vector
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve.apis.chat import ChatBody, chat_turn
from specrun.cli.serve.apis.completions import GivenPrompts, prompts_of
from specrun.cli.serve.body import ModelBody, read_body, shown, wanted
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.lanes import REQUESTS
from specrun.cli.serve.replies import json_reply
from specrun.cli.serve.sampling import MOST
from specrun.cli.serve.service import AnswerRequest, AnswerService, Prompt

_PART = 1 << 14  # tokens, which take about a millisecond


class TokenizeBody(ModelBody, kw_only=True):
    """The body of /tokenize: llama-server's has `content`, vLLM's has `prompt`."""

    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(ModelBody, kw_only=True):
    """The body of /detokenize."""

    tokens: list[Annotated[int, wanted("token ids")]] | None = None


async def tokenize(request: Request) -> Response:
    """Return the tokens of a text, with their texts if requested."""
    _, _, reply = await read_body(request, TokenizeBody, _tokens_of)
    return reply


async def detokenize(request: Request) -> Response:
    """Return the text of `tokens`."""
    _, _, reply = await read_body(request, DetokenizeBody, _text_of)
    return reply


async def apply_template(request: Request) -> Response:
    """Return the prompt that the chat template makes of `messages` and `tools`."""
    _, service, asked = await read_body(
        request,
        ChatBody,
        lambda body, service: AnswerRequest(turn=chat_turn(body, service.engine)),
    )
    return json_reply({"prompt": await service.prompts.rendered(asked)})


def _tokens_of(body: TokenizeBody, service: AnswerService) -> Response:
    vocabulary, n_ctx = service.engine.vocabulary, service.engine.n_ctx
    if body.content is not None:
        special = body.parse_special is not False
        tokens = vocabulary.tokenize(
            body.content, add_special=bool(body.add_special), parse_special=special
        )
        listed = _with_pieces(vocabulary, tokens) if body.with_pieces else tokens
        return json_reply({"tokens": listed})
    if body.prompt is None:
        raise RequestError("content is missing: give a text", "content")
    special = body.add_special_tokens is not False
    tokens = vocabulary.tokenize(body.prompt, add_special=special, parse_special=True)
    found: dict[str, object] = {"count": len(tokens), "max_model_len": n_ctx, "tokens": tokens}
    if body.return_token_strs:
        found["token_strs"] = [vocabulary.text(token) for token in tokens]
    return json_reply(found)


def _with_pieces(vocabulary: Vocabulary, tokens: Sequence[int]) -> msgspec.Raw:
    """Return the tokens with their texts, or bytes that are no text, as JSON.

    Objects of Python would take gigabytes.
    """

    @functools.cache
    def entry(token: int) -> bytes:
        piece = vocabulary.piece(token)
        try:
            text: str | list[int] = piece.decode() or vocabulary.label(token)
        except UnicodeDecodeError:
            text = list(piece)
        return msgspec.json.encode({"id": token, "piece": text})

    parts = [b",".join(map(entry, part)) for part in _parts(tokens)]
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def _parts(tokens: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield tokens in parts: between them, not within, other threads have their turn."""
    for start in range(0, len(tokens), _PART):
        yield tokens[start : start + _PART]


def _text_of(body: DetokenizeBody, service: AnswerService) -> Response:
    tokens, vocabulary = body.tokens, service.engine.vocabulary
    if tokens is None:
        raise RequestError("tokens is missing: give a list of token ids", "tokens")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary.size:
        place = next(k for k, token in enumerate(tokens) if not 0 <= token < vocabulary.size)
        where = f"tokens[{place}]"
        problem = f"{where} is {shown(tokens[place])}: give token ids"
        raise RequestError(f"{problem} from 0 to {vocabulary.size - 1}", where)

    @functools.cache
    def label(token: int) -> bytes:
        return vocabulary.piece(token) or vocabulary.label(token).encode()

    labels = b"".join([b"".join(map(label, part)) for part in _parts(tokens)])
    text = labels.decode("utf-8", "replace")
    return json_reply({"content": text, "prompt": text})  # llama-server's field, and vLLM's


# -- Embeddings ------------------------------------------------------------------------------------


class EmbeddingBody(ModelBody, kw_only=True):
    """The body of a request for embeddings."""

    input: GivenPrompts = None
    encoding_format: Annotated[Literal["float", "base64"] | None, wanted("float or base64")] = None
    dimensions: Annotated[int, Meta(ge=1, le=MOST)] | None = None


async def embeddings(request: Request) -> Response:
    """Return the embeddings of texts."""
    body, service, inputs = await read_body(request, EmbeddingBody, _inputs)
    model, options = service.engine.model, service.engine.options.context
    n_ctx = max(service.engine.n_ctx, model.n_ctx_train)  # the embedder's own may be longer
    texts = await service.prompts.texts(inputs, n_ctx, service.engine.vocabulary.tokenize)

    def work() -> list[Vector]:
        # A context for each request: it holds no memory between them.
        with TextEmbedder(model, options) as embedder:
            return [embedder.embed(tokens) for tokens in texts]

    vectors = await REQUESTS.run(work)
    if body.dimensions not in (None, len(vectors[0])):
        problem = f"dimensions is {body.dimensions}: this model's embeddings have {len(vectors[0])}"
        raise RequestError(f"{problem}, and were not trained to be cut", "dimensions")
    n_tokens = sum(map(len, texts))
    data: list[dict[str, object]] = []
    for index, vector in enumerate(vectors):
        if body.encoding_format == "base64":
            embedding: object = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        else:
            embedding = vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return json_reply(
        {"object": "list", "data": data, "model": service.settings.model, "usage": usage}
    )


def _inputs(body: EmbeddingBody, service: AnswerService) -> list[Prompt]:
    if service.engine.model.pooling is None:
        problem = f"{service.settings.model} writes texts and makes no embeddings"
        advice = "serve a model that was trained for them"
        raise RequestError(f"{problem}: {advice}", status=HTTPStatus.NOT_IMPLEMENTED)
    return prompts_of(body.input, "input")
