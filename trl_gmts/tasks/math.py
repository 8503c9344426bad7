r"""Mathematics: the last `\boxed{}` against the key, by math-verify through TRL's `accuracy_reward`.

The comparison runs in processes of its own (`math_worker.py`). math-verify bounds its time by signals, which exist in the
main thread only and do not interrupt one long operation on a huge integer; and what a model writes must not hang or fill
the trainer. A comparison that exceeds its limit scores zero.
"""

import atexit
import json
import os
import queue
import re
import selectors
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .answers import last_boxed, text_of
from .rows import Prompt, Row, first, prompt_of, question_of, refuse
from .sandbox import share_of_cores


WORKER = Path(__file__).with_name("math_worker.py")
LONGEST_BOX = 2000
"""Characters. No answer to a contest problem is longer, and parsing time grows with it."""

QUESTION = ("problem", "question", "prompt", "source_prompt", "messages")
ANSWER = (
    "answer",
    "final_answer",
    "ground_truth",
    "expected_answer",
    "reward_model.ground_truth",
    "extra_info.answer",
)

# DAPO-Math-17K wraps each problem in instructions for another answer format.
DAPO_BEFORE = re.compile(
    r"\ASolve the following math problem step by step\..{0,200}answer to the problem\.\s*", re.DOTALL
)
DAPO_AFTER = re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.?\s*\Z")


def math_prompt(problem: str) -> Prompt:
    return prompt_of(f"{problem}\n\nReason step by step, and put your final answer in \\boxed{{}}.")


def math_row(row: Row) -> dict[str, Any]:
    r"""
    One problem with its key, from a row of MATH-12K, DAPO-Math-17K, AIME, AMC 23, MATH-500, Minerva, OlympiadBench or alike.

    Args:
        row: with a problem under one of `QUESTION` and a key under one of `ANSWER`; or with a `solution`, whose last
            `\boxed{}` is the key, or which is a key itself if it is one short line.

    Returns:
        `prompt` and `answer`, the columns that `MathReward` reads.
    """
    problem = question_of(row, QUESTION)
    key = first(row, ANSWER)
    solution = first(row, ("solution",))
    if key is None and isinstance(solution, str):
        key = last_boxed(solution) or (solution if len(solution) <= 200 and "\n" not in solution.strip() else None)
    if isinstance(key, (list, tuple)):  # several answers to one problem, as in OlympiadBench
        key = ", ".join(str(part).strip().strip("$") for part in key)
    if problem is None or key is None or isinstance(key, dict):
        refuse(
            row, "math", f"a problem ({', '.join(QUESTION)}) and a key ({', '.join(ANSWER)}, or a solution with a box)"
        )
    problem = DAPO_AFTER.sub("", DAPO_BEFORE.sub("", problem))
    return {"prompt": math_prompt(problem), "answer": str(key).strip()}


class MathReward:
    r"""
    1 for an answer whose last `\boxed{}` equals the key, 0 otherwise, None (TRL leaves the row out) where math-verify cannot
    read the key or there is none.

    Args:
        seconds (`float`): CPU time of the longest comparison.
        workers (`int`, *optional*): processes that compare. By default this process's share of cores, at most 4.
    """

    __name__ = "math_reward"

    def __init__(self, seconds: float = 3.0, workers: int | None = None):
        self.seconds = seconds
        self.workers = workers or min(4, share_of_cores())
        self._pool: WorkerPool | None = None

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """
        Args:
            completions: strings or conversations.
            answer: the keys.
        """
        if self._pool is None or self._pool.owner != os.getpid():  # a forked process cannot share its parent's pipes
            self._pool = WorkerPool(self.workers, self.seconds)
        # A box within is dropped, or math-verify would compare it alone.
        boxes = [(last_boxed(text_of(completion)) or "").replace("\\boxed", "") for completion in completions]
        pairs = [
            None if key is None else (box if len(box) <= LONGEST_BOX else "", last_boxed(str(key)) or str(key))
            for box, key in zip(boxes, answer, strict=True)
        ]
        # The answers of a group are often the same: compare once.
        wanted = list(dict.fromkeys(pair for pair in pairs if pair is not None))
        rewards = dict(zip(wanted, self._pool.compare(wanted), strict=True))
        return [None if pair is None else rewards[pair] for pair in pairs]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}


class WorkerPool:
    """Processes that wait for a pair to compare, started when first needed and again after one has died."""

    def __init__(self, workers: int, seconds: float):
        if find_spec("math_verify") is None:
            raise ImportError(
                "scoring mathematics needs math-verify, which is not installed: pip install 'trl-gmts[math]' "
                "(or pip install math-verify)"
            )
        self.owner = os.getpid()
        self.seconds = seconds
        self.idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self.all = [Worker(seconds) for _ in range(workers)]
        for worker in self.all:
            self.idle.put(worker)
        atexit.register(self.close)

    def compare(self, pairs: Sequence[tuple[str, str]]) -> list[float | None]:
        if not pairs:
            return []
        with ThreadPoolExecutor(min(len(self.all), len(pairs)), thread_name_prefix="math-reward") as pool:
            return list(pool.map(self._one, pairs))

    def _one(self, pair: tuple[str, str]) -> float | None:
        worker = self.idle.get()
        try:
            return worker.compare(*pair)
        finally:
            self.idle.put(worker)

    def close(self) -> None:
        if self.owner == os.getpid():
            for worker in self.all:
                worker.stop()


class Worker:
    """One process of `math_worker.py`."""

    START_SECONDS = 120.0

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.process: subprocess.Popen[bytes] | None = None

    def compare(self, box: str, key: str) -> float | None:
        """Ask the process, and end it if it does not reply in time."""
        process = self.process or self.start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"box": box, "key": key}).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass
        # The process ends itself after `seconds` of CPU time; the longer wait is for a machine that is busy.
        reply = read_line(process, 3 * self.seconds + 2)
        if reply is None:
            self.stop()
            return 0.0
        reward: float | None = json.loads(reply)
        return reward

    def start(self) -> "subprocess.Popen[bytes]":
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "PYTHONPATH") if name in os.environ}
        self.process = subprocess.Popen(
            # -P: the script's folder holds a math.py, which is not the one that others import
            [sys.executable, "-P", "-X", "utf8", str(WORKER), str(self.seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # an interrupt at the terminal is the trainer's to handle
        )
        if read_line(self.process, self.START_SECONDS) is None:
            self.process.kill()
            said = self.process.communicate()[1].decode("utf-8", "replace").strip()[-2000:]
            self.process = None
            raise RuntimeError(
                f"the process that compares mathematical answers does not start. It said: {said or 'nothing'}"
            )
        return self.process

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def read_line(process: "subprocess.Popen[bytes]", seconds: float) -> bytes | None:
    """One line of the process's output, or None if it ends or takes too long. A worker writes its lines whole."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(seconds):
            return None
    return process.stdout.readline() or None
