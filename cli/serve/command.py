"""`specrun serve`: a server over HTTP, for several conversations at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.bindings.errors import FileMissingError, OptionError
from specrun.bindings.gguf import read_header
from specrun.bindings.machine import available_memory, placing
from specrun.cli.chat.learning import serve_learning
from specrun.cli.chat.settings import describe_sampling
from specrun.cli.doctor import specrun_version
from specrun.cli.options.config_file import has_model_tables
from specrun.cli.options.drafting import LearnSettings, learn_options, require_training
from specrun.cli.options.group import (
    Section,
    SectionedCommand,
    declare,
    option_group,
    outvoted,
    with_fields,
)
from specrun.cli.options.model import (
    DraftSettings,
    LoadSettings,
    TemplateSettings,
    draft_options,
    lora_option,
    several_load_options,
    template_options,
)
from specrun.cli.options.opening import chosen_drafter, open_models
from specrun.cli.options.output import terminal_options
from specrun.cli.options.prompt import check_named
from specrun.cli.options.sampling import AnswerSettings, answer_options
from specrun.cli.options.types import FILE, MAX_COUNT, MODEL_OR_FOLDER
from specrun.cli.serve.settings import (
    ServeSettings,
    bound_socket,
    is_loopback,
    require_packages,
    url_of,
)
from specrun.cli.terminal.screen import bytes_text, count_text
from specrun.cli.terminal.terminal import Terminal, one_line, read_text, require_file
from specrun.runtime.demo import demo_target
from specrun.runtime.engine import Engine
from specrun.runtime.memory import Loading, Room, room_here
from specrun.runtime.models import StoredModel
from specrun.runtime.models.hub import stem_of
from specrun.runtime.planning.kept_states import kept_states_of

if TYPE_CHECKING:
    from specrun.cli.serve.models import Models, ServedModel
    from specrun.cli.serve.service import AnswerService


_EPILOG = """\b
Examples:
  specrun serve --demo                                   the embedded models on http://127.0.0.1:8080
  specrun serve -m target.gguf -md small.gguf -c 16384
  specrun serve -m target.gguf -md small.gguf --learn    the drafter learns while it serves
  specrun serve ~/models --idle-unload 600               all models of a folder, each loaded on request
  specrun serve -m target.gguf --port 0                  any free port; stdout shows the address
  specrun serve -m target.gguf --host 0.0.0.0 --api-key-file keys.txt

\b
The base URL for clients of OpenAI's API is http://127.0.0.1:8080/v1; docs/server.md lists all paths
and fields. The page at / is a chat that shows the drafts. Sampling options are the defaults of
requests. If there are several models, the field `model` of a request chooses one, and the config file
may have options for each, in [models."NAME"]. Options also come from SPECRUN_<OPTION>.
"""  # noqa: E501 - as it is shown

_SERVER = Section("Server")
_DEFAULTS = ServeSettings(model="")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServerOptions:
    """The values of the options about the address, the keys and the loaded models.

    `fields` are those of `ServeSettings`.
    """

    fields: Mapping[str, Any]
    port: int
    api_key: tuple[str, ...]
    api_key_file: Path | None
    models_max: int

    def keys(self) -> tuple[str, ...]:
        """Return all keys: of the options, of the file of keys, of llama-server's variable."""
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

    def settings(self) -> ServeSettings:
        """Return the settings of the server; a model has more of its own."""
        settings = with_fields(_DEFAULTS, {**self.fields, "api_keys": self.keys()})
        require_packages()
        if not is_loopback(settings.host) and not settings.api_keys:
            problem = f"{settings.host} can be reached from other machines, and no key is set"
            raise OptionError(f"{problem}: give --api-key, or leave --host out")
        return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnOptions:
    """The values of the server's options that are about one model."""

    slots: int
    alias: str | None
    chat_template_kwargs: Mapping[str, Any]
    offer: tuple[str, ...]
    offer_rule: tuple[str, ...]


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
    _SERVER.option(
        "--host ADDRESS", "The address to listen on.", default=_DEFAULTS.host, field="host"
    ),
    _SERVER.option(
        "--port N",
        "The port to listen on; 0: any free port.",
        click.IntRange(0, 65535),
        default=8080,
    ),
    _SERVER.option(
        "--queue N",
        "The most requests that may wait for a slot; others are refused.",
        click.IntRange(0, MAX_COUNT),
        default=_DEFAULTS.bounds.queue,
        field="bounds.queue",
    ),
    _SERVER.option(
        "--api-key KEY",
        "A key that clients must send; repeatable, or several with commas. Without it, "
        "LLAMA_API_KEY is read.",
        multiple=True,
    ),
    _SERVER.option("--api-key-file", "Read keys from this file, one a line.", FILE),
    _SERVER.option(
        "--cors ORIGIN",
        "Allow requests from web pages of this origin, such as https://example.org; *: of any "
        "origin; repeatable.",
        multiple=True,
        field="cors",
    ),
    _SERVER.option(
        "--idle-unload, --sleep-idle-seconds SECONDS",
        "Unload a model after this time without a request; the next request loads it again. 0: "
        "never. keep_alive of a request (Ollama) overrides this option.",
        click.FloatRange(-1, MAX_COUNT),
        default=0.0,
        field="idle_seconds",
        read=lambda seconds: seconds if seconds > 0 else None,
    ),
    _SERVER.option(
        "--models-max N",
        "The most models in memory at once; 0: as many as fit.",
        click.IntRange(0, MAX_COUNT),
        default=0,
    ),
    _SERVER.option(
        "--drain SECONDS",
        "The time to finish answers when the server is stopped.",
        click.FloatRange(0, 3600),
        default=_DEFAULTS.drain_seconds,
        field="drain_seconds",
    ),
    _SERVER.option(
        "-to, --timeout SECONDS",
        "The time after which a client that reads nothing is disconnected.",
        click.FloatRange(1, 86400),
        default=_DEFAULTS.send_seconds,
        field="send_seconds",
    ),
)

