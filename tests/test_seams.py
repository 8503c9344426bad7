"""If TRL is not what this package leans on, that is an error that says so, and never a run of plain GRPO."""

from importlib.metadata import version

import pytest
import torch
import trl
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from trl import GRPOTrainer

from harness import (
    FixedRollouts,
    config_arguments,
    dataset,
    flat_parameters,
    load_policy,
    relative_error,
    run,
    spread_reward,
    tokenizer,
)
from trl_gmts import GMTSGRPOConfig, GMTSGRPOTrainer
from trl_gmts.seams import SUPPORTED_TRL


def train(model_dir, run_dir, **config):
    trainer = GMTSGRPOTrainer(
        model=load_policy(model_dir),
        reward_funcs=spread_reward,
        args=GMTSGRPOConfig(output_dir=run_dir, **config_arguments(rows=4, max_steps=2, **config)),
        train_dataset=dataset(),
        processing_class=tokenizer(),
        rollout_func=FixedRollouts(),
    )
    trainer.train()
    return trainer


def assert_names_the_versions(error):
    message = str(error.value)
    assert version("trl") in message, message
    assert SUPPORTED_TRL in message, message


def test_the_installed_version_is_a_supported_one():
    assert Version(trl.__version__) in SpecifierSet(SUPPORTED_TRL)
    assert "1.16.0" in SpecifierSet(SUPPORTED_TRL)
    assert "1.11.0" not in SpecifierSet(SUPPORTED_TRL)


METHODS = ["_get_per_token_logps_and_entropies", "_generate_and_score_completions", "compute_loss"]


@pytest.mark.parametrize("name", METHODS)
def test_a_missing_method_is_an_error(model_dir, run_dir, monkeypatch, name):
    monkeypatch.delattr(GRPOTrainer, name)
    with pytest.raises(RuntimeError) as error:
        train(model_dir, run_dir)
    assert_names_the_versions(error)
    assert name in str(error.value)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_with_other_parameters_is_an_error(model_dir, run_dir, monkeypatch, name):
    monkeypatch.setattr(GRPOTrainer, name, lambda self, **kwargs: None)
    with pytest.raises(RuntimeError) as error:
        train(model_dir, run_dir)
    assert_names_the_versions(error)
    assert name in str(error.value)


@pytest.mark.parametrize("name", ["_buffered_inputs", "_step", "_metrics"])
def test_a_missing_attribute_is_an_error(model_dir, run_dir, monkeypatch, name):
    """As after a rename in `GRPOTrainer.__init__`."""
    original = GRPOTrainer.__init__

    def renamed(self, model, reward_funcs=None, args=None, *rest, **kwargs):
        original(self, model, reward_funcs, args, *rest, **kwargs)
        self.__dict__["_renamed"] = self.__dict__.pop(name)

    monkeypatch.setattr(GRPOTrainer, "__init__", renamed)
    with pytest.raises(RuntimeError) as error:
        train(model_dir, run_dir)
    assert_names_the_versions(error)
    assert name in str(error.value)


def changed_forward(change):
    original = GRPOTrainer._get_per_token_logps_and_entropies

    def changed(self, model, *args, **kwargs):
        return change(original(self, model, *args, **kwargs))

    return changed


RETURNS = {
    "two values": lambda result: result[:2],
    "four values": lambda result: (*result, None),
    "a dict": lambda result: dict(zip(("logps", "entropies", "aux_loss"), result, strict=True)),
    "no entropies": lambda result: (result[0], None, result[2]),
    "other order": lambda result: (result[2], result[0], result[1]),
    "one token fewer": lambda result: (result[0][:, 1:], result[1][:, 1:], result[2]),
    "one value a row": lambda result: (result[0].sum(1), result[1].sum(1), result[2]),
}


@pytest.mark.parametrize("change", RETURNS)
@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_another_return_value_is_an_error(model_dir, run_dir, monkeypatch, change, ratio):
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", changed_forward(RETURNS[change]))
    with pytest.raises(RuntimeError) as error:
        train(model_dir, run_dir, selection_ratio=ratio)
    assert_names_the_versions(error)


