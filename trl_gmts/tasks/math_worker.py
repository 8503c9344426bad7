"""Compares mathematical answers, one JSON object a line, for `math.py`. Started as a script: never imports `trl_gmts`."""

import json
import logging
import os
import resource
import signal
import sys


MEMORY_BYTES = 4 << 30


def main() -> None:
    seconds = float(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no reply

    from trl.rewards import accuracy_reward

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print("ready", file=replies, flush=True)

    for line in sys.stdin:
        pair = json.loads(line)
        # math-verify's own alarm cannot stop one operation on huge integers. This timer ends the process, whatever it does.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            # Through a box, also the key: bare LaTeX is not found in a text.
            gold = "\\boxed{" + pair["key"].strip().strip("$") + "}"
            (reward,) = accuracy_reward([[{"role": "assistant", "content": "\\boxed{" + pair["box"] + "}"}]], [gold])
        except Exception:  # whatever a library makes of odd text
            reward = 0.0
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reward), file=replies, flush=True)


if __name__ == "__main__":
    main()
