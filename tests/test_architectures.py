"""Leaving out rows, columns and padding changes no gradient, whichever way a model counts its positions.

`skip_unselected=False` runs the batch as GRPOTrainer does, in all its rows and columns. Prompts of four lengths: there is
padding on the left to be left out. `test_inputs.py`, `test_context.py` and `test_eq2.py` hold the gradient to Eq. 2.
"""

import pytest
import torch
import transformers
from packaging.version import Version
from peft import IA3Config, PrefixTuningConfig, PromptTuningConfig
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
)

from harness import EOS, PAD, load_policy, off_policy, policy_config, relative_error


VOCABULARY = policy_config().vocab_size
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
NO_DROPOUT = {"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0}


def decoder(config_class, **changes):
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.35,
    }
    shape = TOKENS | shape | changes
    return config_class(
        **{name: value for name, value in shape.items() if value is not None or name == "bos_token_id"}
    )


def scaled(config_class, kind: str, **settings):
    """With rotary scaling from 16 tokens on; the batches are wider."""
    name = "rope_parameters" if Version(transformers.__version__) >= Version("5") else "rope_scaling"
    theta = {"rope_theta": 10000.0} if name == "rope_parameters" else {}
    return decoder(config_class, **{name: {"rope_type": kind} | settings | theta})


ARCHITECTURES = {
    # Learned positions: by column (GPT-2), by the attention mask (OPT)
    "gpt2": lambda: GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **TOKENS
    ),
    "gpt_neo": lambda: GPTNeoConfig(
        hidden_size=32,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=4,
        window_size=8,
        max_position_embeddings=64,
        initializer_range=0.35,
        **NO_DROPOUT,
        **TOKENS,
    ),
    "opt": lambda: OPTConfig(
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        init_std=0.35,
        dropout=0.0,
        attention_dropout=0.0,
        **TOKENS,
    ),
    # Distances in the attention scores
    "bloom": lambda: BloomConfig(hidden_size=32, n_layer=2, n_head=4, initializer_range=0.35, **TOKENS),
    "falcon, alibi": lambda: FalconConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, initializer_range=0.35, **TOKENS
    ),
    # A state that runs along the row: from the padding too, were it not masked
    "mamba": lambda: MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.35, **TOKENS),
    "lfm2": lambda: decoder(Lfm2Config, layer_types=["conv", "full_attention"]),
    # Rotary embeddings
    "gpt_neox": lambda: decoder(GPTNeoXConfig, num_key_value_heads=None, head_dim=None),
    "llama": lambda: decoder(LlamaConfig),
    "qwen2": lambda: decoder(Qwen2Config, head_dim=None),
    "granite": lambda: decoder(GraniteConfig, logits_scaling=2.0, head_dim=None),
    "mistral, sliding window": lambda: decoder(MistralConfig, sliding_window=6),
    "gemma3": lambda: decoder(Gemma3TextConfig, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    "gpt_oss": lambda: decoder(GptOssConfig, sliding_window=8, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: decoder(
        DeepseekV3Config,
        num_key_value_heads=4,
        head_dim=None,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=2,
    ),
    # Rotary embeddings that stretch, by a fixed factor or by how wide the batch is
    "llama, yarn": lambda: scaled(LlamaConfig, "yarn", factor=4.0, original_max_position_embeddings=16),
    "llama, dynamic": lambda: scaled(LlamaConfig, "dynamic", factor=4.0, original_max_position_embeddings=16),
    "phi3, longrope": lambda: decoder(
        Phi3Config,
        original_max_position_embeddings=16,
        head_dim=None,
        **(
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0] * 4,
                    "long_factor": [4.0] * 4,
                    "original_max_position_embeddings": 16,
                }
            }
            if Version(transformers.__version__) >= Version("5")
            else {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}}
        ),
    ),
}


def built(name: str):
    torch.manual_seed(0)
    config = ARCHITECTURES[name]()
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except ValueError:  # has eager attention only
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, EOS
    return model.float()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_skipping_what_is_not_selected_changes_no_gradient(run, name):
    options = {"rows": 4, "router_aux_loss_coef": 0.0, "inject": off_policy(old=0.3)}
    whole = run(model=built(name), skip_unselected=False, **options)
    skipping = run(model=built(name), **options)
    assert skipping.logs[0]["gmts/kept_tokens"] == whole.logs[0]["gmts/kept_tokens"]
    assert relative_error(skipping.gradient, whole.gradient) < 2e-5


def test_within_the_original_context_scaled_models_are_skipped_as_any_other(run):
    """Dynamic scaling starts past it: narrower batches are cut down, and the gradient is the same."""

    def model():
        config = scaled(LlamaConfig, "dynamic", factor=4.0)  # from 64 tokens on
        torch.manual_seed(0)
        policy = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        policy.generation_config.pad_token_id, policy.generation_config.eos_token_id = PAD, EOS
        return policy.float()

    whole = run(model=model(), rows=4, skip_unselected=False)
    skipping = run(model=model(), rows=4, watch_forwards=True)
    widths = [forward["input_ids"].size(1) for forward in skipping.forwards]
    batch = skipping.steps[0].micro_batches[0]
    assert max(widths) < batch["prompt_ids"].size(1) + batch["completion_ids"].size(1)
    assert relative_error(skipping.gradient, whole.gradient) < 2e-5


ADAPTERS = {
    "prompt tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix tuning": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "ia3": lambda: IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "up_proj"], feedforward_modules=["up_proj"]
    ),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_skipping_changes_no_gradient_of_other_adapters(run, model_dir, adapter):
    def take(**options):
        torch.manual_seed(0)
        peft = {"peft_config": ADAPTERS[adapter]()}
        return run(model=load_policy(model_dir), rows=4, trainer_arguments=peft, **options)

    whole, skipping = take(skip_unselected=False), take()
    assert relative_error(skipping.gradient, whole.gradient) < 1e-6
