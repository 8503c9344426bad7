"""Evaluation in between, checkpoints, resuming in the middle of an epoch, and what is saved: all as with GRPOTrainer."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

import harness
from harness import FixedRollouts, dataset, flat_parameters, load_policy, policy_config, relative_error
from oracle import LIMIT, Settings, eq2, model_with
from trl_gmts import GMTSGRPOTrainer


def by_prompt(prompt, index, round):
    """An answer that does not depend on how often was generated before."""
    return FixedRollouts().answer(prompt, index)


def parameters_after(found) -> torch.Tensor:
    return flat_parameters(found.trainer.model)


# Evaluation

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "rows": 4, "max_steps": 3}


def evaluated(run, trainer_class, **options):
    return run(
        trainer_class,
        rollouts=FixedRollouts(answers=by_prompt),
        trainer_arguments={"eval_dataset": dataset(copies=1)},
        **(EVALUATED | options),
    )


def eval_logs(found) -> list[dict]:
    timing = ("runtime", "per_second")
    logs = [entry for entry in found.trainer.state.log_history if "eval_loss" in entry]
    return [{k: v for k, v in entry.items() if not k.endswith(timing)} for entry in logs]


def test_evaluation_is_grpos_and_selects_nothing(run):
    """Over all tokens, like any evaluation: before the first step it is GRPOTrainer's to the last digit."""
    options = {"eval_on_start": True, "beta": 0.1}
    theirs, ours = evaluated(run, GRPOTrainer, **options), evaluated(run, GMTSGRPOTrainer, **options)
    assert len(eval_logs(ours)) == 4
    assert eval_logs(ours)[0] == eval_logs(theirs)[0]
    assert not any("gmts" in name for entry in eval_logs(ours) for name in entry)
    assert all("gmts/kept_tokens" in entry for entry in ours.logs)


def test_training_does_not_notice_the_evaluation(run):
    with_evaluation = evaluated(run, GMTSGRPOTrainer)
    without = run(rollouts=FixedRollouts(answers=by_prompt), rows=4, max_steps=3)
    assert len(eval_logs(with_evaluation)) == 3
    for a, b in zip(
        with_evaluation.steps, without.steps, strict=True
    ):  # TRL shuffles the rows, so sums are ordered anew
        assert relative_error(a.gradient, b.gradient) < 1e-6
    names = [name for name in without.logs[-1] if name.startswith("gmts/")]
    assert len(names) > 5
    for name in names:
        assert with_evaluation.logs[-1][name] == pytest.approx(without.logs[-1][name], rel=1e-6)


# Resuming


@pytest.fixture
def interrupted(model_dir, tmp_path):
    """The same training twice: in one piece, and stopped at a checkpoint and resumed in a new trainer."""

    def take(trainer_class, checkpoint: int, **options):
        settings = {
            "rows": 4,
            "sampled": True,
            "shuffle_dataset": True,
            "max_steps": 6,
            "optim": "adamw_torch",
            "learning_rate": 3e-3,
            "lr_scheduler_type": "linear",
            "save_strategy": "steps",
            "save_steps": checkpoint,
        } | options
        folder = tmp_path / f"{trainer_class.__name__}-{len(list(tmp_path.iterdir()))}"
        whole = harness.run(trainer_class, model=load_policy(model_dir), output_dir=str(folder), **settings)
        resumed = harness.run(
            trainer_class,
            model=load_policy(model_dir),
            output_dir=str(folder / "resumed"),
            train=False,
            **settings,
        )
        resumed.trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{checkpoint}"))
        assert resumed.trainer.state.global_step == whole.trainer.state.global_step
        assert len(resumed.steps) == len(whole.steps) - checkpoint
        assert 0 < checkpoint / 8 < 1, "not in the middle of an epoch"
        return whole, resumed

    return take


SETTINGS = {
    "gmts": {},
    "random": {"token_selection": "random"},
    "entropy, group scope": {"token_selection": "entropy", "selection_scope": "group"},
    "kl": {"beta": 0.1},
    "adaptive entropy": {
        "use_adaptive_entropy": True,
        "entropy_coef": 0.02,
        "entropy_coef_delta": 0.01,
        "entropy_target": 100.0,
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_resumed_run_continues_like_the_uninterrupted_one(interrupted, setting):
    """To the last bit: answers, gradients, what is kept, logs and parameters."""
    whole, resumed = interrupted(GMTSGRPOTrainer, 3, **SETTINGS[setting])
    for theirs, ours in zip(whole.generated[3:], resumed.generated, strict=True):
        assert torch.equal(theirs["completion_ids"], ours["completion_ids"])
    for theirs, ours in zip(whole.steps[3:], resumed.steps, strict=True):
        assert torch.equal(theirs.gradient, ours.gradient)
    assert torch.equal(parameters_after(resumed), parameters_after(whole))
    for theirs, ours in zip(whole.logs[3:], resumed.logs[-3:], strict=True):
        names = [name for name in theirs if name.startswith("gmts/") or name in ("loss", "entropy_coef")]
        assert len(names) > 10
        assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}


def test_grpo_itself_resumes_to_the_last_bit(interrupted):
    """The standard that the tests above hold us to."""
    whole, resumed = interrupted(GRPOTrainer, 3)
    assert torch.equal(parameters_after(resumed), parameters_after(whole))


def test_between_two_iterations_grpo_generates_anew_and_so_do_we(interrupted):
    """A checkpoint holds no rollouts. GRPOTrainer then differs from the uninterrupted run; GMTS follows GRPOTrainer."""
    options = {"num_iterations": 2, "optim": "sgd", "learning_rate": 3e-3, "lr_scheduler_type": "constant"}
    whole, resumed = interrupted(GRPOTrainer, 3, **options)
    assert not torch.equal(whole.generated[-1]["completion_ids"], resumed.generated[-1]["completion_ids"])
    _, ours = interrupted(GMTSGRPOTrainer, 3, **options, selection_ratio=1.0)
    for theirs, step in zip(resumed.steps, ours.steps, strict=True):
        assert relative_error(step.gradient, theirs.gradient) < 2e-6
    _, selected = interrupted(GMTSGRPOTrainer, 3, **options)
    for step in selected.steps:
        expected = eq2(model_with(step.weights, policy_config()), step.micro_batches, Settings())
        assert relative_error(step.gradient, expected.gradient) < LIMIT


def test_a_grpo_checkpoint_is_continued_with_gmts(model_dir, tmp_path):
    options = {"rows": 4, "save_strategy": "steps", "save_steps": 2, "sampled": True}
    theirs = harness.run(GRPOTrainer, model=load_policy(model_dir), output_dir=str(tmp_path), max_steps=2, **options)
    ours = harness.run(
        model=load_policy(model_dir), output_dir=str(tmp_path / "on"), max_steps=4, train=False, **options
    )
    ours.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert ours.trainer.state.global_step == 4 and len(ours.steps) == 2
    start = torch.cat([value.flatten().double() for value in ours.steps[0].weights.values()])
    saved = theirs.trainer.model.state_dict()
    assert torch.equal(start, torch.cat([value.flatten().double() for value in saved.values()]))
    assert all("gmts/kept_tokens" in entry for entry in ours.logs[-2:])


# What is saved


def test_a_saved_model_is_loaded_anywhere(run, tmp_path):
    found = run(rows=4, max_steps=2)
    found.trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    for name, value in found.trainer.model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
    assert not [name for name in loaded.config.to_dict() if "gmts" in name.lower()]
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, found.trainer.model(tokens).logits)
    again = run(GRPOTrainer, model=loaded, rows=4)
    assert again.gradient.norm() > 0
