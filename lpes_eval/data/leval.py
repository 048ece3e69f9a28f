"""L-Eval's closed-ended tasks (An et al. 2023, arXiv 2307.11088): files, prompts, cutting, scores, and lm-eval's task.

The prompts are those of the benchmark's scripts, to the byte: ``vicuna`` is what ``vicuna-test.py`` and
``longchat-test.py`` send, and ``chat`` has the two messages of ``turbo16k-test.py``, for a model's own chat template.
In sci_fi each question is asked twice: about the story, and then, without it, about the real world. The scores are
those of ``auto_eval.py`` and ``em.py``, with all odd corners of their rules, since published scores contain them.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lpes_eval import files
from lpes_eval.data import splits
from lpes_eval.data.documents import bare
from lpes_eval.data.source import Files, Source, asked, read_examples
from lpes_eval.errors import DataError
from lpes_eval.harness.segments import Segment, join
from lpes_eval.harness.task import ExamTask

NAMES = ("coursera", "quality", "tpo", "sci_fi")
OFFICIAL = Files(
    "L-Eval",
    "{}.jsonl",
    "https://raw.githubusercontent.com/OpenLMLab/LEval/main/LEval-data/Closed-ended-tasks",
    places=("LEval-data/Closed-ended-tasks", "Closed-ended-tasks", "leval"),
)
LINE = {"input": "DOCUMENT", "instructions": ["QUESTION"], "outputs": ["A"]}


def read(path: Path, name: str) -> list[dict[str, Any]]:
    """The documents of a file of subset ``name``, as ``LINE`` has them; raises ``DataError`` for any other line."""

    def parse(number: int, line: dict[str, Any]) -> dict[str, Any]:
        instructions, outputs = line["instructions"], line["outputs"]
        if not all(output.strip() for output in outputs):
            raise ValueError("'outputs' holds an empty text, expected the right letters")
        if len(instructions) != len(outputs):
            raise ValueError(f"{len(instructions)} instructions but {len(outputs)} outputs")
        if name == "sci_fi" and (bad := [output for output in outputs if FACT_MARK not in output.lower()]):
            raise ValueError(f"the reference {files.shown(bad[0])} has no '[fact: ...]'")
        return line

    return read_examples(path, LINE, parse)


_LETTERS = (
    "Now you are given a very long document. Please follow the instruction based on this document. For multi-choice "
    "questions, there {} Please only provide the letter corresponding to the answer (like A or {}) when answering. "
)
_ONE_LETTER = _LETTERS.format("is only a sinlge correct option.", "B")
_ONE_LETTER += "For other questions, please directly give the concise and accurate answer. "
_SEVERAL_LETTERS = _LETTERS.format("could be a sinlge correct option or multiple correct options.", "AB")
_TRUE_OR_FALSE = (
    "Now you are given a scientific fiction. I will ask you some questions and the answer should be "
    '"True" or "False". Notice that you should answer the question based on the evidence in the document instead of '
    "your background knowledge."
)
SYSTEM = {"coursera": _SEVERAL_LETTERS, "quality": _ONE_LETTER, "tpo": _ONE_LETTER, "sci_fi": _TRUE_OR_FALSE}

STYLES = {
    "vicuna": (
        "A chat between a curious user and an artificial intelligence assistant."  # no space
        "The assistant gives helpful, detailed, and polite answers to the user's questions. "
        "USER: {system}Document is as follows. ",
        " \nQuestion: {question}  \nAnswer:",
        "{question}\nAnswer:",
    ),
    "chat": (
        "Document is as follows. ",
        " Question: {question} \nPlease directly give answer without any additional output or explanation\n Answer: ",
        "{question}\nPlease directly give answer without any additional output or explanation \nAnswer:",
    ),
}
"""What stands before the document, what behind it, and the question that is asked without it."""
_IN_THE_STORY = "based on the world described in the document."
_IN_THE_WORLD = "based on the real-world knowledge and facts up until your last training"


def prompt(name: str, style: str, document: str, instruction: str) -> tuple[list[Segment], str]:
    """The exam prompt for one question of subset ``name``: the user's message, and, in ``chat`` style, the system's."""
    opening, question, _ = STYLES[style]
    segments = [
        Segment("instruction", opening.format(system=SYSTEM[name])),
        Segment("document", document),
        Segment("question", question.format(question=instruction)),
    ]
    return segments, SYSTEM[name] if style == "chat" else ""


def fact_prompt(style: str, instruction: str) -> str:
    """sci_fi's second question, about the real world, by itself as in the benchmark's scripts for open models."""
    return STYLES[style][2].format(question=instruction.replace(_IN_THE_STORY, _IN_THE_WORLD))


def cut(document: str, limit: int, fits: Callable[[str], bool]) -> str | None:
    """Shorten a document to its first ``limit`` words, between single spaces, then by 250 until it fits, or None."""
    text, words = document, limit
    while not fits(text):
        if words <= 0:
            return None
        text = " ".join(text.split(" ")[:words])
        words -= 250
    return text


LETTERS = "ABCD"
FACT_MARK = "[fact:"
"""Behind it stands the second judgement, about the real world, in sci_fi's references and predictions."""

_OPTION = re.compile(r"\s*[A-Z](?=[\s.)])")


