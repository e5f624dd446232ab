"""Properties and states of the server: /health, /props, /slots, /v1/models and /metrics."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from specrun.bindings.errors import TemplateError
from specrun.cli.doctor import specrun_version
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.replies import json_reply
from specrun.cli.serve.service import AnswerService
from specrun.runtime.engine import Engine
from specrun.runtime.round import GenerationResult


async def props(request: Request) -> Response:
    """Return llama-server's properties, and the drafters and rules that requests may choose."""
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
            "model_path": engine.model.path.name,  # its folder is nobody else's business
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


# -- Metrics --------------------------------------------------------------------------------------


_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


async def metrics(request: Request) -> Response:
    """Return all numbers in Prometheus' text form."""
    own: Metrics = request.app.state.metrics
    return Response(generate_latest(own.registry), media_type=CONTENT_TYPE_LATEST)


class Metrics:
    """The counters of one server, in a registry of its own."""

    def __init__(self, service: AnswerService) -> None:
        self.registry = registry = CollectorRegistry()
        self._service = service
        self._requests = Counter(
            "specrun_requests",
            "Requests by path and status.",
            ["path", "status"],
            registry=registry,
        )
        self._answers = Counter(
            "specrun_answers", "Answers by how they ended.", ["finish_reason"], registry=registry
        )
        about = "Tokens: of prompts, of them cached, generated, drafted, accepted."
        self._tokens = Counter("specrun_tokens", about, ["kind"], registry=registry)
        self._rounds = Counter("specrun_rounds", "Rounds of all answers.", registry=registry)
        about = "Native evaluation time, by who evaluated."
        self._seconds = Counter("specrun_seconds", about, ["part"], registry=registry)
        self._first = Histogram(
            "specrun_time_to_first_token_seconds",
            "From the beginning in a slot to the first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.registry.register(_Now(service))
        service.observers.append(self.count_answer)

    def count_request(self, path: str, status: int) -> None:
        """Count a request whose reply is over; status 0: its client left before."""
        self._requests.labels(path, str(status)).inc()

    def count_answer(self, result: GenerationResult) -> None:
        """Count a choice that has ended."""
        stats, usage = result.stats, result.usage
        self._answers.labels(result.finish_reason).inc()
        for kind, count in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("generated", usage.completion_tokens),
            ("drafted", stats.drafted),
            ("accepted", stats.accepted),
        ):
            self._tokens.labels(kind).inc(count)
        self._rounds.inc(stats.rounds)
        self._seconds.labels("target").inc(stats.target_s)
        self._seconds.labels("drafter").inc(stats.drafter_s)
        if stats.time_to_first_token_s is not None:
            self._first.observe(stats.time_to_first_token_s)


class _Now:
    """Collector of the engine's present state."""

    def __init__(self, service: AnswerService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        statistics = self._service.engine.statistics()
        yield GaugeMetricFamily("specrun_slots", "Slots.", statistics.slots)
        yield GaugeMetricFamily("specrun_slots_busy", "Slots that answer.", statistics.busy)
        yield GaugeMetricFamily("specrun_queued", "Answers that wait.", statistics.queued)
        yield GaugeMetricFamily("specrun_context_tokens", "Cells there are.", statistics.n_ctx)
        yield GaugeMetricFamily("specrun_context_used", "Cells in use.", statistics.cells)
        together = statistics.load.texts_per_evaluation or 0.0
        about = "Conversations that an evaluation served, so far."
        yield GaugeMetricFamily("specrun_conversations_per_evaluation", about, together)


# -- Models ---------------------------------------------------------------------------------------


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
