"""`specrun inspect`: the content of a GGUF file, its fit with a drafter, and comparisons."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import MalformedFileError, SpecrunError
from specrun.bindings.gguf import read_header
from specrun.cli.inspect.memory import (
    MemorySettings,
    fit_cards,
    hint_text,
    memory_facts,
    memory_options,
    print_memory,
    require_fitting,
    wished,
)
from specrun.cli.inspect.summary import describe_summary, file_sha256, summarise, tensor_rows
from specrun.cli.options.group import MODEL, Section, SectionedCommand, option_group
from specrun.cli.options.model import MODEL_DRAFT, attention_options, trust_option
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.options.types import FILE, LAYER_COUNT, MODEL_FILE
from specrun.cli.terminal.screen import byte_progress, bytes_text, print_facts, print_table
from specrun.cli.terminal.terminal import Terminal, read_text
from specrun.runtime.memory import LayerCount

# == Batch noise: how the distributions depend on the tokens of an evaluation ======================
#
# bench/batch_noise.py measures it.


_NOISE = Section("Batch noise of one model")


@dataclass(frozen=True, slots=True)
class NoiseSettings:
    """Whether batch noise is measured, at how many positions, and `fields` of the context."""

    batch_noise: bool
    positions: int
    fields: dict[str, Any]


noise_options = option_group(
    "noise",
    NoiseSettings,
    _NOISE.flag(
        "--batch-noise",
        "Measure how much the laws depend on how many tokens are evaluated at a time (-f, -t and "
        "-ngl as above).",
    ),
    _NOISE.option(
        "-n, --positions N", "The most positions to compare.", click.IntRange(16), default=256
    ),
    *attention_options(_NOISE),
)


def noise_of_file(
    file: Path,
    text_file: Path | None,
    threads: int,
    gpu_layers: LayerCount,
    settings: NoiseSettings,
    terminal: Terminal,
) -> dict[str, Any]:
    """Return the measurement, ready for JSON; raises as `measure_batch_noise` does."""
    from specrun.bench.batch_noise import NoiseOptions, measure_batch_noise
    from specrun.convert.conversion import FIXED_TEXT

    text = FIXED_TEXT if text_file is None else read_text(text_file)
    context = ContextOptions(
        n_threads=threads,
        **settings.fields,
    )
    options = NoiseOptions(settings.positions, context, gpu_layers)

    def show(done: int, total: int) -> None:
        terminal.passing(f"evaluated {done} of {total} times")

    try:
        found = measure_batch_noise(file, text, options, show)
    finally:
        terminal.passing("")
    return {
        "text": "fixed" if text_file is None else str(text_file),
        **dataclasses.asdict(found),
    }


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
            _parting(noise),
        )
        for noise in found["widths"]
    ]
    text = "the fixed text" if found["text"] == "fixed" else found["text"]
    where = f"{found['n_positions']:,} positions of {text} after {found['n_before']} tokens"
    print_table(
        terminal, f"{file}: laws against those of one token at a time ({where})", head, rows
    )
    terminal.answer(f"{_of_fixed_shape(found['fixed_shape'])}\n")
    terminal.answer(
        "Kernels round by how many tokens they are given, so drafts move the target's laws by this "
        "much on this machine: nats of all tokens' log-probabilities, total variation, and how "
        "often another token is the most likely. Greedy texts are expected to part after 1 / that "
        "share, in tokens.\n"
    )


def _parting(noise: dict[str, Any]) -> str:
    if noise["parts_after"] is None:
        return f"none in {noise['n_positions']:,}"
    return f"after {noise['parts_after']:,.0f}"


def _of_fixed_shape(bits: dict[str, Any]) -> str:
    shape, n_positions = f"fixed shape of {bits['width']}", bits["n_positions"]
    if bits["left_out"]:
        return f"{shape}: left out, since {bits['left_out']}"
    equal = f"{shape}: equal bits at {bits['n_equal']:,} of {n_positions:,} positions"
    if bits["n_equal"] == n_positions:
        return equal
    return f"{equal}; logits differ by up to {bits['largest']:.2g} nats"


# == Comparison of two models: perplexities, KL divergence, errors by tensor =======================


_COMPARISON = Section("Comparison of two models")


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """The text, and its evaluation."""

    text_file: Path | None
    ctx_size: int
    chunks: int
    threads: int
    gpu_layers: LayerCount


comparison_options = option_group(
    "comparison",
    ComparisonSettings,
    _COMPARISON.option(
        "-f, --file",
        "Evaluate the text of a file.",
        FILE,
        dest="text_file",
        show_default="a short fixed text",
    ),
    _COMPARISON.option(
        "-c, --ctx-size N",
        "Tokens of a chunk, of which the second half is scored.",
        click.IntRange(8, 2**20),
        default=512,
    ),
    _COMPARISON.option(
        "--chunks N",
        "The most chunks to evaluate.",
        click.IntRange(0),
        default=0,
        show_default="all",
    ),
    _COMPARISON.threads("Threads of the evaluation."),
    _COMPARISON.option("-ngl, --gpu-layers", "Layers on the GPU.", LAYER_COUNT, default="0"),
)


_SHOWN_TENSORS = 10


def compare_files(
    original: Path, other: Path, settings: ComparisonSettings, terminal: Terminal
) -> dict[str, Any]:
    """Return the comparison, ready for JSON; raises PairError for different vocabularies."""
    from specrun.bench.model_comparison import ComparisonOptions, compare_models, tensor_errors
    from specrun.convert.conversion import FIXED_TEXT

    text = FIXED_TEXT if settings.text_file is None else read_text(settings.text_file)
    options = ComparisonOptions(
        n_ctx=settings.ctx_size,
        n_chunks=settings.chunks,
        n_threads=settings.threads,
        n_gpu_layers=settings.gpu_layers,
    )

    def show(done: int, total: int) -> None:
        terminal.passing(f"chunk {done} of {total}")

    try:
        found = compare_models(original, other, text, options, show)
    finally:
        terminal.passing("")
    with byte_progress(terminal, "comparing tensors") as progress:
        errors = [dataclasses.asdict(error) for error in tensor_errors(original, other, progress)]
    return {
        "text": "fixed" if settings.text_file is None else str(settings.text_file),
        **dataclasses.asdict(found),
        "tensor_errors": errors,
    }


def print_comparison(
    terminal: Terminal, first: dict[str, Any], other: dict[str, Any], found: dict[str, Any]
) -> None:
    """Print both files side by side, then the figures, then the tensors that are furthest off."""
    rows = [
        ("file", first["file"], other["file"]),
        ("size", bytes_text(first["file_bytes"]), bytes_text(other["file_bytes"])),
        ("file type", str(first["file_type"]), str(other["file_type"])),
        ("bits per weight", f"{first['bits_per_weight']:.2f}", f"{other['bits_per_weight']:.2f}"),
        ("perplexity", *(_perplexity(found["summary"][which]) for which in ("original", "other"))),
    ]
    print_table(terminal, "models", ("", "first", "second"), rows)
    print_facts(terminal, "the second against the first", _facts(found))
    _print_tensors(terminal, found["tensor_errors"])


def _facts(found: dict[str, Any]) -> dict[str, str]:
    summary = found["summary"]
    text = "the fixed text" if found["text"] == "fixed" else found["text"]
    chunks = f"{found['n_chunks']:,} chunks of {found['n_ctx']:,}"
    same = f"{100 * summary['same_top']:.2f} +- {100 * summary['top_error']:.2f} %"
    return {
        "scored": f"{summary['n_tokens']:,} tokens of {text} ({chunks})",
        "KL divergence, mean": f"{summary['kl_mean']:.3g} +- {summary['kl_error']:.2g} nats",
        "KL divergence, median": f"{summary['kl_median']:.3g}",
        "KL divergence, 99 %": f"{summary['kl_99']:.3g}",
        "KL divergence, largest": f"{summary['kl_largest']:.3g}",
        "same first token": same,
    }


def _perplexity(measured: dict[str, float]) -> str:
    return f"{measured['value']:.4f} +- {measured['error']:.2g}"


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


_EPILOG = """\b
Examples:
  specrun inspect target.gguf
  specrun inspect target.gguf -md small.gguf      exit code 4 if they do not fit
  specrun inspect target.gguf -md small.gguf --memory 8G      what a card of 8 GiB holds
  specrun inspect target.gguf target-q4.gguf -f text.txt      what quantizing cost
  specrun inspect target.gguf -f text.txt --batch-noise       what drafts change by rounding
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
@click.argument("file", type=MODEL_FILE, metavar="[FILE]", required=False)
@click.argument("other", type=MODEL_FILE, metavar="[OTHER]", required=False)
@MODEL.model("-m, --model", "The model, in the place of FILE.", allow_from_autoenv=False)
@MODEL.model(MODEL_DRAFT, "Check a draft model or heads.")
@MODEL.option(
    "--sha256 [HEX]",
    "Print the file's checksum; with HEX, fail if it is another.",
    is_flag=False,
    flag_value=_ONLY_PRINT,
    callback=_check_hash,
)
@comparison_options
@noise_options
@memory_options
@trust_option
@terminal_options
@json_option()
def inspect(
    file: Path | None,
    other: Path | None,
    model: Path | None,
    model_draft: Path | None,
    sha256: str | None,
    comparison: ComparisonSettings,
    noise: NoiseSettings,
    memory: MemorySettings,
    terminal: Terminal,
    as_json: bool,
) -> None:
    """Show what a GGUF file holds, and whether a draft model fits it.

    Only the header is read; -md also loads both vocabularies. With OTHER, a model of the same
    vocabulary such as FILE quantized, both are evaluated on a text: perplexities, KL divergence,
    agreement, error by tensor. With --batch-noise, FILE alone is evaluated on it, by one token at
    a time and by several. With --memory, what of it fits into cards of these sizes.
    """
    file = _named_once(file, model)
    alone = model_draft is None and sha256 is None
    if memory.memory is not None:
        if other is not None or noise.batch_noise or sha256 is not None:
            raise click.UsageError("--memory goes without OTHER, --batch-noise and --sha256")
        layers, context = _context_asked(comparison, noise)
        _plan_memory(file, model_draft, memory, context, layers, terminal, as_json=as_json)
    elif noise.batch_noise:
        if other is not None or not alone:
            raise click.UsageError("--batch-noise goes without OTHER, -md and --sha256")
        _measure_noise(file, comparison, noise, terminal, as_json=as_json)
    elif other is not None:
        if not alone:
            raise click.UsageError("comparing two models goes without -md and --sha256")
        _compare(file, other, comparison, terminal, as_json=as_json)
    else:
        _show_header(file, model_draft, sha256, terminal, as_json=as_json)


