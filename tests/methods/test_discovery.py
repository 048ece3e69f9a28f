"""A method is a file in lpes_eval/methods: what lists methods takes them from there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lpes_eval import methods
from lpes_eval.errors import UserError
from lpes_eval.methods.base import MethodLM

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")


def test_names_are_the_files_and_cost_no_import():
    code = "import sys, lpes_eval.methods as m; print(*m.names(), 'torch' in sys.modules)"
    *found, torch_is_loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert {"lpes", "pi", "attention_buckets", "ms_poe", "moice"} <= set(found)
    assert found == methods.names()
    assert torch_is_loaded == "False"
    with pytest.raises(UserError, match=r"^nothing: no such method; expected one of .*ms_poe"):
        methods.load("nothing")


@pytest.mark.parametrize("name", methods.names())
def test_every_method_is_a_model_type_with_its_paper_and_a_section_of_the_docs(name):
    from lm_eval.api.registry import get_model

    kind = methods.load(name)
    assert issubclass(kind, MethodLM)
    assert get_model(name) is kind
    assert re.fullmatch(r"\d{4}\.\d{5}", kind.paper)
    section = DOCS.split(f"\n## {kind.title}\n")[1].split("\n## ")[0]
    assert f"(https://arxiv.org/abs/{kind.paper})" in section
    assert f"`{name}`" in section
