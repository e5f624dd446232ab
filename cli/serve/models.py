"""The models of a server: their names, which of them are loaded, and which requests use them.

A model is loaded when a request names it, once for all requests that come meanwhile. One load
follows another, in a thread: requests to other models go on. Idle models make room for it, the
least recently used first. A model with requests is never unloaded: if only such a one can make
room, its new requests wait, and it goes when those that it has are over.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

from specrun.bindings.errors import ClosedError, OutOfMemoryError, SpecrunError
from specrun.bindings.gguf import read_header
from specrun.bindings.models import split_headers, watched_loading
from specrun.bindings.models.nextn import split_paths
from specrun.cli.serve.body import wrong
from specrun.cli.serve.errors import RequestError, request_error
from specrun.cli.serve.service import AnswerService
from specrun.cli.serve.settings import ServeSettings
from specrun.runtime.engine import Engine
from specrun.runtime.memory import Room
from specrun.runtime.planning import describe_file

_log = logging.getLogger(__name__)
_WATCH_SECONDS = 0.5
_SHOWN = 4  # names in an error
_USES = "specrun.models"
"""The key of a request's scope under which the models lie that it uses."""

State = Literal["unloaded", "loading", "loaded", "sleeping"]
"""llama-server's words; a sleeping model was unloaded because it was idle."""


Opener = Callable[[bool], AbstractContextManager[AnswerService]]
"""Opens a model; True: others answer meanwhile, so that nothing can be measured."""
Plan = Callable[[Mapping[str, int]], "Room | None"]
"""Plans a model beside others, which hold so many bytes by device; None: nothing is known."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of a model in the headers of its files; nothing, if they cannot be read."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    architecture: str = ""
    quantization: str = ""
    n_params: int = 0
    n_bytes: int = 0
    modified: float = 0.0
    digest: str = ""

    @classmethod
    def of(cls, path: Path) -> ModelFacts:
        """Read the headers of a model's files."""
        try:
            state, header = path.stat(), read_header(path)
            headers = split_headers(path, header)
            n_bytes = sum(part.stat().st_size for part in split_paths(path, header))
        except (OSError, SpecrunError):
            return cls()
        return cls(
            header.metadata,
            header.architecture,
            header.file_type_name or "",
            sum(each.n_parameters for each in headers),
            n_bytes,
            state.st_mtime,
            str(describe_file(path)["sha256_of_ends"]),
        )

    @property
    def n_ctx_train(self) -> int | None:
        """The tokens of context that it was trained with."""
        value = self.metadata.get(f"{self.architecture}.context_length")
        return value if isinstance(value, int) else None

    @property
    def template(self) -> str:
        """Its chat template; "": it has none."""
        value = self.metadata.get("tokenizer.chat_template")
        return value if isinstance(value, str) else ""


@dataclass(eq=False)
class ServedModel:
    """A model by its `id` and further `names`; `service` answers while it is loaded.

    `open` is None for a model that was loaded by others: it stays.
    """

    id: str
    path: Path
    names: Sequence[str] = ()
    open: Opener | None = None
    plan: Plan = lambda _: None
    service: AnswerService | None = None
    state: State = "unloaded"
    problem: str = ""
    """Why the last load failed."""
    progress: float = 0.0
    """The share of a file that has been read: of the target, then of a draft model."""
    is_stopped: bool = False
    """Whether a load is to end."""
    held: Mapping[str, int] = field(default_factory=dict)
    """The bytes by device that its plan counted."""
    opened: ExitStack = field(default_factory=ExitStack)
    users: set[object] = field(default_factory=set)
    waiting: set[object] = field(default_factory=set)
    loading: asyncio.Task[None] | None = None
    leaving: asyncio.Future[None] | None = None
    over: asyncio.Future[None] | None = None
    """Waited for by an unload: the end of the last use."""
    used_at: int = 0
    """When it was used last, in the order of uses; `idle_since` is the same by the clock."""
    idle_since: float = 0.0

    @functools.cached_property
    def facts(self) -> ModelFacts:
        """Its facts from its files."""
        return ModelFacts.of(self.path)

    @property
    def is_ready(self) -> bool:
        """Whether a request that comes now can use it at once."""
        return self.service is not None and self.leaving is None

    @property
    def is_idle(self) -> bool:
        """Whether no request uses it, or waits for it."""
        return not (self.users or self.waiting)

    def failed(self, problem: Exception) -> RequestError:
        """Note why it was not loaded; return the error for clients, without its folder's name."""
        error = request_error(problem)
        text = str(error).replace(f"{self.path.parent}{os.sep}", "")
        self.state, self.problem, self.held = "unloaded", text, {}
        problem_here = f"{self.id} was not loaded: {text}"
        return RequestError(problem_here, "model", status=error.status, code=error.code)

    def load(self, *, is_busy: bool = False) -> AnswerService:
        """Load it now; raises the errors of opening it. `is_busy`: see `Opener`."""
        assert self.open is not None

        def note(progress: float) -> bool:
            self.progress = progress
            return not self.is_stopped

        with watched_loading(note), ExitStack() as opened:
            service = opened.enter_context(self.open(is_busy))
            self.opened = opened.pop_all()
        return service


