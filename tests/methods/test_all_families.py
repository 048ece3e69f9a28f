"""What holds for every method, in every family that takes it: those of ``checks.FAMILIES``, and slowly all others."""

import copy
import functools
import gc
import inspect
import weakref

import pytest
import torch
from transformers import DynamicCache

import lpes_eval
from checks import FAMILIES, LENGTH, PADDING, apart, attach, generated, inputs, logits, prompt_ends_at
from lpes_eval import methods, rope
from lpes_eval.decoder import REFUSED as REFUSED_FAMILIES
from lpes_eval.errors import CacheError, UnsupportedModel, UserError
from tiny_models import BUILT, tiny_config, tiny_model

WITHOUT_ONE_BASE = {"gemma3_text", "gpt_oss", "granite_swa"}
OTHERS = sorted(set(BUILT) - set(REFUSED_FAMILIES) - set(FAMILIES))
CHANGING = sorted({*methods.names()} - {"attention_sorting", "calibrated_attention"})  # which need to know documents
ROTATING = [name for name in CHANGING if name not in ("lpes", "pi")]


@functools.lru_cache(maxsize=1)
def built(family):
    return tiny_model(tiny_config(family))


def marks(model):
    """The attributes of every module, and how many entries its dictionaries (hooks among them) have."""
    return [
        {key: len(value) if isinstance(value, dict) else None for key, value in vars(module).items()}
        for module in model.modules()
    ]


def differences(model, method=None):
    """How far answers without a cache, and those of each row alone, are from those of a padded batch with one."""
    ids, end = inputs()["input_ids"], LENGTH - 1
    with prompt_ends_at(method, end):
        batch, anew, scored = generated(model), generated(model, use_cache=False), logits(model, use_cache=False)
    alone = [generated(model, {"input_ids": row}) for row in (ids[:1, PADDING:], ids[1:])]
    # Gemma 4 cuts its tables when it generates; and what is padded has other positions where nobody counts them
    without_a_cache = max(apart(batch, anew), apart(batch[0, 1], scored[1, end]))
    return without_a_cache, apart(batch, torch.cat(alone, dim=1))


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def test_it_answers_the_same_with_a_cache_without_one_and_row_by_row_or_says_why_not(family, name):
    model = built(family)
    try:
        rope.find_decoder(model)
        plain, before = logits(model), marks(model)
        method = attach(name, model)
    except UnsupportedModel as refusal:
        assert str(refusal).startswith(f"{model.config.model_type}: ")
        assert family in OTHERS or (family in WITHOUT_ONE_BASE and name in ("attention_buckets", "moice"))
        pytest.skip(str(refusal))
    assert apart(logits(model), plain) > (1e-4 if family in FAMILIES else 0)
    found = differences(model, method)
    method.detach()
    assert torch.equal(logits(model), plain)
    assert marks(model) == before
    own = differences(model)  # some families, mostly hybrids, answer otherwise as plain models
    assert family in OTHERS or max(own) < 1e-4
    cache, rows = (difference if of_plain < 1e-4 else 0.0 for difference, of_plain in zip(found, own, strict=True))
    assert cache < (1e-4 if family in FAMILIES else 3e-3 if family == "zamba2" else 1e-3)
    if (family, name) != ("moss_transcribe_diarize", "moice"):  # it counts padding; the router sees positions
        assert rows < (1e-4 if family in FAMILIES else 1e-3)


@pytest.mark.parametrize("name", CHANGING)
def test_it_combines_beams_as_without_a_cache_or_refuses_them(llama, name):
    with prompt_ends_at(attach(name, llama), LENGTH - 1):
        if name == "attention_buckets":
            with pytest.raises(UserError, match="without beam search"):
                generated(llama, num_beams=3)
            return
        options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3, "pad_token_id": 0}
        cached, anew = (llama.generate(**inputs(), use_cache=cache, **options) for cache in (True, False))
    assert torch.equal(cached, anew)


@pytest.mark.parametrize("name", [name for name in CHANGING if name not in ("attention_buckets", "ms_poe", "moice")])
def test_a_static_cache_serves_where_it_has_room_for_the_keys(llama, name):
    with prompt_ends_at(attach(name, llama), LENGTH - 1):
        assert apart(generated(llama, cache_implementation="static"), generated(llama)) < 1e-4


@pytest.mark.parametrize("name", CHANGING)
def test_a_cache_is_freed_with_its_last_reference(llama, name):
    """Not only when Python looks for garbage, which leaves gigabytes of keys and values in memory."""
    cache = DynamicCache(config=llama.config)
    with prompt_ends_at(attach(name, llama), LENGTH - 1):
        gc.disable()
        try:
            llama.generate(**inputs(), past_key_values=cache, max_new_tokens=4, do_sample=False, pad_token_id=0)
            gone = weakref.ref(cache)
            del cache
            assert gone() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("name", CHANGING)
