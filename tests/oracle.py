"""Eq. 2 of GMTS (arXiv 2608.30632), computed from the paper: full logits, float64, plain autograd, no TRL.

One answer at a time and unpadded, so nothing here can depend on how a step was cut. The score uses the paper's closed
form of omega; the gradient is autograd of the objective over the kept tokens. Two derivations that have to meet.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch


TIE = 1e-9  # float64 noise between equal scores; `Oracle.gap` says how near the next score is to the threshold
LIMIT = 2e-5  # relative error allowed: TRL's fused LM head works in float32


@dataclass
class Settings:
    temperature: float = 1.0
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0
    loss: str = "dapo"  # or "grpo", "dr_grpo", "cispo"
    max_length: int = 16  # of dr_grpo
    score: str = "gmts"  # or "entropy"
    ratio: float = 0.2
    scope: str = "batch"  # or "group", "sequence"
    base: str = "all"  # or "scored"
    bottom: bool = False
    normalize: bool = True


@dataclass(eq=False)
class Answer:
    """One row of the step: what the oracle needs of it, unpadded. T is the length of the answer."""

    prompt: list[int]
    padding: int  # how far the prompt was padded on the left
    ids: torch.Tensor  # (T,)
    trainable: torch.Tensor  # bool (T,)
    advantage: torch.Tensor  # (T,)
    old: torch.Tensor | None  # (T,)
    ref: torch.Tensor | None  # (T,)


@dataclass
class Oracle:
    """What Eq. 2 says about one optimizer step. Per-token values are lists with one (T,) tensor for each answer."""

    gradient: torch.Tensor
    value: float
    answers: list[Answer]
    entropy: list[torch.Tensor]
    omega: list[torch.Tensor]
    delta: list[torch.Tensor]
    kept: list[torch.Tensor]
    tau: list[float]  # one for each segment
    budget: int  # sum of k over segments
    tokens: int  # N
    denominator: int
    gap: float  # relative distance from tau to the nearest score that is not equal to it

    def of_trainable(self, values: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([v[a.trainable] for v, a in zip(values, self.answers, strict=True)])


def answers_of(micro_batches: list[dict]) -> list[Answer]:
    """Rows of TRL's micro-batches without their padding. Rows whose answer is masked whole stay, with T = 0."""
    answers = []
    for batch in micro_batches:
        for i in range(batch["completion_ids"].size(0)):
            real = batch["completion_mask"][i].bool()
            trainable = batch["completion_mask"][i].bool()
            if "tool_mask" in batch:
                trainable = trainable & batch["tool_mask"][i].bool()
            advantage = batch["advantages"][i]
            if advantage.dim() == 0:
                advantage = advantage.expand(real.size(0))
            optional = {
                name: batch[key][i][real].double() if key in batch else None
                for name, key in (("old", "old_per_token_logps"), ("ref", "ref_per_token_logps"))
            }
            answers.append(
                Answer(
                    prompt=batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist(),
                    padding=int((batch["prompt_mask"][i] == 0).sum()),
                    ids=batch["completion_ids"][i][real],
                    trainable=trainable[real],
                    advantage=advantage[real].double(),
                    **optional,
                )
            )
    return answers


