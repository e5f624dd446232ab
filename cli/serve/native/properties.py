"""/props and /slots: what the server is, and what each of its slots does."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.bindings.errors import TemplateError
from specrun.cli.doctor import specrun_version
from specrun.cli.serve.replies import json_reply
from specrun.cli.serve.service import AnswerService
from specrun.runtime.engine import Engine


async def props(request: Request) -> Response:
    """Return llama-server's properties, and what requests may choose to draft with."""
    service: AnswerService = request.app.state.service
    engine, settings = service.engine, service.settings
    vocabulary = engine.vocabulary
    bos, eos = (
        "" if token is None else vocabulary.text(token)
        for token in (vocabulary.bos, vocabulary.eos)
    )
    return json_reply(
        {
            "default_generation_settings": {
                "n_ctx": engine.n_ctx,
                "params": {
                    **_plain(settings.params.to_dict()),
                    "n_predict": -1 if settings.max_tokens is None else settings.max_tokens,
                },
            },
            "total_slots": engine.statistics().slots,
            "model_alias": settings.model,
            "model_path": engine.model.path.name,  # where it lies is nobody else's business
            "chat_template": _template(engine),
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


def _plain(params: dict[str, Any]) -> dict[str, Any]:
    """Return settings as JSON has them: minus infinity, which forbids a token, is false."""
    biases = [
        [token, False if bias == float("-inf") else bias]
        for token, bias in params["logit_bias"].items()
    ]
    return {
        **params,
        "logit_bias": biases,
        "seed": -1 if params["seed"] is None else params["seed"],
    }


def _template(engine: Engine) -> str:
    try:
        return engine.chat_template.source
    except TemplateError:
        return ""


async def slots(request: Request) -> Response:
    """Return what each slot does; nothing of anyone's text."""
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
    """Say that the model is loaded: the server listens from then on."""
    return json_reply({"status": "ok"})
