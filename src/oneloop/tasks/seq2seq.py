"""Sequence-to-sequence models: translate, summarize or answer, with encoder and decoder."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.basics.generation import TEXTS
from oneloop.tasks.language.encoder_decoder import (
    T5Shape,
    check_encoder_decoder,
    check_tokenizer,
    prepared,
    t5_from_scratch,
)
from oneloop.tasks.language.generation import TIES, NearTies, check_answer
from oneloop.tasks.language.language_model import cross_entropy
from oneloop.tasks.language.sequences import IGNORE, Sample, Samples, paired
from oneloop.tasks.language.source_target import (
    Overlong,
    collated_sources,
    encoded_source,
    limit_of,
    texts_in,
)
from oneloop.tasks.language.text_metrics import DEFAULT, WritesTexts, check_text_metrics
from oneloop.tasks.language.token_rows import (
    Data,
    RowSettings,
    open_sources,
    samples_of_sources,
    tokens_of_new_rows,
)
from oneloop.tasks.language.token_targets import LoadSettings, TokenTargets
from oneloop.tasks.language.tokens import ending_tokenizer
from oneloop.tasks.model_limits import check_sizes, shorter_length
from oneloop.tasks.rows.cache import rows_content
from oneloop.tasks.rows.cached_arrays import Ragged
from oneloop.tasks.rows.open_data import Source

_LENGTHS = (256, 128)  # default lengths of source and target
_SCRATCH = ("layers", "heads", "width", "dropout", "vocab")


@dataclass(frozen=True, kw_only=True)
class Seq2SeqSettings(T5Shape, LoadSettings, RowSettings):
    """A model with encoder and decoder, and how rows are read.

    Args:
        model: a folder saved by transformers, or hf:ID[@REVISION], with its tokenizer (null: a
            small T5 from scratch).
    """


class Seq2Seq(WritesTexts, TokenTargets):
    """Targets from sources, such as translations or summaries, with encoder and decoder.

    The weight of a sample is its number of target tokens.

    Args:
        data: numbers (digits to English words); a file or folder of json lines, parquet, csv or
            arrow; hf:NAME[:CONFIG][@REVISION]; or several, [{data: PATH, weight: 0.7}, …].
        source: column of the sources.
        target: column of the targets.
        prefix: text before each source, such as "translate English to German: ".
        vocab: vocabulary size of the tokenizer from scratch (a BPE, trained on the training texts).
        length: maximum tokens of a source.
        target_length: maximum tokens of a target.
        overlong: cut longer texts before their end token, or drop the pair.
        label_smoothing: share of the target probability that is spread over all tokens.
        answer: maximum tokens of a generated text (null: target_length).
        beams: beams of the beam search (1: greedy).
        text_metrics: metrics of generated texts (eval.generate): exact_match, bleu, chrf, rouge1,
            rouge2, rougeL or rougeLsum.
    """

    needs = dict.fromkeys(_SCRATCH, "model=null") | {
        "held_out": "data!=numbers",
        "split_by": "data!=numbers",
    }
    adapted_for = "SEQ_2_SEQ_LM"
    needs_fast_tokenizer = False

    def __init__(
        self,
        data: Data = "numbers",
        source: str = "source",
        target: str = "target",
        prefix: str = "",
        vocab: int = 512,
        length: int = 256,
        target_length: int = 128,
        overlong: Overlong = "cut",
        label_smoothing: float = 0.0,
        answer: int | None = None,
        beams: int = 1,
        text_metrics: list[str] = [*DEFAULT],  # noqa: B006
        **settings: Any,
    ) -> None:
        super().__init__(Seq2SeqSettings(**settings))
        check_text_metrics(text_metrics)
        self.text_metrics = text_metrics
        self.columns = {"source": source, "target": target}
        self.prefix = prefix
        self.label_smoothing = label_smoothing
        self.beams = beams
        self._use_lengths(length, target_length)
        self.answer = self.lengths[1] if answer is None else answer
        if not 0 <= label_smoothing < 1:
            raise ValueError(
                f"task.label_smoothing {label_smoothing} must be at least 0 and below 1 "
                "(common: 0.1)"
            )
        for key, value in {"answer": self.answer, "beams": beams}.items():
            if value < 1:
                raise ValueError(f"task.{key} {value} must be at least 1")

        # Choose the tokenizer; without a model, train it on the training texts.
        sources = open_sources(data, self.settings, [self.columns], {"numbers": "numbers"})
        if self.name is None:
            trained = [(one.parts["train"], one.columns) for one in sources]
            content = [[rows_content(rows), dict(columns)] for rows, columns in trained]
            texts = chain.from_iterable(texts_in(*one) for one in trained)
            self.tokenizer = ending_tokenizer(texts, vocab, cache_key=content)
        else:
            check_encoder_decoder(self.name, trust_remote_code=self.settings.trust_remote_code)
            self.tokenizer = self.known_tokenizer()
            check_tokenizer(self.name, self.tokenizer)
        self.ends = [self.tokenizer.eos_token_id]

        # Tokenize all splits of all sources.
        encoder = partial(self._encoder, overlong)
        self._use(sources, samples_of_sources(sources, encoder, self._samples))

    def _use_lengths(self, length: int, target_length: int) -> None:
        """Use these lengths; a default may be more than the model's positions."""
        lengths = []
        keys = ("length", "target_length")
        for key, size, default in zip(keys, (length, target_length), _LENGTHS, strict=True):
            if self.name is not None and size == default:
                size, notes = shorter_length(
                    self.name, size, key=key, trust_remote_code=self.settings.trust_remote_code
                )
                self._data_notes += notes
            if size < 2:
                raise ValueError(f"task.{key} {size} must be at least 2 tokens")
            lengths.append(size)
        self.lengths = (lengths[0], lengths[1])

    def _encoder(
        self, overlong: Overlong, source: Source, rows: Any, *, labelled: bool = True
    ) -> tuple[partial[Any], Any]:
        """Return what makes tokens of a row."""
        encode = partial(
            encoded_source,
            columns=dict(source.columns),
            tokenizer=self.tokenizer,
            prefix=self.prefix,
            lengths=self.lengths,
            overlong=overlong,
            labelled=labelled,
        )
        return encode, None

    def _samples(self, split: str, pairs: Ragged, content: Any) -> Samples:
        """Return the pairs of one split."""
        self._note(split, pairs.notes)
        samples = paired(
            pairs, limit_of(self.lengths), content=content, measure=lambda sizes: sizes.sum(1)
        )
        # The number before a pair says whether its target is cut.
        samples.cut = samples.tokens[samples.starts[::2] - 1] > 0
        return samples

    def samples_of(self, data: str, *, labelled: bool) -> Samples:
        # A row to predict may have a target, and each row is predicted.
        choices = [self.columns]
        if not labelled:
            choices.append({**self.columns, "target": ""})
        encoder = partial(self._encoder, "cut", labelled=labelled)
        return self._samples(
            "data", *tokens_of_new_rows(data, choices, self.settings.window, encoder)
        )

    def collate(self, samples: list[Sample]) -> dict[str, Any]:
        return collated_sources(samples, padding=self.tokenizer.pad_token_id)

    def bare_model(self) -> nn.Module:
        if self.name is None:
            return t5_from_scratch(self.settings, self.entries)
        model = self.load(
            entries=self.entries, length=self.lengths[0], kind="AutoModelForSeq2SeqLM"
        )
        longest = max(self.lengths[1], self.answer)
        check_sizes(model, self.name, entries=self.entries, length=longest, key="target_length")
        return model

    def model(self) -> nn.Module:
        model = self.adapted_model()
        # The tokens before and after the targets, as transformers shifts them.
        self._start, self._padding = prepared(model, self.name)
        return model

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        # The decoder reads the targets, shifted to the right.
        target = batch["target"]
        shifted = F.pad(target[:, :-1], (1, 0), value=self._start)
        shifted = torch.where(shifted == IGNORE, self._padding, shifted)
        logits = model(
            input_ids=batch["input"],
            attention_mask=batch["mask"],
            decoder_input_ids=shifted,
            use_cache=False,
        ).logits
        each = cross_entropy(logits, target)
        total = each.sum()
        if self.label_smoothing:
            # As transformers' LabelSmoother (Szegedy et al. 2016): the mean over all tokens.
            total = cross_entropy(logits, target, label_smoothing=self.label_smoothing).sum()
        outputs = {"loss": each.detach()}
        if not torch.is_grad_enabled():
            outputs["right"] = logits.argmax(-1) == target
        if model.training:
            outputs["padding"] = batch["padding"]
        return total, outputs

    def generate(self, model: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return a text for each source: the most likely one of a greedy or beam search.

        The model's generation_config applies, except sampling.
        """
        from transformers import LogitsProcessorList

        check_answer(self.answer, model.generation_config)

        # Only one of the two limits may be set.
        config = deepcopy(model.generation_config)
        config.max_length = None
        config.max_new_tokens = self.answer
        config.num_beams = self.beams
        config.do_sample = False
        config.num_return_sequences = 1
        config.return_dict_in_generate = False
        if config.eos_token_id is None:
            config.eos_token_id = self.tokenizer.eos_token_id

        ends = config.eos_token_id
        ties = NearTies(ends if isinstance(ends, list) else [ends])
        tokens = model.generate(
            input_ids=batch["input"],
            attention_mask=batch["mask"],
            generation_config=config,
            logits_processor=LogitsProcessorList([ties] if self.beams == 1 else []),
        )
        made = {"written": tokens, TEXTS: [self._answer(row) for row in tokens.tolist()]}
        if self.beams == 1:
            made[TIES] = ties.found
        return made

    def predicted(self, batch: dict[str, Tensor], outputs: dict[str, Any]) -> dict[str, list[Any]]:
        """Return each source, the text that the model wrote, and the target.

        A sample with a target also has metrics.
        """
        sources = [self._answer(row) for row in batch["input"].tolist()]
        targets = self._references(batch)
        metrics = super().predicted(batch, outputs)
        return {"source": sources, "answer": outputs["texts"], "target": targets, **metrics}

    def show(self, sample: Sample, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return source and target, and what the model wrote."""
        source, target = (self._answer(tokens.tolist()) for tokens in sample.documents)
        target = sample.text or target
        shown = {"text": source, "target": target}
        if "texts" in outputs:
            shown |= {"prompt": source, "continuation": outputs["texts"]}
        return shown
