"""Three optimizer steps by two processes are those of one process with the same rollouts, whoever holds the parameters.

DDP, FSDP2 and ZeRO-3 run at every push; the others with `make test-distributed`.
"""

import math
from typing import NamedTuple

import pytest
import torch

from distributed.cases import ATOL, CASES, FIRST_TOKEN, RATIO, RECORDED, STEPS
from distributed.layouts import LAYOUTS
from harness import NUM_GENERATIONS, PAD, PROMPTS, load_policy, relative_error


EVERY_PUSH = ("DDP", "FSDP2", "ZeRO-3")
IN_FLOAT64 = ("DDP", "FSDP2", "FSDP2 of transformers")
"""Layouts that can: DeepSpeed steps in float32, and FSDP1 takes the gradient norm in it."""
layouts = pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in EVERY_PUSH else pytest.mark.distributed) for name in LAYOUTS],
)
cases = pytest.mark.parametrize("case", CASES)
starving_cases = pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.starved])


class Token(NamedTuple):
    mask: bool
    kept: bool
    score: float
    entropy: float


def by_answer(step: dict) -> dict[tuple, list[Token]]:
    """answer -> its tokens."""
    found = {}
    for ids, *row in zip(*(step[name] for name in RECORDED), strict=True):
        real = ids != PAD
        answer = tuple(ids[real].tolist())
        assert answer not in found, "two answers are alike, so they cannot be told apart"
        assert not row[1][~real].any()
        found[answer] = [Token(*values) for values in zip(*(column[real].tolist() for column in row), strict=True)]
    return found


def together(outcomes: list[dict], step: int) -> dict[tuple, list[Token]]:
    """`by_answer` of all processes."""
    first, second = (by_answer(outcome["steps"][step]) for outcome in outcomes)
    assert not first.keys() & second.keys()
    return first | second


def by_segment(case: str, answers: dict[tuple, list[Token]]) -> list[list[Token]]:
    """The trainable tokens that share a threshold."""
    segments = {}
    for answer, tokens in answers.items():
        number = answer[0] - FIRST_TOKEN
        key = {"batch": 0, "group": number // NUM_GENERATIONS, "sequence": number}[CASES[case].scope]
        segments.setdefault(key, []).extend(token for token in tokens if token.mask)
    return [tokens for tokens in segments.values() if tokens]


def kth_largest(values: list[float], k: int) -> float:
    return sorted(values, reverse=True)[k - 1]


@layouts
@cases
def test_parameters_after_three_steps_are_those_of_one_process(shared, alone, model_dir, layout, case):
    expected = alone(case).parameters
    atol = ATOL[CASES[case].config["optim"]]
    moved = max(
        float((expected[name] - p.detach()).abs().max())
        for name, p in load_policy(model_dir, dtype=torch.float32).named_parameters()
    )
    assert moved > 100 * atol, "the steps are too small for the comparison to say anything"
    for outcome in shared(layout):
        found = outcome[case]["parameters"]
        assert found.keys() == expected.keys()
        for name, parameter in found.items():
            torch.testing.assert_close(
                parameter,
                expected[name],
                rtol=0,
                atol=atol,
                check_dtype=layout in IN_FLOAT64 or CASES[case].dtype == "float32",
                msg=lambda m, n=name: f"{n}: {m}",
            )


@layouts
@cases
def test_the_kept_tokens_are_those_of_one_process(shared, alone, layout, case):
    outcomes = [outcome[case] for outcome in shared(layout)]
    assert [len(outcome["steps"]) for outcome in outcomes] == [STEPS, STEPS]
    for step in range(STEPS):
        found, expected = together(outcomes, step), by_answer(alone(case).steps[step])
        assert found.keys() == expected.keys() and len(found) == 4 * CASES[case].rows
        for answer, tokens in expected.items():
            assert [token[:2] for token in found[answer]] == [token[:2] for token in tokens]


@layouts
@cases
def test_logged_metrics_are_those_of_one_process(shared, alone, layout, case):
    for outcome in shared(layout):
        logs = outcome[case]["logs"]
        assert len(logs) == len(alone(case).logs) == STEPS
        for found, expected in zip(logs, alone(case).logs, strict=True):
            found, expected = (
                {k: v for k, v in log.items() if k.startswith(("gmts/", "dynamic_sampling/"))}
                for log in (found, expected)
            )
            assert found.keys() == expected.keys() and "gmts/kept_tokens" in found
            for name in ("gmts/kept_tokens", "gmts/nonfinite_scores"):
                assert found[name] == expected[name]
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@layouts
def test_skipping_what_is_not_selected_changes_nothing(shared, model_dir, layout):
    """Three steps move the parameters alike, to 1e-6 of the way in float64 and 1e-5 in float32, and log the same."""
    limit = 1e-6 if layout in IN_FLOAT64 else 1e-5
    start = dict(load_policy(model_dir).named_parameters())
    for outcome in shared(layout):
        skipping, whole = (outcome[case] for case in ("dapo, float64", "dapo, float64, whole rows"))
        ways = [
            torch.cat([(run["parameters"][name] - p.detach()).flatten() for name, p in start.items()])
            for run in (skipping, whole)
        ]
        if layout in IN_FLOAT64:
            assert skipping["parameters"]["model.norm.weight"].dtype == torch.float64
        assert relative_error(*ways) < limit
        for found, expected in zip(skipping["logs"], whole["logs"], strict=True):
            for name in found.keys() & expected.keys():
                if name.startswith("gmts/") or name in ("entropy", "grad_norm"):
                    assert found[name] == pytest.approx(expected[name], rel=limit, abs=1e-9), name


@layouts
def test_fresh_prompts_replace_those_whose_answers_score_alike(shared, layout):
    """On both processes, and by answers that the other process generated: groups are split differently in each round."""
    case = CASES["dynamic sampling, split groups"]
    outcomes = [outcome["dynamic sampling, split groups"] for outcome in shared(layout)]
    flat = {PROMPTS.index(prompt) for prompt in case.flat}
    for step in range(STEPS):
        groups = [(answer[0] - FIRST_TOKEN) // NUM_GENERATIONS for answer in together(outcomes, step)]
        assert len(groups) == 4 * case.rows and not flat & set(groups)
    assert all(log["frac_reward_zero_std"] == 0 for log in outcomes[0]["logs"])
    assert sum(log["dynamic_sampling/resample_rounds"] for log in outcomes[0]["logs"]) >= STEPS


@layouts
@cases
def test_thresholds_are_exact_over_the_tokens_of_both_processes(shared, layout, case):
    """From the scores that the processes had: kept are those from the ceil(rho N)-th largest on, to the last bit."""
    outcomes = [outcome[case] for outcome in shared(layout)]
    for step in range(STEPS):
        answers = together(outcomes, step)
        assert not any(token.kept and not token.mask for tokens in answers.values() for token in tokens)
        for tokens in by_segment(case, answers):
            tau = kth_largest([token.score for token in tokens], math.ceil(RATIO * len(tokens)))
            assert all(token.kept == (token.score >= tau and token.score > 0) for token in tokens)


@layouts
@starving_cases
def test_a_process_that_goes_without_trains_along(shared, layout, case):
    """One process keeps nothing in the first step, the other in the second, both in the third, and none hangs."""
    kept = [[bool(step["kept"].any()) for step in outcome[case]["steps"]] for outcome in shared(layout)]
    assert kept == [[True, False, False], [False, True, False]]
    logs = shared(layout)[0][case]["logs"]
    assert [log["gmts/kept_tokens"] > 0 for log in logs] == [True, True, False]
    assert all(math.isfinite(log["loss"]) and math.isfinite(log["grad_norm"]) for log in logs)


@cases
def test_no_threshold_hangs_on_rounding(alone, case):
    """In one process: at the cut, scores and entropies differ by far more than layouts round differently."""
    for step in alone(case).steps:
        for tokens in by_segment(case, by_answer(step)):
            budget = math.ceil(RATIO * len(tokens))
            for values in ([token.score for token in tokens], [token.entropy for token in tokens]):
                last, next = (kth_largest([*values, 0.0], k) for k in (budget, budget + 1))
                assert last == next == 0.0 or last - next > 1e-4 * last


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.scope == "batch" and not case.starved])
def test_a_threshold_for_each_process_would_fail_here(shared, case):
    """Each process's own top fraction is another set of tokens, in some step at least."""
    different = 0
    for outcome in shared("DDP"):
        for step in outcome[case]["steps"]:
            (tokens,) = by_segment(case, by_answer(step))
            tau = kth_largest([token.score for token in tokens], math.ceil(RATIO * len(tokens)))
            different += sum(token.kept != (token.score >= tau) for token in tokens)
    assert different > 0


