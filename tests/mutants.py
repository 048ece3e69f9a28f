"""Faults that would mislead a user, each planted in a copy of the tree: the tests named beside it must fail.

    python tests/mutants.py            # all of them, in a few minutes
    python tests/mutants.py worst kv   # those whose claim contains one of these words

A table says which were caught. The exit status is 1 where one was not, or where the text to replace is no longer there.
``tests/test_mutants.py`` looks in every run of the tests whether that text is there.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutant:
    """A fault: the text of a file, what replaces it, and the tests of which one must fail."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


ROPE, METHODS, SEARCH, DATA, COMPARE = (f"tests/{name}" for name in ("rope", "methods", "search", "data", "compare"))

MUTANTS = {
    # -- the factors
    "positions are divided by the factor, not multiplied": Mutant(
        "lpes_eval/rotary.py",
        "ids.unsqueeze(-3) / divisors.view(-1, 1, 1)",
        "ids.unsqueeze(-3) * divisors.view(-1, 1, 1)",
        (f"{ROPE}/test_rotation.py::test_uniform_factor_equals_linear_interpolation",),
    ),
    "layer h has factor h, not that of its neighbour": Mutant(
        "lpes_eval/rotary.py",
        "tables[layers[h]]",
        "tables[layers[h - 1]]",
        (f"{ROPE}/test_rotation.py::test_factors_divide_positions_at_the_frequencies_of_the_true_length",),
    ),
    "a prompt takes over no more than is there of the one before": Mutant(
        "lpes_eval/engine/exact.py",
        "common(before.tokens, row.tokens), before.held, len(row.tokens) - 1)",
        "common(before.tokens, row.tokens), len(row.tokens) - 1)",
        ("tests/engine/test_engine.py::test_prompts_of_a_batch_are_answered_as_each_alone",),
    ),
    "a drafted token counts only where the model writes it": Mutant(
        "lpes_eval/engine/exact.py",
        "or k == len(draft) or token != draft[k]:",
        "or k == len(draft):",
        ("tests/engine/test_engine.py::test_drafts_save_steps_where_they_are_right_and_change_no_answer",),
    ),
    "a layer with a window does not see beyond it": Mutant(
        "lpes_eval/engine/kv_cache.py",
        " | (column <= position - (window or self._end))",
        "",
        ("tests/engine/test_engine.py::test_prompts_of_a_batch_are_answered_as_each_alone",),
    ),
    "a key-value cache filled under other factors is refused": Mutant(
        "lpes_eval/caches.py",
        "            if held > 0:",
        "            if held < 0:",
        (f"{ROPE}/test_cache_guard.py::test_a_cache_filled_under_other_factors_is_refused",),
    ),
    "a copied key-value cache goes on under the same factors alone": Mutant(
        "lpes_eval/caches.py",
        "if stamp is None or stamp.factors is None or stamp.factors != self.factors:",
        "if stamp is None or stamp.factors is None:",
        (f"{ROPE}/test_cache_guard.py",),
    ),
    "kept tables have a row for each position from the first of their block": Mutant(
        "lpes_eval/rotary.py",
        "(ids - block.first).view(-1)",
        "(ids % block.rows.shape[1]).view(-1)",
        (f"{ROPE}/test_rotation.py::test_rows_of_kept_tables_are_what_the_rotary_module_computes",),
    ),
    "tables are made anew where the frequencies have changed": Mutant(
        "lpes_eval/rotary.py",
        "or not block.is_of(rotary) or not",
        "or not",
        (f"{ROPE}/test_rotation.py::test_frequencies_that_somebody_changes_are_tabulated_anew",),
    ),
    "the factors in force are those that were applied, to the last digit": Mutant(
        "lpes_eval/rope.py",
        "Factors(factors=state.factors, origin=state.origin)",
        "Factors(factors=tuple(round(s, 1) for s in state.factors), origin=state.origin)",
        (f"{ROPE}/test_saving.py",),
    ),
    "in vLLM, too, layer h has factor h": Mutant(
        "lpes_eval/vllm.py",
        "table(shared, values[h])",
        "table(shared, values[h - 1])",
        ("tests/test_vllm_layers.py",),
    ),
    "the key of --use_cache knows the model's weights": Mutant(
        "lpes_eval/weights.py",
        "fingerprint(lm.model) or name,",
        "name,",
        (f"{METHODS}/test_lpes.py::test_answers_of_other_weights_are_cached_apart_also_where_they_have_one_name",),
    ),
    "a Bezier curve is a sum of Bernstein polynomials, binomials included": Mutant(
        "lpes_eval/curves.py",
        "    level = list(values)\n",
        "    last = len(values) - 1\n"
        "    weights = [t**k * (1 - t) ** (last - k) for k in range(last + 1)]\n"
        "    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)\n"
        "    level = list(values)\n",
        ("tests/test_curves.py",),
    ),
    "Ms-PoE gives the most position-aware head the least factor": Mutant(
        "lpes_eval/methods/ms_poe.py",
        "counts.sum(-1).argsort(dim=-1, descending=True, stable=True)",
        "counts.sum(-1).argsort(dim=-1, descending=False, stable=True)",
        (f"{METHODS}/test_ms_poe.py::test_factors_and_logits_are_those_of_a_slow_implementation",),
    ),
    # -- what is asked, and how it is scored
    "the asked record of kv_retrieval stands at the position": Mutant(
        "lpes_eval/data/kv.py",
        "gold_index(position, len(self.records)), list(self.records)",
        "gold_index(position, len(self.records) - 1), list(self.records)",
        (f"{DATA}/test_kv.py::test_the_prompt_equals_the_protocols_to_the_byte",),
    ),
    "the gold document of mdqa_pos stands at the position": Mutant(
        "lpes_eval/data/documents.py",
        "index = gold_index(position, 1 + len(self.distractors))",
        "index = gold_index(position, len(self.distractors))",
        (f"{DATA}/test_mdqa.py::test_positions_are_those_of_the_benchmark",),
    ),
    "lm_eval refuses a prompt that does not fit, and does not cut it": Mutant(
        "lpes_eval/harness/task.py",
        "self.budget().check(ctx, f\"{self.config.task}, question {doc.get('question_id')}\")",
        "self.budget()",
        (f"{METHODS}/test_lpes.py::test_a_prompt_that_does_not_fit_is_an_error_with_the_sizes",),
    ),
    "a search refuses prompts by position that do not fit, and does not cut them": Mutant(
        "search/evaluator.py",
        "if objective.by_position:",
        "if not objective:",
        (f"{SEARCH}/test_evaluator.py::test_prompts_that_would_be_cut_are_refused_by_position_and_counted_elsewhere",),
    ),
    # -- numbers over positions
    "the standard error of the mean is clustered by question": Mutant(
        "lpes_eval/compare/statistics.py",
        "averages.std(ddof=1) / math.sqrt(len(averages)) if",
        "np.std(scores, ddof=1) / math.sqrt(np.size(scores)) if",
        (f"{COMPARE}/test_statistics.py",),
    ),
    "the gate holds the run against the baseline, not the baseline against itself": Mutant(
        "lpes_eval/compare/regress.py",
        "gate.regress(baseline.load(path), now, ",
        "gate.regress(baseline.load(path), baseline.load(path), ",
        (f"{COMPARE}/test_regress_command.py::test_a_worse_run_fails_with_1_and_every_report_has_its_table",),
    ),
    "every score that lm-eval reports is held against the baseline": Mutant(
        "lpes_eval/compare/results.py",
        "    for key in left:",
        "    for key in left if not metrics else ():",
        (f"{COMPARE}/test_gate.py::test_a_fall_of_any_score_of_any_task_by_all_its_answers_fails",),
    ),
    "other documents are not compared, whatever else differs": Mutant(
        "lpes_eval/compare/results.py",
        "if a.documents != b.documents:",
        "if a.documents != b.documents and not data:",
        (f"{COMPARE}/test_compare.py::test_what_cannot_be_compared_is_refused_in_one_line",),
    ),
    "no command replaces a file that it did not write": Mutant(
        "lpes_eval/files.py",
        "if before and mark.encode() not in",
        "if not before and mark.encode() not in",
        ("tests/test_outputs.py",),
    ),
    # -- the search
    "a search measures Position Interpolation under its factor": Mutant(
        "search/run.py",
        "return Factors.from_uniform(factor, **self._layers)",
        "return Factors.from_uniform(1.0, **self._layers)",
        (f"{SEARCH}/test_faults.py::test_pi_has_its_factor_in_all_layers_but_those_left_alone",),
    ),
    "no held-out example can be drawn for a search": Mutant(
        "lpes_eval/data/splits.py",
        "shuffled(sorted(order[held:])",
        "shuffled(sorted(order)",
        (f"{DATA}/test_kv.py::test_no_example_is_in_both_splits_whatever_the_search_seed",),
    ),
    "a search asks a benchmark of ours for its search examples": Mutant(
        "search/tasks.py",
        '"split": split}',
        '"split": "held_out"}',
        (f"{SEARCH}/test_evaluator.py::test_search_and_held_out_examples_have_none_in_common",),
    ),
    "a search divides any other task": Mutant(
        "search/tasks.py",
        "splits.indices(len(questions), split, search_seed)",
        'splits.indices(len(questions), "held_out", search_seed)',
        (f"{SEARCH}/test_evaluator.py::test_search_and_held_out_examples_have_none_in_common",),
    ),
    "what the journal knows is not measured again": Mutant(
        "search/run.py",
        "if name not in entries:",
        "if True:",
        (
            f"{SEARCH}/test_ga.py::test_the_same_command_goes_on_and_ends_with_the_same_bytes_and_measures_nothing_twice",
        ),
    ),
    "no factors are handed over without their guards": Mutant(
        "search/run.py",
        "job = replace(job, guarded_above=self.plain.fitness + 1e-9, plain_rows=self.plain.guard_rows)",
        "job = replace(job, guarded_above=math.inf)",
        (f"{SEARCH}/test_made_up_models.py",),
    ),
    "positions that coincide count once": Mutant(
        "lpes_eval/harness/task.py",
        "self.positions = [position for position in self.positions if position not in self.left_out]",
        "pass",
        (f"{SEARCH}/test_evaluator.py::test_positions_at_which_the_gold_item_stands_at_the_same_place_count_once",),
    ),
    "what is given up is not asked the rest of its prompts": Mutant(
        "search/evaluator.py",
        "in self.engine.answer(order, may_stop=race is not None, settled=settled):",
        "in self.engine.answer(order, settled=settled):",
        (f"{SEARCH}/test_evaluator.py",),
    ),
    "what the score does not confirm is not kept": Mutant(
        "search/optimizers/layers.py",
        "if self._kept <= plain + 1e-9:",
        "if self._kept <= plain - 1e-9:",
        (f"{SEARCH}/test_optimizers.py",),
    ),
    "a search is not gone on with under other settings": Mutant(
        "search/journal.py",
        "(changes := _differences(settings, self.settings)):",
        "(changes := _differences(settings, settings)):",
        (f"{SEARCH}/test_ga.py::test_other_settings_in_the_same_folder_are_refused_with_the_difference",),
    ),
    "what was damaged is not believed": Mutant(
        "lpes_eval/entries.py",
        "    fitness: float\n",
        "    fitness: Any\n",
        (f"{SEARCH}/test_journal.py::test_a_line_that_is_no_entry_is_named_with_what_is_wrong_and_the_way_out",),
    ),
    "code that comes with a model runs only where it was trusted": Mutant(
        "search/config.py",
        'and not args.model_args.get("trust_remote_code"):',
        "and False:",
        (f"{SEARCH}/test_flags.py::test_what_cannot_be_run_is_refused_in_one_line_before_a_model_is_loaded",),
    ),
    "logits that are no numbers are not an answer": Mutant(
        "lpes_eval/engine/exact.py",
        "                    raise no_number(self.factors)",
        "                    pass",
        (f"{SEARCH}/test_faults.py::test_an_individual_under_which_the_logits_are_nan_is_named",),
    ),
    "other examples are another fitness": Mutant(
        "search/evaluator.py",
        "sha256([requests, [objective.docs for objective in self.objectives]])",
        "sha256([])",
        (f"{SEARCH}/test_evaluator.py::test_other_prompts_documents_weights_or_another_model_are_another_fitness",),
    ),
    "other weights are another fitness": Mutant(
        "lpes_eval/weights.py",
        ".encode() + some.numpy().tobytes()",
        ".encode()",
        (f"{SEARCH}/test_evaluator.py::test_other_prompts_documents_weights_or_another_model_are_another_fitness",),
    ),
    "factors that were not shown to help are not called factors.json": Mutant(
        "search/ga.py",
        'if outcome.shown else ("best_effort.json", "factors.json")',
        'if outcome.fitter else ("best_effort.json", "factors.json")',
        (f"{SEARCH}/test_verdict.py::test_factors_that_are_not_shown_to_help_are_a_best_effort",),
    ),
    "factors that are not better beyond chance are not shown to help": Mutant(
        "search/held_out.py",
        "return 1 in compared and -1 not in compared",
        "return -1 not in compared",
        (f"{SEARCH}/test_verdict.py::test_factors_count_as_found_where_a_task_is_better_beyond_chance_and_none_worse",),
    ),
}


