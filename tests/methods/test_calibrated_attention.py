"""Calibrated attention: logits against a slow implementation in float64, and prompts that are answered one by one."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from checks import FAMILIES, apart, generated
from lpes_eval.errors import UserError
from lpes_eval.harness.segments import join
from lpes_eval.methods.calibrated_attention import CalibratedAttention, dummy_of
from test_attention_sorting import requests_of
from tiny_models import tiny_config, tiny_model


@pytest.fixture(scope="module")
def lm():
    return CalibratedAttention(pretrained="reference", temperature=0.003, device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def plain(lm):
    model = copy.deepcopy(lm)
    model.method.detach()
    model.model.set_attn_implementation("eager")
    return model


def spans_of(lm, segments):
    """The tokens of each document: those that begin in it."""
    starts = lm.tokenizer(join(segments), return_offsets_mapping=True)["offset_mapping"]
    begin, spans = len(segments[0].text), []
    for segment in segments[1:-1]:
        end = begin + len(segment.text)
        spans.append([k for k, (start, _) in enumerate(starts) if begin <= start < end])
        begin = end
    return spans


@torch.no_grad()
def slow_attention(lm, segments):
    """Equation 1: what the last token pays to a document, a mean over its tokens, heads and layers."""
    ids = lm.tokenizer(join(segments), return_tensors="pt")["input_ids"]
    last = torch.stack([layer[0, :, -1] for layer in lm.model(ids, output_attentions=True).attentions])
    return torch.stack([last[:, :, span].mean() for span in spans_of(lm, segments)])


def slow_scales(lm, segments, temperature):
    attention, relevance = slow_attention(lm, segments), []
    for k, document in enumerate(segments[1:-1]):
        changed = [*segments[: k + 1], dummy_of(document), *segments[k + 2 :]]
        relevance.append(attention[k] - slow_attention(lm, changed)[k])
    return torch.softmax(torch.stack(relevance) / temperature, 0) / attention


def slow_logits(lm, ids, spans, scales, end):
    """A pass in which the weights of every row from ``end`` on are changed one by one, in the upper half of layers."""

    def attend(module, query, key, value, mask, scaling, **options):
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        weights = ((query @ key.transpose(-1, -2)) * scaling + mask).softmax(-1)
        if module.layer_idx >= len(lm.model.model.layers) / 2:
            for row in range(end, weights.shape[2]):
                for head in range(weights.shape[1]):
                    of_row = weights[0, head, row]
                    total = sum(of_row[span].sum() for span in spans)
                    for span, scale in zip(spans, scales, strict=True):
                        of_row[span] *= scale
                    normal = total / sum(of_row[span].sum() for span in spans)
                    for span in spans:
                        of_row[span] *= normal
        return (weights @ value).transpose(1, 2), weights

    AttentionInterface.register("slow", attend)
    AttentionMaskInterface.register("slow", eager_mask)
    model = copy.deepcopy(lm.model)
    model.set_attn_implementation("slow")
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize(("task", "size"), [("mdqa_pos", {"num_documents": 2}), ("kv_retrieval", {"num_keys": 7})])
def test_logits_are_those_of_a_slow_implementation_with_a_cache_and_without(lm, plain, task, size):
    for request in requests_of(task, **size)[1:2]:
        segments = request.segments()
        places, scales = lm.calibrate(request)
        spans = spans_of(plain, segments)
        assert [[k for k, place in enumerate(places) if place == document] for document in range(len(spans))] == spans
        expected = slow_scales(plain, segments, 0.003)
        torch.testing.assert_close(scales, expected, rtol=1e-6, atol=0)
        ids = plain.tokenizer(join(segments), return_tensors="pt")["input_ids"]
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with lm.method.documents(places, scales):
            cached, anew = generated(lm.model, given), generated(lm.model, given, use_cache=False)
        tokens = torch.cat((ids, cached.argmax(-1)[:-1].T), 1)
        slow = slow_logits(plain, tokens, spans, expected, ids.shape[1] - 1)[0, ids.shape[1] - 1 :]
        torch.testing.assert_close(cached[:, 0].double(), slow, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(anew[:, 0].double(), slow, rtol=1e-5, atol=1e-5)
        unchanged = plain.model(tokens).logits[0, ids.shape[1] - 1 :]
        assert (slow - unchanged).abs().max() > 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_the_same_with_a_cache_and_without(family):
    model, ids = tiny_model(tiny_config(family)), torch.arange(3, 27)[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain, method = generated(model, given), CalibratedAttention.apply(model)
    with method.documents([-1, -1, *[0] * 7, *[1] * 4, *[2] * 9, -1, -1], torch.tensor([0.3, 5.0, 1.0])):
        cached, anew = generated(model, given), generated(model, given, use_cache=False)
    assert apart(cached, anew) < 1e-4
    assert apart(cached, plain) > 1e-4
    method.detach()
    assert torch.equal(generated(model, given), plain)


def test_a_chat_template_that_changes_the_prompt_is_refused(lm):
    (chat,) = requests_of("kv_retrieval", num_keys=7)[:1]
    changed = SimpleNamespace(segments=chat.segments, args=(chat.args[0].upper(), {}), task_name="kv_retrieval")
    with pytest.raises(UserError, match="chat template changes the text of a prompt"):
        lm.calibrate(changed)
