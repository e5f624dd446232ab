"""Options about models: the target and the drafter, their devices, contexts and templates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import click

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.machine.placement import SplitMode, placing
from specrun.bindings.models.trial import trusting_files
from specrun.cli.options.group import (
    DRAFTING,
    EVALUATION,
    MODEL,
    TEMPLATE,
    Decorator,
    Section,
    by_option,
    declare,
    option_group,
    options_of,
    outvoted,
    with_fields,
)
from specrun.cli.options.types import (
    FILE,
    LAYER_COUNT,
    MAX_COUNT,
    MODEL_OR_FOLDER,
    ROOM,
    SHAPE,
    SHARE,
)
from specrun.cli.terminal.screen import bytes_text
from specrun.cli.terminal.terminal import one_line
from specrun.runtime.acceptance import build_rule, rule_names
from specrun.runtime.engine import RuntimeOptions
from specrun.runtime.language import METHODS
from specrun.runtime.round import Shape

# == Devices of this machine and of others (--rpc) =================================================


_DEFAULTS = RuntimeOptions()


def _loading(
    field: str,
    usage: str,
    help: str,
    kind: click.ParamType[Any] | None = None,
    **attributes: Any,  # noqa: ANN401 - click's
) -> Decorator:
    """Declare the option of a field of `RuntimeOptions`, which has the field's default."""
    default = attributes.setdefault("default", attrgetter(field)(_DEFAULTS))
    if default is None or default is False or default == ():
        del attributes["default"]
    return EVALUATION.option(usage, help, kind, field=field, **attributes)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else _listed(text)


def _listed(text: str) -> tuple[str, ...]:
    """Return the parts of "a,b"; raises OptionError for none and for empty ones."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise OptionError(f"{text!r} is not a list of names, separated by commas")
    return parts


def _shares(text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        return tuple(float(part) for part in text.replace("/", ",").split(","))
    except ValueError:
        raise OptionError(f"the tensor split {text!r} is not shares such as 3,1") from None


def _workers(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(worker for text in texts for worker in _listed(text))


def _overrides(texts: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return (pattern, device) of every "PATTERN=DEVICE,PATTERN=DEVICE"."""
    pairs = []
    for part in (part for text in texts for part in text.split(",")):
        pattern, equals, device = part.rpartition("=")
        if not (equals and pattern and device):
            example = "PATTERN=DEVICE, such as 'ffn_.*_exps=CPU'"
            raise OptionError(f"--override-tensor {part!r} is not {example}")
        pairs.append((pattern, device))
    return tuple(pairs)


DEVICE_OPTIONS = (
    _loading(
        "placement.rpc",
        "--rpc HOST:PORT,...",
        "Also use the devices of these workers (specrun worker).",
        multiple=True,
        read=_workers,
    ),
    _loading(
        "placement.devices",
        "-dev, --device NAME,...",
        "The devices for the layers, or none.",
        show_default="all of --rpc and every GPU",
        read=_names,
    ),
    _loading(
        "placement.devices_draft",
        "-devd, --device-draft NAME,...",
        "The devices for a draft model. Heads go to the first one.",
        show_default="the target's",
        read=_names,
    ),
    EVALUATION.flag("--list-devices", "Show the devices, with those of --rpc, and exit."),
    _loading(
        "placement.split_mode",
        "-sm, --split-mode MODE",
        "The way to split a model over devices. none: all on one; layer: whole layers; row, "
        "tensor: parts of matrices, if the devices support it.",
        click.Choice(get_args(SplitMode)),
    ),
    _loading(
        "placement.tensor_split",
        "-ts, --tensor-split N,...",
        "The devices' shares of the target, such as 3,1.",
        show_default="by their free memory",
        read=_shares,
    ),
    _loading(
        "placement.main_gpu",
        "-mg, --main-gpu N",
        "The device that holds the whole model with --split-mode none.",
        click.IntRange(0, 1024),
    ),
    _loading(
        "placement.override_tensors",
        "-ot, --override-tensor PATTERN=DEVICE,...",
        "Place tensors whose names match a pattern on a device. 'ffn_.*_exps=CPU' keeps "
        "experts in the CPU's memory.",
        multiple=True,
        read=_overrides,
    ),
    _loading(
        "context.offload_kv",
        "-kvo/-nkvo, --kv-offload/--no-kv-offload",
        "Keep keys and values on the devices of their layers.",
    ),
)


