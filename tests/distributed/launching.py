"""Starting two processes, and never waiting for them longer than a bound."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from distributed.layouts import LAYOUTS, environment, write_config


TIMEOUT = 240  # seconds; 15 to 45 are needed. Processes that wait for each other are a failure, not a delay.


class LaunchFailed(AssertionError):
    pass


def launch(layout: str, model: str, folder: Path, timeout: float = TIMEOUT, arguments: tuple[str, ...] = ()) -> list:
    """
    Train every case with the processes sharing the model as the layout says.

    Returns:
        `list[dict]`: what each process saved.
    """
    config = write_config(LAYOUTS[layout], folder)
    log = folder / "log.txt"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += [str(Path(__file__).with_name("worker.py")), "--layout", layout, "--model", model]
    command += ["--out", str(folder), *arguments]
    with open(log, "w") as output:
        launcher = subprocess.Popen(
            command,
            env=environment(LAYOUTS[layout]),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, so that the workers end with the launcher
        )
        try:
            status = launcher.wait(timeout)
        except subprocess.TimeoutExpired:
            raise LaunchFailed(f"{layout}: not done after {timeout} s\n{_tail(log)}") from None
        finally:
            _end_group(launcher)
    if status != 0:
        raise LaunchFailed(f"{layout}: the launcher returned {status}\n{_tail(log)}")
    return [torch.load(folder / f"process{rank}.pt") for rank in range(2)]


def _end_group(launcher: subprocess.Popen) -> None:
    try:
        os.killpg(launcher.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    launcher.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:]
