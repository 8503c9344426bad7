"""Leaving out what is not trained on changes neither the gradient nor a logged number, whatever is selected and how.

The same under two processes: `distributed/test_layouts.py`. Other architectures: `test_architectures.py`.
"""

import pytest

from harness import FixedRollouts, half_flat_reward, off_policy, relative_error


LIMIT = 1e-6  # relative, of a model in float64
TIMES = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}

SELECTIONS = {
    "default": {},
    "few": {"selection_ratio": 0.05},
    "group": {"selection_scope": "group"},
    "sequence": {"selection_scope": "sequence"},
    "scored": {"selection_base": "scored"},
    "bottom": {"select_bottom": True, "selection_base": "scored"},
    "entropy": {"token_selection": "entropy"},
    "random": {"token_selection": "random"},
    "unnormalized": {"normalize_selected": False},
}
INPUTS = {
    "half of the groups without advantage": {"reward": half_flat_reward},
    "old and reference log-probs": {"inject": off_policy(old=0.3, ref=0.3), "beta": 0.04},
    "clipped": {"inject": off_policy(old=0.5), "epsilon": 0.05},
    "truncated answers masked": {"mask_truncated_completions": True},
    "sequence-level ratios": {"inject": off_policy(old=0.1), "importance_sampling_level": "sequence"},
    "entropy bonus": {"entropy_coef": 0.01},
    "padding to a multiple": {"pad_to_multiple_of": 8},
    "grpo": {"loss_type": "grpo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
}


def area(found) -> int:
    """Tokens and padding that went through the decoder with gradient."""
    return sum(forward["input_ids"].numel() for forward in found.forwards)


def assert_alike(run, **options):
    whole = run(skip_unselected=False, watch_forwards=True, **options)
    skipping = run(watch_forwards=True, **options)
    assert area(skipping) < area(whole)
    for ours, theirs in zip(skipping.steps, whole.steps, strict=True):
        assert relative_error(ours.gradient, theirs.gradient) < LIMIT
    for ours, theirs in zip(skipping.logs, whole.logs, strict=True):
        assert ours.keys() == theirs.keys() and "gmts/kept_tokens" in ours
        for name in ours.keys() - TIMES - {"loss"}:
            assert ours[name] == pytest.approx(theirs[name], rel=LIMIT, abs=1e-9), name
        # A mean of terms of size 1 that cancel: what is relative is the terms'.
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=LIMIT)


@pytest.mark.parametrize("rows", [16, 4, 1])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_whatever_is_selected(run, selection, rows):
    assert_alike(run, rows=rows, **SELECTIONS[selection])


@pytest.mark.parametrize("inputs", INPUTS)
def test_whatever_the_answers(run, inputs):
    assert_alike(run, rows=4, **INPUTS[inputs])


def test_with_tokens_of_tools(run):
    whole, skipping = (
        run(rows=4, rollouts=FixedRollouts(tool_tokens=True), skip_unselected=skip) for skip in (False, True)
    )
    assert relative_error(skipping.gradient, whole.gradient) < LIMIT


def test_over_several_steps_and_iterations(run):
    assert_alike(run, rows=4, num_iterations=2, max_steps=4, learning_rate=1e-3)


def test_answers_without_a_kept_token_cost_no_backward(run):
    """Two of four groups are without advantage: each forward with gradient holds rows of the others only."""
    found = run(rows=4, reward=half_flat_reward, watch_forwards=True)
    rows = sum(len(forward["input_ids"]) for forward in found.forwards)
    assert rows <= 8 and len(found.forwards) == 4


def test_no_pack_is_larger_than_a_micro_batch_of_grpo(run):
    for rows in (8, 4, 2):
        for selection in SELECTIONS.values():
            found = run(rows=rows, watch_forwards=True, **selection)
            batch = found.steps[0].micro_batches[0]
            widest = batch["prompt_ids"].size(1) + batch["completion_ids"].size(1)
            assert all(len(f["input_ids"]) <= rows and f["input_ids"].size(1) <= widest for f in found.forwards)
