"""The model card names the method, its paper and its tags."""

import pytest
from huggingface_hub import ModelCard

from harness import FixedRollouts, config_arguments, dataset, load_policy, spread_reward, tokenizer
from trl_gmts import GMTSGRPOConfig, GMTSGRPOTrainer


@pytest.fixture
def card(model_dir, tmp_path):
    trainer = GMTSGRPOTrainer(
        model=load_policy(model_dir),
        reward_funcs=spread_reward,
        args=GMTSGRPOConfig(
            output_dir=str(tmp_path / "my-policy"),
            **(config_arguments(rows=4) | {"save_strategy": "steps"}),
            save_steps=1,
        ),
        train_dataset=dataset(),
        processing_class=tokenizer(),
        rollout_func=FixedRollouts(),
    )
    trainer.train()  # writes a checkpoint, and the card with it
    return ModelCard.load(tmp_path / "my-policy" / "README.md")


def test_card_names_method_paper_and_tags(card):
    assert {"trl", "grpo", "gmts"} <= set(card.data.tags)
    assert "GMTS" in card.text
    assert "GMTS: Gradient Magnitude-based Token Selection Improves RLVR Training for LLM Reasoning" in card.text
    assert "2608.30632" in card.text
    assert "my-policy" in card.content


def test_card_cites_the_paper(card):
    cited = card.text[card.text.index("```bibtex") :]
    assert "2608.30632" in cited
    assert "Lv" in cited and "Zhang" in cited and "2026" in cited