_of_model = declare(
    several_load_options,
    option_group(
        "own",
        _OwnOptions,
        _SERVER.option(
            "-np, --slots, --parallel N",
            "The number of conversations that are answered at once.",
            click.IntRange(1, 256),
            default=4,
            dest="slots",
        ),
        _SERVER.option(
            "--chat-template-kwargs JSON",
            'Variables of the chat template, such as {"enable_thinking": false}. Requests may '
            "change them.",
            callback=_read_object,
        ),
        _SERVER.option(
            "--offer EXPR",
            "Another drafter that requests may choose (speculative.drafter); repeatable.",
            multiple=True,
            default=("prompt-lookup",),
        ),
        _SERVER.option(
            "--offer-rule RULE",
            "Allow requests to choose acceptance rules of the same kind as this one (accept). "
            "Rules that are not exact need this permission; repeatable.",
            multiple=True,
        ),
        _SERVER.option(
            "-a, --alias NAME", "The model's name in replies.", show_default="its file's name"
        ),
    ),
    draft_options,
    answer_options,
    template_options,
    lora_option,
    learn_options,
)
"""The options of a model, which the config file may have for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelSettings:
    """How a model is loaded, drafts and answers: the values of `_of_model`."""

    model: tuple[Path, ...]
    load: LoadSettings
    own: _OwnOptions
    draft: DraftSettings
    answer: AnswerSettings
    template: TemplateSettings
    lora: tuple[str, ...]
    learning: LearnSettings

    def of(self, found: _Found) -> _ModelSettings:
        """Return the same for a model, with the drafters of its set if no others are named."""
        draft = self.draft
        if found.drafter is not None and not draft.is_named:
            draft = replace(draft, drafter=found.drafter)
        return replace(self, load=replace(self.load, model=found.path), draft=draft)

    def check(self) -> None:
        """Raise if --learn was given and cannot learn."""
        if self.learning.wanted:
            require_training("--learn")
            if not self.learning.learn_every:
                problem = "--learn-every 0 learns at a chat's /learn"
                raise OptionError(f"{problem}: give a number of answers")

    @contextmanager
    def opened(
        self, name: str, settings: ServeSettings, terminal: Terminal, is_busy: bool
    ) -> Iterator[AnswerService]:
        """Load the model, and serve it until the block ends; on a busy machine measure nothing."""
        from specrun.cli.serve.service import AnswerService

        answer, own, load = self.answer, self.own, self.load
        if is_busy:
            load = replace(load, options=replace(load.options, measure=False))
        with ExitStack() as closed_last:
            opened = open_models(
                Engine,
                load,
                self.draft,
                self.template,
                answer.params,
                terminal,
                slots=own.slots,
                others=own.offer,
                rules=own.offer_rule,
                lora=self.lora,
                learn=self.learning.place,
            )
            with (
                opened as engine,
                serve_learning(closed_last, engine, self.learning, terminal) as observers,
            ):
                settings = replace(
                    settings,
                    model=name,
                    params=answer.of(engine.vocabulary).params,
                    max_tokens=answer.max_tokens,
                    template_kwargs=own.chat_template_kwargs,
                )
                service = AnswerService(engine, settings)
                service.observers += observers
                yield service

    def room(self, free_before: int, held: Mapping[str, int]) -> Room | None:
        """Return the memory that the model needs beside others: see `room_here`.

        Raises for a file that cannot be read: no model is unloaded for it.
        """
        path, options = self.load.model, self.load.options
        if path is None:
            return None
        read_header(path)
        quiet = Terminal(quiet=True)
        with placing(options.placement):
            drafter, _ = chosen_drafter(self.load, self.draft, self.answer.params, quiet)
            loading = Loading(path, drafter, options, {}, self.own.slots)
            loading = replace(loading, n_kept=kept_states_of(loading))
            return room_here(loading, held, free_before)


@click.command()
@_of_model
def _read_settings(**values: Any) -> _ModelSettings:  # noqa: ANN401 - of the options
    return _ModelSettings(**values)


# -- The models that are served -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """A model that the user named, or that lies in a folder: its file, and its names."""

    path: Path
    names: tuple[str, ...]
    drafter: str | None = None


def _found(given: Sequence[Path], terminal: Terminal) -> list[_Found]:
    """Return the models of paths, those in folders one by one; each file once."""
    found: dict[Path, _Found] = {}
    for place in given:
        for item in _models_at(place):
            if isinstance(item, str):
                terminal.warn(one_line(item, 400))
            else:
                found.setdefault(item.path.resolve(), item)
    if not found:
        raise FileMissingError(f"there is no model in {', '.join(map(str, given))}")
    return [*found.values()]


def _models_at(place: Path) -> Iterator[_Found | str]:
    """Yield the models of a path, and sentences about files that are not whole."""
    from specrun.runtime.models import answers_alone, folder_models, is_set, read_set, stored_models

    if place.is_dir() and not is_set(place):
        items = [*folder_models(place)]
    else:
        stored = (model for model in stored_models().models if model.path == place)
        items = [next(stored, StoredModel(place.name, "", (place,)))]
    for item in items:
        if isinstance(item, str):
            yield item
            continue
        path, names = item.path, (item.name, *item.aliases)
        if is_set(path):
            own = read_set(path)
            yield _Found(require_file(own.model), (path.name, own.model.stem, *names), own.drafter)
        elif path == place or answers_alone(path):
            is_named = path.suffix.lower() == ".gguf"
            names = (stem_of(path.name), path.stem, path.name, *names) if is_named else names
            yield _Found(require_file(path), tuple(dict.fromkeys(names)))


def _ids(found: Sequence[_Found]) -> list[str]:
    """Return a name for each model: the first of its own that no model before it has."""
    taken: set[str] = set()
    ids = []
    for model in found:
        longer = (str(Path(*model.path.parts[-n:])) for n in range(2, len(model.path.parts) + 1))
        own = next(name for name in (*model.names, *longer) if name not in taken)
        taken.add(own)
        ids.append(own)
    return ids


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument(
    "models", nargs=-1, type=MODEL_OR_FOLDER, help="Models, or folders of models, as in -m."
)
@server_options
@_of_model
@terminal_options
def serve(
    models: tuple[Path, ...],
    server: _ServerOptions,
    terminal: Terminal,
    **values: Any,  # noqa: ANN401 - of `_ModelSettings`
) -> None:
    """Serve models over HTTP, to several conversations at once.

    The server has the APIs of OpenAI, Anthropic, Ollama and llama-server. A single model is loaded
    at the start. If there are several MODELS, or a folder of models, each is loaded when a request
    names it.
    """
    settings, given = server.settings(), _ModelSettings(**values)
    from specrun.cli.serve.app import create_app
    from specrun.cli.serve.models import Models
    from specrun.cli.serve.server import run_server

    # Before a model is loaded: if the port is in use, the error comes at once.
    with bound_socket(settings.host, server.port) as listener:
        lost = outvoted(["model"], by=["demo", "models"])
        paths = models if lost else (*given.model, *models)
        source = _Source(click.get_current_context(), paths, given, settings, terminal)
        served = Models(source.models, settings, most=server.models_max)
        url = url_of(settings.host, listener)
        try:
            if len(served.models) == 1:
                only = served.models[0]
                served.adopt(only, only.load())
            app = create_app(served, settings)

            def ready() -> None:
                _print_block(served, given.draft.accept, url, terminal)
                terminal.answer(f"{url}\n")

            run_server(app, settings, listener, ready)
        finally:
            served.unload_all()
    terminal.note("ended")


@dataclass(frozen=True, slots=True)
class _Source:
    """The models that the user named, and `models`, those that exist now.

    `free` is the memory of this machine before any of them was loaded.
    """

    context: click.Context
    paths: Sequence[Path]
    given: _ModelSettings
    settings: ServeSettings
    terminal: Terminal
    free: int = field(default_factory=available_memory)

    def models(self) -> list[ServedModel]:
        """Return the models, each with its options of the config file."""
        given, paths = self.given, self.paths
        if given.load.demo or not paths:
            ask = "name models or a folder of them, or give --demo for the embedded models"
            check_named(replace(given.load, model=paths[0] if paths else None), ask=ask)
            return [self._model(_Found(demo_target(), ()), "demo", given)]
        found = _found(paths, self.terminal)
        listed: list[ServedModel] = []
        for model, name in zip(found, _ids(found), strict=True):
            chosen = self._chosen(model)
            alias = chosen.own.alias
            if alias is not None and alias == given.own.alias and len(found) > 1:
                problem = f"-a {alias} is the name of one model, and {len(found)} are served"
                advice = f'put alias into [models."{name}"] of the config file'
                raise OptionError(f"{problem}: {advice}")
            listed.append(self._model(model, name, chosen.of(model)))
            if listed[-1].id in (other.id for other in listed[:-1]):
                problem = f"two of the models are called {listed[-1].id!r}"
                raise OptionError(f"{problem}: give one another alias")
        return listed

    def _chosen(self, model: _Found) -> _ModelSettings:
        if not has_model_tables():
            return self.given
        command = self.context.command
        assert isinstance(command, SectionedCommand)
        chosen: _ModelSettings = command.again(self.context, model.names, _read_settings)
        return chosen

    def _model(self, model: _Found, name: str, chosen: _ModelSettings) -> ServedModel:
        from specrun.cli.serve.models import ServedModel

        chosen.check()
        name = chosen.own.alias or name
        return ServedModel(
            name,
            model.path,
            tuple(dict.fromkeys(each for each in model.names if each != name)),
            partial(chosen.opened, name, self.settings, self.terminal),
            partial(chosen.room, self.free),
        )


def _print_block(models: Models, rule: str, url: str, terminal: Terminal) -> None:
    """Print the start block: the models, their settings, the keys and the address."""
    settings = models.settings
    n_keys = len(settings.api_keys)
    loaded = models.loaded
    title, lines = _about_one(loaded[0][1], rule) if loaded else _about_several(models)
    terminal.note(f"specrun {specrun_version()} · {title}", "bold")
    for label, text in (
        *lines,
        ("key", f"required ({n_keys})" if n_keys else "none: this machine's users have access"),
        ("pages", ", ".join(settings.cors) or "only its own"),
        ("API", f"{url}/v1 · Ctrl-C stops the server"),
    ):
        terminal.note(f"{label:<9}{text}")


_Lines = list[tuple[str, str]]


def _about_one(service: AnswerService, rule: str) -> tuple[str, _Lines]:
    """Return the title and the lines of a model that is loaded."""
    engine, settings = service.engine, service.settings
    model, statistics = engine.model, engine.statistics()
    name = one_line(str(model.header.metadata.get("general.name") or model.path.name), 60)
    about = one_line(f"{model.architecture}, {count_text(model.n_params)} parameters")
    waiting = f"{settings.bounds.queue:,} more may wait"
    is_each = engine.n_ctx < statistics.n_ctx  # of models with a recurrent state
    sharing = "each with" if is_each else "which share"
    return f"{name} ({about})", [
        ("model", f"{settings.model!r} in replies"),
        ("drafter", f"{one_line(engine.drafter)} · {rule}"),
        ("others", one_line(", ".join(engine.drafters[1:]))),
        ("slots", f"{statistics.slots}, {sharing} {engine.n_ctx:,} tokens · {waiting}"),
        ("sampling", describe_sampling(settings.params, settings.max_tokens)),
    ]


def _about_several(models: Models) -> tuple[str, _Lines]:
    """Return the title and the lines of models that are loaded when a request names them."""
    lines: _Lines = []
    for model in models.models:
        facts = model.facts
        kind = one_line(f"{facts.architecture} {count_text(facts.n_params)} {facts.quantization}")
        about = f"{kind}, {bytes_text(facts.n_bytes)}" if facts.n_bytes else "cannot be read"
        lines.append(("" if lines else "models", f"{one_line(model.id)} ({about})"))
    most, idle = models.most, models.settings.idle_seconds
    kept = f"{most} at once" if most else "as many as fit"
    if idle is not None:
        kept += f"; unloaded after {idle:g} seconds without a request"
    return f"{len(models.models)} models, each loaded on request", [
        *lines,
        ("loaded", kept),
    ]
