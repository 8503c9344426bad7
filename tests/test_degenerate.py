"""Batches with little or nothing to learn from: finite losses, the gradient that is right, no exception."""

import math

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

import harness
from harness import (
    EOS,
    NUM_GENERATIONS,
    PROMPTS,
    FixedRollouts,
    flat_reward,
    load_policy,
    off_policy,
    relative_error,
    spread_reward,
)
from oracle import LIMIT, Settings, eq2, model_with
from trl_gmts import GMTSGRPOTrainer


NAN, INF = float("nan"), float("inf")
SELECTIONS = [
    {},
    {"token_selection": "entropy"},
    {"token_selection": "random"},
    {"selection_scope": "group"},
    {"selection_scope": "sequence"},
    {"selection_base": "scored"},
    {"select_bottom": True},
    {"select_bottom": True, "selection_base": "scored", "selection_scope": "sequence"},
    {"normalize_selected": False},
    {"selection_ratio": 1.0},
]


def oracle_of(step, **settings):
    model = model_with(step.weights, harness.policy_config())
    return eq2(model, step.micro_batches, Settings(**settings))


def assert_finite(found):
    assert found.losses and all(torch.isfinite(loss) for loss in found.losses)
    assert all(math.isfinite(entry["loss"]) for entry in found.logs)
    assert all(torch.isfinite(step.gradient).all() for step in found.steps)
    for parameter in found.trainer.model.parameters():
        assert torch.isfinite(parameter).all()


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_all_advantages_zero(run, selection):
    found = run(reward=flat_reward, rows=4, max_steps=2, **selection)
    assert len(found.steps) == 2
    assert all(not batch["advantages"].any() for step in found.steps for batch in step.micro_batches)
    assert_finite(found)
    assert all(not step.gradient.any() for step in found.steps)


def test_all_advantages_zero_with_kl_trains_on_the_kl(run):
    found = run(reward=flat_reward, beta=0.3, use_bias_correction_kl=False, inject=off_policy(ref=0.5))
    expected = oracle_of(found.steps[0], beta=0.3)
    assert relative_error(found.gradient, expected.gradient) < LIMIT


def never_ending(prompt, index, round):
    return [(3 + (5 * index + 7 * t + len(prompt)) % 30) for t in range(4 + index)]


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_everything_truncated_and_masked(run, selection):
    found = run(
        rollouts=FixedRollouts(answers=never_ending),
        mask_truncated_completions=True,
        rows=4,
        max_steps=2,
        **selection,
    )
    assert len(found.steps) == 2
    assert all(not batch["completion_mask"].any() for step in found.steps for batch in step.micro_batches)
    assert_finite(found)
    assert all(not step.gradient.any() for step in found.steps)


@pytest.mark.parametrize("selection", [{}, {"selection_scope": "group"}, {"selection_scope": "sequence"}], ids=str)
@pytest.mark.parametrize("rows", [16, 2, 1])
def test_some_rows_and_micro_batches_masked(run, selection, rows):
    """Whole micro-batches without a token among others with tokens."""

    def answers(prompt, index, round):
        ids = never_ending(prompt, index, round)
        return [*ids, EOS] if prompt in PROMPTS[2:] and index != 1 else ids

    found = run(
        rollouts=FixedRollouts(answers=answers),
        mask_truncated_completions=True,
        rows=rows,
        selection_ratio=0.3,
        **selection,
    )
    micro_batches = found.steps[0].micro_batches
    empty = [batch for batch in micro_batches if not batch["completion_mask"].any()]
    assert rows == 16 or 0 < len(empty) < len(micro_batches)
    assert_finite(found)
    expected = oracle_of(found.steps[0], ratio=0.3, scope=selection.get("selection_scope", "batch"))
    assert relative_error(found.gradient, expected.gradient) < LIMIT


