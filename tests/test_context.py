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


def positions_of_tokens(found, embedding_name: str = "wpe") -> list[dict]:
    """Run `found`, a built but not yet trained run, and record (visible ids, positions) of every row with gradient."""
    seen, current = [], {}
    decoder = found.trainer.accelerator.unwrap_model(found.trainer.model).base_model

    def see_tokens(module, args, kwargs):
        current.clear()
        if torch.is_grad_enabled() and found.trainer.model.training:
            current.update(kwargs)
            current["input_ids"] = kwargs.get("input_ids", args[0] if args else None)

    def see_positions(module, args, output):
        if current:
            ids, mask = current["input_ids"], current["attention_mask"]
            positions = args[0].expand_as(ids)
            for row, shown, where in zip(ids, mask.bool(), positions, strict=True):
                seen.append((tuple(row[shown].tolist()), tuple(where[shown].tolist())))

    decoder.register_forward_pre_hook(see_tokens, with_kwargs=True)
    getattr(decoder, embedding_name).register_forward_hook(see_positions)
    found.trainer.train()
    return seen


@pytest.mark.parametrize("arguments", [{}, {"rows": 4}, {"rows": 4, "pad_to_multiple_of": 8}], ids=str)
def test_absolute_positions_are_those_of_grpo(run, arguments):
    """With learned positions each token has the position that it has in GRPO, whatever padding is trimmed."""
    grpo = positions_of_tokens(run(GRPOTrainer, model=absolute_policy(), train=False, **arguments))
    gmts = positions_of_tokens(run(GMTSGRPOTrainer, model=absolute_policy(), train=False, **arguments))
    assert len(grpo) == harness.ROWS and gmts
    assert {positions[0] for _, positions in grpo} != {0}, "no padding on the left: nothing to get wrong"
    starts = dict(grpo)
    for row, positions in gmts:
        whole = next(key for key in starts if key[: len(row)] == row)
        assert positions == starts[whole][: len(row)]


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
