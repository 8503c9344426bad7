"""What a run with a real vLLM engine has to show, of full fine-tuning and of LoRA."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed.launching import LOG, finish
from harness import relative_error
from oracle import LIMIT, Settings, ceil_of, eq2, model_with
from vllm_engine.worker import MICRO_BATCHES, RATIO, STEPS, engine_policy_config


pytestmark = pytest.mark.vllm_engine

WORKER = Path(__file__).with_name("worker.py")
TIMEOUT = 300  # seconds; 20 are needed. An engine that hangs is a failure, not a delay.
AGREEMENT = 1e-4  # nats, float32 on both sides: at most 1e-5 was seen, 1e-6 on average
ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_CI_ENV": "1",  # no warm-up
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # leave the other cores, and the other processes, alone
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # twice as fast for so few tokens, and no C++ compiler is needed
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory):
    """What a process of its own saw. A module's fixture with parameters runs, and fails, once for each of them."""
    assert importlib.util.find_spec("vllm"), "vLLM is not installed here. Run `make test-vllm`."
    weights, _, without_sync = request.param.partition(", ")
    folder = tmp_path_factory.mktemp("engine")
    paths = os.pathsep.join(str(path) for path in (WORKER.parents[1], WORKER.parents[2]))
    environment = os.environ | ENGINE | {"PYTHONPATH": paths, "VLLM_CACHE_ROOT": str(folder / "cache")}
    command = [sys.executable, str(WORKER), "--weights", weights, "--out", str(folder)]
    command += ["--without-sync"] if without_sync else []
    with open(folder / LOG, "w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    finish(process, folder / LOG, TIMEOUT)
    return torch.load(folder / "outcome.pt", weights_only=False)


def runs(*names: str):
    return pytest.mark.parametrize("outcome", names, indirect=True)


def disagreements(outcome: dict) -> list[float]:
    """For each generation: by how much vLLM's log-probs of its answers differ from the trainer's, at most."""
    found = []
    for batch in outcome["generated"]:
        mask = batch["completion_mask"].bool()
        assert mask.sum() > 100
        difference = (batch["sampling_per_token_logps"] - batch["old_per_token_logps"])[mask].abs()
        assert difference.isfinite().all()
        found.append(difference.max().item())
    assert len(found) == STEPS
    return found


@runs("full", "lora")
def test_log_probs_of_the_engine_are_the_policys_at_every_step(outcome):
    """So the engine samples from the policy as it is after each update; with LoRA, from the merged one."""
    assert outcome["engine"].startswith("vllm.") and outcome["engine_dtypes"] == {torch.float32}
    assert max(disagreements(outcome)) < AGREEMENT


@runs("full, without sync", "lora, without sync")
def test_without_weight_sync_they_differ_from_the_first_update_on(outcome):
    """The control: each update moves the policy by far more than what counts as agreement."""
    first, *later = disagreements(outcome)
    assert first < AGREEMENT
    assert min(later) > 0.1


@runs("full", "lora")
def test_the_selection_ran_at_every_step(outcome):
    assert len(outcome["logs"]) == len(outcome["selections"]) == STEPS
    for log, selection, step in zip(outcome["logs"], outcome["selections"], outcome["steps"], strict=True):
        tokens = sum(int(batch["completion_mask"].sum()) for batch in step.micro_batches)
        kept = int(selection["kept"].sum())
        assert int(selection["mask"].sum()) == tokens
        assert not (selection["kept"] & ~selection["mask"]).any()
        assert log["gmts/kept_tokens"] == kept == ceil_of(RATIO, tokens) > 0
        assert log["gmts/kept_fraction"] == pytest.approx(kept / tokens)
        assert log["gmts/nonfinite_scores"] == 0


@runs("full", "lora")
def test_the_first_step_after_a_generation_scores_from_trls_own_forward(outcome):
    """Without gradient the policy runs over each micro-batch once: for TRL's old log-probs. Not again for scoring."""
    for step in range(STEPS):
        grads = [grad for at, grad in outcome["forwards"] if at == step]
        assert (grads.count(False), grads.count(True)) == (MICRO_BATCHES, MICRO_BATCHES)


@runs("full", "full, without sync")
def test_the_gradient_is_that_of_eq2_with_the_engines_importance_ratios(outcome):
    """On policy the ratios are 1. Without sync they are anything, and the largest scores are elsewhere."""
    for step, selection in zip(outcome["steps"], outcome["selections"], strict=True):
        weighted = [
            batch
            | {
                "advantages": (batch["advantages"][:, None] * batch["importance_sampling_ratio"]).expand_as(
                    batch["completion_ids"]
                )
            }
            for batch in step.micro_batches
        ]
        model = model_with(step.weights, engine_policy_config())
        expected = eq2(model, weighted, Settings(ratio=RATIO))
        kept = [row[: len(own)] for row, own in zip(selection["kept"], expected.kept, strict=True)]
        for ours, own, delta in zip(kept, expected.kept, expected.delta, strict=True):
            # The policy is in float32 and the oracle is not: they may differ where there is next to a tie
            assert ((delta[ours != own] / expected.tau[0] - 1).abs() < 1e-4).all()
        expected = eq2(model, weighted, Settings(ratio=RATIO), kept=kept)
        assert relative_error(step.gradient, expected.gradient) < LIMIT
