"""A short run with real sampling raises a toy reward that is a function of the answer alone."""

import pytest
import torch

from harness import config_arguments, dataset, load_policy, tokenizer
from trl_gmts import GMTSGRPOConfig, GMTSGRPOTrainer


def share_of_vowels(completions, **kwargs) -> list[float]:
    return [sum(char in "aeiou" for char in text) / 8 for text in completions]


def rewards(model_dir, run_dir, **config) -> list[float]:
    """The mean reward of each optimizer step."""
    torch.manual_seed(0)
    arguments = config_arguments(
        rows=16,
        num_generations=8,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=1,
        max_steps=40,
        max_completion_length=8,
        optim="adamw_torch",
        learning_rate=3e-3,
        max_grad_norm=1.0,
    )
    trainer = GMTSGRPOTrainer(
        model=load_policy(model_dir, dtype=torch.float32),
        reward_funcs=share_of_vowels,
        args=GMTSGRPOConfig(output_dir=run_dir, **(arguments | config)),
        train_dataset=dataset(copies=16),
        processing_class=tokenizer(),
    )
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


@pytest.mark.parametrize("selection", [{}, {"token_selection": "entropy"}, {"loss_type": "grpo"}], ids=str)
def test_a_short_run_raises_a_toy_reward(model_dir, run_dir, selection):
    curve = rewards(model_dir, run_dir, **selection)
    start, end = sum(curve[:5]) / 5, sum(curve[-5:]) / 5
    assert start < 0.25
    assert end > 0.45, curve


def test_without_learning_rate_the_reward_stays(model_dir, run_dir):
    """The rise above is learning and not drift."""
    curve = rewards(model_dir, run_dir, learning_rate=0.0, max_steps=10)
    assert max(curve) < 0.3


def test_a_run_is_reproducible(model_dir, run_dir):
    assert rewards(model_dir, run_dir, max_steps=5) == rewards(model_dir, run_dir, max_steps=5)
