# ruff: noqa: E402, F401
"""Imported once by the server from which test processes are forked; must start no thread."""

import gc
import os

gc.disable()  # collections during imports find nothing
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import importlib
import pkgutil

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
from oneloop.recipe.key_parser import parser
from oneloop.run import environment
from oneloop.tasks.language.models import import_quietly

for module in pkgutil.walk_packages(oneloop.__path__, "oneloop."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
import_quietly()
importlib.import_module("peft")

# Results that a process computes once.
environment.versions()
environment.versions(environment._COMPUTE)
for task in ("image_classification", "text_classification", "causal_lm", "sft"):
    for optimizer in ("adamw", "sgd"):
        parser(task, optimizer, "cosine")

# The forked processes need not visit these objects in their collections.
gc.freeze()
gc.enable()
