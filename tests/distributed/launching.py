"""Starting two processes, and never waiting for them longer than a bound."""

import subprocess
import sys
from pathlib import Path

import torch

from distributed.layouts import LAYOUTS, environment, launcher_arguments, write_config


LOG = "log.txt"
WORKER = Path(__file__).with_name("worker.py")
TIMEOUT = 400  # seconds; 15 to 45 are needed, three times that on a busy machine. Processes that wait for each other are a failure, not a delay.


class LaunchFailed(AssertionError):
    pass


def launch(layout: str, model: str, folder: Path) -> list[dict]:
    """
    Train every case with the processes sharing the model as the layout says.

    Returns:
        `list[dict]`: what each process saved.
    """
    finish(start(layout, model, folder), folder / LOG)
    return [torch.load(folder / f"process{rank}.pt") for rank in range(2)]


def start(layout: str, model: str, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(write_config(LAYOUTS[layout], folder)), *launcher_arguments(LAYOUTS[layout])]
    command += [str(WORKER), "--layout", layout, "--model", model, "--out", str(folder)]
    with open(folder / LOG, "w") as output:
        return subprocess.Popen(command, env=environment(LAYOUTS[layout]), stdout=output, stderr=subprocess.STDOUT)


def finish(launcher: subprocess.Popen, log: Path, timeout: float = TIMEOUT) -> None:
    """Wait for the launcher, and raise with the end of its output unless it succeeds in time."""
    try:
        status = launcher.wait(timeout)
    except subprocess.TimeoutExpired:
        raise LaunchFailed(f"Not done after {timeout} s.\n{_tail(log)}") from None
    finally:
        _end(launcher)
    if status != 0:
        raise LaunchFailed(f"The launcher returned {status}.\n{_tail(log)}")


def _end(launcher: subprocess.Popen) -> None:
    """The launcher, when it is asked to end, ends the processes that it started; each has a group of its own."""
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.wait(60)
        finally:
            launcher.kill()
            launcher.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:]
