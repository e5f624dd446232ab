"""The process in which a program that a model wrote runs: started by `scores`, one program.

Standard input has the program and its limits as JSON. The token on standard output is written only
if the program came to its end: one that leaves early, with any status, has failed.
"""

from __future__ import annotations

import json
import os
import sys

from specrun.bindings.machine.limits import limit_process


def main() -> None:
    """Run the program, with its output thrown away."""
    request = json.load(sys.stdin)
    report = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    limit_process(request["limits"])
    exec(compile(request["program"], "answer", "exec"), {"__name__": "__main__"})
    os.write(report, request["token"].encode())


if __name__ == "__main__":
    main()
