"""The other end of `process.py`, in the Python of the engine: a job and then requests on stdin, an answer to each on stdout.

Lines of JSON. What an engine prints goes to standard error; what it raises is an answer, `{"error": ...}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Job = dict[str, Any]
Engine = Callable[[Job], dict[str, Any]]  # a request -> its answer


def serve(load: Callable[[Job], Engine]) -> None:
    """Loads an engine for the job that comes first, says so, and answers requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    engine = None
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            if engine is None:
                engine = load(asked)
                answer({"ready": True})
                continue
            start = time.perf_counter()
            answered = engine(asked)
            answer({"seconds": time.perf_counter() - start, **answered})
        except ImportError as error:
            answer({"error": f"this Python cannot import what it needs ({error})"})
        except Exception as error:  # whatever it is, the other side says it in one line
            answer({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
    os._exit(0)  # engines leave threads and process groups behind, which wait for more
