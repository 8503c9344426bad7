"""The gradient of an optimizer step does not depend on how the step is cut, padded or ordered."""

import functools

import pytest
import torch

from harness import (
    EOS,
    PROMPTS,
    ROWS,
    FixedRollouts,
    half_flat_reward,
    load_policy,
    off_policy,
    policy_config,
    relative_error,
)
from harness import run as run_harness
from oracle import Settings, eq2, model_with
from trl_gmts import GMTSGRPOTrainer


LIMIT = 2e-6  # float64 model, TRL's float32 loss: what is left is the order of summation
LOSSES = {
    "dapo": {"epsilon_high": 0.28},
    "dr_grpo": {"epsilon_high": 0.28},
    "cispo": {"epsilon_high": 1.3},
    "vespo": {},
    "grpo": {"epsilon_high": 0.28},
    "sapo": {},
}
STEP = {"inject": off_policy(old=0.3, ref=0.3), "beta": 0.1}


def permuted(inject):
    """Turn the generated batch upside down and inside out, after everything else was added to it."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(5))
    assert not torch.equal(order, torch.arange(ROWS))

    def inject_and_permute(trainer, batch):
        batch = inject(trainer, batch)
        return {
            name: value[order] if torch.is_tensor(value) and value.dim() > 0 else value
            for name, value in batch.items()
        }

    return inject_and_permute


CUTS = {
    **{f"micro-batches of {rows}": {"rows": rows} for rows in (8, 4, 2, 1)},
    "padded to a multiple of 32": {"pad_to_multiple_of": 32},
    "rows permuted": {"inject": permuted(STEP["inject"])},
    "permuted, padded, cut": {"inject": permuted(STEP["inject"]), "rows": 2, "pad_to_multiple_of": 32},
}


@pytest.fixture(scope="module")
def uncut(model_dir, run_dir):
    """The gradient of the step in one micro-batch of 16 rows, as TRL made it: computed once for each loss."""

    @functools.cache
    def gradient(loss):
        found = run_harness(model=load_policy(model_dir), output_dir=run_dir, loss_type=loss, **LOSSES[loss], **STEP)
        return found.gradient

    return gradient


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_is_the_same_however_the_step_is_cut(run, uncut, loss, cut):
    found = run(loss_type=loss, **LOSSES[loss], **(STEP | CUTS[cut]))
    assert len(found.steps) == 1
    assert relative_error(found.gradient, uncut(loss)) < LIMIT


VARIANTS = {
    "entropy": {"token_selection": "entropy"},
    "random": {"token_selection": "random"},
    "group scope": {"selection_scope": "group"},
    "sequence scope": {"selection_scope": "sequence"},
    "scored base": {"selection_base": "scored", "reward": half_flat_reward},
    "bottom": {"select_bottom": True, "selection_ratio": 0.5},
    "unnormalised": {"normalize_selected": False},
    "tool tokens, temperature": {"tool_tokens": True, "temperature": 0.6},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_do_not_depend_on_the_cut(run, variant):
    arguments = STEP | VARIANTS[variant]
    whole = run(**arguments)
    for cut in ({"rows": 4}, {"rows": 1}, {"rows": 2, "inject": permuted(STEP["inject"]), "pad_to_multiple_of": 32}):
        assert relative_error(run(**(arguments | cut)).gradient, whole.gradient) < LIMIT, cut


def test_the_cuts_are_real(run):
    """Micro-batches have the rows, the padding and the order that the cases claim."""
    for name, rows in (("micro-batches of 2", 2), ("micro-batches of 1", 1)):
        batches = run(**(STEP | CUTS[name])).steps[0].micro_batches
        assert [len(batch["completion_ids"]) for batch in batches] == [rows] * (ROWS // rows)
    plain = run(**STEP).steps[0].micro_batches[0]
    padded = run(**(STEP | CUTS["padded to a multiple of 32"])).steps[0].micro_batches[0]
    assert plain["completion_ids"].size(1) < 32 == padded["completion_ids"].size(1) == padded["prompt_ids"].size(1)
    shuffled = run(**(STEP | CUTS["rows permuted"])).steps[0].micro_batches[0]
    assert not torch.equal(plain["completion_ids"], shuffled["completion_ids"])


def test_a_threshold_for_each_micro_batch_would_fail_here(run, model_dir):
    """The steps are such that selecting within micro-batches, as others do, gives another gradient."""
    step = run(GMTSGRPOTrainer, rows=4, inject=off_policy(old=0.3)).steps[0]
    model = model_with(step.weights, policy_config())
    of_step = eq2(model, step.micro_batches, Settings())
    of_pieces = [eq2(model, [batch], Settings()) for batch in step.micro_batches]
    pieces = sum(p.gradient * p.denominator for p in of_pieces) / sum(p.denominator for p in of_pieces)
    assert relative_error(step.gradient, of_step.gradient) < 2e-5
    assert relative_error(step.gradient, pieces) > 1e-2


@pytest.mark.parametrize("rows", [16, 8, 4, 2, 1])
def test_a_micro_batch_without_kept_tokens_trains_on_nothing(run, rows):
    """
    Only the answers to the shortest prompt are kept, first tokens included. Whatever the other micro-batches run instead
    of nothing (the shortest row at hand, say), none of it is trained on, not even once more.
    """

    def reward(prompts, completion_ids, **kwargs):
        return [ids[0] ** 0.5 * (prompt == PROMPTS[0]) for prompt, ids in zip(prompts, completion_ids, strict=True)]

    answers = FixedRollouts(answers=lambda prompt, index, round: [3 + 7 * index, EOS])
    step = run(rollouts=answers, reward=reward, rows=rows, selection_ratio=0.25).steps[0]
    expected = eq2(model_with(step.weights, policy_config()), step.micro_batches, Settings(ratio=0.25))
    assert [bool(kept.all()) for kept in expected.kept] == [len(a.prompt) == 1 for a in expected.answers]
    assert relative_error(step.gradient, expected.gradient) < 2e-5
