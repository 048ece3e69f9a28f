"""Tasks that a group's YAML defines are found by their own names and tags."""

from lpes_eval.harness.plugin import tasks_folder


def test_members_are_selected_by_name_tag_and_pattern_and_listed_as_groups_alone(task_manager):
    manager = task_manager()
    assert manager.match_tasks(["leval_16k_t*"]) == ["leval_16k_tpo", "leval_16k_true_false"]
    assert {"zeroscrolls_gov_report", "zeroscrolls_16k_qa", "lpes_ppl_128k"} <= set(manager.all_tasks)
    listed = [line.split("|")[1].strip() for line in manager.list_all_tasks().splitlines() if line.count("|") > 2]
    assert [name for name in listed if name.startswith("leval")] == ["leval", "leval_16k"]


def test_a_name_that_somebody_else_uses_stays_theirs(tmp_path):
    from lm_eval.tasks import TaskManager

    (tmp_path / "mine.yaml").write_text("task: leval_tpo\ndataset_path: mine\n")
    manager = TaskManager(include_defaults=False, include_path=[str(tasks_folder()), str(tmp_path)])
    assert manager.task_index["leval_tpo"].yaml_path == tmp_path / "mine.yaml"
    assert "leval_sci_fi" in manager.all_tasks
