"""The search for layers to skip finds the known best, keeps to its bound, and can be stopped."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from support.commands import run

from specrun.bench.layer_search import CutJudge, LayerSearchOptions, LayerTrial, search_layers
from specrun.bindings.contexts import ContextOptions
from specrun.bindings.errors import OptionError, SpecrunError
from specrun.bindings.models import Model
from specrun.convert import RandomLlama, write_random_llama
from specrun.convert.gguf import GGUFSource, PlannedTensor, write_gguf
from specrun.runtime.laws import SamplingParams
from specrun.runtime.memory import LoadOptions

LAYERS = 5
NEEDED = {1, 3}  # the other layers add nothing to their input


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which two layers do all the work: the others' outputs are multiplied by zero."""
    folder = tmp_path_factory.mktemp("sparse")
    write_random_llama(
        folder / "dense.gguf", RandomLlama(vocab_size=300, layers=LAYERS, context=256, scale=3.0)
    )
    source = GGUFSource(folder / "dense.gguf")
    tensors: list[PlannedTensor] = []
    for tensor in source.header.tensors:
        planned = source.unchanged(tensor, tensor.name)
        parts = tensor.name.split(".")
        adds = parts[0] == "blk" and parts[2] in ("attn_output", "ffn_down")
        if adds and int(parts[1]) not in NEEDED:
            zeros = np.zeros(planned.shape, np.float32)
            planned = PlannedTensor(planned.name, planned.shape, "F32", lambda zeros=zeros: zeros)
        tensors.append(planned)
    write_gguf(folder / "sparse.gguf", "llama", source.metadata(), tensors)
    return folder / "sparse.gguf"


def options(path: Path, **changes: object) -> LayerSearchOptions:
    values = {
        "evaluations": 24,
        "n_tokens": 24,
        "seconds": 0.05,
        "loading": LoadOptions(ContextOptions(n_ctx=128, n_threads=1)),
    }
    return LayerSearchOptions(path, SamplingParams(temperature=0.0), **{**values, **changes})  # type: ignore[arg-type]


def prompts(_model: Model) -> list[list[int]]:
    return [[7, 30, 2, 11], [97, 98, 99]]


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs by rule, so that this machine's speed plays no part: a layer takes 0.01 seconds."""
    monkeypatch.setattr(CutJudge, "_step_seconds", lambda _self, count: 0.01 * (count + 0.5))
    original = CutJudge.__init__

    def init(self: CutJudge, *arguments: object) -> None:
        original(self, *arguments)  # type: ignore[arg-type]
        from specrun.runtime.planning import CostCurve

        self._curve = CostCurve.flat([0.01 * (LAYERS + 0.5) * (1 + 0.1 * n) for n in range(20)])

    monkeypatch.setattr(CutJudge, "__init__", init)


def test_the_layers_that_do_nothing_are_found(sparse: Path, steady: None) -> None:
    shares: list[float] = []
    result = search_layers(options(sparse), prompts, lambda _what, share: shares.append(share))
    assert set(result.best.kept) == NEEDED
    assert result.best.acceptance == pytest.approx(1.0)
    assert result.best.speed_up > 1.5
    sets = [trial.kept for trial in result.trials]
    assert len(sets) == len(set(sets)) <= 24
    assert all(0 < len(kept) < LAYERS for kept in sets)
    assert shares == sorted(shares)
    assert shares[-1] <= 1.0
    # If every needed layer is kept, all is accepted; the share is below 1 if one is not.
    for trial in result.trials:
        assert trial.acceptance == pytest.approx(1.0) or not set(trial.kept) >= NEEDED
    assert min(trial.acceptance for trial in result.trials) < 0.5
    # Among sets that accept alike, fewer layers are faster.
    whole = [trial for trial in result.trials if set(trial.kept) >= NEEDED]
    for first, other in itertools.permutations(whole, 2):
        assert (len(first.kept) < len(other.kept)) <= (first.predicted > other.predicted)


def test_the_bound_holds_and_the_search_is_the_same_again(sparse: Path, steady: None) -> None:
    first, again = (search_layers(options(sparse, evaluations=4), prompts) for _ in range(2))
    assert len(first.trials) == 4
    assert first.trials == again.trials


def test_sampled_drafts_are_searched_too(sparse: Path, steady: None) -> None:
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    searched = dataclasses.replace(options(sparse, evaluations=12), params=params)
    result = search_layers(searched, prompts)
    assert set(result.best.kept) >= NEEDED
    assert result.best.sampling == "with"


def test_ctrl_c_keeps_what_was_found(
    sparse: Path, steady: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, judged = CutJudge.judge, itertools.count(1)

    def judge(self: CutJudge, kept: tuple[int, ...]) -> LayerTrial:
        if next(judged) == 4:
            raise KeyboardInterrupt
        return original(self, kept)

    monkeypatch.setattr(CutJudge, "judge", judge)
    result = search_layers(options(sparse), prompts)
    assert (result.interrupted, len(result.trials)) == (True, 3)


def test_what_cannot_be_searched_is_refused(
    sparse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError, match="at least 1"):
        options(sparse, evaluations=0)
    write_random_llama(tmp_path / "flat.gguf", RandomLlama(layers=1))
    with pytest.raises(OptionError, match="there is none to skip"):
        search_layers(options(tmp_path / "flat.gguf"), prompts)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SpecrunError, match=r"optuna: run pip install .* '\.\[tune\]'"):
        search_layers(options(sparse), prompts)


def tune(*arguments: object) -> Result:
    fast = "-t 1 -c 128 -n 16 --seconds 0.05 --evaluations 5 -p abc"
    return run(f"tune --layer-skip {fast}", *arguments)


def test_the_command_prints_draws_and_writes(sparse: Path, tmp_path: Path) -> None:
    picture, cut = tmp_path / "search.svg", tmp_path / "cut.gguf"
    result = tune("-m", sparse, "--plot", picture, "--cut", cut)
    assert result.exit_code == 0, result.output
    assert "Predicted at temperature 0" in result.stdout
    assert picture.read_text().startswith("<?xml")
    with Model(cut) as model:
        assert 0 < model.n_layer < LAYERS
    content = json.loads(tune("-m", sparse, "--temp", "0.7", "--json").stdout)
    assert len(content["trials"]) == 5
    assert content["temperature"] == 0.7


def test_the_command_refuses_what_makes_no_sense(sparse: Path, tmp_path: Path) -> None:
    (tmp_path / "there.gguf").write_text("precious")
    cases = [
        ((), 2, "no model is given"),
        (("-m", sparse, "-md", sparse), 2, "leave out -md"),
        (("-m", sparse, "--temp", "0,1"), 2, "one temperature"),
        (("-m", sparse, "--plot", "x.txt"), 2, "not a picture"),
        (("-m", sparse, "--cut", tmp_path / "there.gguf"), 2, "--force"),
        (("-m", tmp_path / "none.gguf"), 3, "no file"),
    ]
    for arguments, code, problem in cases:
        result = tune(*arguments)
        assert (result.exit_code, result.stdout) == (code, ""), result.output
        assert problem in result.stderr
    result = run("tune --cut x.gguf -m", sparse, "-md", sparse)
    assert result.exit_code == 2
    assert "--layer-skip" in result.stderr


def test_a_search_ends_after_its_time(sparse: Path, steady: None) -> None:
    result = search_layers(options(sparse, most_seconds=1e-9), prompts)
    assert len(result.trials) == 1
    assert not result.interrupted
