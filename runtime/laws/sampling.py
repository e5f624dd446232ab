"""Sampling settings (temperature, top-k, top-p, penalties, ...) with llama.cpp's defaults.

What they come to for a row (which samplers do anything, in which order) is worked out once, for it
is asked for every row.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specrun.bindings.errors import OptionError
from specrun.runtime.grammar.grammar import Grammar

# == The order of samplers: llama.cpp's names, letters and aliases =================================


DEFAULT_ORDER = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)
"""Every sampler that there is, in llama.cpp's order."""

_LETTERS = dict(zip("edskypmxt", DEFAULT_ORDER, strict=True))
_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
_LACKING = {"infill": "i", "adaptive_p": "a"}


def sampler_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return llama.cpp's own names for these, which may be its aliases (top-k, topk, nucleus).

    Raises `OptionError` for a name that does not exist, with the nearest that does.
    """
    return tuple(map(_canonical, names))


def read_samplers(text: str) -> tuple[str, ...]:
    """Return the samplers of "penalties;top_k;temperature", in order."""
    return sampler_names(text.split(";"))


def read_sampler_letters(text: str) -> tuple[str, ...]:
    """Return the samplers of "ekt", a letter each; raises `OptionError` for others."""
    for letter in text:
        lacking = next((name for name, own in _LACKING.items() if own == letter), None)
        if lacking is not None:
            raise _is_lacking(lacking)
        if letter not in _LETTERS:
            known = ", ".join(f"{own} {name}" for own, name in _LETTERS.items())
            raise OptionError(f"{letter!r} is no sampler's letter: known are {known}")
    if not text:
        raise OptionError("the sequence of samplers is empty: give letters, such as ekpmt")
    return tuple(_LETTERS[letter] for letter in text)


def _canonical(name: str) -> str:
    plain = _ALIASES.get(name.strip().lower(), name.strip().lower()).replace("-", "_")
    bare = {known.replace("_", ""): known for known in (*DEFAULT_ORDER, *_LACKING)}
    if plain in DEFAULT_ORDER:
        return plain
    found = bare.get(plain) or (plain if plain in _LACKING else None)
    if found in _LACKING:
        raise _is_lacking(found)
    if found is not None:
        return found
    near = difflib.get_close_matches(plain, [*DEFAULT_ORDER, *_ALIASES], 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(DEFAULT_ORDER)}"
    raise OptionError(f"there is no sampler {name.strip()!r}: {hint}")


def _is_lacking(name: str) -> OptionError:
    known = ", ".join(DEFAULT_ORDER)
    return OptionError(f"llama.cpp's sampler {name!r} is not in specrun: there are {known}")


# == Sampling settings =============================================================================


RANDOM_SEED = -1
"""The seed that stands for a random one, as in llama.cpp."""


def unknown_name(name: str, known: list[str], kind: str) -> OptionError:
    """Return the error for a name that nothing of this kind has, with the nearest that has."""
    return OptionError(f"there is no {kind} {name!r}: {_nearest(name, known)}")


def unknown_option(name: str, known: list[str], where: str) -> OptionError:
    """Return the error for an option that does not exist, with the nearest one that does."""
    return OptionError(f"{where} has no option {name!r}: {_nearest(name, known)}")


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"


def whole_number(value: object) -> int | None:
    """Return what an integer of Python or numpy says, None for anything else and for booleans."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def random_if_unset(seed: object) -> int:
    """Return a seed, or a random one for None and -1; raises `OptionError` for what is no seed."""
    number = RANDOM_SEED if seed is None else whole_number(seed)
    if number is None:
        raise OptionError(f"seed is {seed!r}: it must be a whole number, or None (random)")
    return secrets.randbits(32) if number == RANDOM_SEED else number


_OFF: dict[str, dict[str, Any]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
}
"""The settings with which each sampler does nothing."""

COLDEST = 1e-30
"""Below this temperature dividing would overflow, and the law is a point mass anyway."""

_PLAIN = ("penalties", "top_k", "top_p", "min_p", "temperature")
_CUTS = ("top_n_sigma", "top_k", "top_p", "min_p")


