"""A tiny random Llama, written as a real checkpoint that vLLM loads from disk.

vLLM's own dummy weights are so small that every hidden state is about the same: the log-probabilities then do not
depend on the KV cache, and a test that compares them proves nothing. Weights drawn from a normal distribution with a
deviation of 0.15 make attention matter, so that one wrong KV block changes the answer.
"""

import json
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

VOCAB_SIZE: Final = 512
NUM_LAYERS: Final = 4
NUM_HEADS: Final = 4
NUM_KV_HEADS: Final = 2
HEAD_SIZE: Final = 32  # the smallest head that vLLM's CPU attention takes
HIDDEN_SIZE: Final = NUM_HEADS * HEAD_SIZE
MLP_SIZE: Final = 2 * HIDDEN_SIZE
MAX_TOKENS: Final = 1024
WEIGHT_DEVIATION: Final = 0.15
BYTES_PER_VALUE: Final = 4


def block_bytes(block_size: int) -> int:
    """Return the bytes of KV cache that this model keeps for one block of ``block_size`` tokens, over all layers."""
    keys_and_values = 2
    return block_size * NUM_LAYERS * keys_and_values * NUM_KV_HEADS * HEAD_SIZE * BYTES_PER_VALUE


def write_checkpoint(directory: Path, *, seed: int = 0) -> Path:
    """Write ``config.json`` and ``model.safetensors`` into a new directory.

    Args:
        directory: Where to write; its last component becomes the model name in every pool key.
        seed: Of the weights. Equal seeds give equal bytes on every machine.

    Returns:
        ``directory``.
    """
    return save_checkpoint(directory, _config(), _weights(np.random.default_rng(seed)))


def save_checkpoint(directory: Path, config: dict[str, object], weights: dict[str, NDArray[np.float32]]) -> Path:
    """Write a configuration and weights into a new directory, and return it."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": MLP_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_TOKENS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def _weights(rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    def normal(rows: int, columns: int) -> NDArray[np.float32]:
        return rng.normal(0.0, WEIGHT_DEVIATION, (rows, columns)).astype(np.float32)

    ones = np.ones(HIDDEN_SIZE, np.float32)
    kv_size = NUM_KV_HEADS * HEAD_SIZE
    weights = {"model.embed_tokens.weight": normal(VOCAB_SIZE, HIDDEN_SIZE)}
    for layer in range(NUM_LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": ones,
            f"{name}.self_attn.q_proj.weight": normal(HIDDEN_SIZE, HIDDEN_SIZE),
            f"{name}.self_attn.k_proj.weight": normal(kv_size, HIDDEN_SIZE),
            f"{name}.self_attn.v_proj.weight": normal(kv_size, HIDDEN_SIZE),
            f"{name}.self_attn.o_proj.weight": normal(HIDDEN_SIZE, HIDDEN_SIZE),
            f"{name}.post_attention_layernorm.weight": ones,
            f"{name}.mlp.gate_proj.weight": normal(MLP_SIZE, HIDDEN_SIZE),
            f"{name}.mlp.up_proj.weight": normal(MLP_SIZE, HIDDEN_SIZE),
            f"{name}.mlp.down_proj.weight": normal(HIDDEN_SIZE, MLP_SIZE),
        }
    return weights | {"model.norm.weight": ones, "lm_head.weight": normal(VOCAB_SIZE, HIDDEN_SIZE)}
