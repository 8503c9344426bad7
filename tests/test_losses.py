"""Every loss of TRL: tokens are ranked by TRL's own derivative, and the gradient reaches the kept tokens only.

What is expected is read off the gradient of a plain GRPOTrainer whose policy is a lookup table (`lookup.py`): each
token has a row of parameters of its own, so its coefficient can be read there. The GMTS gradient has to be that
gradient, in the rows of the tokens with the largest |entropy x coefficient|, times N / kept, and exactly zero elsewhere.
"""

import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig
from trl import GRPOTrainer

from harness import (
    EOS,
    PAD,
    off_policy,
    policy_config,
    relative_error,
    spread_reward,
    tokenizer,
)
from listening import listening, selected_coefficients, weighted_gradient
from lookup import DistinctRollouts, group_of, load_lookup_policy, read_tokens, save_lookup_policy
from oracle import LIMIT, ceil_of, model_with
from trl_gmts import GMTSGRPOTrainer


LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
CLIPPED_LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
RATIO = 0.2


@pytest.fixture(scope="module")
def lookup_dir(tmp_path_factory):
    return save_lookup_policy(tmp_path_factory.mktemp("lookup"))


@pytest.fixture
def lookup_run(run, lookup_dir):
    """Two micro-batches of eight answers. The weights stay where they are, so that two trainers can be compared."""

    def take(trainer_class, tool_tokens=False, **arguments):
        settings = {
            "model": load_lookup_policy(lookup_dir),
            "rollouts": DistinctRollouts(tool_tokens),
            "rows": 8,
            "learning_rate": 0.0,
        }
        return run(trainer_class, **(settings | arguments))

    return take


@pytest.fixture
def tokens_of(lookup_dir):
    """The tokens of a run's last optimizer step. The weights have not moved, so they are those of the saved policy."""

    def read(found):
        model = load_lookup_policy(lookup_dir)
        for name, value in model.state_dict().items():
            assert torch.equal(value, found.steps[-1].weights[name])
        return read_tokens(found.steps[-1], model)

    return read


def expected_of(tokens, ratio: float = RATIO, scope: str = "batch", normalize: bool = True):
    """From the tokens of a plain step: bool (N,) which are kept, and (N, H) what reaches their rows."""
    largest = tokens.coefficient.abs().max()
    delta = (tokens.entropy * tokens.coefficient).abs()
    delta = delta.masked_fill(tokens.coefficient.abs() < 1e-5 * largest, 0.0)  # what reading leaves of a zero
    segments = {"batch": torch.zeros_like(tokens.row), "group": group_of(tokens), "sequence": tokens.row}[scope]
    kept = torch.zeros_like(delta, dtype=torch.bool)
    denominator = 0
    for segment in segments.unique():
        inside = segments == segment
        budget = ceil_of(ratio, int(inside.sum()))
        ranked = delta[inside].sort(descending=True).values
        tau = ranked[budget - 1]
        if 0 < tau and budget < len(ranked):
            assert ranked[budget] < tau * (1 - 1e-4), "the case is too close to a tie to be decided"
        here = inside & (delta >= tau) & (delta > 0)
        kept |= here
        denominator += max(int(here.sum()), budget)
    scale = len(delta) / denominator if normalize else 1.0
    return kept, torch.where(kept[:, None], tokens.gradient * scale, 0.0)


def assert_read_exactly(tokens):
    """Nothing but the tokens' log-probs and entropies explains the plain gradient."""
    explained = (
        tokens.coefficient[:, None] * tokens.logp_gradient
        + tokens.entropy_coefficient[:, None] * tokens.entropy_gradient
    )
    assert relative_error(explained, tokens.gradient) < LIMIT
    assert not tokens.elsewhere.any()


def assert_gmts_is_grpo_on_the_kept(lookup_run, tokens_of, arguments: dict, gmts: dict | None = None, **expectation):
    """Returns the plain tokens, the mask of the kept ones, and the two runs."""
    plain = lookup_run(GRPOTrainer, **arguments)
    ours = lookup_run(GMTSGRPOTrainer, **arguments, **(gmts or {}))
    theirs, found = tokens_of(plain), tokens_of(ours)
    assert torch.equal(theirs.context, found.context)
    assert_read_exactly(theirs)
    kept, gradient = expected_of(theirs, **expectation)
    assert 0 < kept.sum() < len(kept)
    assert not found.gradient[~kept].any(), "a token that is not kept got a gradient"
    assert not found.elsewhere.any()
    assert relative_error(found.gradient, gradient) < LIMIT
    return theirs, kept, plain, ours


