"""An environment's file: its check before anything is generated, and where OpenRLHF is not installed."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import pytest
from run_builders import python

from exgrpo_orlhf.environments import Environment, Reply
from exgrpo_orlhf.environments.playing import Opening, Play
from exgrpo_orlhf.questions import QuestionFile
from exgrpo_orlhf.workers.fork_server import NotLoaded

OPENRLHF = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    async def step(self, states: dict, **kwargs):
        return {"rewards": 1.0, "environment_feedback": "", "done": True}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


GAME = """
class Game:
    async def reset(self, states):
        return {{"observation": "{}"}}
    async def step(self, states):
        return {{"rewards": 1.0, "environment_feedback": "", "done": True}}
"""


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (None, "there is no file"),
        ("x = 1\ny = x / 0", "game.py, line 2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)", "game.py, line 2: SystemExit: 3"),
        ("import os\nos._exit(3)", "its process ended while it was loaded"),
        ("def f(:", "SyntaxError"),
        ("x = 1", "expected an AgentExecutor, or one class with the methods reset(states) and step(states); classes"),
        ("class A:\n    def step(self, states): pass\nclass B(A): pass", "classes with a step: A, B"),
        (OPENRLHF + "    async def execute(self, *args): pass", "without an `execute` of its own"),
        (OPENRLHF.replace("super().__init__(AgentInstance)", "oops()"), "game.py, line 10: NameError: name 'oops'"),
    ],
)
def test_check_refuses_a_file_that_cannot_be_used_with_its_line(tmp_path, source, line):
    one = Environment(str(tmp_path / "game.py"))
    if source is not None:
        (tmp_path / "game.py").write_text(source)
    with pytest.raises(NotLoaded) as refusal:
        one.check_file()
    message = str(refusal.value)
    assert message.startswith(f"Environment.path = {one.path!r} cannot be used: ")
    assert line in message
    assert "\n" not in message


def test_a_missing_file_that_is_called_as_a_module_of_this_package_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotLoaded, match=r"'agent\.py' cannot be used: there is no file"):
        Environment("agent.py").check_file()


def test_without_a_path_there_is_nothing_to_check():
    Environment().check_file()


@pytest.mark.slow
def test_an_environment_edited_after_its_check_plays_as_it_was_checked(tmp_path):
    path = tmp_path / "game.py"
    path.write_text(GAME.format("first"))
    environment = Environment(str(path))
    environment.check_file()
    path.write_text(GAME.format("second"))
    states = {"seed": 0, "observation": "?"}
    for game, seen in ((environment, "first"), (Environment(str(path)), "second"), (environment, "first")):
        worker = game.server().worker()
        worker.call(pickle.dumps(states))
        assert worker.reply(60.0).observation == seen
        worker.close()
        game.server()._process.kill()
        game.server()._process.wait()


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Environment("~/game.py").file() == str(tmp_path / "game.py")


def test_an_environment_gets_answer_and_columns_as_a_reward_function_gets_them(tmp_path):
    row = '{"q": "6?", "gold": [4.50, "x"], "weight": 2.50, "extra_info": {"a": 1}}'
    (tmp_path / "questions.jsonl").write_text(row)
    columns = {"prompt": "q", "answer": "gold", "meta": ("weight",), "source": None}
    [question] = QuestionFile(path=str(tmp_path / "questions.jsonl"), **columns).load()
    calls: list[bytes] = []
    server = SimpleNamespace(worker=lambda: SimpleNamespace(call=calls.append))
    prompts = SimpleNamespace(encode=lambda question: [1], render=lambda question: "6?")
    Play(None, Opening.of(prompts, question), 0, server)
    states = pickle.loads(calls[0])
    assert json.dumps([states["label"], states["meta"]]) == '[[4.5, "x"], {"row": 0, "weight": 2.5}]'
    assert str(states["meta"]["weight"]) == "2.5"


def test_openrlhf_need_not_be_installed(tmp_path):
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide/sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'openrlhf' else find(name, *more)\n"
    )
    (tmp_path / "game.py").write_text(
        "import openrlhf.utils.agent as agent\nfrom openrlhf.utils import agent as same\n"
        "try:\n    import openrlhf.trainer\nexcept ImportError as error:\n    missing = str(error)\n"
        "class Game(agent.AgentInstanceBase):\n"
        "    async def step(self, states):\n"
        "        return {'rewards': float(agent is same), 'environment_feedback': missing, 'done': 1}\n"
    )
    source = (
        "import pickle\nfrom exgrpo_orlhf.environments import Environment\n"
        f"episode = Environment({str(tmp_path / 'game.py')!r}).server().worker()\n"
        "for states in ({'observation': 'a', 'seed': 0}, {}):\n"
        "    episode.call(pickle.dumps(states))\n    print(episode.reply(600))\n"
    )
    done = python("-c", source, env={"PYTHONPATH": str(tmp_path / "hide")})
    assert done.stdout.splitlines() == [
        str(Reply("a")),
        str(Reply("No module named 'openrlhf.trainer'", True, 1.0)),
    ], done.stderr
