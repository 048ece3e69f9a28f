"""Prompts of a task by position with their reference answers, as tokens of which each one's region is known."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lpes_eval.errors import PromptTooLong, UserError
from lpes_eval.harness.budget import require_chat_template
from lpes_eval.harness.segments import Segment, join

if TYPE_CHECKING:
    from lpes_eval.harness.task import PositionTask

REGIONS = ("beginning", "middle", "end", "gold")
"""The thirds of the tokens of the documents or records, and those of the gold one."""


@dataclass(frozen=True)
class Prompt:
    """The tokens of a prompt and its answer, how many are the answer's, and the numbers of each region's tokens.

    ``position`` is the gold item's, in percent.
    """

    position: float
    tokens: list[int]
    answer: int
    regions: list[list[int]]


def load(name: str, metadata: Mapping[str, Any]) -> PositionTask:
    """A task by position; ``UserError`` where there is none of this name."""
    from lpes_eval.harness.plugin import own_tasks
    from lpes_eval.harness.task import PositionTask

    expected = "expected one by position, such as kv_retrieval or mdqa_pos"
    manager = own_tasks(metadata)
    if name not in manager.all_tasks:
        raise UserError(f"--task {name}: no such task; {expected}")
    tasks = list(manager.load([name])["tasks"].values())
    if not isinstance(tasks[0], PositionTask):
        raise UserError(f"--task {name}: is not by position; {expected}")
    return tasks[0]


def prompts(lm: Any, task: PositionTask, questions: int, chat: bool) -> Iterator[Prompt]:
    """The prompts of so many questions at every position that the task has.

    Raises:
        UserError: a tokenizer that does not say where its tokens stand, or a prompt that does not fit the window.
    """
    if chat:
        require_chat_template(lm)
    for doc in list(task.test_docs())[:questions]:
        for position in task.positions:
            answer = task.config.target_delimiter + task.written(doc, position)
            prompt = _prompt(lm, position, task.segments(doc, position), answer, chat)
            if len(prompt.tokens) > lm.max_length:
                raise PromptTooLong(
                    f"{task.config.task}: a prompt and its answer of {len(prompt.tokens)} tokens; the model's window "
                    f"is {lm.max_length}. Take a shorter one (--metadata), or a longer window (--model_args "
                    "max_length=)"
                )
            yield prompt


def _prompt(lm: Any, position: float, segments: list[Segment], answer: str, chat: bool) -> Prompt:
    """The prompt of an instruction, items and a question, in this order."""
    text = join(segments)
    whole = lm.apply_chat_template([{"role": "user", "content": text}]) if chat else text
    if not lm.tokenizer.is_fast:
        raise UserError("the model's tokenizer does not say where its tokens stand in a text; expected a fast one")
    ids = lm.tok_encode(whole + answer, add_special_tokens=False if chat else None)
    plain = lm.tokenizer(whole + answer, add_special_tokens=False, return_offsets_mapping=True)
    added = len(ids) - len(plain["input_ids"])
    if ids[added:] != plain["input_ids"]:
        raise UserError("the model's tokenizer adds tokens elsewhere than at the beginning of a text")
    starts = [0] * added + [begin for begin, _ in plain["offset_mapping"]]
    before, is_there, _ = whole.partition(text)
    if not is_there:
        raise UserError("the model's chat template changes the text of a prompt; leave --apply_chat_template out")
    _, *bounds = accumulate((len(one.text) for one in segments[:-1]), initial=len(before))  # of the items
    items = [bisect_right(bounds, start) - 1 for start in starts]  # -1 before them, the last one after them
    within = [k for k, item in enumerate(items) if 0 <= item < len(bounds) - 1]
    ends = [len(within) * third // 3 for third in range(4)]
    gold = next(i for i, item in enumerate(segments[1:]) if item.label == "gold")
    regions = [within[ends[third] : ends[third + 1]] for third in range(3)]
    regions.append([k for k in within if items[k] == gold])
    return Prompt(position, ids, sum(start >= len(whole) for start in starts), regions)