def options_of(loss: str, level: str, kl: str, delta: bool, threshold: float | None, entropy: str) -> dict:
    clips = {"token": (0.2, 0.25, 1.4), "sequence": (0.15, 0.08, 1.1)}[level]  # an answer's mean ratio strays less
    options = {
        "loss_type": loss,
        "importance_sampling_level": level,
        "epsilon": clips[0],
        "epsilon_high": 1 + clips[1] if loss == "cispo" else clips[1],
        "delta": clips[2] if delta else None,
        "off_policy_mask_threshold": threshold,
        "inject": off_policy(old=0.7, ref=0.0 if kl == "no kl" else 0.6),
        "beta": 0.0 if kl == "no kl" else 0.04,
        "use_bias_correction_kl": kl == "kl corrected",
    }
    if entropy == "static":
        options["entropy_coef"] = 0.03
    elif entropy == "adaptive":
        # From the second step on, once TRL has seen an entropy below the target, the bonus counts.
        options |= {
            "use_adaptive_entropy": True,
            "entropy_coef": 0.03,
            "entropy_coef_delta": 0.01,
            "entropy_target": 100.0,
            "max_steps": 2,
        }
    return options


LEVELS = ["token", "sequence"]
CHOICES = [
    LOSSES,
    LEVELS,
    ["no kl", "kl", "kl corrected"],
    [False, True],
    [None, 0.02],
    ["no bonus", "static", "adaptive"],
]
# Every second point of the product: each pair of choices meets, and for each loss, level and KL so do all pairs of the rest.
COMBINATIONS = [
    tuple(choices[i] for choices, i in zip(CHOICES, point, strict=True))
    for point in itertools.product(*(range(len(choices)) for choices in CHOICES))
    if sum(point) % 2 == 0
]


@pytest.mark.parametrize("loss, level, kl, delta, threshold, entropy", COMBINATIONS)
def test_gradient_is_that_of_grpo_on_the_tokens_that_trl_weighs_most(
    lookup_run, tokens_of, loss, level, kl, delta, threshold, entropy
):
    options = options_of(loss, level, kl, delta, threshold, entropy)
    tokens, _, _, _ = assert_gmts_is_grpo_on_the_kept(lookup_run, tokens_of, options)
    bonus = tokens.entropy_coefficient.abs().max()
    assert bonus < 1e-6 if entropy == "no bonus" else bonus > 1e-4


def test_the_combinations_cover_each_pair_of_choices():
    for (a, first), (b, second) in itertools.combinations(enumerate(CHOICES), 2):
        met = {(combination[a], combination[b]) for combination in COMBINATIONS}
        assert met == set(itertools.product(first, second))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", CLIPPED_LOSSES)
def test_the_options_change_the_coefficients(lookup_run, tokens_of, loss, level):
    """In the batches above clips, delta, the off-policy mask and the KL are at work, each on some tokens."""

    def coefficients(**changed):
        options = options_of(loss, level, "no kl", False, None, "no bonus") | changed
        return tokens_of(lookup_run(GRPOTrainer, **options)).coefficient

    plain = coefficients()
    unclipped = coefficients(epsilon=10.0, epsilon_high=10.0)
    clipped = (plain.abs() < 1e-7) & (unclipped.abs() > 1e-5)
    assert 0.1 < clipped.double().mean() < 0.9
    kl = options_of(loss, level, "kl", False, None, "no bonus")
    assert (
        relative_error(coefficients(delta=options_of(loss, level, "no kl", True, None, "no bonus")["delta"]), plain)
        > 1e-2
    )
    assert relative_error(coefficients(off_policy_mask_threshold=0.02), plain) > 1e-2
    assert relative_error(coefficients(**kl), plain) > 1e-2
    assert relative_error(coefficients(**kl | {"use_bias_correction_kl": True}), coefficients(**kl)) > 1e-3


