"""The model that a server has: /v1/models, a list of one, and the /v1/embeddings it may make."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.bindings.contexts.context import TextEmbedder, Vector
from specrun.cli.serve.body import Fields, read_body
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.http.server import beside_the_loop
from specrun.cli.serve.openai.completions import read_prompts
from specrun.cli.serve.replies import json_reply
from specrun.cli.serve.request import AnswerRequest
from specrun.cli.serve.service import AnswerService

_FORMS = ("float", "base64")


async def list_models(request: Request) -> Response:
    """Return the model, in a list that Anthropic's clients read, too."""
    model = _model(request)
    ends = {"has_more": False, "first_id": model["id"], "last_id": model["id"]}
    return json_reply({"object": "list", "data": [model], **ends})


async def get_model(request: Request) -> Response:
    """Return the model by its name."""
    model, name = _model(request), request.path_params["name"]
    if name != model["id"]:
        problem = f"there is no model {name!r} here: this server has {model['id']!r}"
        raise RequestError(problem, "model", status=HTTPStatus.NOT_FOUND, code="model_not_found")
    return json_reply(model)


def _model(request: Request) -> dict[str, Any]:
    service: AnswerService = request.app.state.service
    engine = service.engine
    return {
        "id": service.settings.model,
        "object": "model",
        "created": request.app.state.started,
        "owned_by": "specrun",
        "type": "model",
        "display_name": service.settings.model,
        "created_at": datetime.fromtimestamp(request.app.state.started, UTC).isoformat(),
        "meta": {
            "vocab_type": engine.vocabulary.kind,
            "n_vocab": engine.vocabulary.size,
            "n_ctx": engine.n_ctx,
            "n_ctx_train": engine.model.n_ctx_train,
            "n_params": engine.model.n_params,
            "drafter": engine.drafter,
        },
    }


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
