"""vLLM with layer factors answers as transformers does.

Run by ``python tests/environments.py vllm``, which sets up an environment with vLLM first.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import lpes_eval
from lpes_eval import reference
from lpes_eval.data import kv

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
WINDOW = {"original_max_position_embeddings": 64}
PROGRAM = """
import json, sys
import vllm
folder, options = sys.argv[1], json.loads(sys.argv[2])
llm = vllm.LLM(folder, dtype="float32", max_model_len=4096, max_num_seqs=8, **options)
prompts = [{"prompt_token_ids": ids} for ids in json.load(open(f"{folder}/prompts.json"))]
answers = llm.generate(prompts, vllm.SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
print("ANSWERS", json.dumps([list(one.outputs[0].token_ids) for one in answers]))
"""


TABLES = """
import json, sys
import torch, vllm
llm = vllm.LLM(sys.argv[1], dtype="float32", max_model_len=128, max_num_seqs=2, enforce_eager=True, load_format="dummy",
               skip_tokenizer_init=True, hf_overrides={"lpes_factors": json.loads(sys.argv[2])})
tables = lambda model: [m.rotary_emb.cos_sin_cache[:128].tolist() for m in model.modules() if hasattr(m, "rotary_emb")]
print("TABLES", json.dumps(llm.apply_model(tables)[0]))
"""
FAMILIES = {
    "llama": ("llama", {}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3 | WINDOW}),
    "yarn": ("llama", {"rope_parameters": YARN | WINDOW}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}),
}


def run(*command, **environment):
    """A command in a process of its own, with a cache of 1 GiB."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def run_program(program, *arguments):
    return run(sys.executable, "-c", program, *arguments, VLLM_ENABLE_V1_MULTIPROCESSING="0")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layers_table_is_the_one_that_apply_makes(family, tmp_path):
    kind, options = FAMILIES[family]
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **options)).eval()
    model.save_pretrained(tmp_path)
    factors = [1.0, 1.3, 1.7, 1.1]
    found = run_program(TABLES, tmp_path, json.dumps(factors))
    assert found.returncode == 0, found.stderr[-3000:]
    ours = torch.tensor(json.loads(found.stdout.rpartition("TABLES ")[2]))  # (layers, positions, 32)
    lpes_eval.apply(model, factors)
    theirs = {}
    for h, layer in enumerate(model.model.layers):
        keep = lambda module, args, kwargs, h=h: theirs.__setitem__(h, kwargs["position_embeddings"])  # noqa: E731
        layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)
    model(torch.zeros(1, 128, dtype=torch.long))
    assert len(theirs) == 4
    within = 1e-6 * torch.arange(128).clamp(min=1)[:, None]  # a float32 angle's error grows with the position
    for h, (cos, sin) in theirs.items():
        assert bool(((ours[h] - torch.cat((cos[0, :, :16], sin[0, :, :16]), -1)).abs() <= within).all()), h
    assert len({str(ours[h].tolist()) for h in range(4)}) == 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The reference model's folder, plain and with factors, and what transformers answers to some prompts in each."""
    tokenizer, found = AutoTokenizer.from_pretrained(reference.path()), {}
    prompts = [tokenizer(kv.generate(k, 50).prompt(8 * k)).input_ids for k in range(12)]
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
        ("factors", "factors", {"enforce_eager": True}),
        ("factors", "factors", {}),
        ("plain", "factors", {"enforce_eager": True, "hf_overrides": {"lpes_factors": "reference"}}),
    ],
)
def test_greedy_answers_are_those_of_transformers(folders, folder, expected, options):
    done = run_program(PROGRAM, folders[folder][0], json.dumps(options))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.partition("ANSWERS ")[2]) == folders[expected][1]


@pytest.mark.parametrize("factors", [[1.0] * 6, [1.0, 1.5, 1.0, 1.0, 1.0, 1.0]], ids=["plain", "factors"])
def test_the_search_measures_the_same_with_either_engine_but_for_ties(searched, factors):
    """200 prompts, 20 questions of both tasks at five positions; where the answers differ, the two tokens are a tie."""
    lm, prompts, evaluators = searched
    found = {}
    for name, evaluate in evaluators.items():
        measured = evaluate(factors)
        found[name] = measured, [answers[0] for answers in evaluate._answers(None, None)]
    (ours, vllm), (theirs, transformers) = found["vllm"], found["transformers"]
    assert len(prompts) == 200
    ties = [i for i in range(200) if vllm[i] != transformers[i]]
    for i in ties:
        tokens = [lm.tok_encode(answers[i], add_special_tokens=False) for answers in (vllm, transformers)]
        first = next((n for n, (a, b) in enumerate(zip(*tokens, strict=False)) if a != b), min(map(len, tokens)))
        ids = torch.tensor([[*lm.tok_encode(prompts[i]), *tokens[0][:first]]])
        logits = lm.model(ids).logits[0, -1].topk(2).values
        assert logits[0] - logits[1] < 1e-3, (prompts[i][-60:], vllm[i], transformers[i])
    print(f"{len(ties)} of 200 answers are ties")
    assert len(ties) <= 4
    different = sum(
        a != b for name in theirs.examples for a, b in zip(ours.examples[name], theirs.examples[name], strict=True)
    )
    assert different <= len(ties)


@pytest.fixture(scope="module")
def searched():
    """The reference model, the prompts, and an evaluator for each engine."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from lpes_eval.methods.lpes import LPES
    from search.evaluator import Evaluator
    from search.tasks import load_tasks

    lm = LPES(batch_size=1, device="cpu")
    positions, weights = [0.0, 25.0, 50.0, 75.0, 100.0], [0.2] * 5
    tasks = load_tasks(lm, ["kv_retrieval", "mdqa_pos"], examples=20, positions=positions, lambdas=weights)
    prompts = [request.args[0] for objective in tasks for request in objective.task.instances]
    engines = {"transformers": {}, "vllm": {"vllm": {"max_num_seqs": 16}}}
    return lm, prompts, {name: Evaluator(lm, tasks, **options) for name, options in engines.items()}


def lm_eval(folder, model, **model_args):
    """The answers that ``lm_eval`` keeps, and the last line that it prints as an error."""
    command = [Path(sys.executable).with_name("lm_eval"), "--model", model, "--tasks", "kv_retrieval", "--limit", "5"]
    done = run(*command, "--model_args", json.dumps(model_args), "--log_samples", "--output_path", folder)
    lines = [json.loads(line) for file in folder.rglob("samples_*") for line in file.read_text().splitlines()]
    return [(one["doc_id"], one["resps"]) for one in lines], done.stderr


def test_lm_eval_measures_through_vllm_what_it_measures_through_transformers_and_cuts_nothing(tmp_path):
    served = {"pretrained": str(reference.path()), "dtype": "float32", "enforce_eager": True}
    factors = {"hf_overrides": {"lpes_factors": "reference"}}
    answers, error = lm_eval(tmp_path / "vllm", "vllm", **served, **factors)
    assert len(answers) == 5, error
    assert answers == lm_eval(tmp_path / "lpes", "lpes", factors="reference")[0]
    _, error = lm_eval(tmp_path / "short", "vllm", **served, **factors, max_model_len=512)
    assert sum("prompt tokens, at most" in line for line in error.splitlines()) == 1  # then the engine shuts down
    assert "Traceback" not in error
