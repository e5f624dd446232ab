"""The target's hidden states: from transformers, from llama.cpp, from disk; and what memory and
disk must hold."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.tiny_targets import HIDDEN, write_untaught

from specrun.bindings.errors import (
    MalformedFileError,
    ModelError,
    OptionError,
    OutOfMemoryError,
    PairError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.bindings.gguf import read_header
from specrun.bindings.models.model import Model
from specrun.convert import convert_checkpoint, quantize_model
from specrun.convert.gguf import Metadata, PlannedTensor, write_gguf
from specrun.train.data import AnswerSettings
from specrun.train.data.corpus import TokenCorpus, encode_corpus
from specrun.train.data.documents import read_documents
from specrun.train.data.tokens import TargetTokenizer
from specrun.train.heads import HeadRun, MedusaRecipe
from specrun.train.target import file_target, states
from specrun.train.target.file_target import (
    TeacherFeatures,
    check_teacher,
    check_teacher_vocabulary,
    teacher_matrices,
)
from specrun.train.target.hf_model import HFModel, load_hf_model
from specrun.train.target.shape import target_shape
from specrun.train.target.states import (
    FeatureCache,
    Features,
    FeatureSource,
    ModelFeatures,
    remove_caches,
    text_key,
)
from specrun.train.trainer import settings, train, usable_device, usable_precision
from specrun.train.trainer.memory import MemoryNeed, free_memory, require_memory, trained_bytes
from specrun.train.trainer.model_folder import write_weights
from specrun.train.trainer.settings import trial_size

CPU = torch.device("cpu")


@pytest.fixture
def bfloat16_gain() -> None:
    """Leave the trial as it is: it is tried here."""


@pytest.fixture(scope="module")
def corpus(taught) -> TokenCorpus:
    return encode_corpus(
        read_documents([taught.data]), TargetTokenizer(taught.folder), max_length=64, held_out=0.2
    )


@pytest.fixture(scope="module")
def model(taught) -> HFModel:
    return load_hf_model(taught.folder, CPU)


def test_final_states_make_the_models_own_logits(model: HFModel, corpus: TokenCorpus) -> None:
    batch = corpus.batch([0, 1])
    with torch.no_grad():
        final, _ = model.hidden_states(batch.ids)
        whole = model.model(input_ids=batch.ids).logits
    torch.testing.assert_close(model.logits(final), whole)
    assert not any(parameter.requires_grad for parameter in model.module.parameters())


FACTORS = {
    "granite": ("GraniteForCausalLM", {"logits_scaling": 8.0}, {"logits_scaling": 1.0}),
    "cohere": ("CohereForCausalLM", {"logit_scale": 0.0625}, {"logit_scale": 1.0}),
    "phi": ("PhiForCausalLM", {}, None),
    "gemma2": ("Gemma2ForCausalLM", None, {"final_logit_softcapping": 2.0}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FACTORS)
def test_models_that_change_their_logits_are_refused(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    """By a factor, or Phi's bias; the same families without are taken, and so is a soft cap, which
    is known."""
    name, refused, taken = FACTORS[family]
    shape = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0}
    for place, changes in {"refused": refused, "taken": taken}.items():
        if changes is None:
            continue
        kind = getattr(transformers, name)
        torch.manual_seed(0)
        made = kind(kind.config_class(**shape, **heads, **changes))
        with torch.no_grad():
            for weight in made.parameters():
                weight.copy_(torch.randn_like(weight) * 0.3)
        made.save_pretrained(tmp_path / place)
        if place == "taken":
            found = load_hf_model(tmp_path / place, CPU, dtype)
            assert found.softcap == changes.get("final_logit_softcapping")
            continue
        with pytest.raises(
            ModelError, match=rf"a model of the type '{family}', which changes its logits after"
        ):
            load_hf_model(tmp_path / place, CPU, dtype)


@torch.no_grad()
def test_taps_are_what_enters_the_layers(model: HFModel, corpus: TokenCorpus) -> None:
    batch = corpus.batch([0])
    seen = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, given, number=number: seen.update({number: given[0].detach()})
        )
        for number, layer in enumerate(model.model.model.layers)
    ]
    _, taps = model.hidden_states(batch.ids, (0, 1, 3))
    for hook in hooks:
        hook.remove()
    assert taps is not None
    torch.testing.assert_close(taps, torch.cat([seen[number] for number in (0, 1, 3)], -1))


def test_llama_cpps_states_are_transformers(taught, model: HFModel, corpus: TokenCorpus) -> None:
    """States of scale 1 with a float16 cache: within 1e-2; one position off differs by more than
    0.5."""
    taps = (1, 3, 2)
    batch = corpus.batch(range(4))
    with Model(taught.gguf) as file:
        check_teacher_vocabulary(file, TargetTokenizer(taught.folder), model.output.shape[0])
        with closing(TeacherFeatures(file, corpus.longest, taps, n_threads=1)) as shown:
            ours, theirs = shown.features(batch), ModelFeatures(model, taps).features(batch)
    for first, other in ((ours.final, theirs.final), (ours.taps, theirs.taps)):
        assert float((first - other).abs()[batch.valid].max()) < 1e-2 * max(
            1.0, float(other.abs().max())
        )
        assert float((first[:, 1:] - other[:, :-1]).abs()[batch.valid[:, 1:]].max()) > 0.5


def test_long_sequences_are_evaluated_in_pieces(taught, model: HFModel, monkeypatch) -> None:
    tokenizer = TargetTokenizer(taught.folder)
    text = [*read_documents([taught.data])]
    whole = encode_corpus(text, tokenizer, max_length=64, held_out=0.0)
    with Model(taught.gguf) as file, closing(TeacherFeatures(file, 64, n_threads=1)) as shown:
        wanted = shown.features(whole.batch([0])).final
        monkeypatch.setattr(shown._batch, "capacity", 7)
        torch.testing.assert_close(
            shown.features(whole.batch([0])).final, wanted, atol=1e-3, rtol=0
        )


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_a_teachers_matrices_are_read_from_its_file(
    taught, model: HFModel, tmp_path: Path, kind: str
) -> None:
    path = taught.gguf
    if kind == "q8_0":
        path = tmp_path / "q8.gguf"
        quantize_model(taught.gguf, path, "Q8_0")
    found = teacher_matrices(path, CPU)
    allowed = 1e-6 if kind == "f32" else 0.01 * float(model.output.abs().max())
    assert float((found.output - model.output).abs().max()) <= allowed
    assert float((found.embedding - model.embedding).abs().max()) <= 0.01 * float(
        model.embedding.abs().max()
    )
    assert found.softcap is None


@pytest.mark.parametrize(
    ("scale", "biased", "problem"),
    [
        (0.0625, False, r"a command-r model that multiplies or divides its logits by 0\.0625"),
        (1.0, False, None),
        (None, False, None),
        (None, True, r"a command-r model that adds output\.bias to its logits"),
    ],
)
def test_a_teacher_that_changes_its_logits_is_refused(
    taught, tmp_path: Path, scale: float | None, biased: bool, problem: str | None
) -> None:
    path = tmp_path / "other.gguf"
    metadata = Metadata()
    if scale is not None:
        metadata.number("command-r.logit_scale", scale)
    matrix = np.ones((8, 4), np.float32)
    tensors = [PlannedTensor("token_embd.weight", matrix.shape, "F32", lambda: matrix)]
    if biased:
        tensors.append(PlannedTensor("output.bias", (8,), "F32", lambda: matrix[:, 0].copy()))
    write_gguf(path, "command-r", metadata, tensors)
    if problem is None:
        assert teacher_matrices(path, CPU).output.shape == (8, 4)
        return
    with pytest.raises(UnsupportedModelError, match=problem):
        teacher_matrices(path, CPU)
    run = HeadRun(
        taught.folder, (taught.data,), tmp_path / "heads",
        teacher=path, own_answers=AnswerSettings(), device="cpu", precision="float32",
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=problem):  # before hours of answers
        train(MedusaRecipe(), run)
    assert not (tmp_path / "heads").exists()


def test_a_teacher_must_be_the_same_model(taught, tmp_path: Path) -> None:
    write_untaught(tmp_path / "other", size=280)  # many merges less, whatever they are learnt from
    with Model(taught.gguf) as file:
        with pytest.raises(PairError, match="400 tokens, and the folder 280"):
            check_teacher_vocabulary(file, TargetTokenizer(tmp_path / "other"), 280)
        with pytest.raises(PairError, match="the same text is token"):
            check_teacher_vocabulary(file, TargetTokenizer(tmp_path / "other"), 400)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": 32}, r"its states have 32 numbers, and the folder's 64$"),
        ({"num_hidden_layers": 2}, r"it has 2 layers, and the folder 4$"),
    ],
)
def test_a_teacher_of_the_same_vocabulary_must_have_the_same_sizes(
    taught, tmp_path: Path, changes, problem: str
) -> None:
    """As a sibling of another size is: by its vocabulary it would pass."""
    write_untaught(tmp_path / "sibling", **changes)
    convert_checkpoint(tmp_path / "sibling", tmp_path / "sibling.gguf", outtype="f16", verify=False)
    tokenizer, shape = TargetTokenizer(taught.folder), target_shape(taught.folder)
    with Model(tmp_path / "sibling.gguf", vocab_only=True) as file:
        check_teacher_vocabulary(file, tokenizer, 400)
    with pytest.raises(PairError, match=problem):
        check_teacher(tmp_path / "sibling.gguf", tokenizer, shape)
    check_teacher(taught.gguf, tokenizer, shape)
    with pytest.raises(PairError, match="400 tokens, and the folder 401"):
        check_teacher(taught.gguf, tokenizer, dataclasses.replace(shape, vocab_size=401))


def test_blocks_behind_a_teachers_layers_are_not_counted(taught, monkeypatch) -> None:
    """A file with a NextN block says 5 blocks where the folder says 4 layers, and a file of 5
    layers is another."""
    tokenizer, shape = TargetTokenizer(taught.folder), target_shape(taught.folder)
    real = read_header(taught.gguf)
    more = {**real.metadata, "llama.block_count": 5, "llama.nextn_predict_layers": 1}
    monkeypatch.setattr(
        file_target, "read_header", lambda path: dataclasses.replace(real, metadata=more)
    )
    check_teacher(taught.gguf, tokenizer, shape)
    del more["llama.nextn_predict_layers"]
    with pytest.raises(PairError, match="it has 5 layers"):
        check_teacher(taught.gguf, tokenizer, shape)
    del more["llama.block_count"]
    with pytest.raises(MalformedFileError, match=r"has no llama\.block_count: it is no target"):
        check_teacher(taught.gguf, tokenizer, shape)


# -- the cache -------------------------------------------------------------------------------------


class Counting:
    """Counts what is computed, and what it gives; states may be too large for float16."""

    def __init__(self, source: ModelFeatures, factor: float = 1.0) -> None:
        self.source, self.factor, self.calls, self.taps = source, factor, 0, source.taps

    def features(self, batch) -> Features:
        self.calls += 1
        found = self.source.features(batch)
        return Features(
            found.final * self.factor, None if found.taps is None else found.taps * self.factor
        )


def cache_of(root: Path, taps=(), precision: str = "float32", weights: int = 1) -> FeatureCache:
    about = {"precision": precision, "identity": {"source": weights}}
    return FeatureCache(root, taps, HIDDEN, **about)


def filled(cache: FeatureCache, corpus: TokenCorpus, source: FeatureSource, *tell) -> FeatureCache:
    cache.fill(corpus, source, CPU, *tell)
    return cache


def test_cached_states_are_the_computed_ones(
    model: HFModel, corpus: TokenCorpus, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(states, "_CHUNK_TOKENS", 60)
    source, told = Counting(ModelFeatures(model, (1, 2, 3))), []
    cache = cache_of(tmp_path / "f", (1, 2, 3))
    filled(cache, corpus, source, lambda *step: told.append(step))
    assert len(cache.chunks) > 2
    assert told[-1] == (len(corpus.sequences), len(corpus.sequences))
    batch = corpus.batch([4, 0, 2])
    found, wanted = cache.features(batch), source.features(batch)
    for ours, theirs in ((found.final, wanted.final), (found.taps, wanted.taps)):
        near = 2e-3 * float(theirs.abs().max())
        assert float((ours - theirs).abs()[batch.valid].max()) < near
        assert not ours[~batch.valid].any()
    size = sum(path.stat().st_size for path in (tmp_path / "f").glob("*/*.safetensors"))
    least = 2 * HIDDEN * 4 * sum(map(len, corpus.sequences))
    assert cache.bytes_of(corpus) == least <= size < least + 1000 * len(cache.chunks)
    cache.close()
    remove_caches(tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_an_interrupted_cache_goes_on_and_needs_room_for_the_rest(
    model: HFModel, corpus: TokenCorpus, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(states, "_CHUNK_TOKENS", 60)
    cache, first = cache_of(tmp_path), Counting(ModelFeatures(model))
    assert cache.missing_bytes(corpus) == cache.bytes_of(corpus)
    filled(cache, corpus, first)
    assert cache.missing_bytes(corpus) == 0
    removed = cache.chunks[1]
    removed.unlink()
    there = cache_of(tmp_path).open().texts
    lost = [text for text in corpus.sequences if text_key(text.ids) not in there]
    assert cache.missing_bytes(corpus) == 2 * HIDDEN * sum(map(len, lost))
    second = Counting(ModelFeatures(model))
    filled(cache, corpus, second)
    assert second.calls == len(lost) < first.calls
    assert removed.exists()


@pytest.mark.parametrize(
    "changes", [{"taps": (1,)}, {"precision": "bfloat16"}, {"weights": 2}], ids=str
)
def test_states_of_another_kind_lie_beside_and_nothing_is_deleted(
    model: HFModel, corpus: TokenCorpus, tmp_path: Path, changes: dict
) -> None:
    foreign = tmp_path / "features-00000.safetensors"
    foreign.write_text("somebody else's")
    cache = filled(cache_of(tmp_path), corpus, ModelFeatures(model))
    other = cache_of(tmp_path, **changes)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    assert len(before) == 3
    assert other.missing_bytes(corpus) == other.bytes_of(corpus)
    second = Counting(ModelFeatures(model, changes.get("taps", ())))
    filled(other, corpus, second)
    assert second.calls == len(corpus.sequences)
    assert other.folder != cache.folder
    assert {path: path.stat().st_mtime_ns for path in before} == before
    third = Counting(ModelFeatures(model))
    filled(cache_of(tmp_path), corpus, third)
    assert third.calls == 0


def test_a_manifest_that_tells_of_other_states_is_not_overwritten(
    model: HFModel, corpus: TokenCorpus, tmp_path: Path
) -> None:
    cache = filled(cache_of(tmp_path), corpus, ModelFeatures(model))
    for spoil in (lambda path: path.write_text("{"), lambda path: path.unlink()):
        spoil(cache.folder / "manifest.json")
        with pytest.raises(
            SpecrunError, match=r"manifest\.json does not tell of the states in its folder: remove"
        ):
            cache_of(tmp_path).open()
        assert cache.chunks[0].exists()


def test_removing_caches_leaves_other_files(
    model: HFModel, corpus: TokenCorpus, tmp_path: Path
) -> None:
    caches = cache_of(tmp_path), cache_of(tmp_path, precision="bfloat16")
    first, second = (filled(cache, corpus, ModelFeatures(model)).folder for cache in caches)
    # As a killed process leaves it.
    (first / ".features-00001.safetensors.0123456789abcdef.partial").touch()
    (second / "notes.txt").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "features-00000.safetensors").touch()
    remove_caches(tmp_path)
    left = {tmp_path / "mine" / "features-00000.safetensors", second / "notes.txt"}
    assert set(tmp_path.rglob("*.*")) == left
    assert not first.exists()
    remove_caches(tmp_path / "absent")


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecrunError, match=r"cannot be made .*: name another with --features"):
        cache_of(tmp_path / "file").open()


def test_states_beyond_float16_are_kept(
    model: HFModel, corpus: TokenCorpus, tmp_path: Path
) -> None:
    source = Counting(ModelFeatures(model), factor=1e5)
    cache = filled(cache_of(tmp_path), corpus, source)
    batch = corpus.batch([0])
    torch.testing.assert_close(cache.features(batch).final, source.features(batch).final)


def test_a_damaged_cache_is_named(model: HFModel, corpus: TokenCorpus, tmp_path: Path) -> None:
    (chunk,) = filled(cache_of(tmp_path), corpus, ModelFeatures(model)).chunks
    chunk.write_bytes(b"no tensors")
    with pytest.raises(SpecrunError, match=r"features-\w+\.safetensors cannot be read"):
        cache_of(tmp_path).open()
    for about in ({}, *({"texts": text} for text in ("", "[1]", '[["a", Infinity]]', "[" * 9000))):
        write_weights(chunk, {"final": torch.zeros(2, 2)}, **about)
        with pytest.raises(SpecrunError, match="does not name its texts: remove the cache"):
            cache_of(tmp_path).open()


def test_no_room_for_the_cache_is_said_with_both_numbers(tmp_path: Path) -> None:
    cache = cache_of(tmp_path / "absent" / "deeper")
    with pytest.raises(
        SpecrunError, match=r"needs 1048576\.00 GiB in .*deeper.* and \d+\.\d\d GiB are free"
    ):
        cache.require_space(1 << 50)
    cache.require_space(1)


# -- memory, precision, devices --------------------------------------------------------------------


def test_too_little_memory_is_said_with_both_numbers() -> None:
    need = MemoryNeed({"target": 6 << 30, "head": 2 << 30})
    require_memory(need, CPU, free=need.total)
    with pytest.raises(
        OutOfMemoryError, match=r"9\.20 GiB \(target 6\.00, head 2\.00\).*8\.00 GiB are free"
    ) as caught:
        require_memory(need, CPU, free=8 << 30)
    assert caught.value.exit_code == 5
    assert free_memory(CPU) > 1 << 20


def test_trained_parameters_count_four_times() -> None:
    linear = torch.nn.Linear(10, 10)
    assert trained_bytes(linear) == 4 * 4 * 110
    assert trained_bytes(linear.requires_grad_(False)) == 4 * 110


@pytest.mark.parametrize(
    ("gain", "chosen"),
    [(None, torch.float32), (0.4, torch.float32), (1.1, torch.float32), (2.5, torch.bfloat16)],
)
def test_bfloat16_is_chosen_where_it_works_and_pays(
    monkeypatch, gain: float | None, chosen: torch.dtype
) -> None:
    monkeypatch.setattr(settings, "bfloat16_gain", lambda device, threads: gain)
    assert usable_precision("auto", CPU) == chosen
    assert usable_precision("float32", CPU) == torch.float32
    if gain is None:
        with pytest.raises(OptionError, match="tried on cpu and failed"):
            usable_precision("bfloat16", CPU)
    else:
        assert usable_precision("bfloat16", CPU) == torch.bfloat16
    with pytest.raises(OptionError, match="precision 'half'"):
        usable_precision("half", CPU)


@pytest.mark.parametrize("earlier", ["float32", "bfloat16"])
def test_a_resumed_run_does_not_choose_again(monkeypatch, earlier: str) -> None:
    """Whatever a second trial would say; and what is asked for is done."""
    for gain in (0.4, 2.5):
        monkeypatch.setattr(settings, "bfloat16_gain", lambda device, threads, gain=gain: gain)
        assert usable_precision("auto", CPU, earlier) == getattr(torch, earlier)
        assert usable_precision("float32", CPU, earlier) == torch.float32
        assert usable_precision("bfloat16", CPU, earlier) == torch.bfloat16
    monkeypatch.setattr(settings, "bfloat16_gain", lambda device, threads: None)
    if earlier == "bfloat16":  # a machine without it
        with pytest.raises(OptionError, match="use --precision float32"):
            usable_precision("auto", CPU, earlier)


def test_a_trial_times_products_and_not_launches() -> None:
    """A GPU of 1000 TFLOP/s launches in 5 us and casts at 3 TB/s: products must take ten times
    that."""
    rows, width, repeats = trial_size("cuda")
    assert 2 * rows * width**2 / 1e15 > 10 * 5e-6
    assert repeats > 1
    rows, width, repeats = trial_size("cpu")
    assert 2 * rows * width**2 * repeats < 2e9  # tens of milliseconds of one core


def test_a_trial_of_equals_is_a_draw(monkeypatch) -> None:
    """The script itself runs: float32 against float32 is about as fast, whatever this machine
    has."""
    monkeypatch.setattr(
        settings, "_TRIAL", settings._TRIAL.replace("torch.bfloat16", "torch.float32")
    )
    settings.bfloat16_gain.cache_clear()
    gain = settings.bfloat16_gain("cpu", 1)
    settings.bfloat16_gain.cache_clear()
    assert gain is not None
    assert 0.05 < gain < 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bfloat16_pays_on_gpus_that_have_it() -> None:
    gain = settings.bfloat16_gain("cuda", 1)
    assert gain is not None
    assert (gain > 1.2) == (torch.cuda.get_device_capability() >= (8, 0))


def test_a_trial_that_dies_is_no_precision(monkeypatch) -> None:
    """As where instructions are advertised and cannot be run: the child ends, this process does
    not."""
    monkeypatch.setattr(
        settings, "_TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    )
    settings.bfloat16_gain.cache_clear()
    assert settings.bfloat16_gain("cpu", 1) is None
    monkeypatch.setattr(settings, "_TRIAL", "print(3.5)")
    settings.bfloat16_gain.cache_clear()
    assert settings.bfloat16_gain("cpu", 1) == 3.5
    settings.bfloat16_gain.cache_clear()


def test_devices_that_are_not_there() -> None:
    assert usable_device("cpu") == CPU
    with pytest.raises(OptionError, match="torch cannot compute on 'toaster'"):
        usable_device("toaster")


# -- folders ---------------------------------------------------------------------------------------


def test_shapes_are_read_from_old_and_new_configs(taught, tmp_path: Path) -> None:
    shape = target_shape(taught.folder)
    assert (shape.hidden, shape.n_layers, shape.n_heads, shape.n_kv_heads) == (64, 4, 4, 2)
    assert shape.rope_theta == 5000.0
    old = {
        "hidden_size": 60,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps({**old, "rope_theta": 7.0}))
    found = target_shape(tmp_path)
    assert (found.n_heads, found.n_kv_heads, found.rope_theta, found.feed_forward) == (
        6,
        3,
        7.0,
        240,
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"rope_parameters": {"full_attention": {"rope_theta": 9.0}}, **old})
    )
    assert target_shape(tmp_path).rope_theta == 9.0
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": "x"}))
    with pytest.raises(ModelError, match="'x' as hidden_size"):
        target_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        target_shape(tmp_path)


def test_a_folder_without_weights_is_named(taught, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((taught.folder / "config.json").read_bytes())
    with pytest.raises(ModelError, match="transformers cannot read the model"):
        load_hf_model(tmp_path, CPU)
