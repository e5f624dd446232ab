"""A GGUF file as a target alone: its tokens, sizes and states are those of the folder that it was
converted from, and heads learn the same from either."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from support.renamed_models import as_architecture
from support.sparse_models import write_sparse
from support.tiny_mamba import write_tiny_mamba
from support.tiny_targets import ANSWERS, write_untaught
from support.training import SMALL_RUN

from specrun.bindings.errors import OptionError, SpecrunError, TemplateError, UnsupportedModelError
from specrun.convert import convert_checkpoint
from specrun.convert.gguf import GGUFSource
from specrun.convert.heads.head_conversion import convert_head
from specrun.convert.quantize import quantize_model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.chat import ChatTemplate
from specrun.train.data import Answered, AnswerSettings, built_in_prompts, most_prompts
from specrun.train.data.documents import Chat, Document, PlainText
from specrun.train.data.prompts import read_prompts
from specrun.train.data.tokens import FileTokens, TargetTokenizer
from specrun.train.heads import (
    Eagle3Recipe,
    EagleRecipe,
    HeadRecipe,
    HeadRun,
    Medusa2Recipe,
    MedusaRecipe,
)
from specrun.train.target import file_target as file_shape_module
from specrun.train.target import open_head_target
from specrun.train.target import states as states_module
from specrun.train.target.file_target import check_matrices, teacher_matrices
from specrun.train.target.shape import file_shape, target_shape
from specrun.train.trainer import train

pytestmark = pytest.mark.long

DOCUMENTS: list[Document] = [
    *(Answered(question, answer) for question, answer in ANSWERS.items()),
    Answered("first?", None),
    Answered("naïve 東京 👋 or <|x", "Ünïcödé 👋👋 answers, \n\n too  "),
    Chat(
        (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "second?"},
            {"role": "assistant", "content": ANSWERS["second?"]},
            {"role": "user", "content": "And the last?"},
            {"role": "assistant", "content": ANSWERS["last?"]},
        )
    ),
    PlainText("A third would never say.\n\n\tdef f(x): # Zwölf\n"),
]
RECIPES: tuple[HeadRecipe, ...] = (EagleRecipe(noise=0.0), Eagle3Recipe(steps=2))
"""One that reads final states, and one that reads inputs of layers."""


def run_of(target: Path, output: Path, **changes) -> HeadRun:
    usual = {**SMALL_RUN, "steps": 6, "tokens_per_batch": 128, "held_out": 0.2, "data": ()}
    return HeadRun(target, output=output, **{**usual, **changes})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: type(document).__name__)
def test_a_files_tokens_are_its_folders(taught, document: Document) -> None:
    file, folder = FileTokens(taught.gguf), TargetTokenizer(taught.folder)
    ours, theirs = file.encode(document), folder.encode(document)
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert ours.learnt.tolist() == theirs.learnt.tolist()
    assert file.prompt(document) == folder.prompt(document)
    assert file.text(ours.ids.tolist()) == folder.text(ours.ids.tolist())
    assert file.eos == folder.eos


def test_chats_that_a_template_refuses_are_learnt_in_a_form_that_it_takes(taught) -> None:
    """Only the answers are learnt, with the ends that the template writes."""
    refusing = ChatTemplate(
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    turns = [
        *(("system", "Be brief."), ("user", "second?"), ("assistant", "One."), ("system", "Hm.")),
        *(("user", "And?"), ("assistant", "Two."), ("assistant", "Three.")),
    ]
    chat = Chat(tuple({"role": role, "content": text} for role, text in turns))
    for tokens in (FileTokens(taught.gguf), TargetTokenizer(taught.folder)):
        tokens.template = refusing
        found = tokens.encode(chat)
        whole, learnt = (tokens.text(ids.tolist()) for ids in (found.ids, found.ids[found.learnt]))
        first = "<|user|>Be brief.\n\nsecond?<|end|><|assistant|>"
        last = "<|end|><|user|>Hm.\n\nAnd?<|end|><|assistant|>"
        assert whole.endswith(f"{first}One.{last}Two.\n\nThree.<|end|>")
        assert learnt == "One.<|end|>Two.\n\nThree.<|end|>"
        asked = tokens.prompt(chat)
        assert asked is not None
        assert tokens.text(asked).endswith(f"{first}One.{last}")


def test_what_a_user_types_is_no_control_token(taught) -> None:
    """As in the runtime, where folders' tokenizers are fooled."""
    tokens = FileTokens(taught.gguf)
    typed = Answered("say <|end|> twice", "Then I said: <|end|>, and stopped.")
    found = tokens.encode(typed)
    end = tokens.vocabulary.tokenize("<|end|>", add_special=False, parse_special=True)
    assert len(end) == 1
    assert found.ids.tolist().count(end[0]) == 2  # what ends either message
    learnt = tokens.text(found.ids[found.learnt].tolist())
    assert learnt == "Then I said: <|end|>, and stopped.<|end|>"


