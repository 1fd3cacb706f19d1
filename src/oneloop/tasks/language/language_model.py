"""Base class of the language tasks: model, batches, loss, and the tokens of the report."""

import os
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.basics.tensors import Planned, on_gpu
from oneloop.tasks.language.attention import borders, causal
from oneloop.tasks.language.chunked_loss import without_logits
from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.language.models import Shape, prepare_attention, scratch_config
from oneloop.tasks.language.sequences import IGNORE, Overlong, Samples, collated, cut_texts
from oneloop.tasks.language.token_rows import MakeSamples
from oneloop.tasks.language.token_targets import LoadSettings, TokenTargets
from oneloop.tasks.model_limits import shorter_length
from oneloop.tasks.rows.cached_arrays import Ragged

Fused = bool | Literal["auto"]

# logits of a micro-batch above which fused_loss auto fuses the loss (half a gigabyte in float32)
MANY_LOGITS = 1 << 27


def cross_entropy(logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of each token, 0 where it is not a target, at least in float32.

    Half-precision logits are too coarse for a loss.

    Args:
        logits: (rows, width, vocabulary).
        target: int64, (rows, width).
        label_smoothing: share of the target probability that is spread over all tokens.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    each = F.cross_entropy(
        logits.to(wide).flatten(0, 1),
        target.flatten(),
        reduction="none",
        ignore_index=IGNORE,
        label_smoothing=label_smoothing,
    )
    return each.view_as(target)


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Shape, LoadSettings):
    """A model that is loaded, or built from scratch, and how its loss is computed.

    Args:
        fused_loss: fuse output layer and cross-entropy to save memory (auto: on a GPU, if a
            micro-batch has more than 134 million logits, tokens x vocabulary).
        router_loss: for mixture-of-experts models with an auxiliary loss, which is not a sum over
            samples: refuse the model, or train without that loss (none).
    """

    fused_loss: Fused = "auto"
    router_loss: Literal["refuse", "none"] = "refuse"


