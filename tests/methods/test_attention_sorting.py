"""Attention sorting: orders against a slow implementation, and prompts that stay whole."""

import copy
import json
import re
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch

from lpes_eval.errors import UserError
from lpes_eval.harness.plugin import own_tasks
from lpes_eval.harness.segments import join
from lpes_eval.methods.attention_sorting import AttentionSorting, reordered


@pytest.fixture(scope="module")
def lm():
    return AttentionSorting(pretrained="reference", rounds=3, device="cpu", batch_size=4)


def requests_of(task, **metadata):
    loaded = own_tasks({"source": "generated", "positions": [0, 60, 100]} | metadata).load([task])["tasks"][task]
    loaded.build_all_requests(limit=2)
    return loaded.instances


def slow_order(lm, text, spans):
    """Documents by the attention of the last token, least first: one pass that hands out all of its attention."""
    read = lm.tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
    model = copy.deepcopy(lm.model).double()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(read["input_ids"], output_attentions=True).attentions
    last = torch.stack([layer[0, :, -1] for layer in attentions]).mean((0, 1))
    starts = read["offset_mapping"][0, :, 0]
    paid = [last[(starts >= begin) & (starts < end)].sum().item() for begin, end in spans]
    return sorted(range(len(paid)), key=lambda k: paid[k])


@pytest.mark.parametrize(("task", "size"), [("mdqa_pos", {"num_documents": 4}), ("kv_retrieval", {"num_keys": 7})])
def test_documents_stand_in_the_order_of_a_slow_implementation(lm, task, size):
    moved = 0
    for request in requests_of(task, **size):
        segments = request.segments()
        assert join(segments) == request.args[0]
        for _ in range(3):
            ends = list(accumulate(len(segment.text) for segment in segments))
            order = slow_order(lm, join(segments), list(pairwise(ends[:-1])))
            segments = reordered(segments, order)
        assert lm.sort(request).args == (join(segments), request.args[1])
        moved += join(segments) != request.args[0]
    assert moved


def test_a_sorted_prompt_is_one_of_the_same_task():
    (request,) = requests_of("kv_retrieval", num_keys=7)[1:2]
    segments = reordered(request.segments(), [3, 0, 6, 2, 1, 5, 4])
    json_of = lambda text: json.loads(text[text.index("{") : text.index("}") + 1])  # noqa: E731
    before, after = json_of(request.args[0]), json_of(join(segments))
    assert after == before
    assert list(after) == [list(before)[k] for k in (3, 0, 6, 2, 1, 5, 4)]
    (request,) = requests_of("mdqa_pos", num_documents=4)[1:2]
    text = join(reordered(request.segments(), [3, 0, 2, 1]))
    assert re.findall(r"^Document \[(\d)\]", text, re.MULTILINE) == ["1", "2", "3", "4"]
    assert sorted(text) == sorted(request.args[0])
    assert text != request.args[0]


def test_an_answer_is_cached_under_the_prompt_as_it_came(lm, monkeypatch):
    """Whatever its documents were sorted into may be another request's prompt."""
    requests, kept = requests_of("kv_retrieval", num_keys=7)[:3], []
    monkeypatch.setattr(lm, "cache_hook", SimpleNamespace(add_partial=lambda *given: kept.append(given)))
    answers = lm.generate_until(requests, disable_tqdm=True)
    assert any(lm.sort(request).args != request.args for request in requests)
    assert kept == [("generate_until", r.args, answer) for r, answer in zip(requests, answers, strict=True)]


def test_a_request_without_documents_is_refused(lm):
    request = SimpleNamespace(task_name="gsm8k", args=("How many?", {}))
    with pytest.raises(UserError, match="gsm8k does not say where its documents stand; expected"):
        lm.generate_until([request])
    with pytest.raises(UserError, match="gsm8k does not say"):
        lm.loglikelihood([request])
