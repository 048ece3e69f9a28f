"""MoICE inside a model: against its definition, and against the plain model where the two must be the same."""

import cmath
import math

import pytest

torch = pytest.importorskip("torch")

import transformers  # noqa: E402
from lpes_eval.peers import moice, router  # noqa: E402
from lpes_eval.peers.cache import GrowingLayer  # noqa: E402
from lpes_eval.peers.router import Router, RouterConfig  # noqa: E402
from peer_checks import TASK, answers, evaluate, slow_weights  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.cache_utils import DynamicCache, DynamicLayer  # noqa: E402

from benchmarks.families import tiny_config, tiny_model  # noqa: E402
from lpes_eval.errors import UnsupportedModel, UserError  # noqa: E402

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 1}),
    "mistral": ("MistralConfig", {"num_key_value_heads": 4, "sliding_window": None}),
    "phi": ("PhiConfig", {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "stablelm": ("StableLmConfig", {"num_key_value_heads": 2, "partial_rotary_factor": 0.75}),
}
"""The last two rotate a half and three quarters of each head."""


def build(family="llama", dtype=torch.float32, **changes):
    name, particular = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SIZES | particular | changes)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_router(model, kind=Router, seed=1, **options):
    options.setdefault("bases", moice.default_bases(model))
    made = kind(router.describe(model.config, None, **options), seed=seed)
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(30)  # weights of the bases that are far from equal
    return made.requires_grad_(False)


class First(Router):
    """A router that only ever listens to the first base."""

    def forward(self, layer, query):
        return torch.nn.functional.one_hot(torch.tensor(0), len(self.config.bases)).expand(*query.shape[:-1], -1)


def tokens(rows=1, length=9, seed=5):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, ids, **options):
    return model(input_ids=ids, **options).logits


# -- against the definition


def slow_attention(q, k, v, bases, width, weights_of):
    """MoICE of one layer and one row, number by number: lists q (H, T, D), k and v (K, T, D) -> (T, H * D)."""
    size, groups, half = len(q[0][0]), len(q) // len(k), width // 2

    def rotate(x, position, base):
        pairs = [complex(x[i], x[i + half]) * cmath.exp(1j * position * base ** (-2 * i / width)) for i in range(half)]
        return [p.real for p in pairs] + [p.imag for p in pairs] + x[width:]

    out = []
    for t in range(len(q[0])):
        row = []
        for h in range(len(q)):
            keys, values = k[h // groups], v[h // groups]
            weights = weights_of(rotate(q[h][t], t, bases[0]))
            mixed = [0.0] * size
            for weight, base in zip(weights, bases, strict=True):
                query = rotate(q[h][t], t, base)
                scores = [
                    sum(a * b for a, b in zip(query, rotate(keys[s], s, base), strict=True)) / math.sqrt(size)
                    for s in range(t + 1)
                ]
                exponentials = [math.exp(score - max(scores)) for score in scores]
                for s, e in enumerate(exponentials):
                    for d in range(size):
                        mixed[d] += weight * e / sum(exponentials) * values[s][d]
            row += mixed
        out.append(row)
    return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [7, 3])
def test_every_layers_attention_equals_the_definition_number_by_number(family, k):
    model = build(family)
    made = make_router(model, top_k=k)
    interception = moice.apply(model, made)
    seen = {}

    def keep(key, of_input=False):
        def hook(module, args, output):
            seen[key] = (args[0] if of_input else output)[0].double()

        return hook

    size = 8
    handles = []
    for h, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            handles.append(getattr(attention, name).register_forward_hook(keep((h, name))))
        out = getattr(attention, "o_proj", None) or attention.dense
        handles.append(out.register_forward_hook(keep((h, "out"), of_input=True)))
    logits(model, tokens(length=6))
    for handle in handles:
        handle.remove()
    width = int(size * getattr(model.config, "rope_parameters", {}).get("partial_rotary_factor", 1.0))
    assert width == {"phi": 4, "stablelm": 6}.get(family, 8)
    for h in range(2):
        q, key, v = (
            seen[h, name].unflatten(-1, (-1, size)).transpose(0, 1).tolist() for name in ("q_proj", "k_proj", "v_proj")
        )
        w1, w2, w3 = (w[h].double().tolist() for w in (made.w1, made.w2, made.w3))
        expected = slow_attention(q, key, v, made.config.bases, width, lambda x: slow_weights(x, w1, w2, w3, k))  # noqa: B023
        found = seen[h, "out"]
        assert (found - torch.tensor(expected, dtype=torch.float64)).abs().max() < 2e-5 * found.abs().max()
    interception.detach()


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_bases_are_the_plain_model_and_so_is_a_router_that_takes_the_first(family):
    model = build(family)
    ids = tokens(2, 30)
    plain = logits(model, ids)
    for made in (make_router(model, bases=(10000.0,) * 5, top_k=5), make_router(model, First)):
        interception = moice.apply(model, made)
        assert torch.allclose(logits(model, ids), plain, atol=2e-5, rtol=1e-5)
        interception.detach()
    interception = moice.apply(model, make_router(model))
    assert (logits(model, ids) - plain).abs().max() > 1e-2  # which is not because nothing is done
    interception.detach()
    assert torch.equal(logits(model, ids), plain)


