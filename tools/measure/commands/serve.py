"""`measure serve` and `serve-soak`: the server's cost of a round, and many requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from measure.commands.soak import end_soak
from specrun.cli.bench.command import OutputForm, format_options, measure_and_print
from specrun.cli.options.group import Section, SectionedCommand
from specrun.cli.options.output import terminal_options
from specrun.cli.options.types import MAX_COUNT
from specrun.cli.terminal.terminal import Terminal

if TYPE_CHECKING:
    from measure.serve.cost import ServeCost
    from measure.serve.soak import ServeSoakResult
    from specrun.bench.report import Table

_SERVER = Section("Server")
_COST_EPILOG = """\b
An engine that computes nothing says rounds of the same tokens, one a millisecond. They are streamed by
the server, by a bare starlette stream that waits for the same rounds and sends events that were written
before, and by one that waits for nothing, in turns, to a client in another process. What is measured is
processor time of the event loop's thread, so other programs on the machine are not in it.
"""  # noqa: E501 - as it is shown
_SOAK_EPILOG = """\b
The embedded family is served on loopback. A crowd comes at once; then clients ask for streams and whole
answers, leave in the middle, and send malformed bodies, eight at a time. A reply of status 500, one
without an error object, a slot that stays busy, and memory, handles or threads that grow are failures,
with exit status 1.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_COST_EPILOG)
@_SERVER.option("--rounds", "Events of a stream.", click.IntRange(10, 10**6), default=1000)
@_SERVER.option("--tokens", "Tokens of a round.", click.IntRange(1, 1024), default=4)
@_SERVER.option("-r, --repetitions", "Streams of each kind.", click.IntRange(1, 1000), default=5)
@format_options
@terminal_options
def serve(rounds: int, tokens: int, repetitions: int, form: OutputForm, terminal: Terminal) -> None:
    """Measure what the server adds to a round, beside bare streams of the same events."""
    from specrun.cli.serve.settings import require_packages

    require_packages()
    from measure.serve.cost import measure_cost

    def measure(say: Callable[[str], None]) -> list[ServeCost]:
        return measure_cost(rounds, tokens, repetitions, say)

    measure_and_print("serve", measure, _cost_table, form, terminal)


@click.command(cls=SectionedCommand, epilog=_SOAK_EPILOG)
@_SERVER.option("--requests", "Requests in all.", click.IntRange(1, MAX_COUNT), default=20_000)
@_SERVER.option(
    "--malformed", "Malformed ones among them.", click.IntRange(0, MAX_COUNT), default=10_000
)
@_SERVER.option("--crowd", "Those at once at first.", click.IntRange(0, 256), default=200)
@_SERVER.option("--seed", "What all is drawn from.", click.IntRange(0, MAX_COUNT), default=0)
@format_options
@terminal_options
def serve_soak(
    requests: int, malformed: int, crowd: int, seed: int, form: OutputForm, terminal: Terminal
) -> None:
    """Ask a server thousands of times: nothing may fail, nothing may grow."""
    from specrun.cli.serve.settings import require_packages

    require_packages()
    from measure.serve.soak import ServeSoakOptions, soak_server
    from specrun.runtime.engine import Engine

    options = ServeSoakOptions(requests, malformed, crowd, seed)

    def measure(say: Callable[[str], None]) -> list[ServeSoakResult]:
        with Engine.demo(slots=4, n_ctx=1024, n_threads=1) as engine:
            return [soak_server(engine, options, say)]

    (result,) = measure_and_print("serve-soak", measure, _soak_table, form, terminal)
    end_soak(result, terminal)


def _cost_table(results: Sequence[ServeCost]) -> Table:
    from specrun.bench.report import Table

    rows = (
        {
            "API": result.api,
            "rounds": f"{result.rounds:,}",
            "tokens a round": f"{result.tokens_per_round}",
            "server (us)": f"{result.server_us:.0f}",
            "bare, same rounds (us)": f"{result.paced_us:.0f}",
            "bare, unpaced (us)": f"{result.bare_us:.0f}",
            "ratio": f"{result.ratio:.2f}",
        }
        for result in results
    )
    note = (
        "Processor time of the event loop for an event; the ratio is server to bare, same rounds."
    )
    return Table.of(rows, note)


def _soak_table(results: Sequence[ServeSoakResult]) -> Table:
    from specrun.bench.report import Table

    rows = (
        {
            "seconds": f"{result.seconds:.0f}",
            "requests": f"{result.requests:,}",
            "left": f"{result.left:,}",
            "malformed": f"{result.malformed:,}",
            "failures": f"{len(result.failures):,}",
            **{
                growth.name: f"{growth.before / _unit(growth.name):.0f} to "
                f"{growth.after / _unit(growth.name):.0f}"
                for growth in result.growth
            },
        }
        for result in results
    )
    notes = [
        "Replies by status: "
        + ", ".join(f"{status} {count:,}" for status, count in sorted(result.statuses.items()))
        + ". Memory in MB."
        for result in results
    ]
    return Table.of(rows, *notes)


def _unit(name: str) -> float:
    return float(1 << 20) if name == "memory" else 1.0
