"""setuptools, plus what it has no setting for.

- ``lpes_eval.pth`` and ``_lpes_eval_hook.py`` in ``site-packages``, by which Python's start-up finds the plugin, after
  an ordinary and after an editable install;
- the folder ``tasks`` inside the installed package, as ``lpes_eval/tasks``. (``package_dir`` could say so too, but then
  an editable install imports a finder and ``pathlib`` at every start of Python, 10 ms that nobody asked for.)
- the entry points ``lm_eval.models``, one for each method in ``lpes_eval/methods``.
"""

import base64
import hashlib
import importlib.util
import os
import zipfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  (the rest of the interface, PEP 517 and 660)
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

HERE = Path(__file__).resolve().parent
TASKS = HERE.parent / "tasks"
# `site` runs this line at every start; if the hook is gone it must not print a traceback into every program.
PTH = r"import sys; exec('try:\n import _lpes_eval_hook\nexcept ImportError:\n pass')" + "\n"


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Build the ordinary wheel."""
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    tasks = sorted(path for path in TASKS.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    installed = {f"lpes_eval/tasks/{path.relative_to(TASKS).as_posix()}": path.read_bytes() for path in tasks}
    _add(Path(wheel_directory, name), _hook() | installed)
    return name


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Build the wheel of an editable install."""
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    _add(Path(wheel_directory, name), _hook())
    return name


def _hook():
    return {"lpes_eval.pth": PTH.encode(), "_lpes_eval_hook.py": (HERE / "_lpes_eval_hook.py").read_bytes()}


def _entry_points():
    """The methods' model types; ``lpes_eval.methods`` itself needs the standard library alone."""
    home = HERE.parent / "lpes_eval" / "methods" / "__init__.py"
    spec = importlib.util.spec_from_file_location("methods", home, submodule_search_locations=[str(home.parent)])
    methods = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(methods)
    lines = [f"{name} = {methods.target(name)}" for name in methods.names()]
    return ("\n[lm_eval.models]\n" + "\n".join(lines) + "\n").encode()


def _add(wheel, added):
    part = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as new:
        changed = {}
        for item in sorted(old.infolist(), key=lambda item: item.filename.endswith("/RECORD")):  # RECORD last
            data = old.read(item)
            if item.filename.endswith(".dist-info/entry_points.txt"):
                changed[item.filename] = data = data + _entry_points()
            if item.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                lines = [line for line in lines if line.split(",")[0] not in changed]
                data = "".join([*lines, *(_record(name, content) for name, content in changed.items())]).encode()
                data += "".join(_record(name, content) for name, content in added.items()).encode()
            new.writestr(item, data)
        for name, content in added.items():
            new.writestr(zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0)), content)
    os.replace(part, wheel)


def _record(name, content):
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"
