"""What is trained, in one process or shared by two: the same answers, rewards and optimizer steps either way.

A case's rows are dealt to processes as TRL deals them: the first half of a generation batch to the first process. So
with two processes the last two of the four prompts are the second process's, except where a group is split.
"""

from dataclasses import dataclass, field

import torch
from transformers import TrainerCallback

from harness import (
    EOS,
    NUM_GENERATIONS,
    PROMPTS,
    FixedRollouts,
    config_arguments,
    dataset,
    spread_reward,
    tokenizer,
)
from trl_gmts import GMTSGRPOConfig, GMTSGRPOTrainer


STEPS = 3
ACCUMULATION = 2
RATIO = 0.25
FIRST_TOKEN = 4  # of the first answer's; 3 is "a", a prompt by itself, and would make that answer's contexts alike
SGD = {"optim": "sgd", "learning_rate": 0.05}
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3}
ATOL = {"sgd": 1e-6, "adamw_torch": 1e-5}


@dataclass(frozen=True)
class Case:
    config: dict
    rows: int = 4
    """Rows of a micro-batch on each of two processes; one process alone takes twice as many."""
    starved: str | None = None
    """What one process lacks in the first step, the other in the second, and both in the third; see `has_nothing`."""

    flat: tuple[str, ...] = ()
    """Prompts whose answers all score alike, in every round."""

    dtype: str = "float32"
    """Of the weights; they are saved in float64, which TRL knows no other name for."""

    @property
    def scope(self) -> str:
        return self.config.get("selection_scope", "batch")


CHECKPOINTING = {"gradient_checkpointing": True}
WHOLE_ROWS = {"skip_unselected": False}
CASES = {
    "dapo": Case(SGD | CHECKPOINTING),
    "dapo, whole rows": Case(SGD | WHOLE_ROWS),
    "dapo, float64": Case(SGD, dtype="auto"),
    "dapo, float64, whole rows": Case(SGD | WHOLE_ROWS, dtype="auto"),
    "dapo, two iterations": Case(SGD | CHECKPOINTING | {"num_iterations": 2}),
    "dapo, sequence scope, AdamW, whole rows": Case(
        ADAMW | CHECKPOINTING | WHOLE_ROWS | {"selection_scope": "sequence"}
    ),
    "grpo, KL, AdamW": Case(ADAMW | CHECKPOINTING | {"loss_type": "grpo", "beta": 0.04}),
    "grpo, group scope, split groups": Case(
        SGD | CHECKPOINTING | {"loss_type": "grpo", "selection_scope": "group"}, rows=3
    ),
    "grpo, split groups, AdamW, whole rows": Case(ADAMW | WHOLE_ROWS | {"loss_type": "grpo"}, rows=3),
    "dynamic sampling, split groups": Case(
        SGD | {"dynamic_sampling": True, "shuffle_dataset": True}, rows=3, flat=(PROMPTS[0], PROMPTS[2])
    ),
    "random tokens": Case(SGD | {"token_selection": "random"}),
    "starved of finished answers": Case(
        SGD | CHECKPOINTING | {"mask_truncated_completions": True}, starved="finished answers"
    ),
    "starved of finished answers, whole rows": Case(
        SGD | WHOLE_ROWS | {"mask_truncated_completions": True}, starved="finished answers"
    ),
    "starved of advantages": Case(SGD | CHECKPOINTING, starved="advantages"),
    "starved of advantages, whole rows": Case(ADAMW | CHECKPOINTING | WHOLE_ROWS, starved="advantages"),
    "starved of trainable tokens": Case(
        SGD | CHECKPOINTING | {"selection_scope": "group"}, starved="trainable tokens"
    ),
}


def has_nothing(prompt: str, round: int) -> bool:
    """In a starved case: whether a prompt is one of the process that goes without in this step."""
    of_second = prompt in PROMPTS[2:]
    return [of_second, not of_second, True][round]


