"""The shipped models answer, and their factors help on examples that no training or search saw."""

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from lpes_eval import factors, methods, reference
from lpes_eval.data import fiction, kv
from search.evaluator import Evaluator
from search.tasks import load_tasks

RECORDS_ASKED = [kv.generate(question, 8) for question in range(4)]
ARTICLES_ASKED = [fiction.generate(question, 2, seed=77) for question in range(8)]


@pytest.mark.parametrize(
    ("name", "examples", "position", "least"),
    [("base", RECORDS_ASKED, 40, 4), ("kv", RECORDS_ASKED, 40, 4), ("base", ARTICLES_ASKED, 0, 7)],
)
def test_it_answers_by_greedy_decoding_what_a_prompt_of_the_task_asks(name, examples, position, least):
    """Which stops by itself."""
    folder = reference.path(name)
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    right = 0
    for example in examples:
        prompt = tokenizer(example.prompt(position), return_tensors="pt")
        ids = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert len(ids) < 40
        target = example.target(position)
        answer = tokenizer.decode(ids, skip_special_tokens=True).strip().strip('"')
        right += answer in ([target] if isinstance(target, str) else target)
    assert right >= least


@pytest.mark.parametrize(("task", "examples", "gain"), [("kv_retrieval", 6, 0.112), ("mdqa_pos", 6, 0.037)])
def test_what_is_read_with_a_bias_is_read_with_less_under_the_shipped_factors(task, examples, gain):
    """The gains are the paper's, in its Table 1."""
    lm = methods.load("lpes")(device="cpu")
    evaluator = Evaluator(lm, load_tasks(lm, [task], split="held_out", examples=examples))
    plain, scaled = (evaluator(each, settle=True) for each in ([1.0] * 6, factors.parse("reference")))
    at_plain, at_scaled = plain.scores.values(), scaled.scores.values()
    assert max(at_plain) - min(at_plain) >= 0.15
    assert scaled.fitness - plain.fitness > gain
    assert min(at_scaled) > min(at_plain)
