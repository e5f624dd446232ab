"""What tests of converted heads share: recognition, tensors, and equality with a wanted file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader

from specrun.convert import convert_head
from specrun.convert.conversion import ConversionReport
from specrun.convert.heads.head_conversion import detect_kind


def tensors_of(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a GGUF file, as they are stored."""
    return {tensor.name: np.array(tensor.data) for tensor in GGUFReader(path).tensors}


def recognised(folder: Path) -> str:
    """The kind of head that a folder is taken for; fails for none."""
    found = detect_kind(folder)
    assert found is not None
    return found.name


def converted(folder: Path, output: Path, target: Path, kind: str) -> ConversionReport:
    """Convert a folder, which must be recognised, to a file of this architecture in float32."""
    assert recognised(folder) == kind
    report = convert_head(folder, output, target=target, outtype="f32")
    assert report.architecture == kind
    return report


def check_same_tensors(output: Path, wanted: Path, rtol: float = 0.0) -> None:
    """Fail unless two files have the same tensors, of the same types."""
    ours, theirs = tensors_of(output), tensors_of(wanted)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype
        np.testing.assert_allclose(ours[name], array, rtol=rtol, atol=0.0, err_msg=name)