@pytest.mark.parametrize("rows", [16, 1])
@pytest.mark.parametrize("scope", ["batch", "group", "sequence"])
def test_answers_of_one_token(run, rows, scope):
    found = run(
        rollouts=FixedRollouts(answers=lambda prompt, index, round: [EOS if index == 0 else 3 + index + len(prompt)]),
        reward=lambda completion_ids, **kwargs: [float(ids[0] % 5) ** 1.5 for ids in completion_ids],
        rows=rows,
        selection_scope=scope,
    )
    assert all(batch["completion_ids"].size(1) == 1 for batch in found.steps[0].micro_batches)
    assert_finite(found)
    expected = oracle_of(found.steps[0], scope=scope)
    assert expected.gap > 1e-4
    assert relative_error(found.gradient, expected.gradient) < LIMIT


def test_one_token_in_the_whole_step(run):
    """All answers but one are masked, and that one has a single token: k is 1, and S_rho too."""

    def answers(prompt, index, round):
        return [EOS] if (prompt, index) == (PROMPTS[0], 0) else never_ending(prompt, index, round)

    found = run(rollouts=FixedRollouts(answers=answers), mask_truncated_completions=True, rows=4)
    expected = oracle_of(found.steps[0])
    assert expected.tokens == expected.denominator == 1
    assert_finite(found)
    assert relative_error(found.gradient, expected.gradient) < LIMIT
    assert found.logs[0]["gmts/kept_tokens"] == 1


