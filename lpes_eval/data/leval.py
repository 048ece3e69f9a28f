"""L-Eval's closed-ended tasks (An et al. 2023, arXiv 2307.11088): long documents, each with many exam questions.

The prompts are those of the benchmark's scripts, to the byte: ``vicuna`` is what ``vicuna-test.py`` and
``longchat-test.py`` send, ``llama2`` is ``llama2-chat-test.py``'s, and ``chat`` has the two messages of
``turbo16k-test.py``, for a model's own chat template. In sci_fi each question is asked twice: about the story, and
then, without it, about the real world.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lpes_eval import files
from lpes_eval.data import splits
from lpes_eval.errors import DataError

NAMES = ("coursera", "quality", "tpo", "sci_fi")
STYLES = ("vicuna", "llama2", "chat")
SUBFOLDERS = ("LEval-data/Closed-ended-tasks", "Closed-ended-tasks", "leval")
URL = "https://raw.githubusercontent.com/OpenLMLab/LEval/main/LEval-data/Closed-ended-tasks"
SPLITS = (*splits.SPLITS, "all")

CUT_STEP = 250
"""Words that go each time a document is found too long."""

_ONE_LETTER = (
    "Now you are given a very long document. Please follow the instruction based on this document. For multi-choice "
    "questions, there is only a sinlge correct option. Please only provide the letter corresponding to the answer "
    "(like A or B) when answering. For other questions, please directly give the concise and accurate answer. "
)
_SEVERAL_LETTERS = (
    "Now you are given a very long document. Please follow the instruction based on this document. For multi-choice "
    "questions, there could be a sinlge correct option or multiple correct options. Please only provide the letter "
    "corresponding to the answer (like A or AB) when answering. "
)
_TRUE_OR_FALSE = (
    "Now you are given a scientific fiction. I will ask you some questions and the answer should be "
    '"True" or "False". Notice that you should answer the question based on the evidence in the document instead of '
    "your background knowledge."
)
SYSTEM = {"coursera": _SEVERAL_LETTERS, "quality": _ONE_LETTER, "tpo": _ONE_LETTER, "sci_fi": _TRUE_OR_FALSE}

_VICUNA_HEADER = (  # the two sentences are not separated by a space
    "A chat between a curious user and an artificial intelligence assistant."
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_IN_THE_STORY = "based on the world described in the document."
_IN_THE_WORLD = "based on the real-world knowledge and facts up until your last training"
_FACT_ENDING = {
    "vicuna": "\nAnswer:",
    "llama2": "Please directly answer without any additional output or explanation. \nAnswer:",
    "chat": "\nPlease directly give answer without any additional output or explanation \nAnswer:",
}


@dataclass(frozen=True)
class Document:
    """One document of a file, with its questions and their references."""

    text: str
    instructions: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Prompt:
    """What is sent: one text, or, in ``chat`` style, a system message and a user's."""

    text: str
    system: str = ""


def file_name(name: str) -> str:
    """A task's file in the benchmark's repository, folder ``LEval-data/Closed-ended-tasks``."""
    return f"{name}.jsonl"


def read(path: str | Path) -> list[Document]:
    """The documents of a file.

    Raises:
        DataError: no such file, a broken line, or one that is not in the benchmark's form.
    """
    documents = []
    for number, line in enumerate(files.read_jsonl(path, required=("input", "instructions", "outputs")), 1):
        text, instructions, outputs = line["input"], line["instructions"], line["outputs"]
        where = f"{path}, document {number}"
        if not isinstance(text, str):
            raise DataError(f"{where}: 'input' is {type(text).__name__}, expected the document's text")
        for field, values in (("instructions", instructions), ("outputs", outputs)):
            if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
                raise DataError(f"{where}: {field!r} is not a list of strings")
        if len(instructions) != len(outputs):
            raise DataError(f"{where}: {len(instructions)} instructions but {len(outputs)} outputs")
        documents.append(Document(text, tuple(instructions), tuple(outputs)))
    if not documents:
        raise DataError(f"{path}: the file holds no document")
    return documents


def document_numbers(total: int, split: str, search_seed: int = 0) -> list[int]:
    """The documents of a split, in the file's order.

    Questions about one document are never divided between the splits. ``all`` is the whole benchmark, for comparison
    with published scores of factors that were searched on something else.

    Raises:
        DataError: an unknown split.
    """
    if split == "all":
        return list(range(total))
    if split not in splits.SPLITS:
        raise DataError(f"split={split!r} is not a split of L-Eval; expected one of {', '.join(SPLITS)}")
    return sorted(splits.split(total, search_seed).indices(split))


def prompt(name: str, style: str, document: str, instruction: str) -> Prompt:
    """The exam prompt for one question of task ``name``."""
    system = SYSTEM[name]
    if style == "vicuna":
        return Prompt(
            f"{_VICUNA_HEADER} USER: {system}Document is as follows. {document} \nQuestion: {instruction}  \nAnswer:"
        )
    if style == "llama2":
        return Prompt(
            f"[INST]<<SYS>>\n{system}\n<</SYS>>\n\nDocument is as follows. {document} \nQuestion: {instruction}.  "
            "Please directly give the answer without any additional output or explanation [/INST]\nAnswer:"
        )
    if style == "chat":
        return Prompt(
            f"Document is as follows. {document} Question: {instruction} \n"
            "Please directly give answer without any additional output or explanation\n Answer: ",
            system,
        )
    raise DataError(f"prompt_style={style!r} is not one of L-Eval's prompts; expected one of {', '.join(STYLES)}")


def fact_prompt(style: str, instruction: str) -> Prompt:
    """sci_fi's second question, about the real world.

    In every style it is asked by itself, as the benchmark's scripts for open models ask it; the one for OpenAI's models
    puts it behind the first question as a second user message, which chat templates refuse.
    """
    return Prompt(instruction.replace(_IN_THE_STORY, _IN_THE_WORLD) + _FACT_ENDING[style])


def cut(document: str, limit: int, fits: Callable[[str], bool]) -> str | None:
    """Shorten a document as L-Eval does: to its first ``limit`` words, then to 250 words less, until it fits.

    Words are what stands between single spaces. L-Eval asks whether the document alone has at most ``limit`` tokens;
    here ``fits`` is asked, so that the whole prompt can be held to the limit.

    Returns:
        The document, whole if it fits, or None if not even the last step made it fit.
    """
    text, words = document, limit
    while not fits(text):
        if words <= 0:
            return None
        text = " ".join(text.split(" ")[:words])
        words -= CUT_STEP
    return text
