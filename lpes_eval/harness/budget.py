"""How many tokens a benchmark's prompt may have, for the model that is being evaluated.

lm-eval's Hugging Face models cut a prompt that is too long from the left (lm-evaluation-harness, issue 3115). Here it
is fitted to the model, or refused. Tokens are those that the model will see: special tokens, chat template and all.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from lm_eval.utils import warning_once
from transformers import AutoTokenizer

from lpes_eval import reference
from lpes_eval.errors import DataError, PromptTooLong, UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """A prompt may have at most ``tokens`` tokens; ``why`` says where the limit comes from, and the way out.

    ``encode`` gives a string's token ids as the model gets them; ``offsets`` where each token stands, in characters.
    """

    tokens: int
    why: str
    encode: Callable[[str], Sequence[int]]
    offsets: Callable[[str], Sequence[tuple[int, int]]] = lambda text: ()

    def count(self, prompt: str) -> int:
        """How many tokens the model sees for ``prompt``."""
        return len(self.encode(getattr(prompt, "prompt", prompt)))  # of API models a named tuple

    def fills(self, answer: str, new_tokens: int) -> bool:
        """Whether an answer was ended by the limit of ``new_tokens`` alone."""
        return self.count(answer) - self.count("") >= new_tokens

    def fits(self, prompt: str) -> bool:
        """Whether ``prompt`` leaves room for the answer."""
        return self.count(prompt) <= self.tokens

    def check(self, prompt: str, what: str) -> None:
        """Raise ``PromptTooLong`` where a prompt does not fit; ``what`` names the example."""
        if not self.fits(prompt):
            raise self.too_long(what, self.count(prompt))

    def too_long(self, what: str, found: int) -> PromptTooLong:
        """The error for a prompt of ``found`` tokens."""
        return PromptTooLong(f"{what}: {found} prompt tokens, at most {self.tokens} {self.why}")

    def longest_beginning(self, document: str, compose: Callable[[str], str], what: str) -> str:
        """The longest beginning of ``document`` with which the prompt, made of it by ``compose``, fits.

        ``PromptTooLong``, which says of ``what``, where not even a single token of the document has room.
        """
        if self.fits(compose(document)):
            return document
        overhead = self.count(compose(""))
        ends = [end for _, end in self.offsets(document)]
        kept = min(self.tokens - overhead, len(ends))
        # tokens merge across the cut: what counts is the whole
        while kept > 0 and (excess := self.count(compose(document[: ends[kept - 1]])) - self.tokens) > 0:
            kept -= excess
        if kept <= 0:
            raise self.too_long(f"{what} without its document", overhead)
        return document[: ends[kept - 1]]


NO_LIMIT = Budget(0, "", encode=lambda prompt: ())
"""The budget outside an evaluation: nothing is sent, so nothing has to fit."""


def for_model(lm: Any, new_tokens: int, cap: int | None = None) -> Budget:
    """The budget of a prompt for ``lm``, one of lm-eval's model objects, beside an answer of up to ``new_tokens``.

    ``cap`` is the most prompt tokens that the protocol allows. ``DataError``: no tokenizer, or no known window.
    """
    if not isinstance(new_tokens, int) or new_tokens < 1:
        raise DataError(f"--gen_kwargs max_gen_toks={new_tokens}: expected a whole number, 1 or more")
    window, tokenizer = getattr(lm, "max_length", None), getattr(lm, "tokenizer", None)
    if not isinstance(window, int) or not callable(tokenizer):
        message = "has no window or no tokenizer to count a prompt's tokens with"
        raise DataError(f"{type(lm).__name__} {message}; take a model type whose tokenizer is one of transformers'")
    free = window - new_tokens
    limit, why = cap, "by the task's protocol; raise it with --metadata prompt_tokens=N"
    if limit is None or free < limit:
        if cap is not None:
            message = f"the window of {window} tokens leaves {free} for a prompt, not {cap}: prompts are cut further"
            warning_once(logger, message)
        limit = free
        why = (
            f"(window of {window} less {new_tokens} for the answer); take a smaller variant of the task, fewer new "
            "tokens (--gen_kwargs max_gen_toks=N), or a larger window (--model_args max_length=N)"
        )
    own = getattr(lm, "tok_encode", None) if getattr(lm, "backend", None) == "causal" else None
    encode = own or (lambda text: tokenizer(text)["input_ids"])

    def offsets(text: str) -> Sequence[tuple[int, int]]:
        return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]

    return Budget(limit, why, encode, offsets)


def require_chat_template(lm: Any) -> None:
    """Refuse a model whose tokenizer has no chat template; raises ``UserError``."""
    if not getattr(lm.tokenizer, "chat_template", None):
        raise UserError("--apply_chat_template: the model's tokenizer has no chat template; leave it out")


def require_named_chat_template(arguments: Mapping[str, Any]) -> None:
    """The same of the model that ``--model_args`` name; where its tokenizer cannot be loaded, its loading says why."""
    name = arguments.get("tokenizer") or arguments.get("pretrained")
    if not isinstance(name, str) or name in reference.NAMES or arguments.get("gguf_file"):
        return
    options = {key: arguments[key] for key in ("revision", "trust_remote_code", "subfolder") if key in arguments}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except Exception:
        return
    require_chat_template(SimpleNamespace(tokenizer=tokenizer))


THOUGHTS = {
    **{f"<{name}>": f"</{name}>" for name in ("think", "thinking", "thought", "reasoning", "seed:think")},
    "[THINK]": "[/THINK]",
    "<|channel|>analysis": "<|end|>",
    "<|channel>thought": "<channel|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "◁think▷": "◁/think▷",
}
"""How chat templates open a thought, and end it."""
ROOM = 1024
"""New tokens that a thought and an answer need at least."""


def warn_of_thoughts(lm: Any, prompt: str, new_tokens: int, task: str) -> None:
    """Say what to set where the chat template lets a model think for longer than an answer may be."""
    template = str(getattr(getattr(lm, "tokenizer", None), "chat_template", None) or "")
    begun = next((tag for tag in THOUGHTS if prompt.rstrip().endswith(tag)), None)  # whatever was asked of the template
    opening = begun or next((tag for tag in THOUGHTS if tag in template), None)
    if opening is None or (begun is None and getattr(lm, "enable_thinking", None) is False):
        return
    end = THOUGHTS[opening]
    ready = getattr(lm, "think_end_token", None) and new_tokens >= ROOM
    if not ready and not prompt.rstrip().endswith(end):
        off = "turn it off with --model_args enable_thinking=False, or " if "enable_thinking" in template else ""
        warning_once(
            logger,
            f"{task}: the chat template lets the model think ({opening}), and an answer has {new_tokens} tokens, which "
            f"a thought may use up; {off}give it room and leave the thought out of the answer with --gen_kwargs "
            f"max_gen_toks={4 * ROOM} --model_args think_end_token={end}",
        )


def render(
    user: str,
    system: str = "",
    system_instruction: str | None = None,
    chat_template: Callable[[list[dict[str, str]]], str] | None = None,
) -> str:
    """A prompt as the model gets it: in its chat template, which makes text of a list of messages, or as plain text.

    ``system`` (in the user's message where a template has none) is the benchmark's, ``system_instruction`` lm-eval's.
    """
    if chat_template is None:
        return "\n\n".join(part for part in (system_instruction, system + user) if part)
    first = "\n\n".join(part for part in (system_instruction, system) if part)
    before = [{"role": "system", "content": first}] if first else []
    text = chat_template([*before, {"role": "user", "content": user}])
    if isinstance(text, str) and first.strip() not in text:
        text = chat_template([{"role": "user", "content": f"{first.rstrip()}\n\n{user}"}])
    return text
