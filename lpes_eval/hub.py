"""Factors files on the Hugging Face Hub: ``hf://OWNER/REPO[/FILE][@REVISION]``."""

import re
from pathlib import Path

from lpes_eval.errors import FactorsError, first_line

SCHEME = "hf://"
FILE = "factors.json"
_ADDRESS = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[^@]+))?(?:@(?P<revision>.+))?")


def fetch(address: str) -> Path:
    """The file that an address names (else ``FactorsError``), downloaded once; without FILE, ``factors.json``."""
    if (found := _ADDRESS.fullmatch(address)) is None:
        expected = "hf://OWNER/REPO, hf://OWNER/REPO/FILE, or one of them@REVISION"
        raise FactorsError(f"factors={address}: expected {expected}")
    import huggingface_hub

    try:
        path = huggingface_hub.hf_hub_download(found["repo"], found["file"] or FILE, revision=found["revision"])
    except Exception as error:  # of its HTTP client
        reason = f"the Hub does not give this file ({first_line(error)})"
        raise FactorsError(f"factors={address}: {reason}; check the name") from None
    return Path(path)