def test_a_loss_that_goes_another_way_is_an_error(model_dir, run_dir, monkeypatch):
    """TRL's loss runs the model itself, as its Liger loss once did: the coefficients cannot be had."""

    def own_way(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        return model(input_ids=ids).logits.mean()

    monkeypatch.setattr(GRPOTrainer, "compute_loss", own_way)
    with pytest.raises(RuntimeError) as error:
        train(model_dir, run_dir)
    assert_names_the_versions(error)


def test_a_loss_that_ignores_the_log_probs_is_an_error(model_dir, run_dir, monkeypatch):
    original = GRPOTrainer.compute_loss

    def detached(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return original(self, model, inputs).detach()

    monkeypatch.setattr(GRPOTrainer, "compute_loss", detached)
    with pytest.raises(RuntimeError) as error:
        train(model_dir, run_dir)
    assert_names_the_versions(error)


def rebuffered(change):
    original = GRPOTrainer._prepare_inputs

    def changed(self, generation_batch):
        batch = original(self, generation_batch)
        self._buffered_inputs = change(self._buffered_inputs)
        return batch

    return changed


@pytest.mark.parametrize(
    "change",
    [lambda buffer: None, lambda buffer: buffer[:1], lambda buffer: iter(buffer)],
    ids=["none", "one", "iterator"],
)
def test_another_buffer_is_an_error(model_dir, run_dir, monkeypatch, change):
    monkeypatch.setattr(GRPOTrainer, "_prepare_inputs", rebuffered(change))
    with pytest.raises(RuntimeError) as error:
        train(model_dir, run_dir)
    assert_names_the_versions(error)


def test_batches_that_are_not_the_buffered_ones_are_an_error(model_dir, run_dir, monkeypatch):
    """Ranking one batch and training on another would go unnoticed."""
    original = GRPOTrainer._prepare_inputs
    monkeypatch.setattr(GRPOTrainer, "_prepare_inputs", lambda self, batch: dict(original(self, batch)))
    with pytest.raises(RuntimeError):
        train(model_dir, run_dir)


def test_a_renamed_mask_is_an_error(model_dir, run_dir, monkeypatch):
    original = GRPOTrainer._generate_and_score_completions

    def renamed(self, inputs):
        batch = original(self, inputs)
        batch["answer_mask"] = batch.pop("completion_mask")
        return batch

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", renamed)
    with pytest.raises((RuntimeError, KeyError)):
        train(model_dir, run_dir)


def test_the_loss_of_trl_is_asked_once_for_each_micro_batch(model_dir, run_dir, monkeypatch):
    """And every micro-step returns a loss of its own making, with a gradient; none slips through to GRPOTrainer."""
    finished = []
    original = GRPOTrainer._compute_loss

    def counted(self, model, inputs):
        loss = original(self, model, inputs)
        finished.append(len(inputs["completion_ids"]))
        return loss

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", counted)
    trainer = train(model_dir, run_dir)
    assert finished == [4] * 8
    assert len([entry for entry in trainer.state.log_history if "gmts/kept_tokens" in entry]) == 2


def test_none_asks_nothing_of_the_seams(model_dir, run_dir, monkeypatch):
    """What the error recommends meanwhile works: plain GRPO, when it is asked for by name."""
    original = GRPOTrainer._get_per_token_logps_and_entropies
    calls = []

    def seen(self, *args, **kwargs):
        calls.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(
        GRPOTrainer, "_get_per_token_logps_and_entropies", lambda self, model, *a, **k: seen(self, model, *a, **k)
    )
    trainer = train(model_dir, run_dir, token_selection="none")
    assert calls and not any(name.startswith("gmts/") for entry in trainer.state.log_history for name in entry)


def test_a_term_that_a_subclass_adds_to_the_loss_is_never_lost(model_dir, run_dir):
    """Its gradient bypasses the log-probs: refused inside TRL's loss, trained on where it is added around ours."""

    def penalty(model):
        return 10 * sum(weight.square().sum() for weight in model.parameters())

    class Inside(GMTSGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) + penalty(model)

    class Around(GMTSGRPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return super().compute_loss(model, inputs, *args, **kwargs) + penalty(model)

    with pytest.raises(RuntimeError, match="add it in compute_loss instead"):
        run(Inside, model=load_policy(model_dir), output_dir=run_dir)
    plain = run(GMTSGRPOTrainer, model=load_policy(model_dir), output_dir=run_dir)
    penalized = run(Around, model=load_policy(model_dir), output_dir=run_dir)
    expected = plain.gradient + 20 * flat_parameters(load_policy(model_dir))
    assert relative_error(penalized.gradient, expected) < 1e-6


def weighted(inputs):
    """Advantages as a subclass may change them."""
    inputs["advantages"] = inputs["advantages"] * inputs["advantages"].abs()


class WeightsInLoss:
    def _compute_loss(self, model, inputs):
        weighted(inputs)
        return super()._compute_loss(model, inputs)


class WeightsMicroBatch:
    def compute_loss(self, model, inputs, *args, **kwargs):
        weighted(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


class WritesIntoMicroBatch:
    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs["advantages"].mul_(0.5)
        return super().compute_loss(model, inputs, *args, **kwargs)


class WritesIntoLossInputs:
    def _compute_loss(self, model, inputs):
        inputs["advantages"].mul_(0.5)
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize("rows", [16, 4])
def test_what_a_subclass_sets_inside_the_loss_is_set_once(model_dir, run_dir, rows):
    ours, plain = (
        run(
            type("Subclass", (WeightsInLoss, trainer_class), {}),
            model=load_policy(model_dir),
            output_dir=run_dir,
            rows=rows,
            **({"selection_ratio": 1.0} if trainer_class is GMTSGRPOTrainer else {}),
        )
        for trainer_class in (GMTSGRPOTrainer, GRPOTrainer)
    )
    assert relative_error(ours.gradient, plain.gradient) < 1e-5


@pytest.mark.parametrize("change", [WeightsMicroBatch, WritesIntoMicroBatch, WritesIntoLossInputs])
def test_a_batch_that_changes_after_its_tokens_were_selected_is_an_error(model_dir, run_dir, change):
    with pytest.raises(RuntimeError, match="changed after its tokens had been selected"):
        run(type("Subclass", (change, GMTSGRPOTrainer), {}), model=load_policy(model_dir), output_dir=run_dir, rows=4)


@pytest.mark.parametrize("number", [0, 2])
def test_a_batch_in_place_of_the_buffered_one_is_an_error(model_dir, run_dir, number):
    class Copies(GMTSGRPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return super().compute_loss(model, dict(inputs) if self._step == number else inputs, *args, **kwargs)

    with pytest.raises(RuntimeError, match="not the one GRPOTrainer buffered"):
        run(Copies, model=load_policy(model_dir), output_dir=run_dir, rows=4)


@pytest.mark.parametrize("when", ["before", "after"])
def test_log_probs_that_a_subclass_asks_for_inside_the_loss_are_never_taken_for_the_policys(model_dir, run_dir, when):
    teacher = load_policy(model_dir)

    class Teacher(GMTSGRPOTrainer):
        def _compute_loss(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            arguments = (ids, mask, inputs["completion_ids"].size(1))
            if when == "before":
                with torch.no_grad():
                    self._get_per_token_logps_and_entropies(teacher, *arguments, compute_entropy=True)
                return super()._compute_loss(model, inputs)
            loss = super()._compute_loss(model, inputs)
            return loss + self._get_per_token_logps_and_entropies(model, *arguments)[0].mean()

    with pytest.raises(RuntimeError, match="asked for log-probs more than once"):
        run(Teacher, model=load_policy(model_dir), output_dir=run_dir)
