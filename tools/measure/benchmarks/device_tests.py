"""The tests that hold on any device (`pytest -m gpu`), counted as JSON; the log is on stderr."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]


def main() -> None:
    """Run the tests with the given further arguments of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*pytest, f"--junitxml={report}", *sys.argv[1:]],
            cwd=_ROOT,
            stdout=sys.stderr,
            check=False,
        )
        if not report.exists():
            sys.exit(done.returncode or 1)
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    names = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    result = {
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed,
        "skipped": counts["skipped"],
        "failing": names,
    }
    print(json.dumps({"results": [result]}))


if __name__ == "__main__":
    main()
