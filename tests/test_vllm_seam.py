"""Rollouts from vLLM, with a stand-in for the engine: all that TRL and trl_gmts do with what it returns, without it.

The stand-in keeps a copy of the weights, as an engine does, and reports log-probs that differ from the trainer's by a
known amount. What is expected comes from the oracle: an importance ratio w multiplies the clipped surrogate, which is
the surrogate of the advantage w * A.
"""

import math

import pytest
import torch
from trl import GRPOTrainer

from harness import EOS, FixedRollouts, off_policy, policy_config, relative_error, tokenizer
from listening import listening, selected_coefficients, weighted_gradient
from oracle import LIMIT, Settings, eq2, logps_and_entropy, model_with
from oracle import Answer as Row
from trl_gmts import GMTSGRPOTrainer


MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
CLIPS = {"vllm_importance_sampling_clip_min": 0.6, "vllm_importance_sampling_clip_max": 1.5}
MULTI = {"rows": 4, "learning_rate": 3e-3}


class StandIn:
    """In the place of `trl.generation.vllm_generation.VLLMGeneration`."""

    unscored = True  # some tokens come without a log-prob

    def __init__(self, model, accelerator, processing_class, **settings):
        self.policy, self.settings = model, settings
        self.engine = model_with(model.state_dict(), policy_config())
        self.syncs = 0
        self.answers = FixedRollouts()
        self.vllm_client = self  # of server mode

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def sync_weights(self):
        self.syncs += 1
        self.engine.load_state_dict(self.policy.state_dict())

    def generate(self, prompts, images, num_generations, profiler=None):
        assert images is None
        completions, logprobs, seen = [], [], {}
        for row, prompt in enumerate(prompts):
            index = seen[tuple(prompt)] = seen.get(tuple(prompt), -1) + 1
            ids = self.answers.answer(tokenizer().decode(prompt), index)
            answer = Row(
                prompt=prompt, padding=0, ids=torch.tensor(ids), trainable=None, advantage=None, old=None, ref=None
            )
            with torch.no_grad():
                exact, _ = logps_and_entropy(self.engine, answer, self.settings["temperature"])
            shifted = [logp - shift(row, i) for i, logp in enumerate(exact.tolist())]
            if self.unscored:
                shifted = [None if unscored(row, i) else logp for i, logp in enumerate(shifted)]
            completions.append(ids)
            logprobs.append([[logp] for logp in shifted])
        self.answers.round += 1
        return prompts, completions, logprobs, None


def shift(row: int, position: int) -> float:
    """By how much the engine's log-prob lies below the trainer's: the ratio is its exponential."""
    return 0.9 * math.sin(3.0 * row + 1.7 * position) + 0.2 * math.cos(row)


def unscored(row: int, position: int) -> bool:
    return (row + 3 * position) % 7 == 0


class ScoredStandIn(StandIn):
    unscored = False


@pytest.fixture
def vllm_run(run, monkeypatch):
    """A run with TRL's own vLLM path; `forwards` of the run counts the policy's, the engine's left out."""

    def take(trainer_class=GMTSGRPOTrainer, stand_in=StandIn, **arguments):
        monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", stand_in)
        settings = MULTI | {"use_vllm": True, "vllm_mode": "colocate", "sampled": True, "train": False}
        found = run(trainer_class, **(settings | arguments))
        found.trainer.vllm_generation.settings["temperature"] = found.trainer.temperature

        def count(*_):
            found.forwards.append({"step": found.trainer.state.global_step, "grad": torch.is_grad_enabled()})

        found.trainer.model.base_model.register_forward_pre_hook(count)
        found.trainer.train()
        return found

    return take


def forwards_in(found, step: int) -> tuple[int, int]:
    """Forwards of the policy, without and with gradient, in an optimizer step and the generation before it."""
    grads = [forward["grad"] for forward in found.forwards if forward["step"] == step]
    return grads.count(False), grads.count(True)


def weighted(batch: dict) -> dict:
    """The batch with TRL's importance ratio moved into the advantage."""
    ratio = batch["importance_sampling_ratio"]
    return batch | {"advantages": (batch["advantages"][:, None] * ratio).expand(batch["completion_ids"].shape)}


def oracle_of(step, ratio_applies: bool = True, **settings):
    model = model_with(step.weights, policy_config())
    batches = [weighted(batch) if ratio_applies else batch for batch in step.micro_batches]
    return eq2(model, batches, Settings(**settings))


def ratio_of(batch: dict, mode: str) -> torch.Tensor:
    """TRL's importance ratio, written down again. A token without a log-prob counts as one that agrees."""
    difference = batch["old_per_token_logps"].double() - batch["sampling_per_token_logps"].double()
    difference = torch.where(batch["completion_mask"].bool(), difference, 0.0).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(1, keepdim=True)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(0.6, 1.5)
    return torch.where((ratio < 0.6) | (ratio > 1.5), 0.0, ratio)


