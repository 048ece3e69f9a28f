"""What the benchmarks' tests share: files, a toy model made on the spot, and an evaluation with it."""

import gzip
import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared():
    """Finds one of the benchmarks' own files where there are such beside the repository."""

    def find(name: str) -> Path:
        path = Path(__file__).resolve().parents[3] / "shared" / "data" / name
        return path if path.exists() else pytest.skip(f"{name} is not beside the repository (../shared/data)")

    return find


@pytest.fixture(scope="session")
def write():
    """Writes lines of JSON, or texts as they are, to a file, compressed where it is called ``.gz``."""

    def put(path: Path, *lines) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path

    return put


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level BPE with merges over English, and ``<s>`` in front of every text."""
    from tokenizers import ByteLevelBPETokenizer, processors
    from transformers import PreTrainedTokenizerFast

    inner = ByteLevelBPETokenizer()
    texts = ["the question is what the answer of the document should be, and the story goes on"] * 9
    inner.train_from_iterator(texts, vocab_size=400, special_tokens=["<s>", "</s>"], show_progress=False)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    made.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</{{ m['role'] }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return made


@pytest.fixture(scope="session")
def toy(tmp_path_factory, tokenizer):
    """lm-eval's model of a tiny Llama that was trained on ``window`` tokens."""
    from lm_eval.models.huggingface import HFLM

    from tiny_models import tiny_config, tiny_model

    def model(window: int, **arguments):
        folder = tmp_path_factory.mktemp("model")
        sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": window}
        tiny_model(tiny_config("llama", **sizes, bos_token_id=0, eos_token_id=1)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return HFLM(str(folder), device="cpu", batch_size=2, **arguments)

    return model
