"""Layer factors in every family that takes them, each held against transformers' own interpolation.

The reference for factors that differ between layers is put together from transformers' ``linear`` RoPE scaling, which
knows one factor for a whole model: layer h of the model with factors s is layer h of the model interpolated by s_h, fed
with what the layers before it made. So a test runs one interpolated model a layer and hands the states on.
"""

import copy
import re
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
import transformers

import lpes_eval
from lpes_eval import decoder
from lpes_eval.decoder import find_decoder
from lpes_eval.errors import UnsupportedModel
from tiny_models import BUILT, FAMILIES, tiny_config, tiny_model

# fmt: off
NAMED = [
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "gpt_neox",
    "gemma3n_text", "stablelm", "olmo2", "cohere", "granite", "starcoder2", "glm4", "gpt_oss", "deepseek_v3",
    "llama4_text",
]
# fmt: on
DOCUMENT = Path(__file__).parents[1] / "docs" / "support.md"
SUPPORTED = sorted(re.findall(r"`([\w-]+)`", DOCUMENT.read_text().split("## ")[1].split("\n\n", 2)[2]))

#: Layers that attend to the keys of an earlier layer: layer -> that layer.
KEYS_OF = {
    name: {2: 0, 3: 1} for name in ("gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
}

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}  # logits are of the order of 1

every_family = pytest.mark.parametrize(
    "family", [*NAMED, *(pytest.param(name, marks=pytest.mark.slow) for name in SUPPORTED if name not in NAMED)]
)


def default_rope(config, factor=None):
    """A copy of ``config`` with the default kind of RoPE, or with transformers' interpolation by ``factor``."""
    config = copy.deepcopy(config)
    text = config.get_text_config()

    def changed(parameters):
        if parameters is None:
            return None
        if parameters["rope_type"] == "proportional":  # the kind that Gemma 4 and LFM 3 cannot do without
            return parameters if factor is None else parameters | {"factor": factor}
        kind = {"rope_type": "default"} if factor is None else {"rope_type": "linear", "factor": factor}
        if factor is not None and config.model_type == "phimoe":  # its two scales, asked for by every other kind
            kind |= {"short_mscale": 1.0, "long_mscale": 1.0, "original_max_position_embeddings": 512}
        return {key: value for key, value in parameters.items() if key in BESIDE_THE_KIND} | kind

    parameters = text.rope_parameters
    nested = any(isinstance(value, dict) for value in parameters.values())
    text.rope_parameters = {k: changed(v) for k, v in parameters.items()} if nested else changed(parameters)
    return config


#: RoPE parameters that hold whatever the kind.
BESIDE_THE_KIND = {
    *("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"),
    *("llama_4_scaling_beta", "original_max_position_embeddings"),  # Ministral 3's attention temperature
}


@lru_cache(maxsize=2)
def plain_model(family):
    """The family's tiny model with the default kind of RoPE; no test leaves factors in it."""
    return tiny_model(default_rope(tiny_config(family)))


@lru_cache(maxsize=8)
def interpolated_model(family, factor):
    """The same weights under transformers' own position interpolation."""
    plain = plain_model(family)
    if factor == 1.0:
        return plain
    if family == "recurrent_gemma":  # it knows the default kind of RoPE alone, so positions are divided by hand
        model = copy.deepcopy(plain)
        for module in model.modules():
            if "Rotary" in type(module).__name__:
                module.forward = lambda x, position_ids, of=module.forward: of(x, position_ids / factor)
        return model
    model = tiny_model(default_rope(tiny_config(family), factor))
    model.load_state_dict(plain.state_dict())
    return model


def depth(model):
    return len(find_decoder(model).layers)


def logits(model, **inputs):
    ids = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **inputs).logits


@contextmanager
def applied(model, factors):
    lpes_eval.apply(model, factors)
    try:
        yield model
    finally:
        lpes_eval.remove(model)


def layer_outputs(model, given):
    """What each layer that runs answers, and the logits; ``given`` answers take the place of the layers' own."""
    outputs = {}

    def note(layer, args, output, h):
        outputs[h] = given.get(h, output)
        return outputs[h]

    layers = enumerate(find_decoder(model).layers)
    handles = [layer.register_forward_hook(partial(note, h=h)) for h, layer in layers]
    try:
        last = logits(model)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, last


