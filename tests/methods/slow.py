"""Slow, obvious implementations in float64 that the methods are held against."""

import math

import torch


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


def turn(model, x, factor=1.0, base=None, positions=None):
    """Queries or keys (..., T, D) of a Llama rotated at position / factor, number by number."""
    width, theta, out = x.shape[-1], base or model.config.rope_parameters["rope_theta"], x.clone()
    for t, position in enumerate(positions or range(x.shape[-2])):
        for i in range(width // 2):
            angle = position / factor * theta ** (-2 * i / width)
            a, b = x[..., t, i], x[..., t, i + width // 2]
            out[..., t, i] = a * math.cos(angle) - b * math.sin(angle)
            out[..., t, i + width // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def causal(query, key, value):
    """Attention of one head, all (T, D)."""
    scores = query @ key.T / math.sqrt(query.shape[-1])
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf).softmax(-1) @ value


def slow_llama(model, tokens, attend):
    """A Llama's logits in float64, with the attention of layer h by ``attend(h, hidden, project)``: (heads, T, D).

    ``project("q", hidden)`` are the layer's un-rotated queries, (heads, T, D), and ``"k"`` and ``"v"`` as many keys and
    values, those that heads share once for each.
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
            made = made.unflatten(-1, (-1, model.config.head_dim)).transpose(0, 1)
            return made.repeat_interleave(model.config.num_attention_heads // len(made), 0)

        out = attend(h, norm(x, layer["input_layernorm.weight"]), project)
        x = x + out.transpose(0, 1).flatten(1) @ layer["self_attn.o_proj.weight"].T
        inner = norm(x, layer["post_attention_layernorm.weight"])
        gate = inner @ layer["mlp.gate_proj.weight"].T
        x = x + gate * gate.sigmoid() * (inner @ layer["mlp.up_proj.weight"].T) @ layer["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
