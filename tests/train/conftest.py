"""Training tests run on one thread: more would spin at barriers whenever the cores are shared."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def taught(one_thread, tmp_path_factory: pytest.TempPathFactory):
    """A tiny target that knows six answers by heart."""
    pytest.importorskip("transformers")
    from support.tiny_targets import write_taught

    folder: Path = tmp_path_factory.mktemp("taught")
    return write_taught(folder)
