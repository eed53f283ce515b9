"""Tiny decoder-only models of every family that people fine-tune, from their configs."""

from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM

VOCABULARY = 64
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
TABLE = {
    "qwen2": ("Qwen2Config", {}),
    "qwen2 window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": 12}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 12, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.3}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {"sliding_window": 12}),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2Config", {"logit_scale": 0.25, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}),
    "stablelm": ("StableLmConfig", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 12}),
    "qwen2 moe": ("Qwen2MoeConfig", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}),
    "qwen3 moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 4, "head_dim": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral balanced": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "glm": ("GlmConfig", {"head_dim": 8}),
    "glm4": ("Glm4Config", {"head_dim": 8}),
    "exaone4": ("Exaone4Config", {"sliding_window": 12}),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 8}),
    "ernie4.5": ("Ernie4_5Config", {"head_dim": 8}),
    "nemotron": ("NemotronConfig", {}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt-neo": ("GPTNeoConfig", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 12}),
    "gptj": ("GPTJConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4}),
    "gpt-bigcode": ("GPTBigCodeConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "codegen": ("CodeGenConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4}),
    "falcon": ("FalconConfig", {}),
    "falcon alibi": ("FalconConfig", {"alibi": True}),
    "mpt": ("MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "mamba": ("MambaConfig", {"state_size": 4}),
    "mamba2": ("Mamba2Config", {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2}),
    "rwkv": ("RwkvConfig", {"attention_hidden_size": 32, "context_length": 128}),
    "jamba": ("JambaConfig", {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4}),
    "bamba": ("BambaConfig", {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4}),
    "recurrent gemma": ("RecurrentGemmaConfig", {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 12}),
    "qwen3 next": ("Qwen3NextConfig", {**EXPERTS, "num_experts": 4, "head_dim": 8, "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "granite hybrid": ("GraniteMoeHybridConfig", {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 16}),
    "falcon h1": ("FalconH1Config", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4}),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}),
    "deepseek v3": ("DeepseekV3Config", {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 16, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4, "first_k_dense_replace": 1, "num_key_value_heads": 4}),
    "llama4": ("Llama4TextConfig", {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "interleave_moe_layer_step": 2, "attention_chunk_size": 12, "pad_token_id": 0}),
    "minimax": ("MiniMaxConfig", {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"], "block_size": 16}),
}  # fmt: skip


INTERFACE = "its attention does not go through transformers' attention interface"
STATE = "its layers carry a state from each token to the next, across rows"
REFUSED = {
    **dict.fromkeys(("gpt-neo", "gptj", "codegen", "falcon", "falcon alibi", "mpt", "bloom"), INTERFACE),
    **dict.fromkeys(("mamba", "mamba2", "rwkv", "jamba", "bamba", "recurrent gemma", "qwen3 next"), STATE),
    **dict.fromkeys(("granite hybrid", "falcon h1"), STATE),
    "lfm2": "it has layers of the kind 'conv', which see tokens of other rows",
    "llama4": "it has layers of the kind 'chunked_attention', which see tokens of other rows",
    "minimax": "it has layers of the kind 'linear_attention', which see tokens of other rows",
    "mixtral balanced": "the loss that balances its experts (output_router_logits) depends on all rows of a micro-batch",
}
"""Families that are trained padded, and why."""
EXACT = [name for name in TABLE if name not in REFUSED]


def build(name, dtype=torch.float64, **changes):
    """A tiny model of this family, in evaluation mode, with every weight drawn at random."""
    config_name, more = TABLE[name]
    config = getattr(transformers, config_name)(**{**SHAPE, **more, **changes})
    config._experts_implementation = "eager"  # the grouped product has no float64
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # sdpa leaves the cap out in transformers 5.17
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # also biases and norms, which begin as zeros and ones
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def draw_rows(seed=1, lengths=(1, 5, 30, 2, 17, 30, 9)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).numpy() for length in lengths]


def loss_alone(model, rows, labels=None):
    """Each row by itself in the model's own forward."""
    total = 0.0
    for row, label in zip(map(torch.as_tensor, rows), map(torch.as_tensor, labels or rows), strict=True):
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        total += F.cross_entropy(logits, label[1:], reduction="sum")
    return total


def gradients(loss, model):
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.autograd.grad(loss, params, allow_unused=True)


def difference(some, others):
    """The largest between gradients, relative to their own norm, or to a thousandth of that of all where it is smaller."""
    least = 1e-3 * torch.stack([one.norm() for one in others if one is not None]).norm()
    assert [one is None for one in some] == [one is None for one in others]
    pairs = [(one, other) for one, other in zip(some, others, strict=True) if one is not None]
    return max((one - other).norm() / max(other.norm(), least) for one, other in pairs).item()


@contextmanager
def in_float64():
    """Without the steps that families do in float32 whatever their weights are in: Gemma's norms, routers, softmax."""
    own = {name: getattr(torch.Tensor, name) for name in ("float", "to", "type")}
    softmax, product = F.softmax, torch.Tensor.__matmul__

    def wide(tensor):
        return tensor.dtype == torch.float64

    def convert(name):
        def method(tensor, *args, **kwargs):
            narrow = name == "float" or torch.float32 in (*args, *kwargs.values())
            return tensor if wide(tensor) and narrow else own[name](tensor, *args, **kwargs)

        return method

    def softmax_in_float64(tensor, *args, **kwargs):
        return softmax(tensor, *args, **{**kwargs, **({"dtype": torch.float64} if wide(tensor) else {})})

    def product_in_float64(tensor, other):
        """In transformers 5.17 that of frequencies, which are wide, and of position numbers."""
        return product(*(one.double() for one in (tensor, other)) if wide(tensor) != wide(other) else (tensor, other))

    converted = {**{name: convert(name) for name in own}, "__matmul__": product_in_float64}
    with mock.patch.multiple(torch.Tensor, **converted), mock.patch.object(F, "softmax", softmax_in_float64):
        yield
