"""The settings of an environment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from ..checks import Constraint, Count, Finite, Positive, check_settings, require
from ..workers.fork_server import ForkServer, kept
from ..workers.user_file import read_source

_PACKAGED = ("chain_calculator.py", "word_calculator.py")  # the environments of this package


@dataclass(frozen=True)
class Environment:
    """Turns of the model and of a program: the model writes, the program answers, until the program says that the
    episode is done.

    path: 'file.py', as OpenRLHF's --train.agent_func_path takes it: with an AgentExecutor, or one class with the
        methods reset(states) and step(states). A name without a folder may be one of the files that come with this
        package ('chain_calculator.py'). None: no environment, one response to one prompt
    reward: 'environment' (the sum of the rewards of its steps), 'verifier' (the Verifier grades what the model wrote, a
        line for each turn) or 'verifier_with_observations' (it grades the text of the whole episode, of which what the
        environment said is a part, so that a tool's output can earn the reward)
    success_at: least score of a success, or sum of rewards where the last step returned no `scores`; with reward
        'environment' alone
    max_turns: turns of the model in an episode, at most
    stop: texts that end a turn of the model, beside its end tokens
    timeout: seconds of wall clock for a reset or a step. All episodes of a step of training run at once, where the
        local engine's loop samples LocalEngine.generation_rows of them: where they compute, they share the cores
    memory: MiB for each episode's process, beyond what the loaded file takes
    """

    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("timeout", "memory")

    path: str | None = None
    reward: Literal["environment", "verifier", "verifier_with_observations"] = "environment"
    success_at: Finite = 1.0
    max_turns: Count = 8
    stop: tuple[str, ...] = ()
    timeout: Positive = 10.0
    memory: Annotated[int, Constraint("must be at least 64 (MiB)", lambda value: value >= 64)] = 1024

    def __post_init__(self) -> None:
        check_settings(Environment, vars(self))
        require(
            self.path is None or self.path.endswith(".py"),
            f"Environment.path must be the name of a .py file, or None; got {self.path!r}",
        )
        require(
            self.reward == "environment" or self.success_at == Environment.success_at,
            f"Environment.success_at = {self.success_at:g} is read with Environment.reward = 'environment' alone; with "
            f"{self.reward!r} the Verifier decides",
        )
        require(
            all(self.stop),
            f"Environment.stop must be a tuple of texts, none of them empty, such as ('</call>',); got {self.stop!r}",
        )

    @property
    def observations_graded(self) -> bool:
        return self.reward == "verifier_with_observations"

    def server(self) -> ForkServer:
        """This process's, made at its first use: a worker of it plays an episode, whose first call is the reset and has
        a "seed"."""
        return kept((self.file(), self.memory, self.source), self._server)

    @cached_property
    def source(self) -> str:
        """The file, as it is when it is used first: an edit during a run changes nothing in it."""
        return read_source(Path(self.file()))

    def _server(self) -> ForkServer:
        settings = {"path": self.file(), "memory": self.memory, "source": self.source}
        return ForkServer("exgrpo_orlhf.environments.agent:load", settings, f"Environment.path = {self.file()!r}")

    def file(self) -> str:
        """The path, of a file of this package its whole one."""
        assert self.path is not None
        own, packaged = Path(self.path).expanduser(), Path(__file__).parents[1] / "testbed" / self.path
        return str(packaged if self.path in _PACKAGED and not own.exists() else own)

    def check_file(self) -> None:
        """Load the file once, before anything is generated. Raises NotLoaded, which says what is wrong."""
        if self.path is not None:
            self._server().try_loading()
