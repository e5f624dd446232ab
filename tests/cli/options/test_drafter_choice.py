"""-md, --spec-type and their companions are rewritten to one drafter expression."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from support.renamed_models import as_architecture
from support.tiny_heads import random_medusa
from support.tiny_nextn import TinyNextN

from specrun.bindings.errors import FileMissingError, OptionError
from specrun.cli.options.drafting import drafter_expression
from specrun.cli.options.model import DraftSettings
from specrun.convert.gguf import Metadata, PlannedTensor, write_gguf
from specrun.runtime.language import parse_expression

FILE = Path("small model.gguf")


def settings(**given: Any) -> DraftSettings:
    names = (field.name for field in dataclasses.fields(DraftSettings))
    return DraftSettings(**{**dict.fromkeys(names), "accept": "exact", **given})


@pytest.mark.parametrize(
    ("given", "demo", "expected"),
    [
        ({}, False, "none"),
        ({}, True, "draft"),
        ({"spec_draft_n_max": 3}, True, "draft(n=3)"),
        ({"spec_type": "none"}, True, "none"),
        ({"spec_type": "none", "model_draft": FILE}, False, "none"),
        ({"model_draft": FILE}, False, 'draft("small model.gguf")'),
        ({"model_draft": FILE}, True, 'draft("small model.gguf")'),
        (
            {
                "model_draft": FILE,
                "spec_type": "draft-simple",
                "spec_draft_n_max": 7,
                "spec_draft_p_min": 0.5,
            },
            False,
            'draft("small model.gguf", n=7, p_min=0.5)',
        ),
        ({"spec_type": "draft-simple"}, True, "draft"),
        (
            {"spec_type": "draft-eagle3", "model_draft": FILE, "spec_draft_n_max": 4},
            False,
            'eagle3("small model.gguf", n=4)',
        ),
        ({"spec_type": "ngram-simple", "spec_draft_n_max": 9}, False, "prompt-lookup(n=9)"),
        ({"spec_type": "prompt-lookup"}, True, "prompt-lookup"),
        ({"spec_type": "draft-mtp"}, False, "mtp"),
        (
            {"spec_type": "draft-mtp", "spec_draft_n_max": 2, "spec_draft_p_min": 0.5},
            False,
            "mtp(n=2, p_min=0.5)",
        ),
        (
            {"model_draft": FILE, "spec_type": "draft-eagle3", "spec_draft_p_min": 0.5},
            False,
            'eagle3("small model.gguf", p_min=0.5)',
        ),
        ({"spec_type": "draft-mtp", "model_draft": FILE}, False, 'mtp("small model.gguf")'),
        ({"drafter": "prompt-lookup(n=2)"}, True, "prompt-lookup(n=2)"),
        ({"drafter": "auto"}, True, "auto"),
        ({"reference": FILE}, False, "prompt-lookup"),  # a reference is there to be used
        ({"reference": FILE, "spec_draft_n_max": 7}, False, "prompt-lookup(n=7)"),
        ({"reference": FILE, "model_draft": FILE}, False, 'draft("small model.gguf")'),
        (
            {"drafter": "auto", "model_draft": FILE},
            False,
            'auto(draft("small model.gguf"), prompt-lookup, lookahead)',
        ),
    ],
)
def test_expressions(given: dict[str, Any], demo: bool, expected: str) -> None:
    assert drafter_expression(settings(**given), demo=demo) == expected
    parse_expression(expected)


def test_a_file_of_heads_is_recognised(tmp_path: Path) -> None:
    path = random_medusa(8, 16).write(tmp_path / "heads.gguf", 16)
    assert drafter_expression(settings(model_draft=path), demo=False) == f'medusa("{path}")'
    path = tmp_path / "hydra.gguf"
    planned = [PlannedTensor("hydra.0.res.0.bias", (4,), "F32", lambda: np.ones(4, np.float32))]
    write_gguf(path, "hydra", Metadata(), planned)
    assert drafter_expression(settings(model_draft=path), demo=False) == f'hydra("{path}")'
    expected = f'hydra("{path}", n=3)'  # its chains have a length, Medusa's trees have none
    assert (
        drafter_expression(settings(model_draft=path, spec_draft_n_max=3), demo=False) == expected
    )
    with pytest.raises(click.UsageError, match="put nodes="):
        drafter_expression(
            settings(model_draft=tmp_path / "heads.gguf", spec_draft_n_max=3), demo=False
        )


def test_an_eagle3_file_of_llama_cpp_is_recognised(tmp_path: Path, tiny_drafter: Path) -> None:
    path = as_architecture(tiny_drafter, tmp_path / "head.gguf", "eagle3")
    assert drafter_expression(settings(model_draft=path), demo=False) == f'eagle3("{path}")'
    wanted = f'auto(eagle3("{path}"), prompt-lookup, lookahead)'
    assert drafter_expression(settings(model_draft=path, drafter="auto"), demo=False) == wanted


def test_blocks_without_their_model_are_recognised(tmp_path: Path) -> None:
    path = TinyNextN().write_blocks_only(tmp_path / "mtp-blocks.gguf")
    given = settings(model_draft=path, spec_draft_n_max=2)
    assert drafter_expression(given, demo=False) == f'mtp("{path}", n=2)'
    whole = TinyNextN().write(tmp_path / "whole.gguf")
    assert drafter_expression(settings(model_draft=whole), demo=False) == f'draft("{whole}")'


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"drafter": "none", "model_draft": FILE}, "-md"),
        ({"drafter": "auto(prompt-lookup)", "model_draft": FILE}, "-md"),
        ({"drafter": "auto", "model_draft": FILE, "spec_type": "none"}, "--spec-type"),
        ({"drafter": "draft", "spec_draft_n_max": 3}, "--spec-draft-n-max"),
        ({"drafter": "draft", "spec_draft_p_min": 0.0}, "--spec-draft-p-min"),
        ({"drafter": "draft", "spec_type": "none"}, "--spec-type"),
        ({"spec_type": "draft-simple"}, "-md FILE"),
        ({"spec_type": "draft-eagle3"}, "draft-eagle3 needs a draft model: -md FILE"),
        ({"spec_type": "ngram-simple", "model_draft": FILE}, "leave out -md"),
        ({"spec_type": "ngram-simple,draft-simple"}, "--drafter"),
        ({"spec_draft_n_max": 3}, "without a drafter"),
        ({"spec_type": "prompt-lookup", "spec_draft_p_min": 0.3}, "draft models"),
    ],
)
def test_contradictions(given: dict[str, Any], named: str) -> None:
    with pytest.raises(click.UsageError, match=named):
        drafter_expression(settings(**given), demo=False)


def test_methods_that_do_not_exist() -> None:
    with pytest.raises(OptionError, match="did you mean ngram-simple"):
        drafter_expression(settings(spec_type="ngram-simpel"), demo=False)
    with pytest.raises(OptionError, match="does not exist here"):
        drafter_expression(settings(spec_type="draft-suffix"), demo=False)


def test_odd_file_names_survive(tmp_path: Path) -> None:
    path = tmp_path / 'a "b", (c)=@\\.gguf'
    expression = parse_expression(drafter_expression(settings(model_draft=path), demo=False))
    assert expression.arguments[0].atom == str(path)


def test_missing_files_inside_expressions(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").touch()
    nested = f'cascade(draft("{tmp_path}/smal.gguf"), prompt-lookup)'
    with pytest.raises(FileMissingError, match=r"Did you mean .*small\.gguf"):
        drafter_expression(settings(drafter=nested), demo=False)
    there = f'cascade(draft("{tmp_path}/small.gguf"), prompt-lookup)'
    assert drafter_expression(settings(drafter=there), demo=False) == there
