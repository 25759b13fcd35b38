"""Becomes the command after its first argument, the parent's process id; is killed when the parent dies.

Between fork and the command there is nothing else to run: the parent has threads (MLflow's), a hook of Popen is not
safe beside them. The order to be killed outlives exec.
"""

import os
import sys

from exgrpo_orlhf.rewards.pool.worker import end_with_parent

end_with_parent(int(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
