"""Every logged number against an independent computation, and TRL's own numbers left as they are."""

import math

import pytest
import torch
from trl import GRPOTrainer

import harness
from harness import FixedRollouts, half_flat_reward, off_policy
from oracle import Settings, eq2, model_with
from trl_gmts import GMTSGRPOTrainer
from trl_gmts.metrics import selection_metrics, selection_sums


NAMES = {
    "kept_fraction",
    "threshold",
    "kept_tokens",
    "zero_score_fraction",
    "nonfinite_scores",
    "entropy_kept",
    "entropy_dropped",
    "kept_positive_advantage",
    "answers_with_kept",
    "effective_answers",
    "entropy_overlap",
}


def spoil(trainer, batch):
    batch = off_policy(old=0.5)(trainer, batch)
    batch["old_per_token_logps"] = batch["old_per_token_logps"].clone()
    batch["old_per_token_logps"][::5, 0] = float("nan")
    return batch


# How to run, and what the oracle is told
SITUATIONS = {
    "on policy": ({}, {}),
    "clipped": ({"inject": off_policy(old=0.5)}, {}),
    "zero-advantage groups": ({"reward": half_flat_reward}, {}),
    "more budget than scores": ({"reward": half_flat_reward, "selection_ratio": 0.9}, {"ratio": 0.9}),
    "tool tokens": ({"tool_tokens": True}, {}),
    "entropy": ({"token_selection": "entropy"}, {"score": "entropy"}),
    "scored base": ({"selection_base": "scored", "reward": half_flat_reward}, {"base": "scored"}),
    "kept without advantage": ({"token_selection": "entropy", "reward": half_flat_reward}, {"score": "entropy"}),
    "bottom": ({"select_bottom": True}, {"bottom": True}),
    "not all numbers": ({"inject": spoil}, {}),
    "not all numbers, entropy": ({"token_selection": "entropy", "inject": spoil}, {"score": "entropy"}),
    "rho 1": ({"selection_ratio": 1.0}, {"ratio": 1.0}),
    "grpo": ({"loss_type": "grpo"}, {"loss": "grpo"}),
}


def independent(step, settings: Settings) -> dict[str, float]:
    """The metrics, in loops over tokens where that is plainest."""
    model = model_with(step.weights, harness.policy_config())
    expected = eq2(model, step.micro_batches, settings)
    tokens = []  # (answer, score, entropy, advantage, kept)
    for number, answer in enumerate(expected.answers):
        for t in range(len(answer.ids)):
            if answer.trainable[t]:
                values = (expected.delta[number], expected.entropy[number], answer.advantage, expected.kept[number])
                tokens.append((number, *(value[t].item() for value in values)))
    kept = [token for token in tokens if token[4]]
    dropped = [token for token in tokens if not token[4]]
    per_answer = [sum(1 for token in kept if token[0] == number) for number in range(len(expected.answers))]
    # Entropy selection with the same number of tokens; it knows no coefficient, so zero scores are no reason to pass
    rankable = [token for token in tokens if math.isfinite(token[1])]
    sign = -1 if settings.bottom else 1
    by_entropy = sorted((sign * token[2] for token in rankable), reverse=True)
    cut = by_entropy[min(expected.budget, len(by_entropy)) - 1] - 1e-9
    return {
        "kept_fraction": len(kept) / len(tokens),
        "threshold": expected.tau[0],
        "kept_tokens": len(kept),
        "zero_score_fraction": sum(token[1] == 0 for token in tokens) / len(tokens),
        "nonfinite_scores": sum(not math.isfinite(token[1]) for token in tokens),
        "entropy_kept": sum(token[2] for token in kept) / len(kept),
        "entropy_dropped": sum(token[2] for token in dropped) / len(dropped) if dropped else None,
        "kept_positive_advantage": sum(token[3] > 0 for token in kept) / len(kept),
        "answers_with_kept": sum(number > 0 for number in per_answer) / len(per_answer),
        "effective_answers": 1 / sum((number / len(kept)) ** 2 for number in per_answer),
        "entropy_overlap": sum(sign * token[2] >= cut for token in kept) / len(kept),
    }


