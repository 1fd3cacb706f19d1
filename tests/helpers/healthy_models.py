"""Thirty small models of transformers, timm and torchvision as tasks, on which no check may report
anything.

Each is built from a configuration, with random weights, and keeps the random parts that its
library gives it: dropout, LayerDrop, SpecAugment, DropPath, stochastic depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS = 48
"""size of the vocabulary"""
CLASSES = 4
LENGTH = 12
"""tokens of a text"""
SIDE = 32
"""pixels of an image"""
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}

# the lines on how exactly a run can be reproduced
EXACT = "any parallel layout gives the same gradients"
DROPOUT = "model, loss or collate draw random numbers (dropout)"
DRAWS = "model, loss or collate draw random numbers"
BATCHNORM = "the model has BatchNorm"


@dataclass(frozen=True)
class Healthy:
    """A model on which no check may report anything."""

    task: str
    """name of the class in this module"""
    promise: str
    """start of the line on reproduction, without ``batch.grain``"""
    words: tuple[str, ...]
    """more words for the command line"""
    rejected: dict[str, tuple[str, ...]]
    """words of the message that rightly rejects the model: by ``single``, ``ddp`` or ``fsdp2``, or
    ``grain``"""
    unused: str
    """a parameter that the preflight check reports as unused"""


HEALTHY: dict[str, Healthy] = {}
FIND = ("--machine.find_unused_parameters", "true")


def healthy(
    promise: str,
    *words: str,
    unused: str = "",
    **rejected: tuple[str, ...],
) -> Callable[[type], type]:
    """Register a task class.

    Args:
        promise: start of the line on reproduction, without ``batch.grain``.
        words: more words for the command line.
        unused: a parameter that the preflight check reports as unused.
        rejected: words of the message that rightly rejects the model, by layout.
    """
    if promise == BATCHNORM:
        rejected["grain"] = ("BatchNorm",)

    def registered(task: type) -> type:
        HEALTHY[task.__name__] = Healthy(task.__name__, promise, words, rejected, unused)
        return task

    return registered


# --- Data.
# -------------------------------------------------------------------------------------------


class Generated:
    """Samples that ``make`` draws, the same on every machine.

    Args:
        make: returns the fields of a sample.
        count: number of samples.
        seed: of the draws.
    """

    def __init__(self, make: Callable[[torch.Generator], dict[str, Tensor]], count: int, seed: int):
        drawn = torch.Generator().manual_seed(seed)
        self.samples = [make(drawn) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.samples[index]


def text(drawn: torch.Generator) -> dict[str, Tensor]:
    """Return tokens, a mask of those that are not padding, and a class."""
    label = torch.randint(0, CLASSES, (), generator=drawn)
    ids = torch.randint(4, WORDS, (LENGTH,), generator=drawn)
    ids[1:4] = 4 + label
    length = torch.randint(5, LENGTH + 1, (), generator=drawn)
    mask = (torch.arange(LENGTH) < length).long()
    return {"input_ids": torch.where(mask == 1, ids, 0), "attention_mask": mask, "label": label}


def image(drawn: torch.Generator) -> dict[str, Tensor]:
    """Return an image and its class."""
    label = torch.randint(0, CLASSES, (), generator=drawn)
    pixels = torch.randn(3, SIDE, SIDE, generator=drawn)
    return {"pixel_values": pixels + 0.5 * label, "label": label}


def pair(drawn: torch.Generator) -> dict[str, Tensor]:
    """Return an image and a text, and whether both have the same class."""
    words = text(drawn)
    pixels = image(drawn)
    label = (words["label"] == pixels["label"]).float()
    return {**words, **pixels, "label": label}


def wave(drawn: torch.Generator) -> dict[str, Tensor]:
    """Return a sound and its class."""
    label = torch.randint(0, CLASSES, (), generator=drawn)
    tone = torch.sin(torch.arange(600) * 0.1 * (1 + label))
    return {"input_values": tone + 0.3 * torch.randn(600, generator=drawn), "label": label}


def speech(drawn: torch.Generator) -> dict[str, Tensor]:
    """Return a spectrogram and its words."""
    words = text(drawn)["input_ids"]
    return {"input_features": torch.randn(8, 60, generator=drawn), "words": words}


# --- Tasks: what a model's output costs, as a sum over the samples.
# -------------------------------------------------------------------------------------------


class Classified:
    """Classify each sample.

    The fields of a batch are the keywords of the model, or its only argument."""

    make: Callable[[torch.Generator], dict[str, Tensor]] = staticmethod(image)

    def train_set(self) -> Generated:
        return Generated(self.make, 40, seed=1)

    def eval_sets(self) -> dict[str, Generated]:
        return {"validation": Generated(self.make, 8, seed=2)}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["label"])))

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["pixel_values"])

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = self.logits(model, batch)
        each = F.cross_entropy(logits, batch["label"], reduction="none")
        return each.sum(), {"accuracy": (logits.argmax(-1) == batch["label"]).float()}


class ClassifiedText(Classified):
    make = staticmethod(text)

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits


class Tagged(ClassifiedText):
    """Classify each token: the weight is the number of tokens."""

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["attention_mask"].sum()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = self.logits(model, batch)
        classes = (batch["input_ids"] % CLASSES).where(batch["attention_mask"] == 1, -100)
        return F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="sum"), {}


class NextToken(ClassifiedText):
    """Predict each token from those before it."""

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["attention_mask"][:, 1:].sum()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = self.logits(model, batch)[:, :-1].flatten(0, 1)
        words = batch["input_ids"].where(batch["attention_mask"] == 1, -100)[:, 1:]
        return F.cross_entropy(logits, words.flatten(), reduction="sum"), {}


# --- transformers.
# -------------------------------------------------------------------------------------------


def built(architecture: str, configuration: str, **settings: Any) -> nn.Module:
    """Return a model of transformers with random weights."""
    import transformers

    config = getattr(transformers, configuration)(**settings)
    model: nn.Module = getattr(transformers, architecture)(config)
    return model


def small(name: str, kind: str, **settings: Any) -> nn.Module:
    """Return a small model of a family, such as ``BertForMaskedLM``."""
    return built(f"{name}For{kind}", f"{name}Config", **{**SMALL, **settings})


CLASSIFY = partial(small, kind="SequenceClassification", num_labels=CLASSES, pad_token_id=0)
PREDICT = partial(small, kind="CausalLM", pad_token_id=0, num_key_value_heads=1)


@healthy(DROPOUT)
class Bert(ClassifiedText):
    def model(self) -> nn.Module:
        return CLASSIFY("Bert")


@healthy(DROPOUT)
class Roberta(ClassifiedText):
    def model(self) -> nn.Module:
        return CLASSIFY("Roberta")


@healthy(DROPOUT)
class DistilBert(ClassifiedText):
    def model(self) -> nn.Module:
        return CLASSIFY("DistilBert", dim=16, n_layers=2, n_heads=2, hidden_dim=32)


@healthy(DROPOUT)
class Albert(ClassifiedText):
    """All layers share their parameters, so FSDP2's only unit runs several times."""

    def model(self) -> nn.Module:
        return CLASSIFY("Albert", embedding_size=8, hidden_dropout_prob=0.1)


