"""Figures of answers: OpenAI's usage, llama-server's timings, and Prometheus' /metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from specrun.cli.serve.service import AnswerService, ServedAnswer
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

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The counters of one server, in a registry of its own, and gauges of its engine's state."""

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
        registry.register(self)  # of which `collect` makes the gauges
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

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of the engine's present state."""
        statistics = self._service.engine.statistics()
        yield GaugeMetricFamily("specrun_slots", "Slots.", statistics.slots)
        yield GaugeMetricFamily("specrun_slots_busy", "Slots that answer.", statistics.busy)
        yield GaugeMetricFamily("specrun_queued", "Answers that wait.", statistics.queued)
        yield GaugeMetricFamily("specrun_context_tokens", "Cells there are.", statistics.n_ctx)
        yield GaugeMetricFamily("specrun_context_used", "Cells in use.", statistics.cells)
        together = statistics.load.texts_per_evaluation or 0.0
        about = "Conversations that an evaluation served, so far."
        yield GaugeMetricFamily("specrun_conversations_per_evaluation", about, together)


async def metrics(request: Request) -> Response:
    """Return all numbers in Prometheus' text form."""
    own: Metrics = request.app.state.metrics
    return Response(generate_latest(own.registry), media_type=CONTENT_TYPE_LATEST)
