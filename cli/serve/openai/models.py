"""The models that a server has: /v1/models, a list of one."""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.replies import json_reply
from specrun.cli.serve.service import AnswerService


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
