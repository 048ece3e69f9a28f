"""ZeroSCROLLS (Shaham et al. 2023, arXiv 2305.14196): prompts that come with the data, and the leaderboard's file.

Each task is an archive ``NAME.zip`` that holds ``NAME/validation.jsonl`` and ``NAME/test.jsonl``; the archive is read
where it lies, and so is a folder it was unpacked to. Only the validation files (about 20 examples each) are sure to
have references. All of them are held out: there is no set to search on.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lpes_eval import files
from lpes_eval.data import published
from lpes_eval.data.source import Source
from lpes_eval.errors import DataError
from lpes_eval.harness.budget import Budget
from lpes_eval.harness.plugin import current_lm
from lpes_eval.harness.task import PublishedPromptTask

SUMMARIES = ("gov_report", "summ_screen_fd", "qmsum", "squality")
ANSWERS = ("qasper", "narrative_qa")
NAMES = (*SUMMARIES, *ANSWERS, "space_digest")
LEADERBOARD = (*NAMES, "quality", "musique", "book_sum_sort")
"""The leaderboard takes a submission of all ten tasks only."""

FILES = {"held_out": "validation", "test": "test"}
"""Split -> file of the benchmark."""

URL = "https://huggingface.co/datasets/tau/zero_scrolls/resolve/main"
COLUMNS = ("Task", "ID", "Prediction")

_POSITIONS = ("document_start_index", "document_end_index", "query_start_index", "query_end_index")
_TEXTS = ("id", "input", "truncation_seperator")  # the benchmark's spelling
_NO_EXPLANATION = "Do not provide any explanation."


@dataclass(frozen=True)
class Example:
    """One example, with its references; positions are characters of ``input``.

    Attributes:
        id: the benchmark's name of the example.
        input: the whole prompt.
        document: where the document starts and ends.
        query: where the question and what follows it (``Answer:``) starts, and where the question ends.
        separator: what stands for the part of a document that was cut off.
        references: all accepted outputs; none in an unlabelled file.
    """

    id: str
    input: str
    document: tuple[int, int]
    query: tuple[int, int]
    separator: str
    references: tuple[str, ...]


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
    if split not in FILES:
        raise DataError(f"split={split!r} is not a split of ZeroSCROLLS; expected one of {', '.join(FILES)}")
    return FILES[split]


def locate(folder: Path, name: str, split: str) -> Path:
    """The task's archive or unpacked file in a local folder.

    Raises:
        DataError: neither is there.
    """
    unpacked = f"{file_for(split)}.jsonl"
    for home in (folder, folder / "zero_scrolls", folder / "zeroscrolls"):
        for path in (home / name / unpacked, home / f"{name}.zip"):
            if path.is_file():
                return path
    raise DataError(f"{folder}: neither {name}.zip nor {name}/{unpacked} is there; get the archive from {url(name)}")


def url(name: str) -> str:
    """Where a task's archive is published."""
    return f"{URL}/{name}.zip"


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
    if path.suffix == ".zip":
        where, lines = f"{path}, {member}", _read_archive(path, member)
    else:
        where, lines = str(path), files.read_jsonl(path, required=(*_TEXTS, *_POSITIONS))
    examples: dict[str, Example] = {}
    for number, line in enumerate(lines, 1):
        example = _parse(line, f"{where}, example {number}")
        first = examples.setdefault(example.id, example)
        if first is not example:
            examples[example.id] = replace(first, references=first.references + example.references)
    if not examples:
        raise DataError(f"{where}: the file holds no example")
    return list(examples.values())


def _read_archive(path: Path, member: str) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{path}, {member}, line {number}: not JSON ({error})") from None
                if not isinstance(record, dict):
                    raise DataError(f"{path}, {member}, line {number}: expected a JSON object")
                yield record
    except KeyError:
        raise DataError(f"{path}: the archive does not hold {member}") from None
    except (zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError) as error:
        raise DataError(f"{path}: broken archive ({error}); the download may be incomplete, fetch it again") from None
    except (OSError, RuntimeError) as error:  # RuntimeError is what zipfile has for a member with a password
        raise DataError(
            f"{path}: {member} cannot be read ({error}); check its permissions, or fetch it again"
        ) from None


def _parse(line: Mapping[str, Any], where: str) -> Example:
    for field in _TEXTS:
        if not isinstance(line.get(field), str):
            raise DataError(f"{where}: {field!r} is missing or no text")
    for field in _POSITIONS:
        if type(line.get(field)) is not int:
            raise DataError(f"{where}: {field!r} is missing or no whole number")
    start, end, query, query_end = (line[field] for field in _POSITIONS)
    if not 0 <= start <= end <= query <= query_end <= len(line["input"]):
        raise DataError(
            f"{where}: document {start}..{end} and query {query}..{query_end} do not follow each other in an input of "
            f"{len(line['input'])} characters"
        )
    output = line.get("output")
    if output is not None and not isinstance(output, str):
        raise DataError(f"{where}: 'output' is {type(output).__name__}, expected a text, or null where there is none")
    return Example(
        line["id"],
        line["input"],
        (start, end),
        (query, query_end),
        line["truncation_seperator"],
        (output,) if output else (),
    )


def for_chat(example: Example, name: str) -> Example:
    """The benchmark's own change of a prompt for chat models (section 3.2): no response header such as ``Answer:``.

    Question answering and aggregation also get ``Do not provide any explanation.`` at the end of their instruction.
    """
    (start, end), (query, query_end) = example.document, example.query
    text, shift = example.input[:query_end], 0
    if name not in SUMMARIES:
        instruction, blank, rest = text.partition("\n\n")
        text = f"{instruction.strip()} {_NO_EXPLANATION}{blank}{rest}"
        shift = len(text) - query_end
    return replace(example, input=text, document=(start + shift, end + shift), query=(query + shift, query_end + shift))


