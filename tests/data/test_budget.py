"""A prompt fits the model or is refused with the numbers; what may be cut is cut as little as possible."""

from types import SimpleNamespace

import pytest
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.huggingface import HFLM

from lpes_eval.errors import DataError, PromptTooLong
from lpes_eval.harness import budget
from lpes_eval.harness.plugin import evaluating

DOCUMENT = "the story of a döcument “and” the question that goes on; " * 20


def model(tokenizer, window=200, **attributes):
    """What a budget uses of one of lm-eval's models."""
    return SimpleNamespace(tokenizer=tokenizer, max_length=window, **attributes)


def test_a_prompt_has_what_the_window_leaves_beside_the_answer_and_no_more_than_the_protocol_allows(tokenizer, caplog):
    limits = budget.for_model(model(tokenizer, 200), new_tokens=50)
    assert limits.tokens == 150
    assert budget.for_model(model(tokenizer, 200), 50, cap=100).tokens == 100
    assert not caplog.text
    assert budget.for_model(model(tokenizer, 199), 50, cap=3584).tokens == 149
    assert "149" in caplog.text
    assert "3584" in caplog.text


def test_what_leaves_no_room_or_says_too_little_is_refused(tokenizer):
    limits, whole = budget.for_model(model(tokenizer, 40), 20), budget.for_model(model(tokenizer, 200), 50)
    whole.check("x" * 149, "kv")  # 149 and the beginning-of-text token
    for error, message, ask in (
        (PromptTooLong, "at most -312 .window of 200 less 512 .*max_gen_toks",
         lambda: budget.for_model(model(tokenizer, 200), 512).check("x", "kv")),
        (DataError, "max_gen_toks=abc: expected", lambda: budget.for_model(model(tokenizer, 200), "abc")),
        (DataError, "no tokenizer", lambda: budget.for_model(SimpleNamespace(max_length=100), 10)),
        (PromptTooLong, r"test without its document: \d+ prompt tokens",
         lambda: limits.longest_beginning("a long document", lambda d: f"{'Instruction ' * 9}{d}", "test")),
        (PromptTooLong, r"kv, question 3: 151 prompt tokens, at most 150 \(window of 200 less 50",
         lambda: whole.check("x" * 150, "kv, question 3")),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            ask()


def test_tokens_are_counted_as_the_model_gets_them(tokenizer):
    limits = budget.for_model(model(tokenizer), 50)
    alone = len(tokenizer.backend_tokenizer.encode("question", add_special_tokens=False))
    assert limits.count("question") == limits.count(JsonChatStr("question")) == alone + 1  # <s>
    own = model(tokenizer, backend="causal", tok_encode=lambda text: [7] * 3)
    assert budget.for_model(own, 50).count("anything") == 3


def test_a_task_measures_for_the_model_that_is_evaluated_now_and_caches_no_requests(
    tokenizer, task_manager, monkeypatch, caplog
):
    task = task_manager(num_keys=3).load(["kv_retrieval"])["tasks"]["kv_retrieval"]
    for window in (1000, 2000):
        with evaluating(model(tokenizer, window)):
            assert task.budget().tokens == window - 100
    monkeypatch.setattr("lm_eval.api.task.save_to_cache", pytest.fail)
    task.build_all_requests(limit=1, cache_requests=True)
    assert "--cache_requests is not used" in caplog.text


@pytest.mark.parametrize("window", [60, 349, 5000])
def test_a_cut_document_is_the_longest_that_fits(tokenizer, window):
    limits = budget.for_model(model(tokenizer, window), 20)

    def compose(document):
        return f"Read: {document} [cut]\nQuestion?"

    found = limits.longest_beginning(DOCUMENT, compose, "test")
    every_end = (DOCUMENT[:end] for end in range(len(DOCUMENT), -1, -1))
    best = next(document for document in every_end if limits.count(compose(document)) <= limits.tokens)
    assert limits.count(compose(found)) <= limits.tokens
    assert best.startswith(found)
    # At most the one token that merged, or would merge, across the cut: characters of two bytes are whole here.
    assert limits.count(compose(best)) - limits.count(compose(found)) <= 1


def test_a_prompt_is_rendered_with_a_template_and_without(tokenizer, monkeypatch):
    def template(messages):
        return HFLM.apply_chat_template(SimpleNamespace(tokenizer=tokenizer, chat_template_args={}), messages)

    assert budget.render("Q") == "Q"
    assert budget.render("Q", "S. ") == "S. Q"
    assert budget.render("Q", "S. ", "I") == "I\n\nS. Q"
    assert budget.render("Q", chat_template=template) == "<user>Q</user><assistant>"
    assert budget.render("Q", "S. ", "I", template) == "<system>I\n\nS.</system><user>Q</user><assistant>"

    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", refusing + tokenizer.chat_template)
    # lm-eval answers the refusal by dropping the system message, and with it half of the prompt
    assert "S." not in template([{"role": "system", "content": "S."}, {"role": "user", "content": "Q"}])
    assert budget.render("Q", "S. ", None, template) == "<user>S.\n\nQ</user><assistant>"
