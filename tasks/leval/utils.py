"""What the YAML beside this file names."""

from functools import cache
from pathlib import Path

from lpes_eval import files
from lpes_eval.data import leval, published, splits
from lpes_eval.data.source import Source, find
from lpes_eval.errors import DataError
from lpes_eval.harness.plugin import current_lm
from lpes_eval.harness.task import PublishedPromptTask
from lpes_eval.scoring import leval as scoring


def load(*, subset, split="held_out", search_seed=0, **metadata):
    """One row a question, with the number of its document, and where the file came from."""
    search_seed = splits.whole_seed(search_seed)
    path, kind = _file(subset, metadata)
    documents = _documents(path)
    chosen = set(leval.document_numbers(len(documents), split, search_seed))
    questions = [
        {"document": number, "instruction": instruction, "output": output}
        for number, document in enumerate(documents)
        for instruction, output in zip(document.instructions, document.outputs, strict=True)
    ]
    rows = [{"question_id": i, **question} for i, question in enumerate(questions) if question["document"] in chosen]
    seed = f"{splits.SPLIT_SEED}, by document" + (f", search_seed {search_seed}" if split == "search" else "")
    return rows, Source(kind, subset, str(path), files.sha256(path), split, seed, len(questions), len(rows))


def _file(subset, metadata):
    wish = published.asked(metadata, "L-Eval", leval.file_name(subset))
    url = f"{leval.URL}/{leval.file_name(subset)}"
    if wish.kind == "official":
        return published.download(url), wish.kind
    path = find(wish.folder, leval.file_name(subset), leval.SUBFOLDERS)
    if path is None:
        raise DataError(f"{wish.folder}: {leval.file_name(subset)} is not there; get it from {url}")
    return path, wish.kind


@cache
def _documents(path: Path) -> list[leval.Document]:
    # one reading serves the rows, the prompts, and every variant of a task
    return leval.read(path)


class Task(PublishedPromptTask):
    """Questions whose document is kept once, and cut once, for all of them."""

    def __init__(self, config):
        self._cut = {}
        super().__init__(config)

    def download(self, dataset_kwargs=None, **kwargs):
        """Load the questions, and their documents beside them."""
        super().download(dataset_kwargs, **kwargs)
        self.documents = _documents(Path(self.config.metadata["source"]["location"]))

    def doc_to_text(self, doc, doc_to_text=None):
        """The prompt with the whole document; what is sent is fitted to the model (``published_prompt``)."""
        return self._prompt(doc, self._style(False), self.documents[doc["document"]].text).text

    def published_prompt(self, doc, render, chat):
        """The prompt as the model gets it; for sci_fi a list of two, the second about the real world."""
        style = self._style(chat)

        def sent(prompt: leval.Prompt) -> str:
            return render(prompt.text, prompt.system)

        context = sent(self._prompt(doc, style, self._fitted(doc["document"], style, sent)))
        if self.config.metadata["subset"] != "sci_fi":
            return context
        return [context, sent(leval.fact_prompt(style, doc["instruction"]))]

    def construct_requests(self, doc, ctx, **kwargs):
        """One request a prompt."""
        if isinstance(ctx, str):
            return super().construct_requests(doc, ctx, **kwargs)
        requests = [super(Task, self).construct_requests(doc, context, **kwargs) for context in ctx]
        for number, request in enumerate(requests):
            request.idx = number
        return requests

    def _style(self, chat):
        return self.config.metadata.get("prompt_style") or ("chat" if chat else "vicuna")

    def _prompt(self, doc, style, document):
        return leval.prompt(self.config.metadata["subset"], style, document, doc["instruction"])

    def _fitted(self, number, style, sent):
        """The document, cut so that the prompt of each of its questions fits."""
        document = self.documents[number]
        if current_lm() is None:  # nothing is sent, so nothing has to fit
            return document.text
        limits = self.budget()
        around = sent(leval.Prompt("", " "))  # chat template and system instruction
        key = (number, style, around, limits.tokens, current_lm())
        if key not in self._cut:
            questions = [{"instruction": q} for q in sorted(document.instructions, key=limits.count, reverse=True)]

            def fits(text):
                return all(limits.fits(sent(self._prompt(question, style, text))) for question in questions)

            text = leval.cut(document.text, limits.tokens, fits)
            if text is None:
                bare = limits.count(sent(self._prompt(questions[0], style, "")))
                raise limits.too_long(f"{self.config.task}, document {number}, without its text", bare)
            self._cut[key] = text
        return self._cut[key]


def one_letter(doc, results):
    """Quality and tpo: the first letter of the answer."""
    return {"exact_match": scoring.letters_score(results[0], doc["output"])}


def several_letters(doc, results):
    """Coursera: all letters of the answer, a quarter for some of the correct ones."""
    return {"exact_match": scoring.letters_score(results[0], doc["output"], several=True)}


def two_judgements(doc, results):
    """sci_fi: the mean of loyalty to the story and knowledge of the real world, and each."""
    loyalty, fact = scoring.judgement_scores(*results, doc["output"])
    return {"exact_match": (loyalty + fact) / 2, "loyalty": loyalty, "fact": fact}