@pytest.mark.parametrize("mode", MODES)
def test_importance_sampling_correction_takes_part_in_the_ranking(vllm_run, mode):
    found = vllm_run(vllm_importance_sampling_mode=mode, **CLIPS)
    step = found.steps[0]
    expected = oracle_of(step)
    assert expected.gap > 1e-4
    assert relative_error(step.gradient, expected.gradient) < LIMIT
    assert relative_error(step.gradient, oracle_of(step, ratio_applies=False).gradient) > 1e-2
    unscored_tokens = bounded = 0
    for batch in step.micro_batches:
        ratio = batch["importance_sampling_ratio"].double()
        torch.testing.assert_close(ratio, ratio_of(batch, mode), rtol=1e-4, atol=1e-5)
        mask = batch["completion_mask"].bool()
        unscored_tokens += int((batch["sampling_per_token_logps"].isnan() & mask).sum())
        bounded += int(((ratio == 0) | (ratio - 0.6).abs().lt(1e-6) | (ratio - 1.5).abs().lt(1e-6)).sum())
    assert unscored_tokens > 10 and bounded > 1
    assert found.logs[0]["gmts/nonfinite_scores"] == 0


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_a_token_that_the_engine_could_not_score_can_be_kept(vllm_run, mode):
    """Its ratio is 1, as in TRL: it takes part like any other."""
    found = vllm_run(vllm_importance_sampling_mode=mode, **CLIPS, selection_ratio=0.5)
    expected = oracle_of(found.steps[0], ratio=0.5)
    assert relative_error(found.gradient, expected.gradient) < LIMIT
    rows = [
        (batch["sampling_per_token_logps"][i].isnan() & batch["completion_mask"][i].bool())
        for batch in found.steps[0].micro_batches
        for i in range(len(batch["completion_ids"]))
    ]
    kept_unscored = sum(int((kept & row[: len(kept)]).sum()) for kept, row in zip(expected.kept, rows, strict=True))
    assert kept_unscored >= 2
    assert found.logs[0]["gmts/kept_tokens"] == sum(int(kept.sum()) for kept in expected.kept)


def test_masked_answers_are_not_kept(vllm_run):
    """An answer whose ratio is out of bounds weighs nothing under sequence_mask, so none of its tokens is chosen."""
    found = vllm_run(vllm_importance_sampling_mode="sequence_mask", **CLIPS)
    ratio = torch.cat([batch["importance_sampling_ratio"] for batch in found.steps[0].micro_batches])
    kept = found.trainer.last_selection.kept
    assert (ratio == 0).sum() >= 4
    assert not kept[ratio[:, 0] == 0].any() and kept.any()


@pytest.mark.parametrize("options", [{}, {"beta": 0.3, "use_bias_correction_kl": False}], ids=["no kl", "kl"])
def test_two_iterations_over_one_generation(vllm_run, options):
    """The second optimizer step ranks anew: the weights have moved, and the old log-probs are those of the rollouts."""
    found = vllm_run(num_iterations=2, max_steps=4, epsilon_high=0.28, **CLIPS, **options)
    assert len(found.generated) == 2 and len(found.steps) == 4
    assert found.trainer.vllm_generation.syncs == 2
    for number, step in enumerate(found.steps):
        expected = oracle_of(step, epsilon_high=0.28, beta=options.get("beta", 0.0))
        assert relative_error(step.gradient, expected.gradient) < LIMIT
        if number % 2:
            forgotten = [{k: v for k, v in b.items() if k != "old_per_token_logps"} for b in step.micro_batches]
            assert forgotten[0].keys() != step.micro_batches[0].keys()
            model = model_with(step.weights, policy_config())
            on_policy = eq2(
                model,
                [weighted(b) for b in forgotten],
                Settings(epsilon_high=0.28, **({"beta": 0.3} if options else {})),
            )
            assert relative_error(step.gradient, on_policy.gradient) > 1e-2


def test_the_first_step_after_a_generation_scores_from_trls_own_forward(vllm_run):
    """With the correction on TRL runs the policy over the rollouts anyway; only later steps need a forward to score."""
    options = {"num_iterations": 2, "max_steps": 4, **CLIPS}
    plain = vllm_run(GRPOTrainer, **options)
    ours = vllm_run(**options)
    passes = 4  # micro-batches of an optimizer step
    assert [forwards_in(plain, step) for step in range(4)] == [(passes, passes), (0, passes)] * 2
    assert [forwards_in(ours, step) for step in range(4)] == [(passes, passes), (passes, passes)] * 2


def test_so_does_it_where_rows_run_whole(vllm_run):
    skipping = vllm_run(**CLIPS)
    whole = vllm_run(**CLIPS, skip_unselected=False)
    assert forwards_in(skipping, 0) == (4, 4)
    assert forwards_in(whole, 0) == (4, 4)
    assert relative_error(skipping.gradient, whole.gradient) < 1e-6
    assert skipping.logs[0]["gmts/kept_tokens"] == whole.logs[0]["gmts/kept_tokens"]