def test_a_copy_of_a_model_runs_its_own_method_on_its_own_weights(llama, name):
    plain, there = generated(llama), attach(name, llama)
    expected = generated(llama)
    assert apart(expected, plain) > 1e-3
    copied = copy.deepcopy(llama)
    assert inspect.signature(copied.forward) == inspect.signature(type(copied).forward.__get__(copied))
    there.detach()
    with torch.no_grad():
        for weight in llama.parameters():
            weight.zero_()
    assert torch.equal(generated(copied), expected)


@pytest.mark.parametrize("name", ROTATING)
def test_layer_factors_and_methods_exclude_each_other(llama, name):
    lpes_eval.apply(llama, 1.5)
    with pytest.raises(UserError, match="the model has layer factors"):
        attach(name, llama)
    lpes_eval.remove(llama)
    there = attach("attention_buckets", llama)
    with pytest.raises(UserError, match="in this model already, Attention Buckets"):
        attach(name, llama)
    there.detach()
    there = attach(name, llama)
    expected = logits(llama)
    with pytest.raises(UserError, match=r"^the model has .* in it.* detach it first"):
        lpes_eval.apply(llama, 1.5)
    assert torch.equal(logits(llama), expected)
    there.detach()
    lpes_eval.apply(llama, 1.5)


@pytest.mark.parametrize("name", ROTATING)
def test_a_cache_that_was_filled_otherwise_is_refused_and_a_second_detach_does_nothing(llama, name):
    def filled():
        return llama(**inputs(), use_cache=True).past_key_values

    def go_on(cache):
        llama(inputs()["input_ids"][:, :1], past_key_values=cache)

    plain = filled()
    method = attach(name, llama)
    with prompt_ends_at(method, LENGTH - 1):
        own = filled()
    with pytest.raises(CacheError, match=f"holds {LENGTH} positions whose keys .* has not rotated"):
        go_on(plain)
    go_on(own)
    method.detach()
    other = attach("ms_poe" if name == "attention_buckets" else "attention_buckets", llama)
    method.detach()
    assert rope.method_in(llama) is not None
    with pytest.raises(CacheError, match="start with an empty cache"):
        go_on(own)
    other.detach()
    own.reset()
    go_on(own)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ms_poe", {"min": 2, "max": 20, "skip": 0, "threshold": 2}),
        ("positional_channel", {"channel": 19, "scale": -20}),
    ],
)
def test_likelihoods_take_the_last_token_of_the_context_for_the_prompts_end(name, settings):
    lm = methods.load(name)(batch_size=3, max_length=100, **settings)

    def alone(context, continuation):
        context = context[-101 + len(continuation) :]
        with torch.no_grad(), lm.method.prompt_ends_at(len(context) - 1):
            found = lm.model(torch.tensor([context + continuation[:-1]])).logits[0, -len(continuation) :]
        return found.log_softmax(-1)[range(len(continuation)), continuation].sum().item()

    texts = torch.randint(20, 700, (5, 90), generator=torch.Generator().manual_seed(0)).tolist()
    cuts = zip(texts, (40, 70, 20, 55, 60), (90, 75, 80, 56, 61), strict=True)
    requests = [(text[:cut], text[cut:end]) for text, cut, end in cuts]
    requests.append((texts[1] + texts[2], texts[3][:20]))  # only its last 100 tokens are run
    requests.append((texts[0][:60], texts[0][60:90]))  # the tokens of the first with another context
    scored = lm._loglikelihood_tokens([(("", ""), *request) for request in requests], disable_tqdm=True)
    found = [score for score, _ in scored]
    assert found == pytest.approx([alone(*request) for request in requests], abs=1e-3)
    assert abs(found[0] - found[-1]) > 1e-3
    lm.method.detach()
    assert found != pytest.approx([alone(*request) for request in requests], abs=1e-2)


REFUSED = {
    "pi": [({"factor": "x"}, "^factor=x: expected a number")],
    "attention_buckets": [
        ({"bases": given}, "numbers > 1 with ':' between them") for given in ("10000,17500", "", [0], ["x"])
    ],
    "ms_poe": (
        ({"min": 2, "max": 1}, "min=2,max=1: expected min <= max"),
        ({"threshold": 0}, "threshold=0: expected more than 0"),
        ({"skip": -1}, "skip=-1: expected at least 0"),
        ({"skip": 4}, "skip=4: the model has 4 layers, of which none would be left"),
    ),
    "positional_channel": (
        ({"channel": 64}, "channel=64: the model has 64 hidden channels"),
        ({"channel": 0, "scale": 1}, "scale=1: expected less than 1"),
    ),
    "string": (
        ({"shift": 4, "window": 4}, "shift=4,window=4: expected window < shift"),
        ({"shift": 0}, "shift=0: expected at least 1"),
    ),
    "moice": [({"router": "nowhere"}, "nowhere: no such file")],
}


@pytest.mark.parametrize(
    ("name", "settings", "reason"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_settings_that_cannot_be_are_refused_and_leave_the_model_alone(llama, name, settings, reason):
    with pytest.raises(UserError, match=reason):
        methods.load(name).apply(llama, **settings)
    assert rope.method_in(llama) is rope.applied(llama) is None
