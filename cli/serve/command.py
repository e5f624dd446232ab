"""`specrun serve`: answers several conversations at once, over HTTP."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.bindings.errors import ClosedError, OptionError, SpecrunError
from specrun.cli.chat.learning import ChatLearning
from specrun.cli.chat.settings import describe_sampling
from specrun.cli.doctor import specrun_version
from specrun.cli.options.drafting import LearnSettings, learn_options, require_training
from specrun.cli.options.group import Section, SectionedCommand, option_group
from specrun.cli.options.model import (
    DraftSettings,
    LoadSettings,
    TemplateSettings,
    draft_options,
    load_options,
    lora_option,
    template_options,
)
from specrun.cli.options.opening import check_sampling, open_engine
from specrun.cli.options.output import terminal_options
from specrun.cli.options.sampling import AnswerSettings, answer_options
from specrun.cli.options.types import FILE, MAX_COUNT
from specrun.cli.serve.settings import (
    Bounds,
    ServeSettings,
    bound_socket,
    is_loopback,
    require_packages,
    url_of,
)
from specrun.cli.terminal.screen import count_text
from specrun.cli.terminal.terminal import Terminal, one_line, read_text
from specrun.runtime.engine import Engine
from specrun.runtime.round import GenerationResult

if TYPE_CHECKING:
    from specrun.train.trainer.learner import TrainingStatus


# -- Online learning: the draft model learns in a thread while the server answers -----------------
#
# Answers go on meanwhile, with the drafter there was; the new one is swapped in when none is being
# made, and requests that come in that moment wait for it.


Observer = Callable[[GenerationResult], None]


@contextmanager
def serve_learning(
    closed_last: ExitStack, engine: Engine, settings: LearnSettings, terminal: Terminal
) -> Iterator[list[Observer]]:
    """Yield the observers to notify of finished answers; none unless `--learn` is set.

    An update that is under way at the end is given up: the drafter stays as it is. `closed_last`
    deletes temporary files after the engine is closed, which drafts with them.
    """
    if not settings.wanted:
        yield []
        return
    learning = ServeLearning(engine, settings, terminal)
    closed_last.callback(learning.close)
    worker = threading.Thread(target=learning.run, name="specrun learning", daemon=True)
    worker.start()
    try:
        yield [learning.answered.put]
    finally:
        learning.stopped.set()
        learning.answered.put(None)
        worker.join()


class ServeLearning(ChatLearning):
    """Learning after every so many of the `answered`, in the thread that calls `run`."""

    def __init__(self, engine: Engine, settings: LearnSettings, terminal: Terminal) -> None:
        super().__init__(engine, settings, terminal)
        self.answered: queue.SimpleQueue[GenerationResult | None] = queue.SimpleQueue()
        self.stopped = threading.Event()

    def run(self) -> None:
        """Count answers and learn from them, until it is stopped."""
        while (result := self.answered.get()) is not None and not self.stopped.is_set():
            try:
                self.after_answer(result)
            except ClosedError:
                return
            except SpecrunError as problem:  # the drafter stays, and so does the server
                self._terminal.warn(f"nothing was learnt: {problem}")

    def _show(self, status: TrainingStatus) -> None:
        if self.stopped.is_set():
            raise ClosedError("the server ended while its drafter learnt")


_EPILOG = """\b
Examples:
  specrun serve --demo                                   the embedded models on http://127.0.0.1:8080
  specrun serve -m target.gguf -md small.gguf -c 16384
  specrun serve -m target.gguf -md small.gguf --learn    the drafter learns while it serves
  specrun serve -m target.gguf --port 0                  a free port, which stdout names
  specrun serve -m target.gguf --host 0.0.0.0 --api-key-file keys.txt

\b
Clients of OpenAI's API take http://127.0.0.1:8080/v1 as their base URL; docs/server.md has all paths
and fields. Sampling options are what requests leave out. The page at / is a chat that shows drafts.
Options also come from SPECRUN_<OPTION>.
"""  # noqa: E501 - as it is shown

_SERVER = Section("Server")
_DEFAULTS = ServeSettings(model="")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServerOptions:
    """The values of the options about how the server is reached."""

    host: str
    port: int
    slots: int
    queue: int
    api_key: tuple[str, ...]
    api_key_file: Path | None
    cors: tuple[str, ...]
    alias: str | None
    drain: float
    timeout: float
    chat_template_kwargs: Mapping[str, Any]
    offer: tuple[str, ...]
    offer_rule: tuple[str, ...]

    def keys(self) -> tuple[str, ...]:
        """Return all keys: of options, of a file with one a line, of llama-server's variable."""
        given, file = self.api_key, self.api_key_file
        listed = given or tuple(filter(None, [os.environ.get("LLAMA_API_KEY")]))
        keys = [key.strip() for text in listed for key in text.split(",")]
        if file is not None:
            keys += [line.strip() for line in read_text(file).splitlines()]
            if not any(keys):
                raise OptionError(f"--api-key-file {file} has no key: write one a line")
        if given and not all(keys[: len(given)]):
            raise OptionError("--api-key is empty: give a key, or leave it out")
        return tuple(dict.fromkeys(filter(None, keys)))


