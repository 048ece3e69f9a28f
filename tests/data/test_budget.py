"""A prompt fits the model or is refused with the numbers; what may be cut is cut as little as possible."""

from types import SimpleNamespace

import pytest
import tiny_llama

from lpes_eval.errors import DataError, PromptTooLong
from lpes_eval.harness import budget

DOCUMENT = "the story of a döcument “and” the question that goes on; " * 20


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_llama.tokenizer()


def model(tokenizer, window=200, **attributes):
    """What a budget uses of one of lm-eval's models."""
    return SimpleNamespace(tokenizer=tokenizer, max_length=window, **attributes)


def test_window_holds_prompt_and_answer(tokenizer):
    limits = budget.for_model(model(tokenizer, 200), new_tokens=50)
    assert (limits.tokens, limits.window, limits.new_tokens) == (150, 200, 50)


def test_protocol_allows_no_more_than_its_own_limit(tokenizer):
    assert budget.for_model(model(tokenizer, 200), 50, cap=100).tokens == 100


def test_smaller_window_than_the_protocol_allows_less_and_says_so(tokenizer, caplog):
    budget._warn_once.cache_clear()
    assert budget.for_model(model(tokenizer, 200), 50, cap=3584).tokens == 150
    assert "150" in caplog.text
    assert "3584" in caplog.text


def test_an_answer_that_fills_the_window_is_refused(tokenizer):
    with pytest.raises(PromptTooLong, match=r"window of 200 .* 512 new tokens.*max_gen_toks"):
        budget.for_model(model(tokenizer, 200), 512)


def test_the_beginning_of_text_token_counts(tokenizer):
    limits = budget.for_model(model(tokenizer), 50)
    assert limits.count("question") == len(tokenizer.backend_tokenizer.encode("question", add_special_tokens=False)) + 1


def test_the_models_own_encoding_is_what_counts(tokenizer):
    lm = model(tokenizer, backend="causal", tok_encode=lambda text: [7] * 3)
    assert budget.for_model(lm, 50).count("anything") == 3


def test_an_encoder_decoders_window_holds_the_prompt_alone(tokenizer):
    assert budget.for_model(model(tokenizer, 200, backend="seq2seq"), 50).tokens == 200


def test_a_prompt_that_may_not_be_cut_is_refused_with_the_numbers(tokenizer):
    limits = budget.for_model(model(tokenizer, 200), 50)
    prompt = "x" * 149
    assert limits.check(prompt, "kv") == prompt  # 149 and the beginning-of-text token
    with pytest.raises(PromptTooLong, match=r"kv, question 3: 151 prompt tokens, at most 150 \(window of 200 less 50"):
        limits.check("x" * 150, "kv, question 3")


def test_a_model_without_tokenizer_is_refused():
    with pytest.raises(DataError, match="tokenizer=NAME"):
        budget.for_model(SimpleNamespace(max_length=100), 10)


def test_a_model_without_window_is_refused(tokenizer):
    with pytest.raises(DataError, match="max_length=N"):
        budget.for_model(SimpleNamespace(tokenizer=tokenizer), 10)


def test_metadata_names_what_an_api_model_does_not_have(tokenizer, tmp_path, monkeypatch):
    import transformers

    tokenizer.save_pretrained(tmp_path)
    loads, original = [], transformers.AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: (loads.append(a), original(*a, **k))[1]
    )
    metadata = {"tokenizer": str(tmp_path), "max_length": 300}
    for _ in range(3):
        limits = budget.for_model(SimpleNamespace(tokenizer=None), 100, metadata)
    assert limits.tokens == 200
    assert limits.count("the question") == len(tokenizer("the question")["input_ids"])
    assert len(loads) == 1


def test_a_rendered_chat_of_an_api_model_is_counted(tokenizer):
    from lm_eval.models.api_models import JsonChatStr

    limits = budget.for_model(model(tokenizer), 50)
    assert limits.count(JsonChatStr("the question")) == limits.count("the question")


def slowest_search(limits, document, compose):
    """Every end in turn, from the last."""
    for end in range(len(document), -1, -1):
        if limits.count(compose(document[:end])) <= limits.tokens:
            return document[:end]
    return None


@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize("window", [60, 111, 200, 349, 5000])
def test_a_cut_document_is_the_longest_that_fits(tokenizer, window, offsets):
    limits = budget.for_model(model(tokenizer, window), 20)
    if not offsets:  # a tokenizer that does not tell where tokens stand
        limits = budget.Budget(limits.tokens, window, 20, None, limits.encode)

    def compose(document):
        return f"Read: {document} [cut]\nQuestion?"

    found = limits.longest_beginning(DOCUMENT, compose, "test")
    best = slowest_search(limits, DOCUMENT, compose)
    assert limits.count(compose(found)) <= limits.tokens
    assert best.startswith(found)
    # At most the one token that merged, or would merge, across the cut: characters of two bytes are whole here.
    assert limits.count(compose(best)) - limits.count(compose(found)) <= 1


def test_no_room_for_a_document_is_refused(tokenizer):
    limits = budget.for_model(model(tokenizer, 40), 20)
    with pytest.raises(PromptTooLong, match=r"test without its document: \d+ prompt tokens"):
        limits.longest_beginning("a long document", lambda d: f"{'Instruction ' * 9}{d}", "test")


def chat(tokenizer):
    def template(messages, add_generation_prompt=True):
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    return template


def test_render_without_template_joins_system_and_user():
    assert budget.render("Q", "S. ") == "S. Q"
    assert budget.render("Q", "S. ", "I") == "I\n\nS. Q"
    assert budget.render("Q") == "Q"


def test_render_with_template(tokenizer):
    template = chat(tokenizer)
    assert budget.render("Q", "S. ", "I", template) == "<system>I\n\nS.</system><user>Q</user><assistant>"
    assert budget.render("Q", chat_template=template) == "<user>Q</user><assistant>"


def test_a_system_message_is_not_lost_where_the_template_has_none(tmp_path):
    """lm-eval answers a template's refusal by dropping the system message, and with it half of the prompt."""
    from lm_eval.models.huggingface import HFLM

    lm = SimpleNamespace(tokenizer=tiny_llama.tokenizer(tiny_llama.NO_SYSTEM), chat_template_args={})

    def template(messages):
        return HFLM.apply_chat_template(lm, messages)

    assert "S." not in template([{"role": "system", "content": "S."}, {"role": "user", "content": "Q"}])
    assert budget.render("Q", "S. ", None, template) == "<user>S.\n\nQ</user><assistant>"
