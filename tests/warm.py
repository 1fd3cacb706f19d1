"""Imported once by the server that test processes are forked from; starts no thread."""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sklearn.datasets  # noqa: E402, F401
import torch.distributed.checkpoint  # noqa: E402, F401
import torch.distributed.fsdp  # noqa: E402, F401
import torch.distributed.tensor  # noqa: E402, F401
import torch.utils.tensorboard  # noqa: E402, F401
import torchmetrics.classification  # noqa: E402, F401
import torchvision  # noqa: E402, F401
import transformers.integrations.sdpa_attention  # noqa: E402, F401

import oneloop.tasks.causal_lm  # noqa: E402, F401
import oneloop.tasks.image_classification  # noqa: E402, F401
import oneloop.tasks.text_classification  # noqa: E402, F401
import oneloop.train  # noqa: E402, F401
