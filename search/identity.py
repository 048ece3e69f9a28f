"""What scores depend on, as plain data that every process finds alike: the model, its tokenizer, the tasks' code."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

READING = (
    "max_length", "max_gen_toks", "add_bos_token", "prefix_token_id", "truncation", "think_end_token", "backend",
    "softmax_dtype", "mixed_precision_dtype",
)  # fmt: skip
"""An lm-eval model's settings that change tokens or answers, beyond the transformers model's own."""


def sha256(value: Any) -> str:
    """A hash of plain data, and of what ``plain`` makes such."""
    return hashlib.sha256(json.dumps(value, default=plain).encode()).hexdigest()


def plain(value: Any) -> Any:
    """A value that JSON does not know, without what differs from process to process."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return vars(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if name := getattr(value, "__qualname__", None):
        return name  # its source is part of ``code``
    text = str(value)
    return text if " at 0x" not in text else type(value).__qualname__


def reading(lm: Any) -> dict[str, Any]:
    """How an lm-eval model makes tokens of a text: its settings, and its tokenizer's content."""
    settings = {name: getattr(lm, name, None) for name in READING}
    described = {k: v if isinstance(v, int | str | None) else str(v) for k, v in settings.items()}
    return {**described, "tokenizer_sha256": _tokenizer(lm.tokenizer)}


def _tokenizer(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else {"vocab": sorted(tokenizer.get_vocab().items())}
    for of_the_last_call in ("padding", "truncation"):
        content.pop(of_the_last_call, None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    cleaned_up = getattr(tokenizer, "clean_up_tokenization_spaces", None)
    return sha256([type(tokenizer).__name__, sorted(special.items()), cleaned_up, content])


def code(*named: Any) -> str:
    """A hash of the source files that functions and classes are from, and of the files that these import from.

    Installed packages are left out: they have versions (``packages``). lm-eval's tasks, which are there to be edited,
    are not.
    """
    found: dict[str, bytes] = {}
    waiting = [namespace for value in named for namespace in _namespaces(value)]
    while waiting:
        namespace = waiting.pop()
        file = namespace.get("__file__")
        if not isinstance(file, str) or file in found or not _editable(Path(file)):
            continue
        found[file] = hashlib.sha256(Path(file).read_bytes()).digest()
        inside = f"{namespace.get('__name__')}."  # whether a package's modules are there depends on who imported them
        for value in list(namespace.values()):
            if isinstance(value, ModuleType) and value.__name__.startswith(inside):
                continue
            if isinstance(value, ModuleType | FunctionType | type | functools.partial):
                waiting += _namespaces(value)
    return hashlib.sha256(b"".join(sorted(found.values()))).hexdigest()


def _namespaces(value: Any) -> Iterator[dict[str, Any]]:
    """The global names of the modules that a value's code is from."""
    if isinstance(value, functools.partial):
        value = [value.func, *value.args, *value.keywords.values()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _namespaces(part)
    elif isinstance(value, ModuleType):
        yield vars(value)
    elif isinstance(value, type):
        modules = (sys.modules.get(base.__module__) for base in value.__mro__)
        yield from (vars(module) for module in modules if module is not None)
    elif callable(value):
        function = inspect.unwrap(value)
        yield getattr(function, "__globals__", None) or vars(sys.modules[type(function).__module__])


def _editable(file: Path) -> bool:
    """Whether a file is source code that no package version stands for."""
    if file.suffix != ".py" or not file.is_file():
        return False
    if "/lm_eval/tasks/" in file.as_posix():
        return True
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    return not installed and not file.is_relative_to(sysconfig.get_paths()["stdlib"])


def packages() -> dict[str, str]:
    """Versions that answers and scores may depend on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("lpes-eval", "lm-eval", "transformers", "tokenizers", "torch", "numpy", "cmaes"):
        with contextlib.suppress(PackageNotFoundError):  # cmaes is an extra
            found[name] = version(name)
    return found
