"""One thread a process: the tests run side by side, and small tensors gain nothing from more."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # for torch here and in every process a test starts
