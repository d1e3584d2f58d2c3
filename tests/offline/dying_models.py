"""A workload whose process is killed while it is imported."""

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
