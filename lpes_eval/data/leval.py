"""L-Eval's closed-ended tasks (An et al. 2023, arXiv 2307.11088): files, prompts, cutting, scores, and lm-eval's task.

The prompts are those of the benchmark's scripts, to the byte: ``vicuna`` is what ``vicuna-test.py`` and
``longchat-test.py`` send, ``llama2`` is ``llama2-chat-test.py``'s, and ``chat`` has the two messages of
``turbo16k-test.py``, for a model's own chat template. In sci_fi each question is asked twice: about the story, and
then, without it, about the real world.

The scores are those of ``auto_eval.py`` and ``em.py``. They read letters out of free text by rules with odd corners,
and published scores contain all of them, so they are kept: an answer without any letter counts as ``A`` (``None`` if it
is blank), ``The Cat`` answers ``C``, and a Coursera answer is first its leading letters, then every capital that stands
before a space, full stop or bracket, then the first run of letters anywhere, in the order in which it stands.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpes_eval import files
from lpes_eval.data import published, splits
from lpes_eval.data.source import Source, find
from lpes_eval.errors import DataError
from lpes_eval.harness import budget
from lpes_eval.harness.plugin import current_lm
from lpes_eval.harness.segments import Segment, join

NAMES = ("coursera", "quality", "tpo", "sci_fi")
STYLES = ("vicuna", "llama2", "chat")
CUTTING = ("prompt", "authors")
"""What ``prompt_tokens`` limits: the whole prompt, or, as in the authors' scripts, the document alone."""
SPLITS = (*splits.SPLITS, "all")
SUBFOLDERS = ("LEval-data/Closed-ended-tasks", "Closed-ended-tasks", "leval")
URL = "https://raw.githubusercontent.com/OpenLMLab/LEval/main/LEval-data/Closed-ended-tasks"

CUT_STEP = 250
"""Words that go each time a document is found too long."""

# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """One document of a file, with its questions and their references."""

    text: str
    instructions: tuple[str, ...]
    outputs: tuple[str, ...]


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


_read_once = files.remembered(read)  # one reading serves the rows, the prompts, and every size of a task


def document_numbers(total: int, split: str, search_seed: int = 0) -> list[int]:
    """The documents of a split, in the file's order.

    Questions about one document are never divided between the splits. ``all`` is the whole benchmark, for comparison
    with published scores of factors that were searched on something else.

    Raises:
        DataError: an unknown split.
    """
    published.check_choice("split", split, SPLITS)
    return list(range(total)) if split == "all" else sorted(splits.split(total, search_seed).indices(split))


def load(
    *, subset: str, split: str = "held_out", search_seed: Any = 0, **metadata: Any
) -> tuple[list[dict[str, Any]], Source]:
    """One row a question, with the number of its document, and where the file came from."""
    search_seed = splits.whole_seed(search_seed)
    published.check_choice("prompt_style", metadata.get("prompt_style") or "vicuna", STYLES)
    published.check_choice("cutting", metadata.get("cutting", "prompt"), CUTTING)
    path, kind = _locate(f"{subset}.jsonl", metadata)
    documents = _read_once(path)
    chosen = set(document_numbers(len(documents), split, search_seed))
    questions = [
        {"document": number, "instruction": instruction, "output": output}
        for number, document in enumerate(documents)
        for instruction, output in zip(document.instructions, document.outputs, strict=True)
    ]
    rows = [{"question_id": i, **question} for i, question in enumerate(questions) if question["document"] in chosen]
    if not rows:
        raise DataError(
            f"{path}: split={split} has {len(chosen)} of its {len(documents)} documents and no question; expected "
            "questions in two documents or more, to hold out and to search on, or --metadata split=all"
        )
    seed = f"{splits.SPLIT_SEED}, by document" + (f", search_seed {search_seed}" if split == "search" else "")
    return rows, Source(kind, subset, str(path), files.sha256(path), split, seed, len(questions), len(rows))


def _locate(name: str, metadata: dict[str, Any]) -> tuple[Path, str]:
    wish = published.asked(metadata, "L-Eval", name)
    if wish.folder is None:
        return published.download(f"{URL}/{name}"), wish.kind
    path = find(wish.folder, name, SUBFOLDERS)
    if path is None:
        raise DataError(f"{wish.folder}: {name} is not there; get it from {URL}/{name}")
    return path, wish.kind


# -- prompts -----------------------------------------------------------------------------------------------------------

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
class Prompt:
    """What is sent: the user's message in its segments, and, in ``chat`` style, a system message."""

    segments: tuple[Segment, ...]
    system: str = ""

    @property
    def text(self) -> str:
        """The user's message."""
        return join(self.segments)


