"""The drafter language and the table of drafting methods.

Expressions are such as `draft(a.gguf, n=5)`, `cascade(draft, prompt-lookup)`, `relay(a@2, b@3)`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from specrun.bindings.errors import OptionError
from specrun.runtime.laws.sampling import unknown_name, unknown_option

# == The drafter language ==========================================================================
#
#     expression = atom [ "(" [ argument { "," argument } ] ")" ] [ "@" number ]
#     argument   = [ name "=" ] expression
#     atom       = quoted text, or any text without , ( ) @ = quotes
#
# `parse_expression` does not depend on drafters: the meaning of a name, and its arguments, are in
# its row of `METHODS`. A builder reads the options by type (`ExpressionOptions`).


_TOKEN = re.compile(
    r"""\s*(?:"(?P<double>(?:[^"\\]|\\.)*)"|'(?P<single>[^']*)'"""
    r"""|(?P<sign>[(),@=])|(?P<atom>[^\s(),@='"]+))"""
)
_MAX_DEPTH = 16
_MAX_COUNT_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Expression:
    """A name or value with its arguments; `count` is the number after "@", if any.

    `is_call` distinguishes `a()` from `a`.
    """

    atom: str
    arguments: tuple[Expression, ...] = ()
    options: tuple[tuple[str, Expression], ...] = ()
    count: int | None = None
    is_call: bool = False

    def __str__(self) -> str:
        named = (f"{_atom(name)}={value}" for name, value in self.options)
        inner = [*map(str, self.arguments), *named]
        call = f"({', '.join(inner)})" if self.is_call else ""
        return f"{_atom(self.atom)}{call}" + (f"@{self.count}" if self.count is not None else "")

    def mapped(self, change: Callable[[Expression], Expression]) -> Expression:
        """Return it with every part changed, arguments and values before those that have them."""
        arguments = tuple(each.mapped(change) for each in self.arguments)
        options = tuple((name, value.mapped(change)) for name, value in self.options)
        return change(replace(self, arguments=arguments, options=options))


def _atom(text: str) -> str:
    return text if re.fullmatch(r"[^\s(),@='\"]+", text) else quoted(text)


