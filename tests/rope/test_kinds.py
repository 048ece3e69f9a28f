"""Factors on top of every kind of RoPE that a model may have itself, against the kinds' own frequencies."""

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import lpes_eval
from small_llama import by_hand, llama, logits

TOLERANCE = {"rtol": 1e-4, "atol": 1e-3}  # logits are of the order of 10
TRAINED = 32  # positions that the models below were "trained" on; they are run below and above it
KINDS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0],
        "factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
}


@pytest.mark.parametrize(
    "factors", [[1.6] * 4, [1.3, 1.0, 2.0, 1.7], [0.6, 1.0, 0.8, 1.7]], ids=["uniform", "per layer", "below 1"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_factors_divide_positions_at_the_frequencies_of_the_true_length(kind, factors):
    model = llama(
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0} | KINDS[kind],
        max_position_embeddings=TRAINED if kind in ("linear", "dynamic") else 4 * TRAINED,
    )
    # below the trained length, above it (there 1.6 and 2 would bring positions back below it), and below it again
    for length in (24, 48, 24):
        rotation = ROPE_INIT_FUNCTIONS[kind](model.config, torch.device("cpu"), seq_len=length)
        ids = torch.randint(1, 61, (2, length), generator=torch.Generator().manual_seed(1))
        plain = logits(model, ids)
        torch.testing.assert_close(by_hand(model, ids, [1.0] * 4, *rotation), plain, **TOLERANCE)
        lpes_eval.apply(model, factors)
        found = logits(model, ids)
        lpes_eval.remove(model)
        torch.testing.assert_close(found, by_hand(model, ids, factors, *rotation), **TOLERANCE)
        assert (found - plain).abs().max() > 0.1