# == RoPE scaling: positions stretched beyond the trained context ==================================


def _stretching(
    name: str,
    usage: str,
    help: str,
    kind: click.ParamType[Any],
    **attributes: Any,  # noqa: ANN401 - click's
) -> Decorator:
    """Declare the option of a field of `RopeScaling`."""
    field = f"context.rope.{name}"
    return _loading(field, usage, help, kind, show_default="the model's", **attributes)


ROPE_OPTIONS: tuple[Decorator, ...] = (
    _stretching(
        "kind",
        "--rope-scaling",
        "The way to stretch rotary positions for contexts longer than the model was trained for.",
        click.Choice(["none", "linear", "yarn"]),
        default=None,
        read=lambda kind: kind or "model",
    ),
    _stretching(
        "scale",
        "--rope-scale X",
        "Stretch the context by this factor. -c may then exceed the trained context.",
        click.FLOAT,
        default=None,
    ),
    _stretching(
        "freq_base",
        "--rope-freq-base X",
        "The base of the rotary frequencies. A larger one stretches positions, too.",
        click.FLOAT,
    ),
    EVALUATION.option(
        "--rope-freq-scale X",
        "Short for --rope-scale with 1/X; 0.5 doubles the context.",
        click.FLOAT,
    ),
    _stretching(
        "yarn_orig_ctx",
        "--yarn-orig-ctx N",
        "The original context, which YaRN stretches.",
        click.INT,
    ),
    *(
        _stretching(f"yarn_{name.replace('-', '_')}", f"--yarn-{name} X", help, click.FLOAT)
        for name, help in (
            ("ext-factor", "YaRN's mix of interpolation (0) and extrapolation (1)."),
            ("attn-factor", "YaRN's scale of attention."),
            ("beta-slow", "YaRN: interpolate frequencies of at most this many rotations."),
            ("beta-fast", "YaRN: keep frequencies of at least this many rotations."),
        )
    ),
)


