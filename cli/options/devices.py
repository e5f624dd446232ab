"""Options about devices: which ones models lie on, of this machine and of others (--rpc)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from specrun.bindings.errors import OptionError
from specrun.bindings.machine.placement import Placement, placing
from specrun.cli.options.group import EVALUATION
from specrun.cli.terminal.table import bytes_text
from specrun.cli.terminal.terminal import one_line

if TYPE_CHECKING:
    from specrun.bindings.machine.devices import Device

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