def _context_asked(
    comparison: ComparisonSettings, noise: NoiseSettings
) -> tuple[LayerCount, ContextOptions]:
    """Return the layers on a GPU and the context that a memory plan is made for."""
    n_ctx, layers = wished(comparison.ctx_size, comparison.gpu_layers)
    context = ContextOptions(
        n_ctx=n_ctx,
        **noise.fields,
    )
    return layers, context


def _show_header(
    file: Path, model_draft: Path | None, sha256: str | None, terminal: Terminal, *, as_json: bool
) -> None:
    """Show a file's header, whether a drafter fits it, and whether its hash is the given one."""
    facts = summarise(file, read_header(file))
    if sha256 is not None:
        facts["sha256"] = file_sha256(file)
    problem: SpecrunError | None = None
    remark = ""
    if model_draft is not None:
        draft_facts = summarise(model_draft, read_header(model_draft))
        try:
            remark = _pair_remark(file, model_draft)
        except SpecrunError as error:
            problem = error
        facts["pair"] = {
            "draft": draft_facts,
            "fits": problem is None,
            "reason": str(problem) if problem else None,
            "remark": remark,
        }
    if as_json:
        terminal.answer(json.dumps(facts, ensure_ascii=True) + "\n")
    else:
        _print(terminal, facts)
    _check_sum(file, sha256, facts.get("sha256"))
    if problem is not None:
        raise problem


