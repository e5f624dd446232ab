"""Figures of answers: OpenAI's usage, llama-server's timings, and Prometheus' /metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from specrun.cli.serve.models import Models
from specrun.cli.serve.service import AnswerService, ServedAnswer
from specrun.runtime.engine.core import EngineStatistics
from specrun.runtime.round import GenerationResult

# -- Figures in replies ---------------------------------------------------------------------------


def usage_of(answer: ServedAnswer) -> dict[str, Any]:
    """Return OpenAI's usage: of the answers, of the choices that have ended."""
    results = answer.results.values()
    n_prompt = sum(map(len, answer.prompts.tokens))
    n_made = sum(result.usage.completion_tokens for result in results)
    # All choices share their prompt: the cached tokens of the first one count.
    first = [answer.streams[index] for index in range(0, len(answer.streams), answer.request.n)]
    n_cached = sum(stream.cached_tokens for stream in first)
    accepted = sum(result.stats.accepted for result in results)
    drafted = sum(result.stats.drafted for result in results)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_made,
        "total_tokens": n_prompt + n_made,
        "prompt_tokens_details": {"cached_tokens": n_cached},
        "completion_tokens_details": {
            "reasoning_tokens": answer.n_thought,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def timings_of(answer: ServedAnswer) -> dict[str, Any]:
    """Return llama-server's timings of the first choice that has ended; {} before that."""
    result = next(iter(answer.results.values()), None)
    if result is None:
        return {}
    stats, usage = result.stats, result.usage
    prompt_s = stats.time_to_first_token_s or 0.0
    n_read = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": n_read,
        "prompt_ms": 1e3 * prompt_s,
        "prompt_per_second": stats.prompt_tokens_per_second,
        "predicted_n": usage.completion_tokens,
        "predicted_ms": 1e3 * max(0.0, stats.wall_s - prompt_s),
        "predicted_per_second": stats.tokens_per_second,
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
    }


def speculation_of(answer: ServedAnswer) -> dict[str, Any]:
    """Return how that choice was drafted and verified, and by which seed it can be had again."""
    result = next(iter(answer.results.values()), None)
    if result is None:
        return {}
    stats = result.stats
    return {
        "seed": result.seed,
        "drafter": stats.drafter,
        "rule": stats.rule,
        "exact": stats.exact,
        "rounds": stats.rounds,
        "tokens_per_round": stats.mean_accepted_length,
    }


# -- Metrics --------------------------------------------------------------------------------------

_OF_MODEL = ("model",)
_GAUGES: tuple[tuple[str, str, Callable[[EngineStatistics], float]], ...] = (
    ("slots", "Slots.", lambda state: state.slots),
    ("slots_busy", "Slots that answer.", lambda state: state.busy),
    ("queued", "Answers that wait.", lambda state: state.queued),
    ("context_tokens", "Cells there are.", lambda state: state.n_ctx),
    ("context_used", "Cells in use.", lambda state: state.cells),
    (
        "conversations_per_evaluation",
        "Conversations that an evaluation served, so far.",
        lambda state: state.load.texts_per_evaluation or 0.0,
    ),
)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The counters of one server, in a registry of its own, and gauges of its engines' states."""

    def __init__(self, models: Models) -> None:
        self.registry = registry = CollectorRegistry()
        self._models = models
        of = functools.partial(Counter, registry=registry)
        about = "Requests by path and status."
        self._requests = of("specrun_requests", about, ["path", "status"])
        about = "Answers by how they ended."
        self._answers = of("specrun_answers", about, ["finish_reason", *_OF_MODEL])
        about = "Tokens: of prompts, of them cached, generated, drafted, accepted."
        self._tokens = of("specrun_tokens", about, ["kind", *_OF_MODEL])
        self._rounds = of("specrun_rounds", "Rounds of all answers.", _OF_MODEL)
        about = "Native evaluation time, by who evaluated."
        self._seconds = of("specrun_seconds", about, ["part", *_OF_MODEL])
        self._first = Histogram(
            "specrun_time_to_first_token_seconds",
            "From the beginning in a slot to the first token.",
            _OF_MODEL,
            buckets=_SECONDS,
            registry=registry,
        )
        registry.register(self)  # of which `collect` makes the gauges
        models.when_loaded(self._watch)

    def count_request(self, path: str, status: int) -> None:
        """Count a request whose reply is over; status 0: its client left before."""
        self._requests.labels(path, str(status)).inc()

    def _watch(self, service: AnswerService) -> None:
        service.observers.append(functools.partial(self.count_answer, service.settings.model))

    def count_answer(self, model: str, result: GenerationResult) -> None:
        """Count a choice of a model that has ended."""
        stats, usage = result.stats, result.usage
        self._answers.labels(result.finish_reason, model).inc()
        for kind, count in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("generated", usage.completion_tokens),
            ("drafted", stats.drafted),
            ("accepted", stats.accepted),
        ):
            self._tokens.labels(kind, model).inc(count)
        self._rounds.labels(model).inc(stats.rounds)
        self._seconds.labels("target", model).inc(stats.target_s)
        self._seconds.labels("drafter", model).inc(stats.drafter_s)
        if stats.time_to_first_token_s is not None:
            self._first.labels(model).observe(stats.time_to_first_token_s)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of the present states of the engines that are loaded."""
        loaded = {model.id: service.engine.statistics() for model, service in self._models.loaded}
        for name, about, value_of in _GAUGES:
            family = GaugeMetricFamily(f"specrun_{name}", about, labels=_OF_MODEL)
            for model, statistics in loaded.items():
                family.add_metric([model], value_of(statistics))
            yield family


async def metrics(request: Request) -> Response:
    """Return all numbers in Prometheus' text form."""
    own: Metrics = request.app.state.metrics
    return Response(generate_latest(own.registry), media_type=CONTENT_TYPE_LATEST)
