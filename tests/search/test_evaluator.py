"""The fitness against ``lm_eval.simple_evaluate``, example by example."""

import itertools
import json
import random
import shutil
from dataclasses import replace

import lm_eval
import pytest
import torch
from lm_eval.tasks import TaskManager

from lpes_eval import methods, rope
from lpes_eval.data import splits
from lpes_eval.errors import PromptTooLong, UserError
from lpes_eval.methods.lpes import LPES
from search.evaluator import Evaluator
from search.space import Cutoff
from search.tasks import load_tasks


def individuals(count, layers=3, seed=0):
    """Random factors in hundredths, each changed from the one before in one layer, as a mutant from its parent."""
    rng = random.Random(seed)
    factors = [1.0] * layers
    for _ in range(count):
        factors = list(factors)
        factors[rng.randrange(layers)] = rng.randint(100, 200) / 100
        yield factors


@pytest.fixture
def harness(toy_lm, task_folder, monkeypatch):
    """Every search example's score by ``simple_evaluate``, in the order of the task's examples."""
    manager = TaskManager(include_path=task_folder, include_defaults=False, metadata={"split": "search"})

    def scores(factors, name, metric, **options):
        rope.apply(toy_lm.model, factors)
        samples = None if name == "toy" else {name: sorted(splits.indices(12, "search"))}  # toy divides its own
        options |= {"task_manager": manager, "samples": samples, "bootstrap_iters": 0}
        with monkeypatch.context() as patched:
            patched.setattr(toy_lm, "fast", False)  # hf's own loop answers
            results = lm_eval.simple_evaluate(model=toy_lm, tasks=[name], **options)
        return [sample[metric] for sample in sorted(results["samples"][name], key=lambda sample: sample["doc_id"])]

    return scores


def test_fitness_equals_simple_evaluate_example_by_example(toy_lm, load, harness):
    tasks = load("toy", lambdas=[0.2, 0.3, 0.5])
    fast = [Evaluator(toy_lm, tasks, tokens_per_batch=budget) for budget in (40, 4000)]
    assert all(evaluator.slow_because is None for evaluator in fast)
    slow = Evaluator(toy_lm, tasks, fast=False)
    columns, seen, ended = ["toy@0", "toy@50", "toy@100"], set(), {}
    assert list(slow.columns) == columns
    for factors in individuals(2, seed=1):
        expected = {column: harness(factors, "toy", column.replace("toy", "hits")) for column in columns}
        means = [sum(values) / len(values) for values in expected.values()]
        for evaluator in (*fast, slow):
            measured = evaluator(factors)
            assert measured.examples == expected
            assert measured.fitness == pytest.approx(0.2 * means[0] + 0.3 * means[1] + 0.5 * means[2], abs=1e-12)
            if evaluator is not slow:  # which counts tokens in an answer's text
                assert measured.ended == ended.setdefault(tuple(factors), measured.ended)
        seen.add(measured.fitness)
    assert {0, 1} == {each for values in ended.values() for each in values}  # some answers are cut short
    assert len(seen) > 1  # factors matter here


def test_multiple_choice_and_an_error_rate_are_fitness_too(toy_lm, load, harness):
    parts = load("toy_choice", "toy_plain", metrics=["acc", "misses"], weights=[3, 1])
    fitness = Evaluator(toy_lm, parts)
    assert fitness.slow_because == "not all requests are for generated text"
    for factors in individuals(2):
        measured = fitness(factors)
        for part, metric in zip(parts, ("acc", "misses"), strict=True):
            assert measured.examples[part.name] == harness(factors, part.name, metric)
        scores = measured.scores
        assert measured.fitness == pytest.approx(0.75 * scores["toy_choice"] - 0.25 * scores["toy_plain"])


