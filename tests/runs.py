"""Files as lm-eval writes them, made of scores that a test chooses."""

import json

from lm_eval.utils import hash_string

DATE = "2026-11-21T13-39-27.906502"


def write_run(
    folder,
    scores,
    *,
    date=DATE,
    group="toy",
    metric="acc",
    version=1.0,
    model=("hf", {"pretrained": "tiny"}, 1000),
    higher_is_better=True,
    samples=True,
    text="question",
    target="yes",
    chat="",
    metadata=None,
    others=None,
):
    """Write a run of one task; returns the path of its results.

    ``scores``: position (None for a task without) -> scores, one a question; another ``text`` is another set of
    examples; ``chat`` is put before every prompt, as a chat template does; ``others`` are more metrics, a direction and
    one score a question each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind, arguments, parameters = model
    columns = {metric: [sum(row) / len(row) for row in zip(*scores.values(), strict=True)]}
    if None not in scores:
        columns |= {f"{metric}@{position:g}": line for position, line in scores.items()}
    n = len(columns[metric])
    row = {"name": group, "alias": group, "sample_len": n}
    means = [sum(line) / n for line in scores.values()]
    if len(columns) > 1:
        over_positions = {"worst": (min if higher_is_better else max)(means), "spread": max(means) - min(means)}
        for name, value in over_positions.items():
            row |= {f"{metric}_{name},none": value, f"{metric}_{name}_stderr,none": "N/A"}
        metadata = {"positions": [*scores], **(metadata or {})}
    others = others or {}
    directions = dict.fromkeys(columns, higher_is_better) | {name: up for name, (up, _) in others.items()}
    columns |= {name: line for name, (_, line) in others.items()}
    for name, line in columns.items():
        row |= {f"{name},none": sum(line) / n, f"{name}_stderr,none": 0.02}
    if samples:
        with (folder / f"samples_{group}_{date}.jsonl").open("w", encoding="utf-8") as file:
            for question in range(n):
                asked = f"{text} {question}"
                sample = {
                    "doc_id": question,
                    "doc": {"question_id": question, "text": asked},
                    "target": target,
                    "arguments": {"gen_args_0": {"arg_0": chat + asked, "arg_1": {"until": ["\n"]}}},
                    "resps": [["yes"]] * len(scores),
                    "filtered_resps": ["yes"] * len(scores),
                    "filter": "none",
                    "doc_hash": hash_string(asked),
                    "prompt_hash": hash_string(chat + asked),
                    "target_hash": hash_string(target),
                    **{name: line[question] for name, line in columns.items()},
                }
                file.write(json.dumps(sample) + "\n")
    own = {"version": version, **arguments, "config_source": f"{folder}/x.yaml", **(metadata or {})}
    path = folder / f"results_{date}.json"
    path.write_text(
        json.dumps(
            {
                "results": {group: row},
                "group_subtasks": {},
                "configs": {group: {"task": group, "metadata": own}},
                "versions": {group: version},
                "higher_is_better": {group: directions},
                "n-samples": {group: {"original": n, "effective": n}},
                "config": {
                    "lpes_eval": "0.0.9",
                    "model": kind,
                    "model_args": arguments,
                    "model_num_parameters": parameters,
                    "model_dtype": "torch.float32",
                },
                "date": 1795268362.5,
                "pretty_env_info": "PyTorch version: 2.13.0+cpu\nIs debug build: False",
                "transformers_version": "5.23.0",
                "lm_eval_version": "0.4.13",
            }
        ),
        encoding="utf-8",
    )
    return path


def write_tasks(folder, **tasks):
    """Write a run of several tasks, each with the options that `write_run` has; returns the path of the results."""
    whole = {}
    for name, options in tasks.items():
        path = write_run(folder, group=name, **options)
        for key, value in json.loads(path.read_text()).items():
            whole[key] = whole.get(key, {}) | value if isinstance(value, dict) else value
    path.write_text(json.dumps(whole))
    return path


def put(path, place, value):
    data = at = json.loads(path.read_text())
    *folders, last = place
    for key in folders:
        at = at[key]
    at[last] = value
    path.write_text(json.dumps(data))