def test_groups_are_split_across_processes(shared):
    for case in [name for name in CASES if "split" in name]:
        outcomes = [outcome[case] for outcome in shared("DDP")]
        for step in range(STEPS):
            first, second = (
                {(answer[0] - FIRST_TOKEN) // NUM_GENERATIONS for answer in by_answer(outcome["steps"][step])}
                for outcome in outcomes
            )
            assert first & second


@layouts
@cases
def test_the_layout_was_really_on(shared, alone, layout, case):
    """Each of two processes holds half of what the layout shards. Equal results alone could come from two full runs."""
    numbers = sum(p.numel() for p in alone(case).parameters.values())
    expected = {
        "DDP": {"distributed_type": "MULTI_CPU", "wrapper": "DistributedDataParallel"},
        "FSDP2": {"distributed_type": "FSDP", "wrapper": "FSDPQwen3ForCausalLM"},
        "FSDP2 of transformers": {"distributed_type": "MULTI_CPU", "wrapper": "FSDPQwen3ForCausalLM"},
        "FSDP1": {"distributed_type": "FSDP", "wrapper": "FullyShardedDataParallel"},
        "ZeRO-1": {"distributed_type": "DEEPSPEED", "wrapper": "DeepSpeedEngine", "stage": 1},
        "ZeRO-2": {"distributed_type": "DEEPSPEED", "wrapper": "DeepSpeedEngine", "stage": 2},
        "ZeRO-3": {"distributed_type": "DEEPSPEED", "wrapper": "DeepSpeedEngine", "stage": 3},
    }[layout]
    sharded = layout not in ("DDP", "ZeRO-1", "ZeRO-2")
    expected |= {
        "num_processes": 2,
        "world_size": 2,
        "numbers_here": numbers // 2 if sharded else numbers,
        "optimizer_numbers_here": numbers if layout == "DDP" else numbers // 2,
    }
    assert numbers % 2 == 0
    for outcome in shared(layout):
        facts = outcome[case]["layout"]
        assert {name: facts[name] for name in expected} == expected
        if layout == "ZeRO-3":
            assert facts["numbers_between_steps"] == 0
        if layout == "FSDP1":  # the layers are gathered one by one, not the model as a whole
            assert len(facts["sharded_modules"]) == 3
