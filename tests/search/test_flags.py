"""What a search is told: flags, refusals before a model is loaded, and the same from a program."""

from types import SimpleNamespace

import pytest

from lpes_eval import factors as factors_file
from lpes_eval.errors import UserError
from search import config, optimizers, parser, run, search
from search.optimizers.base import Generation
from search.space import Individual
from small_searches import found, journal


def make_optimizer(args, layers=32):
    evaluator = SimpleNamespace(num_layers=layers, lm=None, objectives=[], has_likelihood=True)
    return run.make_optimizer(args, evaluator, optimizers.load(args.optimizer))


@pytest.mark.parametrize(
    ("flags", "name", "evaluations"),
    [
        ([], "LayerSearch", 316),
        (["--preset", "paper"], "GeneticAlgorithm", 512),
        (["--optimizer", "ga", "--epochs", "1"], "GeneticAlgorithm", 32 + 24),  # the flag's name in version 0.1
    ],
)
def test_flags_choose_the_optimizer_and_its_budget(flags, name, evaluations):
    args = config.parse(flags)
    optimizer = make_optimizer(args)
    assert type(optimizer).__name__ == name
    assert optimizer.max_evaluations == evaluations


def test_whatever_says_how_a_task_is_measured_reaches_it():
    flags = "--tasks a b --model_args pretrained=x,token=hf_secret --search_seed 5 --metadata num_keys=9"
    flags += " --positions 0,100 --lambdas 1,3 --task_weights 2,1 --metrics acc;em --include_path tasks"
    flags += " --num_fewshot 2 --fewshot_seed 7 --apply_chat_template --fewshot_as_multiturn false"
    flags += " --system_instruction Be_brief. --gen_kwargs max_gen_toks=3 --confirm_run_unsafe_code"
    expected = {"metadata": {"pretrained": "x", "search_seed": 5, "num_keys": 9}, "include_path": "tasks"}
    expected |= {"positions": [0, 100], "lambdas": [1, 3], "weights": [2, 1], "metrics": ["acc", "em"]}
    expected |= {"num_fewshot": 2, "fewshot_random_seed": 7, "apply_chat_template": True, "fewshot_as_multiturn": False}
    expected |= {"system_instruction": "Be_brief.", "gen_kwargs": {"max_gen_toks": 3}, "confirm_run_unsafe_code": True}
    assert config.task_options(config.parse(flags.split())) == expected


