"""Sampling settings (temperature, top-k, top-p, penalties, ...) with llama.cpp's defaults.

Each is declared once, for all faces of the program. Facts that every row needs (the samplers that
have an effect, in their order) are computed once.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import operator
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self

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
    if plain in DEFAULT_ORDER:
        return plain
    bare = {known.replace("_", ""): known for known in (*DEFAULT_ORDER, *_LACKING)}
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


def _breakers(given: object) -> object:
    """Return DRY's breakers; a text may be a list of them in JSON, with its brackets or without."""
    if isinstance(given, str) and given[:1] in ("[", '"'):
        with suppress(ValueError, RecursionError):
            found = json.loads(given if given.startswith("[") else f"[{given}]")
            if found and all(isinstance(each, str) for each in found):
                return tuple(text for text in found if text)
    return given


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
    """Return the value of an integer of Python or numpy, None for others and for booleans."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def random_if_unset(seed: object) -> int:
    """Return a seed, or a random one for None and -1; raises `OptionError` for other values."""
    number = RANDOM_SEED if seed is None else whole_number(seed)
    if number is None:
        raise OptionError(f"seed is {seed!r}: it must be a whole number, or None (random)")
    return secrets.randbits(32) if number == RANDOM_SEED else number


COLDEST = 1e-30
"""Below this temperature dividing would overflow, and the distribution is a point mass anyway."""

_PLAIN = ("penalties", "top_k", "top_p", "min_p", "temperature")
_CUTS = ("top_n_sigma", "top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of sampling, as every face of the program has it: declared beside its field.

    `flags` and `help` are those of the command line. The environment variable is SPECRUN_ and
    `variable`, by default the field's name. `/set` of a chat also takes `names`. Requests over HTTP
    have it as any of `fields`, by default the field's name. With the value `off` its `sampler` does
    nothing. Numbers lie between `least` and `most`; `above` excludes `least`, and `wanted` is the
    range in errors.
    """

    default: Any
    flags: str
    help: str
    least: float | None = None
    most: float | None = None
    above: bool = False
    wanted: str = ""
    sampler: str = ""
    off: float | None = None
    variable: str = ""
    names: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["count", "number", "other"]:
        """Whether it is a whole number, a number, or anything else."""
        if isinstance(self.default, int):
            return "count"
        return "number" if isinstance(self.default, float) else "other"

    def problem(self, value: Any) -> str:  # noqa: ANN401 - a value of any field
        """Return the rule that `value` breaks, in words, "" if it is valid."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if self.kind == "count":
            if not is_number or isinstance(value, float):
                return "a whole number"
        elif not (is_number and math.isfinite(value)):
            return "a finite number"
        least = -math.inf if self.least is None else self.least
        most = math.inf if self.most is None else self.most
        if least <= value <= most and not (self.above and value == least):
            return ""
        between = f"between {self.least} and {self.most}"
        return self.wanted or (f"{self.least} or more" if self.most is None else between)


def _setting(default: Any, flags: str, help: str, **more: Any) -> Any:  # noqa: ANN401
    """Declare a field of `SamplingParams`."""
    metadata = {"setting": Setting(default, flags, help, **more)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


class _WorkedOut:
    """The consequences of settings of sampling.

    `chain`: the samplers that do something, in their order; at last "mirostat", if it is on.
    `is_greedy`: the distribution is always a point mass, on one token of the highest logit after
    the grammar and the samplers before the temperature. `is_plain`: the chain is no more than
    penalties, top-k, top-p, min-p and temperature, in this order, and each setting has its plain
    meaning; at temperature 0, that token is the one of the highest logit after grammar, bias and
    penalties. `is_adaptive`: the distribution also depends on how surprising the tokens before it
    were. `has_penalties`: it depends on the tokens
    before it other than through the model: by samplers, which look at the last `window_size` of
    them (-1: all), or by a grammar. `cuts`: top-k, top-p, the logarithm of min-p, and temperature.
    `is_cut`: the distribution depends on these and a row alone, top-k not being off.
    """

    def __new__(cls, *_: object, **given: object) -> Self:
        for name in given:
            if name not in SETTINGS and name != "grammar":
                raise OptionError(f"SamplingParams has no option {name!r}: {_near_setting(name)}")
        return object.__new__(cls)

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
    """Sampling settings: changes of a row's logits, by the `samplers` in their order.

    The `grammar` goes first, then `logit_bias` (a mapping of token ids to numbers that are added to
    their logits; -inf forbids), then the samplers. Each field is declared with its help: its
    effect, and the values that switch a sampler off. `mirostat` takes the place of all samplers but
    a plain temperature. `stop` strings end the answer and are not part of it; they may span tokens.
    `seed` None takes the runtime's, -1 a random one. Out-of-range values raise `OptionError`.
    """

    temperature: float = _setting(
        0.8,
        "--temp, --temperature N",
        "Temperature; 0: always the most likely token.",
        sampler="temperature",
        off=1.0,
        variable="temp",
    )
    top_k: int = _setting(
        40,
        "--top-k N",
        "Keep the K most likely tokens; 0: all.",
        least=0,
        wanted="0 (off) or more",
        sampler="top_k",
        off=0,
    )
    top_p: float = _setting(
        0.95,
        "--top-p N",
        "Keep the most likely tokens with this total probability; 1: all.",
        least=0,
        most=1,
        sampler="top_p",
        off=1.0,
    )
    min_p: float = _setting(
        0.05,
        "--min-p N",
        "Keep tokens with at least this share of the highest probability; 0: all.",
        least=0,
        most=1,
        sampler="min_p",
        off=0.0,
    )
    repeat_penalty: float = _setting(
        1.0,
        "--repeat-penalty N",
        "Divide the logits of recent tokens; 1: off.",
        least=0,
        above=True,
        wanted="above 0 (1 is off)",
        sampler="penalties",
        off=1.0,
        fields=("repeat_penalty", "repetition_penalty"),
    )
    presence_penalty: float = _setting(
        0.0,
        "--presence-penalty N",
        "Subtract from the logits of recent tokens.",
        sampler="penalties",
        off=0.0,
    )
    frequency_penalty: float = _setting(
        0.0,
        "--frequency-penalty N",
        "Subtract from the logits of recent tokens, once an occurrence.",
        sampler="penalties",
        off=0.0,
    )
    repeat_last_n: int = _setting(
        64,
        "--repeat-last-n N",
        "The number of recent tokens that penalties apply to; 0: none, -1: all.",
        least=-1,
        wanted="-1 (all), 0 (off) or a count",
    )
    logit_bias: Mapping[int, float] = _setting(
        {},
        "-l, --logit-bias",
        "Add to a token's logit, as in 15043+1 or 15043-inf; repeatable.",
    )
    seed: int | None = _setting(
        None, "-s, --seed N", "The seed of the random numbers; -1: a new one for every answer."
    )
    stop: tuple[str, ...] = _setting(
        (),
        "-r, --reverse-prompt, --stop TEXT",
        "End the answer before this text; repeatable.",
        variable="reverse_prompt",
    )
    typical_p: float = _setting(
        1.0,
        "--typical, --typical-p N",
        "Keep the tokens of the most typical surprise with this total probability; 1: all.",
        least=0,
        most=1,
        sampler="typ_p",
        off=1.0,
        names=("typ_p",),
        fields=("typical_p", "typ_p"),
    )
    top_n_sigma: float = _setting(
        -1.0,
        "--top-nsigma, --top-n-sigma N",
        "Keep logits within N standard deviations of the highest; 0 or less: all.",
        sampler="top_n_sigma",
        off=-1.0,
    )
    xtc_probability: float = _setting(
        0.0,
        "--xtc-probability N",
        "The chance of removing all likely tokens except the least likely of them; 0: off.",
        least=0,
        most=1,
        sampler="xtc",
        off=0.0,
    )
    xtc_threshold: float = _setting(
        0.1,
        "--xtc-threshold N",
        "The least probability of a likely token, for XTC; over 0.5: off.",
        least=0,
        most=1,
    )
    dry_multiplier: float = _setting(
        0.0,
        "--dry-multiplier N",
        "Penalise tokens that continue a repetition, by N * base^(its length - the allowed "
        "length); 0: off.",
        sampler="dry",
        off=0.0,
    )
    dry_base: float = _setting(1.75, "--dry-base N", "The base of DRY's penalty.", least=1)
    dry_allowed_length: int = _setting(
        2, "--dry-allowed-length N", "The longest repetition without a penalty.", least=0
    )
    dry_penalty_last_n: int = _setting(
        64,
        "--dry-penalty-last-n N",
        "The number of recent tokens that DRY reads; 0: none, -1: all.",
        least=-1,
        wanted="-1 (all), 0 (off) or a count",
    )
    dry_sequence_breakers: tuple[str, ...] = _setting(
        ("\n", ":", '"', "*"),
        "--dry-sequence-breaker TEXT",
        "A text that ends a repetition, instead of the usual texts; repeatable; none: no text.",
        variable="dry_sequence_breaker",
    )
    mirostat: int = _setting(
        0,
        "--mirostat N",
        "Control the surprise of the text, instead of all samplers except temperature: version 1 "
        "or 2; 0: off.",
        least=0,
        most=2,
        wanted="0 (off), 1 or 2",
    )
    mirostat_lr: float = _setting(
        0.1, "--mirostat-lr N", "Mirostat's learning rate.", fields=("mirostat_eta",)
    )
    mirostat_ent: float = _setting(
        5.0,
        "--mirostat-ent N",
        "Mirostat's target surprise, in bits a token.",
        fields=("mirostat_tau",),
    )
    dynatemp_range: float = _setting(
        0.0,
        "--dynatemp-range N",
        "The largest change of the temperature by the distribution's entropy; 0: off.",
        least=0,
        sampler="temperature",
        off=0.0,
    )
    dynatemp_exp: float = _setting(
        1.0,
        "--dynatemp-exp N",
        "The exponent of the normalised entropy, for --dynatemp-range.",
        least=0,
        fields=("dynatemp_exponent",),
    )
    samplers: tuple[str, ...] = _setting(
        DEFAULT_ORDER,
        "--samplers",
        "The samplers to apply, in order; logit biases always come first.",
        names=("sampler_seq", "sampling_seq"),
    )
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if isinstance(self.temperature, int | float) and self.temperature < 0:
            self._set("temperature", 0.0)  # greedy, as in llama.cpp
        for name, setting in _NUMBERS.items():
            wanted = setting.problem(getattr(self, name))
            self._require(not wanted, name, wanted)
        self._take_texts("stop")
        self._set("dry_sequence_breakers", _breakers(self.dry_sequence_breakers))
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

    def _take_texts(self, name: str) -> None:
        """Make a tuple of a text or of any iterable of texts."""
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
        if is_greedy:  # the later samplers find one token, and can take nothing from it
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
        """Return settings of the same distributions, in the default order if that changes none.

        Samplers that `samplers` leaves out are switched off in them: these have quick ways to their
        distributions.
        """
        if self.samplers == DEFAULT_ORDER or self.mirostat:
            return self
        left_out = [_OFF[name] for name in DEFAULT_ORDER if name not in self.samplers]
        off = {own: value for values in left_out for own, value in values.items()}
        same = self.replace(**off, samplers=DEFAULT_ORDER)
        return same if same.chain == self.chain else self

    def favourites(self) -> SamplingParams:
        """Return settings that choose every row's most likely token, after bias and penalties."""
        return self.replace(
            temperature=0.0, dynatemp_range=0.0, xtc_probability=0.0, samplers=DEFAULT_ORDER
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Computed facts are no fields, and a copy needs them.
        return SamplingParams.from_dict, (self.to_dict(),)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Return settings from a mapping; unknown names raise with the nearest known one."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a mapping that `from_dict` reads."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    def replace(self, **changes: Any) -> SamplingParams:  # noqa: ANN401 - values of any field
        """Return a copy with some settings changed; unknown names raise."""
        return SamplingParams.from_dict({**self.to_dict(), **changes})


def setting_named(name: str) -> str | None:
    """Return the field of `SamplingParams` that a name means: its own, an alias, or the nearest."""
    names = {
        alias.strip().lstrip("-").replace("-", "_"): own
        for own, known in SETTINGS.items()
        for alias in (*known.flags.split(" ")[:-1], known.variable, *known.names, *known.fields)
    }
    names |= {own: own for own in (*SETTINGS, "grammar")}
    near = difflib.get_close_matches(name.replace("-", "_"), names, 1)
    return names[near[0]] if near else None


def _near_setting(name: str) -> str:
    near = setting_named(name)
    return f"did you mean {near!r}?" if near else f"known are {', '.join(sorted(SETTINGS))}"


def _completed(name: str, setting: Setting) -> Setting:
    return dataclasses.replace(
        setting, variable=setting.variable or name, fields=setting.fields or (name,)
    )


SETTINGS: dict[str, Setting] = {
    entry.name: _completed(entry.name, entry.metadata["setting"])
    for entry in dataclasses.fields(SamplingParams)
    if entry.metadata
}
"""The settings of sampling by the names of `SamplingParams`, but for the grammar."""

_NUMBERS = {name: known for name, known in SETTINGS.items() if known.kind != "other"}

_OFF = {
    sampler: {name: known.off for name, known in SETTINGS.items() if known.sampler == sampler}
    for sampler in DEFAULT_ORDER
}
"""The settings with which each sampler does nothing."""
