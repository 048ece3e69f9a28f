"""Write the YAML beside this file: one task a size and position, two groups a size. Run it after a change here."""

from pathlib import Path

from lpes_eval.data import mdqa

FOLDER = Path(__file__).resolve().parent
DEFAULT = 10
SEARCHED = (0, 50, 100)
"""The positions that a search scores; a tag of their own."""

GROUP = """\
group: {group}
task:
{tasks}
aggregate_metric_list:
  - metric: best_subspan_em
    aggregation: mean
    weight_by_size: false
metadata:
  version: 2
"""
TASK = """\
include: _template
task: {task}
{tag}metadata:
  version: 2
  num_documents: {num_documents}
  position: {position}
"""


def files() -> dict[str, str]:
    """The name of every generated file, and its text."""
    out = {}
    for num_documents in mdqa.SIZES:
        group = "mdqa_pos" if num_documents == DEFAULT else f"mdqa_pos_{num_documents}"
        names = {p: f"mdqa_pos_{num_documents}_pos_{p:03}" for p in sorted({*mdqa.POSITIONS, *mdqa.STEPS})}
        for name, positions in ((group, mdqa.POSITIONS), (f"{group}_steps", mdqa.STEPS)):
            members = "\n".join(f"  - {names[position]}" for position in positions)
            out[f"{name}.yaml"] = GROUP.format(group=name, tasks=members)
        for position, name in names.items():
            tag = f"tag: {group}_searched\n" if position in SEARCHED else ""
            out[f"{name}.yaml"] = TASK.format(task=name, num_documents=num_documents, position=position, tag=tag)
    return out


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
