"""A model and tokens for it."""

import pytest
import torch

from small_llama import llama


@pytest.fixture
def model():
    return llama()


@pytest.fixture
def ids():
    return torch.randint(1, 128, (2, 40), generator=torch.Generator().manual_seed(1))
