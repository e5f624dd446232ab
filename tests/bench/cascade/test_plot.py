"""The picture of cascades: every method has a look of its own, and all of them are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrun.bench.cascade.comparison import PLAIN_SMALL, PLAIN_TARGET, CascadePoint
from specrun.bench.cascade.report import looks_of, plot_cascades
from specrun.bench.timing import Ratio, spread_of
from specrun.bindings.errors import OptionError

METHODS = ["exact", *(f"rule-{number}" for number in range(15))]


def point(method: str, latency: float, length: int | None = 5) -> CascadePoint:
    quality = spread_of([0.5 * latency])
    return CascadePoint(
        method=method,
        rule=method,
        exact=method == "exact",
        temperature=1.0,
        top_p=1.0,
        draft_length=length,
        n_examples=3,
        repetitions=1,
        tokens=30,
        seconds_per_token=quality,
        seconds_per_answer=quality,
        latency=Ratio(latency, latency, latency),
        speed_up=1.0 / latency,
        rejection_rate=0.1 * latency,
        deferral_rate=None,
        exact_match=quality,
        rouge_2=quality,
        bleu=quality,
        cross_entropy=quality,
        excess_cross_entropy=quality,
        expected_accuracy=0.5,
        total_variation=0.1,
        changed_share=0.1,
    )


def test_no_two_methods_look_alike() -> None:
    names = [f"method {number}" for number in range(60)]
    looks = looks_of(names)
    assert len({tuple(look.items()) for look in looks.values()}) == len(names)
    # If colours have to come again, marks and dashes distinguish methods, each alone.
    for number, name in enumerate(names[:28]):
        for other in names[:number]:
            if looks[name]["color"] == looks[other]["color"]:
                assert looks[name]["linestyle"] != looks[other]["linestyle"]
                assert looks[name]["marker"] != looks[other]["marker"]
    assert len({looks[name]["color"] for name in names[:7]}) == 7


def test_a_picture_of_many_methods_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plain = [point(PLAIN_TARGET, 1.0, None), point(PLAIN_SMALL, 0.1, None)]
    points = [point(method, latency) for method in METHODS for latency in (0.5, 0.8)]
    plot_cascades([*plain, *points], tmp_path / "all.svg")
    drawn = (tmp_path / "all.svg").read_text()
    assert drawn.count('<g id="legend_1">') == 1
    with pytest.raises(OptionError, match="no rule among the results"):
        plot_cascades(plain, tmp_path / "none.png")
