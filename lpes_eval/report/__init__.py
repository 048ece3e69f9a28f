"""One page, and its figures, from results of lm-eval and the folders of searches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lpes_eval.errors import UserError


def plot(path: str | Path, *others: str | Path, task: str | None = None) -> Any:
    """The score at each position of runs on the same examples, as a matplotlib figure.

    Args:
        path: a run's results JSON, or a folder, whose newest results count.
        *others: runs to stand beside it.
        task: which one, where there are several; the first by default.

    Raises:
        UserError: no such task by position in the first run.
    """
    from lpes_eval.report import figures, sources

    runs, _, _ = sources.read((path, *others))
    for panel in sources.panels(runs):
        if panel.by_position and runs[0] in panel.runs and task in (None, panel.title.partition(",")[0]):
            return figures.positions(panel.title, panel.lines).in_notebook()
    raise UserError(f"{path}: no scores by position{f' of {task}' if task else ''} to plot")