def prompt(name: str, style: str, document: str, instruction: str) -> Prompt:
    """The exam prompt for one question of task ``name``: instruction, document, question."""
    opening, question = {
        "vicuna": (
            f"{_VICUNA_HEADER} USER: {SYSTEM[name]}Document is as follows. ",
            f" \nQuestion: {instruction}  \nAnswer:",
        ),
        "llama2": (
            f"[INST]<<SYS>>\n{SYSTEM[name]}\n<</SYS>>\n\nDocument is as follows. ",
            f" \nQuestion: {instruction}.  "
            "Please directly give the answer without any additional output or explanation [/INST]\nAnswer:",
        ),
        "chat": (
            "Document is as follows. ",
            f" Question: {instruction} \n"
            "Please directly give answer without any additional output or explanation\n Answer: ",
        ),
    }[style]
    segments = Segment("instruction", opening), Segment("document", document), Segment("question", question)
    return Prompt(segments, SYSTEM[name] if style == "chat" else "")


def fact_prompt(style: str, instruction: str) -> Prompt:
    """sci_fi's second question, about the real world.

    In every style it is asked by itself, as the benchmark's scripts for open models ask it; the one for OpenAI's models
    puts it behind the first question as a second user message, which chat templates refuse.
    """
    return Prompt((Segment("question", instruction.replace(_IN_THE_STORY, _IN_THE_WORLD) + _FACT_ENDING[style]),))


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


# -- scores ------------------------------------------------------------------------------------------------------------

LETTERS = "ABCD"
SUBSET_SCORE = 0.25
"""What some, but not all, of the correct letters are worth (``em.py``)."""

FACT_MARK = "[fact:"
"""Behind it stands the second judgement, about the real world, in sci_fi's references and predictions."""

_RUN = re.compile(f"[{LETTERS}]+")
_OPTION = re.compile(r"\s*[A-Z](?=[\s.)])")
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def predicted_letters(response: str, several: bool = False) -> str:
    """The letters that L-Eval takes a response to answer, or ``None`` (the word) for a blank one.

    Args:
        response: the generated text.
        several: whether a question may have several correct letters (Coursera).
    """
    if not response.strip():
        return "None"
    if response in LETTERS:  # "AB", "BCD" and the like too, but not "AC"
        return response
    run = _RUN.search(response)
    if run and not several:
        return run[0][0]
    leading = response[: len(response) - len(response.lstrip(LETTERS))]
    if len(leading) > 1:
        return _sorted_set(leading)
    rest = response[len(leading) :].split("Question")[0]
    options = leading + "".join(_OPTION.findall(rest))
    if letters := _sorted_set(c for c in options if c in LETTERS):
        return letters
    run = _RUN.search(rest)
    return run[0] if run else "A"


def reference_letters(output: str) -> str:
    """The correct letters: those in the first word of a reference; ``A`` if it has none.

    Raises:
        DataError: a blank reference, which the benchmark has nowhere.
    """
    words = output.split()
    if not words:
        raise DataError("L-Eval: a reference answer is blank; expected its letters first")
    return "".join(c for c in words[0] if c in LETTERS) or "A"


def exact_match(prediction: str, reference: str) -> float:
    """L-Eval's exact match of an extracted answer with an extracted reference: 1, 0.25 or 0.

    Of letters, the same string is worth 1 and any other choice from the correct letters 0.25. Whatever else (``true``,
    ``false``, numbers) is worth 1 if the reference is contained in the prediction, case and spaces aside.
    """
    wanted = _normalize(reference)
    if all(c in LETTERS for c in wanted):
        found = _normalize(prediction)
        if found == wanted:
            return 1.0
        return SUBSET_SCORE if set(found) <= set(wanted) else 0.0
    try:
        return float(float(prediction) == float(reference))
    except ValueError:
        wanted, found = (text.lower().replace(" ", "") for text in (reference, prediction))
        return float(wanted in found)


def judgement_scores(loyalty_response: str, fact_response: str, output: str) -> tuple[float, float]:
    """The two scores of a sci_fi question: loyalty to the story, and knowledge of the real world.

    The benchmark writes both responses into one line before it reads them, and so does this: a story's response that
    itself contains ``[fact:`` takes the second one's place.

    Args:
        loyalty_response: what was generated for the question about the document.
        fact_response: what was generated for the question about the real world.
        output: the reference, such as ``True [fact: False]``.

    Raises:
        DataError: a reference without its second judgement.
    """
    if FACT_MARK not in output.lower():
        raise DataError(f"L-Eval, sci_fi: the reference {output!r} has no '[fact: ...]'")
    references = _two_parts(output)
    parts = _two_parts(f"{loyalty_response} {FACT_MARK} {fact_response}]")
    loyalty, fact = (exact_match(_first_verdict(part), wanted) for part, wanted in zip(parts, references, strict=True))
    return loyalty, fact


def _two_parts(text: str) -> tuple[str, str]:
    loyalty, fact, *_ = text.lower().split(FACT_MARK)
    return loyalty.strip(), fact[:-1].strip()


