"""`measure overhead`, `lookup`, `heads` and `convert`: parts measured by themselves."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.bindings.errors import FileMissingError
from specrun.cli.bench.command import OutputForm, format_options, measure_and_print
from specrun.cli.options.group import Decorator, Section, SectionedCommand, option_group
from specrun.cli.options.output import terminal_options
from specrun.cli.options.types import COUNTS, FILE, PARAMETERS, PATH
from specrun.cli.terminal.terminal import Terminal

if TYPE_CHECKING:
    from measure.heads.measure import HeadsOptions
    from measure.lookup import LookupOptions
    from measure.mixture.measurement import MixtureOptions
    from measure.overhead.overhead import OverheadOptions

_MEASUREMENT = Section("Measurement")


def _sizes_option(usage: str, help: str, default: str, dest: str) -> Decorator:
    """Return an option of whole numbers: a,b or repeated."""
    return _MEASUREMENT.option(
        usage, help, COUNTS, multiple=True, default=(default,), dest=dest, callback=_flat
    )


def _flat(
    _context: click.Context, _option: click.Parameter, lists: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    return tuple(dict.fromkeys(size for sizes in lists for size in sizes))


def _threads_option(help: str, most: int = 512) -> Decorator:
    kind = click.IntRange(0, most)
    return _MEASUREMENT.option(
        "-t, --threads", help, kind, default=0, show_default="one a core", dest="n_threads"
    )


def _options(module: str, name: str, *options: Decorator) -> Decorator:
    """Return options by the fields of a class, which is imported when its command runs."""

    def build(**values: Any) -> object:  # noqa: ANN401 - of the options
        made: object = getattr(importlib.import_module(module), name)(**values)
        return made

    return option_group("options", build, *options)


_OVERHEAD_EPILOG = """\b
Random models of almost no width are written into a temporary folder, so that nearly all that is
left of a round is specrun's own work. The parts are timed from outside the shipped loop, which
runs as it always does, garbage collection included.

\b
Then a simulated device, which waits and does not compute, takes the target's place: a 1B model takes
some 3 ms an evaluation on a GPU, a 7B 8 ms. The share of such a round that is ours is to be at most
10 and 5 % (chains), 20 and 10 % (trees of 16), 30 and 13 % (EAGLE's trees). The drafter's own
evaluations are left out. Beside it: what reaches the host of a round's evaluations, and how many of
the target's found llama.cpp's graph ready. With --gpu the GPUs that are here evaluate instead, so that
no evaluation empties the caches that a round's own work then runs in.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_OVERHEAD_EPILOG)
@_options(
    "measure.overhead.overhead",
    "OverheadOptions",
    _sizes_option("--vocab", "Vocabulary sizes: a,b or repeated.", "32000,128000", "vocab_sizes"),
    _MEASUREMENT.option(
        "-c, --ctx, --ctx-size",
        "Context size: each change of the cache walks all of it.",
        click.IntRange(128, 2**20),
        default=4096,
        dest="n_ctx",
    ),
    _MEASUREMENT.option(
        "--rounds",
        "Rounds that are counted for each setting, after a tenth as many that are not.",
        click.IntRange(1, 10**6),
        default=100,
    ),
    _sizes_option(
        "--device-ms",
        "Milliseconds of the simulated device: a,b or repeated; half the rounds.",
        "3,8",
        "device_ms",
    ),
    _MEASUREMENT.flag(
        "-bs, --backend-sampling",
        "Let the target cut its rows to the top k, as with -bs on elsewhere.",
    ),
    _MEASUREMENT.flag(
        "--gpu", "Evaluate all models on this machine's GPUs, and simulate none.", dest="on_gpu"
    ),
    _threads_option("Threads of native evaluation.", most=1024),
)
@format_options
@terminal_options
def overhead(options: OverheadOptions, form: OutputForm, terminal: Terminal) -> None:
    """Show what a round costs in Python, part by part, and the share that is on a GPU."""
    from measure.overhead.overhead import measure_overhead
    from measure.tables import overhead_table

    measure_and_print(
        "overhead",
        lambda say: measure_overhead(options, progress=say),
        overhead_table,
        form,
        terminal,
    )


_LOOKUP_EPILOG = """\b
No model is evaluated: the drafters propose and observe over a text whose passages come back with some tokens
changed. Their time does not depend on the length of the context, only indexing a prompt does, once.
With --store, rest retrieves from your datastore, asked with passages of it.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_LOOKUP_EPILOG)
@_options(
    "measure.lookup",
    "LookupOptions",
    _sizes_option(
        "--context", "Tokens of context: a,b or repeated.", "100,4000,100000", "contexts"
    ),
    _MEASUREMENT.option("--rounds", "Rounds.", click.IntRange(1, 10**6), default=500),
    _MEASUREMENT.option("--store", "A datastore to retrieve from.", FILE),
)
@format_options
@terminal_options
def lookup(options: LookupOptions, form: OutputForm, terminal: Terminal) -> None:
    """Show what retrieving drafts costs a round."""
    from measure.lookup import measure_lookup
    from measure.tables import lookup_table

    measure_and_print(
        "lookup", lambda say: measure_lookup(options, progress=say), lookup_table, form, terminal
    )


_HEADS_EPILOG = """\b
Heads with random weights, and a target of one small layer, are written into a temporary folder
(with the defaults up to 1.1 GB at a time). Before every evaluation an array of 256 MiB is copied:
that measures the bandwidth, and leaves no weights in the caches.
"""


@click.command(cls=SectionedCommand, epilog=_HEADS_EPILOG)
@_options(
    "measure.heads.measure",
    "HeadsOptions",
    _sizes_option("--hidden", "Hidden sizes: a,b or repeated.", "512,4096", "hidden"),
    _MEASUREMENT.option(
        "--vocab",
        "The size of the vocabulary, in tokens.",
        click.IntRange(16, 10**6),
        default=32_000,
        dest="vocab_size",
    ),
    _MEASUREMENT.option(
        "--type",
        "Type of the weights.",
        click.Choice(["F32", "F16", "Q8_0"], case_sensitive=False),
        dest="type_name",
        default="Q8_0",
    ),
    _sizes_option(
        "--width", "Paths in one evaluation of Hydra's head, pairs of EAGLE's.", "1,4,8", "widths"
    ),
    _MEASUREMENT.option(
        "-r, --repetitions",
        "Evaluations that are timed for each row.",
        click.IntRange(1, 10**4),
        default=20,
    ),
    _threads_option("Threads of the evaluation and of the copy."),
)
@format_options
@terminal_options
def heads(options: HeadsOptions, form: OutputForm, terminal: Terminal) -> None:
    """Show what evaluating heads costs, beside the bytes that they have to read."""
    from measure.heads.measure import measure_heads
    from measure.tables import heads_table

    measure_and_print(
        "heads", lambda say: measure_heads(options, progress=say), heads_table, form, terminal
    )


_MIXTURE_EPILOG = """\b
A random mixture in F16 is written into a temporary folder. Rounds of each width are timed in turn with plain decoding and
bare auto: on this machine, and with everything but the experts on a device, a worker on the loopback.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_MIXTURE_EPILOG)
@_options(
    "measure.mixture.measurement",
    "MixtureOptions",
    _MEASUREMENT.option(
        "--size BYTES",
        "Bytes of the mixture: 20M, 4G, ...",
        PARAMETERS,
        default="1.2G",
        dest="n_bytes",
    ),
    _MEASUREMENT.option("--experts", "Experts of a layer.", click.IntRange(1, 512), default=32),
    _MEASUREMENT.option(
        "--experts-used", "Experts that a token uses.", click.IntRange(1, 512), default=4
    ),
    _sizes_option("--width", "Tokens of a round: a,b or repeated.", "1,2,4,8", "widths"),
    _MEASUREMENT.option(
        "-n, --predict", "Tokens of an answer.", click.IntRange(2, 1000), default=32
    ),
    _MEASUREMENT.option(
        "-r, --repetitions", "How often everything is measured.", click.IntRange(1, 1000), default=3
    ),
    _MEASUREMENT.flag("--no-worker", "Leave out the arm with a worker."),
    _MEASUREMENT.option(
        "--folder", "Write there.", PATH, show_default="the system's for temporary files"
    ),
    _threads_option("Threads of native work."),
)
@format_options
@terminal_options
def mixture(options: MixtureOptions, form: OutputForm, terminal: Terminal) -> None:
    """Compare what is predicted of a mixture of experts with the clock."""
    from measure.mixture.measurement import measure_mixture
    from measure.tables import mixture_table

    measure_and_print(
        "mixture", lambda say: measure_mixture(options, progress=say), mixture_table, form, terminal
    )


