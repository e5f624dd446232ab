"""Options about models: the target and the drafter, their devices, contexts and templates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.machine.placement import Placement, placing
from specrun.bindings.models.rope_scaling import RopeScaling
from specrun.bindings.models.trial import trusting_files
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
from specrun.cli.options.types import FILE, MAX_COUNT, SHARE, LayerCountType, ShapeType
from specrun.cli.terminal.screen import bytes_text
from specrun.cli.terminal.terminal import one_line
from specrun.runtime.acceptance import build_rule, rule_names
from specrun.runtime.engine import RuntimeOptions
from specrun.runtime.language import METHODS
from specrun.runtime.memory import LayerCount
from specrun.runtime.round import BackendSampling, Shape

if TYPE_CHECKING:
    from specrun.bindings.machine.devices import Device


# == Devices of this machine and of others (--rpc) =================================================


_SPLIT_MODES = ("none", "layer", "row", "tensor")


def device_rows(found: list[Device]) -> list[tuple[str, ...]]:
    """Return what a table says of devices: name, description, kind, free memory, memory."""
    return [
        (
            device.name,
            one_line(device.description),
            device.kind if device.worker is None else "worker",
            bytes_text(device.memory_free),
            bytes_text(device.memory_total),
        )
        for device in found
    ]


def placement_of(values: dict[str, Any]) -> Placement:
    """Take what is said about devices out of the options' values, and return it.

    Until the end of the command models are opened there. With --list-devices the command ends.
    """
    draft, override = values.pop("device_draft"), values.pop("override_tensor")
    names, split = values.pop("device"), values.pop("tensor_split")
    placement = Placement(
        rpc=tuple(worker for text in values.pop("rpc") for worker in _listed(text)),
        devices=None if names is None else _listed(names),
        devices_draft=None if draft is None else _listed(draft),
        split_mode=values.pop("split_mode"),
        tensor_split=() if split is None else _shares(split),
        main_gpu=values.pop("main_gpu"),
        override_tensors=tuple(pair for text in override for pair in _overrides(text)),
    )
    context = click.get_current_context()
    if values.pop("list_devices"):
        _list_devices(placement)
        context.exit()
    context.with_resource(placing(placement))
    return placement


def _list_devices(placement: Placement) -> None:
    from specrun.bindings.machine.devices import devices

    click.echo("Available devices:")
    for name, description, kind, free, memory in device_rows(devices(placement.rpc)):
        click.echo(f"  {name}: {description} ({kind}, {memory}, {free} free)")


def _listed(text: str) -> tuple[str, ...]:
    """Return the parts of "a,b"; raises OptionError for none and for empty ones."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise OptionError(f"{text!r} is not a list of names, separated by commas")
    return parts


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.replace("/", ",").split(","))
    except ValueError:
        raise OptionError(f"the tensor split {text!r} is not shares such as 3,1") from None


def _overrides(text: str) -> list[tuple[str, str]]:
    """Return (pattern, device) of "PATTERN=DEVICE,PATTERN=DEVICE"."""
    pairs = []
    for part in text.split(","):
        pattern, equals, device = part.rpartition("=")
        if not (equals and pattern and device):
            example = "PATTERN=DEVICE, such as 'ffn_.*_exps=CPU'"
            raise OptionError(f"--override-tensor {part!r} is not {example}")
        pairs.append((pattern, device))
    return pairs


DEVICE_OPTIONS = (
    EVALUATION.option(
        "--rpc HOST:PORT,...",
        "Workers (specrun worker) whose devices are used, too.",
        multiple=True,
    ),
    EVALUATION.option(
        "-dev, --device NAME,...",
        "The devices that layers go to, or none.",
        show_default="all of --rpc and every GPU",
    ),
    EVALUATION.option(
        "-devd, --device-draft NAME,...",
        "The devices for a draft model, and the first one's for heads.",
        show_default="the target's",
    ),
    EVALUATION.flag("--list-devices", "Show the devices, those of --rpc among them, and exit."),
    EVALUATION.option(
        "-sm, --split-mode MODE",
        "How a model is spread over devices: none, one has it all; layer, whole layers; row and "
        "tensor, cut matrices, where devices can.",
        click.Choice(_SPLIT_MODES),
        default="layer",
    ),
    EVALUATION.option(
        "-ts, --tensor-split N,...",
        "The devices' shares of the target, such as 3,1.",
        show_default="by their free memory",
    ),
    EVALUATION.option(
        "-mg, --main-gpu N",
        "The device, of those in use, that has it all with --split-mode none.",
        click.IntRange(0, 1024),
        default=0,
    ),
    EVALUATION.option(
        "-ot, --override-tensor PATTERN=DEVICE,...",
        "Where tensors go whose names a pattern is found in: 'ffn_.*_exps=CPU' keeps experts here.",
        multiple=True,
    ),
    EVALUATION.option(
        "-kvo/-nkvo, --kv-offload/--no-kv-offload",
        "Keep keys and values where layers are computed.",
        default=True,
    ),
)


# == RoPE scaling: positions stretched beyond the trained context ==================================


def _option(usage: str, help: str, kind: click.ParamType[Any], **attributes: Any) -> Decorator:  # noqa: ANN401 - click's
    return EVALUATION.option(usage, help, kind, show_default="the model's", **attributes)


ROPE_OPTIONS: tuple[Decorator, ...] = (
    _option(
        "--rope-scaling",
        "How rotary positions are stretched for contexts longer than the model was trained for.",
        click.Choice(["none", "linear", "yarn"]),
    ),
    _option(
        "--rope-scale X",
        "How many times longer the context becomes; -c may then exceed what the model was trained "
        "for.",
        click.FLOAT,
    ),
    _option(
        "--rope-freq-base X",
        "Base of the rotary frequencies; a larger one stretches positions too.",
        click.FLOAT,
        default=0.0,
    ),
    EVALUATION.option("--rope-freq-scale X", "Short for --rope-scale of 1/X, as 0.5.", click.FLOAT),
    _option("--yarn-orig-ctx N", "The context that YaRN stretches.", click.INT, default=0),
    *(
        _option(f"--yarn-{name} X", help, click.FLOAT, default=-1.0)
        for name, help in (
            ("ext-factor", "YaRN's mix of interpolation (0) and extrapolation (1)."),
            ("attn-factor", "YaRN's scale of attention."),
            ("beta-slow", "YaRN: rotations up to which frequencies are interpolated."),
            ("beta-fast", "YaRN: rotations from which frequencies are kept."),
        )
    ),
)


def rope_scaling(values: dict[str, Any]) -> RopeScaling:
    """Take the options' values out of `values`, and return what they ask for."""
    kind, scale = values.pop("rope_scaling"), values.pop("rope_scale")
    base, freq_scale = values.pop("rope_freq_base"), values.pop("rope_freq_scale")
    others = {name: values.pop(name) for name in list(values) if name.startswith("yarn_")}
    if scale is not None and freq_scale is not None:
        raise click.UsageError(
            "--rope-scale and --rope-freq-scale say the same thing: give one of them"
        )
    if freq_scale is not None:
        if not 0.0 < freq_scale <= 1.0:
            raise OptionError(
                f"--rope-freq-scale is {freq_scale:g}: give a number above 0 and up to 1, such "
                "as 0.5"
            )
        scale = 1.0 / freq_scale
    if scale is not None and not scale >= 1.0:
        raise OptionError(f"--rope-scale is {scale:g}: give 1 (not stretched) or more, such as 2")
    return RopeScaling(kind=kind or "model", scale=scale or 0.0, freq_base=base, **others)


# == Models ========================================================================================


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
