"""A policy that is a lookup table, so that a parameter's gradient names the token that it came from.

A decoder without layers: the next token's distribution depends on the current token alone. The prompts and answers here
never use a token twice, so each answer token is predicted from a row of the embedding of its own, and what reaches that
row is `coefficient * d log-prob / d row + coefficient of the entropy * d entropy / d row` of this one token. So the
coefficients can be read off the gradient that a trainer accumulated, without a look inside of it.
"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from harness import CHARS, EOS, NUM_GENERATIONS, PAD, PROMPTS, Step


LENGTHS = (3, 7, 4, 6, 1, 5, 7, 2, 6, 4, 7, 3, 5, 2, 7, 6)  # of the answers
FIRST = 3 + len(CHARS)  # tokens below spell the texts of the harness and are never used here
VOCABULARY = FIRST + len(LENGTHS) + sum(LENGTHS) + 8


def save_lookup_policy(folder, seed: int = 0) -> str:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=0,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.8,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).double()
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    return str(folder)


def load_lookup_policy(folder: str):
    """Only the table learns."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    return model


class DistinctRollouts:
    """Sixteen answers, the same in each round, without a token that occurs twice (but for eos)."""

    def __init__(self, tool_tokens: bool = False):
        self.tool_tokens = tool_tokens

    def __call__(self, prompts, trainer) -> dict:
        assert len(prompts) == len(LENGTHS)
        prompt_ids, completion_ids, fresh = [], [], iter(range(FIRST, VOCABULARY))
        for row, length in enumerate(LENGTHS):
            padding = [3] * (PROMPTS.index(prompts[row]))  # prompts of several lengths
            prompt_ids.append([*padding, next(fresh)])
            completion_ids.append([next(fresh) for _ in range(length)] + [EOS] * (row % 3 > 0))
        output = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}
        if self.tool_tokens:
            output["env_mask"] = [[int(not 2 <= i < 4) for i in range(len(ids))] for ids in completion_ids]
        return output


@dataclass
class Tokens:
    """The trainable tokens of an optimizer step, N of them, as found in its micro-batches and its gradient."""

    context: torch.Tensor  # int64 (N,): the row of the table that predicts each
    row: torch.Tensor  # int64 (N,): which prompt token its answer started from: a name for the answer
    entropy: torch.Tensor  # (N,)
    coefficient: torch.Tensor  # (N,): of the log-prob, read off the gradient
    entropy_coefficient: torch.Tensor  # (N,)
    gradient: torch.Tensor  # (N, H): what reached the row of the table
    elsewhere: torch.Tensor  # what reached any other row
    logp_gradient: torch.Tensor  # (N, H)
    entropy_gradient: torch.Tensor  # (N, H)


def read_tokens(step: Step, model) -> Tokens:
    """`model`: a plain lookup policy with the weights of the step."""
    contexts, targets, rows = [], [], []
    for batch in step.micro_batches:
        for i in range(len(batch["completion_ids"])):
            ids = torch.cat([batch["prompt_ids"][i, -1:], batch["completion_ids"][i]])
            real = batch["completion_mask"][i].bool()
            if "tool_mask" in batch:
                real = real & batch["tool_mask"][i].bool()
            contexts.append(ids[:-1][real])
            targets.append(ids[1:][real])
            rows.append(ids[:1].expand(int(real.sum())))
    context, target, row = torch.cat(contexts), torch.cat(targets), torch.cat(rows)
    assert context.unique().numel() == context.numel(), "two tokens share a row of the table"

    table = model.get_input_embeddings().weight.detach()[context].requires_grad_()
    log_p = torch.log_softmax(model.lm_head(model.model.norm(table)), dim=-1)
    logp = log_p.gather(1, target[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    (logp_gradient,) = torch.autograd.grad(logp.sum(), table, retain_graph=True)
    (entropy_gradient,) = torch.autograd.grad(entropy.sum(), table)

    gradient = step.gradient.view(VOCABULARY, -1)
    elsewhere = gradient.clone()
    elsewhere[context] = 0
    basis = torch.stack([logp_gradient, entropy_gradient], dim=-1)  # (N, H, 2)
    solution = torch.linalg.lstsq(basis, gradient[context][:, :, None]).solution.squeeze(-1)
    return Tokens(
        context=context,
        row=row,
        entropy=entropy.detach(),
        coefficient=solution[:, 0],
        entropy_coefficient=solution[:, 1],
        gradient=gradient[context],
        elsewhere=elsewhere,
        logp_gradient=logp_gradient,
        entropy_gradient=entropy_gradient,
    )


def group_of(tokens: Tokens) -> torch.Tensor:
    """int64 (N,): number of the prompt, since the answers of a group were numbered in a row."""
    order = tokens.row.unique()
    return torch.searchsorted(order, tokens.row) // NUM_GENERATIONS
