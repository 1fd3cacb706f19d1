"""Text inputs: bytes with an encoder from scratch, or tokens with a transformers model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oneloop.tasks.model_limits import check_sizes, config_of, padding_token, shorter_length
from oneloop.tasks.text_notes import remark_unknown
from oneloop.tasks.transformers_models import auto_model, is_transformers, tokenizer_of
from oneloop.tasks.unread_masks import leave_masks_unread

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")  # of transformers' encoders
PAD = 256  # padding value, after the 256 bytes


@dataclass(frozen=True)
class EncoderShape:
    """Size of an encoder from scratch; ``length`` also limits the texts of a pretrained one."""

    layers: int = 2  # transformer blocks
    heads: int = 4  # attention heads of a block
    width: int = 128  # hidden size
    length: int = 256  # maximum bytes or tokens of a text
    dropout: float = 0.0  # of embeddings, attention and residuals

    def check_heads(self) -> None:
        """Raise ValueError if the heads cannot divide the width."""
        if self.width % self.heads:
            raise ValueError(
                f"task.width {self.width} cannot be divided by task.heads {self.heads}"
            )


def bert_config(shape: Any, *, entries: int, padding: int) -> Any:
    """Return the configuration of a BERT.

    Args:
        shape: an EncoderShape, or an object with the same sizes.
        entries: vocabulary size.
        padding: padding token.
    """
    from transformers import BertConfig

    return BertConfig(
        vocab_size=entries,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
        max_position_embeddings=shape.length,
        pad_token_id=padding,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.dropout,
    )


class Encoder(nn.Module):
    """Transformer encoder with mean pooling and a linear head.

    (texts, bytes) -> (texts, outputs).
    """

    _no_split_modules = ("BertLayer",)

    def __init__(self, outputs: int, shape: EncoderShape) -> None:
        super().__init__()
        from transformers import BertModel

        config = bert_config(shape, entries=257, padding=PAD)
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(shape.width, outputs)

    def hidden(self, text: Tensor, known: Tensor) -> Tensor:
        """Return hidden states of shape (texts, bytes, width); ``known`` is False at padding."""
        # Pass a 4-D mask (batch, 1, query, key): transformers reads a 2-D mask on the host (sync).
        mask = known[:, None, None, :].expand(-1, 1, text.shape[1], -1)
        hidden: Tensor = self.encoder(input_ids=text, attention_mask=mask).last_hidden_state
        return hidden

    def forward(self, text: Tensor) -> Tensor:
        known = text != PAD
        hidden = self.hidden(text, known)
        share = known[:, :, None].to(hidden.dtype)
        return self.head((hidden * share).sum(1) / share.sum(1))  # type: ignore[no-any-return]


class ByteEncoder(Encoder):
    """Encoder with the head at every byte: (texts, bytes) -> (texts, bytes, outputs)."""

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.hidden(text, text != PAD))  # type: ignore[no-any-return]


def as_bytes(text: str, length: int) -> Tensor:
    """Return the first ``length`` bytes of a text; of an empty text one that is not UTF-8."""
    return torch.tensor(list(text.encode()[:length]) or [PAD - 1])


def padded(texts: list[Any]) -> Tensor:
    """Pad the texts of a batch to the longest."""
    return nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD)


_BETWEEN = "\n\0\n"  # separator of the two texts of a pair


def reader(name: str, shape: EncoderShape, **options: Any) -> "ByteReader | TokenReader":
    """Return the reader for a model name.

    Args:
        name: ``bytes`` (an encoder from scratch), a folder saved by transformers, or
            ``hf:ID[@REVISION]``.
        shape: size of the encoder from scratch, and maximum length of a text.
        options: ``pretrained``, ``trust_remote_code`` and ``default_length`` of
            :class:`TokenReader`.

    Raises:
        ValueError: the model does not exist.
    """
    if name == "bytes":
        return ByteReader(shape)
    return token_reader(name, shape, "bytes", **options)


def token_reader(name: str, shape: EncoderShape, own: str, **options: Any) -> "TokenReader":
    """Return the reader for a model of transformers.

    Args:
        name: a folder saved by transformers, or ``hf:ID[@REVISION]``.
        shape: maximum length of a text.
        own: name of the task's own model, for the error.
        options: ``pretrained``, ``trust_remote_code`` and ``default_length`` of
            :class:`TokenReader`.

    Raises:
        ValueError: the model does not exist.
    """
    if not is_transformers(name):
        raise ValueError(
            f"task.model {name!r} is not a folder saved by transformers; give one, {own}, or hf:ID"
        )
    return TokenReader(name, length=shape.length, **options)


class ByteReader:
    """Converts texts to bytes, and builds and calls an encoder from scratch.

    ``notes``: lines for the log.
    """

    tokenizer = None

    def __init__(self, shape: EncoderShape) -> None:
        shape.check_heads()
        self.shape = shape
        self.length = shape.length
        self.notes = list[str]()
        self.about = list[str]()

    def encode(self, text: str, second: str | None = None) -> Tensor:
        """Encode a text or a pair of texts, cut to the maximum length."""
        return as_bytes(text if second is None else text + _BETWEEN + second, self.length)

    def encode_words(self, words: Sequence[str]) -> tuple[Tensor, list[int], int]:
        """Return encoded words, the starts of words that are not cut, and the length."""
        text = b""
        starts = list[int]()
        for word in words:
            if len(text) < self.length:
                starts.append(len(text))
            text += word.encode() + b" "
        tokens = torch.tensor(list(text[: self.length]) or [32])
        return tokens, starts, len(tokens)

    def collate(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        return {"text": padded(list(samples))}

    def model(self, classes: Sequence[str], *, words: bool = False) -> nn.Module:
        """Return a new model with an output per class, for each text.

        Args:
            classes: names of the outputs.
            words: the outputs are for each position.
        """
        kind = ByteEncoder if words else Encoder
        return kind(len(classes), self.shape)

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["text"])  # type: ignore[no-any-return]

    def decode(self, sample: Any, start: int = 0, stop: int | None = None) -> str:
        return bytes(sample.tolist()[start:stop]).decode(errors="replace")

    def save(self, model: nn.Module, folder: Path) -> None:
        pass


class TokenReader:
    """The same with tokens of a transformers model.

    Args:
        name: a folder saved by transformers, or ``hf:ID[@REVISION]``.
        length: maximum tokens of a text; longer texts are cut.
        pretrained: load the weights; False: only the configuration.
        trust_remote_code: run Python code stored with the weights.
        default_length: whether ``length`` is a default, which may be more than the model has.

    Raises:
        ValueError: it has no fast tokenizer, which maps tokens to words.
    """

    options: Mapping[str, bool] = {}  # of each forward of the model

    def __init__(
        self,
        name: str,
        *,
        length: int,
        pretrained: bool = True,
        trust_remote_code: bool = False,
        default_length: bool = False,
    ) -> None:
        self.name = name
        self.length = length
        self.notes = list[str]()
        self.about = list[str]()  # lines for the log that do not depend on the weights
        self._pretrained = pretrained
        self._trust_remote_code = trust_remote_code
        self._use(
            tokenizer_of(name, trust_remote_code=trust_remote_code),
            config_of(name, trust_remote_code=trust_remote_code),
        )
        if default_length:
            self.length, self.about = shorter_length(
                name, length, key="length", trust_remote_code=trust_remote_code
            )

    def _use(self, tokenizer: Any, config: Any) -> None:
        """Use this tokenizer, and the padding token of the model's configuration."""
        padding = padding_token(config, tokenizer)
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

    def learn(self, texts: Callable[[], Iterable[str]]) -> None:
        """Do nothing: the tokens are known."""

    def encode(self, text: str, second: str | None = None) -> dict[str, list[int]]:
        return self._encoded(text, second)[0]

    def encode_words(self, words: Sequence[str]) -> tuple[dict[str, list[int]], list[int], int]:
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
        longest = max(len(sample["input_ids"]) for sample in samples)
        batch = {}
        for key in samples[0]:
            # Other inputs, such as the types of tokens, are padded with 0.
            padding = self.padding if key == "input_ids" else 0
            rows = [sample[key] + [padding] * (longest - len(sample[key])) for sample in samples]
            batch[key] = torch.tensor(rows)
        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
        batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
        return batch

    def model(self, classes: Sequence[str] | None, *, words: bool = False) -> nn.Module:
        """Return a model as ByteReader does; without classes, its outputs are hidden states."""
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

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**_inputs(batch), **self.options).logits  # type: ignore[no-any-return]

    def decode(self, sample: Any, start: int = 0, stop: int | None = None) -> str:
        return str(self.tokenizer.decode(sample["input_ids"][start:stop]))

    def save(self, model: nn.Module, folder: Path) -> None:
        model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        self.tokenizer.save_pretrained(folder)


def _inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs of an encoder among the tensors of a batch."""
    return {key: batch[key] for key in _INPUTS if key in batch}