def layer_by_layer(family, factors):
    """Logits under ``factors``, from models that transformers has interpolated by one factor each."""
    done = {}
    last = logits(plain_model(family))
    for h in range(len(factors)):
        factor = factors[KEYS_OF.get(family, {}).get(h, h)]
        outputs, last = layer_outputs(interpolated_model(family, factor), done)
        done |= {h: outputs[h]} if h in outputs else {}  # cross-attention layers do not run on text alone (Mllama)
    return last


@every_family
def test_factors_of_one_are_the_plain_model_bit_for_bit(family):
    model = tiny_model(tiny_config(family))  # with the family's own default RoPE
    plain = logits(model)
    with applied(model, [1.0] * depth(model)):
        assert torch.equal(logits(model), plain)
    with applied(model, [2.0] * depth(model)):
        assert not torch.equal(logits(model), plain)
    assert torch.equal(logits(model), plain)


@every_family
def test_each_layer_is_interpolated_by_its_own_factor(family):
    model = plain_model(family)
    factors = [1.3, 1.0, 2.0, 1.7][: depth(model)]
    expected = layer_by_layer(family, factors)
    with applied(model, factors):
        torch.testing.assert_close(logits(model), expected, **TOLERANCE)


REFUSED = [
    *((family, "no decoder layers with rotary", {}) for family in ("bloom", "gpt2", "jamba", "mamba")),
    *((family, "table of whole positions", {}) for family in ("codegen", "gptj", "roformer")),
    ("blt", "four transformers", {}),
    ("falcon", "ALiBi", {"alibi": True}),  # though it has a rotary module
    ("granitemoehybrid", "rotary", {"position_embedding_type": None}),
    ("hrm_text", "several times", {}),
    ("zamba2", "rotary", {"use_mem_rope": False}),
]


@pytest.mark.parametrize(("family", "reason", "changes"), REFUSED)
def test_a_model_that_cannot_be_given_factors_is_refused_with_the_reason(family, reason, changes):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    with pytest.raises(UnsupportedModel, match=reason) as refusal:
        lpes_eval.apply(model, 1.5)
    assert str(refusal.value).startswith(model.config.model_type + ": ")
    assert len(str(refusal.value).splitlines()) == 1


def test_an_encoder_decoder_is_refused():
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        lpes_eval.apply(transformers.T5ForConditionalGeneration(config), 1.5)


same_transformers = pytest.mark.skipif(
    f"families of transformers {transformers.__version__}," not in DOCUMENT.read_text(),
    reason="docs/support.md was made with another version of transformers",
)


@same_transformers
def test_the_page_has_every_family_once():
    lines = re.findall(r"^- (?:.*?: )?(`.*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(name for line in lines for name in re.findall(r"`([\w-]+)`", line)) == FAMILIES
    assert set(NAMED) <= set(SUPPORTED)


@same_transformers
@pytest.mark.parametrize(
    "family",
    [*NAMED, "gpt2", "bloom", *(pytest.param(name, marks=pytest.mark.slow) for name in BUILT if name not in NAMED)],
)
def test_the_page_says_what_the_family_does(family):
    """Why it is refused, or in which layers a factor of 2 changes nothing."""
    (line,) = [line for line in DOCUMENT.read_text().splitlines() if re.match(rf"- .*`{family}`", line)]
    try:
        reason = decoder.REFUSED.get(family)
        model = reason or tiny_model(tiny_config(family))
        layers = reason or find_decoder(model).factor_layer
    except UnsupportedModel as refusal:
        reason = str(refusal).split(": ", 1)[1].split(";")[0]
    assert (family in SUPPORTED) == (reason is None)
    if reason:
        assert line.startswith(f"- {reason}: ")
        return
    plain, idle, own = logits(model), [], [h for h, owner in enumerate(layers) if h == owner]
    for layer in own:
        with applied(model, [1.0 + (h == layer) for h in range(len(layers))]):
            idle += [layer] if torch.equal(logits(model), plain) else []
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ["without positions"] * len(layers)
    assert ("no effect in " in line) == bool(idle)
    assert f"({len(idle)} of " in line or all(kinds[h].replace("_", " ") in line for h in idle)
    assert ("takes that layer's factor" in line) == (own != list(range(len(layers))))
