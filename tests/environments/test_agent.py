"""A user's file where OpenRLHF is not installed."""

from __future__ import annotations

from run_builders import python

from exgrpo_orlhf.environments import Reply

WAIT = 60.0  # seconds, only against waiting for ever


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
        "    episode.call(pickle.dumps(states))\n    print(episode.reply(60))\n"
    )
    done = python("-c", source, timeout=WAIT, env={"PYTHONPATH": str(tmp_path / "hide")})
    assert done.stdout.splitlines() == [
        str(Reply("a")),
        str(Reply("No module named 'openrlhf.trainer'", True, 1.0)),
    ], done.stderr
