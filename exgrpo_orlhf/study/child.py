"""Run a command that is killed when the parent dies. Arguments: the parent's process id, then the command.

A preexec function of Popen would not be safe, because the parent has threads (MLflow's). The request to be killed
survives exec.
"""

import os
import sys

from exgrpo_orlhf.rewards.sandbox.namespaces import end_with_parent

end_with_parent(int(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
