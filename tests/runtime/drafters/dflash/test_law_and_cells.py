"""Block drafters on real evaluations: the law of texts, and what their cells hold after rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.joint_law import ALPHA, WHOLE, model_joint_law, p_value, sampled_texts
from support.tiny_dflash import Generation, TinyDFlash, token_matrices
from support.tiny_models import CHAT, F32

from specrun.bindings.contexts import Context, ContextOptions
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.dflash import file
from specrun.runtime.drafters.dflash.source import BlockSource
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.language import quoted
from specrun.runtime.laws import SeededNoise
from specrun.runtime.round import (
    Conversation,
    DraftRequest,
    TargetModel,
    target_context_options,
)
from specrun.runtime.round.drafter import DrafterWeights, RoundOutcome
from specrun.runtime.round.results import SpecStats
from specrun.runtime.trees import ROOT, DraftTree

pytestmark = pytest.mark.long

VOCABULARY, PROMPT, LENGTH, SAMPLES = 12, [3, 1, 4], 3, 1500


@pytest.mark.parametrize(
    ("generation", "options"),
    [
        ("dflash2", "tree=2x1, sampling=without"),
        ("dspark", "tree=2x2, sampling=with"),
    ],
)
def test_texts_follow_the_targets_joint_law(
    tmp_path: Path, generation: Generation, options: str
) -> None:
    target = tmp_path / "target.gguf"
    write_random_llama(target, RandomLlama(vocab_size=VOCABULARY, seed=1, scale=0.6))
    tiny = TinyDFlash(generation, VOCABULARY, spread=0.3)
    path = tiny.write(tmp_path / "drafter.gguf", target)
    law = model_joint_law(target, PROMPT, LENGTH, least_entropy=2.0)
    drafter = f"dflash({quoted(str(path))}, {options})"
    with Runtime(target, drafter, n_ctx=256, n_threads=1) as runtime:
        texts = sampled_texts(runtime, PROMPT, LENGTH, SAMPLES, WHOLE)
        assert p_value(texts, law) > ALPHA


# -- cells -----------------------------------------------------------------------------------------


@contextmanager
def opened(
    folder: Path, generation: Generation, window: int = 0
) -> Iterator[tuple[Model, DrafterWeights]]:
    target = folder / "target.gguf"
    write_random_llama(target, RandomLlama(**CHAT))
    tiny = TinyDFlash(generation, taps=(1, 0), window=window, whole_window=True)
    path = tiny.write(folder / "drafter.gguf", target)
    with Model(target) as model:
        environment = DraftEnvironment(model, ContextOptions(**F32))
        expression = f"dflash({quoted(str(path))}, tree=2x2x1)"
        with closing(build_drafter(expression, environment)) as weights:
            yield model, weights


class Talk:
    """A conversation in a context of its own."""

    def __init__(self, model: Model, weights: DrafterWeights) -> None:
        self.drafter = weights.start()
        options = target_context_options(ContextOptions(**F32), self.drafter)
        self.target = TargetModel(Context(model, options))
        self.text = Conversation(self.drafter)

    def draft(self) -> DraftTree:
        tokens, noise = self.text.tokens, SeededNoise(3).for_drafting(len(self.text.tokens))
        params = SamplingParams(temperature=1.0, seed=1)
        return self.drafter.propose(DraftRequest(tokens, params, noise, 8, 16))

    def close(self) -> None:
        self.drafter.close()
        self.target.context.close()


@pytest.mark.parametrize("generation", ["dflash", "dflash2", "dspark"])
def test_drafts_are_those_of_a_fresh_drafter_after_any_rounds(
    tmp_path: Path, generation: Generation
) -> None:
    """Each accepted token's features are in the cells once, and nothing else is."""
    random = np.random.default_rng(5)
    with opened(tmp_path, generation) as (model, weights), closing(Talk(model, weights)) as live:
        live.text.begin(live.target, random.integers(6, 250, 90).tolist())
        drafts = set()
        for number in range(12):
            if number == 6:  # another answer, which keeps a part of the text
                kept = live.text.tokens[: len(live.text.tokens) - 9]
                live.text.begin(live.target, [*kept, *random.integers(6, 250, 4).tolist()])
            tree = live.draft()
            with closing(Talk(model, weights)) as fresh:
                fresh.text.begin(fresh.target, [*live.text.tokens])
                again = fresh.draft()
            assert (again.tokens, again.parents) == (tree.tokens, tree.parents)
            drafts.add(tree.tokens)
            rows = live.target.evaluate(live.text, tree)
            path = tuple(tree.path_to(int(random.integers(ROOT, len(tree)))))
            live.target.commit(live.text, tree, path)
            following = int(random.integers(6, 250))
            live.text.tokens.append(following)
            outcome = RoundOutcome(live.text.tokens, tree, path, following, rows)
            live.drafter.observe(outcome)
        assert len(drafts) > 3


