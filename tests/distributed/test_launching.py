"""A launch that does not end is a failure after a bounded time, and leaves no process behind."""

import os
import time

import pytest

from distributed import launching
from distributed.launching import LOG, LaunchFailed, finish, launch, start


def running_in_group(group: int) -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as file:
                state, _, its_group = file.read().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(entry))
    return found


def test_a_launch_that_does_not_end_fails_and_leaves_no_process(model_dir, tmp_path, monkeypatch):
    """Both processes are up, and sleep, when the launcher is given up."""
    (tmp_path / "worker.py").write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[-1], 'up' + os.environ['RANK']).write_text(f'{os.getpgrp()}.')\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(launching, "WORKER", tmp_path / "worker.py")
    notes = [tmp_path / f"up{rank}" for rank in range(2)]
    launcher = start("DDP", model_dir, tmp_path)
    try:
        while not all(note.exists() and note.read_text().endswith(".") for note in notes):
            assert launcher.poll() is None
            time.sleep(0.1)
    finally:
        with pytest.raises(LaunchFailed, match="Not done after 0.1 s"):
            finish(launcher, tmp_path / LOG, timeout=0.1)
    groups = {int(note.read_text()[:-1]) for note in notes}
    assert os.getpgrp() not in groups
    for group in groups:
        assert running_in_group(group) == []


def test_a_process_that_fails_fails_the_launch(model_dir, tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text("import os\nassert os.environ['RANK'] == '0', 'the second one fails'\n")
    monkeypatch.setattr(launching, "WORKER", tmp_path / "worker.py")
    with pytest.raises(LaunchFailed, match="the second one fails"):
        launch("DDP", model_dir, tmp_path)