def _first_verdict(text: str) -> str:
    verdicts = (verdict for word in text.split() for verdict in ("true", "false") if verdict in word)
    return next(verdicts, "<error>")


def _sorted_set(letters: Iterable[str]) -> str:
    return "".join(sorted(set(letters)))


def _normalize(text: str) -> str:
    # no lower-casing here, unlike SQuAD's normalisation: the article "a" goes, the answer "A" stays
    return " ".join(_ARTICLE.sub(" ", text.translate(_NO_PUNCTUATION)).split())


# -- the task ----------------------------------------------------------------------------------------------------------


def _one_letter(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"exact_match": exact_match(predicted_letters(results[0]), reference_letters(doc["output"]))}


def _several_letters(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    letters = predicted_letters(results[0], several=True)
    return {"exact_match": exact_match(letters, reference_letters(doc["output"]))}


def _two_judgements(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    loyalty, fact = judgement_scores(results[0], results[1], doc["output"])
    return {"exact_match": (loyalty + fact) / 2, "loyalty": loyalty, "fact": fact}


_SCORING = {"coursera": _several_letters, "quality": _one_letter, "tpo": _one_letter, "sci_fi": _two_judgements}


class Task(published.ExamTask):
    """The questions of one of the four sets; a document is cut once, for all its questions."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._cut: dict[Any, str] = {}
        subset = config["metadata"]["subset"]
        metrics = ("exact_match", "loyalty", "fact") if subset == "sci_fi" else ("exact_match",)
        config = {"doc_to_target": "output", **config}
        super().__init__(config, load, _SCORING[subset], dict.fromkeys(metrics, "mean"))

    def budget(self) -> budget.Budget:
        """What a prompt may measure; by the authors' rule only the window limits it."""
        if self._by_authors:
            new_tokens = self.config.generation_kwargs["max_gen_toks"]
            return budget.for_model(current_lm(), new_tokens, self.config.metadata)
        return super().budget()

    def doc_to_text(self, doc: dict[str, Any], doc_to_text: Any = None) -> str:
        """The prompt with the whole document; what is sent is fitted to the model (``published_prompt``)."""
        return self._prompt(doc["instruction"], self._style(False), self._documents[doc["document"]].text).text

    def published_prompt(self, doc: dict[str, Any], render: Callable[..., str], chat: bool) -> str | list[str]:
        """The prompt as the model gets it; for sci_fi a list of two, the second about the real world."""
        style = self._style(chat)

        def sent(prompt: Prompt) -> str:
            return render(prompt.text, prompt.system)

        context = sent(self._prompt(doc["instruction"], style, self._fitted(doc["document"], style, sent)))
        if self.config.metadata["subset"] != "sci_fi":
            return context
        return [context, sent(fact_prompt(style, doc["instruction"]))]

    def construct_requests(self, doc: dict[str, Any], ctx: str | list[str], **kwargs: Any) -> Any:
        """One request a prompt."""
        if isinstance(ctx, str):
            return super().construct_requests(doc, ctx, **kwargs)
        requests: list[Any] = [super(Task, self).construct_requests(doc, context, **kwargs) for context in ctx]
        for number, request in enumerate(requests):
            request.idx = number
        return requests

    @property
    def _documents(self) -> list[Document]:
        return _read_once(Path(self.config.metadata["source"]["location"]))

    @property
    def _by_authors(self) -> bool:
        return self.config.metadata.get("cutting") == "authors"

    def _style(self, chat: bool) -> str:
        return self.config.metadata.get("prompt_style") or ("chat" if chat else "vicuna")

    def _prompt(self, instruction: str, style: str, document: str) -> Prompt:
        return prompt(self.config.metadata["subset"], style, document, instruction)

    def _fitted(self, number: int, style: str, sent: Callable[[Prompt], str]) -> str:
        """The document, cut so that the prompt of each of its questions fits, or as the authors cut it."""
        document = self._documents[number]
        if current_lm() is None:  # nothing is sent, so nothing has to fit
            return document.text
        limits, limit = self.budget(), self.config.metadata["prompt_tokens"]
        around = sent(Prompt((), " "))  # chat template and system instruction
        key = (number, style, around, limits.tokens, current_lm())
        if key not in self._cut:
            questions = sorted(document.instructions, key=limits.count, reverse=True)

            def fits(text: str) -> bool:
                if self._by_authors:
                    return limits.count(text) <= limit
                return all(limits.fits(sent(self._prompt(question, style, text))) for question in questions)

            text = cut(document.text, limit if self._by_authors else limits.tokens, fits)
            if text is None:
                bare = limits.count(sent(self._prompt(questions[0], style, "")))
                raise limits.too_long(f"{self.config.task}, document {number}, without its text", bare)
            self._cut[key] = text
        return self._cut[key]