def predicted_letters(response: str, several: bool = False) -> str:
    """The letters that L-Eval reads in a response: one, or ``several`` (Coursera); the word ``None`` in a blank one."""
    if not response.strip():
        return "None"
    if response in LETTERS:  # "AB", "BCD" and the like too, but not "AC"
        return response
    run = re.search("[ABCD]+", response)
    if run and not several:
        return run[0][0]
    leading = response[: len(response) - len(response.lstrip(LETTERS))]
    if len(leading) > 1:
        return "".join(sorted(set(leading)))
    rest = response[len(leading) :].split("Question")[0]
    options = leading + "".join(_OPTION.findall(rest))
    if letters := "".join(sorted(set(options) & set(LETTERS))):
        return letters
    run = re.search("[ABCD]+", rest)
    return run[0] if run else "A"


def reference_letters(output: str) -> str:
    """The correct letters: those in the first word of a reference; ``A`` if it has none."""
    return "".join(c for c in output.split()[0] if c in LETTERS) or "A"


def exact_match(prediction: str, reference: str) -> float:
    """L-Eval's exact match: of letters 1 for the same, 0.25 for others of the correct ones; else 1 if contained."""
    # SQuAD's normalisation without its lower-casing: the article "a" goes, the answer "A" stays
    wanted, found = bare(reference), bare(prediction)
    if set(wanted) <= set(LETTERS):
        if found == wanted:
            return 1.0
        return 0.25 if set(found) <= set(wanted) else 0.0
    try:
        return float(float(prediction) == float(reference))
    except ValueError:
        wanted, found = (text.lower().replace(" ", "") for text in (reference, prediction))
        return float(wanted in found)


def judgement_scores(loyalty_response: str, fact_response: str, output: str) -> tuple[float, float]:
    """Loyalty to the story, and knowledge of the real world; a first response with ``[fact:`` displaces the second."""

    def two_parts(text: str) -> tuple[str, str]:
        loyalty, fact, *_ = text.lower().split(FACT_MARK)
        return loyalty.strip(), fact[:-1].strip()

    def first_verdict(text: str) -> str:
        verdicts = (verdict for word in text.split() for verdict in ("true", "false") if verdict in word)
        return next(verdicts, "<error>")

    said = two_parts(f"{loyalty_response} {FACT_MARK} {fact_response}]")
    loyalty, fact = map(exact_match, map(first_verdict, said), two_parts(output))
    return loyalty, fact


class Task(ExamTask):
    """The questions of one of the four sets; a document is cut once, for all its questions."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._cut: dict[Any, str] = {}
        self.subset = config["metadata"]["subset"]
        metrics = ("exact_match", "loyalty", "fact") if self.subset == "sci_fi" else ("exact_match",)
        super().__init__({"doc_to_target": "output", **config}, dict.fromkeys(metrics, "mean"))

    def load(
        self, *, split: str = "held_out", search_seed: int = 0, **settings: Any
    ) -> tuple[list[dict[str, Any]], Source]:
        """One row a question, with the number of its document. Splits never divide the questions about a document."""
        request = asked(settings)
        path = OFFICIAL.path(request, self.subset)
        self.documents = read(path, self.subset)
        chosen = splits.indices(len(self.documents), split, search_seed)
        questions = [
            {"document": number, "instruction": instruction, "output": output}
            for number, document in enumerate(self.documents)
            for instruction, output in zip(document["instructions"], document["outputs"], strict=True)
        ]
        rows = [{"question_id": i, **row} for i, row in enumerate(questions) if row["document"] in chosen]
        if not rows:
            message = "has no question; expected questions in two documents or more, or --metadata split=all"
            raise DataError(f"{path}: split={split} {message}")
        seed = splits.seed(split, search_seed).replace(str(splits.SPLIT_SEED), f"{splits.SPLIT_SEED}, by document")
        origin = (request.kind, self.subset, str(path), files.sha256(path))
        return rows, Source(*origin, split, seed, len(questions), len(rows))

    def scores(self, doc: dict[str, Any], results: list[str]) -> dict[str, float]:
        """The scores of one question."""
        if self.subset == "sci_fi":
            loyalty, fact = judgement_scores(results[0], results[1], doc["output"])
            return {"exact_match": (loyalty + fact) / 2, "loyalty": loyalty, "fact": fact}
        letters = predicted_letters(results[0], several=self.subset == "coursera")
        return {"exact_match": exact_match(letters, reference_letters(doc["output"]))}

    def doc_to_text(self, doc: dict[str, Any], doc_to_text: Any = None) -> str:
        """The prompt with the whole document."""
        document = self.documents[doc["document"]]["input"]
        return join(prompt(self.subset, "vicuna", document, doc["instruction"])[0])

    def prompts(self, doc: dict[str, Any], render: Callable[..., str], chat: bool) -> str | list[str]:
        """The prompt as the model gets it; for sci_fi a list of two, the second about the real world."""
        style = "chat" if chat else "vicuna"

        def sent(document: str, instruction: str) -> str:
            segments, system = prompt(self.subset, style, document, instruction)
            return render(join(segments), system)

        context = sent(self._fitted(doc["document"], sent), doc["instruction"])
        if self.subset != "sci_fi":
            return context
        return [context, render(fact_prompt(style, doc["instruction"]))]

    def _fitted(self, number: int, sent: Callable[[str, str], str]) -> str:
        """The document, cut so that the prompt of each of its questions fits."""
        document, limits = self.documents[number], self.budget()
        key = (number, sent("", ""), limits)  # chat template, system instruction and model
        if key not in self._cut:
            questions = sorted(document["instructions"], key=limits.count, reverse=True)

            def fits(text: str) -> bool:
                return all(limits.fits(sent(text, question)) for question in questions)

            text = cut(document["input"], limits.tokens, fits)
            if text is None:
                bare_prompt = limits.count(sent("", questions[0]))
                raise limits.too_long(f"{self.config.task}, document {number}, without its text", bare_prompt)
            self._cut[key] = text
        return self._cut[key]