def logps_and_entropy(
    model, answer: Answer, temperature: float, padded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T,), (T,): log-prob of each token of the answer; entropy, in nats, of the distribution it was drawn from."""
    start, length = len(answer.prompt), answer.ids.numel()
    row = torch.tensor([answer.prompt + answer.ids.tolist()])
    positions = torch.arange(row.size(1))[None] + (answer.padding if padded else 0)
    logits = model(input_ids=row, attention_mask=torch.ones_like(row), position_ids=positions).logits
    logits = logits[0, start - 1 : start + length - 1]
    log_p = torch.log_softmax(logits.double() / temperature, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, answer.ids[:, None]).squeeze(1), entropy


def paper_omega(logp, old, ref, advantage, settings: Settings) -> torch.Tensor:
    """omega = r A 1[not clipped] + beta (pi_ref / pi - 1), in closed form; for CISPO min(r, 1 + eps2) A."""
    ratio = (logp - old).exp()
    if settings.loss == "cispo":
        return ratio.clamp(max=settings.epsilon_high) * advantage  # TRL's epsilon_high is CISPO's 1 + eps2
    clipped = ((advantage > 0) & (ratio > 1 + settings.epsilon_high)) | (
        (advantage < 0) & (ratio < 1 - settings.epsilon_low)
    )
    omega = ratio * advantage * (~clipped).double()
    if settings.beta:
        omega = omega + settings.beta * ((ref - logp).exp() - 1)
    return omega


def objective(logp, old, ref, advantage, settings: Settings) -> torch.Tensor:
    """ell of each token: the clipped surrogate minus beta times the k3 estimate of the KL divergence."""
    ratio = (logp - old).exp()
    if settings.loss == "cispo":
        return ratio.detach().clamp(max=settings.epsilon_high) * advantage * logp
    ell = torch.min(ratio * advantage, ratio.clamp(1 - settings.epsilon_low, 1 + settings.epsilon_high) * advantage)
    if settings.beta:
        ell = ell - settings.beta * ((ref - logp).exp() - (ref - logp) - 1)
    return ell


def token_weight(answer: Answer, answers: list[Answer], settings: Settings) -> float:
    """
    What a loss puts in front of each token of an answer, relative to the mean over all tokens of the step: 1 for the
    dapo family; GRPO averages over the tokens of an answer first; Dr. GRPO divides by a fixed length.
    """
    tokens = sum(int(a.trainable.sum()) for a in answers)
    if settings.loss == "grpo":
        return tokens / (len(answers) * max(int(answer.trainable.sum()), 1))
    if settings.loss == "dr_grpo":
        return tokens / (len(answers) * settings.max_length)
    return 1.0


def ceil_of(ratio: float, count: int) -> int:
    """ceil(rho N) with rho read as it is written in decimal."""
    return math.ceil(Fraction(str(ratio)) * count)


def segments_of(answers: list[Answer], scope: str) -> list[list[int]]:
    rows = range(len(answers))
    if scope == "batch":
        return [list(rows)]
    if scope == "sequence":
        return [[i] for i in rows]
    assert scope == "group"
    groups: dict[tuple, list[int]] = {}
    for i in rows:
        groups.setdefault(tuple(answers[i].prompt), []).append(i)
    return list(groups.values())


def select(delta: list[torch.Tensor], answers: list[Answer], settings: Settings):
    """kept, tau, budget, denominator, gap. Sorting and comparing; nothing clever."""
    kept = [torch.zeros_like(a.trainable) for a in answers]
    taus, budget, denominator, gap = [], 0, 0, math.inf
    for rows in segments_of(answers, settings.scope):
        counted = torch.cat([delta[i][answers[i].trainable] for i in rows])
        finite = counted[counted.isfinite()]
        if settings.base == "scored":
            counted = finite = finite[finite > 0]
        k = ceil_of(settings.ratio, counted.numel())
        budget += k
        if finite.numel() == 0:
            taus.append(math.nan)
            denominator += k
            continue
        ranked = finite.sort(descending=not settings.bottom).values
        tau = ranked[min(k, finite.numel()) - 1].item()
        taus.append(tau)
        number = 0
        for i in rows:
            if settings.bottom:
                keep = delta[i] <= tau * (1 + TIE)
            else:
                keep = delta[i] >= tau * (1 - TIE)
                if settings.ratio < 1:
                    keep = keep & (delta[i] > 0)
            if settings.base == "scored":
                keep = keep & (delta[i] > 0)
            kept[i] = keep & answers[i].trainable & delta[i].isfinite()
            number += int(kept[i].sum())
        denominator += max(number, k)
        if tau > 0:
            distance = (finite - tau).abs() / tau
            others = distance[distance > TIE]
            gap = min([gap, *others.tolist()])
    return kept, taus, budget, denominator, gap


def eq2(model, micro_batches: list[dict], settings: Settings, *, kept=None, all_tokens=None, padded=False) -> Oracle:
    """
    The gradient that the paper's Eq. 2 gives one optimizer step, as the gradient of the loss (its negative).

    Args:
        model: plain causal LM with the weights of that step, float64.
        kept: another selection than the oracle's own, as a list with one bool (T,) for each row.
        all_tokens: the denominator without `normalize`, where it is not the number of tokens of the step.
        padded: number the positions of each row from where TRL's padding on the left starts, as TRL itself does.
    """
    model.zero_grad()
    answers = answers_of(micro_batches)
    logps, entropies, omegas, deltas, olds, weights = [], [], [], [], [], []
    for answer in answers:
        logp, entropy = logps_and_entropy(model, answer, settings.temperature, padded)
        old = logp.detach() if answer.old is None else answer.old
        omega = paper_omega(logp.detach(), old, answer.ref, answer.advantage, settings)
        entropy = entropy.detach()
        weight = token_weight(answer, answers, settings)
        score = entropy * omega * weight if settings.score == "gmts" else entropy
        # Nothing that enters ell may be other than a number, even where omega would be one (ref = -inf, say)
        read = [logp.detach(), entropy, old, omega] + ([answer.ref] if settings.beta else [])
        unscorable = ~torch.stack([tensor.isfinite() for tensor in read]).all(0)
        deltas.append(score.abs().masked_fill(unscorable, math.nan))
        logps.append(logp)
        entropies.append(entropy)
        omegas.append(omega)
        olds.append(old)
        weights.append(weight)
    own, taus, budget, denominator, gap = select(deltas, answers, settings)
    kept = own if kept is None else kept
    tokens = sum(int(a.trainable.sum()) for a in answers)
    total = sum(logp[:0].sum() for logp in logps)
    for i, (answer, mask) in enumerate(zip(answers, kept, strict=True)):
        # Taken out before anything is computed with it: a token that is not kept may be no number at all
        ref = None if answer.ref is None else answer.ref[mask]
        ell = objective(logps[i][mask], olds[i][mask], ref, answer.advantage[mask], settings)
        total = total + weights[i] * ell.sum()
    loss = -total / max(denominator if settings.normalize else (all_tokens or tokens), 1)
    loss.backward()
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    return Oracle(
        gradient=gradient.double(),
        value=loss.item(),
        answers=answers,
        entropy=entropies,
        omega=omegas,
        delta=deltas,
        kept=kept,
        tau=taus,
        budget=budget,
        tokens=tokens,
        denominator=denominator,
        gap=gap,
    )


def model_with(weights: dict[str, torch.Tensor], config, model_class=None):
    """A plain model, untouched by any trainer, with the weights of a recorded step."""
    if model_class is None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    else:
        model = model_class(config)
    model = model.double()
    model.load_state_dict(weights)
    return model.eval()