def _rope_scale(scale: float | None, freq_scale: float | None) -> float:
    """Return how many times longer the context becomes, 0 if no option names it."""
    if scale is not None and freq_scale is not None:
        raise click.UsageError(
            "--rope-scale and --rope-freq-scale have the same meaning: give one of them"
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
    return scale or 0.0


# == Models ========================================================================================


MODEL_DRAFT = "-md, --model-draft, --draft-model"
_EXACT = [name for name in rule_names() if build_rule(name).exact]
_LOSSY = [name for name in rule_names() if name not in _EXACT]

shape_option = EVALUATION.option(
    "--shape",
    "The number of tokens in each evaluation while the target generates. free: as many as "
    "needed. pairs: at least two, because attention of a single token is summed in another "
    "order beyond 256 cells. fixed: always the most that the drafter needs. N: always N, so "
    "that every drafter without random draws gives the same text to the bit.",
    SHAPE,
    show_default="free; fixed if specrun tune found it no slower",
)


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """The drafter: an expression, or llama.cpp options that are rewritten to one."""

    model_draft: Path | None = by_option(
        DRAFTING.model(
            MODEL_DRAFT,
            "The drafter's file: a draft model, heads (Medusa, Hydra, EAGLE) or NextN blocks; "
            'short for --drafter KIND("FILE").',
        )
    )
    drafter: str | None = DRAFTING.setting(
        "--drafter EXPR",
        f"{', '.join(METHODS)}, with arguments as in draft(small.gguf, n=5).  "
        "[default: the choice of specrun accelerate, else auto; with --demo: draft]",
    )
    spec_type: str | None = DRAFTING.setting(
        "--spec-type TYPE",
        "llama.cpp's name of a method: none, draft-simple, draft-eagle3, draft-mtp, ngram-simple; "
        "or prompt-lookup.",
    )
    spec_draft_n_max: int | None = DRAFTING.setting(
        "--spec-draft-n-max, --num-draft-tokens N",
        "The most tokens drafted in a round.  "
        "[default: as many as pay; prompt-lookup plans at most 15]",
        click.IntRange(1, 1024),
    )
    spec_draft_p_min: float | None = DRAFTING.setting(
        "--spec-draft-p-min, --draft-p-min P",
        "End a draft if the draft model's probability falls below this.  [default: 0]",
        SHARE,
    )
    reference: Path | None = DRAFTING.setting(
        "--reference",
        "A text that answers may quote. prompt-lookup, which this option implies, reads it in "
        "addition to the conversation.",
        FILE,
    )
    accept: str = DRAFTING.setting(
        "--accept RULE",
        f"The acceptance rule: {', '.join(_EXACT)}; not exact: {', '.join(_LOSSY)}.",
        default=_DEFAULTS.accept,
    )
    shape: Shape | None = by_option(shape_option)
    keep_answers: bool = DRAFTING.setting(
        "--keep-answers",
        "Keep answers in the user's state folder. In later conversations with this option "
        "prompt-lookup drafts from them (specrun learn show, forget).",
        is_flag=True,
    )
    no_profile: bool = DRAFTING.setting(
        "--no-profile",
        "Ignore the profile that specrun accelerate wrote for this file.",
        is_flag=True,
    )

    @property
    def is_named(self) -> bool:
        """Whether any option names a drafter; if none does, a profile or `auto` chooses."""
        named = (self.drafter, self.model_draft, self.spec_type, self.reference)
        return (*named, self.spec_draft_n_max, self.spec_draft_p_min) != (None,) * 6


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Which target, and how models are loaded and evaluated: of `options` those in `loading`."""

    model: Path | None
    demo: bool
    options: RuntimeOptions
    loading: tuple[str, ...]

    @property
    def context(self) -> ContextOptions:
        """How contexts are made."""
        return self.options.context

    def runtime_options(self) -> dict[str, Any]:
        """Return the options of `Runtime` about loading and evaluation, by name."""
        return {name: getattr(self.options, name) for name in self.loading}


@dataclass(frozen=True, slots=True)
class TemplateSettings:
    """Which chat template renders messages; all unset: the model's own."""

    chat_template: str | None = TEMPLATE.setting("--chat-template JINJA", "Use this chat template.")
    chat_template_file: Path | None = TEMPLATE.setting(
        "--chat-template-file", "Read the chat template from this file.", FILE
    )
    no_chat_template: bool = TEMPLATE.setting(
        "--no-chat-template",
        "Continue plain text instead of using the model's chat template.",
        is_flag=True,
    )


template_options = option_group("template", TemplateSettings)


def _removed(name: str, advice: str) -> Decorator:
    """Return a hidden option whose error names its replacement."""

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


def _load_settings(
    demo: bool,
    list_devices: bool,
    rope_freq_scale: float | None,
    fields: dict[str, Any],
    model: Path | None = None,
) -> LoadSettings:
    """Return the settings; models are opened on their devices until the command ends.

    With --list-devices the command ends here.
    """
    stretched = "context.rope.scale"
    fields[stretched] = _rope_scale(fields[stretched], rope_freq_scale)
    options = with_fields(_DEFAULTS, fields)
    context = click.get_current_context()
    if list_devices:
        from specrun.bindings.machine.devices import devices

        click.echo("Available devices:")
        for device in devices(options.placement.rpc):
            kind = device.kind if device.worker is None else "worker"
            total, free = bytes_text(device.memory_total), bytes_text(device.memory_free)
            about = f"{one_line(device.description)} ({kind}, {total}, {free} free)"
            click.echo(f"  {device.name}: {about}")
        context.exit()
    context.with_resource(placing(options.placement))
    return LoadSettings(
        None if outvoted(["model"], by=["demo"]) else model,
        demo and not outvoted(["demo"], by=["model", "models"]),
        options,
        tuple(dict.fromkeys(name.partition(".")[0] for name in fields)),
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
    "Add a LoRA adapter (GGUF) to the target; repeatable. The drafter stays as it is.",
    multiple=True,
)

trust_option = MODEL.flag(
    "--trust",
    "Open unknown files without a trial in another process first.",
    expose_value=False,
    callback=_trust,
)


def attention_options(section: Section, within: str = "") -> list[Decorator]:
    """Return -fa, -ctk and -ctv below a heading of the help: fields of `ContextOptions`."""
    flash = section.option(
        "-fa, --flash-attn",
        "Use flash attention.",
        click.Choice(["on", "off", "auto"]),
        default=_DEFAULTS.context.flash_attention,
        field=f"{within}flash_attention",
    )
    types = [
        section.option(
            f"-ct{letter}, --cache-type-{letter} TYPE",
            f"Number type of the cached {cached}.",
            default=getattr(_DEFAULTS.context, f"cache_type_{letter}"),
            field=f"{within}cache_type_{letter}",
        )
        for letter, cached in (("k", "keys"), ("v", "values"))
    ]
    return [flash, *types]


_LOAD_OPTIONS = (
    MODEL.flag("--demo", "The embedded target and drafter, instead of -m."),
    trust_option,
    _loading(
        "context.n_ctx",
        "-c, --ctx-size N",
        "Context size in tokens; 0: as much of the trained context as fits into memory. More than "
        "the trained context needs stretched positions (--rope-scale).",
        click.IntRange(0, MAX_COUNT),
    ),
    *ROPE_OPTIONS,
    _loading(
        "context.n_batch",
        "-b, --batch-size N",
        "The most tokens in one evaluation.",
        click.IntRange(1, MAX_COUNT),
    ),
    _loading(
        "context.n_ubatch",
        "-ub, --ubatch-size N",
        "The most tokens computed at once.",
        click.IntRange(1, MAX_COUNT),
    ),
    _loading(
        "context.n_threads",
        "-t, --threads N",
        "The number of threads for single tokens.",
        click.IntRange(-1, 1024),
        default=-1,
        show_default="one a core, within the quota",
        read=partial(max, 0),  # -1 leaves it to us, as in llama.cpp
    ),
    _loading(
        "context.n_threads_batch",
        "-tb, --threads-batch N",
        "The number of threads for prompts and drafts.",
        click.IntRange(-1, 1024),
        default=-1,
        show_default="that of -t",
        read=partial(max, 0),
    ),
    *attention_options(EVALUATION, within="context."),
    _loading(
        "context.checkpoint_memory",
        "--checkpoint-memory SIZE",
        "Memory for checkpoints of recurrent and hybrid models, taken between messages. An "
        "edited or repeated turn of a chat is then not read from its beginning. 0: none.",
        ROOM,
        default="1G",
    ),
    *(
        _loading(
            field,
            f"-ngl{short}, --gpu-layers{long}, --n-gpu-layers{long}",
            f"Layers of the {model} on the GPU; auto: as many as fit, with context and drafter.",
            LAYER_COUNT,
        )
        for field, short, long, model in (
            ("n_gpu_layers", "", "", "target"),
            ("n_gpu_layers_draft", "d", "-draft", "draft model"),
        )
    ),
    *DEVICE_OPTIONS,
    _loading(
        "use_mmap",
        "--mmap/--no-mmap",
        "Map model files into memory instead of reading them.",
    ),
    _loading(
        "measure",
        "--measure/--no-measure",
        "When a file is first loaded on this machine, time evaluations of 1 to 32 tokens for "
        "about two seconds. The length of drafts follows these costs.",
    ),
    _loading("use_mlock", "--mlock", "Keep the target in RAM (not with --no-mmap).", is_flag=True),
    _loading(
        "backend_sampling",
        "-bs, --backend-sampling",
        "Reduce rows of logits to the top k on the device, and copy only those. auto: if the "
        "whole target is on a GPU.",
        click.Choice(["auto", "on", "off"]),
    ),
)

load_options = option_group(
    "load",
    _load_settings,
    MODEL.model("-m, --model", "The target: a GGUF file, or a name of `specrun models`."),
    *_LOAD_OPTIONS,
)

several_load_options = declare(
    MODEL.model(
        "-m, --model, --models-dir",
        "A target: a GGUF file, a folder of them, or a name of `specrun models`; repeatable.",
        MODEL_OR_FOLDER,
        multiple=True,
    ),
    option_group("load", _load_settings, *_LOAD_OPTIONS),
)
"""Those of a command that opens several models, which it gets as `model`."""

draft_options = option_group(
    "draft",
    _draft_settings,
    *options_of(DraftSettings),
    *(_removed(name, "--spec-draft-n-max") for name in ("--draft", "--draft-n", "--draft-max")),
    _removed(
        "--draft-min", "--spec-draft-n-max for the length, --spec-draft-p-min to end drafts early"
    ),
)