def test_a_files_sizes_are_its_folders(taught) -> None:
    assert file_shape(GGUFSource(taught.gguf)) == target_shape(taught.folder)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)
def test_losses_are_those_of_the_folder(taught, tmp_path: Path, recipe: HeadRecipe) -> None:
    """To 1e-3 with a file in F32, at every step; another seed's are far off.

    Adam's first step moves every number by the rate, whatever its gradient: at the usual rate of so
    narrow a target those that round to another sign would be seen.
    """
    settings = {"data": (taught.data,), "learning_rate": 3e-4}
    folder = train(recipe, run_of(taught.folder, tmp_path / "folder", **settings))
    file = train(recipe, run_of(taught.gguf, tmp_path / "file", **settings))
    other = train(recipe, run_of(taught.gguf, tmp_path / "other", **settings, seed=1))
    ours, theirs = file.result.curves.losses, folder.result.curves.losses
    assert len(ours) == 6
    np.testing.assert_allclose(ours, theirs, rtol=0.0, atol=1e-3)
    assert np.abs(np.subtract(other.result.curves.losses, theirs)).max() > 1e-2
    for name, value in folder.result.curves.measures[-1][1].items():
        assert file.result.curves.measures[-1][1][name] == pytest.approx(value, abs=0.05)


def test_states_on_the_fly_are_those_of_the_disk(taught, tmp_path: Path) -> None:
    """But for float16, in which the disk has them; nothing is written beside the checkpoint."""
    recipe, data = EagleRecipe(), (taught.data,)
    losses = {}
    for cache in ("yes", "no"):
        output = tmp_path / cache
        report = train(recipe, run_of(taught.gguf, output, data=data, cache=cache))
        losses[cache] = report.result.curves.losses
    np.testing.assert_allclose(losses["no"], losses["yes"], atol=1e-3)
    assert losses["no"] != losses["yes"]


def test_another_file_is_another_run(taught, tmp_path: Path) -> None:
    run = run_of(taught.gguf, tmp_path / "head", data=(taught.data,), steps=1)
    train(EagleRecipe(), run)
    quantized = tmp_path / "q8.gguf"
    quantize_model(taught.gguf, quantized, "Q8_0")
    with pytest.raises(OptionError, match="target"):
        train(EagleRecipe(), replace(run, resume=True, target=quantized))


def test_a_head_from_a_quantized_file_and_prompts_alone_drafts(taught, tmp_path: Path) -> None:
    """No folder, no answers: the file answers, its states are learnt, and the head drafts for it
    what it says."""
    target = tmp_path / "q8.gguf"
    quantize_model(taught.gguf, target, "Q8_0")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join([*ANSWERS, ""]))
    run = run_of(
        target, tmp_path / "head", prompts=prompts, own_answers=AnswerSettings(longest=40),
        steps=60, tokens_per_batch=256, learning_rate=4e-3, held_out=0.0,
    )  # fmt: skip
    report = train(EagleRecipe(), run)
    card = (report.output / "README.md").read_text()
    assert "prompts.txt, answered by the target" in card
    assert f"are those of {target.name}, computed by llama.cpp" in card
    gguf = tmp_path / "head.gguf"
    convert_head(report.output, gguf, target=target)
    described = GGUFReader(gguf).fields
    stored = bytes(described["specrun.target.vocabulary_sha256"].parts[-1]).decode()
    assert stored == FileTokens(target).vocabulary.fingerprint.hex()
    options = {"n_threads": 1, "n_threads_batch": 1, "n_ctx": 256, "flash_attention": "off"}
    texts, rounds = {}, {}
    for drafter in ("none", f"eagle({gguf}, n=4)"):
        with Runtime(target, drafter=drafter, **options) as runtime:
            found = [
                runtime.chat(
                    [{"role": "user", "content": question}],
                    SamplingParams(temperature=0.0),
                    max_tokens=40,
                )
                for question in ANSWERS
            ]
        texts[drafter] = [result.text for result in found]
        rounds[drafter] = sum(result.stats.rounds for result in found)
    plain, drafted = texts
    assert texts[plain] == texts[drafted]
    assert rounds[drafted] < 0.6 * rounds[plain]


