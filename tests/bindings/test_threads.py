"""Threads: counted on made-up machines, made to yield, and refused after a fork."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from specrun.bindings.library import has_function
from specrun.bindings.machine import patience as module
from specrun.bindings.machine import supports_gpu_offload
from specrun.bindings.machine.patience import Patience
from specrun.bindings.threads import (
    SPINS,
    SPINS_BUSY,
    Processors,
    available_cores,
    count_cores,
    cpu_quota,
    describe_waiting,
    patient_threads,
)
from specrun.runtime.demo import demo_target

TOPOLOGY = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def machine(root: Path, **files: str) -> Path:
    """Write files by their paths below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_two_threads_of_a_core_are_one_core(tmp_path: Path) -> None:
    pairs = {number: f"{number % 4},{number % 4 + 4}" for number in range(8)}
    machine(tmp_path, **{TOPOLOGY.format(number): pairs[number] for number in pairs})
    assert count_cores(set(range(8)), tmp_path) == 4
    assert count_cores({0, 4}, tmp_path) == 1  # the affinity leaves both threads of one core
    assert count_cores({0, 1, 6}, tmp_path) == 3


def test_without_a_topology_every_processor_is_a_core(tmp_path: Path) -> None:
    assert count_cores({0, 1, 5}, tmp_path) == 3


def test_slow_cores_are_left_out_if_a_fast_one_may_be_used(tmp_path: Path) -> None:
    siblings = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5", 6: "6", 7: "7"}
    machine(tmp_path, **{TOPOLOGY.format(number): text for number, text in siblings.items()})
    machine(tmp_path, **{"sys/devices/cpu_core/cpus": "0-3"})
    assert count_cores(set(range(8)), tmp_path) == 2
    assert count_cores({4, 5, 6}, tmp_path) == 3


SECOND, FIRST = "0::/a/b", "9:name=systemd:/x\n2:cpu,cpuacct:/a/b\n0::/"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, math.inf),
        ({"proc/self/cgroup": SECOND}, math.inf),
        ({"proc/self/cgroup": SECOND, "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, math.inf),
        ({"proc/self/cgroup": SECOND, "sys/fs/cgroup/a/b/cpu.max": "250000 100000"}, 2.5),
        ({"proc/self/cgroup": SECOND, "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 0.5),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "300000 100000"}, 3.0),
        (
            {
                "proc/self/cgroup": SECOND,
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
                "sys/fs/cgroup/a/cpu.max": "150000 100000",
            },
            1.5,
        ),
        ({"proc/self/cgroup": SECOND, "sys/fs/cgroup/a/b/cpu.max": "nonsense"}, math.inf),
        (
            {
                "proc/self/cgroup": FIRST,
                "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
            },
            math.inf,
        ),
        (
            {
                "proc/self/cgroup": FIRST,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",  # a container's own view
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            2.0,
        ),
    ],
)
def test_quotas_of_control_groups(tmp_path: Path, files: dict[str, str], quota: float) -> None:
    assert cpu_quota(machine(tmp_path, **files)) == quota


@pytest.mark.parametrize(
    ("processors", "threads"),
    [
        (Processors(8, 4), 4),
        (Processors(8, 4, 2.9), 2),
        (Processors(8, 4, 0.5), 1),
        (Processors(2, 2, 16.0), 2),
    ],
)
def test_as_many_threads_as_cores_and_quota_allow(processors: Processors, threads: int) -> None:
    assert processors.n_threads == threads


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
def test_no_more_threads_than_this_process_may_use() -> None:
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))


def test_the_setting_is_seen_by_the_library_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    with patient_threads():
        assert os.environ["GOMP_SPINCOUNT"] == str(SPINS)
    assert "GOMP_SPINCOUNT" not in os.environ
    assert "OMP_WAIT_POLICY" not in os.environ
    assert f"GOMP_SPINCOUNT={SPINS} or {SPINS_BUSY}" in describe_waiting(has_libgomp=True)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    with patient_threads():
        assert "GOMP_SPINCOUNT" not in os.environ
    assert "OMP_WAIT_POLICY=passive" in describe_waiting(has_libgomp=True)
    assert "without libgomp" in describe_waiting(has_libgomp=False)


BUSY, QUIET = "other programs used 1.0 of 2 processors", ""
WORK, IDLE = 0.5, 0.01  # seconds of this process's work in half a second


@pytest.mark.parametrize(
    ("looks", "added"),
    [
        ([(QUIET, WORK), (QUIET, WORK), (QUIET, IDLE)], []),
        ([(QUIET, WORK), (BUSY, WORK), (BUSY, WORK), (QUIET, WORK)], [1]),
        ([(BUSY, WORK), (BUSY, IDLE)], [0]),
        ([(BUSY, IDLE)], []),
    ],
)
def test_sleepers_are_there_while_others_work(
    looks: list[tuple[str, float]], added: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    at, adds = 0, list[int]()

    def disturbance() -> str:
        nonlocal at
        at += 1
        return looks[at - 1][0]

    def worked() -> float:
        return sum(work for _, work in looks[:at])

    clock = SimpleNamespace(sleep=lambda seconds: None, process_time=worked)
    load = SimpleNamespace(disturbance=disturbance)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "OtherLoad", lambda n_threads: load)
    monkeypatch.setattr(module, "add_sleepers", lambda n_threads: adds.append(at - 1))
    patience = Patience()
    patience.is_unwatched = False
    patience.run(2)
    assert (at, adds, patience.is_unwatched) == (len(looks), added, True)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, str(demo_target())],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


