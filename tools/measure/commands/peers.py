"""`python tools/measure peers`: llama.cpp's server, llama-cpp-python and specrun side by side."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.bindings.gguf import read_header
from specrun.bindings.models.nextn import read_nextn
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
from specrun.runtime.language import METHODS

if TYPE_CHECKING:
    from measure.peers.comparison import PeerResult
    from measure.peers.servers import Peer

_PEERS = Section("Peers")
LLAMA_SERVER, PYTHON, SPECRUN = "llama-server", "llama-cpp-python", "specrun"
_SPEC_TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
_TEMPLATE = "tokenizer.chat_template"
_LOOKUP_LENGTHS = (10, 2)
"""llama-cpp-python's own length of a draft, and the one that its documentation names for CPUs."""

_EPILOG = """\b
Examples:
  make peers                                   # builds llama-server of the version that specrun has
  python tools/measure peers -m target.gguf -md small.gguf -md eagle3.gguf --suite own --questions 2 -r 3
  python tools/measure peers -m target.gguf --server /usr/local/bin/llama-server --spec-type ngram-mod -p "Once"
  python tools/measure peers -m target.gguf --program specrun --program llama-server --all "-ngl 99 -fa on" -o json

\b
Every arm is a server of its own with one slot; all are open at once (their weights are mapped). llama-server
runs plain, with each --spec-type, with each -md that it can open, and with the target's own NextN blocks (MTP);
llama-cpp-python plain and with its prompt lookup; specrun plain, with each --drafter, each -md and those blocks.
The first arm, plain decoding, is the baseline. An arm that does not start is left out, with its reason.
Do not use the machine meanwhile.
"""  # noqa: E501 - as it is shown


@dataclass(frozen=True, slots=True)
class _Comparing:
    """Which servers are compared, how often."""

    model: Path
    server: Path | None
    ctx_size: int
    threads: int | None
    program: tuple[str, ...]
    model_draft: tuple[Path, ...]
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
    _PEERS.option(
        "--program NAME",
        "A program to compare; repeatable, the first is the baseline.",
        click.Choice([LLAMA_SERVER, PYTHON, SPECRUN]),
        multiple=True,
        show_default="all",
    ),
    _PEERS.option(
        "-md, --model-draft FILE",
        "A draft model, head or file of NextN blocks for both servers; repeatable.",
        FILE,
        multiple=True,
    ),
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
    """Compare llama-server, llama-cpp-python and `specrun serve`: speed, tokens a round, text."""
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
        as_chat=_TEMPLATE in read_header(target).metadata and not source.no_chat_template,
    )

    def measure(say: Callable[[str], None]) -> list[PeerResult]:
        return measure_peers(bench, say, terminal.warn)

    measure_and_print("peers", measure, peers_table, form, terminal)


def _peers(target: Path, comparing: _Comparing) -> tuple[Peer, ...]:
    from measure.peers.servers import Peer

    threads = comparing.threads or available_cores()
    shared = ["-m", str(target), "-np", "1", "-c", str(comparing.ctx_size), "-t", str(threads)]
    shared += shlex.split(comparing.all)
    programs = comparing.program or (LLAMA_SERVER, PYTHON, SPECRUN)
    theirs, ours = _arms(target, comparing)
    lookups = {f"prompt-lookup, {n}": ["--prompt-lookup", str(n)] for n in _LOOKUP_LENGTHS}
    python = str(Path(__file__).resolve().parents[1] / "peers" / "python_server.py")
    serve = [sys.executable, "-c", "from specrun.cli.entry import main; main()", "serve"]
    server = [str(_server(comparing.server))] if LLAMA_SERVER in programs else []
    arms = {
        LLAMA_SERVER: (server, theirs),
        PYTHON: ([sys.executable, python], {"plain": [], **lookups}),
        SPECRUN: (serve, ours),
    }
    return tuple(
        Peer(program, name, (*arms[program][0], *shared, *own))
        for program in programs
        for name, own in arms[program][1].items()
    )


def _arms(target: Path, comparing: _Comparing) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the arguments of llama-server's ways of drafting, and of specrun's, by name."""
    length = comparing.spec_draft_n_max
    n_max = [] if length is None else ["--spec-draft-n-max", str(length)]
    theirs = {"plain": ["--spec-type", "none"]}
    theirs |= {name: ["--spec-type", name] for name in comparing.llama_types or _SPEC_TYPES}
    ours = {"plain": ["--drafter", "none"]}
    ours |= {} if comparing.drafter else {"as it chooses": []}
    ours |= {text: ["--drafter", text] for text in comparing.drafter or ("prompt-lookup",)}
    for draft in comparing.model_draft:
        kind, name = draft_kind(draft), _spec_type(draft)
        file = ["-md", str(draft), *n_max]
        ours[_unused(kind, draft, ours)] = file
        if name is not None:  # llama-server cannot open the other kinds
            theirs[_unused(name, draft, theirs)] = ["--spec-type", name, *file]
    if read_nextn(target, read_header(target)).count:
        theirs["draft-mtp"] = ["--spec-type", "draft-mtp", *n_max]
        ours["mtp"] = ["--drafter", "mtp"]
    return theirs, ours


def _spec_type(draft: Path) -> str | None:
    """Return llama-server's --spec-type for a file; None if it has none."""
    names = [name for name in METHODS[draft_kind(draft)].spec_types if name.startswith("draft-")]
    markov = any(
        tensor.name == "markov_w1.weight" for tensor in read_header(draft, named=False).tensors
    )
    return names[-1 if markov else 0] if names else None


def _unused(name: str, draft: Path, arms: Collection[str]) -> str:
    """Return the name of an arm, with the file's if there is one of that name."""
    return f"{name} {draft.stem}" if name in arms else name


def _server(given: Path | None) -> Path:
    """Return llama-server: the given one, that of `make peers`, or the one on the path."""
    if given is not None:
        return given
    built = Path(__file__).resolve().parents[3] / ".peers" / "llama-server"
    found = built if built.exists() else shutil.which("llama-server")
    if found is None:
        raise click.UsageError(
            "no llama-server is there: make peers builds it, or give --server, or leave it out "
            f"with --program {PYTHON} --program {SPECRUN}"
        )
    return Path(found)
