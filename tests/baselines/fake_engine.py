"""An engine for tests: it counts on from the last token of a prompt, and prints what must not reach the pipe."""

import os
import signal
import subprocess
import time

from answers import serve


def load(job):
    print("loading", job["model"])
    os.write(2, bytes(job.get("said", [])))
    if job.get("broken"):
        raise RuntimeError("no such kernel\nmore of it")

    if job.get("child"):
        print("child", subprocess.Popen(["sleep", "600"]).pid, flush=True)

    def generate(request):
        print("generating", flush=True)
        if job.get("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if job.get("slow"):
            time.sleep(600)
        ids = [list(range(p[-1] + 1, p[-1] + 1 + request["max_new_tokens"])) for p in request["prompts"]]
        if "entropy_threshold" not in request:
            return {"ids": ids, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
        each = [2 * len(row) for row in ids]
        return {
            "ids": ids,
            "forwards": each,
            "processed": [9 * n for n in each],
            "decode_seconds": 0.5,
            "steps": each[0],
        }

    return generate


serve(load)
