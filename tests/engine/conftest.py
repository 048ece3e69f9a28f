"""A small model with definite opinions."""

import pytest

LAYERS = 3


@pytest.fixture(scope="session")
def toy_lm(tmp_path_factory):
    """An ``lpes`` model: a Llama with large random weights, so that factors change answers and ties do not occur."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from benchmarks.reference import tokenizer
    from lpes_eval.methods.lpes import LPES

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder, 1024)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.25,
        pad_token_id=tokenizer.PAD_ID,
        eos_token_id=tokenizer.END_ID,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    return LPES(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=5, device="cpu")
