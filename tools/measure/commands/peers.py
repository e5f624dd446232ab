"""`python tools/measure peers`: llama.cpp's server and specrun's side by side."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.bindings.threads import available_cores
from specrun.cli.bench.command import (
    OutputForm,
    first_seed_option,
    format_options,
    measure_and_print,
    predict_option,
    repetitions_option,
)
from specrun.cli.bench.drafters import PromptChoice, chosen_prompts, prompt_choice_options
from specrun.cli.options.drafting import draft_kind
from specrun.cli.options.group import Section, SectionedCommand, option_group
from specrun.cli.options.model import LoadSettings
from specrun.cli.options.output import terminal_options
from specrun.cli.options.prompt import named_target
from specrun.cli.options.sampling import SamplingGrid, grid_options
from specrun.cli.options.types import FILE, MAX_COUNT
from specrun.cli.terminal.terminal import Terminal
from specrun.runtime.engine import RuntimeOptions

if TYPE_CHECKING:
    from measure.peers.comparison import PeerResult
    from measure.peers.servers import Peer

_PEERS = Section("Peers")
_SPEC_TYPES = ("ngram-simple", "ngram-map-k", "ngram-mod")
_FILE_TYPES = {
    "draft": "draft-simple",
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "mtp": "draft-mtp",
}
"""llama-server's --spec-type for a file, by the method that specrun drafts with."""

_EPILOG = """\b
Examples:
  make peers                                   # builds llama-server of the version that specrun has
  python tools/measure peers -m target.gguf -md small.gguf --suite own --questions 2 -r 3
  python tools/measure peers -m target.gguf --server /usr/local/bin/llama-server --spec-type ngram-mod -p "Once"
  python tools/measure peers -m target.gguf --drafter prompt-lookup --all "-ngl 99 -fa on" -o json

\b
Every arm is a server of its own with one slot; all are open at once (their weights are mapped). llama-server
runs plain, with each --spec-type, and with -md; specrun plain, with each --drafter, and with -md. The first arm, llama-server's plain decoding, is the baseline. Do not use the machine meanwhile.
"""  # noqa: E501 - as it is shown


@dataclass(frozen=True, slots=True)
class _Comparing:
    """Which servers are compared, how often."""

    model: Path
    server: Path | None
    ctx_size: int
    threads: int | None
    model_draft: Path | None
    spec_draft_n_max: int | None
    llama_types: tuple[str, ...]
    drafter: tuple[str, ...]
    all: str
    predict: int
    repetitions: int
    wait: float


_comparing_options = option_group(
    "comparing",
    _Comparing,
    _PEERS.option("-m, --model FILE", "The target: a GGUF file.", FILE, required=True),
    _PEERS.option(
        "--server FILE",
        "llama.cpp's llama-server.",
        FILE,
        show_default="that of `make peers`, or the one on the path",
    ),
    _PEERS.option("-md, --model-draft FILE", "A draft model or head for both programs.", FILE),
    _PEERS.option(
        "--spec-draft-n-max N", "Tokens that -md drafts a round.", click.IntRange(1, 1024)
    ),
    _PEERS.option(
        "--spec-type NAME",
        "An n-gram drafter of llama-server; repeatable.",
        multiple=True,
        dest="llama_types",
        show_default=", ".join(_SPEC_TYPES),
    ),
    _PEERS.option(
        "--drafter EXPR",
        "A drafter of specrun; repeatable.",
        multiple=True,
        show_default="as it chooses itself, and prompt-lookup",
    ),
    _PEERS.option(
        "-c, --ctx-size", "Tokens of context.", click.IntRange(256, MAX_COUNT), default=4096
    ),
    _PEERS.option(
        "-t, --threads", "Threads of a server.", click.IntRange(1, 4096), show_default="cores"
    ),
    _PEERS.option("--all ARGUMENTS", "Options that all servers are started with.", default=""),
    predict_option(_PEERS, default=128),
    repetitions_option(_PEERS, "How often every server answers all prompts.", 5),
    _PEERS.option(
        "--wait SECONDS",
        "How long a server may take to start.",
        click.FloatRange(1.0, 86400.0),
        default=600.0,
    ),
)


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@_comparing_options
@prompt_choice_options
@grid_options("0", "", first_seed_option)
@format_options
@terminal_options
def peers(
    comparing: _Comparing,
    source: PromptChoice,
    sampling: SamplingGrid,
    form: OutputForm,
    terminal: Terminal,
) -> None:
    """Compare llama-server and `specrun serve`: speed, tokens a round, text."""
    from measure.peers.comparison import PeerBench, measure_peers, peers_table

    # The prompts alone need these: the servers open the models.
    load = LoadSettings(comparing.model, False, RuntimeOptions(), ())
    target = named_target(load)
    prompts, _ = chosen_prompts(source, target, load)
    bench = PeerBench(
        peers=_peers(target, comparing),
        prompts=prompts,
        params=sampling,
        max_tokens=comparing.predict,
        repetitions=comparing.repetitions,
        wait_s=comparing.wait,
    )

    def measure(say: Callable[[str], None]) -> list[PeerResult]:
        return measure_peers(bench, say)

    measure_and_print("peers", measure, peers_table, form, terminal)


def _peers(target: Path, comparing: _Comparing) -> tuple[Peer, ...]:
    from measure.peers.servers import Peer

    threads = comparing.threads or available_cores()
    shared = ["-m", str(target), "-np", "1", "-c", str(comparing.ctx_size), "-t", str(threads)]
    shared += shlex.split(comparing.all)
    draft = comparing.model_draft
    length = comparing.spec_draft_n_max
    n_max = [] if length is None else ["--spec-draft-n-max", str(length)]
    theirs = {"plain": ["--spec-type", "none"]}
    theirs |= {name: ["--spec-type", name] for name in comparing.llama_types or _SPEC_TYPES}
    ours = {"plain": ["--drafter", "none"]}
    ours |= {} if comparing.drafter else {"as it chooses": []}
    ours |= {text: ["--drafter", text] for text in comparing.drafter or ("prompt-lookup",)}
    if draft is not None:
        kind = draft_kind(draft)
        ours[kind] = ["-md", str(draft), *n_max]
        name = _FILE_TYPES.get(kind)
        if name is not None:  # llama-server cannot open the other kinds
            theirs[name] = ["--spec-type", name, "-md", str(draft), *n_max]
    server = str(_server(comparing.server))
    serve = [sys.executable, "-c", "from specrun.cli.entry import main; main()", "serve"]
    return (
        *(Peer("llama-server", name, (server, *shared, *own)) for name, own in theirs.items()),
        *(Peer("specrun", name, (*serve, *shared, *own)) for name, own in ours.items()),
    )


def _server(given: Path | None) -> Path:
    """Return llama-server: the given one, that of `make peers`, or the one on the path."""
    if given is not None:
        return given
    built = Path(__file__).resolve().parents[3] / ".peers" / "llama-server"
    found = built if built.exists() else shutil.which("llama-server")
    if found is None:
        raise click.UsageError("no llama-server is there: make peers builds it, or give --server")
    return Path(found)