@pytest.mark.parametrize(
    "options",
    [
        {"num_fewshot": 2, "fewshot_random_seed": 7, "system_instruction": "say red"},
        {"num_fewshot": 2, "apply_chat_template": True, "fewshot_as_multiturn": False},
        {"gen_kwargs": {"max_gen_toks": 3, "until": ["e"]}},
        {"gen_kwargs": {"do_sample": True, "temperature": 1.5}},
    ],
    ids=lambda options: "+".join(options),
)
def test_lm_evals_flags_mean_what_they_mean_to_lm_eval(toy_lm, load, harness, monkeypatch, options):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    monkeypatch.setattr(toy_lm.tokenizer, "chat_template", template)
    (part,), (other,) = load("toy_plain", **options), load("toy_plain")
    asked, otherwise = ([request.args for request in each.task.instances] for each in (part, other))
    assert asked != otherwise
    fitness = Evaluator(toy_lm, [part])
    assert (fitness.slow_because is None) == ("do_sample" not in options.get("gen_kwargs", {}))
    factors = [1.0, 1.25, 1.7]
    assert fitness(factors).examples["toy_plain"] == harness(factors, "toy_plain", "hits", **options)


def test_tasks_are_named_as_for_lm_eval(load, task_folder, few_tasks, monkeypatch):
    def named(*tasks):
        return [part.name for part in load(*tasks)]

    assert named("toy*") == ["toy", "toy_choice", "toy_luck", "toy_plain"]
    assert named("toy_tag") == ["toy_plain"]
    assert named(f"{task_folder}/toy_[cp]*.yaml") == ["toy_choice", "toy_plain"]
    for name, message in (("toy_plane", "closest names are toy_plain"), (f"{task_folder}/none.yaml", "no YAML file")):
        with pytest.raises(UserError, match=message):
            named(name)
    monkeypatch.setattr("search.tasks._divide", lambda *_: [0, 1])
    shares = {part.name: sum(column.weight for column in part.columns) for part in load("toy*")}
    asked = {"toy": 5, "toy_choice": 2, "toy_luck": 5, "toy_plain": 2}  # every example counts the same
    assert shares == pytest.approx({name: number / 14 for name, number in asked.items()})


def test_code_that_a_model_writes_is_run_only_on_request(load, monkeypatch):
    from lm_eval.api.task import ConfigurableTask

    monkeypatch.setattr(ConfigurableTask, "UNSAFE_CODE", True, raising=False)
    with pytest.raises(UserError, match="--confirm_run_unsafe_code"):
        load("toy_plain")
    assert load("toy_plain", confirm_run_unsafe_code=True)


@pytest.mark.parametrize(("task", "divided"), [("toy_plain", True), ("toy", False)])
def test_search_and_held_out_examples_have_none_in_common(load, task, divided):
    def asked(split, seed=0, **few):
        (part,) = load(task, split=split, metadata={"search_seed": seed}, **few)
        assert part.divided is divided  # a benchmark of this package divides its examples itself
        return {request.doc["question_id"] for request in part.task.instances}

    search, held_out = asked("search"), asked("held_out")
    assert search
    assert not search & held_out
    assert held_out == asked("held_out", seed=1)
    assert asked("search", examples=3) != asked("search", seed=1, examples=3)


def test_a_part_of_the_questions_scores_as_it_does_among_all(toy_lm, load):
    tasks, factors = load("toy", "toy_plain", examples=5), [1.0, 1.5, 1.2]
    evaluator = Evaluator(toy_lm, tasks)
    part = evaluator.part((0, 2))
    some, whole = (evaluator(factors, part=questions) for questions in (part, None))
    assert evaluator.asked(part) == 2 * 3 + 2  # two questions, of one task at three positions
    assert whole.examples == Evaluator(toy_lm, tasks)(factors).examples
    for name, values in whole.examples.items():
        assert some.examples[name] == [*values[:2], None, None, None]
        assert some.scores[name] == pytest.approx(sum(values[:2]) / 2)


