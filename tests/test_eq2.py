"""The gradient of one optimizer step is that of the paper's Eq. 2, computed by the independent oracle.

Each case also names rivals: the same step under one wrong reading (another score, another denominator, another scope,
...). The gradient has to be far from them, so that a test which passes has told them apart.
"""

import pytest
import torch
from trl import GRPOTrainer

import harness
import oracle
from harness import half_flat_reward, off_policy, relative_error
from oracle import LIMIT, Settings, eq2, model_with


FAR = 1e-2
CLIPS = {"epsilon": 0.2, "epsilon_high": 0.28}
CLIPPED = {"epsilon_low": 0.2, "epsilon_high": 0.28}
KL = {"beta": 0.3, "use_bias_correction_kl": False}

# name: (how to run the trainer, what the oracle is told, wrong readings)
CASES = {
    "on policy": ({}, {}, [{"score": "entropy"}, {"normalize": False}, {"ratio": 0.25}, {"scope": "group"}]),
    "off policy, both clips": (
        {**CLIPS, "inject": off_policy(old=0.5)},
        CLIPPED,
        [{"epsilon_high": 0.2}, {"epsilon_low": 10.0}, {"epsilon_high": 10.0}, {"score": "entropy"}],
    ),
    "kl": (
        {**KL, "inject": off_policy(ref=0.5)},
        {"beta": 0.3},
        [{"beta": 0.0}, {"beta": 0.2}, {"score": "entropy"}],
    ),
    "kl and both clips": (
        {**KL, **CLIPS, "inject": off_policy(old=0.5, ref=0.5)},
        {"beta": 0.3, **CLIPPED},
        [{"beta": 0.0}, {"epsilon_high": 0.2}],
    ),
    "zero-advantage groups": ({"reward": half_flat_reward}, {}, [{"score": "entropy"}, {"base": "scored"}]),
    "zero-advantage groups with kl": (
        {"reward": half_flat_reward, **KL, "inject": off_policy(ref=0.5)},
        {"beta": 0.3},
        [{"beta": 0.0}],
    ),
    "tool masks": ({"tool_tokens": True}, {}, [{"score": "entropy"}]),
    "temperature 0.6": ({"temperature": 0.6}, {"temperature": 0.6}, [{"temperature": 1.0}]),
    "rho 0.05": ({"selection_ratio": 0.05}, {"ratio": 0.05}, [{"ratio": 0.1}]),
    "rho 1": ({"selection_ratio": 1.0}, {"ratio": 1.0}, [{"ratio": 0.9}]),
    "rho 1, zero-advantage groups": (
        {"selection_ratio": 1.0, "reward": half_flat_reward},
        {"ratio": 1.0},
        [{"ratio": 1.0, "base": "scored"}],
    ),
    "more budget than scores": (
        {"selection_ratio": 0.9, "reward": half_flat_reward},
        {"ratio": 0.9},
        [{"ratio": 0.9, "base": "scored"}],
    ),
    "entropy selection": ({"token_selection": "entropy"}, {"score": "entropy"}, [{"score": "gmts"}]),
    "entropy selection, zero-advantage groups": (
        {"token_selection": "entropy", "reward": half_flat_reward},
        {"score": "entropy"},
        [{"score": "gmts"}],
    ),
    "group scope": ({"selection_scope": "group"}, {"scope": "group"}, [{"scope": "batch"}, {"scope": "sequence"}]),
    "sequence scope": ({"selection_scope": "sequence"}, {"scope": "sequence"}, [{"scope": "batch"}]),
    "group scope, zero-advantage groups": (
        {"selection_scope": "group", "reward": half_flat_reward},
        {"scope": "group"},
        [{"scope": "group", "base": "scored"}],
    ),
    "scored base": (
        {"selection_base": "scored", "reward": half_flat_reward},
        {"base": "scored"},
        [{"base": "all"}],
    ),
    "scored base, group scope": (
        {"selection_base": "scored", "selection_scope": "group", "reward": half_flat_reward},
        {"base": "scored", "scope": "group"},
        [{"base": "all", "scope": "group"}, {"base": "scored"}],
    ),
    "bottom": ({"select_bottom": True, "selection_ratio": 0.4}, {"bottom": True, "ratio": 0.4}, [{"ratio": 0.4}]),
    "bottom, zeros included": (
        {"select_bottom": True, "selection_ratio": 0.9, "reward": half_flat_reward},
        {"bottom": True, "ratio": 0.9},
        [{"bottom": True, "ratio": 0.9, "base": "scored"}],
    ),
    "bottom, scored base": (
        {"select_bottom": True, "selection_base": "scored", "selection_ratio": 0.6, "reward": half_flat_reward},
        {"bottom": True, "base": "scored", "ratio": 0.6},
        [{"bottom": True, "ratio": 0.6}],
    ),
    "bottom by entropy, group scope": (
        {"select_bottom": True, "selection_scope": "group", "token_selection": "entropy"},
        {"bottom": True, "scope": "group", "score": "entropy"},
        [{"bottom": True, "scope": "group"}],
    ),
    "unnormalised": ({"normalize_selected": False}, {"normalize": False}, [{"normalize": True}]),
    "unnormalised, group scope, tool masks": (
        {"normalize_selected": False, "selection_scope": "group", "tool_tokens": True},
        {"normalize": False, "scope": "group"},
        [{"scope": "group"}, {"normalize": False}],
    ),
    "everything at once": (
        {
            **KL,
            **CLIPS,
            "inject": off_policy(old=0.5, ref=0.5),
            "tool_tokens": True,
            "reward": half_flat_reward,
            "temperature": 0.6,
            "selection_scope": "group",
            "selection_base": "scored",
            "selection_ratio": 0.3,
        },
        {
            "beta": 0.3,
            **CLIPPED,
            "temperature": 0.6,
            "scope": "group",
            "base": "scored",
            "ratio": 0.3,
        },
        [{"beta": 0.3, **CLIPPED, "temperature": 0.6, "ratio": 0.3}],
    ),
    # Beyond Eq. 2: the coefficient is the one that the loss itself gives the token
    "grpo": ({"loss_type": "grpo"}, {"loss": "grpo"}, [{"loss": "dapo"}]),
    "grpo, both clips, kl, group scope": (
        {"loss_type": "grpo", **KL, **CLIPS, "inject": off_policy(old=0.5, ref=0.5), "selection_scope": "group"},
        {"loss": "grpo", "beta": 0.3, **CLIPPED, "scope": "group"},
        [{"beta": 0.3, **CLIPPED, "scope": "group"}],
    ),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"loss": "dr_grpo"}, [{"loss": "dapo"}]),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.3, "inject": off_policy(old=0.5)},
        {"loss": "cispo", "epsilon_high": 1.3},
        [{"loss": "cispo", "epsilon_high": 10.0}, {"loss": "dapo"}],
    ),
}