@healthy(DROPOUT)
class Electra(Tagged):
    def model(self) -> nn.Module:
        return small("Electra", "TokenClassification", num_labels=CLASSES, embedding_size=8)


@healthy(DROPOUT)
class DebertaV2(ClassifiedText):
    """Relative positions, and dropout modules of its own."""

    def model(self) -> nn.Module:
        return CLASSIFY("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"])


@healthy(DROPOUT)
class GPT2(NextToken):
    """The head and the embedding are one parameter."""

    def model(self) -> nn.Module:
        return built(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=WORDS,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=2,
            bos_token_id=1,
            eos_token_id=2,
        )


@healthy(EXACT)
class Llama(NextToken):
    def model(self) -> nn.Module:
        return PREDICT("Llama")


@healthy(EXACT)
class Qwen3(NextToken):
    """Normalised queries and keys."""

    def model(self) -> nn.Module:
        return PREDICT("Qwen3", head_dim=8)


@healthy(EXACT)
class Mistral(NextToken):
    """Attention within a sliding window."""

    def model(self) -> nn.Module:
        return PREDICT("Mistral", sliding_window=4)


@healthy(EXACT)
class Gemma2(NextToken):
    """Layers with and without a window, and logits with a soft limit."""

    def model(self) -> nn.Module:
        return PREDICT("Gemma2", head_dim=8, sliding_window=4)