@pytest.mark.parametrize("stand_in", [StandIn, ScoredStandIn], ids=["some unscored", "all scored"])
def test_correction_off(vllm_run, stand_in):
    """What the engine reports is not in the loss: the step is that of the same answers from anywhere else."""
    found = vllm_run(stand_in=stand_in, vllm_importance_sampling_correction=False)
    batch = found.steps[0].micro_batches[0]
    assert "importance_sampling_ratio" not in batch and "old_per_token_logps" not in batch
    assert "sampling_per_token_logps" in batch
    assert relative_error(found.gradient, oracle_of(found.steps[0], ratio_applies=False).gradient) < LIMIT
    assert forwards_in(found, 0) == (4, 4)


@pytest.mark.parametrize("correction", [True, False], ids=["correction", "no correction"])
def test_off_policy_mask_reads_the_engines_log_probs(vllm_run, correction):
    """Answers with a negative advantage that the engine finds too likely are dropped whole; nothing else is."""
    options = {"vllm_importance_sampling_correction": correction, "off_policy_mask_threshold": 0.05}
    found = vllm_run(**options, **(CLIPS if correction else {}))
    step = found.steps[0]
    model = model_with(step.weights, policy_config())
    batches, dropped = [], 0
    for batch in step.micro_batches:
        logps = torch.zeros(batch["completion_ids"].shape, dtype=torch.float64)
        for i in range(len(logps)):
            real = batch["completion_mask"][i].bool()
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
            row = Row(prompt, 0, batch["completion_ids"][i][real], None, None, None, None)
            with torch.no_grad():
                logps[i, : int(real.sum())] = logps_and_entropy(model, row, 1.0)[0]
        mask = batch["completion_mask"].double()
        difference = (batch["sampling_per_token_logps"].double() - logps).nan_to_num(nan=0.0)
        drop = (batch["advantages"] < 0) & ((difference * mask).sum(1) / mask.sum(1) > 0.05)
        dropped += int(drop.sum())
        masked = batch | {"advantages": torch.where(drop, 0.0, batch["advantages"])}
        batches.append(weighted(masked) if correction else masked)
    assert dropped >= 2
    assert relative_error(step.gradient, eq2(model, batches, Settings()).gradient) < LIMIT


def test_old_log_probs_that_are_not_the_policys(vllm_run):
    """The forward that is reused gives the current policy; the old log-probs of the batch are read separately."""
    found = vllm_run(**CLIPS, inject=off_policy(old=0.5))
    assert forwards_in(found, 0) == (4 + 1, 4)  # one of them is the injection's
    assert relative_error(found.gradient, oracle_of(found.steps[0]).gradient) < LIMIT


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_vespo_takes_the_ratio_into_its_weights(vllm_run, mode):
    """VESPO has the ratio inside its weight of an answer, so there is no advantage to move it into."""
    options = {"loss_type": "vespo", "vllm_importance_sampling_mode": mode, "max_steps": 2}
    # Wider bounds: one masked token takes the weight of its answer to zero
    options |= {"vllm_importance_sampling_clip_min": 0.35, "vllm_importance_sampling_clip_max": 2.5}
    plain = vllm_run(listening(), **options)
    ours = vllm_run(**options, selection_ratio=1.0)
    for theirs, step in zip(plain.steps, ours.steps, strict=True):
        assert relative_error(step.gradient, theirs.gradient) < 2e-6
    _, weights, _ = selected_coefficients(plain)
    expected = weighted_gradient(model_with(plain.steps[0].weights, policy_config()), plain.steps[0], weights)
    assert relative_error(vllm_run(**options).gradient, expected) < LIMIT
    assert relative_error(expected, plain.gradient) > 0.1


def test_server_mode_runs_the_same_path(vllm_run):
    colocated = vllm_run(**CLIPS)
    served = vllm_run(**CLIPS, vllm_mode="server")
    assert served.trainer.vllm_generation.settings["mode"] == "server"
    assert torch.equal(served.gradient, colocated.gradient)


def test_the_engine_gets_the_weights_of_every_step(vllm_run):
    found = vllm_run(max_steps=3, stand_in=ScoredStandIn, **CLIPS)
    assert found.trainer.vllm_generation.syncs == 3
    for step, batch in zip(found.steps, found.generated, strict=True):
        engine = model_with(step.weights, policy_config())
        ids = batch["completion_ids"][0][batch["completion_mask"][0].bool()]
        prompt = batch["prompt_ids"][0][batch["prompt_mask"][0].bool()].tolist()
        with torch.no_grad():
            exact, _ = logps_and_entropy(engine, Row(prompt, 0, ids, None, None, None, None), 1.0)
        reported = batch["sampling_per_token_logps"][0][: len(ids)].double()
        expected = exact - torch.tensor([shift(0, i) for i in range(len(ids))]).double()
        torch.testing.assert_close(reported, expected, rtol=1e-4, atol=1e-5)
    assert EOS in found.generated[0]["completion_ids"]
