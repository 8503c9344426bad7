"""Settings shared by all tests: one thread, no hub, quiet TRL."""

import gc
import os


os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch


torch.set_num_threads(1)


def pytest_collection_finish(session):
    """Every `train()` collects garbage; with all that was imported out of its sight, that takes a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_precision_left_behind():
    """transformers 4 passes `bf16=True` to accelerate through the environment, and on to whatever trains next."""
    yield
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A saved tiny policy. TRL loads the reference model from where the policy came from."""
    from harness import save_policy

    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory):
    """One output folder for all runs that save nothing."""
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def run(model_dir, run_dir):
    """`harness.run` with a fresh copy of the saved policy."""
    from harness import load_policy
    from harness import run as run_harness

    def fresh_run(trainer_class=None, *, model=None, dropout=0.0, **kwargs):
        model = load_policy(model_dir, dropout=dropout) if model is None else model
        return run_harness(trainer_class, model=model, output_dir=run_dir, **kwargs)

    return fresh_run