@healthy(EXACT)
class Mamba(NextToken):
    def model(self) -> nn.Module:
        return built(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=2,
            state_size=4,
        )


@healthy(DROPOUT)
class T5(NextToken):
    """An encoder and a decoder with one embedding; it predicts the text backwards."""

    def model(self) -> nn.Module:
        return built(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=WORDS,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
        )

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"]
        words = batch["input_ids"]
        return model(words.flip(1), attention_mask=mask.flip(1), decoder_input_ids=words).logits


@healthy(DRAWS)
class Whisper(NextToken):
    """SpecAugment draws its masks from numpy."""

    make = staticmethod(speech)

    def model(self) -> nn.Module:
        return built(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=WORDS,
            num_mel_bins=8,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_source_positions=30,
            max_target_positions=32,
            dropout=0.1,
            apply_spec_augment=True,
            mask_time_prob=0.1,
            mask_time_length=5,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
        )

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = super().collate(samples)
        words = batch.pop("words")
        return {**batch, "input_ids": words, "attention_mask": (words > 0).long()}

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["input_features"], decoder_input_ids=batch["input_ids"]).logits


@healthy(DROPOUT, *FIND, unused="wav2vec2.encoder.layers", fsdp2=("FSDP2", "units"))
class Wav2Vec2(Classified):
    """LayerDrop skips layers, which are FSDP2's units; SpecAugment draws its masks from numpy.

    It skips more than usual, so that all processes skip a layer in some steps."""

    make = staticmethod(wave)

    def model(self) -> nn.Module:
        return small(
            "Wav2Vec2",
            "SequenceClassification",
            num_labels=CLASSES,
            conv_dim=(8, 8),
            conv_kernel=(10, 4),
            conv_stride=(5, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            classifier_proj_size=8,
            mask_time_length=4,
            layerdrop=0.5,
        )

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["input_values"]).logits


@healthy(EXACT)
class Clip(Classified):
    """An image and a text, and the probability that they belong together."""

    make = staticmethod(pair)

    def model(self) -> nn.Module:
        words = {**SMALL, "projection_dim": 8, "eos_token_id": 2, "bos_token_id": 1}
        pixels = {**SMALL, "projection_dim": 8, "image_size": SIDE, "patch_size": 16}
        return built(
            "CLIPModel",
            "CLIPConfig",
            text_config=words,
            vision_config=pixels,
            projection_dim=8,
        )

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        fields = (batch[name] for name in ("input_ids", "pixel_values", "attention_mask"))
        logits = model(*fields).logits_per_text.diagonal()
        each = F.binary_cross_entropy_with_logits(logits, batch["label"], reduction="none")
        return each.sum(), {"loss": each.detach()}


# --- timm.
# -------------------------------------------------------------------------------------------


def of_timm(name: str, **settings: Any) -> nn.Module:
    """Return a small model of timm with random weights."""
    import timm

    return timm.create_model(name, num_classes=CLASSES, **settings)


@healthy(DRAWS)
class TimmVit(Classified):
    """DropPath drops the branches of some samples, and patches are dropped."""

    def model(self) -> nn.Module:
        return of_timm(
            "vit_tiny_patch16_224",
            img_size=SIDE,
            embed_dim=16,
            depth=2,
            num_heads=2,
            drop_path_rate=0.2,
            patch_drop_rate=0.25,
        )


