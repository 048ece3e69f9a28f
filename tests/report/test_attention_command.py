"""The attention of an answer's tokens, against transformers' own ``output_attentions`` of all tokens at once."""

import json

import pytest
import torch

import lpes_eval
from lpes_eval import cli, methods
from lpes_eval.attention.measure import REGIONS, load, prompts, shares, weights
from lpes_eval.decoder import find_decoder
from lpes_eval.errors import PromptTooLong, UnsupportedModel
from lpes_eval.report import figures
from test_families import SUPPORTED, tiny_config, tiny_model

FACTORS = [1.3, 1.0, 2.0, 1.7]
PROMPT, LENGTH = 18, 24  # longer than the tiny models' windows
FAST = ("gemma2", "gpt_oss", "llama", "qwen3_next")

#: Families whose pass over one token from the cache is not, in transformers, what their pass over all tokens is
#: (falcon's eager attention of all tokens lets each see those after it).
NOT_THE_SAME_FROM_CACHE = {"bamba", "falcon", "minimax", "moshi", "recurrent_gemma", "zamba2"}


def built(family: str):
    model = tiny_model(tiny_config(family))
    try:  # some mixtures of experts are of float32 alone
        with torch.no_grad():
            model.double()(input_ids=torch.tensor([[3, 4]]))
    except RuntimeError:
        model.float()
    lpes_eval.apply(model, FACTORS[: len(find_decoder(model).layers)])
    return model


def one_pass(model, ids) -> list:
    """The weights of each layer that has some, (heads, T, T), longcat's two attentions a layer as one."""
    try:
        model.set_attn_implementation("eager")
    except ValueError:  # Gemma 4's ears have no other one than their own
        model.config.get_text_config()._attn_implementation = "eager"
    with torch.no_grad():
        found = [
            x[0] for x in model(input_ids=ids, output_attentions=True, use_cache=False).attentions if x is not None
        ]
    a_layer = 2 if model.config.model_type == "longcat_flash" else 1
    return [torch.cat(found[i : i + a_layer]) for i in range(0, len(found), a_layer)]


@pytest.mark.parametrize(
    "family", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SUPPORTED if name not in FAST)]
)
def test_the_answers_attention_is_that_of_eager_attention_over_all_tokens(family: str) -> None:
    ids = torch.randint(3, 128, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    if family == "deepseek_v4":
        with pytest.raises(UnsupportedModel, match="the keys of layer 1 are not those of single tokens"):
            list(weights(built(family), ids[0].tolist(), LENGTH - PROMPT))
        return
    found = list(weights(built(family), ids[0].tolist(), LENGTH - PROMPT))
    assert [w.shape[-1] for of_token in found for w in of_token.values()] == [
        last for last in range(PROMPT, LENGTH) for _ in found[0]
    ]
    expected = one_pass(built(family), ids)
    if family not in NOT_THE_SAME_FROM_CACHE:
        assert len(found[0]) == len(expected)
        for row, of_token in enumerate(found, PROMPT - 1):
            for weight, whole in zip(of_token.values(), expected, strict=True):
                torch.testing.assert_close(weight, whole[:, row, : row + 1], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def lm():
    return methods.load("lpes")("reference-kv", device="cpu")


@pytest.mark.parametrize("task", ["kv_retrieval", "mdqa_pos"])
def test_the_tokens_of_a_region_are_those_of_its_segments_and_shares_those_of_the_weights(lm, task) -> None:
    size = {"num_keys": 9} if task == "kv_retrieval" else {"num_documents": 4}
    loaded = load(task, {**size, "positions": [0, 100]})
    found = list(prompts(lm, loaded, 2))
    assert [prompt.position for prompt in found] == [0, 100, 0, 100]
    for number, prompt in enumerate(found):
        text = {
            region: lm.tok_decode([prompt.tokens[k] for k in tokens])
            for region, tokens in zip(REGIONS, prompt.regions, strict=True)
        }
        *thirds, _ = map(len, prompt.regions)
        assert max(thirds) - min(thirds) <= 1
        segments = loaded.segments(list(loaded.test_docs())[number // 2], prompt.position)
        assert text["beginning"] + text["middle"] + text["end"] == "".join(one.text for one in segments[1:-1])
        gold = next(one.text for one in segments if one.label == "gold")
        assert gold.strip(' {",\n') in text["gold"]
        assert abs(len(text["gold"]) - len(gold)) <= 2  # a token may reach over an end
        third = REGIONS.index("beginning" if prompt.position == 0 else "end")
        assert {*prompt.regions[-1]} <= {*prompt.regions[third]}
        answer = lm.tok_decode(prompt.tokens[-prompt.answer :])
        assert answer.strip() in text["gold"]
        if task == "kv_retrieval":
            assert answer.startswith(' "')  # as the model writes a value
    rows = list(weights(lm.model, prompt.tokens, prompt.answer))
    for h, share in shares(lm.model, prompt).items():
        for region, value in zip(prompt.regions, share, strict=True):
            expected = sum(row[h][:, region].sum(-1).mean() for row in rows) / len(rows)
            torch.testing.assert_close(value, expected)
        assert 0 < share[:3].sum() < 1


def test_what_cannot_be_measured_is_refused_in_one_line(lm, tmp_path, capsys, monkeypatch) -> None:
    assert cli.main(["attention", "reference-kv", "--device", "cpu", "-o", str(tmp_path), "--task", "mmlu"]) == 2
    assert "--task mmlu: no such task" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["attention", "reference-kv", "--model_args", "device=cpu"])
    assert "argument --model_args: device=cpu: " in capsys.readouterr().err
    small = load("kv_retrieval", {"num_keys": 3})
    monkeypatch.setattr(type(lm), "max_length", 9)
    with pytest.raises(PromptTooLong, match="the model's window is 9"):
        list(prompts(lm, small, 1))


def test_the_picture_shows_what_the_command_measured_below_the_factors(tmp_path) -> None:
    folder = tmp_path / "looks"
    given = ["--factors", "1.5", "--questions", "1", "--metadata", "num_keys=3", "--device", "cpu", "-o", str(folder)]
    assert cli.main(["attention", "reference-kv", *given]) == 0
    data = json.loads((folder / "attention.json").read_text())
    depth = len(data["sets"]["1.5"]["layers"])
    assert [data["sets"][name]["factors"] for name in ("plain", "1.5")] == [None, [1.5] * depth]
    assert (folder / "attention.png").read_bytes().startswith(b"\x89PNG")
    panels = figures.attention(data).figure.axes
    assert [panel.get_ylabel() for panel in panels] == ["factor", *(f"{region} (%)" for region in REGIONS)]
    shown = [list(panel.get_lines()[1].get_ydata()) for panel in panels[:2]]
    assert shown == [[1.5] * depth, [100 * share[0] for share in data["sets"]["1.5"]["shares"]]]