def test_bases_in_turns_give_what_bases_in_one_call_give(monkeypatch):
    model = build()
    moice.apply(model, make_router(model))
    ids = tokens(3, 20)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    together = [logits(model, ids, attention_mask=mask, use_cache=cached) for cached in (False, True)]
    monkeypatch.setattr(moice, "BATCHED_BYTES", 0)
    in_turns = [logits(model, ids, attention_mask=mask, use_cache=cached) for cached in (False, True)]
    for a, b in zip(together, in_turns, strict=True):
        assert torch.allclose(a[mask.bool()], b[mask.bool()], atol=1e-5)


# -- generation and batches


def step_by_step(model, ids, first, **options):
    """Logits for all of ``ids``: a prefill of ``first`` tokens, then one at a time from the cache."""
    out = model(input_ids=ids[:, :first], use_cache=True, **options)
    parts = [out.logits]
    for t in range(first, ids.shape[1]):
        parts.append(model(input_ids=ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True).logits)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(
    ("family", "changes", "attention"),
    [
        ("llama", {}, "sdpa"),
        ("llama", {}, "eager"),
        ("qwen2", {}, "sdpa"),
        ("phi", {}, "sdpa"),
        ("mistral", {"sliding_window": 7}, "sdpa"),
    ],
)
@torch.no_grad()
def test_with_a_cache_it_is_the_same_as_without(family, changes, attention):
    model = build(family, **changes)
    model.set_attn_implementation(attention)
    moice.apply(model, make_router(model))
    ids = tokens(2, 24)
    assert torch.allclose(step_by_step(model, ids, 11), logits(model, ids, use_cache=False), atol=3e-5)
    generated = [
        model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=cached, num_beams=beams)
        for beams in (1, 3)
        for cached in (True, False)
    ]
    assert torch.equal(generated[0], generated[1])
    assert torch.equal(generated[2], generated[3])


OTHERS = {
    "cohere": {},  # pairs neighbours instead of halves
    "gemma2": {"head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8},  # caps its scores
    "glm": {"head_dim": 8, "partial_rotary_factor": 0.5},  # pairs neighbours in a half of each head
    "mixtral": {"num_local_experts": 2},
    "nemotron": {},
    "olmo2": {},
    "phi3": {},  # one projection for queries, keys and values
    "qwen3": {"head_dim": 8},  # normalises queries and keys
    "smollm3": {},
}


@torch.no_grad()
def check_first_base_and_cache(model):
    """The first base alone is the plain model; all of them are not, and give the same token by token from the cache."""
    ids = tokens(2, 20)
    plain = logits(model, ids)
    interception = moice.apply(model, make_router(model, First))
    assert torch.allclose(logits(model, ids), plain, atol=2e-5)
    interception.detach()
    moice.apply(model, make_router(model))
    mixed = logits(model, ids, use_cache=False)
    assert (mixed - plain).abs().max() > 1e-3
    assert torch.allclose(step_by_step(model, ids, 11), mixed, atol=5e-5)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_agree_with_the_plain_model_and_with_themselves_across_the_cache(family):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES | {"num_key_value_heads": 2} | OTHERS[family])
    attention = "eager" if family == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    check_first_base_and_cache(model)


def test_where_each_head_has_a_sink_of_its_own_the_bases_are_no_further_heads():
    model = tiny_model(tiny_config("flint"))
    assert all(layer.self_attn.sinks.abs().min() > 0 for layer in model.model.layers)
    check_first_base_and_cache(model)