def _read_object(_context: click.Context, _option: click.Parameter, text: str) -> dict[str, Any]:
    """Return the JSON object of an option."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise click.BadParameter(f'{text!r} is no JSON object: give one, as {{"name": true}}')
    return value


server_options = option_group(
    "server",
    _ServerOptions,
    _SERVER.option("--host ADDRESS", "The address to listen on.", default=_DEFAULTS.host),
    _SERVER.option(
        "--port N", "The port; 0: any free one.", click.IntRange(0, 65535), default=8080
    ),
    _SERVER.option(
        "-np, --slots, --parallel N",
        "How many answers are made at once.",
        click.IntRange(1, 256),
        default=4,
        dest="slots",
    ),
    _SERVER.option(
        "--queue N",
        "How many more may wait; others are told to come back.",
        click.IntRange(0, MAX_COUNT),
        default=_DEFAULTS.bounds.queue,
    ),
    _SERVER.option(
        "--api-key KEY",
        "A key that clients must send; repeatable, or several with commas. Also LLAMA_API_KEY.",
        multiple=True,
    ),
    _SERVER.option("--api-key-file", "A file with a key a line.", FILE),
    _SERVER.option(
        "--cors ORIGIN",
        "Let pages of this origin ask, as https://example.org; * is all; repeatable.",
        multiple=True,
    ),
    _SERVER.option(
        "--chat-template-kwargs JSON",
        'Variables of the chat template, as {"enable_thinking": false}; requests may have others.',
        callback=_read_object,
    ),
    _SERVER.option(
        "--offer EXPR",
        "Another drafter that a request may choose (speculative.drafter); repeatable.",
        multiple=True,
        default=("prompt-lookup",),
    ),
    _SERVER.option(
        "--offer-rule RULE",
        "Let requests choose rules of this one's kind (accept): not exact ones must be named "
        "here; repeatable.",
        multiple=True,
    ),
    _SERVER.option(
        "-a, --alias NAME", "The model's name in replies.", show_default="its file's name"
    ),
    _SERVER.option(
        "--drain SECONDS",
        "How long answers may go on when the server is told to end.",
        click.FloatRange(0, 3600),
        default=_DEFAULTS.drain_seconds,
    ),
    _SERVER.option(
        "-to, --timeout SECONDS",
        "When a client that takes nothing is given up.",
        click.FloatRange(1, 86400),
        default=_DEFAULTS.send_seconds,
    ),
)


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@load_options
@server_options
@draft_options
@answer_options
@template_options
@terminal_options
@lora_option
@learn_options
def serve(
    load: LoadSettings,
    server: _ServerOptions,
    draft: DraftSettings,
    answer: AnswerSettings,
    template: TemplateSettings,
    terminal: Terminal,
    lora: tuple[str, ...],
    learning: LearnSettings,
) -> None:
    """Answer over HTTP: OpenAI's API and llama-server's, several conversations at once."""
    keys = server.keys()
    require_packages()
    if learning.wanted:
        require_training("--learn")
        if not learning.learn_every:
            raise OptionError("--learn-every 0 learns at a chat's /learn: give how many answers")
    from specrun.cli.serve.app import create_app
    from specrun.cli.serve.server import run_server

    if not is_loopback(server.host) and not keys:
        problem = f"{server.host} can be reached from other machines, and there is no key"
        raise OptionError(f"{problem}: give --api-key, or leave --host out")
    settings = ServeSettings(
        model=server.alias or (load.model.stem if load.model is not None else "demo"),
        host=server.host,
        api_keys=keys,
        cors=server.cors,
        params=answer.params,
        max_tokens=answer.max_tokens,
        bounds=Bounds(queue=server.queue),
        drain_seconds=server.drain,
        send_seconds=server.timeout,
        template_kwargs=server.chat_template_kwargs,
    )
    # Before the model: that a port is in use is known at once.
    with bound_socket(server.host, server.port) as listener, ExitStack() as closed_last:
        opened = open_engine(
            load,
            draft,
            template,
            answer.params,
            terminal,
            slots=server.slots,
            others=server.offer,
            rules=server.offer_rule,
            lora=lora,
            learn=learning.place,
        )
        with (
            opened as engine,
            serve_learning(closed_last, engine, learning, terminal) as observers,
        ):
            check_sampling(answer.params, engine)
            settings = replace(settings, params=answer.of(engine.vocabulary).params)
            url = url_of(server.host, listener)
            app = create_app(engine, settings)
            app.state.service.observers += observers

            def ready() -> None:
                _print_block(engine, settings, draft.accept, url, terminal)
                terminal.answer(f"{url}\n")

            run_server(app, settings, listener, ready)
    terminal.note("ended")


def _print_block(
    engine: Engine, settings: ServeSettings, rule: str, url: str, terminal: Terminal
) -> None:
    """Print the start block: the model, its settings, the keys and the address."""
    model, statistics = engine.model, engine.statistics()
    name = one_line(str(model.header.metadata.get("general.name") or model.path.name), 60)
    about = one_line(f"{model.architecture}, {count_text(model.n_params)} parameters")
    n_keys = len(settings.api_keys)
    waiting = f"{settings.bounds.queue:,} more may wait"
    is_each = engine.n_ctx < statistics.n_ctx  # of models with a recurrent state
    sharing = "each with" if is_each else "which share"
    terminal.note(f"specrun {specrun_version()} · {name} ({about})", "bold")
    for label, text in (
        ("model", f"{settings.model!r} in replies"),
        ("drafter", f"{one_line(engine.drafter)} · {rule}"),
        ("others", one_line(", ".join(engine.drafters[1:]))),
        ("slots", f"{statistics.slots}, {sharing} {engine.n_ctx:,} tokens · {waiting}"),
        ("sampling", describe_sampling(settings.params, settings.max_tokens)),
        ("key", f"asked for ({n_keys})" if n_keys else "none: whoever is on this machine may ask"),
        ("pages", ", ".join(settings.cors) or "its own alone"),
        ("API", f"{url}/v1 · Ctrl-C ends it"),
    ):
        terminal.note(f"{label:<9}{text}")
