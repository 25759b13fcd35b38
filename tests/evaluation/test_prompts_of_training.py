"""A chat template as the paper's model has one, in other words: what is asked in training and in evaluation."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from eval_builders import HERE, definition, results, samples, train_on_rows
from run_builders import SWITCHED, THINKING, byte_tokenizer
from transformers import AutoTokenizer

from exgrpo_orlhf.checkpoints import UnusableCheckpoint
from exgrpo_orlhf.evaluation import evaluated_model, prompts_as_trained
from exgrpo_orlhf.evaluation.bench_options import make_parser, settle_engine
from exgrpo_orlhf.evaluation.benchmarks import Benchmark
from exgrpo_orlhf.evaluation.sets import BenchmarkSet
from exgrpo_orlhf.questions.prompts import PromptEncoder, Prompts
from exgrpo_orlhf.records import Question

ROWS = "Show your work in <think>, then \\boxed{} it."  # the system message of the rows
DEFAULT = "Sort it out in two parts, and put the result in \\boxed{}."  # that of the chat template


def asks(system: str, question: str) -> str:
    return f"{system}\nSomebody wonders: {question}\nHelper: <think>\n"


@pytest.fixture
def prompt_of(script, byte_model):
    """What run_bench.py asks: (prompts of the training, its options …) → the prompt of a question, its departures."""

    def run(training, *words, model=None, verifier="exact", ask=None) -> tuple[str, list[str]]:
        model = model or evaluated_model.load(str(byte_model))[0]
        options = script._prompt_options(make_parser(None).parse_args([*map(str, words)]))
        settings = prompts_as_trained.prompts_of(options, model, training)
        builder = evaluated_model.RequestBuilder(model, settings, 0, training)
        benchmark = Benchmark("mine", "Mine", verifier, 1, 0.0, 1.0, 8, ask=ask)
        question = builder.question(benchmark, Question.make("", "2+2?", "4"))
        return builder.encoder.render(question), prompts_as_trained.departures(builder, [benchmark])

    return run


def questions(*systems: str | None) -> list[Question]:
    own = [(("system", system),) if system else () for system in systems]
    return [Question.make("mine", (*turns, ("user", f"{i}+1?")), "2") for i, turns in enumerate(own)]


def test_a_checkpoint_is_asked_as_in_training_and_its_rows_system_message_can_be_left_to_the_template(
    byte_model, thinking, prompt_of, bench, tmp_path, caplog, monkeypatch
):
    monkeypatch.setenv("EXGRPO_CACHE", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO)
    rows = [{"prompt": [{"role": role, "content": text} for role, text in question.prompt], "answer": "2"}
            for question in questions(ROWS, ROWS)]  # fmt: skip
    chat = ("Prompts.template = 'chat'", f"Prompts.chat_template_from = '{thinking}'")
    train_on_rows(byte_model, tmp_path / "run", rows, *chat, "LoRA.rank = 1")
    shown = [record.getMessage() for record in caplog.records if "a prompt of training" in record.getMessage()]
    assert shown == [f"a prompt of training, template 'chat': {asks(ROWS, '0+1?')!r}"]

    checkpoint = tmp_path / "run" / "checkpoint-1"
    for folder in (checkpoint, checkpoint / "adapter"):
        model, prompts = evaluated_model.load(str(folder))
        assert model.tokenizer.chat_template == THINKING
        assert prompts == {"template": "chat", "system": None, "chat_template_kwargs": None, "row_systems": [ROWS]}
        for words, system, departures in (
            ((), ROWS, []),
            (("--row-system",), ROWS, []),
            (("--no-row-system",), DEFAULT, ["system None"]),
            (("--system", "Be brief."), "Be brief.", ["system 'Be brief.'"]),
        ):
            assert prompt_of(prompts, *words, model=model) == (asks(system, "2+2?"), departures)
    words = ("--benchmarks", "mine", *HERE, "--max-tokens", 2, "--limit", 1, "--out")
    for name, ask, below, changes in (
        ("a", {}, "", []),
        ("b", {"ask": '"Guess."'}, "\n\nGuess.", ["Mine: ask 'Guess.'"]),
    ):
        block, out = definition(tmp_path, verifier='"math"', **ask), tmp_path / name
        table = bench("--model", checkpoint, "--definitions", block, *words, out)
        [line] = samples(out, "mine")
        asked = asks(ROWS, f"{line['question'].removesuffix(below)}{below}")
        assert line["prompt"] == asked, "a request for a box was no part of the training"
        assert results(out)["record"]["asked_otherwise"] == changes
        assert ("asked otherwise than in training: Mine: ask 'Guess.'" in table) == bool(changes)
    assert "template 'chat', system message" in caplog.text
    assert [text.rpartition(", ")[2] for text in caplog.messages if text.startswith("prompts by")] == [
        "as in training",
        "not as in training: Mine: ask 'Guess.'",
    ]


def test_how_the_earlier_benchmarks_of_a_folder_were_asked_stays_in_its_record(byte_model, bench, tmp_path):
    train_on_rows(byte_model, tmp_path / "run", [{"prompt": f"{i}+1?", "answer": "2"} for i in range(2)])
    words = ("--model", tmp_path / "run" / "checkpoint-1", *HERE, "--max-tokens", 2, "--limit", 1, "--definitions")
    block, other = definition(tmp_path, ask='"Guess."'), tmp_path / "other.toml"
    bench(*words, block, "--benchmarks", "mine", "--out", tmp_path / "x")
    other.write_text(definition(tmp_path).read_text().replace("[mine]", "[other]"))
    bench(*words, other, "--benchmarks", "other", "--out", tmp_path / "x")
    assert results(tmp_path / "x")["record"]["asked_otherwise"] == ["Mine: ask 'Guess.'"]


def test_what_the_chat_template_took_in_training_it_takes_in_evaluation(
    byte_model, prompt_of, bench, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("EXGRPO_CACHE", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO)
    (tmp_path / "switched.jinja").write_text(SWITCHED)
    row = {"prompt": "2+2?", "answer": "4", "chat_template_kwargs": {"enable_thinking": True}}
    rows = [row, {**row, "prompt": "1+1?", "chat_template_kwargs": {}}]
    chat = ["Prompts.template = 'chat'", f"Prompts.chat_template_from = '{tmp_path}/switched.jinja'"]
    chat += ["QuestionFile.meta = ('chat_template_kwargs',)"]
    thinks = "Prompts.chat_template_kwargs = {'enable_thinking': False}"
    train_on_rows(byte_model, tmp_path / "run", rows, *chat, thinks)
    silent, aloud = "user: 2+2?\nassistant: <think>\n\n</think>\n\n", "user: 2+2?\nassistant: "
    assert f"a prompt of training, template 'chat': {aloud!r}" in caplog.messages

    model, prompts = evaluated_model.load(str(tmp_path / "run" / "checkpoint-1"))
    assert prompts == {"template": "chat", "system": None, "chat_template_kwargs": {"enable_thinking": False}}
    aside = ("--chat-template-kwargs", '{"enable_thinking": true}')
    assert prompt_of(prompts, model=model) == (silent, [])
    assert prompt_of(prompts, *aside, model=model) == (aloud, ["chat_template_kwargs {'enable_thinking': True}"])
    math = definition(tmp_path, verifier='"math"')
    block = ("--definitions", math, "--benchmarks", "mine", *HERE, "--max-tokens", 2, "--limit", 1)
    for words, ending in (((), silent), (aside, aloud)):
        bench("--model", tmp_path / "run" / "checkpoint-1", *block, *words, "--out", tmp_path / f"out{len(words)}")
        text = (tmp_path / f"out{len(words)}" / "mine" / "samples.jsonl").read_text(encoding="utf-8")
        line = json.loads(text.splitlines()[0])
        assert line["prompt"] == ending.replace("2+2?", line["question"]), "no request for a box, as in training"
    with pytest.raises(UnusableCheckpoint, match="chat_template_kwargs"):
        train_on_rows(byte_model, tmp_path / "run", rows, *chat, "train.steps = 2", resume=True)


BOX = "\nPut the result in \\boxed{}."
FORM = "Solve this. The last line shall be of the form Answer: $Answer.\n\n"


@pytest.mark.parametrize(
    ("texts", "options", "prompt", "departures"),
    [
        (("7+1?", "3*4?"), {}, "2+2?", []),
        (("7+1?", "3*4?"), {"verifier": "choice"}, "2+2?", []),
        (("7+1?", "3*4?"), {"ask": ""}, "2+2?", []),
        (("7+1?", "3*4?"), {"ask": "Guess."}, "2+2?\n\nGuess.", ["Mine: ask 'Guess.'"]),
        ((f"7+1?{BOX}", f"3*4?{BOX}"), {}, f"2+2?{BOX}", []),
        ((f"7+1?{BOX}", f"3*4?{BOX}"), {"ask": BOX.strip()}, f"2+2?{BOX}", []),
        ((f"7+1?{BOX}", f"3*4?{BOX}"), {"ask": "Guess."}, "2+2?\n\nGuess.", ["Mine: ask 'Guess.'"]),
        ((f"{FORM}7+1?{BOX}", f"{FORM}3*4?{BOX}"), {"verifier": "choice"}, f"{FORM}2+2?{BOX}", []),
        ((f"7+1?{BOX}", "3*4?"), {}, "2+2?", []),  # they have none in common
        ((f"What is 7+1?{BOX}", f"What is 3*4?{BOX}"), {}, f"2+2?{BOX}", []),  # the questions begin alike
        ((f"{FORM}What is 7+1?", f"{FORM}What is 3*4?"), {}, f"{FORM}2+2?", []),
        ((f"{FORM.strip()} Say: 7+1, John?", f"{FORM.strip()} Say: 3*4, John?"), {}, f"{FORM.strip()} Say: 2+2?", []),
        (("Put it in \\boxed{} now 7+1", "Put it in \\boxed{} now 3*4"), {}, "Put it in \\boxed{} now 2+2?", []),
        (("What is 7+1, John?", "What is 3*4, John?"), {}, "2+2?", []),  # it says not how to answer
        ((), {}, "2+2?\n\nReason step by step and put the final answer within \\boxed{}.", []),  # another model
        *(
            ((), {"verifier": kind}, "2+2?\n\nReason step by step and put the final answer within \\boxed{}.", [])
            for kind in ("math", "math_verify")
        ),
        ((), {"ask": ""}, "2+2?", []),
    ],
)
def test_around_a_question_stands_what_stood_around_those_of_training(texts, options, prompt, departures, prompt_of):
    training = [Question.make("mine", text, "1") for text in texts]
    encoder = PromptEncoder(Prompts(template="chat"), byte_tokenizer())
    record = {"template": "chat", "system": None, **encoder.introduce(training, [])} if texts else {}
    asked = prompt_of(record, **{"verifier": "math", **options})
    assert asked == (f"<|user|>{prompt}<|assistant|>", departures)


def test_what_a_question_has_around_it_already_is_not_said_again(byte_model):
    model, _ = evaluated_model.load(str(byte_model))
    training = {"template": "chat", "around": [FORM, BOX]}
    builder = evaluated_model.RequestBuilder(model, Prompts("chat"), 0, training)
    benchmark = Benchmark("mine", "Mine", "math", 1, 0.0, 1.0, 8)
    once = builder.question(benchmark, Question.make("", "2+2?", "4"))
    assert builder.question(benchmark, once).prompt == once.prompt == f"{FORM}2+2?{BOX}"
    assert builder.instruction(benchmark) == f"{FORM}…{BOX.strip()}"


def test_earlier_messages_of_the_questions_of_training_are_named(prompt_of):
    shots = (("user", "1+1?"), ("assistant", "2"))
    training = [Question.make("mine", (*shots, ("user", f"{i}+1?")), "2") for i in range(2)]
    record = PromptEncoder(Prompts(template="chat"), byte_tokenizer()).introduce(training, [])
    assert record == {"other_turns": ["user, assistant, user"]}
    lost = ["without the messages user, assistant, user of questions of training"]
    assert prompt_of({"template": "chat", "system": None, **record})[1] == lost


def test_a_message_that_the_template_brings_too_is_no_other_prompt(thinking, prompt_of):
    model = evaluated_model.EvaluatedModel("here", AutoTokenizer.from_pretrained(thinking), None)
    training = {"template": "chat", "system": None, "row_systems": [DEFAULT]}
    for words in ((), ("--no-row-system",)):
        assert prompt_of(training, *words, model=model) == (asks(DEFAULT, "2+2?"), [])
    other = prompt_of({**training, "row_systems": [ROWS]}, "--chat-template-from", thinking)
    assert other == (asks(ROWS, "2+2?"), [f"chat_template_from '{thinking}'"])


def test_what_a_run_records_of_its_prompts(prompt_of, caplog):
    def recorded(training: list[Question], validation: list[Question], **settings) -> dict:
        caplog.clear()
        return PromptEncoder(Prompts(**settings), byte_tokenizer()).introduce(training, validation)

    with_rows, without = questions(ROWS, ROWS), questions(None, None)
    assert recorded(without, without, template="chat") == {}
    assert recorded(with_rows, with_rows, template="chat", system="x") == {}, "the rows' own is not asked"
    assert not caplog.records
    assert recorded(with_rows, without, template="chat") == {"row_systems": [ROWS]}
    assert "prompts of validation differ from those of training around the question: '<|user|>…" in caplog.text
    mixed = recorded(questions(ROWS, None), [], template="chat")
    assert mixed == {"row_systems": [ROWS, None]}
    lost = ["without the system messages of questions of training"]
    assert prompt_of({"template": "chat", "system": None, **mixed}) == ("<|user|>2+2?<|assistant|>", lost)
    assert "the questions of training had system messages, which are not sent; --system sends one" in caplog.text

    text = "{system} Asked: {question} Answer:"
    own = recorded(with_rows, [], template=text)
    assert own == {"template": text, "row_systems": [ROWS]}
    assert prompt_of({"system": None, **own}) == (f"{ROWS} Asked: 2+2? Answer:", [])
    other = {"template": "chat", "system": None, "row_systems": [ROWS]}
    for words, prompt in (((), " Asked: 2+2? Answer:"), (("--row-system",), f"{ROWS} Asked: 2+2? Answer:")):
        assert prompt_of(other, "--template", text, *words)[0] == prompt, "with another template it is asked for"
    plain = recorded(with_rows, [], template="plain")
    assert prompt_of({"template": "plain", "system": None, **plain}) == ("2+2?", lost), "it has no place for it"


def checkpoint_of(model: Path, run: Path) -> Path:
    checkpoint = shutil.copytree(model, run / "checkpoint-3")
    (checkpoint / "trainer").mkdir()
    identity = {"Prompts.template": "'chat'", "Prompts.system": "'Be brief.'"}
    state = {"step": 3, "identity": identity, "prompt": {"around": ["", BOX]}}
    (checkpoint / "trainer" / "state.json").write_text(json.dumps(state))
    return checkpoint


@pytest.mark.parametrize(("api", "own_tokenizer"), [("completions", False), ("completions", True), ("chat", False)])
def test_a_servers_checkpoint_is_known_by_its_files_and_its_run_whoever_writes_the_prompts(
    api, own_tokenizer, byte_model, tmp_path
):
    checkpoint = str(checkpoint_of(byte_model, tmp_path / "run"))
    model, training = evaluated_model.served(checkpoint, str(byte_model) if own_tokenizer else None, api)
    here, prompts = evaluated_model.load(checkpoint)
    assert model.describe() == here.describe()
    assert (model.run, model.step) == ("run", 3)
    assert training == prompts
    assert evaluated_model.served("name", str(byte_model), "completions")[0].describe()["hash"] is None


def test_a_server_of_a_checkpoint_is_asked_as_in_training_as_far_as_it_is_known(script, byte_model, tmp_path):
    checkpoint = checkpoint_of(byte_model, tmp_path / "run")
    asked = (("system", "Be brief."), ("user", f"2+2?{BOX}"))
    for words, departures in (
        (("--model", checkpoint), []),
        (("--model", "served", "--tokenizer", checkpoint), []),
        (("--model", checkpoint, "--api", "chat"), ["rendered by the server"]),
        (("--model", "served", "--api", "chat"), []),  # nothing is known of its training
    ):
        arguments = ["--engine", "openai", "--base-url", "http://127.0.0.1:9/v1", *map(str, words)]
        arguments = make_parser(None).parse_args(arguments)
        settle_engine(arguments)
        model, training, _ = script._model(arguments)
        prompts = prompts_as_trained.prompts_of(script._prompt_options(arguments), model, training)
        builder = evaluated_model.RequestBuilder(model, prompts, 0, training)
        benchmark = Benchmark("mine", "Mine", "math", 1, 0.0, 1.0, 8)
        question = Question.make("mine", "2+2?", "4")
        [request] = builder.requests([BenchmarkSet(benchmark, ((0, question),), 1, "here", ())])
        assert (request.messages == asked) == bool(training)
        assert prompts_as_trained.departures(builder, [benchmark]) == departures


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--row-system"], "--row-system: model is no checkpoint of a run"),
        (["--row-system", "--system", "x"], "--row-system cannot be used with --system"),
        (["--template", "nowhere"], "Prompts.template must be a text"),
        (["--tokenizer", "here"], "--tokenizer is for --engine openai"),
        (
            ["--base-url", "http://localhost:1/v1"],
            "--base-url is for --engine openai, and this is --engine transformers",
        ),
        (["--api", "chat"], "--api is for --engine openai"),
        (["--api", "completions"], "--api is for --engine openai"),  # the default, but nothing reads it
        (["--concurrency", 8], "--concurrency is for --engine openai"),
        (["--key-variable", "KEY"], "--key-variable is for --engine openai"),
        *(
            (words, "start `vllm serve MODEL`")
            for words in (["--engine", "vllm"], ["--tensor-parallel", 1], ["--replicas", 2], ["--gpu-memory", 0.5])
        ),
        *(
            (["--engine", "openai", f"--{name}", value], f"--{name} is for --engine transformers, and this is --engine")
            for name, value in (("device", "cpu"), ("threads", 1), ("rows", 4), ("dtype", "float32"))
        ),
        (
            ["--engine", "openai", "--base-url", "http://localhost:1/v1", "--api", "chat", "--tokenizer", "here"],
            "--tokenizer cannot be used with --api chat",
        ),
        (["--chat-template-kwargs", "thinking"], "--chat-template-kwargs takes a JSON object such as"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs takes a JSON object such as"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(words, message, byte_model, bench, tmp_path):
    benchmark = ("--definitions", definition(tmp_path), "--benchmarks", "mine", *HERE)
    assert message in bench("--model", byte_model, *benchmark, *words, status=2)
