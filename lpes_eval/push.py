"""``lpes-eval push FILE OWNER/REPO``: factors on the Hugging Face Hub, with a card made from their origin."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lpes_eval import factors as factors_file
from lpes_eval import hub
from lpes_eval.compare.comparison import FEW_QUESTIONS
from lpes_eval.errors import FactorsError, UserError, first_line, plain
from lpes_eval.factors import Factors


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand ``push``."""
    parser = subparsers.add_parser(
        "push",
        help="share a factors file on the Hugging Face Hub",
        description="Put a factors file and a card with its origin into a repository on the Hub, whose token is that "
        "of huggingface-hub (hf auth login).",
    )
    parser.add_argument("file", metavar="FILE", help="a factors file")
    parser.add_argument("repo", metavar="OWNER/REPO", help="made if it is not there; its card is replaced")
    parser.add_argument("--private", action="store_true", help="make it a private one")
    parser.add_argument("--dry_run", action="store_true", help="print the card, and send nothing")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Send the file and its card in one commit; returns 0."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", arguments.repo) is None:
        raise UserError(f"{arguments.repo}: expected OWNER/REPO")
    factors = factors_file.load(arguments.file)
    try:
        text = "\n".join(map(plain, card(factors, arguments.repo)))
    except FactorsError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FactorsError(f"{arguments.file}: origin.proof is not as a search writes it ({error})") from None
    if arguments.dry_run:
        print(text)
        return 0
    import huggingface_hub
    from huggingface_hub import CommitOperationAdd

    files = {hub.FILE: json.dumps(factors.to_dict(), indent=2) + "\n", "README.md": text}
    operations = [CommitOperationAdd(name, content.encode()) for name, content in files.items()]
    try:
        huggingface_hub.create_repo(arguments.repo, private=arguments.private, exist_ok=True)
        done = huggingface_hub.create_commit(arguments.repo, operations, commit_message="Layer factors")
    except Exception as error:  # as in hub.fetch
        reason = f"the Hub does not take it ({first_line(error)})"
        raise UserError(f"push {arguments.repo}: {reason}; check name, token, network") from None
    print(f"{done.commit_url}\nfactors=hf://{arguments.repo}@{done.oid}")
    return 0


def card(factors: Factors, repo: str) -> Iterator[str]:
    """The lines of the repository's README.md; ``FactorsError`` where the factors name no model."""
    origin, (name, revision) = factors.origin, factors.model
    if name is None:
        raise FactorsError("origin.model is missing; share factors that a search has written, or name their model")
    on_the_hub = name.count("/") == 1 and not name.startswith((".", "/", "~", "lpes-")) and not Path(name).exists()
    base = [f"base_model: {json.dumps(name)}"] if on_the_hub else []
    yield from ("---", *base, "library_name: lpes-eval", "tags: [lpes, rope, long-context]", "---", "")
    yield f"# Layer factors for {name}" + (f" ({revision})" if revision else "")
    elsewhere = "" if on_the_hub or name.startswith("lpes-") else f"pretrained={name},"  # else the factors say which
    yield from ("", f"    lm_eval --model lpes --model_args {elsewhere}factors=hf://{repo}", "")
    yield from _proof(origin.get("proof", {}))
    described = {key: value for key, value in origin.items() if key not in ("proof", "model")}
    yield from ("The origin in full:", "", "```json", *json.dumps(described, indent=2).splitlines(), "```", "")


def _proof(proof: Mapping[str, Any]) -> Iterator[str]:
    """What a search has measured on held-out examples."""
    if rows := proof.get("differences"):
        yield from ("| held-out task | over | gain | 95 % interval | questions |", "| --- | --- | --: | --: | --: |")
        for row in rows:
            low, high = row["interval"]
            gain = row["mean"]
            if "lower_is_better" in row:
                gain, low, high = -gain, high and -high, low and -low
            interval = "none" if low is None else f"{low:+.3f} to {high:+.3f}"
            yield f"| {row['task']} | {row['found_minus']} | {gain:+.3f} | {interval} | {row['questions']} |"
        yield ""
        if any(row["questions"] < FEW_QUESTIONS for row in rows):
            yield from (f"Intervals of fewer than {FEW_QUESTIONS} questions are too narrow.", "")
    else:
        yield from ("They were not measured on held-out examples.", "")
    for guard, found in proof.get("guards", {}).items():
        low, high = found.get("interval", (None, None))
        best = low and -low if "lower_is_better" in found else high
        falls = "worse beyond chance, but " if best is not None and best < 0 else ""
        yield f"- guard {guard}: {'worsened' if found['over'] else f'{falls}not worsened beyond what is allowed'}"
    if "command" in proof:
        yield from ("", "Measured by", "", f"    {proof['command']}", "")