class _WorkedOut:
    """What settings of sampling come to.

    `chain`: the samplers that do something, in their order; at last "mirostat", where it is on.
    `is_greedy`: the law is always a point mass, on one token of the highest logit after what
    precedes the temperature, the grammar included. `is_plain`: the chain is no more than penalties,
    top-k, top-p, min-p and temperature, in this order, and each setting says what it does; at
    temperature 0, that token is the one of the highest logit after grammar, bias and penalties.
    `is_adaptive`: the law also depends on how surprising the tokens before it were.
    `has_penalties`: it depends on the tokens
    before it other than through the model: by samplers, which look at the last `window_size` of
    them (-1: all), or by a grammar. `cuts`: top-k, top-p, the logarithm of min-p, and temperature.
    `is_cut`: the law is what these make of a row, top-k not being off, and nothing else.
    """

    __slots__ = (
        *("chain", "cuts", "has_penalties", "is_adaptive", "is_cut", "is_greedy", "is_plain"),
        "window_size",
    )
    chain: tuple[str, ...]
    cuts: tuple[int, float, float, float]
    is_cut: bool
    is_greedy: bool
    is_plain: bool
    is_adaptive: bool
    has_penalties: bool
    window_size: int


def _is_bias(value: object) -> bool:
    return isinstance(value, int | float) and (math.isfinite(value) or value == -math.inf)


