"""What the YAML beside this file names."""

from functools import cache
from pathlib import Path

from lpes_eval import files
from lpes_eval.data import published, zeroscrolls
from lpes_eval.data.source import Source
from lpes_eval.errors import DataError
from lpes_eval.harness.plugin import current_lm
from lpes_eval.harness.task import PublishedPromptTask
from lpes_eval.scoring import zeroscrolls as scoring


def load(*, subset, split="held_out", **metadata):
    """One row an example, without its long input, and where the file came from."""
    zeroscrolls.file_for(split)
    wish = published.asked(metadata, "ZeroSCROLLS", f"{subset}.zip")
    if wish.kind == "official":
        path = published.download(zeroscrolls.url(subset))
    else:
        path = zeroscrolls.locate(wish.folder, subset, split)
    rows = [
        {"question_id": number, "id": example.id, "references": list(example.references)}
        for number, example in enumerate(_examples(path, subset, split))
    ]
    file = zeroscrolls.file_for(split)
    source = Source(wish.kind, f"{subset}, {file}", str(path), files.sha256(path), split, "none", len(rows), len(rows))
    return rows, source


@cache
def _examples(path: Path, subset: str, split: str) -> list[zeroscrolls.Example]:
    # one reading serves the rows, the prompts, and every variant of a task
    return zeroscrolls.read(path, subset, split)


class Task(PublishedPromptTask):
    """Prompts come with the data; too long ones are cut as the benchmark cuts them, by the model's own tokenizer."""

    def download(self, dataset_kwargs=None, **kwargs):
        """Load the examples; of a file without references only the answers are logged, for a submission."""
        super().download(dataset_kwargs, **kwargs)
        source = self.config.metadata["source"]
        self.examples = _examples(Path(source["location"]), self.config.metadata["subset"], source["split"])
        if not all(example.references for example in self.examples):
            if any(example.references for example in self.examples):
                raise DataError(f"{source['location']}: some examples have references and some have none")
            self.override_metric("bypass")

    def doc_to_text(self, doc, doc_to_text=None):
        """The whole input; what is sent is fitted to the model (``published_prompt``)."""
        return self.examples[doc["question_id"]].input

    def published_prompt(self, doc, render, chat):
        """The prompt as the model gets it."""
        metadata = self.config.metadata
        example = self.examples[doc["question_id"]]
        if metadata.get("chat_prompt"):
            example = zeroscrolls.for_chat(example, metadata["subset"])
        # outside an evaluation nothing is sent, so nothing has to fit
        text = example.input if current_lm() is None else zeroscrolls.fit(example, self.budget(), render)
        return render(text)


def summary(doc, results):
    """ROUGE-1, -2 and -L, and all three together for their geometric mean over the examples."""
    scores = scoring.rouge(results[0], doc["references"])
    return {**scores, "score": tuple(scores.values())}


def answer(doc, results):
    """F1 of the words."""
    f1 = scoring.f1(results[0], doc["references"])
    return {"f1": f1, "score": f1}


def percentage(doc, results):
    """Exponential similarity."""
    similarity = scoring.exp_similarity(results[0], doc["references"])
    return {"exp_similarity": similarity, "score": similarity}


def geometric_mean(items):
    """The summarization score from the averages of its three parts."""
    return scoring.geometric_mean(items)
