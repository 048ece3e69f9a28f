"""Files as lm-eval writes them, made of scores that a test chooses."""

import hashlib
import json

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
    first_question=0,
    text="question",
    chat="",
    metadata=None,
    stderr=None,
):
    """Write a run of one group of positions.

    Args:
        folder: where the results and the samples go.
        scores: position (None for a task without) -> list of scores, one a question.
        text: what the documents say; another text is another set of examples.
        chat: put before every prompt, as a chat template does.
        metadata: what else the tasks' metadata says.
        stderr: position -> standard error that is reported; by default that of an average.

    Returns:
        The path of the results JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind, arguments, parameters = model
    names = {position: group if position is None else f"{group}_pos_{position:g}" for position in scores}
    results, configs, lengths = {}, {}, {}
    for position, line in scores.items():
        name, n = names[position], len(line)
        mean = sum(line) / n
        error = (sum((s - mean) ** 2 for s in line) / max(1, n - 1) / n) ** 0.5
        reported = stderr[position] if stderr else error
        results[name] = {"name": name, "alias": name, "sample_len": n, f"{metric},none": mean}
        results[name][f"{metric}_stderr,none"] = reported
        place = {} if position is None else {"position": position}
        configs[name] = {
            "task": name,
            "metadata": {
                "version": version,
                **place,
                **arguments,
                "config_source": f"{folder}/x.yaml",
                **(metadata or {}),
            },
        }
        lengths[name] = {"original": n, "effective": n}
        if samples:
            with (folder / f"samples_{name}_{date}.jsonl").open("w", encoding="utf-8") as file:
                for index, score in enumerate(line):
                    question = first_question + index
                    asked = f"{text} {question} at {position}"
                    sample = {
                        "doc_id": index,
                        "doc": {"question_id": question, "text": asked},
                        "target": "yes",
                        "arguments": {"gen_args_0": {"arg_0": chat + asked, "arg_1": {"until": ["\n"]}}},
                        "resps": [["yes"]],
                        "filtered_resps": ["yes"],
                        "filter": "none",
                        "metrics": [metric],
                        "doc_hash": sha(asked),
                        "prompt_hash": sha(chat + asked),
                        "target_hash": sha("yes"),
                        metric: score,
                    }
                    file.write(json.dumps(sample) + "\n")
    grouped = {} if None in scores else {group: list(names.values())}
    path = folder / f"results_{date}.json"
    path.write_text(
        json.dumps(
            {
                "results": results,
                "group_subtasks": grouped,
                "configs": configs,
                "versions": dict.fromkeys(names.values(), version),
                "n-shot": dict.fromkeys(names.values(), 0),
                "higher_is_better": {name: {metric: higher_is_better} for name in names.values()},
                "n-samples": lengths,
                "config": {
                    "model": kind,
                    "model_args": arguments,
                    "model_num_parameters": parameters,
                    "model_dtype": "torch.float32",
                    "limit": None,
                },
                "date": 1795268362.5,
                "pretty_env_info": "PyTorch version: 2.13.0+cpu\nIs debug build: False",
                "transformers_version": "5.23.0",
                "lm_eval_version": "0.4.13",
                "model_name": arguments.get("pretrained", "random"),
                "chat_template": chat or None,
            }
        ),
        encoding="utf-8",
    )
    return path


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()
