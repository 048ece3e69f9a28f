"""ZeroSCROLLS (Shaham et al. 2023, arXiv 2305.14196): files, prompts, cutting, scores, and lm-eval's task.

Each set is an archive ``NAME.zip`` that holds ``NAME/validation.jsonl`` and ``NAME/test.jsonl``; the archive is read
where it lies, and so is a folder it was unpacked to. Prompts come with the data. Only the validation files (about 20
examples each) are sure to have references. All of them are held out: there is no set to search on.

Scores (section 3.3; the data set's own ``metrics/`` folder) are in [0, 1]; the leaderboard prints them times 100.
Nothing is done to a prediction before it is scored: no stop string, no first line, no stripping.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lpes_eval import files
from lpes_eval.data import published
from lpes_eval.data.source import Source, find
from lpes_eval.errors import DataError
from lpes_eval.harness.budget import Budget
from lpes_eval.harness.plugin import current_lm
from lpes_eval.harness.segments import Segment, join

SUMMARIES = ("gov_report", "summ_screen_fd", "qmsum", "squality")
ANSWERS = ("qasper", "narrative_qa")
NAMES = (*SUMMARIES, *ANSWERS, "space_digest")
FILES = {"held_out": "validation", "test": "test"}
"""Split -> file of the benchmark."""

SUBFOLDERS = ("zero_scrolls", "zeroscrolls")
URL = "https://huggingface.co/datasets/tau/zero_scrolls/resolve/main"

# -- files -------------------------------------------------------------------------------------------------------------

_POSITIONS = ("document_start_index", "document_end_index", "query_start_index", "query_end_index")
_FIELDS = {"id": str, "input": str, "truncation_seperator": str, **dict.fromkeys(_POSITIONS, int)}  # their spelling


@dataclass(frozen=True)
class Example:
    """One example: its prompt (``input``) in parts, and its references.

    Attributes:
        id: the benchmark's name of the example.
        instruction: what stands before the document.
        document: what may be cut, at its end.
        gap: what stands between document and question.
        question: the query; for summaries empty.
        header: what stands behind the question, such as ``Answer:``.
        separator: takes the gap's place, and says so, where a part of the document was cut off.
        references: all accepted outputs; none in an unlabelled file.
    """

    id: str
    instruction: str
    document: str
    gap: str
    question: str
    header: str
    separator: str
    references: tuple[str, ...]

    def segments(self, document: str | None = None) -> tuple[Segment, ...]:
        """The prompt, whole, or with ``document``, a beginning of the document, in its place."""
        body, gap = (self.document, self.gap) if document is None else (document, self.separator)
        question = Segment("question", self.question + self.header)
        return Segment("instruction", self.instruction), Segment("document", body), Segment("separator", gap), question


def file_for(split: str) -> str:
    """The name of a split's file, without its suffix.

    Raises:
        DataError: an unknown split, or the search's.
    """
    if split == "search":
        raise DataError(
            "ZeroSCROLLS has no examples to search on: its few labelled ones are all held out for the reported score; "
            "search on another task (kv_retrieval, mdqa_pos), and score the result here"
        )
    published.check_choice("split", split, FILES)
    return FILES[split]


def locate(folder: Path, name: str, split: str) -> Path:
    """The task's archive or unpacked file in a local folder.

    Raises:
        DataError: neither is there.
    """
    unpacked, packed = f"{name}/{file_for(split)}.jsonl", f"{name}.zip"
    path = find(folder, unpacked, SUBFOLDERS) or find(folder, packed, SUBFOLDERS)
    if path is None:
        raise DataError(f"{folder}: neither {packed} nor {unpacked} is there; get the archive from {URL}/{packed}")
    return path


def read(path: str | Path, name: str, split: str) -> list[Example]:
    """The examples of one task, in the file's order; lines with the same id are one example with several references.

    Args:
        path: the archive ``NAME.zip``, or the ``.jsonl`` file itself.
        name: the task's name, which is also the folder's in the archive.
        split: ``held_out`` or ``test``.

    Raises:
        DataError: the file is missing, broken or not in the benchmark's form.
    """
    path = Path(path)
    member = f"{name}/{file_for(split)}.jsonl"
    packed = path.suffix == ".zip"
    where = f"{path}, {member}" if packed else str(path)
    examples: dict[str, Example] = {}
    for number, line in enumerate(_archived(path, member) if packed else files.read_jsonl(path), 1):
        example = _parse(line, f"{where}, example {number}")
        first = examples.setdefault(example.id, example)
        if first is not example:
            examples[example.id] = replace(first, references=first.references + example.references)
    if not examples:
        raise DataError(f"{where}: the file holds no example")
    return list(examples.values())


_read_once = files.remembered(read)  # one reading serves the rows, the prompts, and every size of a task


def _archived(path: Path, member: str) -> Iterator[Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            lines = archive.read(member).split(b"\n")
    except KeyError:
        raise DataError(f"{path}: the archive does not hold {member}") from None
    except Exception as error:  # no file, no permission, and whatever zipfile meets in a broken archive
        raise DataError(
            f"{path}: {member} cannot be read ({error}); expected the benchmark's archive. Check its permissions, or "
            "fetch it again: the download may be incomplete"
        ) from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, {member}, line {number}: not JSON ({error})") from None


def _parse(line: Any, where: str) -> Example:
    if not isinstance(line, dict):
        raise DataError(f"{where}: found {type(line).__name__}, expected a JSON object")
    for field, kind in _FIELDS.items():
        if type(line.get(field)) is not kind:
            found = type(line[field]).__name__ if field in line else "missing"
            raise DataError(f"{where}: {field!r} is {found}, expected {kind.__name__}")
    text, (start, end, query, query_end) = line["input"], (line[field] for field in _POSITIONS)
    if not 0 <= start <= end <= query <= query_end <= len(text):
        raise DataError(
            f"{where}: document {start}..{end} and query {query}..{query_end} do not follow each other in an input of "
            f"{len(text)} characters"
        )
    output = line.get("output")
    if output is not None and not isinstance(output, str):
        raise DataError(f"{where}: 'output' is {type(output).__name__}, expected a text, or null where there is none")
    parts = text[:start], text[start:end], text[end:query], text[query:query_end], text[query_end:]
    return Example(line["id"], *parts, line["truncation_seperator"], (output,) if output else ())


def load(*, subset: str, split: str = "held_out", **metadata: Any) -> tuple[list[dict[str, Any]], Source]:
    """One row an example, without its long input, and where the file came from."""
    file = file_for(split)
    wish = published.asked(metadata, "ZeroSCROLLS", f"{subset}.zip")
    path = locate(wish.folder, subset, split) if wish.folder else published.download(f"{URL}/{subset}.zip")
    rows = [
        {"question_id": number, "id": example.id, "references": list(example.references)}
        for number, example in enumerate(_read_once(path, subset, split))
    ]
    if any(row["references"] for row in rows) and not all(row["references"] for row in rows):
        raise DataError(f"{path}: some examples have references and some have none")
    source = Source(wish.kind, f"{subset}, {file}", str(path), files.sha256(path), split, "none", len(rows), len(rows))
    return rows, source


# -- prompts -----------------------------------------------------------------------------------------------------------


def for_chat(example: Example, name: str) -> Example:
    """The benchmark's own change of a prompt for chat models (section 3.2): no response header such as ``Answer:``.

    Question answering and aggregation also get ``Do not provide any explanation.`` at the end of their instruction.
    """
    if name in SUMMARIES:
        return replace(example, header="")
    sentences, blank, rest = example.instruction.partition("\n\n")
    instruction = f"{sentences.strip()} Do not provide any explanation.{blank}{rest}"
    return replace(example, instruction=instruction, header="")


def fit(example: Example, budget: Budget, render: Callable[[str], str]) -> tuple[Segment, ...]:
    """The prompt, whole if it fits; else with its document cut at the end, as the benchmark cuts it.

    Then come the instruction, as much of the document as there is room for, the separator (a sentence that says that
    the rest is omitted), and the text from the query on.

    Args:
        example: what to fit.
        budget: of the model.
        render: turns the text into the prompt as the model gets it (chat template).

    Raises:
        PromptTooLong: instruction and query alone leave no room for the document.
    """
    if budget.fits(render(join(example.segments()))):
        return example.segments()

    def compose(beginning: str) -> str:
        return render(join(example.segments(beginning)))

    return example.segments(budget.longest_beginning(example.document, compose, f"ZeroSCROLLS, {example.id}"))


# -- scores ------------------------------------------------------------------------------------------------------------

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
"""Newlines mean nothing to these three, so no sentence splitter is needed (``rougeLsum`` is no part of the score)."""

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PERCENTAGE = re.compile(r"(\d+\.?\d*)%")


def rouge(prediction: str, references: Iterable[str]) -> dict[str, float]:
    """F-measures of ROUGE-1, ROUGE-2 and ROUGE-L, each the best over the references by itself; words are not stemmed.

    Raises:
        DataError: no reference.
    """
    scores = [_rouge_scorer().score(target=reference, prediction=prediction) for reference in _some(references)]
    return {kind: max(score[kind].fmeasure for score in scores) for kind in ROUGE_TYPES}


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGE_TYPES), use_stemmer=False)


def _some(references: Iterable[str]) -> list[str]:
    if not (found := list(references)):
        raise DataError("ZeroSCROLLS: no reference to score against")
    return found


def geometric_mean(items: Sequence[tuple[float, float, float]]) -> float:
    """The summarization score: the geometric mean of the *average* ROUGE-1, ROUGE-2 and ROUGE-L over all examples.

    The paper speaks of a geometric mean for each example; the published figures come from the code, which averages
    first. The two differ: an example without a common bigram is worth 0 alone, and costs one addend here.

    Args:
        items: ``(rouge1, rouge2, rougeL)`` of every example.
    """
    product = 1.0
    for scores in zip(*items, strict=True):
        product *= sum(scores) / len(scores)
    return product ** (1 / 3)


def f1(prediction: str, references: Iterable[str]) -> float:
    """F1 of the words that prediction and reference share, the best over the references.

    Raises:
        DataError: no reference.
    """
    words = normalize(prediction).split()
    return max(_f1(words, normalize(reference).split()) for reference in _some(references))


def _f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    common = (Counter(prediction) & Counter(reference)).total()
    if not common:  # also where both are empty: two answers that normalise to nothing do not match
        return 0.0
    precision, recall = common / len(prediction), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def exp_similarity(prediction: str, references: Iterable[str]) -> float:
    """Half the score for every 10 points between the first percentage in the prediction and the reference's.

    A prediction without a percentage (digits and a percent sign; ``forty percent`` and ``40`` are none) is worth 0.

    Raises:
        DataError: no reference, or one without a percentage.
    """
    best, predicted = 0.0, _PERCENTAGE.search(prediction)
    for reference in _some(references):
        if not (wanted := _PERCENTAGE.search(reference)):
            raise DataError(f"ZeroSCROLLS, space_digest: the reference {reference!r} is no percentage such as '73%'")
        if predicted:
            best = max(best, 0.5 ** (abs(float(wanted[1]) - float(predicted[1])) / 10))
    return best


def normalize(text: str) -> str:
    """SQuAD's normalisation (lower case; no ASCII punctuation, articles or double spaces), then ASCII for accents.

    In this order, as the benchmark has it: typographic quotes and dashes are not among the punctuation that goes.
    """
    return transliterate(" ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()))


def transliterate(text: str) -> str:
    """Lower-case Latin, Greek and typographic characters in ASCII, as the benchmark's ``unidecode`` writes them.

    Characters of other scripts stay, where ``unidecode`` would romanise them: equal words are equal either way.
    """
    if text.isascii():
        return text
    decomposed = unicodedata.normalize("NFKD", text.translate(_TO_ASCII))
    return "".join(c for c in decomposed if not unicodedata.combining(c)).translate(_TO_ASCII)


_PAIRS = """\
æ=ae ð=d ø=o þ=th ß=ss đ=d ħ=h ı=i ĸ=k ł=l ŋ=ng œ=oe ŧ=t
α=a β=b γ=g δ=d ε=e ζ=z η=e θ=th ι=i κ=k λ=l μ=m ν=n ξ=x ο=o π=p ρ=r ς=s σ=s τ=t υ=u φ=ph χ=kh ψ=ps ω=o µ=u
‐=- ‑=- ‒=- –=- —=-- ―=-- −=- ‘=' ’=' ‛=' ´=' ′=' ″='' “=" ”=" ‟=" «=<< »=>> ‹=< ›=> •=* ·=* ¡=! ¿=? ¬=! ¦=| ⁄=/
¢=C/ £=PS ¥=Y= €=EUR §=SS ¶=P ©=(c) ®=(r) ™=(tm) °=deg ±=+- ×=x ÷=/"""
_TO_ASCII = str.maketrans(
    dict(pair.split("=", 1) for pair in _PAIRS.split())
    | {"\xad": "", "¼": " 1/4", "½": " 1/2", "¾": " 3/4"}  # a soft hyphen is nothing
)


# -- the task ----------------------------------------------------------------------------------------------------------


def _summary(doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
    scores = rouge(results[0], doc["references"])
    return {**scores, "score": tuple(scores.values())}


def _answer(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    found = f1(results[0], doc["references"])
    return {"f1": found, "score": found}


def _percentage(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    similarity = exp_similarity(results[0], doc["references"])
    return {"exp_similarity": similarity, "score": similarity}


class Task(published.ExamTask):
    """One of the seven sets; its figure on the leaderboard is ``score``."""

    def __init__(self, config: dict[str, Any]) -> None:
        subset = config["metadata"]["subset"]
        metrics: dict[str, Any] = {"score": "mean"}
        if subset in SUMMARIES:
            scoring, metrics = _summary, {"score": geometric_mean, **dict.fromkeys(ROUGE_TYPES, "mean")}
        elif subset in ANSWERS:
            scoring, metrics["f1"] = _answer, "mean"
        else:
            scoring, metrics["exp_similarity"] = _percentage, "mean"
        super().__init__({"doc_to_target": "references", **config}, load, scoring, metrics)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load the examples; of a file without references only the answers are logged, for a submission."""
        super().download(dataset_kwargs, **kwargs)
        if not self._examples[0].references:
            self.override_metric("bypass")

    def doc_to_text(self, doc: dict[str, Any], doc_to_text: Any = None) -> str:
        """The whole input; what is sent is fitted to the model (``published_prompt``)."""
        return join(self._examples[doc["question_id"]].segments())

    def published_prompt(self, doc: dict[str, Any], render: Callable[..., str], chat: bool) -> str:
        """The prompt as the model gets it."""
        example = self._examples[doc["question_id"]]
        if self.config.metadata.get("chat_prompt"):
            example = for_chat(example, self.config.metadata["subset"])
        # outside an evaluation nothing is sent, so nothing has to fit
        fitted = example.segments() if current_lm() is None else fit(example, self.budget(), render)
        return render(join(fitted))

    @property
    def _examples(self) -> list[Example]:
        source = self.config.metadata["source"]
        return _read_once(Path(source["location"]), self.config.metadata["subset"], source["split"])


if __name__ == "__main__":  # the command of the submission file, by the name that it has had
    import runpy

    runpy.run_module("lpes_eval.data.zeroscrolls_submission", run_name="__main__")