class SharedRollouts(FixedRollouts):
    """Answers by the row's place in the generation batch of all processes; the first token tells answers apart."""

    def __init__(self, starved: str | None):
        super().__init__()
        self.starved = starved

    def answer(self, prompt: str, index: int) -> list[int]:
        ids = [FIRST_TOKEN + NUM_GENERATIONS * PROMPTS.index(prompt) + index, *super().answer(prompt, index)]
        if self.starved == "finished answers":
            return [token for token in ids if token != EOS] + ([] if has_nothing(prompt, self.round) else [EOS])
        return ids

    def __call__(self, prompts: list[str], trainer) -> dict:
        first = trainer.accelerator.process_index * len(prompts)
        completions = [self.answer(prompt, (first + i) % NUM_GENERATIONS) for i, prompt in enumerate(prompts)]
        output = {
            # As if each answer had been asked for in other words: the first tokens of a group would otherwise have the
            # same entropy, and rounding would rank them.
            "prompt_ids": [
                [*tokenizer()(prompt)["input_ids"], ids[0]] for prompt, ids in zip(prompts, completions, strict=True)
            ],
            "completion_ids": completions,
            "logprobs": None,
        }
        if self.starved == "trainable tokens":  # TRL's name for "the model wrote this"
            output["env_mask"] = [
                [int(not has_nothing(prompt, self.round))] * len(ids)
                for prompt, ids in zip(prompts, completions, strict=True)
            ]
        self.round += 1
        return output


class Rewards:
    """`spread_reward`, and the same for all answers of a prompt that is starved of advantages."""

    __name__ = "spread_reward"

    def __init__(self, starved: str | None, flat: tuple[str, ...]):
        self.starved = starved
        self.flat = flat
        self.round = 0

    def __call__(self, prompts, completion_ids, **kwargs) -> list[float]:
        rewards = spread_reward(completion_ids)
        if self.starved == "advantages":
            rewards = [
                0.5 if has_nothing(prompt, self.round) else reward
                for prompt, reward in zip(prompts, rewards, strict=True)
            ]
        self.round += 1
        return [0.5 if prompt in self.flat else reward for prompt, reward in zip(prompts, rewards, strict=True)]


RECORDED = ("completion_ids", "mask", "kept", "scores", "entropies")


class Selections(TrainerCallback):
    """What this process kept, step by step."""

    def __init__(self):
        self.trainer: GMTSGRPOTrainer | None = None
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args, state, control, **kwargs):
        selection = self.trainer.last_selection
        self.steps.append({name: getattr(selection, name).detach().clone() for name in RECORDED})


def build(case: Case, model, output_dir: str, processes: int) -> tuple[GMTSGRPOTrainer, Selections]:
    """A trainer of the case, for a run over this many processes. `model`: a path, or what it loads."""
    rows = case.rows * 2 // processes
    arguments = config_arguments(rows=rows) | {
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        "selection_ratio": RATIO,
        "save_only_model": True,
    }
    if isinstance(model, str):
        arguments["model_init_kwargs"] = {"dtype": case.dtype}
    args = GMTSGRPOConfig(output_dir=output_dir, **(arguments | case.config))
    selections = Selections()
    trainer = GMTSGRPOTrainer(
        model=model,
        reward_funcs=Rewards(case.starved, case.flat),
        args=args,
        train_dataset=dataset(),
        processing_class=tokenizer(),
        rollout_func=SharedRollouts(case.starved),
        callbacks=[selections],
    )
    selections.trainer = trainer
    return trainer, selections


@dataclass
class Outcome:
    """What one process knows after a run. Plain containers, so that it travels as a file."""

    parameters: dict[str, torch.Tensor]
    steps: list[dict[str, torch.Tensor]]
    logs: list[dict[str, float]]
    layout: dict = field(default_factory=dict)


def logs_of(trainer) -> list[dict]:
    return [dict(entry) for entry in trainer.state.log_history if "loss" in entry]


def train_alone(case: Case, model: str, output_dir: str) -> Outcome:
    """The case in one process: what every layout has to reproduce."""
    trainer, selections = build(case, model, output_dir, processes=1)
    assert trainer.accelerator.num_processes == 1
    trainer.train()
    parameters = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return Outcome(parameters, selections.steps, logs_of(trainer))
