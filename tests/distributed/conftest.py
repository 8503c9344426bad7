"""One launch for each layout, and one run alone for each case, however many tests look at them."""

import functools
import os

import pytest
import torch
from filelock import FileLock


@pytest.fixture(scope="session")
def shared(tmp_path_factory, model_dir):
    """layout -> what each process saved. Processes of pytest-xdist share the launches."""
    from distributed.launching import LaunchFailed, launch

    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    @functools.cache
    def outcomes(layout: str) -> list[dict]:
        folder = base / "layouts" / layout.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        done, failed = folder / "done", folder / "failed"
        with FileLock(folder / "lock"):
            if failed.exists():
                raise LaunchFailed(failed.read_text())
            if not done.exists():
                try:
                    launch(layout, model_dir, folder)
                except LaunchFailed as error:
                    failed.write_text(str(error))
                    raise
                done.touch()
        return [torch.load(folder / f"process{rank}.pt") for rank in range(2)]

    return outcomes


@pytest.fixture(scope="session")
def alone(model_dir, run_dir):
    """case -> the same in one process."""
    from distributed.cases import CASES, train_alone

    @functools.cache
    def outcome(case: str):
        return train_alone(CASES[case], model_dir, run_dir)

    return outcome