@healthy(DRAWS)
class TimmSwin(Classified):
    def model(self) -> nn.Module:
        return of_timm(
            "swin_tiny_patch4_window7_224",
            img_size=SIDE,
            window_size=4,
            embed_dim=8,
            depths=(2, 2),
            num_heads=(2, 2),
        )


@healthy(DRAWS)
class TimmConvNext(Classified):
    def model(self) -> nn.Module:
        return of_timm(
            "convnext_atto", dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), drop_path_rate=0.2
        )


@healthy(DROPOUT)
class TimmMixer(Classified):
    def model(self) -> nn.Module:
        from timm.models.mlp_mixer import MlpMixer

        return MlpMixer(
            num_classes=CLASSES,
            img_size=SIDE,
            patch_size=8,
            num_blocks=2,
            embed_dim=16,
            proj_drop_rate=0.1,
        )


@healthy(DRAWS)
class TimmNfNet(Classified):
    """Each forward standardises the weights of its convolutions by a batch norm without state."""

    def model(self) -> nn.Module:
        return of_timm("test_nfnet", drop_path_rate=0.1)


@healthy(BATCHNORM)
class TimmEfficientNet(Classified):
    def model(self) -> nn.Module:
        return of_timm("test_efficientnet", drop_path_rate=0.1, drop_rate=0.1)


@healthy(BATCHNORM)
class TimmCoAtNet(Classified):
    """Convolutions with BatchNorm, and attention."""

    def model(self) -> nn.Module:
        return of_timm("test_coatnet", img_size=SIDE, drop_path_rate=0.1)


# --- torchvision.
# -------------------------------------------------------------------------------------------


@healthy(BATCHNORM)
class ResNet(Classified):
    def model(self) -> nn.Module:
        from torchvision.models.resnet import BasicBlock, ResNet

        net = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)
        net.layer4 = nn.Identity()  # three quarters of the parameters
        net.fc = nn.Linear(256, CLASSES)
        return net


@healthy(BATCHNORM)
class MobileNet(Classified):
    def model(self) -> nn.Module:
        from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

        blocks = [
            InvertedResidualConfig(16, 3, 16, 16, True, "RE", 2, 1, 0.5),
            InvertedResidualConfig(16, 3, 32, 24, False, "HS", 2, 1, 0.5),
        ]
        return MobileNetV3(blocks, last_channel=16, num_classes=CLASSES)


@healthy(DRAWS)
class ConvNext(Classified):
    def model(self) -> nn.Module:
        from torchvision.models.convnext import CNBlockConfig, ConvNeXt

        blocks = [CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)]
        return ConvNeXt(blocks, stochastic_depth_prob=0.2, num_classes=CLASSES)


@healthy(DROPOUT)
class Vit(Classified):
    def model(self) -> nn.Module:
        from torchvision.models import VisionTransformer

        return VisionTransformer(
            SIDE,
            patch_size=16,
            num_layers=2,
            num_heads=2,
            hidden_dim=16,
            mlp_dim=32,
            dropout=0.1,
            num_classes=CLASSES,
        )


@healthy(DRAWS)
class Swin(Classified):
    def model(self) -> nn.Module:
        from torchvision.models import SwinTransformer

        return SwinTransformer(
            patch_size=[4, 4],
            embed_dim=8,
            depths=[2, 2],
            num_heads=[2, 2],
            window_size=[4, 4],
            stochastic_depth_prob=0.2,
            num_classes=CLASSES,
        )


@healthy(BATCHNORM)
class EfficientNet(Classified):
    def model(self) -> nn.Module:
        from torchvision.models.efficientnet import EfficientNet, MBConvConfig

        blocks = [MBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 3, 2, 8, 16, 2)]
        return EfficientNet(blocks, dropout=0.2, num_classes=CLASSES)


@healthy(DROPOUT)
class SqueezeNet(Classified):
    def model(self) -> nn.Module:
        from torchvision.models import squeezenet1_1

        return squeezenet1_1(num_classes=CLASSES)


@healthy(BATCHNORM)
class DenseNet(Classified):
    def model(self) -> nn.Module:
        from torchvision.models import DenseNet

        return DenseNet(
            growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=CLASSES
        )
