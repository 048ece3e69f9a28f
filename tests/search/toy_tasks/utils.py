from datasets import Dataset

from lpes_eval.data import splits
from lpes_eval.data.source import Source
from lpes_eval.harness.segments import Segment
from lpes_eval.harness.task import PositionTask

WORDS = ["red", "blue", "green", "black", "white", "brown", "pink", "grey"]


def load(**metadata):
    rows = []
    for i in range(12):
        words = [WORDS[(i * 3 + k) % 8] + str(k) for k in range(5 + i % 3)]
        text = f"{' '.join(words)} number 0 is:"
        rows.append({"question_id": i, "text": text, "words": words, "answer": "ec"[i % 2], "gold": i % 3})
    shown = [{**row, "text": row["text"].upper()} for row in rows]
    return {"test": Dataset.from_list(rows), "train": Dataset.from_list(shown)}


def process_results(doc, results):
    shared = len(set(results[0]) & set("0123456789abcdef")) / 16
    luck = float(sum(map(ord, results[0])) % 2)
    return {"hits": shared, "misses": 1 - shared, "em": luck}  # em alone is known to be from 0 to 1


def words(doc, results):
    return {"word_perplexity": (results[0], len(doc["words"]))}


class Toy(PositionTask):
    METRIC = "hits"

    def load(self, split="held_out", search_seed=0, **metadata):
        rows, seed = list(load()["test"]), splits.seed(split, search_seed)
        rows = [rows[i] for i in splits.indices(12, split, search_seed)]
        source = Source("generated", "toy", "here", "0", split, seed, 12, len(rows))
        return rows, source

    def segments(self, doc, position):
        words = " ".join(doc["words"])
        return [Segment("question", f"{words} number {int(position) * len(doc['words']) // 101} is:")]

    def target(self, doc, position):
        return doc["answer"]

    def metric(self, answer, target):
        return process_results({}, [answer])[self.METRIC]


class Lucky(Toy):
    METRIC = "em"
