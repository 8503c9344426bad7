"""GRPO that trains on the tokens that carry the gradient: GMTS (arXiv 2608.30632) on top of TRL's `GRPOTrainer`.

What differs from `GRPOTrainer` is `compute_loss`. At the first micro-batch of an optimizer step it plans the whole step:

1. Score: a forward without gradient over the step's micro-batches. Their log-probs and entropies are handed to TRL's own
   loss as leaf tensors, so its derivative gives each token's coefficient, whatever the loss type.
2. Select: keep the top fraction of |entropy x coefficient|, exactly, over all micro-batches and processes.
3. Pack: leave out the answers without a kept token, and of the others what follows the last kept token.

and at every micro-batch it runs its share of the plan:

4. Train: a forward with gradient, and a surrogate whose value is TRL's loss and whose gradient is that of the kept
   tokens alone.

This holds because TRL's loss depends on the model through the log-probs and entropies only: at the current weights its
gradient is the sum over tokens of coefficient x gradient of the log-prob, and leaving a token out means leaving its term
out. A token that is trained on sees the tokens before it, and has the position, that it has in `GRPOTrainer`; the
buffered batch stays as TRL made it.

Left to others: the formula of the loss, generation, rewards, logging and processes (TRL); which prompts are trained on
(`dynamic_sampling.py`); what is read of a batch (`batch.py`); what ranks tokens (`scores.py`); exact thresholds (`selection.py`); which rows and columns are run
(`packing.py`, `forward.py`); what is logged (`metrics.py`); what TRL must offer (`seams.py`).
"""

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging
from trl.models.utils import disable_gradient_checkpointing

from .batch import Batch, Snapshot, concatenated, neutralized, trainable_tokens, unusable_tokens
from .config import GMTSGRPOConfig
from .dynamic_sampling import DynamicSamplingGRPOTrainer
from .forward import (
    ForwardCall,
    concatenated_call,
    longest_with_fixed_positions,
    takes_packs,
)
from .metrics import selection_metrics, selection_sums
from .packing import make_packs, whole_rows
from .scores import entropy_scores, gmts_scores, random_scores
from .seams import TRLSeamError, check_attributes, check_methods
from .selection import Selected, keep_extreme, select_tokens


logger = logging.get_logger(__name__)

Forward = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Log-probs (B, T) and entropies (B, T) of the completion tokens, MoE load-balancing loss ()."""


class _StopAtForward(Exception):
    """Raised to leave TRL's loss at the point where it would run the model, with the call it was about to make."""

    def __init__(self, call: ForwardCall) -> None:
        self.call = call


@dataclass
class Scored:
    """The step's tokens on this process after stage 1: R answers in the order of the micro-batches, T positions."""

    calls: list[ForwardCall]
    """What TRL runs through the model, one for each micro-batch."""
    losses: list[torch.Tensor]
    """(): TRL's loss of each micro-batch, detached."""
    mask: torch.Tensor
    """bool (R, T): tokens that can be trained on."""
    entropies: torch.Tensor
    """float (R, T), nats."""
    logp_grads: torch.Tensor
    """float (R, T): derivative of the loss with respect to each log-prob; NaN where the token cannot be scored."""
    entropy_grads: torch.Tensor | None
    """float (R, T): the same for the entropies; None without an entropy bonus."""
    aux_grads: list[torch.Tensor | None]
    """(): the same for the MoE load-balancing loss of each micro-batch; None without one."""


@dataclass
class PlannedBatch:
    """What one micro-batch trains on: r rows, t completion positions."""

    call: ForwardCall
    loss: torch.Tensor
    """(): TRL's loss, detached."""
    kept: torch.Tensor
    """bool (r, t)."""
    logp_weights: torch.Tensor
    """float (r, t): what multiplies the gradient of each log-prob; zero where a token is not kept."""
    entropy_weights: torch.Tensor | None
    """float (r, t): the same for the entropies."""
    aux_weight: torch.Tensor | None
    """(): the same for the MoE load-balancing loss, which belongs to no token and is never selected."""