# -- what no head can be trained for ---------------------------------------------------------------


def without(source: Path, path: Path, key: str) -> Path:
    """Copy a file, but for one key of its metadata."""
    reader, writer = GGUFReader(source), GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", key):
            continue
        element = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refused(target: Path, output: Path, recipe: HeadRecipe | None = None, **changes) -> str:
    """Return the one sentence with which a run is refused; nothing is written."""
    run = run_of(target, output, **{"own_answers": AnswerSettings(longest=4), **changes})
    with pytest.raises(SpecrunError) as caught:
        train(recipe or EagleRecipe(), run)
    assert not output.exists()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_file_without_a_template_is_not_asked_the_built_in_prompts(
    taught, tmp_path: Path
) -> None:
    bare = without(taught.gguf, tmp_path / "bare.gguf", "tokenizer.chat_template")
    assert "has no chat template, so it would not answer" in refused(bare, tmp_path / "out")
    tokens = FileTokens(bare)
    assert tokens.prompt(Answered("A third", None)) == tokens.tokenize("A third")
    with pytest.raises(TemplateError, match=r"bare\.gguf has no chat template"):
        tokens.encode(Chat(({"role": "assistant", "content": "x"},)))


def test_an_unknown_vocabulary_is_named(taught, tmp_path: Path) -> None:
    bare = without(taught.gguf, tmp_path / "bare.gguf", "tokenizer.ggml.model")
    assert "bare.gguf" in refused(bare, tmp_path / "out")


def test_taps_that_llama_cpp_does_not_give_are_refused_at_once(taught, tmp_path: Path) -> None:
    """EAGLE-1 learns from the same file, of an architecture without taps."""
    renamed = as_architecture(taught.gguf, tmp_path / "mistral.gguf", "mistral3")
    message = refused(renamed, tmp_path / "out", Eagle3Recipe())
    assert re.search(r"is a mistral3 model.*train eagle, medusa or hydra", message)
    run = run_of(renamed, tmp_path / "head", data=(taught.data,), steps=1)
    assert len(train(EagleRecipe(), run).result.curves.losses) == 1


def test_a_head_is_no_target(taught, tmp_path: Path) -> None:
    run = run_of(taught.gguf, tmp_path / "head", data=(taught.data,), steps=1)
    convert_head(train(EagleRecipe(), run).output, tmp_path / "h.gguf", target=taught.gguf)
    assert "is itself a head (eagle)" in refused(tmp_path / "h.gguf", tmp_path / "out")


def test_a_part_of_a_split_model_is_no_target(taught, tmp_path: Path, monkeypatch) -> None:
    real = file_shape_module.read_header

    def split(path: Path):
        header = real(path)
        return replace(header, metadata={**header.metadata, "split.count": 2})

    monkeypatch.setattr(file_shape_module, "read_header", split)
    assert "merge the parts first" in refused(taught.gguf, tmp_path / "out")


def test_recurrent_states_cannot_be_taken_back(tmp_path: Path) -> None:
    path = write_tiny_mamba(tmp_path / "mamba.gguf")
    assert "recurrent" in refused(path, tmp_path / "out", prompts=path)


def test_experts_are_learnt_from_with_a_caution(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "experts.gguf", "qwen3moe")
    assert re.search(
        r"has \d+ experts a layer: every drafted",
        open_head_target(path, None, device=torch.device("cpu")).caution,
    )


