"""vLLM with layer factors answers as transformers does.

Run by ``pytest -m slow tests/test_vllm.py`` in an environment with vLLM (docs/from-model-to-production.md, "Serve").
"""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
PROGRAM = """
import json, sys
import vllm
folder, options = sys.argv[1], json.loads(sys.argv[2])
llm = vllm.LLM(folder, dtype="float32", max_model_len=4096, max_num_seqs=8, **options)
prompts = [{"prompt_token_ids": ids} for ids in json.load(open(f"{folder}/prompts.json"))]
answers = llm.generate(prompts, vllm.SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
print("ANSWERS", json.dumps([list(one.outputs[0].token_ids) for one in answers]))
"""


def made(config):
    """vLLM's rotary module, and transformers' for the same configuration."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        length = int(config.rope_parameters.get("original_max_position_embeddings", config.max_position_embeddings))
        rope = get_rope(16, max_position=length, rope_parameters=config.rope_parameters, dtype=torch.float32)
    return rope, LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layers_table_is_that_of_divided_positions(kind):
    from transformers import LlamaConfig

    from lpes_eval.vllm import scaled

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes, rope_parameters=KINDS[kind] | {"rope_theta": 1e4})
    ours, theirs = made(config)
    before = ours.cos_sin_cache.clone()
    own = scaled(ours, 1.7).cos_sin_cache[:64]
    cos, sin = theirs(torch.empty(1), torch.arange(64)[None] / 1.7)
    assert torch.allclose(own, torch.cat((cos[0, :, :8], sin[0, :, :8]), -1), atol=1e-5)  # float32 angles of up to 64
    assert not torch.allclose(own, before[:64], atol=1e-2)
    assert torch.equal(ours.cos_sin_cache, before)  # it is shared


def test_a_kind_that_was_not_tried_is_refused():
    from lpes_eval.errors import UnsupportedModel
    from lpes_eval.vllm import scaled

    with pytest.raises(UnsupportedModel, match="Linear: layer factors were not tried"):
        scaled(torch.nn.Linear(2, 2), 1.5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The reference model's folder, plain and with factors, and what transformers answers to some prompts in each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import lpes_eval
    from lpes_eval import reference
    from lpes_eval.rng import stream

    tokenizer, random = AutoTokenizer.from_pretrained(reference.path()), stream("vllm")
    found = {}
    texts = []
    for k in range(12):
        pairs = [(f"{random.getrandbits(64):016x}", f"{random.getrandbits(64):016x}") for _ in range(40)]
        records = ",\n".join(f'"{key}": "{value}"' for key, value in pairs)
        texts.append(f'Extract the value.\n{{{records}}}\nKey: "{pairs[3 * k][0]}"\nCorresponding value:')
    prompts = [tokenizer(text).input_ids for text in texts]
    for name in ("plain", "factors"):
        folder = tmp_path_factory.mktemp(name)
        model = AutoModelForCausalLM.from_pretrained(reference.path())
        if name == "factors":
            lpes_eval.apply(model, "reference")
            lpes_eval.save(model, folder)
        else:
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "prompts.json").write_text(json.dumps(prompts))
        answers = [
            model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0, len(ids) :].tolist()
            for ids in prompts
        ]
        found[name] = folder, answers
    assert found["plain"][1] != found["factors"][1]
    return found


@pytest.mark.parametrize(
    ("folder", "expected", "options"),
    [
        ("plain", "plain", {"enforce_eager": True}),
        ("factors", "factors", {"enforce_eager": True}),
        ("factors", "factors", {}),
        ("plain", "factors", {"enforce_eager": True, "hf_overrides": {"lpes_factors": "reference"}}),
    ],
)
def test_greedy_answers_are_those_of_transformers(folders, folder, expected, options):
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-c", PROGRAM, str(folders[folder][0]), json.dumps(options)]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    answers = json.loads(out.partition("ANSWERS ")[2])
    assert answers == folders[expected][1]
