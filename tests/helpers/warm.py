# ruff: noqa: E402, F401
"""Imported once by the server from which test processes are forked; must start no thread."""

import gc
import os

gc.disable()  # collections during imports find nothing
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import datasets
import pyarrow.compute
import pyarrow.parquet
import sklearn.datasets
import timm
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.tensorboard
import torchmetrics.classification
import torchvision.transforms.v2
import transformers.integrations.sdpa_attention
from transformers import AutoTokenizer, BertForSequenceClassification, ViTForImageClassification

import oneloop.launch.before_imports
import oneloop.tasks.causal_lm
import oneloop.tasks.image_classification
import oneloop.tasks.text_classification
import oneloop.tools.after_training.evaluate_and_predict
import oneloop.train
from oneloop.recipe.key_parser import parser

for task in ("image_classification", "text_classification", "causal_lm", "sft"):
    for optimizer in ("adamw", "sgd"):
        parser(task, optimizer, "cosine")

# The forked processes need not visit these objects in their collections.
gc.freeze()
gc.enable()
