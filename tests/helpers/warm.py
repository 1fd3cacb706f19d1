# ruff: noqa: E402, F401
"""Imported once by the server from which test processes are forked; must start no thread."""

import gc
import os

gc.disable()  # collections during imports find nothing
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import ctypes
import functools
import importlib
import pkgutil
import sys
from pathlib import Path

import datasets
import PIL.JpegImagePlugin
import PIL.PngImagePlugin
import pyarrow.compute
import pyarrow.parquet
import pytest
import rich._emoji_codes
import sklearn.datasets
import timm
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.tensorboard
import torchmetrics.classification
import torchvision.transforms.v2
import transformers.integrations.sdpa_attention
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
from transformers import AutoTokenizer, BertForSequenceClassification, ViTForImageClassification

import oneloop
from oneloop.measure import flops
from oneloop.recipe.key_parser import parser
from oneloop.run import environment
from oneloop.tasks.language.models import import_quietly

for module in pkgutil.walk_packages(oneloop.__path__, "oneloop."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
import_quietly()
importlib.import_module("peft")

LARGE = 2 << 20  # bytes of a large page

# One product measures the peak. (On a busy machine, more would measure it no better.)
flops._TRIES = 1
flops._SECONDS = 0.0

# The versions of the installed packages do not change.
environment.version = functools.cache(environment.version)
environment.versions()
environment.versions(environment._COMPUTE)

# Parsers that a process builds once.
for task in ("image_classification", "text_classification", "causal_lm", "sft"):
    for optimizer in ("adamw", "sgd"):
        parser(task, optimizer, "cosine")


def use_large_pages() -> None:
    """Collapse the memory of this process into pages of 2 MiB.

    A fork copies an entry of each page, and takes half as long then. Kernels before Linux 6.1 have
    no such call, and nothing changes.
    """
    collapse = 25  # MADV_COLLAPSE
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, *_, name = [*line.split(maxsplit=5), ""][:6]
        if not mode.startswith("rw") or name not in ("", "[heap]"):
            continue
        first, end = (int(address, 16) for address in addresses.split("-"))
        for page in range(-(-first // LARGE) * LARGE, end - LARGE + 1, LARGE):
            advise(page, LARGE, collapse)


# The forked processes need not visit these objects in their collections.
gc.collect()
gc.freeze()
gc.enable()
if sys.platform == "linux":
    use_large_pages()