def twins(prompt, index, round):
    """Each answer is given twice by its group, so that every score occurs at least twice."""
    return FixedRollouts().answer(prompt, index // 2)


# Groups of eight: with two pairs in a group, one's advantage would be minus the other's, but for its last bit.
TWINS = {"num_generations": 8, "prompts": PROMPTS[1:3]}
RATIOS = [0.05, 0.1, 0.17, 0.33]


@pytest.mark.parametrize("rows", [16, 4, 1])
@pytest.mark.parametrize("ratio", RATIOS)
def test_identical_answers_tie_and_ties_are_all_kept(run, rows, ratio):
    """At whatever ratio the cut falls between two twins, both are kept or neither is."""
    found = run(rollouts=FixedRollouts(answers=twins), rows=rows, selection_ratio=ratio, **TWINS)
    expected = oracle_of(found.steps[0], ratio=ratio)
    assert expected.gap > 1e-4
    kept = sum(int(mask.sum()) for mask in expected.kept)
    assert kept % 2 == 0
    assert found.logs[0]["gmts/kept_tokens"] == kept
    assert relative_error(found.gradient, expected.gradient) < LIMIT


def test_some_cuts_fall_between_twins(run):
    """The ratios above do cut through ties: more is kept than was asked for."""
    excess = []
    for ratio in RATIOS:
        step = run(rollouts=FixedRollouts(answers=twins), selection_ratio=ratio, **TWINS).steps[0]
        expected = oracle_of(step, ratio=ratio)
        excess.append(sum(int(mask.sum()) for mask in expected.kept) - expected.budget)
    assert sum(number >= 1 for number in excess) >= 2, excess


@pytest.mark.parametrize("rows", [16, 4, 1])
@pytest.mark.parametrize("score", ["gmts", "entropy"])
def test_all_answers_identical(run, rows, score):
    """One prompt, one answer, many times. The rewards still differ, so that there is something to learn."""
    calls = []

    def reward(completion_ids, **kwargs):
        calls.append(1)
        return [float(i % NUM_GENERATIONS) for i in range(len(completion_ids))]

    found = run(
        rollouts=FixedRollouts(answers=lambda prompt, index, round: [5, 9, 17, 30, 8, EOS]),
        prompts=["abc"],
        reward=reward,
        rows=rows,
        token_selection=score,
    )
    expected = oracle_of(found.steps[0], score=score)
    assert expected.gap > 1e-4
    kept = sum(int(mask.sum()) for mask in expected.kept)
    assert kept % 8 == 0 and kept >= expected.budget
    assert found.logs[0]["gmts/kept_tokens"] == kept
    # The advantages of a group add up to zero and with them, where all are kept, the gradient.
    scale = expected.gradient.norm().clamp(min=1.0)
    assert (found.gradient - expected.gradient).norm() / scale < LIMIT


def spoiled(name: str, values: list[float], base=None, first: int = 0):
    """Injects `values`, one into every third row that has a token, at a position that changes from row to row."""
    base = off_policy(old=0.3, ref=0.3) if base is None else base

    def inject(trainer, batch):
        batch = base(trainer, batch)
        tensor = batch[name].clone()
        lengths = batch["completion_mask"].sum(1)
        for number, value in enumerate(values):
            row = (first + 3 * number) % len(tensor)
            tensor[row, number % int(lengths[row])] = value
        batch[name] = tensor
        return batch

    return inject


@pytest.mark.parametrize(("rows", "ratio"), [(4, 0.2), (16, 1.0)])
@pytest.mark.parametrize("name", ["old_per_token_logps", "ref_per_token_logps"])
@pytest.mark.parametrize("values", [[NAN] * 5, [-INF] * 5, [INF] * 5, [NAN, INF, -INF, NAN, INF]], ids=str)
def test_nonfinite_old_and_reference_logps_are_never_selected(run, rows, ratio, name, values):
    """They count among the tokens but are not kept; all other tokens train as they would."""
    found = run(inject=spoiled(name, values), beta=0.3, use_bias_correction_kl=False, rows=rows, selection_ratio=ratio)
    step = found.steps[0]
    expected = oracle_of(step, beta=0.3, ratio=ratio)
    assert int((~expected.of_trainable(expected.delta).isfinite()).sum()) == len(values)
    assert expected.gap > 1e-4
    assert_finite(found)
    assert found.logs[0]["gmts/nonfinite_scores"] == len(values)
    assert relative_error(found.gradient, expected.gradient) < LIMIT


def test_unspoiled_batches_have_no_nonfinite_score(run):
    found = run(inject=off_policy(old=0.3, ref=0.3), beta=0.3)
    assert found.logs[0]["gmts/nonfinite_scores"] == 0


@pytest.mark.parametrize("scope", ["group", "sequence"])
@pytest.mark.parametrize("base", ["all", "scored"])
def test_a_segment_with_nothing_but_nonfinite_scores(run, scope, base):
    """All tokens of one prompt's answers are unusable: its budget counts in S_rho only if all tokens are counted."""

    def inject(trainer, batch):
        batch = off_policy(old=0.3)(trainer, batch)
        batch["old_per_token_logps"] = batch["old_per_token_logps"].clone()
        batch["old_per_token_logps"][:NUM_GENERATIONS] = NAN
        return batch

    found = run(inject=inject, selection_scope=scope, selection_base=base, rows=4)
    expected = oracle_of(found.steps[0], scope=scope, base=base)
    assert_finite(found)
    assert relative_error(found.gradient, expected.gradient) < LIMIT


def test_every_score_nonfinite(run):
    def inject(trainer, batch):
        batch = off_policy(old=0.3)(trainer, batch)
        batch["old_per_token_logps"] = torch.full_like(batch["old_per_token_logps"], NAN)
        return batch

    found = run(inject=inject, rows=4)
    assert_finite(found)
    assert not found.gradient.any()
    tokens = sum(int(batch["completion_mask"].sum()) for batch in found.steps[0].micro_batches)
    assert found.logs[0]["gmts/nonfinite_scores"] == tokens
    assert found.logs[0]["gmts/kept_tokens"] == 0


@pytest.mark.parametrize("rows", [16, 4])
def test_nonfinite_advantages_are_never_selected(run, rows):
    def inject(trainer, batch):
        advantages = batch["advantages"].clone()
        advantages[2], advantages[9] = NAN, INF
        return batch | {"advantages": advantages}

    found = run(inject=inject, rows=rows)
    expected = oracle_of(found.steps[0])
    assert_finite(found)
    assert relative_error(found.gradient, expected.gradient) < LIMIT
    unusable = int((~expected.of_trainable(expected.delta).isfinite()).sum())
    assert unusable > 0 and found.logs[0]["gmts/nonfinite_scores"] == unusable


def test_nonfinite_sampling_logps_are_left_to_trl(run):
    """TRL reads a log-prob that vLLM could not score as no evidence; with one threshold for all it decides nothing."""

    def logprobs(ids):
        return [None if i % 3 == 1 else -1.0 - 0.1 * i for i in range(len(ids))]

    arguments = {"off_policy_mask_threshold": 0.5, "inject": off_policy(old=0.3)}
    found = run(rollouts=FixedRollouts(logprobs=logprobs), selection_ratio=1.0, **arguments)
    assert any(batch["sampling_per_token_logps"].isnan().any() for batch in found.steps[0].micro_batches)
    assert_finite(found)
    theirs = run(GRPOTrainer, rollouts=FixedRollouts(logprobs=logprobs), **arguments)
    assert relative_error(found.gradient, theirs.gradient) < LIMIT
    unmasked = run(GRPOTrainer, rollouts=FixedRollouts(logprobs=logprobs), inject=off_policy(old=0.3))
    assert relative_error(theirs.gradient, unmasked.gradient) > 1e-2, "the mask masks nothing"
    assert_finite(run(rollouts=FixedRollouts(logprobs=logprobs), **arguments))


def test_what_the_engine_says_of_an_unusable_token_decides_nothing(run):
    """Not even whether its answer is off-policy as a whole."""

    def with_old(second: float | None):
        def inject(trainer, batch):
            batch = off_policy(old=0.3)(trainer, batch)
            if second is not None:
                batch["old_per_token_logps"][:, 1] = second
            return batch

        return inject

    def engine(second: float | None):
        return FixedRollouts(logprobs=lambda ids: [second if i == 1 else -1.0 - 0.1 * i for i in range(len(ids))])

    options = {"off_policy_mask_threshold": 0.5, "selection_ratio": 1.0}
    unknown, far = (run(rollouts=engine(logp), inject=with_old(NAN), **options) for logp in (None, -60.0))
    assert unknown.logs[0]["gmts/nonfinite_scores"] > 0
    assert relative_error(far.gradient, unknown.gradient) < 1e-6
    usable_unknown, usable_far = (
        run(rollouts=engine(logp), inject=with_old(None), **options) for logp in (None, -60.0)
    )
    assert relative_error(usable_far.gradient, usable_unknown.gradient) > 1e-2, "the engine decides nothing anyway"


def overflowing(model):
    """A model that breaks down at an `x`: its last hidden states are not numbers there and, as attention goes, after."""
    letter = harness.tokenizer().convert_tokens_to_ids("x")

    def spoil(module, args, kwargs, output):
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if module.training:
            broken = (ids == letter).long().cumsum(1) > 0
            output.last_hidden_state = output.last_hidden_state.masked_fill(broken[..., None], NAN)
        return output

    model.base_model.register_forward_hook(spoil, with_kwargs=True)
    return model


@pytest.mark.parametrize("rows", [16, 4])
@pytest.mark.parametrize("ratio", [0.2, 0.9])
def test_nonfinite_model_logps_are_never_selected(run, model_dir, rows, ratio):
    """
    Where the policy gives no number nothing is kept; the other tokens, of the same answers too, train as usual. The `x`
    itself, on which the policy breaks down, still has a log-prob: it is clipped, so as not to be kept either.
    """
    letter = harness.tokenizer().convert_tokens_to_ids("x")

    def answers(prompt, index, round):
        ids = FixedRollouts().answer(prompt, index)
        return [*ids[:3], letter, *ids[3:]] if index == 1 and len(ids) > 1 else ids

    def clip_letter(trainer, batch):
        old = harness.policy_logps(trainer, batch)
        clipped = old - batch["advantages"].sign()[:, None]
        return batch | {"old_per_token_logps": torch.where(batch["completion_ids"] == letter, clipped, old)}

    found = run(
        model=overflowing(load_policy(model_dir)),
        prompts=[prompt.replace("x", "w") for prompt in PROMPTS],
        rollouts=FixedRollouts(answers=answers),
        inject=clip_letter,
        rows=rows,
        selection_ratio=ratio,
    )
    step = found.steps[0]
    broken = overflowing(model_with(step.weights, harness.policy_config())).train()
    with_nan = eq2(broken, step.micro_batches, Settings(ratio=ratio))
    spoiled = [a for a, delta in zip(with_nan.answers, with_nan.delta, strict=True) if not delta.isfinite().all()]
    unusable = int((~with_nan.of_trainable(with_nan.delta).isfinite()).sum())
    assert len(spoiled) >= 2 and unusable >= 2
    assert ratio < 0.9 or any(
        kept.any() for a, kept in zip(with_nan.answers, with_nan.kept, strict=True) if a in spoiled
    )
    assert_finite(found)
    assert found.logs[0]["gmts/nonfinite_scores"] == unusable
    assert all(math.isfinite(value) for name, value in found.logs[0].items() if name.startswith("gmts/"))
    # A broken answer breaks the oracle's graph too, so the gradient of what is kept comes from a sound policy.
    sound_batches = [
        {k: v.nan_to_num() if k.startswith("old") else v for k, v in b.items()} for b in step.micro_batches
    ]
    sound = model_with(step.weights, harness.policy_config())
    expected = eq2(sound, sound_batches, Settings(ratio=ratio), kept=with_nan.kept)
    scale = expected.denominator / with_nan.denominator
    assert relative_error(found.gradient, expected.gradient * scale) < LIMIT


def test_masks_of_injected_tokens_may_empty_an_answer(run):
    """An answer whose every token came from a tool has nothing to train on, and nothing is kept of it."""

    def inject(trainer, batch):
        mask = torch.ones_like(batch["completion_mask"])
        mask[:5] = 0
        return batch | {"tool_mask": mask, "num_items_in_batch": (batch["completion_mask"] * mask).sum()}

    for rows in (16, 1):
        found = run(inject=inject, rows=rows, selection_scope="sequence")
        assert_finite(found)
        expected = oracle_of(found.steps[0], scope="sequence")
        assert relative_error(found.gradient, expected.gradient) < LIMIT
        assert found.logs[0]["gmts/answers_with_kept"] <= 11 / 16


def test_a_long_run_of_degenerate_steps_keeps_going(run):
    """Steps with and without anything to learn follow each other."""
    steps = []

    def reward(completion_ids, **kwargs):
        steps.append(1)
        return flat_reward(completion_ids) if len(steps) % 2 else spread_reward(completion_ids)

    found = run(GMTSGRPOTrainer, reward=reward, rows=8, max_steps=4)
    assert_finite(found)
    assert [bool(step.gradient.any()) for step in found.steps] == [False, True, False, True]


@pytest.mark.parametrize("micro_steps_before", [1, 2, 3])
@pytest.mark.parametrize("steps_per_generation", [4, 8])
def test_an_interrupted_optimizer_step_is_begun_anew(model_dir, run_dir, micro_steps_before, steps_per_generation):
    """Ctrl-C between micro-batches, then `train()` again: whole steps of fresh answers, as after a whole run."""

    class Interrupt(TrainerCallback):
        seen = 0

        def on_substep_end(self, *args, **kwargs):
            self.seen += 1
            if self.seen == micro_steps_before + 3 * (steps_per_generation == 8):  # in the second step of a generation
                raise KeyboardInterrupt

    found = harness.run(
        model=harness.load_policy(model_dir),
        output_dir=run_dir,
        rows=4,
        max_steps=2,
        steps_per_generation=steps_per_generation,
        train=False,
    )
    found.trainer.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        found.trainer.train()
    found.trainer.model.zero_grad()
    found.trainer.pending = []
    found.steps.clear()
    generated = len(found.generated)
    found.trainer.train()
    assert len(found.generated) > generated, "fresh answers"
    assert len(found.steps) == 2
    assert [len(step.micro_batches) for step in found.steps] == [4, 4]
    assert all(step.gradient.norm() > 0 for step in found.steps)
