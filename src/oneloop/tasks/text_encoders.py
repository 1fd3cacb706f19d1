"""Text inputs as tokens, with an encoder from scratch or a model of transformers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from oneloop.basics.seeds import mixed
from oneloop.tasks.columns import number_of_text
from oneloop.tasks.language.models import Shape, scratch_config
from oneloop.tasks.language.tokens import MASK_SPECIAL, byte_tokenizer, learn_bpe, mask_tokenizer
from oneloop.tasks.model_limits import check_sizes, config_of, padding_token, shorter_length
from oneloop.tasks.text_notes import remark_unknown
from oneloop.tasks.transformers_models import auto_model, is_transformers, tokenizer_of
from oneloop.tasks.unread_masks import leave_masks_unread

BYTES = "bytes"
"""model name of a BERT from scratch that reads bytes"""
LEARNED = "bpe"
"""model name of a DistilBERT from scratch, whose lower-case tokens are learned from the texts"""
_BETWEEN = "\n\0\n"  # bytes between the two texts of a pair
_NO_BYTE = 255  # token of an empty text; UTF-8 has no such byte
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")  # of transformers' encoders


class Encoder(nn.Module):
    """A BERT from scratch with a linear head.

    Args:
        config: its configuration.
        outputs: outputs of the head.
        words: the head reads the hidden state of each position, and not their mean.
    """

    _no_split_modules = ("BertLayer",)

    def __init__(self, config: Any, outputs: int, *, words: bool) -> None:
        super().__init__()
        from transformers import BertModel

        self.encoder = BertModel(config, add_pooling_layer=False)
        leave_masks_unread(self.encoder)
        self.head = nn.Linear(config.hidden_size, outputs)
        self.words = words

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids, attention_mask).last_hidden_state
        if not self.words:
            hidden = mean_of(hidden, attention_mask)
        return self.head(hidden)  # type: ignore[no-any-return]


class TextReader:
    """Converts texts to tokens, and builds or loads the model that reads them.

    ``notes``: lines for the log about the weights; ``about``: other lines.

    Args:
        new: name of the model from scratch, BYTES or LEARNED.
        default_length: the default of ``length``, which may be more than a model has.
        model: bytes (a byte-level encoder from scratch), a folder saved by transformers, or
            hf:ID[@REVISION]. If the classes differ, the last layer is re-initialized.
        pretrained: load the weights of model (false: use only its configuration).
        trust_remote_code: run Python code stored with the weights (only if you trust the author).
        layers: number of transformer blocks.
        heads: number of attention heads.
        width: hidden size.
        length: maximum bytes or tokens of a text; longer texts are cut.
        dropout: dropout of embeddings, attention and residuals (of a new encoder).

    Raises:
        ValueError: the model does not exist, or it has no fast tokenizer, which maps tokens to
            words.
    """

    options: Mapping[str, bool] = {}  # of each forward of the model

    def __init__(
        self,
        *,
        new: str = BYTES,
        default_length: int | None = None,
        model: str = BYTES,
        pretrained: bool = True,
        trust_remote_code: bool = False,
        layers: int = 2,
        heads: int = 4,
        width: int = 128,
        length: int = 256,
        dropout: float = 0.0,
    ) -> None:
        self.shape = Shape(layers=layers, heads=heads, width=width, length=length, dropout=dropout)
        self.name = model
        self.length = length
        self.notes = list[str]()
        self.about = list[str]()
        self.tokenizer: Any = None
        self._new = model == new
        self._pretrained = pretrained
        self._trust_remote_code = trust_remote_code
        if self._new:
            if model == BYTES:
                self._use(byte_tokenizer(pad_token="[PAD]"))
            return
        if not is_transformers(model):
            raise ValueError(
                f"task.model {model!r} is not a folder saved by transformers; give one, {new}, or "
                "hf:ID"
            )
        self._use(
            tokenizer_of(model, trust_remote_code=trust_remote_code),
            config_of(model, trust_remote_code=trust_remote_code),
        )
        if length == default_length:
            self.length, self.about = shorter_length(
                model, length, key="length", trust_remote_code=trust_remote_code
            )

    def _use(self, tokenizer: Any, config: Any = None) -> None:
        """Use this tokenizer, and the padding token of the model's configuration."""
        padding = padding_token(config or tokenizer, tokenizer)
        if padding is None:
            raise ValueError(
                f"task.model {self.name!r}: its tokenizer has no padding token and no end token"
            )
        # Save the tokenizer with the token that was trained with. An ordinary token must not become
        # a special one, because it would split words.
        special = {number for number, one in tokenizer.added_tokens_decoder.items() if one.special}
        if padding != tokenizer.pad_token_id and padding in special:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)
        self.padding = padding
        self.tokenizer = tokenizer

    def learn(self, texts: Callable[[], Iterable[str]], vocab: int) -> None:
        """Learn this number of tokens from texts, unless the tokens are known; cached by the
        texts."""
        if self.tokenizer is not None:
            return
        # Number the texts, in their order, for the name in the cache.
        content = 0
        for text in texts():
            content = mixed(content, number_of_text(text))
        self.use_learned(learn_bpe(texts(), vocab, MASK_SPECIAL, cache_key=content, words=True))

    def use_learned(self, written: str) -> None:
        """Use a tokenizer of :meth:`learn`, as JSON."""
        self._use(mask_tokenizer(written, self.length))

    def encode(self, text: str, second: str | None = None) -> dict[str, list[int]]:
        """Encode a text or a pair of texts, cut to the maximum length."""
        if self.name == BYTES:
            # The tokenizer returns the same, much slower.
            joined = text if second is None else f"{text}{_BETWEEN}{second}"
            return {"input_ids": list(joined.encode()[: self.length]) or [_NO_BYTE]}
        return self._encoded(text, second)[0]

    def encode_words(self, words: Sequence[str]) -> tuple[dict[str, list[int]], list[int], int]:
        """Return encoded words, the starts of words that are not cut, and the length."""
        if self._new:
            words = [f"{word} " for word in words]
        sample, of_word, is_cut = self._encoded(list(words), None, is_split_into_words=True)

        # Find the first token of each word.
        starts: dict[int, int] = {}
        for position, word in enumerate(of_word):
            if word is not None:
                starts.setdefault(word, position)

        # A number that is left out is a word without tokens. Words that are cut come last.
        count = len(starts) if is_cut else len(words)
        for number in range(count):
            if number not in starts:
                raise ValueError(f"word {number} ({words[number]!r}) has no tokens; remove it")
        return sample, [*starts.values()], len(of_word)

    def _encoded(
        self, *texts: Any, **how: Any
    ) -> tuple[dict[str, list[int]], list[int | None], bool]:
        """Return the inputs of texts, the word of each token, and whether the texts are cut."""
        encoding = self.tokenizer(
            *texts, truncation=True, max_length=self.length, return_attention_mask=False, **how
        )
        remark_unknown(encoding["input_ids"], self.tokenizer)
        if not encoding["input_ids"]:
            raise ValueError("the text has no tokens; remove the row")
        if len(encoding["input_ids"]) > self.length:
            raise ValueError(
                f"task.length {self.length} has no room for text next to the special tokens; "
                "raise it"
            )
        inputs = {key: list(values) for key, values in encoding.items()}
        return inputs, encoding.word_ids(), bool(encoding.encodings[0].overflowing)

    def collate(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        batch = {}
        for key in (*samples[0], "attention_mask"):
            # Other inputs, such as the types of tokens, are padded with 0.
            padding = self.padding if key == "input_ids" else 0
            rows = [
                torch.tensor(sample.get(key) or [1] * len(sample["input_ids"]))
                for sample in samples
            ]
            batch[key] = pad_sequence(rows, batch_first=True, padding_value=padding)
        return batch

    def model(self, classes: Sequence[str] | None, *, words: bool = False) -> nn.Module:
        """Return a model with an output per class, for each text.

        Args:
            classes: names of the outputs; None: the outputs are the hidden states.
            words: the outputs are for each position.
        """
        if self._new:
            return self._new_model(classes, words=words)

        # Load the model with the head for this task.
        if classes is None:
            kind = "AutoModel"
        elif words:
            kind = "AutoModelForTokenClassification"
        else:
            kind = "AutoModelForSequenceClassification"
        model, self.notes = auto_model(
            kind,
            self.name,
            classes,
            pretrained=self._pretrained,
            trust_remote_code=self._trust_remote_code,
        )

        # Check that it has a position for each token, and an embedding.
        check_sizes(model, self.name, entries=len(self.tokenizer), length=self.length, key="length")
        limit = self.tokenizer.model_max_length
        if self.length > limit:
            raise ValueError(
                f"task.length {self.length} exceeds the {limit} tokens of the tokenizer of "
                f"{self.name} (model_max_length); lower it"
            )

        # The model finds the last token of a text by its padding token.
        config: Any = model.config
        if config.get_text_config().pad_token_id != self.padding:
            config.pad_token_id = self.padding
            config.get_text_config().pad_token_id = self.padding
        leave_masks_unread(model)
        # The recomputation of a block would add its keys and values again.
        if "use_cache" in signature(model.forward).parameters:
            self.options = {"use_cache": False}
        return model

    def _new_model(self, classes: Sequence[str] | None, *, words: bool) -> nn.Module:
        from transformers import AutoModel

        config = scratch_config(
            self.shape,
            entries=len(self.tokenizer),
            padding=self.padding,
            architecture="bert" if self.name == BYTES else "distilbert",
        )
        if classes is not None:
            return Encoder(config, len(classes), words=words)
        model: nn.Module = AutoModel.from_config(config)
        leave_masks_unread(model)
        return model

    def inputs(self, batch: dict[str, Tensor], side: str = "") -> dict[str, Tensor]:
        """Return the inputs of the model; ``side`` begins their names in the batch."""
        return {key: batch[side + key] for key in _INPUTS if side + key in batch}

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs = self.inputs(batch)
        output = model(**inputs, **self.options)
        logits: Tensor = getattr(output, "logits", output)
        return logits

    def decode(self, sample: Any, start: int = 0, stop: int | None = None) -> str:
        return str(self.tokenizer.decode(sample["input_ids"][start:stop]))

    def save(self, model: nn.Module, folder: Path) -> None:
        if hasattr(model, "config"):
            model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        self.tokenizer.save_pretrained(folder)


def mean_of(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the mean of the hidden states of each text, without its padding."""
    share = attention_mask[:, :, None].to(hidden.dtype)
    return (hidden * share).sum(1) / share.sum(1)
