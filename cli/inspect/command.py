"""`specrun inspect`: the content of a GGUF file, its fit with a drafter, and comparisons."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import MalformedFileError, OutOfMemoryError, SpecrunError
from specrun.bindings.gguf import read_header
from specrun.cli.inspect.memory import (
    asked_or,
    fit_cards,
    memory_facts,
    print_memory,
)
from specrun.cli.inspect.summary import describe_summary, file_sha256, summarise, tensor_rows
from specrun.cli.options.group import MODEL, Section, SectionedCommand, by_option, option_group
from specrun.cli.options.model import MODEL_DRAFT, attention_options, trust_option
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.options.types import FILE, LAYER_COUNT, MODEL_FILE, SIZES
from specrun.cli.terminal.screen import byte_progress, bytes_text, print_facts, print_table
from specrun.cli.terminal.terminal import Terminal, read_text
from specrun.runtime.memory import LayerCount

# == Options =======================================================================================


_COMPARISON, _NOISE, _MEMORY = map(
    Section, ("Comparison of two models", "Batch noise of one model", "Memory")
)
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_ONLY_PRINT = "print"


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """The text and its evaluation, the cards of --memory, and `fields` of `ContextOptions`."""

    text_file: Path | None = _COMPARISON.setting(
        "-f, --file",
        "Evaluate the text of this file.",
        FILE,
        dest="text_file",
        show_default="a short fixed text",
    )
    ctx_size: int = _COMPARISON.setting(
        "-c, --ctx-size N",
        "The number of tokens in a chunk. Its second half is scored.",
        click.IntRange(8, 2**20),
        default=512,
    )
    chunks: int = _COMPARISON.setting(
        "--chunks N",
        "The most chunks to evaluate.",
        click.IntRange(0),
        default=0,
        show_default="all",
    )
    threads: int = by_option(_COMPARISON.threads("The number of threads."))
    gpu_layers: LayerCount = _COMPARISON.setting(
        "-ngl, --gpu-layers", "The number of layers on the GPU.", LAYER_COUNT, default="0"
    )
    batch_noise: bool = _NOISE.setting(
        "--batch-noise",
        "Measure how much distributions change with the number of tokens in an evaluation "
        "(with -f, -t and -ngl as above).",
        is_flag=True,
    )
    positions: int = _NOISE.setting(
        "-n, --positions N", "The most positions to compare.", click.IntRange(16), default=256
    )
    fields: dict[str, Any] = by_option(*attention_options(_NOISE))
    memory: tuple[int, ...] | None = _MEMORY.setting(
        "--memory SIZE,...",
        "Show the parts that fit into cards of these sizes, such as 8G,12G. The cards need not be "
        "in this machine. cards: 8G,12G,16G,24G. -c, -ngl, -fa, -ctk and -ctv have their "
        "meaning of specrun chat; without -c and -ngl the most that fits is chosen.",
        SIZES,
    )
    gpu_layers_draft: LayerCount = _MEMORY.setting(
        "-ngld, --gpu-layers-draft",
        "The number of the draft model's layers on the card.",
        LAYER_COUNT,
        default="auto",
    )


# == The command ===================================================================================


_EPILOG = """\b
Examples:
  specrun inspect target.gguf
  specrun inspect target.gguf -md small.gguf      exit code 4 if they do not fit
  specrun inspect target.gguf -md small.gguf --memory 8G      the parts that fit into 8 GiB
  specrun inspect target.gguf target-q4.gguf -f text.txt      the loss by quantizing
  specrun inspect target.gguf -f text.txt --batch-noise       changes by rounding with drafts
  specrun inspect target.gguf --sha256            print the checksum
  specrun inspect target.gguf --sha256 9f86d0...  exit code 3 if it differs
"""


class _InspectCommand(SectionedCommand):
    """Lets --sha256 stand before the file without taking it for the checksum."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, `--sha256 FILE` as `--sha256= FILE`."""
        if "--sha256" in args:
            place = args.index("--sha256")
            if args[place + 1 :] == [] or Path(args[place + 1]).exists():
                args[place] = f"--sha256={_ONLY_PRINT}"
        return super().parse_args(ctx, args)