def test_libgomp_reads_the_setting() -> None:
    """It prints the settings it has read when it is loaded, with a variable set."""
    if not has_function("GOMP_parallel"):
        pytest.skip("this llama.cpp is built without libgomp")
    code = "from specrun.bindings.library import llama; llama()"
    read = run(code, OMP_DISPLAY_ENV="verbose").stderr
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in read
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in read
    chosen = run(code, OMP_DISPLAY_ENV="verbose", GOMP_SPINCOUNT="77").stderr
    assert "GOMP_SPINCOUNT = '77'" in chosen


SPINNING = """
import ctypes, os, threading, time
os.sched_setaffinity(0, range(os.cpu_count()))  # this run's process may have one core alone
from specrun.bindings.library import llama, native_function
from specrun.bindings.machine.patience import add_sleepers
llama()
pointer = ctypes.c_void_p
call = ctypes.CFUNCTYPE(None, pointer)
parallel = native_function("GOMP_parallel", None, call, pointer, ctypes.c_uint, ctypes.c_uint)
first = threading.get_ident()
late = call(lambda _: time.sleep(0.05 if threading.get_ident() != first else 0.0))

def waited():
    \"""Return the processor's time that this thread takes to wait for the other.\"""
    before = time.thread_time()
    parallel(late, None, 2, 0)
    return time.thread_time() - before

def count():
    return len(os.listdir("/proc/self/task"))

def hold():
    add_sleepers(2)
    there.set()
    end.wait()

alone = min(waited() for _ in range(5))
n_threads, there, end = count(), threading.Event(), threading.Event()
holder = threading.Thread(target=hold)
holder.start()
there.wait()
n_more = count() - n_threads
beside = min(waited() for _ in range(5))
end.set()
holder.join()
for _ in range(500):
    if count() <= n_threads:
        break
    time.sleep(0.01)
afterwards = min(waited() for _ in range(5))
print(n_more > 1, alone > 10 * beside, count() <= n_threads, afterwards > 10 * beside)
"""


def test_threads_sleep_sooner_while_there_are_sleepers() -> None:
    """300,000 looks take more than ten times as long as 1000; the teams end with their threads."""
    if not has_function("GOMP_parallel") or not sys.platform.startswith("linux"):
        pytest.skip("this llama.cpp is built without libgomp, or this system has no /proc")
    if os.cpu_count() == 1:
        pytest.skip("two threads on one processor never spin for long")
    done = run(SPINNING)
    assert done.stdout.split() == ["True"] * 4, done.stderr


FORK = """
import os, sys, traceback
from specrun.bindings.errors import ForkedError
from specrun.runtime import Runtime, SamplingParams

def ask(runtime):
    params = SamplingParams(temperature=0)
    return runtime.generate([1, 2, 3], params, max_tokens=4).token_ids

def open_runtime():
    options = dict(n_ctx=256, n_threads=THREADS, n_threads_batch=THREADS)
    return Runtime.demo(DRAFTER, n_gpu_layers=0, **options)

def child(work):
    sys.stdout.flush()
    if os.fork():
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        return
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)

def refused(work):
    try:
        work()
    except ForkedError as error:
        print("refused:", error)
    else:
        raise AssertionError("it was not refused")
"""
AFTER_USE = """
runtime = open_runtime()
before = ask(runtime)

def use_and_close():
    refused(lambda: ask(runtime))
    refused(open_runtime)
    runtime.close()

child(use_and_close)
print("same:", ask(runtime) == before)
runtime.close()
"""
BEFORE_USE = """
from specrun.bindings.machine.devices import devices
devices()
def use():
    with open_runtime() as runtime:
        print("tokens:", len(ask(runtime)))
child(use)
use()
"""
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def forking(body: str, threads: int, drafter: str) -> list[str]:
    values = f"THREADS, DRAFTER = {threads}, {drafter!r}\n"
    done = run(values + FORK + body)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@needs_fork
@pytest.mark.parametrize("drafter", ["none", "medusa"])
def test_a_forked_process_is_told_that_the_threads_stayed_behind(drafter: str) -> None:
    first, second, last = forking(AFTER_USE, 2, drafter)
    assert first.startswith("refused: this process was forked from one in which llama.cpp was")
    assert "spawn" in first
    assert second == first
    assert last == "same: True"


@needs_fork
def test_a_process_that_was_forked_before_may_evaluate() -> None:
    if supports_gpu_offload():
        pytest.skip("loading llama.cpp starts the GPU's driver")
    assert forking(BEFORE_USE, 2, "none") == ["tokens: 4", "tokens: 4"]


@needs_fork
def test_without_threads_a_forked_process_goes_on() -> None:
    if supports_gpu_offload():
        pytest.skip("loading llama.cpp starts the GPU's driver")
    body = AFTER_USE.replace("refused(lambda: ask(runtime))", "print(ask(runtime) == before)")
    body = body.replace("refused(open_runtime)", "open_runtime().close()")
    assert forking(body, 1, "none") == ["True", "same: True"]