def quoted(text: str) -> str:
    """Return a path or value in quotes, safe inside an expression."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def parse_expression(text: str) -> Expression:
    """Return the parsed expression; raises `OptionError` that shows the place of an error."""
    if not isinstance(text, str):
        raise OptionError(f"an expression is a text, such as 'prompt-lookup', not {text!r}")
    parser = _Parser(text)
    expression = parser.expression(0)
    parser.expect_end()
    return expression


def short_label(expression: Expression) -> str:
    """Return the expression with files by their name alone: paths would widen every table."""

    def short(part: Expression) -> Expression:
        is_file = part.atom.endswith((".gguf", ".pool")) or "/" in part.atom
        return replace(part, atom=Path(part.atom).name) if is_file else part

    return str(expression.mapped(short))


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(self._text, position)
            if match is None:
                raise self._error("a quote is not closed", position)
            kind = match.lastgroup or ""
            value = match[kind]
            if kind == "double":
                value = re.sub(r"\\(.)", r"\1", value)
            self._tokens.append(("sign" if kind == "sign" else "atom", value, match.start(kind)))
            position = match.end()
        self._next = 0

    def expression(self, depth: int) -> Expression:
        if depth > _MAX_DEPTH:
            raise self._error(f"more than {_MAX_DEPTH} levels of parentheses", self._position())
        kind, atom, position = self._take("a name or a file is missing")
        if kind != "atom":
            raise self._error(f"a name or a file is missing before {atom!r}", position)
        arguments: list[Expression] = []
        options: list[tuple[str, Expression]] = []
        is_call = self._skip("(")
        if is_call and not self._skip(")"):
            while True:
                self._argument(arguments, options, depth)
                if self._skip(")"):
                    break
                if not self._skip(","):
                    problem = "a comma or a closing parenthesis is missing"
                    raise self._error(problem, self._position())
        count = self._count() if self._skip("@") else None
        return Expression(atom, tuple(arguments), tuple(options), count, is_call)

    def _argument(
        self, arguments: list[Expression], options: list[tuple[str, Expression]], depth: int
    ) -> None:
        ahead = self._tokens[self._next : self._next + 2]
        if len(ahead) == 2 and ahead[0][0] == "atom" and ahead[1][:2] == ("sign", "="):
            self._next += 2
            if any(name == ahead[0][1] for name, _ in options):
                raise self._error(f"{ahead[0][1]} is given twice", ahead[0][2])
            options.append((ahead[0][1], self.expression(depth + 1)))
        elif options:
            problem = "an argument without a name follows one with a name"
            raise self._error(problem, self._position())
        else:
            arguments.append(self.expression(depth + 1))

    def _count(self) -> int:
        _, value, position = self._take("a number is missing after @")
        if not value.isdecimal() or len(value) > _MAX_COUNT_DIGITS or int(value) < 1:
            raise self._error(f"{value[:20]!r} after @ is not a positive number", position)
        return int(value)

    def expect_end(self) -> None:
        if self._next < len(self._tokens):
            raise self._error(f"unexpected {self._tokens[self._next][1]!r}", self._position())

    def _take(self, problem: str) -> tuple[str, str, int]:
        if self._next >= len(self._tokens):
            raise self._error(problem, len(self._text))
        self._next += 1
        return self._tokens[self._next - 1]

    def _skip(self, sign: str) -> bool:
        found = self._next < len(self._tokens) and self._tokens[self._next][:2] == ("sign", sign)
        self._next += found
        return found

    def _position(self) -> int:
        return self._tokens[self._next][2] if self._next < len(self._tokens) else len(self._text)

    def _error(self, problem: str, position: int) -> OptionError:
        return OptionError(f"drafter {self._text!r}: {problem} (at character {position + 1})")


class ExpressionOptions:
    """Reads the options of one expression by type, and refuses unknown ones.

    `known` are the names it may have, `n_arguments` its most unnamed arguments (None: any number).
    Only a `counted` expression's arguments may carry numbers after @. For a drafter's expression
    all three are its method's (`options_of`).
    """

    def __init__(
        self,
        expression: Expression,
        known: Sequence[str],
        n_arguments: int | None,
        *,
        counted: bool = False,
    ) -> None:
        self._name = expression.atom
        self._values = dict(expression.options)
        for name in self._values:
            if name not in known:
                raise unknown_option(name, list(known), self._name)
        self._refuse_counts(self._values.values())
        if not counted:
            self._refuse_counts(expression.arguments)
        if n_arguments is not None and len(expression.arguments) > n_arguments:
            limit = f"{n_arguments} unnamed arguments at most"
            raise OptionError(f"{expression}: {self._name} takes {limit}")

    def integer(self, name: str, default: int) -> int:
        """Return a whole number."""
        value = self.optional_integer(name)
        return default if value is None else value

    def optional_integer(self, name: str) -> int | None:
        """Return a whole number, None if it is not given."""
        text = self.optional(name)
        if text is None:
            return None
        try:
            return int(text)
        except ValueError:
            problem = f"{name} is {text!r}, which is not a whole number"
            raise OptionError(f"{self._name}: {problem}") from None

    def length(self, name: str) -> int | None:
        """Return a whole number of tokens, None if it is "auto" or not given."""
        return None if self.is_auto(name) else self.optional_integer(name)

    def is_auto(self, name: str) -> bool:
        """Whether it is left to the drafter by name, as in n=auto."""
        return self.optional(name) == "auto"

    def number(self, name: str, default: float) -> float:
        """Return a number."""
        text = self.optional(name)
        try:
            return default if text is None else float(text)
        except ValueError:
            raise OptionError(f"{self._name}: {name} is {text!r}, which is not a number") from None

    def optional(self, name: str) -> str | None:
        """Return the text of an option, None if it is not given."""
        return self._values[name].atom if name in self._values else None

    def expression(self, name: str) -> Expression | None:
        """Return an option that may have arguments of its own, None if it is not given."""
        return self._values.get(name)

    def choice(self, name: str, allowed: list[str], default: str) -> str:
        """Return one of the allowed words."""
        text = self.optional(name)
        if text is not None and text not in allowed:
            raise unknown_name(text, allowed, f"{name} of {self._name} called")
        return default if text is None else text

    def _refuse_counts(self, expressions: Iterable[Expression]) -> None:
        for expression in expressions:
            if expression.count is not None:
                meaning = "is the number of tokens of a part of a relay"
                example = "as in relay(draft(a.gguf)@2, prompt-lookup@3); it means nothing here"
                raise OptionError(f"{expression}: @{expression.count} {meaning}, {example}")


# == The table of drafting methods =================================================================
#
# A row has a method's name, its arguments and the module that builds it; every list of
# methods elsewhere (the drafter language, --spec-type, -md, the kinds of heads that are converted,
# quantized and calibrated, the trees that authors published) is read from here. The rows are facts
# alone: the module of a method is imported when the first drafter of it is built.


TREE_OPTIONS = ("tree", "depth", "topk", "nodes")
"""Options that make a method draft a tree instead of a chain."""

_HEAD_TREE_OPTIONS = ("tree", "nodes", "accuracy", "always")
_PARALLEL_OPTIONS = ("n", "below", "sampling", "topk", "always")
_EAGLE_OPTIONS = ("n", "sampling", "p_min", *TREE_OPTIONS, "accuracy", "window", "always")

# FasterDecoding/Medusa, medusa/model/medusa_choices.py. Hydra (zankner/Hydra) took over the first.
# Each tree was searched for one pair of models on one kind of GPU, which verifies 63 nodes nearly
# for free; elsewhere one that is searched from measured accuracies is better.
_MEDUSA_TREES = {
    "mc_sim_7b_63": "0 1 2 3 4 5 6 7 8 9 "
    "00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90 "
    "000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200 "
    "0000 0001",
    "vicuna_7b_stage2": "0 1 2 3 4 5 6 7 8 9 "
    "00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 30 31 40 50 60 70 "
    "000 001 002 003 004 005 006 007 008 010 011 012 013 020 021 030 040 050 100 101 102 110 200 "
    "0000 0001 0002 0003 0010 0020 0100",
}
# SafeAILab/EAGLE, eagle/model/choices.py: EAGLE-1's tree, which kept the name of Medusa's.
_EAGLE_TREES = {
    "mc_sim_7b_63": "0 1 2 3 00 01 02 10 11 20 21 30 "  # and of depths 3 to 5:
    "000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
}


@dataclass(frozen=True, slots=True)
class DraftFile:
    """The file that a method drafts with: the first argument of its expression.

    `content` and `example` are its description in messages, `made_by` names the command that writes
    such files unless that is `convert`. A method does without a file that is not `needed`.
    One that `is_model` (heads are) may be named in every way that models are (`models.names`).
    """

    content: str
    example: str
    needed: bool = True
    made_by: str | None = None
    is_model: bool = True

    @property
    def request(self) -> str:
        """The request of a message for a missing file."""
        maker = "" if self.made_by is None else f"; {self.made_by} makes one"
        return f"name {self.content}, as in {self.example}{maker}"


@dataclass(frozen=True, slots=True)
class Method:
    """One way to draft: a row of the table.

    `name` begins its expressions; `summary` is a sentence about how it drafts. `module` has its
    builder: a function `build_NAME` (`builder_name`) of the type `drafters.build.Builder`.
    """

    name: str
    summary: str
    module: str

    options: tuple[str, ...] = ()
    """The named options of its expressions; any other is refused."""

    file: DraftFile | None = None
    """The kind of file of its only unnamed argument; None: it takes no file."""

    members: int | None = 0
    """How many drafters it is made of, which are then its unnamed arguments; None: any number."""

    counts_members: bool = False
    """Whether a member may carry a number of tokens to draft, as in `relay(draft@2, ...)`."""

    counted_by_n: bool = False
    """Whether that number, as a member of a relay, is its own option `n`."""

    head: str | None = None
    """The architecture (`general.architecture`) of the GGUF files of its heads; None: no heads."""

    llama_cpp_drafter: str | None = None
    """The architecture of files that are no heads: drafters that llama.cpp has a graph for."""

    llama_cpp_head: bool = False
    """Whether that architecture is llama.cpp's own, which then loads and quantizes it itself."""

    spec_types: tuple[str, ...] = ()
    """Its names as a --spec-type: llama.cpp's if llama.cpp has the method, and ours."""

    published_trees: Mapping[str, str] = field(default_factory=dict)
    """The nodes of the trees that its authors published, by the names in their own program."""

    @property
    def builder_name(self) -> str:
        """The name of the function in `module` that builds its drafters."""
        return "build_" + self.name.replace("-", "_")

    def takes(self, option: str) -> bool:
        """Whether its expressions have this option, such as `n` or `p_min`."""
        return option in self.options

    def published_tree(self, tree: str) -> str:
        """Return the nodes of a tree that goes by this name; any other text as it is."""
        return self.published_trees.get(tree, tree)

    def read(self, expression: Expression) -> ExpressionOptions:
        """Return the options of an expression of this method.

        Raises OptionError for options that it does not take, for too many unnamed arguments, and
        for numbers after @ that mean nothing here.
        """
        arguments = self.members if self.file is None else 1
        return ExpressionOptions(expression, self.options, arguments, counted=self.counts_members)


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(
            "none",
            "Plain decoding: no drafts.",
            "specrun.runtime.drafters.build",
            spec_types=("none",),
        ),
        Method(
            "draft",
            "A smaller model: chains, SpecInfer, Sequoia and EAGLE-2 trees.",
            "specrun.runtime.drafters.draft_model.build",
            options=("n", "sampling", "p_min", *TREE_OPTIONS, "vocabulary", "always"),
            file=DraftFile("the GGUF file of a draft model", "draft(small.gguf, n=5)"),
            counted_by_n=True,
            spec_types=("draft-simple",),
        ),
        Method(
            "partial",
            "TriForce: the target's own weights with a cache of the first and last tokens.",
            "specrun.runtime.drafters.partial",
            options=(
                *("sink", "window", "chunks", "chunk"),
                *("n", "sampling", "p_min", *TREE_OPTIONS, "always"),
            ),
            counted_by_n=True,
        ),
        Method(
            "medusa",
            "Medusa: heads on the target's hidden state guess the next tokens independently.",
            "specrun.runtime.drafters.medusa",
            options=_HEAD_TREE_OPTIONS,
            file=DraftFile("the GGUF file of Medusa heads", "medusa(heads.gguf)"),
            head="medusa",
            published_trees=_MEDUSA_TREES,
        ),
        Method(
            "hydra",
            "Hydra and Hydra++: Medusa's heads, each of which reads the tokens drafted before.",
            "specrun.runtime.drafters.hydra.source",
            options=(*_HEAD_TREE_OPTIONS, "depth", "topk", "n"),
            file=DraftFile("the GGUF file of Hydra heads", "hydra(heads.gguf)"),
            head="hydra",
            published_trees=_MEDUSA_TREES,
        ),
        Method(
            "eagle",
            "EAGLE, EAGLE-2 and HASS: one layer predicts the target's next hidden states.",
            "specrun.runtime.drafters.eagle.build",
            options=(*_EAGLE_OPTIONS, "draft_tokens"),
            file=DraftFile("the GGUF file of an EAGLE head", "eagle(head.gguf)"),
            head="eagle",
            published_trees=_EAGLE_TREES,
        ),
        Method(
            "eagle3",
            "EAGLE-3: one layer that reads the inputs of three layers of the target.",
            "specrun.runtime.drafters.eagle.build",
            options=_EAGLE_OPTIONS,
            file=DraftFile("the GGUF file of an EAGLE-3 head", "eagle3(head.gguf)"),
            head="eagle3",
            llama_cpp_head=True,
            spec_types=("draft-eagle3",),
            published_trees=_EAGLE_TREES,
        ),
        Method(
            "dflash",
            "DFlash, DFlash2 and DSpark: one evaluation of a few layers drafts a whole block.",
            "specrun.runtime.drafters.dflash.source",
            options=("n", "sampling", "p_min", *TREE_OPTIONS, "window", "always"),
            file=DraftFile("the GGUF file of a block drafter", "dflash(FILE.gguf)"),
            head="dflash",
            llama_cpp_head=True,
            spec_types=("draft-dflash", "draft-dspark"),
        ),
        Method(
            "mtp",
            "Multi-token prediction: NextN blocks, the target's own or a file's, or an assistant.",
            "specrun.runtime.drafters.mtp.build",
            options=("n", "sampling", "p_min", *TREE_OPTIONS, "always"),
            file=DraftFile("a GGUF file of NextN blocks", "mtp(mtp-blocks.gguf)", needed=False),
            llama_cpp_drafter="gemma4-assistant",
            spec_types=("draft-mtp",),
        ),
        Method(
            "pass",
            "PaSS: learnt embeddings behind each token, at which the target predicts tokens ahead.",
            "specrun.runtime.drafters.lookahead_positions",
            options=_PARALLEL_OPTIONS,
            file=DraftFile(
                "the GGUF file of look-ahead embeddings",
                "pass(lookahead.gguf, n=2)",
                made_by="specrun train pass",
            ),
            counted_by_n=True,
            head="pass",
        ),
        Method(
            "space",
            "SPACE: mask tokens behind each token, which the target was fine-tuned to read.",
            "specrun.runtime.drafters.lookahead_positions",
            options=_PARALLEL_OPTIONS,
            file=DraftFile(
                "the GGUF file of the mask token",
                "space(mask.gguf, n=3)",
                made_by="specrun train space",
            ),
            counted_by_n=True,
            head="space",
        ),
        Method(
            "early-exit",
            "The target's own first layers, with its weights: early exit, PPD on one device.",
            "specrun.runtime.drafters.early_exit",
            options=("layers", "n", "sampling", "p_min", "always"),
            counted_by_n=True,
        ),
        Method(
            "prompt-lookup",
            "Prompt lookup and LLMA: the continuation of the last n-gram earlier in the text.",
            "specrun.runtime.drafters.retrieval.prompt_lookup",
            options=("n", "nodes", "branches", "max_ngram", "min_ngram", "reference", "always"),
            counted_by_n=True,
            spec_types=("ngram-simple", "prompt-lookup"),
        ),
        Method(
            "rest",
            "REST: the continuation of the last tokens in a datastore of texts, a suffix array.",
            "specrun.runtime.drafters.retrieval.rest",
            options=("n", "nodes", "branches", "places", "min_match", "always"),
            file=DraftFile(
                "the datastore",
                "rest(docs.store)",
                made_by="specrun datastore build",
                is_model=False,
            ),
        ),
        Method(
            "ngram",
            "Smoothed n-gram counts as a distribution to draw from: text, file and pool.",
            "specrun.runtime.drafters.ngram",
            options=("order", "file", "pool", "n", "sampling", "p_min", "always"),
            counted_by_n=True,
        ),
        Method(
            "lookahead",
            "Lookahead decoding: a pool of n-grams that Jacobi iterations on the target fill.",
            "specrun.runtime.drafters.lookahead.drafter",
            options=(
                *("window", "ngram", "guesses", "pool", "save"),
                *("text", "per_key", "max_keys", "seed", "always"),
            ),
        ),
        Method(
            "jacobi",
            "Jacobi decoding: the target's own guesses of the last round, iterated.",
            "specrun.runtime.drafters.lookahead.drafter",
            options=("n", "seed", "until", "always"),
        ),
        Method(
            "ensemble",
            "The trees of several drafters, merged by their common prefixes.",
            "specrun.runtime.drafters.combinators.build",
            members=None,
        ),
        Method(
            "cascade",
            "CS-Drafting's vertical cascade: a drafter drafts for the draft model.",
            "specrun.runtime.drafters.combinators.build",
            options=("rounds",),
            members=2,
        ),
        Method(
            "relay",
            "CS-Drafting's horizontal cascade: each drafter continues the one before.",
            "specrun.runtime.drafters.combinators.build",
            members=None,
            counts_members=True,
        ),
        Method(
            "ouroboros",
            "Ouroboros: a pool of phrases lengthens and widens a draft model's drafts.",
            "specrun.runtime.drafters.combinators.build",
            options=("phrases", "length", "pool", "save"),
            members=1,
        ),
        Method(
            "auto",
            "Whichever of several drafters is measured fastest, chosen round by round.",
            "specrun.runtime.drafters.combinators.build",
            options=("replay",),
            members=None,
        ),
    )
}
"""Every method by its name in the drafter language."""


def find_method(name: str) -> Method:
    """Return the method of that name; raises OptionError, with the nearest name, for another."""
    method = METHODS.get(name)
    if method is None and name.startswith("cascade-"):
        problem = "is the name of an acceptance rule (--accept), not of a drafter"
        raise OptionError(f"{name} {problem}: the drafter is cascade(draft(FILE), prompt-lookup)")
    if method is None:
        raise unknown_name(name, list(METHODS), "drafter")
    return method


def options_of(expression: Expression) -> ExpressionOptions:
    """Return the options of a drafter expression, as its method's row has them (`Method.read`)."""
    return find_method(expression.atom).read(expression)


def head_kinds() -> tuple[str, ...]:
    """Return the architectures of the GGUF files of heads, all of which are converted here."""
    return tuple(method.head for method in METHODS.values() if method.head)


def method_of_head(architecture: str) -> Method | None:
    """Return the method that drafts with files of this architecture; None: they are models."""
    kinds = ((each, (each.head, each.llama_cpp_drafter)) for each in METHODS.values())
    return next((method for method, names in kinds if architecture in names), None)
