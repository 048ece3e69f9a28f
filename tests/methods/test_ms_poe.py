"""Ms-PoE: ranking and attention against slow, obvious float64 code; cache, padding, and PI as its limit."""

import math

import pytest
import torch

import lpes_eval
from benchmarks.families import tiny_config, tiny_model
from checks import LENGTH, PADDING, TASK, answers, distance, evaluate, generated, inputs, slow_llama, turn
from lpes_eval.errors import UserError
from lpes_eval.methods.ms_poe import MsPoE

FAMILIES = ("llama", "qwen2", "mistral", "gemma2", "gemma3_text", "stablelm", "glm")
SETTINGS = {"threshold": 1.5}
"""Over a few random tokens no attention is three times its mean; the factors and the layers are the paper's."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(tiny_config(request.param))


def slow_ms_poe(model, tokens, end, order, threshold=1.5, least=1.2, greatest=1.8, skip=2):
    """A Llama's logits under Ms-PoE in float64, head by head and key by key, and each head's factor by layer."""
    heads, width = model.config.num_attention_heads, model.config.head_dim
    group, chosen = heads // model.config.num_key_value_heads, {}

    def attend(h, hidden, project):
        q, k, v = (project(name, hidden) for name in "qkv")
        factors, awareness = [1.0] * heads, []
        if h >= skip:
            for head in range(heads):
                scores = [float(q[head][end] @ k[head // group][key]) / math.sqrt(width) for key in range(end + 1)]
                total = sum(math.exp(score) for score in scores)
                attention = [math.exp(score) / total for score in scores]
                mean = sum(attention) / len(attention)
                awareness.append(sum(a >= threshold * mean for a in attention) / len(attention))
            head_order = sorted(range(heads), key=lambda head: -awareness[head])  # stable
            for i in range(heads):
                if order == "paper":  # the i-th head of those sorted by awareness has the i-th factor (section 3.3)
                    factors[head_order[i]] = least + (greatest - least) * i / (heads - 1)
                else:  # the code: ratios = min + (max - min) * arange(H) / H; ratio of head i = ratios[head_order][i]
                    factors[i] = least + (greatest - least) * head_order[i] / heads
            chosen[h] = factors
        out = []
        for head in range(heads):
            query, key = turn(model, q[head], factors[head]), turn(model, k[head // group], factors[head])
            scores = query @ key.T / math.sqrt(width)
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            out.append(scores.softmax(-1) @ v[head // group])
        return torch.stack(out)

    return slow_llama(model, tokens, attend), chosen


@pytest.mark.parametrize("order", ["paper", "authors"])
@pytest.mark.parametrize("end", [LENGTH - 1, 11])
def test_factors_and_logits_are_those_of_a_slow_implementation(end, order):
    model = tiny_model(tiny_config("llama"))
    tokens = inputs()["input_ids"][1]
    expected, factors = slow_ms_poe(model, tokens, end, order)
    method = MsPoE.apply(model, order=order, **SETTINGS)
    with torch.no_grad(), method.prompt_ends_at(end):
        logits = model(tokens[None]).logits[0]
    assert set(factors) == {2, 3}
    for h, expected_factors in factors.items():
        steps = method.factors(len(expected_factors))
        assert [steps[rank] for rank in method.ranks[h][0]] == pytest.approx(expected_factors)
    assert any(each != sorted(each) for each in factors.values())
    assert (logits.double() - expected).abs().max() < 1e-4
    method.detach()
    with torch.no_grad():
        assert (model(tokens[None]).logits[0].double() - expected).abs().max() > 1e-2


def test_the_two_orders_are_inverse_permutations_and_the_authors_never_reach_the_greatest_factor():
    model = tiny_model(tiny_config("llama", num_attention_heads=8))
    ranks = {}
    for order in ("paper", "authors"):
        method = MsPoE.apply(model, order=order, **SETTINGS)
        model(**inputs())
        ranks[order] = method.ranks[2]  # the layers after it have other inputs
        method.detach()
    assert torch.equal(ranks["authors"], ranks["paper"].argsort(-1))
    assert not torch.equal(ranks["authors"], ranks["paper"])
    assert method.factors(3) == pytest.approx([1.2, 1.4, 1.6])


def test_attention_that_just_reaches_the_threshold_counts():
    """A head whose queries are 0 attends to 16 keys alike: at threshold 1 all count (Eq. 1 has >=), above it none."""
    model = tiny_model(tiny_config("llama"))
    width, tokens = model.config.head_dim, inputs(1, 16, 0)["input_ids"]
    last = model.config.num_attention_heads - 1
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight[last * width :] = 0
        for threshold, order, rank in ((1.0, "paper", 0), (1.001, "paper", last), (1.0, "authors", 0)):
            method = MsPoE.apply(model, threshold=threshold, order=order)
            model(tokens)
            found = [ranks[0] if order == "paper" else ranks[0].argsort() for ranks in method.ranks.values()]
            assert [ranks[last].item() == 0 for ranks in found] == [rank == 0 and order == "paper"] * 2
            method.detach()


@pytest.mark.parametrize(("greatest", "tolerance"), [(1.5, 1e-5), (1.5 + 1e-6, 2e-3)], ids=["one", "nearly one"])
def test_one_factor_for_all_heads_is_position_interpolation_in_these_layers(model, greatest, tolerance):
    """Nearly one factor goes the general way: keys are rotated head by head, and heads are ranked."""
    visible = inputs()["attention_mask"].bool()
    with torch.no_grad():
        plain = model(**inputs()).logits
        method = MsPoE.apply(model, min=1.5, max=greatest)
        found = model(**inputs()).logits
        assert set(method.ranks) == (set(method.layers) if greatest > 1.5 else set())
        method.detach()
        assert torch.equal(model(**inputs()).logits, plain)
        lpes_eval.apply(model, [1.0, 1.0, *[1.5] * (model.config.num_hidden_layers - 2)])
        expected = model(**inputs()).logits
        lpes_eval.remove(model)
    assert (found - expected)[visible].abs().max() < tolerance
    assert (found - plain)[visible].abs().max() > 1e-3


def test_a_prompts_choice_is_that_of_the_row_alone_and_stands_with_a_cache_and_without_one(model):
    method = MsPoE.apply(model, **SETTINGS)
    try:
        with method.prompt_ends_at(LENGTH - 1):
            batch, ranks = generated(model), {h: ranks.clone() for h, ranks in method.ranks.items()}
            anew = generated(model, use_cache=False)
        assert torch.equal(batch.sequences, anew.sequences)
        assert distance(batch.logits, anew.logits) < 1e-4
        assert all(torch.equal(ranks[h], now) for h, now in method.ranks.items())
        for row, start in ((0, PADDING), (1, 0)):
            alone = generated(model, {"input_ids": inputs()["input_ids"][row : row + 1, start:]})
            assert all(torch.equal(ranks[h][row], method.ranks[h][0]) for h in ranks)
            assert distance([a[row] for a in batch.logits], [b[0] for b in alone.logits]) < 1e-4
    finally:
        method.detach()


def test_padding_at_the_right_is_not_the_prompts_end():
    model = tiny_model(tiny_config("llama"))
    given = inputs()
    flipped = {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"].flip(1)}
    method = MsPoE.apply(model, **SETTINGS)
    with torch.no_grad():
        both = model(**flipped).logits[0, : LENGTH - PADDING]
        ranks = dict(method.ranks)
        alone = model(flipped["input_ids"][:1, : LENGTH - PADDING]).logits[0]
    assert all(torch.equal(ranks[h][0], method.ranks[h][0]) for h in ranks)
    assert (both - alone).abs().max() < 1e-4


def test_what_cannot_be_is_refused():
    model = tiny_model(tiny_config("llama"))
    for settings, reason in (
        ({"min": 2, "max": 1}, "min=2,max=1: expected 0 < min <= max"),
        ({"min": "a"}, "min=a: expected a number"),
        ({"threshold": 0}, "threshold=0: expected more than 0"),
        ({"order": "code"}, "order=code: expected paper or authors"),
        ({"skip": -1}, "skip=-1: expected a whole number"),
        ({"skip": 4}, "skip=4: the model has 4 layers, of which none would be left"),
    ):
        with pytest.raises(UserError, match=reason):
            MsPoE.apply(model, **settings)
    method = MsPoE.apply(model, skip=0)
    assert method.layers == (0, 1, 2, 3)
    ends = torch.tensor([11, LENGTH - 1])
    with pytest.raises(UserError, match="ends in column 19, and the first pass has 7"), method.prompt_ends_at(ends):
        generated(model, prefill_chunk_size=7)
    with method.prompt_ends_at(LENGTH - 1):
        generated(model, prefill_chunk_size=LENGTH)


# -- the model type


@pytest.fixture(scope="module")
def lm():
    return MsPoE(min=2, max=20, skip=0, threshold=2, batch_size=3)


def score_alone(lm, context, continuation):
    """Log-likelihood with heads ranked on the context's last token, one request at a time, without a batch."""
    with torch.no_grad(), lm.method.prompt_ends_at(len(context) - 1):
        logits = lm.model(torch.tensor([context + continuation[:-1]])).logits[0, -len(continuation) :]
    return logits.log_softmax(-1)[range(len(continuation)), continuation].sum().item()


