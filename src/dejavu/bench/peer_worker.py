"""The process of a peer: JSON lines in on stdin, out on stdout (`python -m` this module).

A peer gets a process of its own because OpenMP counts the threads of all teams in a process: with
two programs in one, libgomp sees more threads than cores, gives up spinning, and both wait in the
kernel at every barrier. A step of transformers on a model of 30M parameters took twice as long in
one process with an idle CTranslate2. And when the process ends, its GPU memory is free again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import IO, Any


def main() -> None:
    """Load what the first line names, then decode what each further line asks for."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the program prints must not get between the answers
    program = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if program is None:
                program = _load(request)
                answer: dict[str, Any] = {"label": program.label}
            else:
                answer = program.decode(**request)._asdict()
        except Exception as error:  # the parent decides what it means
            answer = {"error": f"{type(error).__name__}: {error}"}
        _write(answers, answer)


def _load(request: dict[str, Any]) -> Any:
    from dejavu.bench.peer_programs import PROGRAMS

    source = request["config"] if "config" in request else Path(request["folder"])
    return PROGRAMS[request["program"]](
        source, request["dtype"], request["threads"], request["device"]
    )


def _write(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
