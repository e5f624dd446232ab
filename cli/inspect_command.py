"""`specrun inspect`: what a GGUF file holds, whether a draft model fits it, and how two models differ."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from specrun.bindings.errors import MalformedFileError, SpecrunError
from specrun.bindings.gguf_header import read_header
from specrun.cli.comparison_options import ComparisonSettings, comparison_options
from specrun.cli.inspect_comparison import compare_files, print_comparison
from specrun.cli.model_summary import describe_summary, file_sha256, summarise, tensor_rows
from specrun.cli.option_group import SectionedCommand, option
from specrun.cli.option_types import ExistingFile
from specrun.cli.output_options import terminal_options
from specrun.cli.table import print_facts, print_table
from specrun.cli.terminal import Terminal

__all__ = ["inspect"]

_EPILOG = """\b
Examples:
  specrun inspect target.gguf
  specrun inspect target.gguf -md small.gguf      exit code 4 if they do not fit
  specrun inspect target.gguf target-q4.gguf -f text.txt      what quantizing cost
  specrun inspect target.gguf --sha256            print the checksum
  specrun inspect target.gguf --sha256 9f86d0...  exit code 3 if it differs
"""
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_ONLY_PRINT = "print"


class _InspectCommand(SectionedCommand):
    """Lets --sha256 stand before the file without taking it for the checksum."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, `--sha256 FILE` as `--sha256= FILE`."""
        if "--sha256" in args:
            following = args[args.index("--sha256") + 1 : args.index("--sha256") + 2]
            if not following or Path(following[0]).exists():
                args[args.index("--sha256")] = f"--sha256={_ONLY_PRINT}"
        return super().parse_args(ctx, args)


def _check_hash(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    if value is not None and value != _ONLY_PRINT and not _HASH.fullmatch(value):
        raise click.BadParameter(f"{value!r} is not a SHA-256: 64 hexadecimal digits")
    return value


@click.command(cls=_InspectCommand, epilog=_EPILOG)
@click.argument("file", type=ExistingFile())
@click.argument("other", type=ExistingFile(), required=False)
@option(
    "-md", "--model-draft", "--draft-model", section="Model", type=ExistingFile(), help="Check a draft model or heads."
)
@option(
    "--sha256",
    section="Model",
    is_flag=False,
    flag_value=_ONLY_PRINT,
    callback=_check_hash,
    metavar="[HEX]",
    help="Print the file's checksum; with HEX, fail if it is another.",
)
@comparison_options
@terminal_options
@option("--json", "as_json", section="Output", is_flag=True, help="Print one JSON object.")
def inspect(
    file: Path,
    other: Path | None,
    model_draft: Path | None,
    sha256: str | None,
    comparison: ComparisonSettings,
    terminal: Terminal,
    as_json: bool,
) -> None:
    """Show what a GGUF file holds, and whether a draft model fits it.

    Only the header is read; -md also loads both vocabularies. With OTHER, a model of the same vocabulary such as
    FILE quantized, both are evaluated on a text: perplexities, KL divergence, agreement, error by tensor.
    """
    if other is not None:
        if model_draft is not None or sha256 is not None:
            raise click.UsageError("comparing two models goes without -md and --sha256")
        _compare(file, other, comparison, terminal, as_json=as_json)
        return
    facts = summarise(file, read_header(file))
    if sha256 is not None:
        facts["sha256"] = file_sha256(file)
    problem: SpecrunError | None = None
    if model_draft is not None:
        draft_facts = summarise(model_draft, read_header(model_draft))
        problem = _pair_problem(file, model_draft)
        facts["pair"] = {"draft": draft_facts, "fits": problem is None, "reason": str(problem) if problem else None}
    if as_json:
        terminal.answer(json.dumps(facts, ensure_ascii=True) + "\n")
    else:
        _print(terminal, facts)
    _check_sum(file, sha256, facts.get("sha256"))
    if problem is not None:
        raise problem


def _compare(file: Path, other: Path, settings: ComparisonSettings, terminal: Terminal, *, as_json: bool) -> None:
    one, two = (summarise(path, read_header(path)) for path in (file, other))
    found = compare_files(file, other, settings, terminal)
    if as_json:
        terminal.answer(json.dumps({"first": one, "second": two, "comparison": found}, ensure_ascii=True) + "\n")
    else:
        print_comparison(terminal, one, two, found)


def _pair_problem(target: Path, draft: Path) -> SpecrunError | None:
    """Return why the pair does not fit, by the rule that drafting itself applies."""
    from specrun.bindings.model import Model
    from specrun.runtime.heads.head_check import check_head, is_head
    from specrun.runtime.pairing import check_blocks, check_pair, check_rollback

    with Model(target) as one:
        try:
            check_rollback(one)
            if is_head(draft):
                check_head(draft, one)
                return None
        except SpecrunError as error:
            return error
        with Model(draft) as other:
            try:
                check = check_blocks if other.nextn.alone else check_pair
                check(one, other)
            except SpecrunError as error:
                return error
    return None


def _print(terminal: Terminal, facts: dict[str, Any]) -> None:
    print_facts(terminal, "model", describe_summary(facts))
    print_table(terminal, "tensors", ("type", "tensors", "parameters", "size"), tensor_rows(facts))
    pair = facts.get("pair")
    if pair is None:
        return
    print_facts(terminal, "draft model", describe_summary(pair["draft"]))
    if pair["fits"]:
        terminal.answer("The pair fits: the draft model can draft for this target.\n")
        if pair["draft"]["parameters"] > facts["parameters"]:
            terminal.warn("the draft model is larger than the target: were they swapped?")


def _check_sum(file: Path, wanted: str | None, found: str | None) -> None:
    if wanted is not None and wanted != _ONLY_PRINT and wanted.lower() != found:
        raise MalformedFileError(f"{file} has the SHA-256 {found}, not {wanted.lower()}: get the file again")
