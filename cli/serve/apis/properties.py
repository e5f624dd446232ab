"""Properties and states of the server: /health, /props, /slots, and the models that it has.

A path that is read (GET) loads no model. Of several models `?model=NAME` names one.
"""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus
from math import inf
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.bindings.errors import TemplateError
from specrun.cli.doctor import specrun_version
from specrun.cli.serve.body import GivenBody, ModelBody, read_body
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.models import ServedModel
from specrun.cli.serve.replies import json_reply, models_of
from specrun.cli.serve.service import AnswerService


async def props(request: Request) -> Response:
    """Return llama-server's properties, and the drafters and rules that requests may choose."""
    models = models_of(request)
    name = request.query_params.get("model")
    common = {"build_info": f"specrun {specrun_version()}"}
    if not name and len(models.models) > 1:
        return json_reply({"role": "router", "max_instances": models.most, **common, **_NO_MODEL})
    model = models.find(name)
    common |= {"model_alias": model.id, "model_path": model.path.name}  # its folder is no business
    service = model.service
    if service is None:
        return json_reply({**_NO_MODEL, **common, "is_sleeping": True})
    engine, params = service.engine, service.settings.params.to_dict()
    bos, eos, template = (text or "" for text in _tokenizer(service).values())
    max_tokens = service.settings.max_tokens
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
                    "n_predict": -1 if max_tokens is None else max_tokens,
                },
            },
            "total_slots": engine.statistics().slots,
            "chat_template": template,
            "bos_token": bos,
            "eos_token": eos,
            "modalities": {"vision": False, "audio": False},
            **common,
            "is_sleeping": False,
            "speculative": {
                "drafter": engine.drafter,
                "drafters": engine.drafters,
                "accept": engine.options.accept,
                "rules": engine.rules,
            },
        }
    )


_NO_MODEL = {
    "model_alias": "",
    "model_path": "",
    "default_generation_settings": {"n_ctx": 0, "params": {}},
    "modalities": {"vision": False, "audio": False},
}
"""The properties of a server whose model is not loaded, or is not named."""


async def slots(request: Request) -> Response:
    """Return the state of each slot of the models that are loaded, without anyone's text."""
    models = models_of(request)
    name = request.query_params.get("model")
    own = None if not name else models.find(name)
    states = [
        {
            "id": number,
            "model": model.id,
            "n_ctx": service.engine.n_ctx,
            "is_processing": slot.busy,
            "speculative": slot.drafter != "none",
            "drafter": slot.drafter,
            "n_tokens": slot.n_tokens,
            "n_cached": slot.n_cached,
        }
        for model, service in models.loaded
        if own in (None, model)
        for number, slot in enumerate(service.engine.slots())
    ]
    return json_reply(states)


async def health(_request: Request) -> Response:
    """Return that requests are answered: before that the server does not listen."""
    return json_reply({"status": "ok"})


# -- Models ---------------------------------------------------------------------------------------


async def tokenizer_info(request: Request) -> Response:
    """Return vLLM's description of the tokenizer, by which others make prompts for a model."""
    models = models_of(request)
    service = await models.used(request.scope, request.query_params.get("model"))
    return json_reply(_tokenizer(service))


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
    """Return the models with their states, in a list that Anthropic's clients read, too.

    With `?reload=1` they are looked for again.
    """
    models = models_of(request)
    if request.query_params.get("reload") not in (None, "", "0"):
        await models.reload()
    listed = [_described(model, request.app.state.started) for model in models.models]
    ends = {"has_more": False, "first_id": listed[0]["id"], "last_id": listed[-1]["id"]}
    return json_reply({"object": "list", "data": listed, **ends})


async def get_model(request: Request) -> Response:
    """Return the model of a name."""
    models = models_of(request)
    model = models.named(request.path_params["name"])
    return json_reply(_described(model, request.app.state.started))


async def load_model(request: Request) -> Response:
    """Load a model; return when it is loaded."""
    await read_body(request, ModelBody, lambda *_: None)
    return json_reply({"success": True})


async def unload_model(request: Request) -> Response:
    """Unload a model; return when its answers are over and it is unloaded."""
    models = models_of(request)
    model = models.find((await GivenBody.of(request, ModelBody)).fields.model)
    if model.open is None:
        problem = f"{model.id} cannot be loaded again by this server: it stays"
        raise RequestError(problem, "model", status=HTTPStatus.NOT_IMPLEMENTED)
    await models.unload(model)
    return json_reply({"success": True})


def _described(model: ServedModel, started: int) -> dict[str, Any]:
    status: dict[str, Any] = {"value": model.state}
    if model.state == "loading":
        status |= {"progress": {"value": model.progress}}
    if model.problem:
        status |= {"failed": True, "error": model.problem}
    facts = model.facts
    meta: dict[str, Any] = {"n_ctx_train": facts.n_ctx_train, "n_params": facts.n_params}
    if model.service is not None:
        engine = model.service.engine
        meta = {
            "vocab_type": engine.vocabulary.kind,
            "n_vocab": engine.vocabulary.size,
            "n_ctx": engine.n_ctx,
            "n_ctx_train": engine.model.n_ctx_train,
            "n_params": engine.model.n_params,
            "drafter": engine.drafter,
        }
    return {
        "id": model.id,
        "object": "model",
        "created": started,
        "owned_by": "specrun",
        "type": "model",
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(started, UTC).isoformat(),
        "aliases": [*model.names],
        "status": status,
        "meta": meta,
    }