@pytest.fixture
def taken(run):
    """Run a case and hand back its step and a plain model with the weights of that step."""

    def take(arguments):
        step = run(**arguments).steps[0]
        return step, model_with(step.weights, harness.policy_config())

    return take


@pytest.mark.parametrize("rows", [16, 1])
@pytest.mark.parametrize("case", CASES)
def test_gradient_is_that_of_eq2(taken, case, rows):
    arguments, settings, rivals = CASES[case]
    step, model = taken({"rows": rows} | arguments)
    expected = eq2(model, step.micro_batches, Settings(**settings))
    assert expected.gap > 1e-4, "the case has scores too close to the threshold to be decided in float32"
    assert relative_error(step.gradient, expected.gradient) < LIMIT
    for rival in rivals:
        wrong = eq2(model, step.micro_batches, Settings(**rival)).gradient
        assert relative_error(step.gradient, wrong) > FAR, f"the case cannot tell {rival} from {settings}"


def test_cases_are_what_they_say(taken):
    """The situations the cases are named after do occur in their data."""
    step, model = taken(CASES["kl and both clips"][0])
    everything = eq2(model, step.micro_batches, Settings(ratio=1.0, beta=0.3, **CLIPPED))
    advantage = everything.of_trainable([a.advantage for a in everything.answers])
    without_clip = eq2(model, step.micro_batches, Settings(ratio=1.0, beta=0.3, epsilon_low=10, epsilon_high=10))
    clipped = everything.of_trainable(everything.omega) != without_clip.of_trainable(without_clip.omega)
    assert (clipped & (advantage > 0)).sum() >= 5
    assert (clipped & (advantage < 0)).sum() >= 5

    step, model = taken(CASES["tool masks"][0])
    assert sum(int((~batch["tool_mask"].bool()).sum()) for batch in step.micro_batches) >= 10

    step, model = taken(CASES["zero-advantage groups"][0])
    zeros = eq2(model, step.micro_batches, Settings())
    assert (zeros.of_trainable(zeros.delta) == 0).float().mean() > 0.3
    step, model = taken(CASES["more budget than scores"][0])
    short = eq2(model, step.micro_batches, Settings(ratio=0.9))
    assert sum(int(kept.sum()) for kept in short.kept) < short.budget == short.denominator


def test_at_rho_one_the_oracle_is_grpo(run):
    """The oracle against TRL itself: at rho = 1 it is plain GRPO's gradient, with everything switched on."""
    arguments = {**KL, **CLIPS, "inject": off_policy(old=0.5, ref=0.5), "temperature": 0.6, "rows": 4}
    step = run(GRPOTrainer, tool_tokens=True, **arguments).steps[0]
    model = model_with(step.weights, harness.policy_config())
    expected = eq2(model, step.micro_batches, Settings(ratio=1.0, beta=0.3, temperature=0.6, **CLIPPED))
    assert relative_error(step.gradient, expected.gradient) < LIMIT


def test_closed_form_omega_is_the_gradient_of_the_objective():
    """The oracle's two derivations meet: omega against autograd of ell with respect to log pi."""
    generator = torch.Generator().manual_seed(0)
    logp, old, ref, advantage = torch.randn(4, 500, generator=generator, dtype=torch.float64)
    logp.requires_grad_()
    for settings in (
        Settings(),
        Settings(beta=0.3),
        Settings(epsilon_high=0.28, beta=0.1),
        Settings(loss="cispo", epsilon_high=1.3),
    ):
        ell = oracle.objective(logp, old, ref, advantage, settings)
        (autograd,) = torch.autograd.grad(ell.sum(), logp)
        omega = oracle.paper_omega(logp.detach(), old, ref, advantage, settings)
        torch.testing.assert_close(autograd, omega, rtol=1e-12, atol=1e-12)


def test_positions_and_padding_do_not_enter_the_oracle(run):
    """The oracle runs answers one by one and unpadded; padded and batched as TRL has them, log-probs are the same."""
    step = run().steps[0]
    model = model_with(step.weights, harness.policy_config())
    batch = step.micro_batches[0]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    width = batch["completion_ids"].size(1)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        padded = torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1], dim=-1)
        padded = padded.gather(2, batch["completion_ids"][:, :, None]).squeeze(2)
        for row, answer in enumerate(oracle.answers_of([batch])):
            alone, _ = oracle.logps_and_entropy(model, answer, 1.0)
            torch.testing.assert_close(padded[row, : len(alone)], alone, rtol=1e-6, atol=1e-6)