def test_the_likelihood_of_the_reference_answers_is_that_of_one_forward_pass_a_prompt():
    """On prompts that share a beginning and on such that do not, with one layer scaled."""
    lm, factors = LPES(pretrained="reference-kv", device="cpu"), [1.0, 1.25, 1.1, 1.0]
    (kv,) = load_tasks(lm, ["kv_retrieval"], metadata={"num_keys": 9}, examples=13, lambdas=[2, 3, 5])
    evaluator = Evaluator(lm, [kv])
    measured = evaluator.likelihood(factors, part=[3, 12])
    rope.apply(lm.model, factors)
    for number, column in enumerate(kv.columns):
        values = measured.examples[column.name]
        assert [u for u, value in enumerate(values) if value is not None] == [3, 12]
        for u in (3, 12):
            [request] = [r for r in kv.task.instances if (r.doc_id, r.idx) == (u, number)]
            prompt = lm.tok_encode(request.args[0], add_special_tokens=False)
            text = request.args[0]
            records = json.loads(text[text.index("{") : text.index("}") + 1])
            key = text[text.rindex('Key: "') + len('Key: "') :].split('"')[0]
            written = kv.task.config.target_delimiter + json.dumps(records[key])
            answer = lm.tok_encode(written, add_special_tokens=False)
            with torch.no_grad():
                logits = lm.model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
            each = [logits[len(prompt) - 1 + k, token].item() for k, token in enumerate(answer)]
            assert values[u] == pytest.approx(sum(each) / len(each), abs=1e-4)
    assert measured.fitness == pytest.approx(sum(c.weight * measured.scores[c.name] for c in kv.columns))
    assert measured.fitness != pytest.approx(evaluator.likelihood([1.0] * 4, part=[3, 12]).fitness, abs=1e-3)


def test_positions_at_which_the_gold_item_stands_at_the_same_place_count_once(toy_lm):
    def kv(keys, positions, **options):
        options |= {"metadata": {"num_keys": keys}, "positions": positions}
        (part,) = load_tasks(toy_lm, ["kv_retrieval"], examples=3, **options)
        return part, {column.metric: column.weight for column in part.columns}

    search, weights = kv(4, (0, 20, 50, 100), lambdas=[1, 5, 1, 2])
    assert weights == {"first_value_acc@0": 0.25, "first_value_acc@50": 0.25, "first_value_acc@100": 0.5}
    assert search.note == "kv_retrieval: 20 % is the place of 0 %, so it is not asked or counted again"
    held_out, weights = kv(3, None, split="held_out")
    assert weights == pytest.approx({f"first_value_acc@{position}": 1 / 3 for position in (0, 60, 100)})
    assert held_out.left_out == {20: 0, 40: 0, 80: 60}
    prompts = [request.args[0] for request in held_out.task.instances]
    assert len({*prompts}) == len(prompts) == 3 * 3
    search, weights = kv(6, None)
    assert len(weights) == 6
    assert search.note == ""


def test_other_prompts_documents_weights_or_another_model_are_another_fitness(toy_lm, load, monkeypatch):
    (plain,) = load("toy_plain")
    evaluator = Evaluator(toy_lm, [plain])
    before = evaluator.describe()
    assert Evaluator(toy_lm, load("toy_plain"), fast=False).describe() == before  # how it is measured is none
    documents = [doc | {"answer": "other"} for doc in plain.docs]
    others = [load("toy_plain", system_instruction="Answer."), [replace(plain, docs=documents)]]
    for other in (*others, load("toy_plain", examples=2), load("toy_plain", metrics=["em"])):
        assert Evaluator(toy_lm, other).describe() != before
    model = evaluator.engine.fingerprint()
    projection = toy_lm.model.model.layers[1].mlp.up_proj
    monkeypatch.setitem(projection._parameters, "weight", torch.nn.Parameter(projection.weight + 1))
    assert evaluator.engine.fingerprint() != model


def edited(task_folder, folder, before, after):
    file = shutil.copytree(task_folder, folder) / "utils.py"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    return str(folder)


