"""Base class of the tasks whose targets are tokens: their metrics, and the model that is loaded."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oneloop.basics.base_models import BaseModel
from oneloop.basics.wide_sums import widest
from oneloop.tasks.language.lora import add_adapters, merged, save_config
from oneloop.tasks.language.lora_settings import LoRA, adapters
from oneloop.tasks.language.models import (
    configure_four_bits,
    loading_options,
    reject_quantized,
)
from oneloop.tasks.language.sequences import IGNORE
from oneloop.tasks.light_metrics import TextMeans
from oneloop.tasks.model_limits import check_sizes
from oneloop.tasks.rows.open_data import Source, combined, notes_of, skipped_rows
from oneloop.tasks.transformers_models import auto_model, is_transformers, tokenizer_of


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """Which model is loaded.

    Args:
        model: a folder saved by transformers, or hf:ID[@REVISION], with its tokenizer (null: a
            model from scratch).
        pretrained: load the weights of model (false: use only its configuration).
        trust_remote_code: run Python code stored with the weights (only if you trust the author).
        lora: low-rank adapters for a pretrained model; only the adapters are trained.
    """

    model: str | None = None
    pretrained: bool = True
    trust_remote_code: bool = False
    lora: LoRA = LoRA()


class TokenTargets:
    """Targets are tokens: ``batch["target"]``; the weight is their number.

    The outputs of a loss are ``loss`` (nats) and, in evaluations, ``right``, each of the shape of
    the target.

    Args:
        settings: which model is loaded; it may be a folder of adapters.
    """

    unit = "tokens"
    counts_whole_texts = False  # whether evaluations count fully correct samples
    adapted_for = "CAUSAL_LM"  # peft's name of the kind of task
    head = ""  # name of a layer that adapters do not replace: it is trained as a whole
    needs_fast_tokenizer = True
    length_key = "length"  # task key of the sample length
    ends: Sequence[int] = ()  # tokens that end answers besides the tokenizer's end token
    chat_template: str | None = None  # for the saved tokenizer, in place of its own
    tokenizer: Any
    settings: Any

    def __init__(self, settings: LoadSettings) -> None:
        # The model to load; with adapters, ``model`` may be their folder.
        self.settings = settings
        self.pretrained = settings.pretrained  # evaluate may set it later
        self.adapters = adapters(settings.model, settings.lora, pretrained=settings.pretrained)
        self.name = settings.model if self.adapters is None else self.adapters.base
        if self.name is not None and not is_transformers(self.name):
            raise ValueError(
                f"task.model {self.name!r} is not a folder saved by transformers; give one, or "
                "hf:ID"
            )

        # Lines for the log: all, and those about the data.
        self.notes = list[str]()
        self._data_notes = list[str]()

        self.samples: dict[str, Any] = {}

        # Set by ``model``.
        self.origin: BaseModel | None = None
        self._sizes: Tensor | None = None  # of the tokens, in bytes, on the device

    def known_tokenizer(self) -> Any:
        """Return the tokenizer of the model, or of the adapters if their folder has one."""
        assert self.name is not None
        source = self.adapters.tokenizer if self.adapters else self.name
        return tokenizer_of(
            source,
            trust_remote_code=self.settings.trust_remote_code,
            fast=self.needs_fast_tokenizer,
        )

    def _use(self, sources: Sequence[Source], samples: Sequence[dict[str, Any]]) -> None:
        """Use these samples of each source, by split.

        ``samples`` has all by name of the split, or SPLIT/SOURCE of a mixture.
        """
        self._sets = combined(sources, samples)
        for source, splits in zip(sources, samples, strict=True):
            for split, made in splits.items():
                name = split if len(sources) == 1 else f"{split}/{source.name}"
                self.samples[name] = made
        train = [splits["train"] for splits in samples]
        self._max_documents = max(part.most for part in train)
        if len(sources) > 1 and train[0].by_length:
            self._data_notes.append(
                "a mixture defines its own order: samples are not sorted by length (more padding)"
            )
        self.skipped_rows = skipped_rows(sources)
        self._data_notes += notes_of(sources)
        self.notes = self._data_notes

    def train_set(self) -> Any:
        return self._sets["train"]

    def eval_sets(self) -> dict[str, Any]:
        return {name: data for name, data in self._sets.items() if name != "train"}

    def _note(self, split: str, lines: Sequence[str]) -> None:
        """Add log lines about the data of a split."""
        self._data_notes += [f"{split}: {line}" for line in lines]

    def bare_model(self) -> nn.Module:
        """Build or load the model, without adapters."""
        raise NotImplementedError

    def load(
        self,
        *,
        entries: int,
        length: int,
        kind: str = "AutoModelForCausalLM",
        classes: Sequence[str] | None = None,
    ) -> nn.Module:
        """Load the model that ``task.model`` names, and add what was noted to the notes.

        Args:
            entries: vocabulary size of the tokenizer.
            length: tokens per sample.
            kind: name of its Auto class.
            classes: names of the outputs; None: a language model.

        Raises:
            ValueError: the model cannot be loaded, or its sizes do not fit.
        """
        assert self.name is not None
        lora = None if self.adapters is None else self.adapters.settings
        reject_quantized(self.name, lora)

        # Load it in float32; for adapters in the dtype of its file, or in 4 bits.
        model, added = auto_model(
            kind,
            self.name,
            classes,
            pretrained=self.pretrained,
            trust_remote_code=self.settings.trust_remote_code,
            **loading_options(lora),
        )
        configure_four_bits(model)
        check_sizes(model, self.name, entries=entries, length=length, key=self.length_key)
        self.notes = [*self._data_notes, *added]
        return model

    def adapted_model(self) -> nn.Module:
        """Build or load the model, with the adapters."""
        model = self.bare_model()
        if self.adapters is not None:
            self.origin, added = add_adapters(
                model, self.adapters, task=self.adapted_for, head=self.head
            )
            self.notes = [*self.notes, added]
        return model

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["target"] != IGNORE).sum()

    @property
    def token_bytes(self) -> Tensor | None:
        """Number of bytes of each token, shape (vocabulary,); None if unknown."""
        return None

    def metrics(self) -> TextMeans:
        """Return perplexity and accuracy, and what else can be counted."""
        better: dict[str, bool | None] = {"perplexity": False, "accuracy": True}
        if self.token_bytes is not None:
            better["bits_per_byte"] = False
        if self.counts_whole_texts:
            better["exact"] = True
        return TextMeans(better)

    def update(
        self, metrics: TextMeans, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> None:
        target = batch["target"]
        is_target = target != IGNORE
        right = outputs["right"] & is_target

        loss = outputs["loss"]
        values = {"perplexity": (loss, is_target), "accuracy": (right, is_target)}
        if "apart" in outputs:
            values["divergence"] = (outputs["apart"].sum(), is_target)

        # Count the bytes of the target tokens, and the texts that are fully correct.
        if self.token_bytes is not None:
            # They are copied to the device once.
            if self._sizes is None or self._sizes.device != target.device:
                self._sizes = self.token_bytes.to(target.device)
            values["bits_per_byte"] = (loss, self._sizes[target.clamp(min=0)] * is_target)
        if self.counts_whole_texts:
            exact = (right | ~is_target).all(1)
            values["exact"] = (exact, torch.ones_like(exact))
        metrics.update(values)

    def predicted(
        self, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> dict[str, list[Any]]:
        """Return mean loss (nats), number and accuracy of each sample's target tokens.

        All are None for a sample without target tokens.
        """
        is_target = batch["target"] != IGNORE
        count = is_target.sum(1)
        losses = (widest(outputs["loss"]) * is_target).sum(1) / count
        right = (outputs["right"] & is_target).sum(1) / count
        columns = {}
        for name, values in {"loss": losses, "tokens": count, "accuracy": right}.items():
            pairs = zip(values.tolist(), count.tolist(), strict=True)
            columns[name] = [value if tokens else None for value, tokens in pairs]
        return columns

    @property
    def entries(self) -> int:
        """Vocabulary size."""
        return len(self.tokenizer)

    def decode(self, tokens: list[int]) -> str:
        """Return tokens as text."""
        return str(self.tokenizer.decode(tokens))

    def _answer(self, tokens: list[int]) -> str:
        """Return tokens that the model wrote as text."""
        return self.decode(tokens)

    def merge(self, model: nn.Module) -> nn.Module:
        """Merge the adapters into the model's weights, in place.

        Raise ValueError if there are no adapters.
        """
        if self.origin is None:
            raise ValueError(
                "--merged: the run trained no adapters; its weights are whole as they are"
            )
        self.origin = None
        return merged(model)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the model, and the tokenizer with the chat template of the run."""
        self.save_model(model, folder, ends=self.ends)
        if self.chat_template is not None:
            self.tokenizer.chat_template = self.chat_template
        self.tokenizer.save_pretrained(folder)

    def save_model(self, model: nn.Module, folder: Path, *, ends: Sequence[int] = ()) -> None:
        """Write the configs with which transformers or, for adapters, peft loads the weights.

        Args:
            model: the trained model.
            folder: where the weights are written.
            ends: end tokens, at which transformers should stop in addition to the model's.
        """
        if self.origin is not None:
            save_config(model, folder)
            return
        model.config.save_pretrained(folder)  # type: ignore[union-attr,operator]
        config = deepcopy(getattr(model, "generation_config", None))
        if config is None:
            return

        # Add the end tokens; transformers stores a number if there is one, and else a list.
        own_ends = config.eos_token_id
        if not isinstance(own_ends, list):
            own_ends = [own_ends]
        all_ends = [end for end in dict.fromkeys([*own_ends, *ends]) if end is not None]
        if len(all_ends) == 1:
            config.eos_token_id = all_ends[0]
        else:
            config.eos_token_id = all_ends or None
        (folder / "generation_config.json").write_text(config.to_json_string(), encoding="utf-8")
