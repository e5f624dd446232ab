"""Tool calls of a served model: the streams of its answers with drafts and without.

Requests go to the server that users have, by the three APIs; the rounds of parts of answers differ,
and no byte of reasoning, content and calls may. Drafts are the pair's own, those of
prompt lookup, and random trees that hold some of the tokens to come: those are right and wrong at
every place of a call, whatever the model is. Rounding may part texts, as in other checks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specrun.bench.prove.cache import check_cache
from specrun.bench.prove.forced import LENGTH, known_text
from specrun.bench.prove.prove import Proof, ProofOptions, Step, prove
from specrun.bench.prove.setting import Check, ForkingDrafter, Setting, judged
from specrun.bench.prove.texts import Partings
from specrun.bench.prove.tool_requests import (
    CASES,
    PATHS,
    Api,
    Body,
    Stream,
    ToolCase,
    read_stream,
    request_body,
)
from specrun.bindings.errors import OptionError, SpecrunError, UnsupportedModelError
from specrun.runtime.chat import think_tags_of
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.engine.choices import DrafterMaker
from specrun.runtime.engine.core import EngineCore
from specrun.runtime.round import DraftRequest, NoDrafter, Shape, common_prefix
from specrun.runtime.round.drafter import DrafterWeights
from specrun.runtime.trees import DraftTree

if TYPE_CHECKING:
    from specrun.runtime.drafters.environment import DraftEnvironment
    from specrun.runtime.engine import Session

_SLOTS = 3
_LENGTH = 96  # tokens of an answer at most
_THOUGHTS = 256  # tokens more, if its model thinks
_LEAST = 3  # cases that the second and the third API have in any case
_TREE = (6, 3)  # nodes and leaves of a random tree
_CONTROL_SEEDS = (1, 2)
_CONTROL_TEMPERATURE = 1.5
_MOST_PROBLEMS = 3  # that are told
_SHOWN = 40  # characters on both sides of a difference


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the server: its status and bytes, and the tokens of prompt and answer.

    `is_cut`: the server ended it behind its calls, a few tokens sooner or later. `drafted` and
    `accepted` count tokens.
    """

    status: int
    content: bytes
    prompt: Sequence[int] = ()
    tokens: Sequence[int] = ()
    is_cut: bool = False
    drafted: int = 0
    accepted: int = 0


Post = Callable[[str, Body], Reply]
"""Sends a body to a path of the server; several threads may."""

Opening = Callable[
    [Shape, int, Sequence[DrafterMaker]], AbstractContextManager[tuple[EngineCore, Post]]
]
"""Opens an engine of a shape with so many slots, which offers these drafters, and serves it."""


# == Random trees ==================================================================================


class PlantedDrafts:
    """Makes drafters of random trees that hold some of the tokens to come, of given texts."""

    name = "random-trees"

    def __init__(self, seed: int) -> None:
        self._source = random.Random(f"{seed}/planted")
        self.texts: list[Sequence[int]] = []

    def __call__(self, environment: DraftEnvironment) -> DrafterWeights:
        """Return their weights; recurrent targets are given chains."""
        model = environment.target
        nodes, leaves = _TREE if model.can_branch else (min(3, _TREE[0]), 1)
        size = (nodes, leaves, model.vocabulary.size, self._source)
        return DrafterWeights(self.name, lambda: _PlantedDrafter(self.texts, *size))