@torch.no_grad()
def test_a_left_padded_batch_equals_its_prompts_alone():
    model = build()
    moice.apply(model, make_router(model))
    prompts = [tokens(1, length, seed=length) for length in (5, 17, 11)]
    longest = max(p.shape[1] for p in prompts)
    ids = torch.cat([torch.nn.functional.pad(p, (longest - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (longest - p.shape[1], 0)) for p in prompts])
    options = {"max_new_tokens": 10, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    together = model.generate(ids, attention_mask=mask, **options)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt, **options)
        for a, b in zip(alone.logits, together.logits, strict=False):
            assert torch.allclose(a[0], b[row], atol=3e-5)


def test_the_cache_holds_keys_for_every_base_and_values_once():
    model = build()
    plain = model(input_ids=tokens(2, 13), use_cache=True).past_key_values
    moice.apply(model, make_router(model))
    ours = model(input_ids=tokens(2, 13), use_cache=True).past_key_values
    for before, after in zip(plain.layers, ours.layers, strict=True):
        assert after.keys.numel() == 7 * before.keys.numel()
        assert after.values.shape == before.values.shape


@torch.no_grad()
def test_in_bfloat16_it_is_the_float32_model_to_bfloat16s_precision():
    exact, model = build(), build(dtype=torch.bfloat16)
    made = make_router(exact)
    ids = tokens(1, 20)
    moice.apply(exact, made)
    moice.apply(model, make_router(exact))
    assert all(weight.dtype == torch.float32 for weight in made.parameters())
    difference = (step_by_step(model, ids, 12).float() - logits(exact, ids)).abs()
    assert difference.mean() < 0.05 * logits(exact, ids).std()


# -- the cache layer


def test_a_growing_layer_does_what_transformers_layer_does():
    rng = torch.Generator().manual_seed(0)

    def new(rows, length):
        return torch.randn(rows, 6, length, 4, generator=rng), torch.randn(rows, 2, length, 3, generator=rng)

    grown, reference = GrowingLayer(), DynamicLayer()
    moved = 0
    for length in (5, 1, 90, *[1] * 150):
        added = new(3, length)
        before = grown.keys.data_ptr() if grown.is_initialized else 0
        for ours, theirs in zip(grown.update(*added), reference.update(*added), strict=True):
            assert torch.equal(ours, theirs)
        moved += grown.keys.data_ptr() != before
    assert moved < 6  # a few times in 153 updates
    for change in (
        lambda layer: layer.crop(-3),
        lambda layer: layer.batch_select_indices(torch.tensor([2, 0])),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.reset(),
    ):
        change(grown)
        change(reference)
        for _ in range(2):
            added = new(4 if grown.keys is None else grown.keys.shape[0], 1)
            for ours, theirs in zip(grown.update(*added), reference.update(*added), strict=True):
                assert torch.equal(ours, theirs)


def test_a_cache_with_or_without_layers_grows_in_place():
    model = build()
    moice.apply(model, make_router(model))
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        logits(model, tokens(), past_key_values=cache, use_cache=True)
        assert [type(layer) for layer in cache.layers] == [GrowingLayer] * 2


# -- what it cannot do


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_other_kinds_of_rotary_embedding_are_refused_with_the_reason(kind):
    model = build(rope_parameters={"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(UnsupportedModel, match=f"type {kind}.*MoICE|MoICE.*type {kind}|{kind}"):
        moice.default_bases(model)


@torch.no_grad()
def test_keys_that_a_family_caches_by_itself_are_never_taken_for_new_ones():
    config = transformers.GPTNeoXConfig(**SIZES)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = tokens(1, 12)
    plain = logits(model, ids)
    try:
        moice.apply(model, make_router(model, First))
        found = step_by_step(model, ids, 7)
    except UnsupportedModel:
        return
    assert torch.allclose(found, plain, atol=5e-5)


def test_a_model_whose_layers_do_not_rotate_is_refused_instead_of_being_left_as_it_is():
    layers = {"layer_types": ["full_attention"] * 2, "num_key_value_heads": 2}  # which in this family have no positions
    model = AutoModelForCausalLM.from_config(transformers.Exaone4Config(**SIZES | layers)).eval()
    with pytest.raises(UnsupportedModel, match="exaone4: none of the layers"):
        moice.apply(model, make_router(model))


def test_it_is_not_put_on_top_of_layer_factors():
    from lpes_eval import rope

    model = build()
    made = make_router(model)
    rope.apply(model, 1.5)
    with pytest.raises(UserError, match="layer factors"):
        moice.apply(model, made)


def test_the_sizes_of_a_model_are_read_from_its_configuration():
    assert router.describe(build().config, "org/name") == RouterConfig(2, 4, 8, model="org/name")


# -- the model type


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    """Folders with routers for the reference model, for the published bases and for others."""
    from lpes_eval import reference

    model = AutoModelForCausalLM.from_pretrained(reference.path())
    path = tmp_path_factory.mktemp("routers")
    described = router.describe(model.config, str(reference.path()), bases=moice.default_bases(model))
    router.write(Router(described), path / "fresh" / router.FILE)
    changed = described.__class__(**vars(described) | {"bases": (30.0, 100.0, 300.0), "top_k": 2})
    router.write(Router(changed), path / "other" / router.FILE)
    router.write(
        Router(described.__class__(**vars(described) | {"bases": (1e4, 1e4), "top_k": 2})), path / "same.safetensors"
    )
    return path


def test_it_runs_by_its_name_and_says_which_router_it_used(routed, task_manager):
    import json

    results = evaluate("moice", task_manager, f"router={routed / 'fresh'}")
    assert TASK in results["results"]
    method = json.loads(json.dumps(results["config"], default=str))["method"]
    assert method["name"] == "moice"
    assert method["router"] == str(routed / "fresh" / router.FILE)
    assert method["bases"] == [10000, 17500, 18000, 19000, 20000, 22500, 25000]
    changed = evaluate("moice", task_manager, f"router={routed / 'other'}")
    assert answers(changed) != answers(results)


def test_with_equal_bases_it_answers_and_scores_as_hf(routed, task_manager):
    from lm_eval.models.huggingface import HFLM
    from lpes_eval.models.moice import MoICE

    from lpes_eval import reference

    hf = HFLM(pretrained=str(reference.path()), device="cpu", batch_size=4)
    ours = MoICE(router=str(routed / "same.safetensors"), batch_size=4)
    assert answers(evaluate(ours, task_manager)) == answers(evaluate(hf, task_manager))
    rows = torch.randint(20, 700, (5, 60), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [
        (("", ""), row[:cut], row[cut:end])
        for row, cut, end in zip(rows, (30, 5, 40, 9, 59), (60, 9, 50, 60, 60), strict=True)
    ]
    scores = [[score for score, _ in lm._loglikelihood_tokens(requests, disable_tqdm=True)] for lm in (hf, ours)]
    assert scores[1] == pytest.approx(scores[0], abs=1e-3)
    other = MoICE(router=str(routed / "other"), batch_size=4)
    changed = [score for score, _ in other._loglikelihood_tokens(requests, disable_tqdm=True)]
    assert changed != pytest.approx(scores[0], abs=1e-3)
    assert len({other.cache_key, ours.cache_key}) == 2


def test_what_is_wrong_with_a_router_is_said_before_any_weight_is_loaded(routed, tmp_path, monkeypatch):
    from lm_eval.models.huggingface import HFLM
    from lpes_eval.models.moice import MoICE

    monkeypatch.setattr(HFLM, "_create_model", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setattr("lpes_eval.models.moice.reference.path", lambda name: tmp_path)
    with pytest.raises(UserError, match=r"moice needs router=.*train_router"):
        MoICE()
    monkeypatch.undo()
    monkeypatch.setattr(HFLM, "_create_model", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match="nowhere: no such file"):
        MoICE(router=str(tmp_path / "nowhere"))
    build().config.save_pretrained(tmp_path / "tiny")
    with pytest.raises(UserError, match=r"6 layers of 4 heads of size 32.*tiny has 2 layers of 4 heads of size 8"):
        MoICE(pretrained=str(tmp_path / "tiny"), router=str(routed / "fresh"))
    build(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}).config.save_pretrained(
        tmp_path / "pi"
    )
    with pytest.raises(UnsupportedModel, match="linear"):
        MoICE(pretrained=str(tmp_path / "pi"), router=str(routed / "fresh"))
    config = router.read_config(routed / "fresh" / router.FILE)
    stale = config.__class__(**vars(config) | {"weights_sha256": "0" * 64})
    router.write(Router(stale), tmp_path / "stale" / router.FILE)
    with pytest.raises(UserError, match=r"with weights 000000000000, but .* has weights"):
        MoICE(router=str(tmp_path / "stale"))


def test_the_reference_models_shipped_router_is_used_where_there_is_one(routed, tmp_path, monkeypatch):
    import shutil

    from lpes_eval.models.moice import MoICE

    from lpes_eval import reference

    shutil.copytree(reference.path(), tmp_path / "kv", ignore=shutil.ignore_patterns("*.png", "*.jsonl"))
    shutil.copy(routed / "other" / router.FILE, tmp_path / "kv" / router.FILE)
    monkeypatch.setattr(reference, "path", lambda name="base": tmp_path / "kv")
    assert MoICE().router_file == tmp_path / "kv" / router.FILE
    with pytest.raises(UserError, match="moice needs router="):
        MoICE(pretrained=str(tmp_path / "kv"))
