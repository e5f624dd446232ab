"""Options about models: which target and drafter, and how they are loaded and evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.machine.placement import Placement
from specrun.bindings.models.trial import trusting_files
from specrun.cli.options.devices import DEVICE_OPTIONS, placement_of
from specrun.cli.options.group import (
    DRAFTING,
    EVALUATION,
    MODEL,
    TEMPLATE,
    Decorator,
    Section,
    option_group,
    outvoted,
)
from specrun.cli.options.rope import ROPE_OPTIONS, rope_scaling
from specrun.cli.options.types import FILE, MAX_COUNT, SHARE, LayerCountType, ShapeType
from specrun.runtime.acceptance import build_rule, rule_names
from specrun.runtime.engine import RuntimeOptions
from specrun.runtime.language import METHODS
from specrun.runtime.memory import LayerCount
from specrun.runtime.round import BackendSampling, Shape

MODEL_DRAFT = "-md, --model-draft, --draft-model"
_MAX_THREADS = 1024
_UNSET = {"model": None, "demo": False}
_DEFAULTS = RuntimeOptions()


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """How to draft: an expression, or the llama.cpp options that are rewritten to one."""

    model_draft: Path | None
    drafter: str | None
    spec_type: str | None
    spec_draft_n_max: int | None
    spec_draft_p_min: float | None
    accept: str
    reference: Path | None = None
    shape: Shape | None = None
    no_profile: bool = False

    @property
    def is_named(self) -> bool:
        """Whether anything says how to draft; otherwise a profile does, or `auto`."""
        said = (self.drafter, self.model_draft, self.spec_type, self.reference)
        limits = (self.spec_draft_n_max, self.spec_draft_p_min)
        return any(value is not None for value in (*said, *limits))


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Which target, and how models are loaded and evaluated."""

    model: Path | None
    demo: bool
    context: ContextOptions
    placement: Placement
    gpu_layers: LayerCount
    gpu_layers_draft: LayerCount
    mmap: bool
    mlock: bool
    backend_sampling: BackendSampling

    def runtime_options(self) -> dict[str, Any]:
        """Return the options of `Runtime` that say how models are loaded and evaluated."""
        return {
            "context": self.context,
            "placement": self.placement,
            "n_gpu_layers": self.gpu_layers,
            "n_gpu_layers_draft": self.gpu_layers_draft,
            "use_mmap": self.mmap,
            "use_mlock": self.mlock,
            "backend_sampling": self.backend_sampling,
        }


@dataclass(frozen=True, slots=True)
class TemplateSettings:
    """Which chat template renders messages; all unset: the model's own."""

    chat_template: str | None
    chat_template_file: Path | None
    no_chat_template: bool