def test_likelihoods_rank_heads_on_the_last_token_of_the_context(lm):
    texts = torch.randint(20, 700, (5, 90), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [
        (("", ""), text[:cut], text[cut:end])
        for text, cut, end in zip(texts, (40, 70, 20, 55, 60), (90, 75, 80, 56, 61), strict=True)
    ]
    requests.append((("", ""), [*texts[0][:30], 0], [0, 0, 5]))  # ends in what padding looks like
    requests.append((("", ""), texts[0][:60], texts[0][60:90]))  # the tokens of the first with another context
    found = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    expected = [score_alone(lm, context, continuation) for _, context, continuation in requests]
    assert [score for score, _ in found] == pytest.approx(expected, abs=1e-3)
    assert abs(found[0][0] - score_alone(lm, texts[0][:60], texts[0][60:90])) > 1e-3


def test_generation_ranks_heads_on_the_last_token_of_the_prompt(lm, task_manager):
    found = evaluate(lm, task_manager, positions=[20])
    sample = found["samples"][TASK][0]
    tokens = torch.tensor([lm.tok_encode(sample["arguments"][0][0])])
    with lm.method.prompt_ends_at(tokens.shape[1] - 1):
        anew = lm.model.generate(tokens, max_new_tokens=12, do_sample=False, use_cache=False)[0, tokens.shape[1] :]
    answer = sample["resps"][0][0]
    assert answer
    assert lm.tok_decode(anew.tolist()).startswith(answer[:8])
    assert answers(evaluate("lpes", task_manager, positions=[20])) != answers(found)
