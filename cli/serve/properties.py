"""Properties and states of the server: /health, /props, /slots and /v1/models."""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus
from math import inf
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.bindings.errors import TemplateError
from specrun.cli.doctor import specrun_version
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.replies import json_reply
from specrun.cli.serve.service import AnswerService


async def props(request: Request) -> Response:
    """Return llama-server's properties, and the drafters and rules that requests may choose."""
    service: AnswerService = request.app.state.service
    engine, settings = service.engine, service.settings
    params = settings.params.to_dict()
    bos, eos, template = (text or "" for text in _tokenizer(service).values())
    return json_reply(
        {
            "default_generation_settings": {
                "n_ctx": engine.n_ctx,
                "params": {
                    **params,
                    "logit_bias": [  # as JSON has them: false, not -inf, forbids a token
                        [token, False if bias == -inf else bias]
                        for token, bias in params["logit_bias"].items()
                    ],
                    "seed": -1 if params["seed"] is None else params["seed"],
                    "n_predict": -1 if settings.max_tokens is None else settings.max_tokens,
                },
            },
            "total_slots": engine.statistics().slots,
            "model_alias": settings.model,
            "model_path": engine.model.path.name,  # its folder is nobody else's business
            "chat_template": template,
            "bos_token": bos,
            "eos_token": eos,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"specrun {specrun_version()}",
            "is_sleeping": False,
            "speculative": {
                "drafter": engine.drafter,
                "drafters": engine.drafters,
                "accept": engine.options.accept,
                "rules": engine.rules,
            },
        }
    )


async def slots(request: Request) -> Response:
    """Return the state of each slot, without anyone's text."""
    service: AnswerService = request.app.state.service
    states = [
        {
            "id": number,
            "n_ctx": service.engine.n_ctx,
            "is_processing": slot.busy,
            "speculative": slot.drafter != "none",
            "drafter": slot.drafter,
            "n_tokens": slot.n_tokens,
            "n_cached": slot.n_cached,
        }
        for number, slot in enumerate(service.engine.slots())
    ]
    return json_reply(states)


async def health(_request: Request) -> Response:
    """Return that the model is loaded: before that the server does not listen."""
    return json_reply({"status": "ok"})


# -- Models ---------------------------------------------------------------------------------------


async def tokenizer_info(request: Request) -> Response:
    """Return vLLM's description of the tokenizer, by which others make prompts for this model."""
    return json_reply(_tokenizer(request.app.state.service))


def _tokenizer(service: AnswerService) -> dict[str, str | None]:
    engine = service.engine
    ends = {"bos_token": engine.vocabulary.bos, "eos_token": engine.vocabulary.eos}
    try:
        template: str | None = engine.chat_template.source
    except TemplateError:
        template = None
    texts = {
        name: None if token is None else engine.vocabulary.text(token)
        for name, token in ends.items()
    }
    return {**texts, "chat_template": template}


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