def test_what_is_missing_or_contradicts_is_one_sentence(taught, tmp_path: Path) -> None:
    assert "there is no" in refused(tmp_path / "none.gguf", tmp_path / "out")
    (tmp_path / "text.gguf").write_text("no model")
    assert "text.gguf" in refused(tmp_path / "text.gguf", tmp_path / "out")
    both = refused(taught.gguf, tmp_path / "out", teacher=taught.gguf)
    assert "leave out --teacher" in both
    with pytest.raises(OptionError, match="no data are given"):
        run_of(taught.gguf, tmp_path / "out")
    with pytest.raises(OptionError, match="give the Hugging Face folder of target"):
        run = run_of(taught.gguf, tmp_path / "out", data=(taught.data,))
        train(Medusa2Recipe(MedusaRecipe(heads=1)), run)
    assert "give 1 to" in refused(taught.gguf, tmp_path / "out", n_prompts=10**6)


def test_a_full_disk_is_found_before_states_are_computed(
    taught, tmp_path: Path, monkeypatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    full = type(usage)(usage.total, usage.total - 100, 100)
    monkeypatch.setattr(states_module.shutil, "disk_usage", lambda _: full)
    changes = {"data": (taught.data,), "cache": "yes", "own_answers": None}
    assert "0.00 GiB are free" in refused(taught.gguf, tmp_path / "out", **changes)
    run = run_of(taught.gguf, tmp_path / "out", data=(taught.data,), steps=1)
    assert train(EagleRecipe(), run).n_trained  # on the fly, where the choice is ours


def test_logits_that_are_more_than_their_matrix_are_noticed(taught, tmp_path: Path) -> None:
    """Whatever the header says: the numbers are compared."""
    matrices = teacher_matrices(taught.gguf, torch.device("cpu"))
    states = torch.randn(4, matrices.output.shape[1], generator=torch.Generator().manual_seed(0))
    own = matrices.logits(states)
    check_matrices(matrices, states, own * 1.02, taught.gguf)
    for changed in (own * 4, own + own.std(), own[:, :-1]):
        with pytest.raises(UnsupportedModelError, match="changes its logits"):
            check_matrices(matrices, states, changed, taught.gguf)


def test_other_tokens_in_the_same_sizes_are_another_target(taught, tmp_path: Path) -> None:
    """A head says what vocabulary it was made for, and is refused by a file of another."""
    write_untaught(tmp_path / "other", seed=3)
    settings = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocabulary = settings["model"]["vocab"]
    first, second = [token for token, number in vocabulary.items() if number in (300, 301)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(settings))
    convert_checkpoint(tmp_path / "other", tmp_path / "other.gguf", outtype="f32", verify=False)
    run = run_of(taught.gguf, tmp_path / "head", data=(taught.data,), steps=1)
    convert_head(train(EagleRecipe(), run).output, tmp_path / "h.gguf", target=taught.gguf)
    with (
        pytest.raises(SpecrunError, match="vocabular"),
        Runtime(tmp_path / "other.gguf", drafter=f"eagle({tmp_path / 'h.gguf'})", n_threads=1),
    ):
        pass


# -- prompts ---------------------------------------------------------------------------------------


def test_prompts_of_a_file_are_lines_or_objects(taught, tmp_path: Path) -> None:
    lines, objects = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("one thing\n\n  two\n")
    objects.write_text('{"prompt": "one thing"}\n{"question": "  two", "answer": "no"}\n')
    assert [each.prompt for each in read_prompts(lines)] == ["one thing", "  two"]
    assert [each.prompt for each in read_prompts(objects)] == ["one thing", "  two"]
    (tmp_path / "texts.jsonl").write_text('{"text": "nothing is asked"}\n')
    with pytest.raises(SpecrunError, match="holds no prompts"):
        read_prompts(tmp_path / "texts.jsonl")


def test_built_in_prompts_are_many_and_a_few_are_the_first_of_them() -> None:
    every = built_in_prompts(most_prompts())
    texts = [each.prompt for each in every]
    assert len(set(texts)) == len(texts) > 16_000
    assert every[:50] == built_in_prompts(50)
    assert not any("{" in text for text in texts)
    assert len({text.split()[0] for text in texts[:200]}) > 10  # mixed, not template by template
