"""A tiny random Gemma 3 as a real checkpoint: layers with a sliding window, and layers that see everything.

vLLM puts the two kinds into KV cache groups of their own, here three groups of two layers that share two tensors. As in
`checkpoint`, the weights are drawn wide enough for one wrong KV block to change the answer; the norms of the model keep
the hidden states small all the same.
"""

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from checkpoint import save_checkpoint

VOCAB_SIZE: Final = 512
SLIDING_WINDOW: Final = 256
LAYER_TYPES: Final = ("sliding_attention", "sliding_attention", "full_attention") * 2
NUM_GROUPS: Final = 3
NUM_HEADS: Final = 4
NUM_KV_HEADS: Final = 2
HEAD_SIZE: Final = 32  # the smallest head that vLLM's CPU attention takes
HIDDEN_SIZE: Final = NUM_HEADS * HEAD_SIZE
MLP_SIZE: Final = 2 * HIDDEN_SIZE
MAX_TOKENS: Final = 2048
WEIGHT_DEVIATION: Final = 0.15


def write_gemma_checkpoint(directory: Path, *, seed: int = 0) -> Path:
    """Write ``config.json`` and ``model.safetensors`` into a new directory; see `checkpoint.write_checkpoint`."""
    return save_checkpoint(directory, _config(), _weights(np.random.default_rng(seed)))


def _config() -> dict[str, object]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": MLP_SIZE,
        "num_hidden_layers": len(LAYER_TYPES),
        "layer_types": LAYER_TYPES,
        "sliding_window": SLIDING_WINDOW,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_SIZE,
        "query_pre_attn_scalar": HEAD_SIZE,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_TOKENS,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def _weights(rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    def normal(rows: int, columns: int) -> NDArray[np.float32]:
        return rng.normal(0.0, WEIGHT_DEVIATION, (rows, columns)).astype(np.float32)

    def norm(size: int) -> NDArray[np.float32]:
        return np.zeros(size, np.float32)  # Gemma's norms multiply by 1 + weight

    kv_size = NUM_KV_HEADS * HEAD_SIZE
    weights = {"model.embed_tokens.weight": normal(VOCAB_SIZE, HIDDEN_SIZE)}
    for layer in range(len(LAYER_TYPES)):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": norm(HIDDEN_SIZE),
            f"{name}.self_attn.q_proj.weight": normal(HIDDEN_SIZE, HIDDEN_SIZE),
            f"{name}.self_attn.k_proj.weight": normal(kv_size, HIDDEN_SIZE),
            f"{name}.self_attn.v_proj.weight": normal(kv_size, HIDDEN_SIZE),
            f"{name}.self_attn.o_proj.weight": normal(HIDDEN_SIZE, HIDDEN_SIZE),
            f"{name}.self_attn.q_norm.weight": norm(HEAD_SIZE),
            f"{name}.self_attn.k_norm.weight": norm(HEAD_SIZE),
            f"{name}.post_attention_layernorm.weight": norm(HIDDEN_SIZE),
            f"{name}.pre_feedforward_layernorm.weight": norm(HIDDEN_SIZE),
            f"{name}.post_feedforward_layernorm.weight": norm(HIDDEN_SIZE),
            f"{name}.mlp.gate_proj.weight": normal(MLP_SIZE, HIDDEN_SIZE),
            f"{name}.mlp.up_proj.weight": normal(MLP_SIZE, HIDDEN_SIZE),
            f"{name}.mlp.down_proj.weight": normal(HIDDEN_SIZE, MLP_SIZE),
        }
    return weights | {"model.norm.weight": norm(HIDDEN_SIZE)}