@pytest.mark.parametrize("rows", [16, 4, 1])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_logged_numbers_are_right(run, situation, rows):
    arguments, settings = SITUATIONS[situation]
    found = run(rows=rows, **arguments)
    expected = independent(found.steps[0], Settings(**settings))
    assert set(expected) == NAMES
    logged = {name.removeprefix("gmts/"): value for name, value in found.logs[0].items() if name.startswith("gmts/")}
    for name, value in expected.items():
        if value is None:
            assert name not in logged, f"{name} is a mean over no token"
        else:
            assert logged[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert set(logged) == {name for name, value in expected.items() if value is not None}


def test_numbers_are_such_that_errors_would_show(run):
    """Away from 0 and 1, and different from each other, where a mix-up would otherwise pass."""
    values = independent(run(inject=off_policy(old=0.5), selection_ratio=0.3).steps[0], Settings(ratio=0.3))
    shares = [value for name, value in values.items() if value is not None and 0 < value < 1]
    assert len(shares) >= 5 and len({round(share, 6) for share in shares}) == len(shares)
    assert values["entropy_overlap"] < 0.9 and 1 < values["effective_answers"] < 15


@pytest.mark.parametrize("scope", ["group", "sequence"])
def test_threshold_of_many_segments_is_their_mean(run, scope):
    found = run(selection_scope=scope, rows=4)
    model = model_with(found.steps[0].weights, harness.policy_config())
    expected = eq2(model, found.steps[0].micro_batches, Settings(scope=scope))
    assert len(expected.tau) > 1
    assert found.logs[0]["gmts/threshold"] == pytest.approx(sum(expected.tau) / len(expected.tau), rel=1e-5)
    assert found.logs[0]["gmts/kept_tokens"] == sum(int(kept.sum()) for kept in expected.kept)


def test_overlap_is_one_where_entropy_selects(run):
    assert run(token_selection="entropy", rows=4).logs[0]["gmts/entropy_overlap"] == 1


def test_random_selection_has_the_same_budget(run):
    """As many tokens as GMTS keeps, no tie and no zero among them; reproducible; another draw in the next step."""
    arguments = {"rows": 4, "max_steps": 2, "learning_rate": 0.0}
    gmts = run(**arguments)
    drawn, again = (run(token_selection="random", **arguments) for _ in range(2))
    other = run(token_selection="random", **arguments, seed=1)
    for step, entry in zip(drawn.steps, drawn.logs, strict=True):
        tokens = sum(int(batch["completion_mask"].sum()) for batch in step.micro_batches)
        assert entry["gmts/kept_tokens"] == math.ceil(tokens / 5)
    assert gmts.logs[0]["gmts/kept_tokens"] == pytest.approx(drawn.logs[0]["gmts/kept_tokens"], abs=1)
    for one, two in zip(drawn.steps, again.steps, strict=True):
        assert torch.equal(one.gradient, two.gradient)
    assert harness.relative_error(other.gradient, drawn.gradient) > 0.1
    assert harness.relative_error(drawn.gradient, gmts.gradient) > 0.1


def test_random_selection_is_drawn_anew_at_each_step(run):
    """The same rows in the second iteration, other tokens."""
    found = run(token_selection="random", num_iterations=2, max_steps=2, learning_rate=1e-12)
    first, second = found.steps
    assert harness.relative_error(second.gradient, first.gradient) > 0.1


def test_random_selection_is_fair(run):
    """Over 40 draws from the same rows each token is kept about as often: no answer, position or entropy is favoured."""
    found = run(token_selection="random", num_iterations=40, max_steps=40, learning_rate=1e-12, selection_ratio=0.25)
    entropy_kept = [entry["gmts/entropy_kept"] for entry in found.logs]
    entropy_dropped = [entry["gmts/entropy_dropped"] for entry in found.logs]
    n, kept = len(found.logs), found.logs[0]["gmts/kept_tokens"]
    model = model_with(found.steps[0].weights, harness.policy_config())
    everything = eq2(model, found.steps[0].micro_batches, Settings())
    spread = everything.of_trainable(everything.entropy).std().item()
    error = spread / math.sqrt(n * kept)
    assert abs(sum(entropy_kept) / n - sum(entropy_dropped) / n) < 4 * error
    assert max(entropy_kept) - min(entropy_kept) > error


OWN = ["entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"]
OWN += ["clip_ratio/low_min", "clip_ratio/high_max"]
TRL_SITUATIONS = {
    "dapo": {"inject": off_policy(old=0.5, ref=0.5), "beta": 0.1},
    "grpo": {"inject": off_policy(old=0.5, ref=0.5), "beta": 0.1, "loss_type": "grpo"},
    "tool tokens": {"inject": off_policy(old=0.5, ref=0.5), "beta": 0.1, "tool_tokens": True},
    "entropy bonus": {"inject": off_policy(old=0.5, ref=0.5), "beta": 0.1, "entropy_coef": 0.01},
}


@pytest.mark.parametrize("rows", [16, 4])
@pytest.mark.parametrize("situation", TRL_SITUATIONS)
@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_metrics_of_trl_keep_their_meaning(run, situation, rows, ratio):
    """All tokens, once per micro-batch, in the same order: the lists that TRL averages are those of GRPOTrainer."""
    theirs = run(GRPOTrainer, rows=rows, **TRL_SITUATIONS[situation])
    ours = run(GMTSGRPOTrainer, rows=rows, selection_ratio=ratio, **TRL_SITUATIONS[situation])
    their_lists, our_lists = theirs.steps[0].metrics, ours.steps[0].metrics
    assert {name for name in our_lists if not name.startswith("gmts/")} == set(their_lists)
    for name in OWN:
        assert len(their_lists[name]) == harness.ROWS // rows, name
        assert our_lists[name] == pytest.approx(their_lists[name], rel=1e-5, abs=1e-6), name
        assert any(their_lists[name]) or name == "clip_ratio/low_min", f"{name} is always zero here"
    for name, values in their_lists.items():
        assert len(our_lists[name]) == len(values), name
    assert all(len(values) == 1 for name, values in our_lists.items() if name.startswith("gmts/"))
    skipped = {"step_time", "train_runtime", "grad_norm"}
    for name in set(theirs.logs[0]) - skipped:
        assert ours.logs[0][name] == pytest.approx(theirs.logs[0][name], rel=1e-5, abs=1e-6), name
    assert "loss" in theirs.logs[0], "the loss that is logged is TRL's, over all tokens"


def test_logged_once_for_each_optimizer_step(run):
    found = run(rows=4, max_steps=4, num_iterations=2, logging_steps=2, learning_rate=1e-3)
    assert len(found.logs) == 2
    first_window = found.steps[:2]
    kept = [independent(step, Settings())["kept_tokens"] for step in first_window]
    assert found.logs[0]["gmts/kept_tokens"] == sum(kept) / 2


def test_nothing_is_logged_when_selection_is_off(run):
    found = run(token_selection="none", rows=4)
    assert not [name for name in found.logs[0] if name.startswith("gmts/")]


def test_every_metric_is_documented(run):
    logged = {name for name in run().logs[0] if name.startswith("gmts/")}
    assert logged == {f"gmts/{name}" for name in NAMES}
    undocumented = [name for name in logged if f"`{name}`" not in GMTSGRPOTrainer.__doc__]
    assert not undocumented


def test_masked_answers_are_not_kept_answers(run):
    """`answers_with_kept` is a share of all answers of the step, those that are masked whole included."""
    found = run(rollouts=FixedRollouts(), mask_truncated_completions=True, selection_ratio=1.0, rows=4)
    lengths = [int(row.sum()) for batch in found.steps[0].micro_batches for row in batch["completion_mask"]]
    assert 0 < lengths.count(0) < 16
    assert found.logs[0]["gmts/answers_with_kept"] == pytest.approx((16 - lengths.count(0)) / 16)


def test_counts_are_exact_beyond_what_float32_counts():
    mask = torch.ones(1, 2**24 + 1, dtype=torch.bool)
    zeros = torch.zeros(mask.shape)
    sums = selection_sums(mask, mask, zeros, zeros, torch.ones(1, 1), mask)
    assert selection_metrics(sums)["kept_tokens"] == 2**24 + 1