def _removed(name: str, advice: str) -> Decorator:
    """Return a hidden option that only says what replaces it."""

    def refuse(context: click.Context, _option: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise click.UsageError(
                f"{name} was removed, here as in llama.cpp: use {advice}", context
            )

    return DRAFTING.option(
        name,
        "",
        dest=f"removed_{name.strip('-').replace('-', '_')}",
        hidden=True,
        expose_value=False,
        allow_from_autoenv=False,
        callback=refuse,
    )


def _load_settings(**values: Any) -> LoadSettings:  # noqa: ANN401 - as click passes them
    lost = outvoted(["model"], by=["demo"]) | outvoted(["demo"], by=["model"])
    context, placement = _context_options(values), placement_of(values)
    kept = {**values, **{name: _UNSET[name] for name in lost}}
    return LoadSettings(**kept, context=context, placement=placement)


def _context_options(values: dict[str, Any]) -> ContextOptions:
    """Take what is said about contexts out of the options' values, and return it."""
    threads, threads_batch = values.pop("threads"), values.pop("threads_batch")
    return ContextOptions(
        n_ctx=values.pop("ctx_size"),
        n_batch=values.pop("batch_size"),
        n_ubatch=values.pop("ubatch_size"),
        n_threads=max(0, threads),  # -1 leaves it to us, as in llama.cpp
        n_threads_batch=max(0, threads_batch),
        flash_attention=values.pop("flash_attn"),
        cache_type_k=values.pop("cache_type_k"),
        cache_type_v=values.pop("cache_type_v"),
        offload_kv=values.pop("kv_offload"),
        rope=rope_scaling(values),
    )


def _draft_settings(**values: Any) -> DraftSettings:  # noqa: ANN401
    rewritten = ["model_draft", "spec_type", "spec_draft_n_max", "spec_draft_p_min"]
    lost = outvoted(rewritten, by=["drafter"]) | outvoted(["drafter"], by=rewritten)
    lost |= outvoted(["model_draft"], by=["demo"])
    return DraftSettings(**{**values, **dict.fromkeys(lost)})


def _trust(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        context.with_resource(trusting_files())


lora_option = MODEL.option(
    "--lora FILE[:SCALE]",
    "A LoRA adapter (GGUF) added to the target; repeatable. The drafter stays: acceptance tells.",
    multiple=True,
)

trust_option = MODEL.flag(
    "--trust",
    "Open files that were not seen before without trying them in another process first.",
    expose_value=False,
    callback=_trust,
)

shape_option = EVALUATION.option(
    "--shape",
    "Tokens in an evaluation of the target while it generates: free, as many as needed; pairs, "
    "at least two, because several threads sum a single token's attention in parts beyond 256 "
    "cells; fixed, always as many as the drafter needs at most; N: always N, so that the text is "
    "the same to the bit with every drafter that draws nothing.",
    ShapeType(),
    show_default="free; fixed where specrun tune found that no slower",
)


def attention_options(section: Section) -> list[Decorator]:
    """Return -fa, -ctk and -ctv, below a heading of the help."""
    flash = section.option(
        "-fa, --flash-attn",
        "Flash attention.",
        click.Choice(["on", "off", "auto"]),
        default=_DEFAULTS.context.flash_attention,
    )
    types = [
        section.option(
            f"-ct{letter}, --cache-type-{letter} TYPE",
            f"Number type of the cached {cached}.",
            default=default,
        )
        for letter, cached, default in (
            ("k", "keys", _DEFAULTS.context.cache_type_k),
            ("v", "values", _DEFAULTS.context.cache_type_v),
        )
    ]
    return [flash, *types]


load_options = option_group(
    "load",
    _load_settings,
    MODEL.model("-m, --model", "The target: a GGUF file, or a name of `specrun models`."),
    MODEL.flag("--demo", "The embedded target and drafter, instead of -m."),
    trust_option,
    EVALUATION.option(
        "-c, --ctx-size N",
        "Context size in tokens; 0: what fits into memory of what the model was trained with, "
        "which is also the most unless positions are stretched (--rope-scale).",
        click.IntRange(0, MAX_COUNT),
        default=_DEFAULTS.context.n_ctx,
    ),
    *ROPE_OPTIONS,
    EVALUATION.option(
        "-b, --batch-size N",
        "The most tokens of one evaluation.",
        click.IntRange(1, MAX_COUNT),
        default=_DEFAULTS.context.n_batch,
    ),
    EVALUATION.option(
        "-ub, --ubatch-size N",
        "The most tokens that are computed at once.",
        click.IntRange(1, MAX_COUNT),
        default=_DEFAULTS.context.n_ubatch,
    ),
    EVALUATION.option(
        "-t, --threads N",
        "Threads that evaluate single tokens.",
        click.IntRange(-1, _MAX_THREADS),
        default=-1,
        show_default="one a core, within the quota",
    ),
    EVALUATION.option(
        "-tb, --threads-batch N",
        "Threads that evaluate prompts and drafts.",
        click.IntRange(-1, _MAX_THREADS),
        default=-1,
        show_default="as -t",
    ),
    *attention_options(EVALUATION),
    *(
        EVALUATION.option(
            f"-ngl{short}, --gpu-layers{long}, --n-gpu-layers{long}",
            f"Layers of the {model} on the GPU; auto: as many as fit, with context and drafter.",
            LayerCountType(),
            default=default,
        )
        for short, long, model, default in (
            ("", "", "target", _DEFAULTS.n_gpu_layers),
            ("d", "-draft", "draft model", _DEFAULTS.n_gpu_layers_draft),
        )
    ),
    *DEVICE_OPTIONS,
    EVALUATION.option(
        "--mmap/--no-mmap",
        "Map model files into memory instead of reading them.",
        default=_DEFAULTS.use_mmap,
    ),
    EVALUATION.flag("--mlock", "Keep the target in RAM (not with --no-mmap)."),
    EVALUATION.option(
        "-bs, --backend-sampling",
        "Let the device cut rows of logits to the top k, so that no more of them is copied: auto "
        "with the whole target on a GPU.",
        click.Choice(["auto", "on", "off"]),
        default=_DEFAULTS.backend_sampling,
    ),
)


def _rules() -> str:
    """Return the names of all rules, those apart that change what the target would say."""
    names = rule_names()
    exact = [name for name in names if build_rule(name).exact]
    lossy = [name for name in names if name not in exact]
    return f"{', '.join(exact)}; not exact: {', '.join(lossy)}"


draft_options = option_group(
    "draft",
    _draft_settings,
    DRAFTING.model(
        MODEL_DRAFT,
        "What drafts: a draft model, heads (Medusa, Hydra, EAGLE) or NextN blocks; short for "
        '--drafter KIND("FILE").',
    ),
    DRAFTING.option(
        "--drafter EXPR",
        f"{', '.join(METHODS)}, with arguments as in draft(small.gguf, n=5).  "
        "[default: what specrun accelerate found, else auto; with --demo: draft]",
    ),
    DRAFTING.option(
        "--spec-type TYPE",
        "llama.cpp's name of a method: none, draft-simple, draft-eagle3, draft-mtp, ngram-simple; "
        "or prompt-lookup.",
    ),
    DRAFTING.option(
        "--spec-draft-n-max, --num-draft-tokens N",
        "The most tokens drafted in a round.  "
        "[default: as many as pay; prompt-lookup plans at most 15]",
        click.IntRange(1, 1024),
    ),
    DRAFTING.option(
        "--spec-draft-p-min, --draft-p-min P",
        "End a draft where the draft model is less certain than this.  [default: 0]",
        SHARE,
    ),
    DRAFTING.option(
        "--reference",
        "A text that answers may quote, read by prompt-lookup (which it implies) beside the "
        "conversation.",
        FILE,
    ),
    _removed("--draft", "--spec-draft-n-max"),
    _removed("--draft-n", "--spec-draft-n-max"),
    _removed("--draft-max", "--spec-draft-n-max"),
    _removed(
        "--draft-min", "--spec-draft-n-max for the length, --spec-draft-p-min to end drafts early"
    ),
    DRAFTING.option("--accept RULE", f"The acceptance rule: {_rules()}.", default=_DEFAULTS.accept),
    shape_option,
    DRAFTING.flag("--no-profile", "Leave out what specrun accelerate found for this file."),
)

template_options = option_group(
    "template",
    TemplateSettings,
    TEMPLATE.option("--chat-template JINJA", "The text of a chat template."),
    TEMPLATE.option("--chat-template-file", "A file with a chat template.", FILE),
    TEMPLATE.flag(
        "--no-chat-template", "Continue plain text instead of using the model's chat template."
    ),
)
