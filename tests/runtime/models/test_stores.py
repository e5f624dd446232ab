"""Models in the caches of other programs: found, named, and paired with their drafts."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import pytest
from support.stored_models import in_hub, in_llama, in_ollama, in_studio
from support.tiny_heads import random_medusa
from support.tiny_models import CHAT

from specrun.bindings.errors import FileMissingError, OptionError
from specrun.bindings.gguf import read_header
from specrun.bindings.models.model import Model
from specrun.bindings.models.vocabulary import stored_fingerprint
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime
from specrun.runtime.models import (
    answers_alone,
    catalogue,
    folder_models,
    locate_model,
    stored_models,
)
from specrun.runtime.models.model_set import SET_FILE

OPTIONS = {"n_ctx": 256, "n_threads": 1, "trust": True}
MODEL_LAYER = "application/vnd.ollama.image.model"


def names() -> dict[str, str]:
    return {model.name: model.store for model in stored_models().models}


def test_an_empty_home_has_no_models(home: Path) -> None:
    found = stored_models()
    assert (found.models, found.problems) == ((), ())


def test_every_store_is_read(home: Path, tiny_model: Path, tiny_drafter: Path) -> None:
    hub = in_hub(home, "ann/Tiny-GGUF", "tiny-Q4_K_M.gguf", tiny_model)
    blob = in_ollama(home, "llama3.2", "1b", tiny_drafter)
    own = in_ollama(home, "bob/own", "latest", tiny_model)
    in_ollama(home, "carl/gguf", "Q8_0", tiny_model, host="hf.co")
    studio = in_studio(home, "dora/Small-GGUF", "small-Q8_0.gguf", tiny_drafter)
    flat = in_llama(home, "ann_Old-GGUF_old.gguf", tiny_drafter)
    assert names() == {
        "ann/Tiny-GGUF:Q4_K_M": "hub",
        "ann_Old-GGUF_old": "llama.cpp",
        "llama3.2:1b": "ollama",
        "bob/own:latest": "ollama",
        "hf.co/carl/gguf:Q8_0": "ollama",
        "dora/Small-GGUF:Q8_0": "LM Studio",
    }
    assert stored_models().problems == ()
    for name, path in {
        "ann/tiny-gguf:q4_k_m": hub,
        "ann/Tiny-GGUF": hub,
        "tiny-Q4_K_M.gguf": hub,
        "llama3.2:1b": blob,
        "llama3.2": blob,
        "own": own,
        "gguf:Q8_0": own,
        "Small": studio,
        "ann_old": flat,
    }.items():
        assert locate_model(name) == path


def test_a_folder_holds_models_parts_and_sets(tmp_path: Path, tiny_model: Path) -> None:
    for name in ("a.gguf", "mmproj-a.gguf", "deep/b-Q8_0.gguf", "c-00001-of-00002.gguf"):
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        shutil.copy(tiny_model, place)
    shutil.copy(tiny_model, tmp_path / "d-00002-of-00002.gguf")
    shutil.copy(tiny_model, tmp_path / "d-00001-of-00002.gguf")
    own = tmp_path / "own set"
    own.mkdir()
    shutil.copy(tiny_model, own / "target.gguf")
    (own / SET_FILE).write_text("{}")
    found = {item if isinstance(item, str) else item.name: item for item in folder_models(tmp_path)}
    problem = f"{tmp_path / 'c-00001-of-00002.gguf'} has only 1 of its 2 parts"
    assert set(found) == {"own set", "a", "b-Q8_0", "d", problem}
    deep = found["b-Q8_0"]
    assert not isinstance(deep, str)
    assert deep.aliases == ("deep/b-Q8_0.gguf", "deep/b-Q8_0", "b-Q8_0.gguf")
    assert found["d"].files == tuple(tmp_path / f"d-0000{n}-of-00002.gguf" for n in (1, 2))  # type: ignore[union-attr]
    assert found["own set"].path == own  # type: ignore[union-attr]


def test_heads_and_adapters_answer_nothing_alone(tmp_path: Path, tiny_model: Path) -> None:
    head = tmp_path / "head.gguf"
    random_medusa(32, 320).write(head, 320)
    assert [answers_alone(path) for path in (tiny_model, head)] == [True, False]
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, or so it says")
    assert answers_alone(broken)  # whoever opens it is told why not


def test_names_that_several_have_are_listed(home: Path, tiny_model: Path, tiny_drafter: Path):
    in_hub(home, "ann/Tiny-GGUF", "tiny-Q4_K_M.gguf", tiny_model)
    in_hub(home, "ann/Tiny-GGUF", "tiny-Q8_0.gguf", tiny_drafter)
    with pytest.raises(OptionError, match=r"may be ann/Tiny-GGUF:Q4_K_M, ann/Tiny-GGUF:Q8_0"):
        locate_model("ann/Tiny-GGUF")
    assert locate_model("tiny-gguf:q8_0").name == "tiny-Q8_0.gguf"
    # The same file in two stores is one model; other files of the same name are two.
    in_studio(home, "ann/Tiny-GGUF", "tiny-Q8_0.gguf", tiny_drafter)
    assert locate_model("tiny-gguf:q8_0").is_symlink()
    shutil.copy(tiny_model, home / ".lmstudio/models/ann/Tiny-GGUF/tiny-Q8_0.gguf")
    with pytest.raises(OptionError, match=r"\.lmstudio"):
        locate_model("tiny-gguf:q8_0")


def test_a_name_that_nothing_has_is_answered_with_near_ones(home: Path, tiny_model: Path) -> None:
    with pytest.raises(FileMissingError, match="-hf ann/tiny"):
        locate_model("ann/tiny")
    in_hub(home, "ann/Tiny-GGUF", "tiny-Q4_K_M.gguf", tiny_model)
    with pytest.raises(FileMissingError, match="did you mean ann/Tiny-GGUF:Q4_K_M"):
        locate_model("tny-gguf")
    with pytest.raises(FileMissingError, match="`specrun models`"):
        locate_model("quite-another")


def test_a_path_goes_before_names(home: Path, tiny_model: Path, monkeypatch) -> None:
    in_ollama(home, "tiny", "latest", tiny_model)
    monkeypatch.chdir(home)
    assert locate_model("tiny").parent.name == "blobs"
    (home / "tiny").write_text("a file of that name")
    assert locate_model("tiny") == Path("tiny")
    assert locate_model("absent.gguf") == Path("absent.gguf")
    assert locate_model("/no/such/file") == Path("/no/such/file")


def test_what_is_broken_is_told_and_the_rest_is_found(home: Path, tiny_model: Path) -> None:
    sound = in_hub(home, "ann/Tiny-GGUF", "tiny-Q4_K_M.gguf", tiny_model)
    sound.with_name("gone-Q8_0.gguf").symlink_to("../../blobs/gone")
    shutil.copy(tiny_model, sound.with_name("half-Q6_K-00001-of-00002.gguf"))
    in_ollama(home, "good", "latest", tiny_model)
    manifests = home / ".ollama/models/manifests/registry.ollama.ai/library"
    for model, text in (
        ("text", "no json"),
        ("list", "[]"),
        ("other", '{"layers": [{"mediaType": "application/vnd.ollama.image.tensor"}]}'),
        (
            "up",
            '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "../x"}]}',
        ),
        ("deep", "[" * 100_000),
    ):
        (manifests / model).mkdir()
        (manifests / model / "latest").write_text(text)
    blob = in_ollama(home, "lost", "latest", tiny_model.with_name("drafter.gguf"))
    blob.unlink()
    in_studio(home, "dora/broken", "broken.gguf", tiny_model).write_bytes(b"GGUF")
    (home / ".cache/huggingface/hub/models--odd").mkdir()
    (home / ".cache/huggingface/hub/version.txt").write_text("1")
    gc.collect()  # or finalizers of other tests' garbage run where the deep text is read
    found = stored_models()
    assert [model.name for model in found.models] == [
        "ann/Tiny-GGUF:Q4_K_M",
        "good:latest",
        "dora/broken:broken",
    ]
    told = "\n".join(found.problems)
    for part in ("gone-Q8_0.gguf", "only 1 of its 2 parts", "text", "list", "up", "deep", "lost"):
        assert part in told
    assert "other" not in told
    entries = {entry.model.name: entry for entry in catalogue(found.models)}
    assert "broken.gguf" in str(entries["dora/broken:broken"].problem)
    assert entries["good:latest"].problem is None


def test_a_store_that_cannot_be_read_hides_no_other(home, tiny_model, monkeypatch) -> None:
    in_studio(home, "dora/Small-GGUF", "small.gguf", tiny_model)

    def refuse() -> list[Path]:
        raise PermissionError(13, "Permission denied", "/secret")

    monkeypatch.setattr("specrun.runtime.models.stores.hub_folders", refuse)
    found = stored_models()
    assert [model.name for model in found.models] == ["dora/Small-GGUF:small"]
    assert found.problems == ("/secret cannot be read (Permission denied)",)


def test_nothing_is_changed(home: Path, tiny_model: Path) -> None:
    in_hub(home, "ann/Tiny-GGUF", "tiny-Q4_K_M.gguf", tiny_model)
    in_ollama(home, "tiny", "latest", tiny_model)
    in_studio(home, "dora/Small-GGUF", "small.gguf", tiny_model)

    def state() -> list[tuple[str, int, int]]:
        stats = ((path, path.lstat()) for path in sorted(home.rglob("*")))
        return [(str(path), s.st_mtime_ns, s.st_size) for path, s in stats]

    before = state()
    catalogue(stored_models().models)
    locate_model("small")
    assert state() == before


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    write_random_llama(path, RandomLlama(**{**CHAT, "layers": 12}))
    return path


def test_what_could_draft_is_known_by_vocabulary_and_size(
    home: Path, large: Path, tiny_drafter: Path, tiny_small_vocab: Path, tmp_path: Path
) -> None:
    in_hub(home, "ann/Large-GGUF", "large-F32.gguf", large)
    in_hub(home, "ann/Little-GGUF", "little-F32.gguf", tiny_drafter)
    in_hub(home, "ann/Stranger-GGUF", "stranger-F32.gguf", tiny_small_vocab)
    header = read_header(large)
    hidden, made_for = header.metadata["llama.embedding_length"], stored_fingerprint(header)
    assert made_for is not None
    heads = tmp_path / "heads.gguf"
    random_medusa(hidden, 320).write(heads, 320, vocabulary=made_for.hex())
    in_studio(home, "bob/heads", "heads.gguf", heads)
    random_medusa(2 * hidden, 320).write(heads, 320, vocabulary=made_for.hex())
    in_studio(home, "bob/wider", "wider.gguf", heads)
    entries = {entry.model.name: entry for entry in catalogue(stored_models().models)}
    target = entries["ann/Large-GGUF:F32"]
    assert sorted(target.drafters) == ["ann/Little-GGUF:F32", "bob/heads:heads"]
    assert entries["bob/heads:heads"].method == "medusa"
    assert entries["ann/Little-GGUF:F32"].drafters == []
    assert entries["ann/Stranger-GGUF:F32"].drafters == []
    assert target.chat_template
    assert (target.architecture, target.n_bytes) == ("llama", large.stat().st_size)


def test_the_hash_in_a_header_is_the_vocabularys(tiny_model: Path, tiny_small_vocab: Path) -> None:
    hashes = set()
    for path in (tiny_model, tiny_small_vocab):
        with Model(path) as model:
            stored = stored_fingerprint(read_header(path))
            assert stored == model.vocabulary.fingerprint
            hashes.add(stored)
    assert len(hashes) == 2


def test_a_runtime_opens_models_by_name(home: Path, tiny_model: Path, tiny_drafter: Path) -> None:
    in_hub(home, "ann/Tiny-GGUF", "tiny-F32.gguf", tiny_model)
    in_ollama(home, "little", "latest", tiny_drafter)
    with Runtime("ann/Tiny-GGUF", "draft(little, n=2)", **OPTIONS) as runtime:
        assert runtime.model.path.name == "tiny-F32.gguf"
        assert runtime.generate("abc", max_tokens=4).usage.completion_tokens == 4