class _PlantedDrafter(ForkingDrafter):
    """Drafts the continuation of the same tokens in a known text, and wrong tokens beside."""

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        max_nodes: int,
        max_leaves: int,
        n_vocab: int,
        source: random.Random,
    ) -> None:
        super().__init__(max_nodes, max_leaves, n_vocab, source)
        self.name, self._texts = PlantedDrafts.name, texts

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a tree with tokens of the newest text that goes on from here."""
        so_far = list(request.tokens)
        known = (text for text in reversed(self._texts) if list(text[: len(so_far)]) == so_far)
        self.text = next(known, ())
        return super().propose(request)


class LookedUpDrafts:
    """Makes drafters of prompt lookup, in chains for targets that verify no trees."""

    name = "prompt-lookup"

    def __call__(self, environment: DraftEnvironment) -> DrafterWeights:
        """Return their weights."""
        chains = "" if environment.target.can_branch else "(branches=1)"
        return build_drafter(self.name + chains, environment)


# == Comparisons ===================================================================================


@dataclass(slots=True)
class _Compared:
    """Streams that were compared with those of plain decoding.

    `apart` are the distances of log-probabilities, `apart_next` those to the tokens behind, as a
    wrong place would have them.
    """

    partings: Partings
    streams: int = 0
    equal: int = 0
    calls: int = 0
    problems: list[str] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)
    apart_next: list[float] = field(default_factory=list)

    @property
    def problem(self) -> str:
        """The errors, the first first; empty if there are none."""
        more = len(self.problems) - _MOST_PROBLEMS
        told = self.problems[:_MOST_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        return "; ".join([*told, *filter(None, [self.partings.problem])])


def difference(ours: Stream, plain: Stream) -> str:
    """Return where two streams differ first, in words; empty if they are the same."""
    for number, pair in enumerate(zip(ours.items, plain.items, strict=False)):
        a, b = pair
        if a == b:
            continue
        if (a.kind, a.name) != (b.kind, b.name):
            return f"part {number} is {_what(a.kind, a.name)} in place of {_what(b.kind, b.name)}"
        place = common_prefix([*a.text], [*b.text])
        cut = slice(max(0, place - _SHOWN), place + _SHOWN)
        return f"{_what(a.kind, a.name)} has {a.text[cut]!r} in place of {b.text[cut]!r}"
    if len(ours.items) != len(plain.items):
        return f"{len(ours.items)} parts in place of {len(plain.items)}"
    if ours.finish != plain.finish:
        return f"it ends with {ours.finish!r} in place of {plain.finish!r}"
    return ""


def _what(kind: str, name: str) -> str:
    return f"the call of {name}" if kind == "call" else f"the {kind}"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that was answered plainly."""

    api: Api
    case: ToolCase
    body: Body
    reply: Reply
    stream: Stream


