"""Text inputs as tokens that are learned from the texts, with an encoder from scratch."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from oneloop.basics.progress import Working
from oneloop.basics.seeds import mixed
from oneloop.tasks.columns import number_of_text
from oneloop.tasks.rows.cache import cached_text, key_of
from oneloop.tasks.text_encoders import EncoderShape, TokenReader
from oneloop.tasks.unread_masks import leave_masks_unread

LEARNED = "bpe"  # model name of :class:`NewReader`
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


class NewReader(TokenReader):
    """Reads lower-case words as byte-pair encoding, with a new DistilBERT.

    Args:
        shape: size of the DistilBERT, and maximum tokens of a text.
        vocab: number of tokens.
        written: the tokenizer as JSON; None: :meth:`learn` makes it.
    """

    def __init__(self, shape: EncoderShape, *, vocab: int, written: str | None = None) -> None:
        self.name = LEARNED
        self.length = shape.length
        self.notes = list[str]()
        self.about = list[str]()
        self._shape = shape
        self._vocab = vocab
        self.tokenizer = None
        shape.check_heads()
        if vocab < 300 or self.length < 3:
            raise ValueError(
                f"task.vocab {vocab} must be at least 300, and task.length {self.length} at least 3"
            )
        if written is not None:
            self._wrap(written)

    def learn(self, texts: Callable[[], Iterable[str]]) -> None:
        """Learn the tokens of these texts, unless they are known; cached by the texts."""
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

        if self.tokenizer is not None:
            return

        # Number the texts, in their order, for the name in the cache.
        content = 0
        for text in texts():
            content = mixed(content, number_of_text(text))

        def learned() -> str:
            model = Tokenizer(models.BPE())
            model.normalizer = normalizers.BertNormalizer()
            model.decoder = decoders.ByteLevel()

            # A space before each word: it has the same tokens everywhere.
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
            words = [pre_tokenizers.BertPreTokenizer(), byte_level]
            model.pre_tokenizer = pre_tokenizers.Sequence(words)
            trainer = trainers.BpeTrainer(
                vocab_size=self._vocab,
                special_tokens=_SPECIAL,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            )
            with Working("learning the tokens"):
                model.train_from_iterator(texts(), trainer)
            return str(model.to_str())

        self._wrap(cached_text(f"words/{key_of(content, self._vocab)}.json", learned))

    def written(self) -> str:
        """Return the tokenizer as JSON."""
        return str(self.tokenizer.backend_tokenizer.to_str())

    def _wrap(self, written: str) -> None:
        from tokenizers import Tokenizer
        from tokenizers.processors import BertProcessing
        from transformers import PreTrainedTokenizerFast

        model: Any = Tokenizer.from_str(written)
        end = ("[SEP]", model.token_to_id("[SEP]"))
        start = ("[CLS]", model.token_to_id("[CLS]"))
        model.post_processor = BertProcessing(end, start)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=model,
            pad_token="[PAD]",
            unk_token="[UNK]",
            cls_token="[CLS]",
            sep_token="[SEP]",
            mask_token="[MASK]",
            model_max_length=self.length,
            model_input_names=["input_ids", "attention_mask"],
        )
        self._use(tokenizer, tokenizer)

    def model(self, classes: Sequence[str] | None, *, words: bool = False) -> nn.Module:
        from transformers import DistilBertConfig, DistilBertModel

        shape = self._shape
        config = DistilBertConfig(
            vocab_size=len(self.tokenizer),
            dim=shape.width,
            n_layers=shape.layers,
            n_heads=shape.heads,
            hidden_dim=4 * shape.width,
            max_position_embeddings=shape.length,
            dropout=shape.dropout,
            attention_dropout=shape.dropout,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        model = DistilBertModel(config)
        leave_masks_unread(model)
        return model  # type: ignore[no-any-return]