_CONVERT_EPILOG = """\b
A checkpoint is made up in a temporary folder, three times as much space is needed, and everything
is removed afterwards. The budgets are those of specrun's design: converting to F16 reaches half of
the bandwidth of a plain copy, within 2 GB of memory beyond the largest tensor; quantizing 0.9 of the
speed of llama.cpp's own call, within 1.2 of its memory.

\b
--only: checkpoint (to F16), quantize (F16 to Q4_K_M), imatrix (summing over plain evaluation).
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_CONVERT_EPILOG)
@_MEASUREMENT.option(
    "--size BYTES",
    "Bytes of the checkpoint that is made: 20M, 4G, ...",
    PARAMETERS,
    default="1.1G",
)
@_MEASUREMENT.option(
    "-r, --repetitions", "How often everything is measured.", click.IntRange(1, 1000), default=3
)
@_MEASUREMENT.option(
    "--only NAME", "Measure only this; may be repeated.", multiple=True, show_default="everything"
)
@_MEASUREMENT.option(
    "--folder",
    "Measure on the disk of this folder.",
    PATH,
    show_default="the system's for temporary files",
)
@_MEASUREMENT.threads("Threads of native work.", usage="-t, --threads")
@format_options
@terminal_options
def convert(
    size: int,
    repetitions: int,
    only: tuple[str, ...],
    folder: Path | None,
    threads: int,
    form: OutputForm,
    terminal: Terminal,
) -> None:
    """Measure conversion: bandwidth beside a plain copy, and peak memory."""
    from measure.convert.measurement import ConvertOptions, measure
    from measure.tables import convert_table

    if folder is not None and not folder.is_dir():
        raise FileMissingError(f"there is no folder {folder}; create it first")
    with tempfile.TemporaryDirectory(prefix="specrun-bench-", dir=folder) as place:
        options = ConvertOptions(size, repetitions, threads, Path(place))
        measure_and_print(
            "convert", lambda say: measure(only, options, say), convert_table, form, terminal
        )