@dataclass(frozen=True, slots=True)
class SamplingParams(_WorkedOut):
    """Sampling settings: what is done to a row's logits, by the `samplers` in their order.

    First goes what the `grammar` forbids. Then comes `logit_bias` (maps token ids to what is added
    to their logit; -inf forbids), and:

    - `penalties` on the last `repeat_last_n` tokens (0: none, -1: all);
    - `dry` on tokens that go on with a repetition among the last `dry_penalty_last_n` tokens which
      is longer than `dry_allowed_length`; texts of `dry_sequence_breakers` end a repetition;
    - `top_n_sigma` (0 or less: off), `top_k` (0: off), `typ_p` (`typical_p` 1: off), `top_p` (1:
      off) and `min_p` (0: off), which truncate;
    - `xtc`, which cuts off all tokens of `xtc_threshold` and more but the last, with
      `xtc_probability` (0: off);
    - `temperature`, 0 for greedy; with a `dynatemp_range` above 0 it moves by so much with the
      entropy, to the power of `dynatemp_exp`.

    `mirostat` 1 or 2 stands for all of these but bias and temperature: it aims at a surprise of
    `mirostat_ent` bits a token and learns at the rate `mirostat_lr`. `stop` strings end the answer
    and are not part of it; they may span tokens. `seed` None takes the runtime's, -1 a random one.
    Out-of-range values raise `OptionError`.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_lr: float = 0.1
    mirostat_ent: float = 5.0
    dynatemp_range: float = 0.0
    dynatemp_exp: float = 1.0
    samplers: tuple[str, ...] = DEFAULT_ORDER
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        self._require_numbers()
        self._require_ranges()
        self._take_texts("stop")
        self._take_texts("dry_sequence_breakers")
        self._require_bias()
        is_grammar = self.grammar is None or isinstance(self.grammar, Grammar)
        self._require(is_grammar, "grammar", "a Grammar, such as Grammar.json_schema(...), or None")
        is_seed = self.seed is None or whole_number(self.seed) is not None
        self._require(is_seed, "seed", "a whole number or None")
        samplers = self.samplers
        if isinstance(samplers, str):
            samplers = read_samplers(samplers)
        are_names = isinstance(samplers, Iterable)
        self._require(are_names, "samplers", "a list of samplers' names")
        self._set("samplers", sampler_names(map(str, samplers)))
        self._work_out()

    def _require_numbers(self) -> None:
        for name, default in _NUMBERS.items():
            value = getattr(self, name)
            if isinstance(default, int):
                is_whole = isinstance(value, int) and not isinstance(value, bool)
                self._require(is_whole, name, "a whole number")
            else:
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                self._require(is_number and math.isfinite(value), name, "a finite number")

    def _require_ranges(self) -> None:
        for name in ("temperature", "dynatemp_range", "dynatemp_exp"):
            wanted = "0 (greedy) or more" if name == "temperature" else "0 or more"
            self._require(getattr(self, name) >= 0.0, name, wanted)
        for name in ("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"):
            self._require(0.0 <= getattr(self, name) <= 1.0, name, "between 0 and 1")
        self._require(self.top_k >= 0, "top_k", "0 (off) or more")
        self._require(self.repeat_penalty > 0.0, "repeat_penalty", "above 0 (1 is off)")
        for name in ("repeat_last_n", "dry_penalty_last_n"):
            self._require(getattr(self, name) >= -1, name, "-1 (all), 0 (off) or a count")
        self._require(self.dry_base >= 1.0, "dry_base", "1 or more")
        self._require(self.dry_allowed_length >= 0, "dry_allowed_length", "0 or more")
        self._require(self.mirostat in (0, 1, 2), "mirostat", "0 (off), 1 or 2")

    def _take_texts(self, name: str) -> None:
        """Make a tuple of what may be a text or any iterable of texts."""
        texts = getattr(self, name)
        self._require(isinstance(texts, Iterable), name, "made of strings")
        self._set(name, (texts,) if isinstance(texts, str) else tuple(texts))
        are_texts = all(isinstance(text, str) and text for text in getattr(self, name))
        self._require(are_texts, name, "made of strings that are not empty")

    def _require_bias(self) -> None:
        is_mapping = isinstance(self.logit_bias, Mapping)
        self._require(is_mapping, "logit_bias", "a mapping of token ids to numbers")
        biases, tokens = self.logit_bias.values(), self.logit_bias.keys()
        self._require(all(map(_is_bias, biases)), "logit_bias", "made of finite numbers and -inf")
        are_ids = all(isinstance(token, int) and token >= 0 for token in tokens)
        self._require(are_ids, "logit_bias", "keyed by token ids")

    def _require(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise OptionError(f"{name} is {getattr(self, name)!r}: it must be {wanted}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _work_out(self) -> None:
        chain = tuple(name for name in self.samplers if self._does_something(name))
        if self.mirostat:  # which takes the place of all others but the temperature
            chain = ("temperature", "mirostat") if self.temperature != 1.0 else ("mirostat",)
        before = chain[: chain.index("temperature")] if "temperature" in chain else ()
        is_cold = "temperature" in chain and self.temperature == 0.0
        is_dynamic = self.dynatemp_range > 0.0 and not self.mirostat
        is_greedy = is_cold and not is_dynamic and "xtc" not in before
        if is_greedy:  # what follows finds one token, and can take nothing from it
            chain = (*before, "temperature")
        sizes = {"penalties": self.repeat_last_n, "dry": self.dry_penalty_last_n}
        looked_at = [sizes[name] for name in chain if name in sizes]
        self._set("chain", chain)
        self._set("is_greedy", is_greedy)
        self._set("is_adaptive", bool(self.mirostat) and not is_greedy)
        self._set("has_penalties", bool(looked_at) or self.grammar is not None)
        self._set("window_size", -1 if -1 in looked_at else max(looked_at, default=0))
        if is_greedy:
            own = before[before[:1] == ("penalties",) :]
            self._set("is_plain", all(name in _CUTS for name in own))
        else:
            read = tuple(name for name in _PLAIN if self._does_something(name))
            self._set("is_plain", chain == read and not is_dynamic)
        lowest = math.log(self.min_p) if self.min_p > 0.0 else -math.inf
        self._set("cuts", (self.top_k, self.top_p, lowest, max(self.temperature, COLDEST)))
        as_read = self.is_plain and not (is_greedy or self.has_penalties or self.logit_bias)
        self._set("is_cut", as_read and self.top_k > 0)

    def _does_something(self, name: str) -> bool:
        if name in ("penalties", "dry"):
            size = self.repeat_last_n if name == "penalties" else self.dry_penalty_last_n
            return size != 0 and self._says_something(name)
        if name == "xtc" and self.xtc_threshold > 0.5:  # two tokens cannot have that much
            return False
        return self._says_something(name)

    def _says_something(self, name: str) -> bool:
        if name == "top_n_sigma":
            return self.top_n_sigma > 0.0
        return any(getattr(self, own) != value for own, value in _OFF[name].items())

    def effective(self) -> SamplingParams:
        """Return settings of the same laws, in the default order if that changes none.

        What `samplers` leaves out is switched off in them: these have quick ways to their laws.
        """
        if self.samplers == DEFAULT_ORDER or self.mirostat:
            return self
        left_out = [_OFF[name] for name in DEFAULT_ORDER if name not in self.samplers]
        off = {own: value for values in left_out for own, value in values.items()}
        same = self.replace(**off, samplers=DEFAULT_ORDER)
        return same if same.chain == self.chain else self

    def favourites(self) -> SamplingParams:
        """Return settings that say the most likely token of every row, after bias and penalties."""
        return self.replace(
            temperature=0.0, dynatemp_range=0.0, xtc_probability=0.0, samplers=DEFAULT_ORDER
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # What is worked out is no field, and a copy is to have it.
        return SamplingParams.from_dict, (self.to_dict(),)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Return settings from a mapping; unknown names raise with the nearest known one."""
        known = [entry.name for entry in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise unknown_option(name, known, "SamplingParams")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a mapping that `from_dict` reads."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    def replace(self, **changes: Any) -> SamplingParams:  # noqa: ANN401 - values of any field
        """Return a copy with some settings changed; unknown names raise."""
        return SamplingParams.from_dict({**self.to_dict(), **changes})


_NUMBERS = {
    entry.name: entry.default
    for entry in dataclasses.fields(SamplingParams)
    if isinstance(entry.default, int | float)
}
