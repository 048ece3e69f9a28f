"""What the tests of several methods share: families, small inputs, generation, runs of lm-eval, and slow references."""

import contextlib
import math

import lm_eval
import torch

from lpes_eval import methods

FAMILIES = (
    "llama",
    "cohere",  # neighbours paired
    "cohere2",  # layers without positions, which get the tables all the same
    "flint",  # a learnt sink for each head
    "gemma2",  # soft capping
    "gemma3_text",  # two rotary tables
    "glm",  # neighbours paired in a half of each head
    "gpt_neox",  # a cache by another name
    "gpt_oss",  # attention sinks, and a table of half the width
    "granite_swa",  # layers without positions, which get none
    "mistral",
    "mixtral",
    "nemotron",
    "olmo2",
    "phi",  # a part of the head rotated
    "phi3",  # one projection for queries, keys and values
    "qwen2",
    "qwen3",  # queries and keys normalised
    "smollm3",
    "stablelm",  # a part of the head rotated
)
LENGTH, PADDING = 20, 5
TASK = "kv_retrieval"


def inputs(rows=2, length=LENGTH, padding=PADDING):
    """Rows of tokens, of which the first one is padded at the left."""
    ids = torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def logits(model, **given):
    return model(**({} if "input_ids" in given else inputs()) | given).logits


@torch.no_grad()
def generated(model, given=None, **options):
    """The logits of five greedy steps, (5, B, V)."""
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    return torch.stack(
        model.generate(**(given or inputs()), return_dict_in_generate=True, output_logits=True, **options).logits
    )


def apart(a, b):
    """The largest difference."""
    return (a - b).abs().max().item()


def put(name, model):
    """A method in a model, with settings under which it makes a difference to a few random tokens."""
    kind = methods.load(name)
    settings = {
        "ms_poe": {"min": 2, "max": 20, "skip": 1, "threshold": 1.5},
        "positional_channel": {"channel": 5, "scale": -3, "layers": "0:2"},
    }.get(name) or kind.benchmark_settings(model)
    for router in settings.values() if name == "moice" else ():
        spread(router).requires_grad_(False)
    return kind.apply(model, **settings)


def prompt_ends_at(method, column):
    """Say so to a method that wants to know."""
    return method.prompt_ends_at(column) if hasattr(method, "prompt_ends_at") else contextlib.nullcontext()


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


def likelihoods(lm, requests):
    """Log-likelihoods as the harness asks for them: of (context, continuation), in batches."""
    pairs = [(("", ""), context, continuation) for context, continuation in requests]
    return [score for score, _ in lm._loglikelihood_tokens(pairs, disable_tqdm=True)]


def likelihood_alone(lm, context, continuation):
    """The same of one request, without a batch."""
    with torch.no_grad(), prompt_ends_at(lm.method, len(context) - 1):
        found = lm.model(torch.tensor([context + continuation[:-1]])).logits[0, -len(continuation) :]
    return found.log_softmax(-1)[range(len(continuation)), continuation].sum().item()


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


def turn(model, x, factor=1.0, base=None):
    """Queries or keys (..., T, D) of a Llama rotated at position / factor, number by number."""
    width, theta, out = x.shape[-1], base or model.config.rope_parameters["rope_theta"], x.clone()
    for position in range(x.shape[-2]):
        for i in range(width // 2):
            angle = position / factor * theta ** (-2 * i / width)
            a, b = x[..., position, i], x[..., position, i + width // 2]
            out[..., position, i] = a * math.cos(angle) - b * math.sin(angle)
            out[..., position, i + width // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def causal(query, key, value):
    """Attention of one head, all (T, D)."""
    scores = query @ key.T / math.sqrt(query.shape[-1])
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf).softmax(-1) @ value


def slow_llama(model, tokens, attend):
    """A Llama's logits in float64, with the attention of layer h by ``attend(h, hidden, project)``: (heads, T, D).

    ``project("q", hidden)`` are the layer's un-rotated queries, (heads, T, D).
    """
    weights = {name: p.double() for name, p in model.state_dict().items()}

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt() * weight

    x = weights["model.embed_tokens.weight"][tokens]
    for h in range(model.config.num_hidden_layers):
        start = f"model.layers.{h}."
        layer = {name.removeprefix(start): w for name, w in weights.items() if name.startswith(start)}

        def project(name, hidden, layer=layer):
            made = hidden @ layer[f"self_attn.{name}_proj.weight"].T
            return made.unflatten(-1, (-1, model.config.head_dim)).transpose(0, 1)

        out = attend(h, norm(x, layer["input_layernorm.weight"]), project)
        x = x + out.transpose(0, 1).flatten(1) @ layer["self_attn.o_proj.weight"].T
        inner = norm(x, layer["post_attention_layernorm.weight"])
        gate = inner @ layer["mlp.gate_proj.weight"].T
        x = x + gate * gate.sigmoid() * (inner @ layer["mlp.up_proj.weight"].T) @ layer["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def spread(router):
    """MoICE's router with weights so large that those of the bases are far from equal."""
    with torch.no_grad():
        for weight in router.parameters():
            weight.mul_(40)
    return router