# The losses that stop no gradient inside: of CISPO and VESPO, differences would see what their gradient does not.
@pytest.mark.parametrize("kl", ["no kl", "kl", "kl corrected"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", [*CLIPPED_LOSSES, "sapo"])
def test_the_coefficients_read_are_finite_differences_of_trls_loss(lookup_run, tokens_of, loss, level, kl):
    options = options_of(loss, level, kl, True, 0.02, "no bonus")
    plain = lookup_run(GRPOTrainer, **options)
    tokens = tokens_of(plain)
    trainer, batches = plain.trainer, plain.steps[0].micro_batches
    read = dict(zip(tokens.context.tolist(), tokens.coefficient.tolist(), strict=True))
    found, expected = [], []
    for batch in batches:
        model, width = trainer.model, batch["completion_ids"].size(1)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        with torch.no_grad():
            log_p = torch.log_softmax(model(input_ids=ids).logits[:, -width - 1 : -1], dim=-1)
        logps = log_p.gather(2, batch["completion_ids"][:, :, None]).squeeze(2)
        entropies = -(log_p.exp() * log_p).sum(-1)

        def loss_at(logps, batch=batch, entropies=entropies):
            trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logps, entropies, None)
            return trainer._compute_loss(trainer.model, batch).item()

        assert batch["old_per_token_logps"].dtype == torch.float64
        for row in range(len(ids)):
            for column in range(0, int(batch["completion_mask"][row].sum()), 2):
                nudge = torch.zeros_like(logps)
                nudge[row, column] = 1e-6
                found.append((loss_at(logps + nudge) - loss_at(logps - nudge)) / 2e-6)
                context = ids[row, ids.size(1) - width + column - 1].item()
                expected.append(read[context])
    found, expected = torch.tensor(found).double(), torch.tensor(expected).double()
    assert len(found) > 30
    assert relative_error(expected, found) < 1e-4


SCOPED = {
    "group": ({"selection_scope": "group"}, {"scope": "group"}),
    "sequence": ({"selection_scope": "sequence"}, {"scope": "sequence"}),
    "unnormalised": ({"normalize_selected": False}, {"normalize": False}),
    "half": ({"selection_ratio": 0.5}, {"ratio": 0.5}),
    "whole rows": ({"skip_unselected": False}, {}),
}


@pytest.mark.parametrize("selection", SCOPED)
@pytest.mark.parametrize("loss", ["grpo", "luspo"])
def test_sequence_level_ratios_with_every_selection(lookup_run, tokens_of, loss, selection):
    """GSPO and LUSPO: one ratio for a whole answer, and still only the kept tokens of it are trained on."""
    gmts, expectation = SCOPED[selection]
    options = options_of(loss, "sequence", "kl", False, None, "no bonus")
    _, kept, _, _ = assert_gmts_is_grpo_on_the_kept(lookup_run, tokens_of, options, gmts, **expectation)


@pytest.mark.parametrize("loss", ["grpo", "luspo"])
def test_trls_entropy_mask_leaves_gradient_on_every_token_of_a_sequence_level_ratio(lookup_run, tokens_of, loss):
    """The reason why GMTS masks the gradient and not the terms of the loss. On policy: nothing is clipped."""
    options = {"loss_type": loss, "importance_sampling_level": "sequence"}
    trl = tokens_of(lookup_run(GRPOTrainer, top_entropy_quantile=RATIO, **options))
    reached = trl.gradient.abs().sum(1) > 0
    threshold = torch.quantile(trl.entropy, 1 - RATIO)
    meant = trl.entropy >= threshold
    # Whether an answer counts at all is decided by micro-batch; of those that do, every token is trained on
    touched = torch.isin(trl.row, trl.row[reached])
    assert reached[touched].all()
    assert reached.sum() > 2 * meant.sum()

    _, kept, _, ours = assert_gmts_is_grpo_on_the_kept(lookup_run, tokens_of, options)
    gmts = tokens_of(ours)
    assert torch.equal(gmts.gradient.abs().sum(1) > 0, kept)
    assert kept.sum() == ours.logs[0]["gmts/kept_tokens"] == math.ceil(RATIO * len(kept))


def test_tokens_of_the_environment_are_neither_counted_nor_kept_with_any_loss(lookup_run, tokens_of):
    for loss, level in itertools.product(LOSSES, LEVELS):
        options = options_of(loss, level, "no kl", False, None, "no bonus") | {"tool_tokens": True}
        _, kept, _, ours = assert_gmts_is_grpo_on_the_kept(lookup_run, tokens_of, options)
        masked = sum(int((b["completion_mask"] * (1 - b["tool_mask"])).sum()) for b in ours.steps[0].micro_batches)
        assert masked > 15


# Advantages


def first_reward(completion_ids, **kwargs):
    return spread_reward(completion_ids)


def second_reward(completion_ids, **kwargs):
    return [0.3 * len(ids) + (ids[0] % 5) for ids in completion_ids]


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none", True, False])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_every_kind_of_advantage(lookup_run, tokens_of, aggregation, scale_rewards):
    options = {
        "reward": [first_reward, second_reward],
        "reward_weights": [1.0, 0.4],
        "multi_objective_aggregation": aggregation,
        "scale_rewards": scale_rewards,
        "inject": off_policy(old=0.4),
    }
    assert_gmts_is_grpo_on_the_kept(lookup_run, tokens_of, options)


def per_token(advantages: torch.Tensor, completion_ids: torch.Tensor) -> torch.Tensor:
    """(B, T): a credit of its own for each token."""
    return advantages[:, None] * (1 + (completion_ids % 7).double() / 7)


class TokenLevelGRPO(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        return batch | {"advantages": per_token(batch["advantages"], batch["completion_ids"])}


class TokenLevelGMTS(GMTSGRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        return batch | {"advantages": per_token(batch["advantages"], batch["completion_ids"])}


@pytest.mark.parametrize("loss", LOSSES)
def test_advantages_of_single_tokens_from_a_subclass(lookup_run, tokens_of, loss):
    options = {"loss_type": loss, "inject": off_policy(old=0.4), "epsilon_high": 1.3}
    theirs = tokens_of(lookup_run(TokenLevelGRPO, **options))
    ours = lookup_run(TokenLevelGMTS, **options)
    assert ours.steps[0].micro_batches[0]["advantages"].dim() == 2
    kept, gradient = expected_of(theirs)
    found = tokens_of(ours)
    assert not found.gradient[~kept].any()
    assert relative_error(found.gradient, gradient) < LIMIT
    by_answer = tokens_of(lookup_run(GRPOTrainer, **options))
    assert relative_error(by_answer.coefficient, theirs.coefficient) > 0.1


# Policies whose tokens share parameters


@pytest.mark.parametrize("loss", ["grpo", "dapo", "luspo", "vespo", "sapo"])
def test_sequence_level_gradient_of_a_transformer_is_the_sum_over_kept_tokens(run, loss):
    """c x grad log pi over the kept tokens, from a plain model's logits, with c from a plain trainer's own backward."""
    options = options_of(loss, "token" if loss == "vespo" else "sequence", "kl corrected", False, None, "static")
    options |= {"rows": 4}
    plain = run(listening(), **options)
    ours = run(GMTSGRPOTrainer, **options)
    kept, logp_weights, entropy_weights = selected_coefficients(plain)
    model = model_with(plain.steps[0].weights, policy_config())
    everything = weighted_gradient(
        model,
        plain.steps[0],
        [logps.grad for logps, _, _ in plain.trainer.heard],
        [entropies.grad for _, entropies, _ in plain.trainer.heard],
    )
    assert relative_error(everything, plain.gradient) < LIMIT
    expected = weighted_gradient(model, plain.steps[0], logp_weights, entropy_weights)
    assert relative_error(ours.gradient, expected) < LIMIT
    assert relative_error(ours.gradient, plain.gradient) > 0.1
    assert sum(int(k.sum()) for k in kept) == ours.logs[0]["gmts/kept_tokens"]


MOE = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}


def mixture_of_experts(family: str):
    shape = MOE | {"vocab_size": len(tokenizer())}
    if family == "qwen3_moe":
        config = Qwen3MoeConfig(**shape, num_experts=4, moe_intermediate_size=16, decoder_sparse_step=1)
    else:
        config = MixtralConfig(**shape, num_local_experts=4, intermediate_size=16)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    if hasattr(model, "set_experts_implementation"):  # transformers 5: its grouped kernel has no float64
        model.set_experts_implementation("eager")
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, EOS
    return model


@pytest.mark.parametrize("iterations", [1, 2], ids=["", "old log-probs"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_load_balancing_loss_keeps_its_value_and_gradient(run, family, iterations):
    """It belongs to no token: selecting tokens leaves all of it. What it adds is what it adds to plain GRPO."""

    def take(trainer_class, coefficient):
        options = {"rows": 4, "num_iterations": iterations, "router_aux_loss_coef": coefficient}
        found = run(trainer_class, model=mixture_of_experts(family), **options)
        return found, found.logs[0]

    grpo, grpo_log = take(GRPOTrainer, 0.5)
    grpo_without, grpo_without_log = take(GRPOTrainer, 0.0)
    gmts, gmts_log = take(GMTSGRPOTrainer, 0.5)
    gmts_without, gmts_without_log = take(GMTSGRPOTrainer, 0.0)
    added = grpo.gradient - grpo_without.gradient
    assert relative_error(gmts.gradient - gmts_without.gradient, added) < LIMIT
    assert relative_error(gmts_without.gradient, grpo_without.gradient) > 0.1
    assert gmts_log["aux_loss"] == pytest.approx(grpo_log["aux_loss"], rel=1e-6)
    assert "aux_loss" not in gmts_without_log
    loss = torch.stack(gmts.losses).sum() - torch.stack(gmts_without.losses).sum()
    assert loss.item() == pytest.approx(0.5 * grpo_log["aux_loss"], rel=1e-5)
    assert gmts_log["gmts/kept_tokens"] == gmts_without_log["gmts/kept_tokens"]


# Adaptive entropy

ADAPTIVE = {
    "use_adaptive_entropy": True,
    "entropy_coef": 0.02,
    "entropy_coef_delta": 0.005,
    "entropy_coef_max": 0.03,
    "rows": 4,
    "max_steps": 6,
    "learning_rate": 0.3,
    "beta": 0.0,
}


def coefficients_of(found) -> list[float]:
    logged = [step.metrics["entropy_coef"] for step in found.steps]
    assert all(len(values) == 1 for values in logged), "more or less than one value for an optimizer step"
    return [values[0] for values in logged]


def entropy_target(run) -> float:
    """Between the entropies of a run, so that the controller turns both ways."""
    entropies = [entry["entropy"] for entry in run(GRPOTrainer, **ADAPTIVE, entropy_target=0.0).logs]
    return sum(sorted(entropies)[2:4]) / 2


@pytest.mark.parametrize("selection", [{"token_selection": "none"}, {"selection_ratio": 1.0}], ids=str)
def test_adaptive_entropy_without_selection_follows_grpo(run, selection):
    target = entropy_target(run)
    theirs = run(GRPOTrainer, **ADAPTIVE, entropy_target=target)
    ours = run(GMTSGRPOTrainer, **ADAPTIVE, entropy_target=target, **selection)
    trajectory = coefficients_of(theirs)
    assert coefficients_of(ours) == trajectory
    changes = [b - a for a, b in itertools.pairwise([0.02, *trajectory])]
    assert any(change > 0 for change in changes) and any(change < 0 for change in changes)
    for theirs_step, ours_step in zip(theirs.steps, ours.steps, strict=True):
        assert relative_error(ours_step.gradient, theirs_step.gradient) < 1e-4


def test_adaptive_entropy_moves_once_in_an_optimizer_step_whatever_is_selected(run):
    """Also when the step is scored before it is trained on: a controller that closed its books twice would jump."""
    found = run(GMTSGRPOTrainer, **ADAPTIVE, entropy_target=100.0)
    assert coefficients_of(found) == pytest.approx([0.025, 0.03, 0.03, 0.03, 0.03, 0.03])
    found = run(GMTSGRPOTrainer, **ADAPTIVE, entropy_target=0.0)
    assert coefficients_of(found) == pytest.approx([0.015, 0.01, 0.005, 0.0, 0.0, 0.0])
    # TRL sees the entropy of all trainable tokens, not of those that are kept
    assert found.trainer._last_world_entropy == pytest.approx(found.logs[-1]["entropy"], rel=0.05)
