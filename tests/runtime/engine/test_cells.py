"""Counting of shared cells, against a simulation that gives every cell a name."""

from __future__ import annotations

import itertools
import random

import pytest

from specrun.runtime.engine.slots import Run, SlotCells, count_cells


@pytest.mark.parametrize("seed", range(20))
def test_cells_in_use_are_counted_as_they_lie(seed: int) -> None:
    draw, names = random.Random(seed), itertools.count()
    slots = [SlotCells() for _ in range(4)]
    cells: list[list[int]] = [[] for _ in slots]
    for _ in range(200):
        index = draw.randrange(4)
        slot, own = slots[index], cells[index]
        what = draw.randrange(3)
        if what == 0:
            own += [next(names) for _ in range(draw.randrange(1, 9))]
        elif what == 1:
            length = draw.randrange(len(own) + 1)
            slot.cut(len(own), length)
            del own[length:]
        else:
            other = draw.randrange(4)
            if other != index:
                length = draw.randrange(len(cells[other]) + 1)
                slot.share(slots[other], len(cells[other]), length)
                own[:] = cells[other][:length]
        runs = [run for each, of in zip(slots, cells, strict=True) for run in each.runs(len(of))]
        assert count_cells(runs) == len({name for of in cells for name in of})


def test_a_block_that_grew_is_counted_once() -> None:
    assert count_cells([Run(1, 0, 5), Run(1, 0, 8), Run(2, 5, 9)]) == 12


def test_what_was_cut_and_grown_again_lies_elsewhere() -> None:
    first, second = SlotCells(), SlotCells()
    second.share(first, 10, 10)
    first.cut(10, 4)
    # 4 cells of both, 6 that the second one has kept, 8 new ones of the first.
    assert count_cells([*first.runs(12), *second.runs(10)]) == 18
