"""What the programs of this package print."""

from __future__ import annotations

import logging
import os
import sys
import warnings


def messages(level: int = logging.INFO) -> None:
    """Write messages to standard error, with the time, and leave out those of libraries that no user can act on."""
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    for noisy in ("httpx", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # its first start prints every table it creates
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)  # torch's own import of it
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
