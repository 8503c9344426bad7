"""Selection never narrows the context: every token is trained with what GRPO shows the model before it."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from trl import GRPOTrainer

import harness
from harness import EOS, PAD, relative_error, tokenizer
from oracle import LIMIT, Settings, eq2, model_with
from trl_gmts import GMTSGRPOTrainer


VARIANTS = {
    "default": {},
    "cut": {"rows": 4},
    "few tokens": {"selection_ratio": 0.05},
    "tool tokens": {"tool_tokens": True, "rows": 4},
    "padded": {"pad_to_multiple_of": 16, "rows": 8},
    "sequence scope": {"selection_scope": "sequence", "rows": 2},
}


def visible_rows(forwards: list[dict]) -> list[tuple[int, ...]]:
    """What the model sees of each row, as token ids. The visible part has to be one block, or something is cut out."""
    rows = []
    for forward in forwards:
        for ids, mask in zip(forward["input_ids"], forward["attention_mask"], strict=True):
            shown = mask.nonzero().squeeze(1)
            if len(shown):
                assert torch.equal(shown, torch.arange(shown[0], shown[-1] + 1)), (
                    f"holes in the attention mask: {mask}"
                )
            rows.append(tuple(ids[shown].tolist()))
    return rows


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kept_token_sees_what_grpo_shows_it(run, variant):
    arguments = VARIANTS[variant]
    grpo_arguments = {k: v for k, v in arguments.items() if not k.startswith("selection_")}
    grpo = visible_rows(run(GRPOTrainer, watch_forwards=True, **grpo_arguments).forwards)
    found = run(GMTSGRPOTrainer, watch_forwards=True, **arguments)
    gmts = visible_rows(found.forwards)
    assert len(grpo) == harness.ROWS and len(gmts) > 0

    # Nothing is shown that GRPO does not show, from the first token of the prompt on.
    for row in gmts:
        assert any(whole[: len(row)] == row for whole in grpo), f"GRPO shows the model no such row: {row}"

    # Every kept token is among what is shown.
    settings = Settings(ratio=arguments.get("selection_ratio", 0.2), scope=arguments.get("selection_scope", "batch"))
    step = found.steps[0]
    expected = eq2(model_with(step.weights, harness.policy_config()), step.micro_batches, settings)
    needed = []
    for answer, kept in zip(expected.answers, expected.kept, strict=True):
        if kept.any():
            last = kept.nonzero().max().item()
            needed.append(tuple(answer.prompt + answer.ids[: last + 1].tolist()))
    assert needed
    unused = sorted(gmts, key=len)
    for prefix in sorted(needed, key=len, reverse=True):
        row = next((row for row in reversed(unused) if row[: len(prefix)] == prefix), None)
        assert row is not None, f"a kept token was not trained with its context: {prefix}"
        unused.remove(row)


def absolute_policy(seed: int = 0):
    """A policy with learned absolute positions: it notices when a token moves, which rotary positions do not."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer()),
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.35,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return GPT2LMHeadModel(config).double()


def positions_of_tokens(found) -> list[tuple]:
    """Train `found`, a built run, and record (visible ids, their positions) of every row that is run with gradient."""
    seen, current = [], {}
    decoder = found.trainer.accelerator.unwrap_model(found.trainer.model).base_model

    def see_tokens(module, args, kwargs):
        current.clear()
        if torch.is_grad_enabled() and found.trainer.model.training:
            current.update({"input_ids": args[0] if args else None} | kwargs)

    def see_positions(module, args, kwargs):
        if current:
            ids, mask = current["input_ids"], current["attention_mask"]
            positions = kwargs["position_ids"] if "position_ids" in kwargs else args[-1]
            for row, shown, where in zip(ids, mask.bool(), positions.expand_as(ids), strict=True):
                seen.append((tuple(row[shown].tolist()), tuple(where[shown].tolist())))

    decoder.register_forward_pre_hook(see_tokens, with_kwargs=True)
    embedding = decoder.wpe if hasattr(decoder, "wpe") else decoder.rotary_emb
    embedding.register_forward_pre_hook(see_positions, with_kwargs=True)
    found.trainer.train()
    return seen


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("arguments", [{}, {"rows": 4}, {"rows": 4, "pad_to_multiple_of": 8}], ids=str)
def test_positions_are_those_of_grpo(run, arguments, positions):
    """Each token has the position that it has in GRPO, counted from the same place, whatever padding is trimmed."""
    model = {"learned": absolute_policy, "rotary": lambda: None}[positions]
    grpo = positions_of_tokens(run(GRPOTrainer, model=model(), train=False, **arguments))
    gmts = positions_of_tokens(run(GMTSGRPOTrainer, model=model(), train=False, **arguments))
    assert len(grpo) == harness.ROWS and gmts
    assert {places[0] for _, places in grpo} != {0}, "no padding on the left: nothing to get wrong"
    whole_rows = dict(grpo)
    for row, places in gmts:
        whole = next(key for key in whole_rows if key[: len(row)] == row)
        assert places == whole_rows[whole][: len(row)]


@pytest.mark.parametrize("arguments", [{}, {"rows": 4}, {"rows": 4, "pad_to_multiple_of": 8}], ids=str)
def test_gradient_with_absolute_positions_is_that_of_eq2(run, arguments):
    """As in `test_eq2`, with positions that count: the oracle runs the rows padded as TRL padded them."""
    found = run(model=absolute_policy(), **arguments)
    step = found.steps[0]
    model = model_with(step.weights, absolute_policy().config)
    expected = eq2(model, step.micro_batches, Settings(), padded=True)
    assert expected.gap > 1e-4
    assert relative_error(step.gradient, expected.gradient) < LIMIT
    unpadded = eq2(model, step.micro_batches, Settings())
    assert relative_error(step.gradient, unpadded.gradient) > 1e-2, "positions do not matter in this case"
