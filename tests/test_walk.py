"""docs/from-model-to-production.md, walked from its top to its bottom on the reference model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from-model-to-production.md"


def accuracy(folder: Path) -> float:
    (file,) = folder.rglob("results_*.json")
    return json.loads(file.read_text())["results"]["kv_retrieval"]["acc,none"]


@pytest.mark.slow
def test_what_was_found_is_what_is_served_and_better_than_the_plain_model(tmp_path):
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert [kind for kind, _ in blocks] == ["sh", "sh", "sh", "python", "sh"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for kind, program in blocks:
        command = [sys.executable, "-c"] if kind == "python" else ["bash", "-euo", "pipefail", "-c"]
        subprocess.run([*command, program], cwd=tmp_path, env=environment, check=True)
    assert accuracy(tmp_path / "again") == accuracy(tmp_path / "scaled") > accuracy(tmp_path / "plain")
