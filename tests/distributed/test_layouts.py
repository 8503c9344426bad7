"""Three optimizer steps by two processes are those of one process with the same rollouts, whoever holds the parameters.

DDP, FSDP2 and ZeRO-3 run at every push; the others with `make test-distributed`.
"""

import math

import pytest
import torch
from distributed.cases import ATOL, CASES, STEPS
from distributed.layouts import LAYOUTS
from harness import NUM_GENERATIONS, PAD, load_policy


EVERY_PUSH = ("DDP", "FSDP2", "ZeRO-3")
layouts = pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in EVERY_PUSH else pytest.mark.distributed) for name in LAYOUTS],
)
cases = pytest.mark.parametrize("case", CASES)
starving_cases = pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.starved])


def by_answer(step: dict) -> dict[tuple, tuple[list[bool], list[bool], list[float]]]:
    """answer -> which of its tokens could be trained on, which were, and their scores."""
    found = {}
    for ids, mask, kept, scores in zip(*(step[n] for n in ("completion_ids", "mask", "kept", "scores")), strict=True):
        real = ids != PAD
        answer = tuple(ids[real].tolist())
        assert answer not in found, "two answers are alike, so they cannot be told apart"
        assert not kept[~real].any()
        found[answer] = (mask[real].tolist(), kept[real].tolist(), scores[real].tolist())
    return found


def together(outcomes: list[dict], step: int) -> dict:
    """`by_answer` of all processes."""
    first, second = (by_answer(outcome["steps"][step]) for outcome in outcomes)
    assert not first.keys() & second.keys()
    return first | second


@layouts
@cases
def test_parameters_after_three_steps_are_those_of_one_process(shared, alone, model_dir, layout, case):
    expected = alone(case).parameters
    atol = ATOL[CASES[case].config["optim"]]
    moved = max(
        float((expected[name] - p).abs().max())
        for name, p in load_policy(model_dir, dtype=torch.float32).named_parameters()
    )
    assert moved > 100 * atol, "the steps are too small for the comparison to say anything"
    for outcome in shared(layout):
        found = outcome[case]["parameters"]
        assert found.keys() == expected.keys()
        for name, parameter in found.items():
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@layouts
@cases
def test_the_kept_tokens_are_those_of_one_process(shared, alone, layout, case):
    outcomes = [outcome[case] for outcome in shared(layout)]
    assert [len(outcome["steps"]) for outcome in outcomes] == [STEPS, STEPS]
    for step in range(STEPS):
        found, expected = together(outcomes, step), by_answer(alone(case).steps[step])
        assert found.keys() == expected.keys() and len(found) == 4 * CASES[case].rows
        for answer, (mask, kept, _) in expected.items():
            assert (found[answer][0], found[answer][1]) == (mask, kept)


@layouts
@cases
def test_logged_metrics_are_those_of_one_process(shared, alone, layout, case):
    for outcome in shared(layout):
        logs = outcome[case]["logs"]
        assert len(logs) == len(alone(case).logs) == STEPS
        for found, expected in zip(logs, alone(case).logs, strict=True):
            found, expected = ({k: v for k, v in log.items() if k.startswith("gmts/")} for log in (found, expected))
            assert found.keys() == expected.keys() and "gmts/kept_tokens" in found
            for name in ("gmts/kept_tokens", "gmts/nonfinite_scores"):
                assert found[name] == expected[name]
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@layouts
@cases
def test_thresholds_are_exact_over_the_tokens_of_both_processes(shared, layout, case):
    """From the scores that the processes had: kept are those from the ceil(rho N)-th largest on, to the last bit."""
    outcomes = [outcome[case] for outcome in shared(layout)]
    for step in range(STEPS):
        segments = {}
        for answer, row in together(outcomes, step).items():
            number = answer[0] - 3  # the first token of an answer says which it is
            key = {"batch": 0, "group": number // NUM_GENERATIONS, "sequence": number}[CASES[case].scope]
            segments.setdefault(key, []).append(row)
        for rows in segments.values():
            tokens = [token for row in rows for token in zip(*row, strict=True)]
            ranked = sorted((score for mask, _, score in tokens if mask), reverse=True)
            if not ranked:
                assert not any(kept for _, kept, _ in tokens)
                continue
            tau = ranked[math.ceil(0.3 * len(ranked)) - 1]
            assert all(kept == (mask and score >= tau and score > 0) for mask, kept, score in tokens)


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
def test_the_kept_tokens_do_not_hang_on_rounding(alone, case):
    """In one process: the last score that is kept lies well above the first that is not."""
    if CASES[case].config.get("token_selection") == "random":
        return
    for step in alone(case).steps:
        segments = {}
        for answer, (mask, kept, scores) in by_answer(step).items():
            number = answer[0] - 3
            key = {"batch": 0, "group": number // NUM_GENERATIONS, "sequence": number}[CASES[case].scope]
            segments.setdefault(key, []).extend(zip(mask, kept, scores, strict=True))
        for tokens in segments.values():
            above = [score for _, kept, score in tokens if kept]
            below = [score for mask, kept, score in tokens if mask and not kept]
            if above and below:
                assert min(above) > 1.0001 * max(below)


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.scope == "batch" and not case.starved])
def test_a_threshold_for_each_process_would_fail_here(shared, case):
    """Each process's own top fraction is another set of tokens."""
    outcomes = [outcome[case] for outcome in shared("DDP")]
    for step in range(STEPS):
        different = 0
        for outcome in outcomes:
            tokens = [t for row in by_answer(outcome["steps"][step]).values() for t in zip(*row, strict=True)]
            ranked = sorted((score for _, _, score in tokens), reverse=True)
            tau = ranked[math.ceil(0.3 * len(ranked)) - 1]
            different += sum(kept != (score >= tau) for _, kept, score in tokens)
        assert different > 0


def test_groups_are_split_across_processes(shared):
    for case in [name for name in CASES if "split" in name]:
        outcomes = [outcome[case] for outcome in shared("DDP")]
        for step in range(STEPS):
            first, second = (
                {(answer[0] - 3) // NUM_GENERATIONS for answer in by_answer(outcome["steps"][step])}
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