def test_features_out_of_every_layers_sight_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long prompt; the drafts are those of a drafter that was given all of them."""
    prompt, read = np.random.default_rng(7).integers(6, 250, 150).tolist(), list[int]()
    states = BlockSource.read_states

    def counted(self: BlockSource, rows: Any, wanted: Any) -> Any:
        read.append(len(wanted))
        return states(self, rows, wanted)

    monkeypatch.setattr(BlockSource, "read_states", counted)
    drafts = []
    for window in (12, 0):
        if not window:  # a drafter that does not say so
            monkeypatch.setattr(file, "_window", lambda _: 0)
        folder = tmp_path / str(window)
        folder.mkdir()
        with opened(folder, "dspark", window=12) as (model, weights):
            with closing(Talk(model, weights)) as talk:
                talk.text.begin(talk.target, prompt)
                drafts.append(talk.draft())
    assert drafts[0].tokens == drafts[1].tokens
    assert read[0] == 12
    assert sum(read[1:]) == len(prompt) - 1


# -- a drafter that knows its target ---------------------------------------------------------------


class Bigrams(TinyDFlash):
    """DSpark whose Markov head is the target's own law, if that depends on the last token alone."""

    def of(self, target: Path) -> dict[str, Any]:
        embeddings, output = token_matrices(target)
        made = super().tensors()
        norms = np.sqrt((embeddings**2).mean(axis=1, keepdims=True) + 1e-5)
        changed = {"markov_w1.weight": embeddings / norms, "markov_w2.weight": output}
        changed["output_norm.weight"] = np.zeros_like(made["output_norm.weight"])
        return {name: changed.get(name, array).astype(np.float32) for name, array in made.items()}


@pytest.fixture
def bigrams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A target whose layers add nothing, and its drafter."""
    target = tmp_path / "target.gguf"
    write_random_llama(target, RandomLlama(**CHAT))
    with target.open("r+b") as file:
        for tensor in read_header(target).tensors:
            if tensor.name.endswith(("attn_output.weight", "ffn_down.weight")):
                file.seek(tensor.offset)
                file.write(bytes(tensor.n_bytes))
    drafter = Bigrams("dspark", rank=32)
    made = drafter.of(target)
    monkeypatch.setattr(Bigrams, "tensors", lambda self: made)
    return target, drafter.write(tmp_path / "drafter.gguf", target)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("options", "depth"), [("n=5, sampling=with", 5), ("tree=2x2x1, sampling=without", 3)]
)
def test_what_equals_the_targets_law_is_accepted(
    bigrams: tuple[Path, Path], options: str, depth: int, temperature: float
) -> None:
    """Along drawn tokens, which are seldom the drafter's favourites."""
    stats = stats_of(bigrams, options, temperature)
    assert stats.mean_accepted_length > 0.98 * (1 + depth)


def test_favourites_of_the_same_law_are_accepted_at_temperature_0_alone(
    bigrams: tuple[Path, Path],
) -> None:
    """The control: at 1 the target's tokens are its favourites in few places."""
    assert stats_of(bigrams, "n=5", 0.0).mean_accepted_length > 0.98 * 6
    assert stats_of(bigrams, "n=5", 1.0).acceptance_rate < 0.5


def stats_of(bigrams: tuple[Path, Path], options: str, temperature: float) -> SpecStats:
    target, path = bigrams
    params = WHOLE.replace(temperature=temperature, seed=3, logit_bias={319: float("-inf")})
    drafter = f"dflash({quoted(str(path))}, {options})"
    with Runtime(target, drafter, **F32, trust=True) as runtime:
        return runtime.generate([3, 1, 4], params, max_tokens=120).stats
