"""Ctrl-C reaches what the tests start, also when the tests run where it is ignored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from support.ctrl_c import hearing_ctrl_c

INTERRUPTED = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
    print("not heard")
except KeyboardInterrupt:
    print("heard")
"""


@pytest.mark.skipif(os.name == "nt", reason="children inherit no signals there")
def test_a_child_hears_it_where_its_parent_does_not() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        inherited = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        with hearing_ctrl_c():
            heard = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert (inherited, heard) == ("not heard\n", "heard\n")
