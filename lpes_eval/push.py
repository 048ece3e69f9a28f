"""``lpes-eval push FILE OWNER/REPO``: factors on the Hugging Face Hub, with a card made from their origin."""

import argparse
import json
import shlex
from pathlib import Path

from lpes_eval import factors as factors_file
from lpes_eval import hub, reference
from lpes_eval.errors import FactorsError, UserError, first_line
from lpes_eval.factors import Factors
from lpes_eval.files import entry
from lpes_eval.text import markdown, terminal


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
    parser.add_argument("--dry_run", action="store_true", help="print the card, and send nothing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Send the file and its card in one commit; returns 0."""
    factors = factors_file.load(args.file)
    text = card(factors, args.repo)
    if args.dry_run:
        print(text)
        return 0
    import huggingface_hub
    from huggingface_hub import CommitOperationAdd

    files = {hub.FILE: json.dumps(factors.to_dict(), indent=2) + "\n", "README.md": text}
    operations = [CommitOperationAdd(name, content.encode()) for name, content in files.items()]
    try:
        huggingface_hub.create_repo(args.repo, exist_ok=True)
        done = huggingface_hub.create_commit(args.repo, operations, commit_message="Layer factors")
    except Exception as error:  # as in hub.fetch
        raise UserError(f"push {args.repo}: the Hub does not take it ({first_line(error)})") from None
    print(f"{done.commit_url}\nfactors=hf://{args.repo}@{done.oid}")
    return 0


def card(factors: Factors, repo: str) -> str:
    """The repository's README.md; ``FactorsError`` where the factors name no model."""
    name, revision = factors.model
    if name is None:
        raise FactorsError("origin.model is missing; share factors that a search has written, or name their model")
    on_the_hub = name.count("/") == 1 and name not in reference.NAMES and not Path(name).exists()
    loaded = {"pretrained": name, **entry(factors.origin, "model_args"), "factors": f"hf://{repo}"}
    arguments = shlex.quote(terminal(",".join(f"{key}={value}" for key, value in loaded.items())))
    base = f"base_model: {json.dumps(name)}\n" if on_the_hub else ""
    return f"""---
{base}library_name: lpes-eval
tags: [lpes, rope, long-context]
---

# Layer factors for {markdown(name)}{f" ({markdown(revision)})" if revision else ""}

    lm_eval --model lpes --model_args {arguments}

Where they come from; `proof` is what they gain on held-out examples:

```json
{json.dumps(factors.origin, indent=2)}
```
"""
