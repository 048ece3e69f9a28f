"""Models of the shapes of known ones, with random weights, on which time does not depend."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from lpes_eval import reference

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES = {
    "tiny": (64, 128, 4, 4, 4),
    "small": (512, 1376, 8, 8, 8),
    "vicuna-7b": (4096, 11008, 32, 32, 32),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4),
}
"""Where several heads share keys a Qwen2, else a Llama."""


def build(name: str, device: str, dtype: str) -> Any:
    """The model of a shape with random weights, or a model from a folder or the Hub."""
    if name not in SHAPES:
        return AutoModelForCausalLM.from_pretrained(reference.folder(name), dtype=dtype).to(device).eval()
    sizes = dict(zip(SIZES, SHAPES[name], strict=True))
    grouped = sizes["num_key_value_heads"] < sizes["num_attention_heads"]
    kind, vocabulary = (Qwen2Config, 152064) if grouped else (LlamaConfig, 32000)
    config = kind(vocab_size=vocabulary, max_position_embeddings=65536, tie_word_embeddings=False, **sizes)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