def fit(example: Example, budget: Budget, render: Callable[[str], str]) -> str:
    """The input, whole if the prompt fits; else with its document cut at the end, as the benchmark cuts it.

    Then come the instruction, as much of the document as there is room for, the separator (a sentence that says that
    the rest is omitted), and the text from the query on.

    Args:
        example: what to fit.
        budget: of the model.
        render: turns the text into the prompt as the model gets it (chat template).

    Raises:
        PromptTooLong: instruction and query alone leave no room for the document.
    """
    if budget.fits(render(example.input)):
        return example.input
    start, end = example.document
    head, tail = example.input[:start], example.separator + example.input[example.query[0] :]
    cut = budget.longest_beginning(
        example.input[start:end], lambda beginning: render(head + beginning + tail), f"ZeroSCROLLS, {example.id}"
    )
    return head + cut + tail


# -- the leaderboard's submission file --------------------------------------------------------------------------------


# -- metric -----------------------------------------------------------------------------------------------------------


ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
"""Newlines mean nothing to these three, so no sentence splitter is needed (``rougeLsum`` is no part of the score)."""

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PERCENTAGE = re.compile(r"\d+\.?\d*%")


def rouge(prediction: str, references: Iterable[str]) -> dict[str, float]:
    """F-measures of ROUGE-1, ROUGE-2 and ROUGE-L, each the best over the references by itself; words are not stemmed.

    Raises:
        DataError: no reference.
    """
    scores = [_rouge_scorer().score(target=reference, prediction=prediction) for reference in references]
    if not scores:
        raise DataError("ZeroSCROLLS: no reference summary to score against")
    return {kind: max(score[kind].fmeasure for score in scores) for kind in ROUGE_TYPES}


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGE_TYPES), use_stemmer=False)


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
    scores = [_f1(normalize(prediction).split(), normalize(reference).split()) for reference in references]
    if not scores:
        raise DataError("ZeroSCROLLS: no reference answer to score against")
    return max(scores)


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
    wanted = [(reference, _first_percentage(reference)) for reference in references]
    if not wanted:
        raise DataError("ZeroSCROLLS, space_digest: no reference to score against")
    predicted = _first_percentage(prediction)
    best = 0.0
    for reference, percentage in wanted:
        if percentage is None:
            raise DataError(f"ZeroSCROLLS, space_digest: the reference {reference!r} is no percentage such as '73%'")
        if predicted is not None:
            best = max(best, 0.5 ** (abs(percentage - predicted) / 10))
    return best


def _first_percentage(text: str) -> float | None:
    match = _PERCENTAGE.search(text)
    return float(match[0].rstrip("%")) if match else None


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


# -- the lm-eval task --------------------------------------------------------------------------------------------------


def load(*, subset: str, split: str = "held_out", **metadata: Any) -> tuple[list[dict[str, Any]], Source]:
    """One row an example, without its long input, and where the file came from."""
    file_for(split)
    request = published.asked(metadata, "ZeroSCROLLS", f"{subset}.zip")
    if request.kind == "official":
        path = published.download(url(subset))
    else:
        path = locate(request.folder, subset, split)
    rows = [
        {"question_id": number, "id": example.id, "references": list(example.references)}
        for number, example in enumerate(_examples(path, subset, split))
    ]
    file = file_for(split)
    source = Source(
        request.kind, f"{subset}, {file}", str(path), files.sha256(path), split, "none", len(rows), len(rows)
    )
    return rows, source


@cache
def _examples(path: Path, subset: str, split: str) -> list[Example]:
    # one reading serves the rows, the prompts, and every variant of a task
    return read(path, subset, split)


class Task(PublishedPromptTask):
    """Prompts come with the data; too long ones are cut as the benchmark cuts them, by the model's own tokenizer."""

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load the examples; of a file without references only the answers are logged, for a submission."""
        super().download(dataset_kwargs, **kwargs)
        source = self.config.metadata["source"]
        self.examples = _examples(Path(source["location"]), self.config.metadata["subset"], source["split"])
        if not all(example.references for example in self.examples):
            if any(example.references for example in self.examples):
                raise DataError(f"{source['location']}: some examples have references and some have none")
            self.override_metric("bypass")

    def doc_to_text(self, doc: dict, doc_to_text: Any = None) -> str:
        """The whole input; what is sent is fitted to the model (``published_prompt``)."""
        return self.examples[doc["question_id"]].input

    def published_prompt(self, doc: dict, render: Callable[..., str], chat: bool) -> str:
        """The prompt as the model gets it."""
        metadata = self.config.metadata
        example = self.examples[doc["question_id"]]
        if metadata.get("chat_prompt"):
            example = for_chat(example, metadata["subset"])
        # outside an evaluation nothing is sent, so nothing has to fit
        text = example.input if current_lm() is None else fit(example, self.budget(), render)
        return render(text)


def summary(doc: dict, results: list[str]) -> dict[str, Any]:
    """ROUGE-1, -2 and -L, and all three together for their geometric mean over the examples."""
    scores = rouge(results[0], doc["references"])
    return {**scores, "score": tuple(scores.values())}


def answer(doc: dict, results: list[str]) -> dict[str, float]:
    """F1 of the words."""
    score = f1(results[0], doc["references"])
    return {"f1": score, "score": score}


def percentage(doc: dict, results: list[str]) -> dict[str, float]:
    """Exponential similarity."""
    similarity = exp_similarity(results[0], doc["references"])
    return {"exp_similarity": similarity, "score": similarity}