def test_the_start_is_a_number_or_a_file(tmp_path):
    def first(*flags, layers=6):
        args = config.parse(["--optimizer", "ga", "--curve", "bezier", *flags])
        return [individual.points for individual in next(make_optimizer(args, layers).search()).individuals]

    assert {y for _, y in first()[0]} == {1.5}
    assert first() == first("--seed", "0") != first("--seed", "1")
    assert {y for _, y in first("--start", "1.2")[0]} == {1.2}
    points, file = [(0, 1.0), (1, 1.1), (4, 1.6), (5, 1.3)], tmp_path / "curve.json"
    factors_file.Factors.from_curve("bezier", points, num_layers=7, unscaled_layers=[0]).save(file)
    assert first("--start", str(file), "--skip", "1", layers=7)[0] == tuple(points)
    with pytest.raises(UserError, match=r"leaves layers \[0\] unscaled, the search the first 0; let --skip fit"):
        first("--start", str(file), layers=7)
    factors_file.Factors.from_list([1.033, 1.449, 1.25, 1.0]).save(file)
    with pytest.raises(UserError, match="holds a free curve, and the search has a bezier one"):
        first("--start", str(file), layers=4)
    skipping = first("--start", str(file), "--curve", "free", "--skip", "1", layers=4)
    assert [y for _, y in skipping[0]] == [1.4, 1.3, 1.0]
    with pytest.raises(UserError, match="--start: 4 control points; expected 3"):
        first("--start", str(file), "--curve", "free", layers=3)
    factors_file.Factors.from_list([1.0, 0.5, 0.333, 1.449]).save(file)  # as the default search may find
    with pytest.raises(UserError, match=r"is not searched; expected .* tenths from 1 to 2"):
        first("--start", str(file), "--curve", "free", layers=4)
    with pytest.raises(UserError, match=r"is not searched; expected .* a factor from 0\.5 to 2$"):
        first("--optimizer", "layers", "--start", str(file), layers=4)
    factors_file.Factors.from_list([1.0, 0.5, 0.533, 1.449]).save(file)
    assert [y for _, y in first("--optimizer", "layers", "--start", str(file), layers=4)[0]] == [1.0, 0.5, 0.533, 1.449]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimizer", "ga", "--start", "1.25"], "--start 1.25: is not searched; expected tenths from 1 to 2"),
        (["--optimizer", "random"], "argument --optimizer: invalid choice: 'random'.*ga.*layers"),
        (["--metadata", "positions=0"], "--positions"),
        (["--positions", "100,0,50"], "--positions: found 100.*; expected different percentages from 0 to 100 in"),
        (["--lambdas", "0.5,0.5"], "--lambdas: 2 weights for 3"),
        (["--gen_kwargs", "custom_generate=x"], "custom_generate=...: runs code; .* trust_remote_code=True"),
        (["--model_args", "attn_implementation=a/b"], "attn_implementation=OWNER/REPO: runs code"),
        (["--examples", "0"], "--examples: expected at least 1, not 0"),
        (["--limit", "3"], "--limit is lm_eval's; --examples and"),
        (["--budget", "1 day"], "--budget: expected 90s, 10m, 2h or"),
        (["--engine_args", "max_num_seqs=4"], "--engine_args: they are vLLM's"),
        (["--tasks", "zeroscrolls"], "ZeroSCROLLS has no examples to search on"),
        (["--guard", "toyy"], "--guard toyy: no task, group or tag is called 'toyy'"),
        (["--tasks", "FOLDER/empty.yaml"], "empty.yaml: cannot be read as tasks"),
        (["--model_args", "batch_size=4"], "--model_args batch_size=...: .* --batch_size"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line_before_a_model_is_loaded(
    tmp_path, few_tasks, monkeypatch, flags, message
):
    monkeypatch.setattr("lpes_eval.methods.lpes.LPES.create_from_arg_obj", lambda *args, **kwargs: 1 / 0)
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(UserError, match=message) as refused:
        run.load(config.parse([flag.replace("FOLDER", str(tmp_path)) for flag in flags]))
    assert "\n" not in str(refused.value)


def test_a_program_searches_as_the_command_does(command, task_folder, tmp_path, capsys):
    flags = {"include_path": task_folder, "generations": 1, "population": 4, "parents": 2, "held_out_examples": 4}
    result = search("toy", optimizer="ga", output=tmp_path / "out", **flags)
    assert result.factors.per_layer() == factors_file.load(found(tmp_path / "out")).per_layer()
    assert result.verdict in capsys.readouterr().out
    assert {entry.key for entry in result.history} <= {entry["key"] for entry in journal(tmp_path / "out")}

    class Fixed(optimizers.load("ga")):
        def search(self):
            individual = Individual(tuple((x, 1.2) for x, _ in self.start), "fixed")
            yield Generation([individual])
            return individual

    own = search("toy", optimizer=Fixed, output=tmp_path / "own", **flags)
    assert own.factors.per_layer() == [1.2] * 3
    recorded = factors_file.load(found(tmp_path / "own")).origin["search"]
    assert recorded["optimizer"] == "Fixed"
    assert recorded.keys() & {"mutations", "finest"} == {"mutations"}  # its own settings, not the default's
    for flag, value, message in (
        ("populaton", 3, "unrecognized arguments: --populaton=3"),
        ("budget", 600, "argument --budget: expected 90s, 10m, 2h or 20000prompts, not '600'"),
        ("dry_run", True, "dry_run: is the command's alone"),
    ):
        with pytest.raises(UserError, match=rf"^search\(\): {message}"):
            search("toy", **{flag: value})


def test_a_program_hands_over_what_the_command_line_would_take(tmp_path):
    flags = {"positions": [50, 0], "guard": ["gsm8k", "ppl::0.2"], "output": tmp_path / "x"}
    flags |= {"tasks": ["kv_retrieval,mdqa_pos", "gsm8k"], "metadata": {"num_keys": 25}}
    flags |= {"metrics": ["acc,none", "em"], "continuous": True, "num_fewshot": None}
    typed = "--positions 50,0 --guard gsm8k --guard ppl::0.2 --tasks kv_retrieval,mdqa_pos gsm8k"
    typed += f" --output {tmp_path}/x --metadata num_keys=25 --metrics acc,none;em --continuous"
    assert config.read(parser.words(flags)) == config.read(typed.split())