class LanguageModel(TokenTargets):
    """Language modelling. The weight of a sample is its number of target tokens.

    Batches come from :func:`oneloop.tasks.language.sequences.collated`.

    Args:
        settings: the model.
        packed: whether a sample has several documents that do not attend to each other.
    """

    begin: int | None = None  # BOS token (and ``end``: EOS) of a model from scratch
    end = 0
    default_length = 256  # of the key of the sample length
    shows_likeliest = False  # whether ``show`` reads the most likely token of each position

    def __init__(self, settings: ModelSettings, *, packed: bool) -> None:
        super().__init__(settings)
        self.packed = packed

        # A default may be more than the positions of the model to load.
        if self.name is not None and settings.length == self.default_length:
            length, self._data_notes = shorter_length(
                self.name,
                settings.length,
                key=self.length_key,
                trust_remote_code=settings.trust_remote_code,
            )
            self.settings = replace(settings, length=length)
        self.shape: Shape = self.settings
        self.length = self.shape.length

        # Set by ``model``.
        self._can_fuse = False
        self._masked = False

    def _use_rows(self, rows: Any, make: MakeSamples) -> None:
        """Use the samples of rows.

        Args:
            rows: an :class:`oneloop.tasks.language.answer_rows.AnswerRows`.
            make: makes the samples of a split.
        """
        self.rows = rows
        self.chat_template = rows.template
        self._use(rows.sources, rows.samples(make))
        self._data_notes += rows.notes

    def _spanned(self, texts: Ragged, content: Any, split: str, overlong: Overlong) -> Samples:
        """Return the samples of one split; only training samples are packed."""
        room = self.length if self.packed and split == "train" else 0
        samples = cut_texts(texts, self.length, overlong, room=room, content=content)
        self._note(split, samples.notes)
        return samples

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Return samples as one batch, in which padding is not a target."""
        return collated(samples, width=self.length, most=self._max_documents)

    def model(self) -> nn.Module:
        model = self.adapted_model()
        self._masked = prepare_attention(
            model, packed=self.packed, router_loss=self.settings.router_loss
        )

        # Prepare the fused loss also for auto, which decides by the size of each micro-batch.
        if self.settings.fused_loss is not False:
            try:
                without_logits(model)
                self._can_fuse = True
            except ValueError as error:
                if self.settings.fused_loss is True:
                    raise ValueError(f"task.fused_loss: {error}") from error
        return model

    def bare_model(self) -> nn.Module:
        """Build or load the model, without adapters."""
        if self.name is None:
            from transformers import AutoModelForCausalLM

            return AutoModelForCausalLM.from_config(  # type: ignore[no-any-return]
                scratch_config(self.shape, entries=self.entries, begin=self.begin, end=self.end)
            )
        return self.load(entries=self.entries, length=self.length)

    def _model_inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        # The masks are 4-D: transformers would read a 2-D mask on the host (sync).
        inputs: dict[str, Any] = {"input_ids": batch["input"], "use_cache": False}
        if "document" in batch:
            inputs["attention_mask"] = borders(batch["document"], batch["cuts"])
            inputs["position_ids"] = batch["position"]
        elif self._masked:
            inputs["attention_mask"] = causal(batch["input"].device)
        return inputs

    def _uses_fused_loss(self, tokens: Tensor, entries: int) -> bool:
        if self.settings.fused_loss != "auto":
            return self._can_fuse
        many = on_gpu(tokens) and tokens.numel() * entries > MANY_LOGITS
        if not many or not self._can_fuse:
            return False
        # The fused loss rejects fp16. Autocast is on only inside of the model's forward.
        fp16 = os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16" or Planned.fp16
        return not fp16

    def token_losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of each token, differentiable; 0 where it is not a target.

        Args:
            model: called once.
            batch: of ``collate``.

        Returns:
            Nats, of the shape of the target; at least float32.
        """
        target = batch["target"]
        inputs = self._model_inputs(batch)
        if self._uses_fused_loss(target, self.shape.padded_vocab or self.entries):
            losses: Tensor = model(**inputs, target=target, apart=True).each
            return losses

        output = model(**inputs)
        return cross_entropy(output.logits, target)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        target = batch["target"]
        if self._uses_fused_loss(target, self.shape.padded_vocab or self.entries):
            # The output layer returns the losses in place of logits.
            total, each, right = model(**self._model_inputs(batch), target=target)
            outputs = {"loss": each}
            if right is not None:
                outputs["right"] = right
        else:
            logits = model(**self._model_inputs(batch)).logits
            each = cross_entropy(logits, target)
            total = each.sum()
            outputs = {"loss": each.detach()}
            # Only evaluations read them.
            if not torch.is_grad_enabled():
                likeliest = logits.argmax(-1)
                outputs["right"] = likeliest == target
                if self.shows_likeliest:
                    outputs["likeliest"] = likeliest
        if model.training and "padding" in batch:
            outputs["padding"] = batch["padding"]
        return total, outputs

    def show(self, sample: Any, outputs: dict[str, Tensor]) -> dict[str, Any]:
        """Return each token with its loss, and what the model wrote after the prompt."""
        document = sample.documents[0]
        tokens = token_ids(document).tolist()
        losses = outputs["loss"].tolist()
        # The first token is only an input; tokens that are not trained have no loss.
        pieces: list[tuple[str, float | None]] = [(self.decode(tokens[:1]), None)]
        for token, stored, loss in zip(tokens[1:], document[1:], losses, strict=False):
            pieces.append((self.decode([token]), loss if stored >= 0 else None))
        shown: dict[str, Any] = {"tokens": pieces}
        if "written" in outputs:
            shown["prompt"] = self.decode(tokens[: int(outputs["prompt"])])
            shown["continuation"] = self._answer(outputs["written"].tolist())
        return shown