@dataclass
class TokenSelection:
    """The tokens of this process in the last optimizer step: R answers, T completion positions."""

    completion_ids: torch.Tensor
    """int64 (R, T)."""
    mask: torch.Tensor
    """bool (R, T): tokens that could be trained on."""
    kept: torch.Tensor
    """bool (R, T): tokens that were."""
    scores: torch.Tensor
    """float32 (R, T): what ranked them; NaN where a token could not be scored."""
    entropies: torch.Tensor
    """float (R, T), nats."""
    advantages: torch.Tensor
    """float (R, 1) or (R, T)."""


class GMTSGRPOTrainer(DynamicSamplingGRPOTrainer):
    r"""
    TRL's `GRPOTrainer`, trained on the tokens with the largest gradients (GMTS, arXiv 2608.30632).

    Takes the arguments of `GRPOTrainer`, with a [`GMTSGRPOConfig`] as `args`. Generation, rewards, advantages, the loss
    and its options, logging, checkpoints and parallelism are TRL's.

    The score of a token is |E * c|, with E its entropy in nats and c the coefficient of its log-probability's gradient
    in TRL's own loss, expressed per token: the derivative of the loss times N / P, where N counts the trainable tokens
    of the optimizer step over its P processes. For `loss_type="dapo"` c is the paper's omega. Kept are the tokens with
    a score of at least tau, the ceil(rho * N)-th largest; with `normalize_selected` their coefficients are multiplied
    by N / S, S = max(kept, ceil(rho * N)) summed over the thresholds' scopes, so that the loss is the mean over kept
    tokens (Eq. 2).

    Logged once per optimizer step, over all processes and micro-batches, beside TRL's own metrics, which keep their
    meaning (all tokens, once per micro-batch):

    - `gmts/kept_fraction`: tokens kept / trainable tokens. Near `selection_ratio`; lower when fewer tokens score above
      zero, higher when scores tie at the threshold.
    - `gmts/kept_tokens`: number of tokens kept.
    - `gmts/threshold`: the score tau (mean over prompts or answers where the scope has several), in nats times
      advantage for the default loss.
    - `gmts/zero_score_fraction`: share of trainable tokens with a score of exactly zero (no advantage, clipped, or a
      certain token).
    - `gmts/nonfinite_scores`: number of tokens that could not be scored (a NaN or infinite log-prob, entropy or
      coefficient). They are never selected; anything but 0 deserves a look.
    - `gmts/entropy_kept`, `gmts/entropy_dropped`: mean entropy of the kept and of the other trainable tokens, nats.
    - `gmts/kept_positive_advantage`: share of kept tokens whose advantage is positive.
    - `gmts/answers_with_kept`: share of answers with at least one kept token.
    - `gmts/effective_answers`: 1 / sum of squared shares of the kept tokens per answer: over how many answers the
      update is spread. A small number means that few answers drive the step.
    - `gmts/entropy_overlap`: share of kept tokens that entropy selection with the same budget would also keep. At 1
      GMTS and entropy selection cannot be told apart.

    A mean over no token (nothing kept, say) is not logged for that step.

    Args:
        model, reward_funcs, *args, **kwargs:
            As in `GRPOTrainer`.
        args ([`GMTSGRPOConfig`], *optional*):
            Configuration. If not given, the defaults with an output directory named after the model.

    Attributes:
        last_selection (`TokenSelection` or `None`):
            What was kept in the last optimizer step, for looking at. `None` before the first one and with
            `token_selection="none"`.

    Raises:
        TypeError: if `args` is a `GRPOConfig` without the fields of `GMTSGRPOConfig`.
        ValueError: see [`GMTSGRPOConfig`].
        TRLSeamError: if the installed TRL lacks, or has changed, something the selection depends on.

    Example:

    ```python
    from trl_gmts import GMTSGRPOConfig, GMTSGRPOTrainer

    trainer = GMTSGRPOTrainer(
        model="Qwen/Qwen2.5-Math-1.5B",
        reward_funcs=reward,
        args=GMTSGRPOConfig(output_dir="out", selection_ratio=0.2),
        train_dataset=dataset,
    )
    trainer.train()
    ```
    """

    _tag_names = ["trl", "grpo", "gmts"]
    _name = "GMTS"
    _paper = {
        "title": "GMTS: Gradient Magnitude-based Token Selection Improves RLVR Training for LLM Reasoning",
        "id": "2608.30632",
        "citation": textwrap.dedent("""\
            @article{lv2026gmts,
                title        = {{GMTS: Gradient Magnitude-based Token Selection Improves RLVR Training for LLM Reasoning}},
                author       = {Lv and Zhang and Zhang},
                year         = 2026,
                eprint       = {arXiv:2608.30632},
            }"""),
    }

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: GMTSGRPOConfig | None = None, *rest: Any, **kwargs: Any
    ) -> None:
        check_methods()
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GMTSGRPOConfig(f"{name.split('/')[-1]}-GMTS")
        if not isinstance(args, GMTSGRPOConfig):
            raise TypeError(
                f"args is a {type(args).__name__}, which has no token selection in it. Pass a GMTSGRPOConfig: it takes "
                "the same arguments as GRPOConfig and adds the selection's."
            )
        args.check_selection()  # again: a field may have been set since
        # Stands in for the model's forward inside TRL's loss while a step is planned; None otherwise.
        self._instead_of_forward: Callable[[ForwardCall], Forward] | None = None
        # What the policy's forwards returned during a generation; None outside of one.
        self._generation_forwards: list[Forward] | None = None
        # What remains to be run of the current optimizer step, by TRL's count of micro-batches.
        self._plan: dict[int, tuple[PlannedBatch, Snapshot]] = {}
        self._buffered_inputs: Any  # TRL's: the micro-batches of the generation batch
        self.last_selection: TokenSelection | None = None
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        check_attributes(self)
        self._takes_packs = takes_packs(self.model)
        self._longest_skipped = longest_with_fixed_positions(self.model.config)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in `GRPOTrainer`. A run that was interrupted within an optimizer step starts a new one, with new answers."""
        self._plan = {}
        if self.args.token_selection != "none":
            self._entropy_window_stats = None  # TRL's sums over the step, of the adaptive entropy bonus
            begun = self._step % self.args.gradient_accumulation_steps
            if begun:
                self._step -= begun
                self._buffered_inputs = None
        return super().train(*args, **kwargs)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """
        TRL's loss of one micro-batch, with the gradient of the kept tokens only.

        Args:
            model (`torch.nn.Module`): the wrapped policy.
            inputs (`dict`): one of the micro-batches that TRL buffered after generation.
            return_outputs (`bool`): not supported, as in `GRPOTrainer`.
            num_items_in_batch: unused, as in `GRPOTrainer`.

        Returns:
            `torch.Tensor` of shape `()`.
        """
        if not self._selects():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if return_outputs:
            raise ValueError("GMTSGRPOTrainer does not support return_outputs=True, as GRPOTrainer does not.")
        if self._step not in self._plan:
            self._plan = self._plan_step(model)
        planned, snapshot = self._plan.pop(self._step)
        if snapshot.batch is not inputs:
            raise RuntimeError(
                "compute_loss was given a batch that is not the one GRPOTrainer buffered, so the selection would rank "
                "other tokens than it trains on. Change batches in _generate_and_score_completions, not later."
            )
        if snapshot.has_changed():
            raise RuntimeError(
                "A micro-batch was changed after its tokens had been selected: the optimizer step is planned over all its "
                "micro-batches at the first one. Change batches in _generate_and_score_completions, or a copy of them in "
                "_compute_loss."
            )
        if self.accelerator.sync_gradients != (not self._plan):
            raise RuntimeError(
                f"The optimizer step was planned over {self.current_gradient_accumulation_steps} micro-batches, but "
                f"accelerate's sync_gradients is {self.accelerator.sync_gradients} with {len(self._plan)} of them "
                "still to run. Set gradient accumulation through gradient_accumulation_steps of the config only."
            )
        return self._loss_of_kept_tokens(model, planned)

    def _selects(self) -> bool:
        return bool(self.args.token_selection != "none" and self.model.training)

    def _skips(self, *calls: ForwardCall) -> bool:
        """Whether what is not needed of these calls is left out of the forward, and not only of the gradient."""
        wanted = self.args.skip_unselected and self.args.selection_ratio < 1
        fixed = all(call.is_plain() and call.input_ids.size(1) <= self._longest_skipped for call in calls)
        return self._selects() and wanted and fixed and self._takes_packs

    # The optimizer step

    def _plan_step(self, model: torch.nn.Module) -> dict[int, tuple[PlannedBatch, Snapshot]]:
        window = self._window()
        snapshots = [Snapshot(batch) for batch in window]
        num_tokens = self._sum_over_processes(torch.cat([trainable_tokens(batch) for batch in window]).sum())  # N
        scored = self._score(model, window, num_tokens)
        selected = self._select(window, scored, num_tokens)
        scale = num_tokens / max(selected.denominator, 1) if self.args.normalize_selected else 1.0
        planned = self._pack(scored, selected.kept, scale)
        return {self._step + i: pair for i, pair in enumerate(zip(planned, snapshots, strict=True))}

    def _window(self) -> list[Batch]:
        """The micro-batches of the optimizer step that begins now, on this process."""
        buffer = self._buffered_inputs
        first = self._step % self.args.steps_per_generation
        last = first + self.current_gradient_accumulation_steps
        if not isinstance(buffer, list) or last > len(buffer):
            raise TRLSeamError(
                f"The micro-batches {first} to {last} of the optimizer step are not in GRPOTrainer's buffer."
            )
        return buffer[first:last]

    # Stage 1: score

    def _score(self, model: torch.nn.Module, window: list[Batch], num_tokens: torch.Tensor) -> Scored:
        calls = [self._forward_call(model, batch) for batch in window]
        losses, entropies, grads = [], [], []
        for i, (batch, forward) in enumerate(zip(window, self._scoring_forwards(model, window, calls), strict=True)):
            if self.args.normalize_selected and self.args.selection_ratio < 1:
                # Losses that divide by the generation batch's tokens divide by this step's: Eq. 2 averages over one
                # step. The count that TRL expects is that of a generation batch made of such steps.
                steps = self.args.steps_per_generation / self.current_gradient_accumulation_steps
                batch = {**batch, "num_items_in_batch": num_tokens * steps}
            with self._micro_step(is_last=i == len(window) - 1):
                loss, *grad = self._differentiate_loss(model, batch, forward)
            losses.append(loss)
            entropies.append(forward[1])
            grads.append(grad)
        logp_grads, entropy_grads, aux_grads = zip(*grads, strict=True)
        return Scored(
            calls=calls,
            losses=losses,
            mask=torch.cat([trainable_tokens(batch) for batch in window]),
            entropies=torch.cat(entropies),
            logp_grads=torch.cat(logp_grads),
            entropy_grads=None if entropy_grads[0] is None else torch.cat(entropy_grads),
            aux_grads=list(aux_grads),
        )

    def _forward_call(self, model: torch.nn.Module, batch: Batch) -> ForwardCall:
        """What TRL's loss would run through the model for this micro-batch."""

        def stop(call: ForwardCall) -> Forward:
            raise _StopAtForward(call)

        try:
            with self._replaced_forward(stop):
                super().compute_loss(model, dict(batch))
        except _StopAtForward as stopped:
            return stopped.call
        raise TRLSeamError("GRPOTrainer's loss did not ask for log-probs through _get_per_token_logps_and_entropies.")

    def _scoring_forwards(
        self, model: torch.nn.Module, window: list[Batch], calls: list[ForwardCall]
    ) -> list[Forward]:
        """Log-probs and entropies of the step's micro-batches under the current policy, without gradient."""
        first_after_generation = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        saved = all("policy_logps" in batch for batch in window) and not any(call.wants_more() for call in calls)
        if first_after_generation and saved:
            # TRL ran the policy over these answers for the old log-probs, and it is still the same policy.
            return [(batch["policy_logps"], batch["policy_entropies"], None) for batch in window]
        # The random stream is put back, so that generation and dropout draw what they would in GRPOTrainer.
        with (
            torch.no_grad(),
            _preserved_rng(self.accelerator.device),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
        ):
            if not self._skips(*calls):
                return [self._forward(model, call) for call in calls]
            sizes = [len(call.input_ids) for call in calls]
            logps, entropies, _ = self._packed_forward(model, concatenated_call(calls), len(calls), max(sizes))
        return [
            (logps, entropies, None)
            for logps, entropies in zip(logps.split(sizes), entropies.split(sizes), strict=True)
        ]

    def _differentiate_loss(
        self, model: torch.nn.Module, batch: Batch, forward: Forward
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """TRL's loss of a micro-batch, and its derivatives with respect to the log-probs, entropies and MoE loss."""
        logps, entropies, aux_loss = forward
        if logps.shape != batch["completion_mask"].shape:
            raise TRLSeamError(
                f"The log-probs have the shape {tuple(logps.shape)}, the completions "
                f"{tuple(batch['completion_mask'].shape)}."
            )
        unusable = unusable_tokens(batch, logps, entropies)
        batch, logps, entropies = neutralized(batch, logps, entropies, unusable)
        inputs = [logps.detach().requires_grad_(), entropies.detach().requires_grad_()]
        if aux_loss is not None:
            inputs.append(aux_loss.detach().requires_grad_())
        leaves: list[Forward] = [(inputs[0], inputs[1], inputs[2] if aux_loss is not None else None)]

        def once(call: ForwardCall) -> Forward:
            if leaves:
                return leaves.pop()
            raise RuntimeError(
                "The loss asked for log-probs more than once, and only one set of them is differentiated. A subclass that "
                "needs others (a teacher's, say, or those of other tokens) gets them in compute_loss, and adds its term to "
                "what super().compute_loss() returns, or in _generate_and_score_completions, as a tensor of the batch."
            )

        with torch.enable_grad(), self._replaced_forward(once):
            loss = super().compute_loss(model, batch)
        if not loss.requires_grad:
            raise TRLSeamError("GRPOTrainer's loss does not depend on the log-probs it asked for.")
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        grads = torch.autograd.grad(loss, [*inputs, *weights], allow_unused=True)
        logp_grads, entropy_grads, *aux_grads = grads[: len(inputs)]
        if any(grad is not None for grad in grads[len(inputs) :]):
            raise RuntimeError(
                "The loss depends on the weights otherwise than through the log-probs and entropies of the answers, and "
                "that part of its gradient would be lost. If a subclass adds a term to _compute_loss, add it in "
                "compute_loss instead, to what super().compute_loss() returns."
            )
        if logp_grads is None:
            raise TRLSeamError("GRPOTrainer's loss does not depend on the log-probs it asked for.")
        return (
            loss.detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0),
            logp_grads.masked_fill(unusable, float("nan")),
            entropy_grads,
            aux_grads[0] if aux_grads else None,
        )

    # Stage 2: select

    def _select(self, window: list[Batch], scored: Scored, num_tokens: torch.Tensor) -> Selected:
        answer_ids = concatenated(window, "answer_ids")
        if self.args.token_selection == "gmts":
            # In the paper's units: the derivative of a mean over tokens, times their number.
            coefficients = scored.logp_grads * (num_tokens / self.accelerator.num_processes)
            scores = gmts_scores(scored.entropies, coefficients)
        elif self.args.token_selection == "entropy":
            scores = entropy_scores(scored.entropies)
        elif self.args.token_selection == "random":
            width = scored.mask.size(1)
            scores = random_scores(answer_ids, width, self.args.seed, self.state.global_step)
        else:
            raise ValueError(f"token_selection became {self.args.token_selection!r} after the trainer was built.")
        usable = torch.isfinite(scored.logp_grads) & torch.isfinite(scored.entropies)
        scores = scores.masked_fill(~usable, float("nan"))

        num_answers = self.args.generation_batch_size
        segments, num_segments = {
            "batch": (torch.zeros_like(answer_ids), 1),
            "group": (answer_ids // self.num_generations, num_answers // self.num_generations),
            "sequence": (answer_ids, num_answers),
        }[self.args.selection_scope]
        segments = segments[:, None].expand_as(scores)
        selected = select_tokens(
            scores,
            scored.mask,
            segments,
            num_segments,
            self.args.selection_ratio,
            scored_only=self.args.selection_base == "scored",
            bottom=self.args.select_bottom,
            sum_over_processes=self._sum_over_processes,
        )
        self.last_selection = TokenSelection(
            completion_ids=concatenated(window, "completion_ids"),
            mask=scored.mask,
            kept=selected.kept,
            scores=scores,
            entropies=scored.entropies,
            advantages=concatenated(window, "advantages").view(len(scores), -1),
        )
        self._log_selection(self.last_selection, selected, segments)
        return selected

    def _log_selection(self, tokens: TokenSelection, selected: Selected, segments: torch.Tensor) -> None:
        by_entropy, _ = keep_extreme(
            entropy_scores(tokens.entropies),
            tokens.mask & torch.isfinite(tokens.scores),
            segments,
            selected.budgets,
            bottom=self.args.select_bottom,
            sum_over_processes=self._sum_over_processes,
        )
        sums = selection_sums(tokens.kept, tokens.mask, tokens.scores, tokens.entropies, tokens.advantages, by_entropy)
        metrics = selection_metrics(self._sum_over_processes(sums))
        if not selected.thresholds.isnan().all():
            metrics["threshold"] = selected.thresholds.nanmean().item()
        if metrics["nonfinite_scores"] > 0:
            logger.warning_once(
                "Some tokens have a log-prob, entropy or coefficient that is not finite. They are left out of the "
                "update; gmts/nonfinite_scores counts them at each step."
            )
        for name, value in metrics.items():
            self._metrics["train"][f"gmts/{name}"].append(value)

    # Stage 3: pack

    def _pack(self, scored: Scored, kept: torch.Tensor, scale: torch.Tensor | float) -> list[PlannedBatch]:
        """The kept tokens, dealt over the micro-batches of the step."""
        calls = scored.calls
        sizes = [len(call.input_ids) for call in calls]
        if self._skips(*calls):
            call = concatenated_call(calls)
            packs = make_packs(call.attention_mask, kept, len(calls), max(sizes))
            calls = [call.packed(pack, kept) for pack in packs]
        else:
            prompt_width = calls[0].input_ids.size(1) - kept.size(1)
            packs = whole_rows(sizes, prompt_width, kept.size(1), kept.device)
        logp_weights = (scored.logp_grads * scale).masked_fill(~kept, 0.0)
        entropy_weights = None
        if scored.entropy_grads is not None:
            entropy_weights = (scored.entropy_grads * scale).masked_fill(~kept, 0.0)
        return [
            PlannedBatch(
                call=call,
                loss=loss,
                kept=pack.gather_completion(kept),
                logp_weights=pack.gather_completion(logp_weights),
                entropy_weights=None if entropy_weights is None else pack.gather_completion(entropy_weights),
                aux_weight=aux_grad,
            )
            for call, pack, loss, aux_grad in zip(calls, packs, scored.losses, scored.aux_grads, strict=True)
        ]

    # Stage 4: train

    def _loss_of_kept_tokens(self, model: torch.nn.Module, planned: PlannedBatch) -> torch.Tensor:
        logps, entropies, aux_loss = self._forward(model, planned.call)
        zero = logps.new_zeros(())
        # `where` and not a product: a dropped token passes back an exact zero even where its log-prob is not finite.
        surrogate = torch.where(planned.kept, planned.logp_weights * logps, zero).sum()
        if planned.entropy_weights is not None:
            surrogate = surrogate + torch.where(planned.kept, planned.entropy_weights * entropies, zero).sum()
        if planned.aux_weight is not None and aux_loss is not None:
            surrogate = surrogate + planned.aux_weight * aux_loss
        return planned.loss + surrogate - surrogate.detach()

    # TRL's forward

    def _forward(self, model: torch.nn.Module, call: ForwardCall) -> Forward:
        """TRL's forward for a call."""
        result = super()._get_per_token_logps_and_entropies(
            call.through(model), call.input_ids, call.attention_mask, call.logits_to_keep, **call.kwargs
        )
        shape = (len(call.input_ids), call.logits_to_keep)
        if (
            not isinstance(result, tuple)
            or len(result) != 3
            or any(not torch.is_tensor(tensor) or tensor.shape != shape for tensor in result[:2])
        ):
            raise TRLSeamError(
                "GRPOTrainer._get_per_token_logps_and_entropies did not return log-probs and entropies of the shape "
                f"{shape} and an auxiliary loss."
            )
        return result

    def _packed_forward(self, model: torch.nn.Module, call: ForwardCall, num_packs: int, max_rows: int) -> Forward:
        """TRL's forward for a plain call, without the padding: zero where there is some."""
        completion = call.attention_mask[:, -call.logits_to_keep :].bool()
        packs = make_packs(call.attention_mask, completion, num_packs, max_rows)
        logps, entropies = (torch.zeros(completion.shape, device=completion.device) for _ in range(2))
        for pack in packs:
            packed = call.packed(pack, completion)
            packed_logps, packed_entropies, _ = self._forward(model, packed)
            logps = pack.scatter_completion(packed_logps, logps)
            entropies = pack.scatter_completion(packed_entropies, entropies)
        return logps, entropies, None

    def _get_per_token_logps_and_entropies(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Forward:
        if self._instead_of_forward is not None:
            return self._instead_of_forward(ForwardCall.of(args, kwargs))
        if self._generation_forwards is None or model is not self.model or not self._selects():
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        kwargs = {**kwargs, "compute_entropy": True}
        call = ForwardCall.of(args, kwargs)
        random_state = _random_state(self.accelerator.device)
        if self._skips(call):
            rows = call.kwargs.get("batch_size") or len(call.input_ids)
            forward = self._packed_forward(model, call, -(-len(call.input_ids) // rows), rows)
        else:
            forward = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if torch.equal(random_state, _random_state(self.accelerator.device)):
            # With dropout the loss compares two draws, the rollouts' and its own, so this one cannot stand for both.
            self._generation_forwards.append(forward)
        return forward

    @contextmanager
    def _replaced_forward(self, replacement: Callable[[ForwardCall], Forward]) -> Iterator[None]:
        self._instead_of_forward = replacement
        try:
            yield
        finally:
            self._instead_of_forward = None

    # TRL's other seams

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        """
        TRL's batch and, per answer, `answer_ids` (B,): its number in the generation batch of all processes; where TRL
        ran the policy, without dropout, for old log-probs also `policy_logps` and `policy_entropies` (B, T), of that forward.
        """
        self._generation_forwards = []
        try:
            batch = super()._generate_and_score_completions(inputs)
            forwards = self._generation_forwards
        finally:
            self._generation_forwards = None
        # TRL shuffles the rows and splits them into micro-batches, along every tensor of this length.
        size = len(batch["completion_ids"])
        first = self.accelerator.process_index * size
        batch["answer_ids"] = torch.arange(first, first + size, device=batch["completion_ids"].device)
        for logps, entropies, _ in forwards:
            if logps is batch.get("old_per_token_logps"):
                batch["policy_logps"], batch["policy_entropies"] = logps, entropies
        return batch

    @contextmanager
    def _micro_step(self, is_last: bool) -> Iterator[None]:
        """TRL's loss closes its books (adaptive entropy) when gradients are about to be synchronised."""
        state = self.accelerator.gradient_state
        before = state.sync_gradients
        state._set_sync_gradients(is_last)
        try:
            yield
        finally:
            state._set_sync_gradients(before)

    def _sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, reduction="sum")


def _random_state(device: torch.device) -> torch.Tensor:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    return torch.cat([state.flatten() for state in states])


@contextmanager
def _preserved_rng(device: torch.device) -> Iterator[None]:
    if device.type in ("cpu", "mps"):
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            yield
