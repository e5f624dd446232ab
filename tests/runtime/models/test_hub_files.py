"""llama.cpp's choice of files in a repository, by their names alone."""

from __future__ import annotations

import pytest

from specrun.runtime.models import HubName
from specrun.runtime.models.hub import choose_files, stem_of, tag_of

REPO = [
    "README.md",
    "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf",
    "imatrix.gguf",
    "m-IQ4_XS.gguf",
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "m-UD-Q4_K_XL.gguf",
    "mmproj-F16.gguf",
    "mtp-m-Q8_0.gguf",
]


@pytest.mark.parametrize(
    ("tag", "first", "count"),
    [
        ("", "m-Q4_K_M.gguf", 1),
        ("Q8_0", "m-Q8_0.gguf", 1),
        ("q4_k_m", "m-Q4_K_M.gguf", 1),
        ("BF16", "BF16/m-BF16-00001-of-00002.gguf", 2),
        ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf", 1),
        ("m-IQ4_XS", "m-IQ4_XS.gguf", 1),
        ("m-IQ4_XS.gguf", "m-IQ4_XS.gguf", 1),
    ],
)
def test_the_tags_file_is_chosen(tag: str, first: str, count: int) -> None:
    chosen = choose_files(REPO, tag)
    assert (chosen[0], len(chosen)) == (first, count)


def test_without_a_tag_the_usual_ones_go_before_the_first() -> None:
    assert choose_files(REPO, "") == ("m-Q4_K_M.gguf",)
    without = [name for name in REPO if "Q4_K_M" not in name]
    assert choose_files(without, "") == ("m-Q8_0.gguf",)
    without = [name for name in without if "Q8_0" not in name]
    assert choose_files(without, "") == tuple(REPO[1:3])


def test_what_is_no_model_is_never_chosen() -> None:
    assert choose_files(REPO, "F16") == tuple(REPO[1:3])  # not the projector; BF16, as llama.cpp
    assert choose_files(["imatrix.gguf", "mmproj-F16.gguf", "a.txt"], "") == ()
    assert choose_files(REPO, "Q4_K") == ()  # a tag is whole: Q4_K is not Q4_K_M
    assert choose_files(REPO, "Q8.0") == ()  # and no expression


def test_heads_are_chosen_where_there_is_nothing_else() -> None:
    heads = ["eagle3-m-Q8_0.gguf", "eagle3-m-F16.gguf"]
    assert choose_files(heads, "") == ("eagle3-m-Q8_0.gguf",)
    assert choose_files([*heads, "m-Q2_K.gguf"], "") == ("m-Q2_K.gguf",)


def test_heads_beside_a_model_go_by_the_beginning_of_their_names() -> None:
    names = [*REPO, "dflash-m-F16.gguf", "dflash-m-Q8_0.gguf", "dspark-m-BF16.gguf"]
    assert choose_files(names, "dflash-") == ("dflash-m-Q8_0.gguf",)
    assert choose_files(names, "dflash-F16") == ("dflash-m-F16.gguf",)
    assert choose_files(names, "dspark-") == ("dspark-m-BF16.gguf",)
    assert choose_files(names, "mtp-") == ("mtp-m-Q8_0.gguf",)
    assert choose_files(names, "eagle3-") == ()
    assert choose_files(names, "") == ("m-Q4_K_M.gguf",)


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("m-Q4_K_M.gguf", "Q4_K_M"),
        ("folder/m.q8_0.gguf", "Q8_0"),
        ("m-BF16-00001-of-00002.gguf", "BF16"),
        ("m-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("m-MXFP4.gguf", "MXFP4"),
        ("m.gguf", ""),
        ("Qwen-Q-7B.gguf", ""),
    ],
)
def test_the_tag_in_a_name(name: str, tag: str) -> None:
    assert tag_of(name) == tag


def test_stems_and_names() -> None:
    assert stem_of("a/m-Q8_0-00002-of-00003.gguf") == "m-Q8_0"
    assert str(HubName.parse("hf:a/b:Q8_0")) == "a/b:Q8_0"
    assert HubName.parse("a/b:latest") == HubName.parse("a/b")
