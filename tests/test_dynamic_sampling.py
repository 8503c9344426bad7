"""Prompts whose answers all score alike are replaced before the update, and nothing else about the batch changes.

What two processes do is in `distributed/`.
"""

import math

import pytest
import torch
import transformers
from packaging.version import Version
from trl import GRPOTrainer

import harness
from harness import NUM_GENERATIONS, PROMPTS, FixedRollouts, half_flat_reward, relative_error, spread_reward
from oracle import LIMIT, Settings, eq2, model_with
from trl_gmts.dynamic_sampling import has_signal, prompts_to_draw


FLAT, USEFUL = PROMPTS[:2], PROMPTS[2:]  # of half_flat_reward


def prompts_of(batch) -> list[str]:
    ids = [row[mask.bool()].tolist() for row, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    return [prompt for row in ids for prompt in PROMPTS if harness.tokenizer()(prompt)["input_ids"] == row]


def answers_of(batch) -> list[list[int]]:
    masks = batch["completion_mask"].bool()
    return [row[mask].tolist() for row, mask in zip(batch["completion_ids"], masks, strict=True)]


def group_advantages(rewards: list[float]) -> torch.Tensor:
    """TRL's default: (reward - mean) / (std + 1e-4) within the group."""
    groups = torch.tensor(rewards, dtype=torch.float64).view(-1, NUM_GENERATIONS)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


# The batch


@pytest.mark.parametrize("rows", [16, 4])
def test_every_group_has_a_signal_and_its_answers_their_own_rewards(run, rows):
    found = run(rows=rows, reward=half_flat_reward, dynamic_sampling=True, max_steps=3)
    assert len(found.generated) == 3
    for batch in found.generated:
        prompts, answers = prompts_of(batch), answers_of(batch)
        assert len(prompts) == 16 and set(prompts) <= set(USEFUL)
        assert all(len(set(prompts[i : i + NUM_GENERATIONS])) == 1 for i in range(0, 16, NUM_GENERATIONS))
        expected = group_advantages(spread_reward(completion_ids=answers))
        torch.testing.assert_close(batch["advantages"].double(), expected, rtol=1e-5, atol=1e-6)
        assert batch["num_items_in_batch"] == sum(map(len, answers))
    assert all(log["frac_reward_zero_std"] == 0 for log in found.logs)


def test_groups_with_a_signal_are_left_where_they_are(run):
    with_it = run(reward=half_flat_reward, dynamic_sampling=True)
    without = run(reward=half_flat_reward)
    kept = slice(2 * NUM_GENERATIONS, None)  # the second half of the prompts
    assert answers_of(with_it.generated[0])[kept] == answers_of(without.generated[0])[kept]
    assert prompts_of(with_it.generated[0])[kept] == [prompt for prompt in USEFUL for _ in range(NUM_GENERATIONS)]


def test_the_gradient_is_eq2_of_the_replaced_batch(run):
    found = run(rows=4, reward=half_flat_reward, dynamic_sampling=True)
    step = found.steps[0]
    expected = eq2(model_with(step.weights, harness.policy_config()), step.micro_batches, Settings())
    assert relative_error(found.gradient, expected.gradient) < LIMIT


def test_where_all_prompts_are_useful_it_changes_nothing(run):
    for options in ({}, {"token_selection": "none"}):
        with_it, without = (
            run(rows=4, max_steps=3, sampled=True, dynamic_sampling=on, **options) for on in (True, False)
        )
        assert torch.equal(
            harness.flat_parameters(with_it.trainer.model), harness.flat_parameters(without.trainer.model)
        )
        assert all(log["dynamic_sampling/prompts_drawn"] == len(PROMPTS) for log in with_it.logs)
        assert not any("dynamic_sampling" in name for log in without.logs for name in log)


def test_evaluation_draws_nothing(run):
    found = run(
        reward=half_flat_reward,
        dynamic_sampling=True,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=16,
        trainer_arguments={"eval_dataset": harness.dataset(copies=1)},
    )
    (evaluation,) = [entry for entry in found.trainer.state.log_history if "eval_loss" in entry]
    assert evaluation["eval_frac_reward_zero_std"] == 0.5
    assert not any("dynamic_sampling" in name for name in evaluation)


def test_what_travels_with_an_answer_stays_with_it(run):
    """Log-probs of the sampler, tokens the model did not write, fields for the reward and columns of the log."""
    seen = []

    class Rollouts(FixedRollouts):
        def __call__(self, prompts, trainer):
            output = super().__call__(prompts, trainer)
            return output | {"first": [ids[0] for ids in output["completion_ids"]]}

    def reward(prompts, completion_ids, first, log_extra, log_metric, **kwargs):
        assert first == [ids[0] for ids in completion_ids]
        log_extra("answer", [str(ids) for ids in completion_ids])
        log_metric("calls", 1.0)
        seen.append(len(prompts))
        return half_flat_reward(prompts, completion_ids)

    found = run(
        rollouts=Rollouts(tool_tokens=True, logprobs=lambda ids: [-0.01 * token for token in ids]),
        reward=reward,
        dynamic_sampling=True,
        rows=4,
    )
    (batch,) = found.generated
    answers = answers_of(batch)
    assert len(seen) > 1, "no round was needed"
    logs = found.trainer._logs
    assert list(logs["extra"]["answer"]) == [str(ids) for ids in answers]
    assert list(logs["prompt"]) == prompts_of(batch)
    assert batch["tool_mask"].shape == batch["completion_ids"].shape
    for ids, tools, logps in zip(answers, batch["tool_mask"], batch["sampling_per_token_logps"], strict=True):
        assert tools.tolist()[: len(ids)] == [int(not 2 <= i < 4) for i in range(len(ids))]
        torch.testing.assert_close(logps[: len(ids)], torch.tensor([-0.01 * token for token in ids]))


def test_a_resumed_run_draws_the_prompts_of_the_uninterrupted_one(run):
    found = run(reward=half_flat_reward, dynamic_sampling=True, max_steps=2)
    trainer = found.trainer
    draws = []
    for step, micro_step in [(0, 0), (1, 0), (1, 1), (1, 2)]:
        trainer.args.gradient_accumulation_steps = 2
        trainer.state.global_step, trainer._step = step, micro_step
        draws.append(list(trainer._fresh_prompts(4)))
    assert draws[0] != draws[1] != draws[2] and draws[1] == draws[3]
    assert all(len(set(drawn)) == len(drawn) for drawn in draws)


# The end of it


def test_it_stops_says_so_and_trains_on_what_there_is(run, caplog):
    found = run(reward=harness.flat_reward, dynamic_sampling=True, max_resample_rounds=3, max_steps=2)
    assert [log["dynamic_sampling/resample_rounds"] for log in found.logs] == [3, 3]
    assert [log["dynamic_sampling/prompts_drawn"] for log in found.logs] == [16, 16]
    assert all(math.isfinite(loss) for loss in found.losses)
    assert not found.gradient.any()
    assert "4 of 4 groups" in caplog.text and "max_resample_rounds" in caplog.text


def test_a_part_that_stays_without_signal_adds_no_gradient(run):
    calls = []

    def first_round_only(prompts, completion_ids, **kwargs):
        calls.append(len(prompts))
        return half_flat_reward(prompts, completion_ids) if len(calls) == 1 else [0.5] * len(prompts)

    found = run(reward=first_round_only, dynamic_sampling=True, max_resample_rounds=2)
    without = run(reward=half_flat_reward)
    assert found.logs[0]["dynamic_sampling/resample_rounds"] == 2 and len(calls) == 3
    assert relative_error(found.gradient, without.gradient) < 1e-6


def test_a_dataset_without_further_prompts_ends_the_rounds(run, monkeypatch):
    whole = harness.dataset
    monkeypatch.setattr(harness, "dataset", lambda prompts: whole(prompts, copies=1))  # the batch is all of it
    found = run(reward=harness.flat_reward, dynamic_sampling=True, max_resample_rounds=9)
    assert found.logs[0]["dynamic_sampling/resample_rounds"] == 1


# Refused


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_rounds_are_a_positive_number(run_dir, value):
    from trl_gmts import GMTSGRPOConfig

    with pytest.raises(ValueError, match="max_resample_rounds must be a whole number of at least 1"):
        GMTSGRPOConfig(output_dir=run_dir, **harness.config_arguments(max_resample_rounds=value))


def test_a_stream_of_prompts_is_refused(run, monkeypatch):
    whole = harness.dataset
    monkeypatch.setattr(harness, "dataset", lambda prompts: whole(prompts).to_iterable_dataset())
    with pytest.raises(ValueError, match="IterableDataset"):
        run(dynamic_sampling=True, train=False)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.2"), reason="TRL has no environments with it")
def test_environments_are_refused(run, monkeypatch):
    from test_inputs import Calculator, tool_tokenizer

    tokenizer = tool_tokenizer()
    monkeypatch.setattr(harness, "tokenizer", lambda: tokenizer)
    with pytest.raises(ValueError, match="environment_factory"):
        run(dynamic_sampling=True, sampled=True, train=False, trainer_arguments={"environment_factory": Calculator})


def test_extra_columns_of_another_length_are_an_error(run):
    def reward(prompts, completion_ids, log_extra, **kwargs):
        log_extra("note", ["one"])
        return spread_reward(completion_ids)

    with pytest.raises(ValueError, match=r"logged 1 values of 'note' with log_extra for 16 answers"):
        run(reward=reward, dynamic_sampling=True)


def test_grpo_itself_is_untouched(run):
    assert not hasattr(GRPOTrainer, "_useful_answers")
    assert not any("dynamic_sampling" in name for log in run(GRPOTrainer).logs for name in log)


# Which groups have a signal


NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "weights", "each_function", "expected"),
    [
        ([[1.0], [1.0], [0.0], [1.0]], [1.0], False, [False, True]),
        ([[1.0], [NAN], [NAN], [NAN]], [1.0], False, [False, False]),  # one can be scored; none can
        ([[0.1, 0.2], [0.3, 0.0], [0.1, 0.2], [0.3, 0.1]], [1.0, 1.0], False, [False, True]),  # sums, to rounding
        ([[0.1, 0.2], [0.3, 0.0], [0.1, 0.2], [0.1, 0.2]], [1.0, 1.0], True, [True, False]),
        ([[1.0, 5.0], [1.0, 6.0], [1.0, NAN], [1.0, NAN]], [1.0, 0.0], False, [False, False]),  # weight of zero
        ([[1.0, 5.0], [1.0, 6.0], [1.0, NAN], [1.0, 2.0]], [1.0, 0.0], True, [False, False]),
        ([[1e6], [1e6 + 1], [0.0], [1e-3]], [1.0], False, [True, True]),  # TRL gives both groups advantages
        ([[1000.0], [1000.005], [1e6], [1e6 + 0.0625]], [1.0], False, [True, False]),  # the other way: one bit
    ],
)
def test_signal(rewards, weights, each_function, expected):
    found = has_signal(torch.tensor(rewards), torch.tensor(weights), 2, each_function)
    assert found.tolist() == expected


def test_as_many_prompts_are_drawn_as_are_expected_to_do():
    assert prompts_to_draw(missing=4, useful=8, drawn=12, most=12, num_generations=8, num_processes=1) == 6
    assert prompts_to_draw(missing=12, useful=0, drawn=12, most=12, num_generations=8, num_processes=1) == 12
    assert prompts_to_draw(missing=11, useful=1, drawn=12, most=12, num_generations=8, num_processes=1) == 12
    # each of 16 processes the same number of the 8 answers: an even number of prompts
    assert prompts_to_draw(missing=1, useful=31, drawn=32, most=32, num_generations=8, num_processes=16) == 2
