"""/metrics: what the server does and has done, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from specrun.runtime.round import GenerationResult

if TYPE_CHECKING:
    from specrun.cli.serve.service import AnswerService

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


async def metrics(request: Request) -> Response:
    """Return all numbers in Prometheus' text form."""
    own: Metrics = request.app.state.metrics
    return Response(generate_latest(own.registry), media_type=CONTENT_TYPE_LATEST)


class Metrics:
    """The numbers of one server, in a registry of its own."""

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
    """What goes on in the engine when it is asked."""

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