def run(folder: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run tests in ``folder``, on the package that is there, up to the first failure."""
    settings = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=folder, env=os.environ | settings, capture_output=True, text=True)


def outcome(mutant: Mutant, folder: Path) -> str:
    """``caught``, or what is wrong."""
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    if (found := text.count(mutant.old)) != 1:
        return f"its text occurs {found} times in {mutant.file}, expected once"
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        ended = run(folder, mutant.tests)
    finally:
        path.write_text(text, encoding="utf-8")
    if ended.returncode == 1:  # of pytest: a test failed
        return "caught"
    return "SURVIVED" if ended.returncode == 0 else f"pytest ended with {ended.returncode}: {ended.stdout[-300:]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Plant the faults one after another; return 1 where one is not caught."""
    parser = argparse.ArgumentParser(description="Plant faults in a copy of the tree and see whether the tests fail.")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only the faults whose claim contains one of these")
    words = parser.parse_args(argv).words
    chosen = {claim: MUTANTS[claim] for claim in MUTANTS if not words or any(word in claim for word in words)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "tree")
        shutil.copytree(REPOSITORY, folder, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__"))
        sound = run(folder, sorted({test for mutant in chosen.values() for test in mutant.tests}))
        if sound.returncode:
            print(sound.stdout, "these tests must pass before a fault is planted", sep="\n")
            return 1
        missed = 0
        for claim, mutant in chosen.items():
            found = outcome(mutant, folder)
            missed += found != "caught"
            print(f"{found:9} {mutant.file:32} {claim}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
