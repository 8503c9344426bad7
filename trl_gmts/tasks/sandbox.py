"""Run code that a model wrote, and tests that a dataset brings, where they can do no harm.

Every run is new processes with limits on time, memory, files and output, without network, without the trainer's
environment, files and descriptors, killed at a deadline with all that they started. `inside/` is what runs there. What this
stops and what not is set out in docs/tasks.md. Left to others: which text is the code (`answers.py`), what makes an answer
right (`code.py`).
"""

import dataclasses
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar, get_args

from .inside.run import STARTED


Isolation = Literal["bubblewrap", "rlimits"]
Item = TypeVar("Item")
Result = TypeVar("Result")

INSIDE = Path(__file__).with_name("inside")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class SandboxError(RuntimeError):
    """The sandbox itself does not work on this machine. Never the fault of an answer."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one run may use. An answer that needs more has failed."""

    wall_seconds: float = 10.0
    """Deadline, from the start of the processes."""
    cpu_seconds: int = 6
    memory_bytes: int = 1 << 30
    """Address space of each process."""
    file_bytes: int = 8 << 20
    """Largest file, and most output."""
    disk_bytes: int = 64 << 20
    """All files together, in memory (bubblewrap only)."""


class ProgramRun(NamedTuple):
    """How a program ended."""

    succeeded: bool
    """It ended by itself, in time, with exit status 0."""
    output: str


class Sandbox:
    """
    A way to run code apart from this process. Holds no resources: it can be copied, pickled, and used by many threads.

    Args:
        isolation (`str`): `"bubblewrap"` gives the code file system, network and processes of its own. `"rlimits"` does
            not: limits and a filter on system calls alone, and the code can read what this user can read. It is for machines
            where bubblewrap cannot work, and never chosen by itself.
        limits (`Limits`): what one run may use.
        packages (`bool`): let the code import what is installed beside this package.
    """

    def __init__(self, isolation: Isolation = "bubblewrap", limits: Limits = Limits(), packages: bool = True):
        if isolation not in get_args(Isolation):
            raise ValueError(f"isolation must be one of {', '.join(get_args(Isolation))}, not {isolation!r}")
        self.isolation: Isolation = isolation
        self.limits = limits
        self.packages = packages

    def check(self) -> None:
        """Raise `SandboxError`, with what to do about it, unless the simplest program runs."""
        run = self.run_program("print('ok')")
        if run.output.strip() != "ok":
            raise SandboxError(
                f"the sandbox starts, but a program that prints one word gave {run.output!r}: are {self.limits} too tight?"
            )

    def run_program(self, code: str, stdin: str = "") -> ProgramRun:
        """Run code as a program, and return what it wrote to standard output (cut at `file_bytes`)."""

        def once() -> tuple[bytes, ProgramRun]:
            with self._folder() as folder, temporary(stdin.encode("utf-8", "replace")) as given, temporary() as output:
                with temporary() as status, self._job("program", code=code) as job:
                    process = self._start(folder, [job, status], stdin=given, stdout=output)
                    finish([process], self.limits.wall_seconds)
                    text = contents(output).decode("utf-8", "replace")
                    return contents(status), ProgramRun(process.returncode == 0, text)

        return self._unless_broken(once)

    def passes_tests(self, code: str, tests: str, *, preamble: str = "", pytest: bool = False) -> bool:
        """
        Whether tests that import the code as `solution` pass. They run in a process that the code has no part in.

        Args:
            code (`str`): the answer, a Python module.
            tests (`str`): Python that raises where the answer is wrong: assertions, functions named `test_...`.
            preamble (`str`): Python to run before the code, in the same module.
            pytest (`bool`): run the tests with pytest.
        """
        token = secrets.token_hex(16)

        def once() -> tuple[bytes, bool]:
            with (
                self._folder() as folder,
                self._folder() as other,
                temporary() as status,
                temporary() as answer_status,
            ):
                with (
                    self._job("answer", code=code, preamble=preamble) as answer_job,
                    self._job("tests", tests=tests, pytest=pytest, token=token) as tests_job,
                    pipe() as (asked, ask),
                    pipe() as (replied, reply),
                ):
                    answer = self._start(other, [answer_job, answer_status, asked, reply])
                    tester = self._start(folder, [tests_job, status, replied, ask])
                    for end in (asked, ask, replied, reply):
                        end.close()  # so that either process sees when the other has gone
                    finish([tester, answer], self.limits.wall_seconds)
                started = contents(status) if contents(answer_status) == STARTED else b""
                return started, started == STARTED + token.encode()

        return self._unless_broken(once)

    def passes_together(self, code: str, tests: str, *, preamble: str = "") -> bool:
        """
        Whether `unittest` cases that run in the code's own process and module pass. An answer that sets out to cheat can:
        for measuring, not for training.
        """
        token = secrets.token_hex(16)

        def once() -> tuple[bytes, bool]:
            with self._folder() as folder, temporary() as status:
                with self._job("together", code=code, tests=tests, preamble=preamble, token=token) as job:
                    finish([self._start(folder, [job, status])], self.limits.wall_seconds)
                return contents(status), contents(status) == STARTED + token.encode()

        return self._unless_broken(once)

    def _unless_broken(self, once: Callable[[], tuple[bytes, Result]]) -> Result:
        """Run, and once more if the processes did not even start: the machine may be short of something for a moment."""
        for _ in range(2):
            started, result = once()
            if started.startswith(STARTED):
                return result
        raise SandboxError(self._diagnosis())

    def _diagnosis(self) -> str:
        """Why nothing starts, and what to do."""
        with (
            self._folder() as folder,
            temporary() as status,
            self._job("program", code="") as job,
            temporary() as errors,
        ):
            finish([self._start(folder, [job, status], stderr=errors)], self.limits.wall_seconds)
            said = contents(errors).decode("utf-8", "replace").strip()[-2000:] or "nothing"
        advice = ""
        if self.isolation == "bubblewrap":
            advice = (
                " If it is not permitted to create namespaces: allow unprivileged user namespaces on this machine (sysctl "
                "kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0, and on Ubuntu 24.04 or newer "
                "kernel.apparmor_restrict_unprivileged_userns=0; for Docker --security-opt seccomp=unconfined "
                '--security-opt apparmor=unconfined), or ask for the weaker isolation="rlimits" by name.'
            )
        return f"The {self.isolation} sandbox does not start on this machine. It said: {said}.{advice}"

    @contextmanager
    def _job(self, kind: str, **work: Any) -> Iterator[IO[bytes]]:
        paths = sysconfig.get_paths()
        limits = {name: getattr(self.limits, name) for name in ("cpu_seconds", "memory_bytes", "file_bytes")}
        packages = sorted({paths["purelib"], paths["platlib"]}) if self.packages else []
        job = {"kind": kind, "limits": limits, "packages": packages, "preamble": "", **work}
        with temporary(json.dumps(job).encode()) as file:
            yield file

    @contextmanager
    def _folder(self) -> Iterator[str]:
        """The empty folder that a process starts in. In bubblewrap it is not of this file system."""
        if self.isolation == "bubblewrap":
            yield "/"
            return
        with tempfile.TemporaryDirectory(prefix="answer-", ignore_cleanup_errors=True) as folder:
            yield folder

    def _start(self, folder: str, files: Sequence[IO[bytes]], **streams: IO[bytes]) -> "subprocess.Popen[bytes]":
        descriptors = [file.fileno() for file in files]
        inside, home = (INSIDE, folder) if self.isolation == "rlimits" else (Path("/inside"), "/tmp")
        python = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-X", "utf8"]
        command = [*python, str(inside / "run.py"), *map(str, descriptors)]
        if self.isolation == "bubblewrap":
            command = [*bubblewrap(self.limits.disk_bytes, self.packages), *command]
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment(home),
            pass_fds=descriptors,
            start_new_session=True,  # a process group to kill
            stdin=streams.get("stdin", subprocess.DEVNULL),
            stdout=streams.get("stdout", subprocess.DEVNULL),
            stderr=streams.get("stderr", subprocess.DEVNULL),
        )