def _check_hash(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    if value is not None and value != _ONLY_PRINT and not _HASH.fullmatch(value):
        raise click.BadParameter(f"{value!r} is not a SHA-256: 64 hexadecimal digits")
    return value


@click.command(cls=_InspectCommand, epilog=_EPILOG)
@click.argument("file", type=MODEL_FILE, metavar="[FILE]", required=False, help="The GGUF file.")
@click.argument(
    "other",
    type=MODEL_FILE,
    metavar="[OTHER]",
    required=False,
    help="A model of the same vocabulary to compare with it.",
)
@MODEL.model("-m, --model", "The model, instead of FILE.", allow_from_autoenv=False)
@MODEL.model(MODEL_DRAFT, "Check whether this draft model or these heads fit.")
@MODEL.option(
    "--sha256 [HEX]",
    "Print the file's checksum. With HEX, fail if they differ.",
    is_flag=False,
    flag_value=_ONLY_PRINT,
    callback=_check_hash,
)
@option_group("settings", EvaluationSettings)
@trust_option
@terminal_options
@json_option()
def inspect(
    file: Path | None,
    other: Path | None,
    model: Path | None,
    model_draft: Path | None,
    sha256: str | None,
    settings: EvaluationSettings,
    terminal: Terminal,
) -> None:
    """Show the contents of a GGUF file, and whether a draft model fits it.

    Only the header is read; -md also loads both vocabularies. With OTHER, a model of the same
    vocabulary such as FILE quantized, both are evaluated on a text: perplexities, KL divergence,
    agreement, error by tensor. With --batch-noise, FILE alone is evaluated on it, by one token at
    a time and by several. With --memory, the parts that fit into cards of these sizes.
    """
    named = file or model
    if named is None or (file is not None and model is not None):
        raise click.UsageError("name one model: specrun inspect FILE, or -m FILE")
    alone = model_draft is None and sha256 is None
    if settings.memory is not None:
        if other is not None or settings.batch_noise or sha256 is not None:
            raise click.UsageError("--memory goes without OTHER, --batch-noise and --sha256")
        _plan_memory(named, model_draft, settings, terminal)
    elif settings.batch_noise:
        if other is not None or not alone:
            raise click.UsageError("--batch-noise goes without OTHER, -md and --sha256")
        _measure_noise(named, settings, terminal)
    elif other is not None:
        if not alone:
            raise click.UsageError("comparing two models goes without -md and --sha256")
        _compare(named, other, settings, terminal)
    else:
        _show_header(named, model_draft, sha256, terminal)


# == The header, and the pair ======================================================================


def _show_header(
    file: Path, model_draft: Path | None, sha256: str | None, terminal: Terminal
) -> None:
    """Show a file's header, whether a drafter fits it, and whether its hash is the given one."""
    facts = summarise(file, read_header(file))
    if sha256 is not None:
        facts["sha256"] = file_sha256(file)
    problem: SpecrunError | None = None
    if model_draft is not None:
        remark, draft = "", summarise(model_draft, read_header(model_draft))
        try:
            remark = _pair_remark(file, model_draft)
        except SpecrunError as error:
            problem = error
        reason = None if problem is None else str(problem)
        facts["pair"] = {
            "draft": draft,
            "fits": problem is None,
            "reason": reason,
            "remark": remark,
        }
    if terminal.as_json:
        terminal.answer_json(facts)
    else:
        _print(terminal, facts)
    if sha256 not in (None, _ONLY_PRINT) and sha256.lower() != facts["sha256"]:
        raise MalformedFileError(
            f"{file} has the SHA-256 {facts['sha256']}, not {sha256.lower()}: get the file again"
        )
    if problem is not None:
        raise problem


def _print(terminal: Terminal, facts: dict[str, Any]) -> None:
    print_facts(terminal, "model", describe_summary(facts))
    print_table(terminal, "tensors", ("type", "tensors", "parameters", "size"), tensor_rows(facts))
    pair = facts.get("pair")
    if pair is None:
        return
    print_facts(terminal, "draft model", describe_summary(pair["draft"]))
    if pair["fits"]:
        terminal.answer("The pair fits: the draft model can draft for this target.\n")
        if pair["remark"]:
            terminal.answer(f"{pair['remark']}.\n")
        if pair["draft"]["parameters"] > facts["parameters"]:
            terminal.warn("the draft model is larger than the target: were they swapped?")


def _pair_remark(target: Path, draft: Path) -> str:
    """Return a remark on how the pair drafts, or ""; raises the errors of drafting itself."""
    from specrun.bindings.contexts import ASSISTANT_ARCHITECTURE, BLOCK_ARCHITECTURE
    from specrun.bindings.gguf import read_header
    from specrun.bindings.models.model import Model
    from specrun.runtime.drafters.dflash.file import BlockFile
    from specrun.runtime.drafters.draft_model import DraftPair
    from specrun.runtime.drafters.eagle import check_head, is_head
    from specrun.runtime.drafters.mtp import check_assistant
    from specrun.runtime.language import Expression
    from specrun.runtime.models import check_blocks

    with Model(target) as first:
        if read_header(draft).architecture == BLOCK_ARCHITECTURE:
            BlockFile.read(draft, first)
            return ""
        if read_header(draft).architecture == ASSISTANT_ARCHITECTURE:
            check_assistant(draft, first)
            return ""
        if is_head(draft):
            check_head(draft, first)
            return ""
        with Model(draft) as other:
            if other.nextn.alone:
                check_blocks(first, other)
                return ""
            return DraftPair.of(first, other, Expression("draft")).remark


# == Memory: parts that fit into cards of given sizes ==============================================


def _plan_memory(
    file: Path, draft: Path | None, settings: EvaluationSettings, terminal: Terminal
) -> None:
    """Show plans for each card; without -c and -ngl, the most that fits is chosen."""
    n_ctx = asked_or(0, "ctx_size", settings.ctx_size)
    layers = asked_or("auto", "gpu_layers", settings.gpu_layers)
    context = ContextOptions(n_ctx=n_ctx, **settings.fields)
    with terminal.meanwhile("counting ..."):
        cards = fit_cards(
            file, draft, settings.memory or (), context, layers, settings.gpu_layers_draft
        )
    fits = any(fitted.plan.fits for fitted in cards)
    if terminal.as_json:
        facts = {"file": str(file), "draft": draft and str(draft), "memory": memory_facts(cards)}
        terminal.answer_json(facts)
    else:
        print_memory(terminal, cards)
        chosen = ["these layers by itself"] * (layers == "auto")
        chosen += ["this context with -c 0"] * (n_ctx == 0)
        if chosen and fits:
            terminal.answer(f"A chat takes {' and '.join(chosen)}.\n")
    if not fits:
        raise OutOfMemoryError(cards[-1].refusal)


# == Batch noise: how the distributions depend on the tokens of an evaluation ======================


def _measure_noise(file: Path, settings: EvaluationSettings, terminal: Terminal) -> None:
    """Show how far distributions move with the width of an evaluation (bench/batch_noise.py)."""
    from specrun.bench.batch_noise import NoiseOptions, measure_batch_noise

    facts = summarise(file, read_header(file))
    name, text = _text_of(settings)
    context = ContextOptions(n_threads=settings.threads, **settings.fields)
    options = NoiseOptions(settings.positions, context, settings.gpu_layers)

    def show(done: int, total: int) -> None:
        terminal.passing(f"evaluated {done} of {total} times")

    with terminal.meanwhile():
        measured = measure_batch_noise(file, text, options, show)
    found = {"text": name, **dataclasses.asdict(measured)}
    if terminal.as_json:
        terminal.answer_json({**facts, "batch_noise": found})
    else:
        print_noise(terminal, file, found)


def _text_of(settings: EvaluationSettings) -> tuple[str, str]:
    """Return the name of the text, "fixed" without -f, and the text."""
    from specrun.convert.conversion import FIXED_TEXT

    if settings.text_file is None:
        return "fixed", FIXED_TEXT
    return str(settings.text_file), read_text(settings.text_file)


def _shown_text(name: str) -> str:
    return "the fixed text" if name == "fixed" else name


def print_noise(terminal: Terminal, file: Path, found: dict[str, Any]) -> None:
    """Print the figures by width, their meaning, and those of a fixed shape."""
    figures = ("mean nats", "largest", "mean variation", "largest", "other first token")
    head = ("at a time", *figures, "greedy texts part")
    rows = [
        (
            str(noise["width"]),
            f"{noise['logprob_mean']:.2g}",
            f"{noise['logprob_largest']:.2g}",
            f"{noise['variation_mean']:.2g}",
            f"{noise['variation_largest']:.2g}",
            f"{100 * noise['other_top']:.2f} %",
            f"none in {noise['n_positions']:,}"
            if noise["parts_after"] is None
            else f"after {noise['parts_after']:,.0f}",
        )
        for noise in found["widths"]
    ]
    text, n_before = _shown_text(found["text"]), found["n_before"]
    where = f"{found['n_positions']:,} positions of {text} after {n_before} tokens"
    print_table(
        terminal,
        f"{file}: distributions against those of one token at a time ({where})",
        head,
        rows,
    )
    bits = found["fixed_shape"]
    line = f"fixed shape of {bits['width']}: "
    if bits["left_out"]:
        line += f"left out, since {bits['left_out']}"
    else:
        line += f"equal bits at {bits['n_equal']:,} of {bits['n_positions']:,} positions"
        if bits["n_equal"] != bits["n_positions"]:
            line += f"; logits differ by up to {bits['largest']:.2g} nats"
    terminal.answer(f"{line}\n")
    terminal.answer(
        "Kernels round by their number of tokens, so drafts move the target's distributions by "
        "this much here: nats of all tokens' log-probabilities, total variation, and how "
        "often another token is the most likely. Greedy texts are expected to part after 1 / that "
        "share, in tokens.\n"
    )


# == Comparison of two models: perplexities, KL divergence, errors by tensor =======================


_SHOWN_TENSORS = 10


def _compare(file: Path, other: Path, settings: EvaluationSettings, terminal: Terminal) -> None:
    """Compare two models on a text; raises PairError for different vocabularies."""
    from specrun.bench.model_comparison import ComparisonOptions, compare_models, tensor_errors

    first, second = (summarise(path, read_header(path)) for path in (file, other))
    name, text = _text_of(settings)
    options = ComparisonOptions(
        n_ctx=settings.ctx_size,
        n_chunks=settings.chunks,
        n_threads=settings.threads,
        n_gpu_layers=settings.gpu_layers,
    )

    def show(done: int, total: int) -> None:
        terminal.passing(f"chunk {done} of {total}")

    with terminal.meanwhile():
        compared = compare_models(file, other, text, options, show)
    with byte_progress(terminal, "comparing tensors") as progress:
        errors = [dataclasses.asdict(error) for error in tensor_errors(file, other, progress)]
    found = {"text": name, **dataclasses.asdict(compared), "tensor_errors": errors}
    if terminal.as_json:
        terminal.answer_json({"first": first, "second": second, "comparison": found})
    else:
        print_comparison(terminal, first, second, found)


def print_comparison(
    terminal: Terminal, first: dict[str, Any], other: dict[str, Any], found: dict[str, Any]
) -> None:
    """Print both files side by side, then the figures, then the tensors that are furthest off."""
    summary = found["summary"]
    perplexities = (summary[which] for which in ("original", "other"))
    rows = [
        ("file", first["file"], other["file"]),
        ("size", bytes_text(first["file_bytes"]), bytes_text(other["file_bytes"])),
        ("file type", str(first["file_type"]), str(other["file_type"])),
        ("bits per weight", f"{first['bits_per_weight']:.2f}", f"{other['bits_per_weight']:.2f}"),
        ("perplexity", *(f"{each['value']:.4f} +- {each['error']:.2g}" for each in perplexities)),
    ]
    print_table(terminal, "models", ("", "first", "second"), rows)
    chunks = f"{found['n_chunks']:,} chunks of {found['n_ctx']:,}"
    same = f"{100 * summary['same_top']:.2f} +- {100 * summary['top_error']:.2f} %"
    facts = {
        "scored": f"{summary['n_tokens']:,} tokens of {_shown_text(found['text'])} ({chunks})",
        "KL divergence, mean": f"{summary['kl_mean']:.3g} +- {summary['kl_error']:.2g} nats",
        "KL divergence, median": f"{summary['kl_median']:.3g}",
        "KL divergence, 99 %": f"{summary['kl_99']:.3g}",
        "KL divergence, largest": f"{summary['kl_largest']:.3g}",
        "same first token": same,
    }
    print_facts(terminal, "the second against the first", facts)
    _print_tensors(terminal, found["tensor_errors"])


def _print_tensors(terminal: Terminal, errors: list[dict[str, Any]]) -> None:
    compared = [error for error in errors if error["relative_rms"] is not None]
    changed = sorted(
        (error for error in compared if error["relative_rms"] > 0),
        key=lambda error: -error["relative_rms"],
    )
    rows = [
        (error["name"], error["original_type"], error["other_type"], f"{error['relative_rms']:.3g}")
        for error in changed[:_SHOWN_TENSORS]
    ]
    if rows:
        counts = f"{len(changed):,} of {len(compared):,} differ"
        head = ("tensor", "first", "second", "relative RMS error")
        print_table(terminal, f"tensors furthest off ({counts}; --json has all)", head, rows)
    else:
        terminal.answer(f"All {len(compared):,} tensors have the same numbers.\n")
    for error in errors:
        if error["relative_rms"] is None:
            terminal.warn(f"{error['name']} was not compared: {error['note']}")
