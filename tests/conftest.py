"""Shared by all tests: small thread counts, and one server to fork test processes from."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "ONELOOP_CACHE" not in os.environ:  # a new one for these tests
    os.environ["ONELOOP_CACHE"] = tempfile.mkdtemp(prefix="oneloop-cache-")
    atexit.register(shutil.rmtree, os.environ["ONELOOP_CACHE"], ignore_errors=True)