def broken_calls(asked: _Asked) -> Iterator[str]:
    """Yield the calls of a whole reply that had to follow schemas, and are no JSON objects."""
    case, stream = asked.case, asked.stream
    if not (case.required or case.strict):
        return  # a model may write any text
    if stream.finish not in ("tool_calls", "completed", "tool_use"):
        return  # the last one may be cut short
    for item in stream.calls:
        try:
            value = json.loads(item.text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            yield f"the call of {item.name} has {item.text!r}, which is no JSON object"


# == The proof =====================================================================================


class ToolProof:
    """The checks of a served pair's tool calls, and their results in two lines.

    In a fixed shape, where rounding is the same whatever drafts, one answer at a time has to be the
    same byte by byte. As a server is used, several answers at once in a free shape, rounding may
    part them. `opening` opens an engine of a shape with so many slots; a `shape` that was chosen
    is the only one that is tried.
    """

    def __init__(
        self,
        opening: Opening,
        options: ProofOptions,
        shape: Shape | None = None,
    ) -> None:
        self._opening, self._options, self._shape = opening, options, shape
        self._planted = PlantedDrafts(options.seed)
        self._found: list[ServedTools] = []

    def run(self, progress: Callable[[str], None]) -> Proof:
        """Return the results; Ctrl-C ends that with those so far."""
        if self._shape not in (None, "free"):
            return self._of(self._shape, 1, progress)
        try:
            strict = self._of("fixed", 1, progress)
        except (UnsupportedModelError, OptionError) as error:
            strict, why = None, str(error)
        if strict is not None and strict.interrupted:
            return strict
        try:
            free = self._of("free", _SLOTS, progress)
        except (UnsupportedModelError, OptionError):
            free = self._of("free", 1, progress)
        if strict is None:
            first: tuple[Check, ...] = (Check("fixed shape", "left out", note=why),)
            return dataclasses.replace(free, checks=first + free.checks)
        seconds = strict.seconds + free.seconds
        checks = strict.checks + free.checks
        return dataclasses.replace(free, checks=checks, seconds=seconds, width=strict.width)

    def _of(self, shape: Shape, n_slots: int, progress: Callable[[str], None]) -> Proof:
        offered = (LookedUpDrafts(), self._planted)
        with self._opening(shape, n_slots, offered) as (engine, post):
            found = ServedTools(engine, post, self._planted)
            has_apis = any(each.n_streams for each in self._found)
            self._found.append(found)
            steps = found.steps(strict=shape != "free", several=n_slots > 1, apis=not has_apis)
            return prove(engine, self._options, progress=progress, steps=steps)

    def verdict(self, proof: Proof) -> tuple[str, str]:
        """Return two lines: the results, and the drafts."""
        drafts = Counter[str]()
        kept = Counter[str]()
        for each in self._found:
            drafts += each.drafted
            kept += each.accepted
        counted = ", ".join(f"{name} {kept[name]:,} of {drafts[name]:,}" for name in drafts)
        second = f"Drafts that were accepted: {counted or 'none were made'}."
        failed = [check for check in proof.checks if check.status == "failed"]
        if failed:
            return f"Failed: {failed[0].name}: {failed[0].note}.", second
        told = [each.words for each in self._found if each.n_streams]
        if not any(check.status == "passed" and check.name != "cache" for check in proof.checks):
            notes = {check.name: check.note for check in proof.checks}
            why = next((notes[api] for api in PATHS if notes.get(api)), "interrupted")
            return f"Nothing was compared: {why}.", second
        n_calls = max(each.n_calls for each in self._found)
        what = f"{n_calls} tool calls" if n_calls else "texts (there was no call)"
        first = f"Drafting did not change {what}: {'; '.join(told)}."
        return first, second


class ServedTools:
    """The checks of one engine that is served; `steps` are those of `prove`."""

    def __init__(self, engine: EngineCore, post: Post, planted: PlantedDrafts) -> None:
        self._engine, self._post, self._planted = engine, post, planted
        self._own = engine.session.drafter.name
        self._asked: list[_Asked] = []
        self._scores: _Compared | None = None
        self._control = ""
        self._shape = "as it is served"
        self.drafted, self.accepted = Counter[str](), Counter[str]()
        self.n_streams = self.n_equal = 0

    @property
    def n_calls(self) -> int:
        """How many calls plain decoding made."""
        return sum(len(each.stream.calls) for each in self._asked)

    @property
    def words(self) -> str:
        """How many streams were the same, in words."""
        if self.n_equal == self.n_streams:
            return f"{self._shape}, {self.n_streams} of {self.n_streams} streams byte by byte"
        parted = self.n_streams - self.n_equal
        return (
            f"{self._shape}, {self.n_equal} of {self.n_streams} streams byte by byte, and "
            f"{parted} part between tokens that are as near as rounding moves them"
        )

    def steps(self, *, strict: bool, several: bool, apis: bool) -> list[tuple[str, Step]]:
        """Return the checks in order: the cache's bounds the effect of rounding in the others."""
        if strict:
            self._shape = "in a fixed shape"
        elif several:
            self._shape = f"{self._engine.statistics().slots} at once"
        steps: list[tuple[str, Step]] = [] if strict else [("cache", self._cache)]
        if apis:
            steps += [(api, functools.partial(self._check, api=api)) for api in PATHS]
            steps += [("log-probabilities", self._scored)]
        return steps if strict else [*steps, ("several at once", self._together)]

    def _cache(self, setting: Setting) -> Check:
        """Force plain answers with tools through rounds: how far rounding moves these texts."""
        if not setting.rule.exact:
            raise UnsupportedModelError(_not_exact(setting))
        for case in CASES[:_LEAST]:
            with suppress(SpecrunError):  # which the API's own check says
                self._plain(setting, "chat completions", case)
        texts = [([*each.reply.prompt], [*each.reply.tokens]) for each in self._asked]
        setting.length = max((len(a) + len(b) for a, b in texts), default=0) + LENGTH
        with setting.session(NoDrafter()) as plain:
            setting.forced += [known_text(plain.target, *text) for text in texts if text[1]]
        return check_cache(setting)

    @property
    def _arms(self) -> dict[str, str | None]:
        """The drafters by their names, and how requests name them; None: they need not."""
        arms: dict[str, str | None] = {} if self._own == "none" else {self._own: None}
        offered = (LookedUpDrafts.name, self._planted.name)
        arms |= {name: name for name in offered if name not in arms}
        return arms

    def _check(self, setting: Setting, api: Api) -> Check:
        """Compare an API's streams with drafts with those without."""
        if not setting.rule.exact:
            raise UnsupportedModelError(_not_exact(setting))
        deadline, whole = setting.deadline(0.3), api == "chat completions"
        found, refused = _Compared(Partings(setting)), ""
        for number, case in enumerate(CASES):
            if number >= _LEAST and not whole and time.monotonic() > deadline:
                break
            try:
                plain = self._plain(setting, api, case)
            except SpecrunError as error:
                refused = refused or f"{case.name}: {error}"
                continue
            found.calls += len(plain.stream.calls)
            found.problems += [f"{case.name}, plain: {each}" for each in broken_calls(plain)]
            for name, choice in self._arms.items():
                if case.temperature and choice is None:
                    continue  # drafts that are drawn have other texts, with the same distribution
                reply = self._post(PATHS[api], _drafted_by(plain.body, choice))
                self._count(name, reply)
                self._compare(setting, found, plain, reply, name)
        if not found.streams:
            raise UnsupportedModelError(refused or "no request was answered")
        if api == "chat completions":
            self._scores = found
        return self._report(setting, api, found, f"streams of {found.calls} calls", refused)

    def _plain(self, setting: Setting, api: Api, case: ToolCase) -> _Asked:
        """Return a request with its plain answer, which the random trees then have."""
        known = (each for each in self._asked if (each.api, each.case) == (api, case))
        if (earlier := next(known, None)) is not None:
            return earlier
        thinks = case.thinks and think_tags_of(self._engine.tool_template.source) is not None
        length = _LENGTH + thinks * _THOUGHTS
        body = _drafted_by(request_body(api, case, setting.seed, length), "none")
        reply = self._post(PATHS[api], body)
        asked = _Asked(api, case, body, reply, _stream_of(api, reply))
        self._planted.texts.append([*reply.prompt, *reply.tokens])
        self._asked.append(asked)
        return asked

    def _count(self, name: str, reply: Reply) -> None:
        self.drafted[name] += reply.drafted
        self.accepted[name] += reply.accepted

    def _compare(
        self,
        setting: Setting,
        found: _Compared,
        plain: _Asked,
        reply: Reply,
        drafter: str,
    ) -> None:
        """Add the comparison of a reply with the plain one."""
        label = f"{plain.case.name}, {drafter}"
        found.streams += 1
        try:
            stream = _stream_of(plain.api, reply)
        except (SpecrunError, LookupError, ValueError) as error:
            found.problems.append(f"{label}: {error}")
            return
        ours, theirs = list(reply.tokens), list(plain.reply.tokens)
        same = common_prefix(ours, theirs)
        if reply.is_cut or plain.reply.is_cut:  # the calls were whole by then
            length = min(len(ours), len(theirs))
            ours, theirs = ours[:length], theirs[:length]
        before = found.partings.n_unexplained
        parted = ours != theirs
        with self._judge(setting, plain, parted=parted) as session:
            texts, temperature = (ours, theirs), plain.case.temperature
            found.partings.add(session, plain.reply.prompt, texts, temperature, setting.seed)
        differs = difference(stream, plain.stream)
        found.equal += not differs
        if differs and (not parted or found.partings.n_unexplained > before):
            found.problems.append(f"{label}: {differs}")
        ours_read = dataclasses.replace(plain, stream=stream)
        found.problems += [f"{label}: {problem}" for problem in broken_calls(ours_read)]
        pairs = [*zip(stream.scores[:same], plain.stream.scores[:same], strict=False)]
        found.apart += [_distance(a, b) for a, b in pairs]
        behind = zip(stream.scores, plain.stream.scores[1:same], strict=False)
        found.apart_next += [_distance(a, b) for a, b in behind]

    @contextmanager
    def _judge(self, setting: Setting, plain: _Asked, *, parted: bool) -> Iterator[Session]:
        """Yield a session with the distributions of a text; texts that do not part need none."""
        if not parted:
            yield self._engine.session
            return
        n_tokens = len(plain.reply.prompt) + len(plain.reply.tokens) + 8
        context = dataclasses.replace(setting.opened.options.context, n_ctx=n_tokens)
        with setting.session(NoDrafter(), context) as session:
            yield session

    def _other_seed(self) -> str:
        """Return the differences of another seed's streams, which have to be seen; empty if not."""
        case = dataclasses.replace(CASES[0], temperature=_CONTROL_TEMPERATURE)
        bodies = [request_body("chat completions", case, seed, _LENGTH) for seed in _CONTROL_SEEDS]
        streams = []
        for body in bodies:
            reply = self._post(PATHS["chat completions"], _drafted_by(body, "none"))
            streams.append(_stream_of("chat completions", reply))
        return difference(*streams)

    def _together(self, setting: Setting) -> Check:
        """Send requests again, as many at once as there are slots and one more, and compare."""
        n_slots = self._engine.statistics().slots
        if n_slots == 1:
            raise UnsupportedModelError("this pair answers one conversation at a time")
        for api in PATHS:
            for case in CASES if api == "chat completions" else CASES[:_LEAST]:
                with suppress(SpecrunError):
                    self._plain(setting, api, case)
        if not self._asked:
            raise UnsupportedModelError("no request was answered")
        arms = itertools.cycle(self._arms.items())
        chosen = []
        for each in self._asked:
            name, choice = next(arms)
            if choice is None and each.case.temperature:  # drafts may be drawn
                name = choice = self._planted.name
            chosen.append((name, choice))
        bodies = [
            _drafted_by(each.body, choice)
            for each, (_, choice) in zip(self._asked, chosen, strict=True)
        ]
        with ThreadPoolExecutor(n_slots + 1) as threads:
            paths = [PATHS[each.api] for each in self._asked]
            replies = [*threads.map(self._post, paths, bodies)]
        found = _Compared(Partings(setting))
        for each, reply, (name, _) in zip(self._asked, replies, chosen, strict=True):
            found.calls += len(each.stream.calls)
            self._count(name, reply)
            self._compare(setting, found, each, reply, name)
        what = f"streams of {found.calls} calls, {n_slots} answers at once"
        return self._report(setting, "several at once", found, what)

    def _report(
        self, setting: Setting, name: str, found: _Compared, what: str, note: str = ""
    ) -> Check:
        problem, partings = found.problem, found.partings
        self._control = self._control or self._other_seed()
        self.n_streams += found.streams
        self.n_equal += found.equal
        return Check(
            name,
            judged(not problem, bool(self._control)),
            f"{what}, drafted by {', '.join(self._arms)}, with those of plain decoding",
            found.streams,
            partings.largest,
            setting.near,
            f"nats between the tokens where texts part ({len(partings)} did), the largest",
            partings.false_alarm,
            f"of another seed {self._control or 'no stream differs'}",
            problem or (f"left out: {note}" if note else ""),
        )

    def _scored(self, setting: Setting) -> Check:
        """Compare log-probabilities, of tokens and of the likeliest beside them."""
        found = self._scores
        if found is None or not found.apart:
            raise UnsupportedModelError("no log-probabilities were compared")
        largest, wrong = max(found.apart), max(found.apart_next, default=0.0)
        sound = largest <= setting.near
        return Check(
            "log-probabilities",
            judged(sound, wrong > setting.near),
            "places of chat completions, each with its token and the likeliest ones",
            len(found.apart),
            largest,
            setting.near,
            "nats between log-probabilities with drafts and without, the largest",
            found.partings.false_alarm,
            f"a place too far they are up to {wrong:.2g} apart",
            "" if sound else "log-probabilities are not those of plain decoding",
        )


def _not_exact(setting: Setting) -> str:
    return f"{setting.rule.name} is not exact: its calls are not the target's own"


def _drafted_by(body: Body, choice: str | None) -> Body:
    """Return a body that names another drafter, or none if that is the server's own."""
    return {**body, "speculative": {} if choice is None else {"drafter": choice}}


def _distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return how far log-probabilities are apart; infinite if only one has them."""
    if len(ours) != len(theirs):
        return math.inf
    return max(
        (0.0 if a == b else abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0
    )


def _stream_of(api: Api, reply: Reply) -> Stream:
    """Return the content of a reply; raises `SpecrunError` for an error."""
    if reply.status != 200:
        text = reply.content.decode(errors="replace")
        with suppress(ValueError, LookupError, TypeError):
            text = json.loads(text)["error"]["message"]
        raise SpecrunError(text)
    return read_stream(api, reply.content)
