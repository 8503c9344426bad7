"""Every optimizer step scores anew, with the weights it has; what TRL buffered is left as it was."""

import pytest
import torch

import harness
from harness import half_flat_reward, off_policy, relative_error
from oracle import LIMIT, Settings, answers_of, eq2, logps_and_entropy, model_with


# One generation batch of 16 rows throughout. The learning rate moves the policy far enough to clip, and no further.
TWO_ITERATIONS = {"num_iterations": 2, "rows": 4, "max_steps": 2, "learning_rate": 3e-3}
TWO_STEPS = {
    "steps_per_generation": 4,
    "gradient_accumulation_steps": 2,
    "rows": 4,
    "max_steps": 2,
    "learning_rate": 3e-3,
}
FOUR_STEPS = TWO_STEPS | {"rows": 4, "gradient_accumulation_steps": 1, "max_steps": 4}
BOTH = TWO_STEPS | {"num_iterations": 2, "max_steps": 4}


def oracle_of(step, settings: dict, **kwargs):
    model = model_with(step.weights, harness.policy_config())
    return eq2(model, step.micro_batches, Settings(**settings), **kwargs)


@torch.no_grad()
def ratios(step) -> torch.Tensor:
    """pi_theta / pi_old of every token of the step."""
    model = model_with(step.weights, harness.policy_config())
    answers = answers_of(step.micro_batches)
    return torch.cat([(logps_and_entropy(model, answer, 1.0)[0] - answer.old).exp() for answer in answers])


SCHEDULES = {
    "two iterations": TWO_ITERATIONS,
    "two steps a generation batch": TWO_STEPS,
    "four steps a generation batch": FOUR_STEPS,
    "both": BOTH,
}
VARIANTS = {
    "default": ({}, {}),
    "clips apart": ({"epsilon": 0.1, "epsilon_high": 0.15}, {"epsilon_low": 0.1, "epsilon_high": 0.15}),
    "group scope": ({"selection_scope": "group"}, {"scope": "group"}),
    "scored base": ({"selection_base": "scored", "reward": half_flat_reward}, {"base": "scored"}),
    "entropy": ({"token_selection": "entropy"}, {"score": "entropy"}),
    "tool tokens": ({"tool_tokens": True}, {}),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_step_is_eq2_at_its_own_weights(run, schedule, variant):
    """S_rho, too, is that of the optimizer step and not of the generation batch."""
    arguments, settings = VARIANTS[variant]
    found = run(**(SCHEDULES[schedule] | arguments))
    assert len(found.steps) == SCHEDULES[schedule]["max_steps"] and len(found.generated) == 1
    for number, step in enumerate(found.steps):
        expected = oracle_of(step, settings)
        assert expected.gap > 1e-5
        if not any(omega.any() for omega in expected.omega):  # a micro-batch of answers without advantage
            assert "half_flat" in str(arguments) and not step.gradient.any()
        else:
            assert relative_error(step.gradient, expected.gradient) < LIMIT, f"optimizer step {number + 1}"


def test_ratio_differs_from_one_in_later_steps(run):
    for schedule in (TWO_ITERATIONS, TWO_STEPS):
        first, second = run(**schedule).steps
        torch.testing.assert_close(ratios(first), torch.ones_like(ratios(first)), rtol=0, atol=1e-5)
        moved = (ratios(second) - 1).abs()
        assert moved.median() > 1e-2 and moved.max() < 5


def test_selection_changes_accordingly(run):
    """The second iteration sees the same rows, keeps other tokens, and the old selection would show in its gradient."""
    first, second = run(**TWO_ITERATIONS).steps
    before, now = oracle_of(first, {}), oracle_of(second, {})
    kept_before = {
        (tuple(answer.prompt), tuple(answer.ids.tolist())): kept
        for answer, kept in zip(before.answers, before.kept, strict=True)
    }
    stale = [kept_before[tuple(answer.prompt), tuple(answer.ids.tolist())] for answer in now.answers]
    changed = sum(int((old != new).sum()) for old, new in zip(stale, now.kept, strict=True))
    assert changed >= 2
    assert relative_error(second.gradient, now.gradient) < LIMIT
    assert relative_error(second.gradient, oracle_of(second, {}, kept=stale).gradient) > 1e-2


def test_unnormalised_steps_keep_the_denominator_of_trl(run):
    """TRL divides by the tokens of the generation batch, shared out evenly over its optimizer steps."""
    found = run(**TWO_STEPS, normalize_selected=False)
    everything = sum(int(batch["completion_mask"].sum()) for step in found.steps for batch in step.micro_batches)
    for step in found.steps:
        expected = oracle_of(step, {"normalize": False}, all_tokens=everything / 2)
        assert relative_error(step.gradient, expected.gradient) < LIMIT
        own = oracle_of(step, {"normalize": False})
        assert relative_error(step.gradient, own.gradient) > 1e-2, "both steps have the same number of tokens"


def assert_equal_batches(ours: dict, theirs: dict):
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if torch.is_tensor(value):
            assert ours[name].dtype == value.dtype
            assert torch.equal(ours[name].nan_to_num(nan=123.0), value.nan_to_num(nan=123.0)), name
        else:
            assert ours[name] == value, name


def with_holes(trainer, batch):
    """Old and reference log-probs with a few that are not numbers: what tempts a trainer to clean up in place."""
    batch = off_policy(old=0.3, ref=0.3)(trainer, batch)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        batch[name] = batch[name].clone()
        batch[name][0, 0] = float("nan")
        batch[name][3, 0] = float("-inf")
    return batch


@pytest.mark.parametrize(
    "arguments",
    [TWO_ITERATIONS, BOTH, TWO_ITERATIONS | {"inject": with_holes, "beta": 0.1}],
    ids=["two iterations", "both", "not all numbers"],
)
def test_buffered_inputs_are_never_modified(run, arguments):
    """Each time TRL hands out a buffered micro-batch it is what it was, and so is the buffer at the end."""
    found = run(**arguments)
    steps_per_generation = found.trainer.args.steps_per_generation
    handed_out = [batch for step in found.steps for batch in step.micro_batches]
    assert len(handed_out) == 2 * steps_per_generation
    for first, again in zip(handed_out[:steps_per_generation], handed_out[steps_per_generation:], strict=True):
        assert_equal_batches(first, again)
    for first, buffered in zip(handed_out, found.trainer._buffered_inputs, strict=False):
        assert_equal_batches(first, buffered)


def test_every_generation_batch_is_scored(run):
    """Over several generation batches too, each step is Eq. 2 on its own rows."""
    found = run(rows=8, max_steps=3, learning_rate=3e-3)
    assert len(found.generated) == 3
    for step in found.steps:
        expected = oracle_of(step, {})
        assert relative_error(step.gradient, expected.gradient) < LIMIT
    assert relative_error(found.steps[1].gradient, found.steps[0].gradient) > 0.1
