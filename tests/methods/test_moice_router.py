"""MoICE's router: its weights, its balance loss and its file."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.special import softmax

from checks import spread
from lpes_eval.errors import UserError
from lpes_eval.methods.moice import router as routers
from lpes_eval.methods.moice.router import Router, RouterConfig, load_balance, top_k_softmax


def config(**changes):
    return RouterConfig(**{"layers": 3, "heads": 2, "head_dim": 8} | changes)


def test_a_half_precision_query_is_routed_in_float32():
    router = spread(Router(config()))
    query = torch.randn(5, 8).bfloat16()
    assert router(1, query).dtype == torch.float32
    assert torch.equal(router(1, query), router(1, query.float()))


def test_a_new_router_weighs_all_bases_nearly_the_same_and_depends_on_its_seed():
    fresh = Router(config(head_dim=64), seed=1)
    assert (fresh(0, torch.randn(100, 64)) - 1 / 7).abs().max() < 0.02
    assert not torch.equal(fresh.w1, Router(config(head_dim=64), seed=2).w1)
    assert torch.equal(fresh.w1, Router(config(head_dim=64), seed=1).w1)
    values = torch.cat([p.flatten() for p in fresh.parameters()])
    assert values.std().item() == pytest.approx(0.02, rel=0.1)
    assert top_k_softmax(torch.zeros(3, 7), 2).tolist() == [[0.5, 0.5, 0, 0, 0, 0, 0]] * 3  # of equal scores k are kept


@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_balance_loss_is_that_of_the_switch_transformer(k):
    scores = torch.randn(50, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores[:, 2] += 3  # one base is preferred
    among_the_best = scores.numpy() >= np.sort(scores, axis=1)[:, [-k]]
    expected = 7 * among_the_best.mean(0) @ softmax(scores.numpy(), axis=1).mean(0)
    scores.requires_grad_()
    found = load_balance(scores.split([20, 3, 27]), k)  # three layers
    assert found.item() == pytest.approx(expected, rel=1e-12)
    found.backward()  # pulls towards balance, but for all seven bases there is nothing to pull
    assert scores.grad[:, 2].sum().item() > 1e-3 if k < 7 else scores.grad.abs().max() < 1e-12


# -- files


def test_a_router_comes_back_from_its_file_and_the_same_router_gives_the_same_bytes(tmp_path):
    made = Router(config(model="org/name", top_k=4, bases=(1e4, 2e4, 3e4, 4e4), training={"steps": 7}), seed=5)
    routers.write(made, tmp_path / "a" / routers.FILE)
    found = routers.read(tmp_path / "a")
    assert found.config == made.config
    assert all(torch.equal(getattr(found, name), weight) for name, weight in made.named_parameters())
    routers.write(found, tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a" / routers.FILE).read_bytes()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b.safetensors", routers.FILE]


GOOD = {name: weight.detach() for name, weight in Router(config()).named_parameters()}


@pytest.mark.parametrize(
    ("words", "tensors", "notes"),
    [
        ("other: not a safetensors file", None, None),
        ("holds no MoICE router", {"w1": torch.zeros(2)}, None),
        (r"tensor 'w1': found \(\(3, 8, 7\), .*\), expected \(4, 8, 7\) of float32", GOOD, {"layers": 4}),
        ("tensor 'w1': found .*float8", {name: w.to(torch.float8_e4m3fn) for name, w in GOOD.items()}, {}),
        ("tensor 'w3': found none", {"w1": GOOD["w1"], "w2": GOOD["w2"]}, {}),
        ("'w2' holds numbers that are not finite", GOOD | {"w2": GOOD["w2"] / 0}, {}),
        ("version 2 of the format, expected 1", GOOD, {"version": 2}),
        ("entry is not a router's .*top_k=7: expected 1 to 1", GOOD, {"bases": 3}),
        ("entry is not a router's .*a router for 3 layers", GOOD, {"layers": "3"}),
        ("entry is not a router's .*0 heads", GOOD, {"heads": 0}),
        ("entry is not a router's", GOOD, {"surplus": 1}),
        *(("entry is not a router's .*top_k=", GOOD, {"top_k": k}) for k in (0, 8)),
        ("entry is not a router's .*bases=", GOOD, {"bases": [10000.0, -1]}),
        ("entry is not a router's .*bases=", GOOD, {"bases": []}),
        ("entry is not a router's .*training=1", GOOD, {"training": 1}),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(tmp_path, words, tensors, notes):
    file = tmp_path / "other"
    if tensors is None:
        file.write_bytes(b"not one")
    else:
        described = {routers.METADATA: json.dumps({"version": 1, **asdict(config())} | (notes or {}))}
        save_file(tensors, file, metadata=None if notes is None else described)
    with pytest.raises(UserError, match=words) as caught:
        routers.read(file)
    assert "\n" not in str(caught.value)


def test_a_router_serves_a_model_of_the_same_sizes():
    routers.check(config(model="org/small"), "r.safetensors", config(model="org/other-name-same-shape"))
