"""Environments of several turns, as OpenRLHF's users write them: each episode runs in a process of its own."""

from .environment import Environment as Environment
from .episodes import Episode as Episode
from .episodes import EpisodeFailed as EpisodeFailed
from .episodes import EpisodeProcesses as EpisodeProcesses
from .episodes import NoEnvironment as NoEnvironment
from .episodes import Reply as Reply
from .episodes import close_episodes as close_episodes
