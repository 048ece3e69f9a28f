"""What the tests of several methods share: small inputs, generation, a run of lm-eval, and MoICE's router by hand."""

import math

import lm_eval
import torch

LENGTH, PADDING = 20, 5
TASK = "kv_retrieval"


def inputs(rows=2, length=LENGTH, padding=PADDING):
    """Rows of tokens, of which the first one is padded at the left."""
    ids = torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def generated(model, given=None, **options):
    """Greedy generation of five tokens, with the logits of each."""
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    return model.generate(**(given or inputs()), return_dict_in_generate=True, output_logits=True, **options)


def distance(a, b):
    """The largest difference between two generations' logits."""
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def evaluate(model, task_manager, arguments="", limit=2, **metadata):
    """Results of the harness, with samples, on contexts of eight records."""
    return lm_eval.simple_evaluate(
        model,
        model_args=arguments,
        tasks=[TASK],
        limit=limit,
        batch_size=4,
        task_manager=task_manager(**{"num_keys": 8, "positions": [0, 100]} | metadata),
        log_samples=True,
        bootstrap_iters=0,
    )


def answers(results):
    """Every answer of a run."""
    return [(sample["doc_id"], sample["arguments"], sample["resps"]) for sample in results["samples"][TASK]]


def slow_weights(q, w1, w2, w3, k):
    """The weights of MoICE's router by its definition, one number at a time, in double precision."""
    inner = []
    for j in range(len(w2)):
        gate = sum(q[d] * w1[d][j] for d in range(len(q)))
        inner.append(gate / (1 + math.exp(-gate)) * sum(q[d] * w3[d][j] for d in range(len(q))))
    scores = [sum(inner[j] * w2[j][i] for j in range(len(w2))) for i in range(len(w2))]
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[:k]
    total = sum(math.exp(scores[i]) for i in best)
    return [math.exp(scores[i]) / total if i in best else 0.0 for i in range(len(scores))]
