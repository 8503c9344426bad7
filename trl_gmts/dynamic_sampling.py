"""Dynamic sampling (DAPO, arXiv 2503.14476): a prompt whose answers all score alike is replaced before the update.

Such a group has no advantage and no gradient. After TRL has generated answers and rewarded them, its rows are given to a
fresh prompt of the training set, round after round, until every group has something to tell or the rounds are used up.
Only then does TRL make a batch of the answers: padding, old and reference log-probs, advantages and logs are made once.

Left to others: generation, rewards and the batch (TRL), what is trained on (`trainer.py`). Nothing here knows of tokens
or of their selection.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import IterableDataset
from transformers.utils import logging
from trl import GRPOTrainer

from .seams import TRLSeamError


logger = logging.get_logger(__name__)

Example = dict[str, Any]
"""A row of the dataset, with what a `rollout_func` added to it."""
Generated = tuple[Any, ...]
"""What `GRPOTrainer._generate` returns: lists with an entry per answer, or None."""

_EXTRA_FIELDS = 5
_NUM_GENERATED = 8  # prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images


class _Generated(Exception):
    """Raised to leave TRL's `_generate_and_score_completions` where it would make a batch of the answers."""

    def __init__(self, prompts: list[Any], generated: Generated) -> None:
        self.prompts = prompts
        self.generated = generated


@dataclass
class Answer:
    """One row of a generation batch before it is made into tensors."""

    example: Example
    generated: Generated
    """Its entries of what TRL generated; None where TRL gave no list."""
    extra: Example
    """Its entries of what reward functions logged with `log_extra`."""


def has_signal(
    rewards: torch.Tensor, weights: torch.Tensor, num_generations: int, each_function: bool = False
) -> torch.Tensor:
    """
    Which groups have answers that score differently.

    Args:
        rewards (`torch.Tensor` of shape `(R, F)`): of R answers by F functions; NaN where one does not apply.
        weights (`torch.Tensor` of shape `(F,)`): of the functions.
        num_generations (`int`): answers in a group, consecutive rows.
        each_function (`bool`): a difference in any function counts, even if the weighted sums are equal
            (`multi_objective_aggregation="normalize_then_sum"`).

    Returns:
        `torch.Tensor` of bool and shape `(R / num_generations,)`.
    """
    scores = rewards * weights
    if not each_function:
        unscorable = scores.isnan().all(dim=1, keepdim=True)
        scores = scores.nansum(dim=1, keepdim=True).masked_fill(unscorable, math.nan)
    groups = scores.view(-1, num_generations, scores.size(1))
    highest = groups.nan_to_num(nan=-math.inf).amax(dim=1)
    lowest = groups.nan_to_num(nan=math.inf).amin(dim=1)
    # Sums of the same rewards in another order differ by rounding, and by that only.
    alike = torch.isclose(highest, lowest, rtol=4 * torch.finfo(rewards.dtype).eps)
    return ((highest > lowest) & ~alike).any(dim=1)


def prompts_to_draw(missing: int, useful: int, drawn: int, most: int, num_generations: int, num_processes: int) -> int:
    """
    How many prompts the next round takes, if they are as useful as those drawn so far.

    Args:
        missing (`int`): groups still wanted.
        useful, drawn (`int`): groups with a signal, and prompts, in the rounds so far.
        most (`int`): groups in a generation batch; no round takes more.
        num_generations (`int`): answers in a group.
        num_processes (`int`): each must get the same number of answers, so the number is rounded up.
    """
    wanted = min(most, math.ceil(missing * drawn / useful)) if useful else most
    step = num_processes // math.gcd(num_processes, num_generations)
    return math.ceil(wanted / step) * step


class DynamicSamplingGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with the option `dynamic_sampling`, the base of [`GMTSGRPOTrainer`]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Stand in for generation and rewards while TRL makes a batch of answers that have both; None otherwise.
        self._instead_of_generate: Callable[[list[Any]], Generated] | None = None
        self._instead_of_rewards: torch.Tensor | None = None
        super().__init__(*args, **kwargs)
        if self.args.dynamic_sampling:
            self._check_dynamic_sampling()

    def _check_dynamic_sampling(self) -> None:
        if isinstance(self.train_dataset, IterableDataset):
            raise ValueError(
                "dynamic_sampling=True draws prompts at random, which an IterableDataset does not allow. Pass a Dataset, "
                "or set dynamic_sampling=False."
            )
        if self.environment_factories is not None:
            raise ValueError(
                "dynamic_sampling=True cannot be combined with environment_factory: an environment would be reset again "
                "between an answer and its reward. Set dynamic_sampling=False."
            )

    def _generate_and_score_completions(self, inputs: list[Example]) -> dict[str, Any]:
        if not (self.args.dynamic_sampling and self.model.training):
            return super()._generate_and_score_completions(inputs)
        answers, rewards = self._useful_answers(inputs)
        for column in {column for answer in answers for column in answer.extra}:
            self._pending_extra_logs[column] = [answer.extra.get(column) for answer in answers]
        with self._replaced_generation(lambda prompts: _as_generated(answers), rewards):
            return super()._generate_and_score_completions([answer.example for answer in answers])

    def _useful_answers(self, inputs: list[Example]) -> tuple[list[Answer], torch.Tensor]:
        """
        This process's share of a generation batch without groups that score alike, as far as the rounds allow.

        Returns:
            The answers, as many as `inputs`, and the rewards (R, F) of all processes.
        """
        size, num_processes = len(inputs), self.accelerator.num_processes
        num_groups = size * num_processes // self.num_generations
        fresh = self._fresh_prompts(num_groups)
        rounds = [self._answers(inputs)]
        # Where the answers of each group of the batch come from: the round, and the group in it.
        sources = [(0, group) for group in range(num_groups)]
        missing = [group for group, useful in enumerate(self._has_signal(rounds[0][1])) if not useful]
        useful, drawn = num_groups - len(missing), num_groups
        while missing and len(rounds) <= self.args.max_resample_rounds:
            num_prompts = prompts_to_draw(len(missing), useful, drawn, num_groups, self.num_generations, num_processes)
            prompts = list(islice(fresh, num_prompts))
            if len(prompts) < num_prompts:  # the dataset has no more
                break
            rounds.append(self._answers(self._share(prompts)))
            found = [group for group, signal in enumerate(self._has_signal(rounds[-1][1])) if signal]
            useful, drawn = useful + len(found), drawn + num_prompts
            for group in found[: len(missing)]:
                sources[missing.pop(0)] = (len(rounds) - 1, group)
        self._report(num_groups, drawn, len(rounds) - 1, len(missing))
        answers = self._dealt(sources, [answers for answers, _ in rounds], size)
        rewards = [rounds[i][1].view(-1, self.num_generations, len(self.reward_funcs))[group] for i, group in sources]
        return answers, torch.cat(rewards)

    def _has_signal(self, rewards: torch.Tensor) -> list[bool]:
        weights = self.reward_weights.to(rewards.device)
        each_function = self.multi_objective_aggregation == "normalize_then_sum"
        return has_signal(rewards, weights, self.num_generations, each_function).tolist()

    def _fresh_prompts(self, num_groups: int) -> Iterator[int]:
        """Indices into the training set, none twice, the same on all processes and in a run that was resumed here."""
        place = (self.args.seed, self.state.global_step, self._step % self.args.gradient_accumulation_steps)
        size = len(self.train_dataset)
        most = min(size, num_groups * self.args.max_resample_rounds)
        return iter(random.Random(repr(place)).sample(range(size), most))

    def _share(self, prompts: list[int]) -> list[Example]:
        """This process's examples of a round: each prompt `num_generations` times, dealt over the processes in order."""
        rows = [index for index in prompts for _ in range(self.num_generations)]
        size = len(rows) // self.accelerator.num_processes
        first = self.accelerator.process_index * size
        return [dict(self.train_dataset[index]) for index in rows[first : first + size]]

    def _answers(self, inputs: list[Example]) -> tuple[list[Answer], torch.Tensor]:
        """TRL's answers to these examples on this process, and the rewards (R, F) of all processes."""
        prompts, generated = self._generated(inputs)
        inputs = [
            example
            | {
                name: values[i] if isinstance(values, list) else values
                for name, values in generated[_EXTRA_FIELDS].items()
                if not isinstance(values, list) or i < len(values)
            }
            for i, example in enumerate(inputs)
        ]
        rewards = self._calculate_rewards(inputs, prompts, generated[3], generated[1])
        logged = dict(self._pending_extra_logs)
        self._pending_extra_logs.clear()
        for column, values in logged.items():
            if len(values) != len(inputs):
                raise ValueError(
                    f"A reward function logged {len(values)} values of {column!r} with log_extra for {len(inputs)} "
                    "answers. Log one for each."
                )
        answers = [
            Answer(
                example,
                tuple(column[i] if isinstance(column, list) and column else None for column in generated),
                {column: values[i] for column, values in logged.items()},
            )
            for i, example in enumerate(inputs)
        ]
        return answers, rewards

    def _generated(self, inputs: list[Example]) -> tuple[list[Any], Generated]:
        """The prompts as TRL prepares them, and what it generates for them."""
        generate = super()._generate

        def stop(prompts: list[Any]) -> Generated:
            raise _Generated(prompts, generate(prompts))

        try:
            with self._replaced_generation(stop, None):
                super()._generate_and_score_completions(inputs)
        except _Generated as stopped:
            if not isinstance(stopped.generated, tuple) or len(stopped.generated) != _NUM_GENERATED:
                raise TRLSeamError(f"GRPOTrainer._generate did not return {_NUM_GENERATED} values.") from None
            return stopped.prompts, stopped.generated
        raise TRLSeamError("GRPOTrainer._generate_and_score_completions did not call _generate.")

    def _dealt(self, sources: list[tuple[int, int]], rounds: list[list[Answer]], size: int) -> list[Answer]:
        """The answers of this process's rows. Those of fresh prompts may have been generated on another process."""
        process = self.accelerator.process_index
        fresh = {source for source in sources if source[0] > 0}
        moved = {
            (i, process * len(answers) + row): answer
            for i, answers in enumerate(rounds)
            for row, answer in enumerate(answers)
            if (i, (process * len(answers) + row) // self.num_generations) in fresh
        }
        if fresh:
            moved = dict(gather_object(list(moved.items())))
        dealt = []
        for row in range(size):
            group, place = divmod(process * size + row, self.num_generations)
            i, source = sources[group]
            dealt.append(rounds[0][row] if i == 0 else moved[i, source * self.num_generations + place])
        return dealt

    def _report(self, num_groups: int, drawn: int, num_rounds: int, missing: int) -> None:
        self._metrics["train"]["dynamic_sampling/prompts_drawn"].append(drawn)
        self._metrics["train"]["dynamic_sampling/resample_rounds"].append(num_rounds)
        if missing and self.accelerator.is_main_process:
            logger.warning(
                f"dynamic_sampling: after {num_rounds} further rounds and {drawn} prompts, {missing} of {num_groups} "
                "groups still have answers that all score alike. Training on the others: the prompts are too easy or too "
                "hard for this policy, or max_resample_rounds is too small."
            )

    # TRL's seams

    def _generate(self, prompts: list[Any]) -> Generated:
        if self._instead_of_generate is not None:
            return self._instead_of_generate(prompts)
        return super()._generate(prompts)

    def _calculate_rewards(self, inputs: list[Example], *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._instead_of_rewards is not None:
            return self._instead_of_rewards
        return super()._calculate_rewards(inputs, *args, **kwargs)

    @contextmanager
    def _replaced_generation(
        self, generate: Callable[[list[Any]], Generated], rewards: torch.Tensor | None
    ) -> Iterator[None]:
        self._instead_of_generate, self._instead_of_rewards = generate, rewards
        try:
            yield
        finally:
            self._instead_of_generate, self._instead_of_rewards = None, None


def _as_generated(answers: list[Answer]) -> Generated:
    columns: list[Any] = [list(column) for column in zip(*(answer.generated for answer in answers), strict=True)]
    *lists, tool_images = [None if all(entry is None for entry in column) else column for column in columns]
    lists[_EXTRA_FIELDS] = {}  # they are part of the examples by now
    return (*lists, tool_images or [])