def test_a_question_is_in_one_split_only(toy_lm, task_folder, tmp_path):
    folder = edited(task_folder, tmp_path / "named", '"question_id": i,', '"question_id": "abcd"[i % 4],')
    search, held_out = (
        load_tasks(toy_lm, ["toy_plain"], split=split, include_path=folder)[0] for split in ("search", "held_out")
    )
    assert {*search.questions, *held_out.questions} == set("abcd")
    assert not {*search.questions} & {*held_out.questions}
    assert {*search.numbers, *held_out.numbers} == set(range(12))
    folder = edited(task_folder, tmp_path / "nameless", '"question_id": i,', '"question_id": None,')
    (task,) = load_tasks(toy_lm, ["toy_plain"], include_path=folder)
    assert task.questions == task.numbers == sorted(splits.indices(12, "search"))
    folder = edited(task_folder, tmp_path / "lonely", "range(12)", "range(1)")
    with pytest.raises(UserError, match="toy_plain has no two questions"):
        load_tasks(toy_lm, ["toy_plain"], include_path=folder)


def test_shots_show_no_held_out_question(load):
    """toy_choice is refused: it has a test split only, so lm-eval would take its examples from there."""
    held_out = load("toy_plain", split="held_out")[0].docs
    (part,) = load("toy_plain", num_fewshot=3)
    prompts = [request.args[0] for request in part.task.instances]
    assert all(prompt.count("NUMBER") == 3 for prompt in prompts)
    assert not any(doc["text"] in prompt for doc in held_out for prompt in prompts)


def test_what_is_given_up_hangs_on_no_batch(toy_lm, load):
    tasks = load("toy_luck")
    evaluators = [Evaluator(toy_lm, tasks, tokens_per_batch=tokens) for tokens in (0, 300)]
    tried = list(individuals(4, seed=4))
    measured = [evaluators[0](factors) for factors in tried]
    best = max(measured, key=lambda one: one.fitness)
    cutoffs = [Cutoff(best.fitness, best.examples, 0.4)]
    cutoffs.append(Cutoff(0.7, {name: [0.7] * len(v) for name, v in best.examples.items()}, 0.4))
    decided = set()
    for (factors, full), cutoff in itertools.product(zip(tried, measured, strict=True), cutoffs):
        runs = [evaluator(factors, cutoff) for evaluator in evaluators]
        first, second = ((run.stopped_after, run.fitness, run.scores, run.examples) for run in runs)
        assert first == second
        if not runs[0].stopped_after:
            assert runs[0].examples == full.examples
        decided.add(runs[0].stopped_after)
    assert len(decided) > 1  # some given up and some not
    assert 0 in decided


def test_what_is_given_up_by_proof_could_not_have_reached_the_cutoff(toy_lm, load):
    tasks = load("toy_luck", "toy_plain", metrics=["em", "em"], lambdas=[0.2, 0.3, 0.5], weights=[1, 9])
    evaluator = Evaluator(toy_lm, tasks)
    measured = [(factors, evaluator(factors)) for factors in individuals(5, seed=2)]
    best = max((full for _, full in measured), key=lambda full: full.fitness)
    answered = []
    evaluator.progress = lambda so_far, asked: answered.append(so_far)
    spared = {0.0: 0, 1.0: 0}  # by 1 nothing exceeds anything
    for margin in spared:
        for factors, full in measured:
            early = evaluator(factors, Cutoff(best.fitness + margin, best.examples, error=1e-300))
            if early.stopped_after:
                spared[margin] += evaluator.prompts - answered[-1]
                assert early.stopped_after < evaluator.prompts
                assert full.fitness < best.fitness + margin
            else:
                assert early.fitness == full.fitness
    assert 0 < spared[0.0] < spared[1.0]


def test_what_is_given_up_on_easy_questions_is_told_as_less_fit_than_the_cutoff(toy_lm, load, monkeypatch):
    """On the first ones it has 0.6 and the other 1; the cutoff is 0.5."""
    monkeypatch.setattr("search.evaluator.rng.shuffled", lambda values, rng: list(values))
    evaluator = Evaluator(toy_lm, load("toy_luck", examples=4))
    own, other = (dict.fromkeys(evaluator.columns, values) for values in ([0.6] * 4, [1.0, 1.0, 0.0, 0.0]))
    monkeypatch.setattr(evaluator, "_examples", lambda answers, scored: own)
    given_up = evaluator([1.0, 1.5, 1.2], Cutoff(0.5, other, error=0.9))
    assert given_up.stopped_after
    assert min(given_up.scores.values()) > 0.5 > given_up.fitness