class Models:
    """The models of a server, by name, and the order in which they are loaded and unloaded.

    `listed` lists them, now and for each `reload`. At most `most` are loaded at once, 0: as many as
    fit. `settings` are the server's own, and idle times are measured by `clock`.
    """

    def __init__(
        self,
        listed: Callable[[], Sequence[ServedModel]],
        settings: ServeSettings,
        *,
        most: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listed_now = listed
        self.models = list(listed())
        self.settings = settings
        self.most, self._clock = most, clock
        self._named = _by_name(self.models)
        self._order = itertools.count(1)
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "specrun models")
        self._observers: list[Callable[[AnswerService], None]] = []
        self.is_closing = False

    @classmethod
    def of_engine(cls, engine: Engine, settings: ServeSettings) -> Models:
        """Return the only model of a server: an engine, which the caller closes."""
        own = ServedModel(settings.model, Path(engine.model.path))
        own.service, own.state = AnswerService(engine, settings), "loaded"
        return cls(lambda: [own], settings)

    async def reload(self) -> None:
        """List the models again. Those that are in use, or were loaded, stay as they are."""

        def read() -> dict[str, ServedModel]:
            listed = {model.id: model for model in self._listed_now()}
            for model in listed.values():
                model.facts  # noqa: B018 - reads the file, which takes time
            return listed

        listed = await self._in_thread(read)
        kept = {
            model.id: model
            for model in self.models
            if model.service or model.loading or model.leaving or not model.is_idle
        }
        self.models = [*{**listed, **kept}.values()]
        self._named = _by_name(self.models)

    # -- names -------------------------------------------------------------------------------------

    def find(self, name: object = None) -> ServedModel:
        """Return the model that a request names; if there is one alone, that one.

        Raises `RequestError` for a name that no model has, with the nearest.
        """
        if len(self.models) == 1:
            return self.models[0]
        if name is None or name == "":
            problem = f"model is missing: this server has {self._listed()}"
            raise RequestError(problem, "model")
        if not isinstance(name, str):
            raise wrong("model", name, "the name of a model")
        return self.named(name)

    def named(self, name: str) -> ServedModel:
        """Return the model of a name, even if it is the only one; raises `RequestError`."""
        found = self._named.get(name) or self._named.get(name.casefold().removesuffix(":latest"))
        if found is None:
            near = self._nearest(name.casefold())
            hint = f"this server has {self._listed()}"
            if near is not None and len(self.models) > 1:
                hint = f"did you mean {near.id!r}?"
            raise RequestError(
                f"model {name!r} not found: {hint}",
                "model",
                status=HTTPStatus.NOT_FOUND,
                code="model_not_found",
            )
        return found

    def _nearest(self, text: str) -> ServedModel | None:
        """Return the model whose name, or the beginning of whose name, is like a text."""
        begins = {name[: len(text) + 1].casefold(): name for name in self._named}
        for names in ({name: name for name in self._named}, begins):
            if near := difflib.get_close_matches(text, names, 1):
                return self._named[names[near[0]]]
        return None

    def _listed(self) -> str:
        names = [repr(model.id) for model in self.models[:_SHOWN]]
        more = len(self.models) - len(names)
        return ", ".join(names) + (f" and {more} more (GET /v1/models)" if more else "")

    # -- uses --------------------------------------------------------------------------------------

    @property
    def loaded(self) -> list[tuple[ServedModel, AnswerService]]:
        """The models that are loaded, with their services."""
        return [(model, model.service) for model in self.models if model.service is not None]

    def when_loaded(self, observe: Callable[[AnswerService], None]) -> None:
        """Call `observe` with the service of each model, when it is loaded."""
        self._observers.append(observe)
        for _, service in self.loaded:
            observe(service)

    async def used(self, scope: MutableMapping[str, Any], name: object) -> AnswerService:
        """Return the service of the model that a request names, loaded if it is not.

        The model stays until the request of this `scope` is over. Raises `RequestError`, and the
        errors of loading.
        """
        model, use = self.find(name), object()
        scope.setdefault(_USES, []).append((model, use))
        if model.is_ready:
            self._begin(model, use)
        else:
            model.waiting.add(use)
            while use not in model.users:
                await self._loaded(model)
        assert model.service is not None
        return model.service

    def release(self, scope: MutableMapping[str, Any]) -> None:
        """End the uses of a request that is over."""
        uses: list[tuple[ServedModel, object]] = scope.pop(_USES, [])
        for model, use in uses:
            model.waiting.discard(use)
            if use in model.users:
                model.users.discard(use)
                self._note_use(model)
            if not model.users and model.over is not None and not model.over.done():
                model.over.set_result(None)

    def _begin(self, model: ServedModel, *uses: object) -> None:
        model.users.update(uses)
        model.waiting.difference_update(uses)
        self._note_use(model)

    def _note_use(self, model: ServedModel) -> None:
        model.used_at, model.idle_since = next(self._order), self._clock()

    # -- loading -----------------------------------------------------------------------------------

    async def _loaded(self, model: ServedModel) -> None:
        """Wait until a model has been loaded, or has left; raises the errors of loading."""
        if self.is_closing:
            raise ClosedError("the server is shutting down")
        if model.leaving is not None:
            await asyncio.shield(model.leaving)
            return
        if model.loading is None:
            model.state = "loading"
            model.loading = asyncio.create_task(self._load(model))
        loading = model.loading
        await asyncio.wait((loading,))  # which goes on if this request ends
        if loading.cancelled():
            raise ClosedError("the server is shutting down")
        loading.result()

    async def _load(self, model: ServedModel) -> None:
        """Load a model when it is its turn; then those that wait for it use it."""
        model.problem, model.progress = "", 0.0
        try:
            async with self._turn:
                if not model.waiting:
                    model.state = "unloaded"
                    return
                await self._make_room(model)
                _log.info("loading %s", model.id)
                is_busy = any(other.users for other in self.models)
                load = functools.partial(model.load, is_busy=is_busy)
                service = await self._in_thread(load)
        except asyncio.CancelledError:
            model.state, model.held = "unloaded", {}
            raise
        except Exception as problem:
            error = model.failed(problem)
            known = isinstance(problem, SpecrunError)
            _log.warning("%s", error, exc_info=None if known else problem)
            if model.waiting:
                raise error from problem
            return  # all that waited for it have left
        finally:
            model.loading = None
        self.adopt(model, service)

    def adopt(self, model: ServedModel, service: AnswerService) -> None:
        """Take a model that has been loaded: those that wait for it use it."""
        model.service, model.state = service, "loaded"
        self._begin(model, *model.waiting)
        for observe in self._observers:
            observe(service)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401 - of `work`
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, copy_context().run, work)

    # -- room --------------------------------------------------------------------------------------

    async def _make_room(self, model: ServedModel) -> None:
        """Unload others until a model fits; raises `OutOfMemoryError` if it never does."""
        if len(self.models) == 1:
            return
        while True:
            others = [other for other, _ in self.loaded if other.open is not None]
            held: dict[str, int] = {}
            for other, _ in self.loaded:
                for place, n_bytes in other.held.items():
                    held[place] = held.get(place, 0) + n_bytes
            room = await self._in_thread(functools.partial(model.plan, held))
            if room is not None and room.refusal:
                raise OutOfMemoryError(room.refusal)
            is_full = 0 < self.most <= len(others)
            if not others or not (is_full or (room is not None and not room.fits)):
                model.held = {} if room is None else room.held
                return
            victim = min(others, key=lambda other: (not other.is_idle, other.used_at))
            _log.info("%s makes room for %s", victim.id, model.id)
            await self.unload(victim)

    async def unload(self, model: ServedModel, state: State = "unloaded") -> None:
        """Unload a model when its requests are over; new ones load it again."""
        if model.leaving is not None:
            await asyncio.shield(model.leaving)
            return
        if model.service is None or model.open is None:
            return
        model.leaving = leaving = asyncio.get_running_loop().create_future()
        try:
            while model.users:
                model.over = asyncio.get_running_loop().create_future()
                await model.over
            _log.info("unloading %s", model.id)
            model.service, model.state, model.held = None, state, {}
            await self._in_thread(model.opened.close)
        finally:
            model.leaving = None
            leaving.set_result(None)

    # -- idle time ---------------------------------------------------------------------------------

    def seconds_left(self, model: ServedModel) -> float | None:
        """Return after how many seconds an idle model is unloaded; None: it stays."""
        if model.service is None or model.open is None or model.service.keep_seconds is None:
            return None
        idle = self._clock() - model.idle_since if model.is_idle else 0.0
        return model.service.keep_seconds - idle

    async def unload_idle(self) -> None:
        """Unload the models whose idle time is over."""
        for model in self.models:
            left = self.seconds_left(model)
            if model.is_idle and left is not None and left <= 0:
                await self.unload(model, "sleeping")

    async def watch(self) -> None:
        """Unload idle models, for ever."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                await self.unload_idle()
            except Exception:
                _log.exception("an idle model was not unloaded as it should be")

    # -- the end -----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Begin no more answers; end those that do not within the settings' seconds."""
        self.is_closing = True
        for model in self.models:
            if model.loading is not None:
                model.is_stopped = True
                model.loading.cancel()
        await asyncio.gather(*[service.close() for _, service in self.loaded])

    def end_all(self) -> None:
        """End all answers now, with the reason "abort"."""
        for _, service in self.loaded:
            service.end_all()

    def unload_all(self) -> None:
        """Close everything opened here, when the server has ended."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        for model in self.models:
            model.service = None
            model.opened.close()


def _by_name(models: Sequence[ServedModel]) -> dict[str, ServedModel]:
    """Return the models by their ids and by other names that one alone has, in lower case, too."""
    found: dict[str, ServedModel | None] = {}
    for model in models:
        for name in {*model.names, *(name.casefold() for name in (model.id, *model.names))}:
            found[name] = None if found.get(name, model) is not model else model
    found.update({model.id: model for model in models})
    return {name: model for name, model in found.items() if model is not None}
