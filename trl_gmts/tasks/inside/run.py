"""The script that a sandboxed process starts with: confine it, then run one of four kinds of work.

    answer      hold an answer as the module `solution`, and do what the tests' process asks
    tests       run tests against that answer, and write the verdict
    program     run an answer as a program, from standard input to standard output
    together    run an answer and its unittest cases in this one process, and write the verdict

Usage: run.py JOB STATUS [FROM TO], all file descriptors: the job as JSON, the file for the status, and for `answer` and
`tests` the pipes to the other. The status is STARTED once the process is confined, then the job's token if the tests pass.
"""

import json
import os
import sys
import types
from typing import Any


STARTED = b"started\n"


def main() -> None:
    job_file, status, *pipes = (int(a) for a in sys.argv[1:])
    with os.fdopen(job_file, encoding="utf-8") as file:
        job = json.load(file)
    here, packages = os.path.dirname(os.path.abspath(__file__)), job["packages"]
    # -I leaves out the script's own folder, -S the installed packages, whose start-up files this spares.
    sys.path[:0] = [here]
    sys.path += packages
    from confine import confine  # type: ignore[import-not-found]  # found beside this script

    confine(job["limits"])
    os.write(status, STARTED)
    {"answer": hold_answer, "tests": run_tests, "program": run_program, "together": run_together}[job["kind"]](
        job, status, pipes
    )


def silence() -> None:
    """Point standard input and output at nothing; tracebacks stay, for whoever debugs a test."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def module_of(code: str, name: str, preamble: str = "") -> types.ModuleType:
    """Run the code as a module of that name. What the preamble defines, the code may use or define anew."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    if preamble:
        exec(compile(preamble, "<preamble>", "exec", dont_inherit=True), module.__dict__)
    exec(compile(code, f"<{name}>", "exec", dont_inherit=True), module.__dict__)
    return module


def hold_answer(job: dict[str, Any], status: int, pipes: list[int]) -> None:
    from remote import AnswerGone, AnswerSide  # type: ignore[import-not-found]

    os.close(status)
    silence()
    channel = AnswerSide(os.fdopen(pipes[0], "rb"), os.fdopen(pipes[1], "wb"))
    channel.send("here")  # before anything of the answer runs: one that never starts is not the answer's fault
    channel.keep(module_of(job["code"], "solution", job["preamble"]))
    try:
        while True:
            _, *request = channel.receive()
            channel.reply(tuple(request))
    except AnswerGone:
        os._exit(0)  # the tests are over; threads of the answer need not be


def run_tests(job: dict[str, Any], status: int, pipes: list[int]) -> None:
    from remote import Remote, TestsSide

    silence()
    channel = TestsSide(os.fdopen(pipes[0], "rb"), os.fdopen(pipes[1], "wb"))
    channel.receive()
    answer = Remote(channel, 0, ())
    solution = types.ModuleType("solution")

    def attribute(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(answer, name)

    solution.__getattr__ = attribute  # type: ignore[method-assign]
    sys.modules["solution"] = solution
    passed = (with_pytest if job["pytest"] else without_pytest)(job["tests"])
    if passed and not channel.broken:
        os.write(status, job["token"].encode())
    os._exit(0)


def without_pytest(tests: str) -> bool:
    """Run assertions at the top level, then each `test_` function. A failure is an exception, and ends this process."""
    namespace: dict[str, Any] = {"__name__": "tests"}
    exec(compile(tests, "<tests>", "exec", dont_inherit=True), namespace)
    for name, test in list(namespace.items()):
        if name.startswith("test_") and isinstance(test, types.FunctionType):
            test()
    return True


def with_pytest(tests: str) -> bool:
    import pytest

    with open("test_answer.py", "w", encoding="utf-8") as file:
        file.write(tests)
    options = ["-x", "-q", "--noconftest", "--rootdir=.", "-c", os.devnull, "-p", "no:cacheprovider"]
    return pytest.main([*options, "-p", "no:faulthandler", "test_answer.py"]) == 0


def run_program(job: dict[str, Any], status: int, pipes: list[int]) -> None:
    os.close(status)
    code = compile(job["code"], "<answer>", "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def run_together(job: dict[str, Any], status: int, pipes: list[int]) -> None:
    import unittest

    silence()
    token = job.pop("token")
    # unittest's own functions as they are now: an answer that replaces some of them is not asked
    load, run = unittest.defaultTestLoader.loadTestsFromModule, unittest.TestSuite.run
    result = unittest.TestResult()
    module = module_of(job["code"] + "\n\n" + job["tests"], "solution", job["preamble"])
    run(load(module), result)
    if result.testsRun and not (result.errors or result.failures):
        os.write(status, token.encode())
    os._exit(0)


if __name__ == "__main__":
    main()