def test_nothing_is_given_up_by_drawn_answers_or_by_a_metric_that_is_no_mean(toy_lm, load, monkeypatch):
    def reason(task="toy_luck", **options):
        return Evaluator(toy_lm, load(task, **options)).why_unbounded

    assert reason() is None
    assert reason("toy") == "hits@0 of toy is not known to be a mean of values from 0 to 1"
    for do_sample in (True, None):  # without it lm-eval goes by the temperature
        drawn = {"do_sample": do_sample, "temperature": 1.5}
        assert reason(gen_kwargs=drawn) == "toy_luck draws its answers at random"
    monkeypatch.setattr("search.tasks.Objective.aggregation", lambda *_: max)
    assert "is not known to be a mean" in reason()


def test_prompts_that_would_be_cut_are_refused_by_position_and_counted_elsewhere(
    toy_lm, load, harness, monkeypatch, caplog
):
    at_positions, elsewhere = load("toy"), load("toy_plain")
    lengths = sorted(len(toy_lm.tok_encode(request.args[0])) for request in elsewhere[0].task.instances)
    assert lengths[0] < lengths[-1]
    monkeypatch.setattr(toy_lm, "_max_length", lengths[-1] + 5 - 1)  # its answers have up to 5 tokens
    too_long = sum(length == lengths[-1] for length in lengths)
    for fast in (True, False):
        caplog.clear()
        evaluator = Evaluator(toy_lm, elsewhere, fast=fast)
        assert f"toy_plain: {too_long} of {len(lengths)} prompts do not fit" in caplog.text
        with pytest.raises(PromptTooLong, match=r"toy: \d+ of \d+ prompts do not fit the model's .* tokens"):
            Evaluator(toy_lm, [*elsewhere, *at_positions], fast=fast)
    factors = [1.0, 1.2, 1.4]
    assert evaluator(factors).examples["toy_plain"] == harness(factors, "toy_plain", "hits")


def test_answers_that_end_once_nothing_can_change_their_score_have_the_same_scores():
    lm = LPES(pretrained="reference", device="cpu")
    evaluate = Evaluator(lm, load_tasks(lm, ["kv_retrieval"], metadata={"num_keys": 5}, examples=3))
    for factors in ([1.25, 1.0, 1.0, 1.0, 1.35, 1.0], [1.03, 1.02, 1.03, 1.04, 1.03, 1.55]):
        whole, settled = evaluate(factors), evaluate(factors, settle=True)
        assert settled.examples == whole.examples
        assert {value for values in whole.examples.values() for value in values} == {0.0, 1.0}
        assert sum(settled.ended) < sum(whole.ended)


def test_a_model_type_that_changes_prompts_answers_the_changed_ones():
    def answers(method):
        lm = methods.load(method)(pretrained="reference", device="cpu")
        tasks = load_tasks(lm, ["kv_retrieval"], metadata={"num_keys": 50}, examples=1)
        found = {i: answer for batch in Evaluator(lm, tasks).engine.answer() for i, (answer,) in batch.items()}
        assert [*found.values()] == lm.generate_until([tasks[0].task.instances[i] for i in found])
        return found

    assert answers("lpes") != answers("attention_sorting")


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        (["toy"], {"lambdas": (0, 0, 0)}, "a sum above 0"),
        (["toy"], {"weights": (1, 2)}, "2 weights for 1 task"),
        (["toy_plain"], {"metrics": ["f1"]}, "no metric 'f1'; it has hits, misses, em"),
        (["toy_plain", "toy_plain"], {}, "asked for twice"),
        (["toy_plain"], {"apply_chat_template": True}, "has no chat template"),
        (["toy_choice"], {"num_fewshot": 3}, "toy_choice: the 3 examples .* --num_fewshot 0, or a copy of the task"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(load, tasks, options, message):
    with pytest.raises(UserError, match=message) as refused:
        load(*tasks, **options)
    assert "\n" not in str(refused.value)
