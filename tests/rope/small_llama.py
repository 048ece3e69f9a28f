"""A Llama of four small layers, and the ways in which it is run."""

import torch

from tiny_models import tiny_config, tiny_model

FACTORS = [1.0, 1.34, 1.675, 1.34]
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}


def llama(**options):
    return tiny_model(tiny_config("llama", **{"initializer_range": 0.3} | options))  # so that positions matter


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


def generate(model, ids, **options):
    return model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=12, do_sample=False, **options)


@torch.no_grad()
def by_hand(model, ids, factors, frequencies=None, scale=1.0):
    """The reference: each layer is called with cosines and sines of positions that are divided here."""
    base, (batch, length) = model.model, ids.shape
    frequencies = base.rotary_emb.inv_freq if frequencies is None else frequencies
    hidden = base.embed_tokens(ids)
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None].expand(batch, 1, -1, -1)
    for layer, factor in zip(base.layers, factors, strict=True):
        angles = (torch.arange(length)[:, None] / factor * frequencies).repeat(1, 2)[None]
        hidden = layer(hidden, attention_mask=mask, position_embeddings=(angles.cos() * scale, angles.sin() * scale))
    return model.lm_head(base.norm(hidden))