def _named_once(file: Path | None, model: Path | None) -> Path:
    if (file is None) == (model is None):
        raise click.UsageError("name one model: specrun inspect FILE, or -m FILE")
    found = file or model
    assert found is not None
    return found


def _plan_memory(
    file: Path,
    draft: Path | None,
    settings: MemorySettings,
    context: ContextOptions,
    layers: LayerCount,
    terminal: Terminal,
    *,
    as_json: bool,
) -> None:
    terminal.passing("counting ...")
    try:
        cards = fit_cards(file, draft, settings, context, layers)
    finally:
        terminal.passing("")
    if as_json:
        facts = {"file": str(file), "draft": draft and str(draft), "memory": memory_facts(cards)}
        terminal.answer(json.dumps(facts, ensure_ascii=True) + "\n")
    else:
        print_memory(terminal, cards)
        hint = hint_text(context.n_ctx, layers)
        if hint and any(fitted.plan.fits for fitted in cards):
            terminal.answer(f"{hint}\n")
    require_fitting(cards)


def _compare(
    file: Path, other: Path, settings: ComparisonSettings, terminal: Terminal, *, as_json: bool
) -> None:
    first, second = (summarise(path, read_header(path)) for path in (file, other))
    found = compare_files(file, other, settings, terminal)
    if as_json:
        facts = {"first": first, "second": second, "comparison": found}
        terminal.answer(json.dumps(facts, ensure_ascii=True) + "\n")
    else:
        print_comparison(terminal, first, second, found)


def _measure_noise(
    file: Path,
    comparison: ComparisonSettings,
    noise: NoiseSettings,
    terminal: Terminal,
    *,
    as_json: bool,
) -> None:
    facts = summarise(file, read_header(file))
    where = (comparison.text_file, comparison.threads, comparison.gpu_layers)
    found = noise_of_file(file, *where, noise, terminal)
    if as_json:
        terminal.answer(json.dumps({**facts, "batch_noise": found}, ensure_ascii=True) + "\n")
    else:
        print_noise(terminal, file, found)


def _pair_remark(target: Path, draft: Path) -> str:
    """Return a remark on how the pair drafts, or ""; raises the errors of drafting itself."""
    from specrun.bindings.models.model import Model
    from specrun.runtime.drafters.draft_model import DraftPair
    from specrun.runtime.drafters.eagle import check_head, is_head
    from specrun.runtime.language import Expression
    from specrun.runtime.models import check_blocks, check_rollback

    with Model(target) as first:
        check_rollback(first)
        if is_head(draft):
            check_head(draft, first)
            return ""
        with Model(draft) as other:
            if other.nextn.alone:
                check_blocks(first, other)
                return ""
            return DraftPair.of(first, other, Expression("draft")).remark


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


def _check_sum(file: Path, wanted: str | None, found: str | None) -> None:
    if wanted is not None and wanted != _ONLY_PRINT and wanted.lower() != found:
        raise MalformedFileError(
            f"{file} has the SHA-256 {found}, not {wanted.lower()}: get the file again"
        )