def bubblewrap(disk_bytes: int, packages: bool) -> list[str]:
    """
    The command that runs another with namespaces of its own: nothing of the file system but Python and system libraries,
    read-only; a /tmp of limited size, and in it an empty folder to start in; no network, no other process, no /proc.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(
            "bubblewrap (the command bwrap) is not installed, and code written by a model should not run without it. Install "
            "it (apt-get install bubblewrap, dnf install bubblewrap, conda install -c conda-forge bubblewrap), or ask for the "
            'weaker isolation="rlimits" by name.'
        )
    command = [program, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    command += ["--new-session", "--die-with-parent", "--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    command += ["--size", str(disk_bytes), "--tmpfs", "/tmp"]  # first, as this Python may itself lie below /tmp
    for folder in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        else:
            command += ["--ro-bind-try", folder, folder]
    for path in python_folders(packages):
        command += ["--ro-bind", path, path]
    for path in ("/etc/ld.so.cache", "/etc/alternatives", "/nix/store"):
        command += ["--ro-bind-try", path, path]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--ro-bind", str(INSIDE), "/inside", "--remount-ro", "/"]
    return [*command, "--dir", "/tmp/empty", "--chdir", "/tmp/empty", "--"]


def python_folders(packages: bool) -> list[str]:
    """Where this Python and its packages lie, as far as /usr does not hold them."""
    paths = sysconfig.get_paths()
    folders = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}
    # The interpreter's own name for its prefix may go through a link (a "current" version, say).
    folders |= {sys.base_prefix, sys.base_exec_prefix}
    if packages:
        folders |= {paths["purelib"], paths["platlib"]}
    return sorted(folder for folder in folders if folder != "/usr" and not folder.startswith("/usr/"))


def environment(home: str) -> dict[str, str]:
    """All that a sandboxed process finds in its environment: nothing of ours."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    matplotlib = {"MPLBACKEND": "Agg", "MPLCONFIGDIR": home}
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **one_thread,
        **matplotlib,
    }


def finish(processes: "Sequence[subprocess.Popen[bytes]]", seconds: float) -> None:
    """Wait for the first process until the deadline, then kill them all with what they started."""
    try:
        processes[0].wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            # bubblewrap's first process takes its whole process namespace with it
            if process.poll() is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        for process in processes:
            process.wait()


def in_parallel(function: Callable[[Item], Result], items: Sequence[Item], workers: int | None = None) -> list[Result]:
    """Map with a bounded number of threads, each of which waits for its sandbox. By default this process's share of cores."""
    if not items:
        return []
    with ThreadPoolExecutor(min(len(items), workers or share_of_cores()), thread_name_prefix="sandbox") as pool:
        return list(pool.map(function, items))


def share_of_cores() -> int:
    """Cores of this process, given how many processes of a launch share the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def temporary(data: bytes = b"") -> Iterator[IO[bytes]]:
    """An unnamed file, at its beginning."""
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(data)
        file.seek(0)
        yield file


def contents(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


@contextmanager
def pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The two ends of a pipe: to read from, to write to."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as read_end, os.fdopen(writer, "wb", buffering=0) as write_end:
        yield read_end, write_end
