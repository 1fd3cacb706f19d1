"""Sequence-to-sequence models: translate, summarize or answer, with encoder and decoder."""

from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.tasks.language.encoder_decoder import (
    check_encoder_decoder,
    check_tokenizer,
    prepared,
    t5_from_scratch,
)
from oneloop.tasks.language.generation import generated_texts
from oneloop.tasks.language.kept_texts import references
from oneloop.tasks.language.lora_settings import LoRA
from oneloop.tasks.language.models import load_model
from oneloop.tasks.language.sequences import IGNORE
from oneloop.tasks.language.source_target import (
    Overlong,
    Pair,
    SourceTarget,
    collated_pairs,
    encoded_pair,
    texts_in,
)
from oneloop.tasks.language.text_metrics import (
    DEFAULT,
    check_text_metrics,
    text_metrics,
    update_texts,
)
from oneloop.tasks.language.token_targets import TokenTargets
from oneloop.tasks.language.tokens import ending_tokenizer, tokenizer_key
from oneloop.tasks.model_limits import check_sizes, shorter_length
from oneloop.tasks.packaged_rows import SPLITS, PackagedRows
from oneloop.tasks.rows.cache import key_of, rows_content
from oneloop.tasks.rows.cached_arrays import Ragged, ragged
from oneloop.tasks.rows.open_data import (
    Source,
    SplitBy,
    Unreadable,
    combined,
    first_columns,
    local_only,
    named_sources,
    note_skipped,
    notes_of,
    opened,
    skipped_rows,
    whole,
)

_CACHE_VERSION = 2  # increase it if the tokens of a row change
_LENGTHS = (256, 128)  # default lengths of source and target


class Seq2Seq(TokenTargets):
    """Targets from sources, such as translations or summaries, with encoder and decoder.

    The weight of a sample is its number of target tokens.

    Args:
        data: numbers (digits to English words); a file or folder of json lines, parquet, csv or
            arrow; hf:NAME[:CONFIG][@REVISION]; or several, [{data: PATH, weight: 0.7}, …].
        source: column of the sources.
        target: column of the targets.
        prefix: text before each source, such as "translate English to German: ".
        held_out: share of the rows for each of validation and test, if the data set has no such
            split.
        split_by: what is drawn for missing splits: rows, by their content, or whole row groups of
            Parquet files, without reading them.
        window: megabytes of parquet rows in memory per process.
        unreadable: stop at a row that cannot be read, or skip such rows and list them in
            environment.json.
        model: a folder saved by transformers, or hf:ID[@REVISION], with its tokenizer (null: a
            small T5 from scratch).
        pretrained: load the weights of model (false: use only its configuration).
        trust_remote_code: run Python code stored with the weights (only if you trust the author).
        layers: number of blocks of the encoder, and of the decoder.
        heads: number of attention heads.
        width: hidden size.
        dropout: dropout of a model from scratch.
        vocab: vocabulary size of the tokenizer from scratch (a BPE, trained on the training texts).
        length: maximum tokens of a source.
        target_length: maximum tokens of a target.
        overlong: cut longer texts before their end token, or drop the pair.
        label_smoothing: share of the target probability that is spread over all tokens.
        answer: maximum tokens of a generated text (null: target_length).
        beams: beams of the beam search (1: greedy).
        text_metrics: metrics of generated texts (eval.generate): exact_match, bleu, chrf, rouge1,
            rouge2, rougeL or rougeLsum.
        lora: low-rank adapters for a pretrained model; only the adapters are trained.
    """

    needs: dict[str, str] = {  # noqa: RUF012
        "held_out": "data!=numbers",
        "split_by": "data!=numbers",
        "layers": "model=null",
        "heads": "model=null",
        "width": "model=null",
        "dropout": "model=null",
        "vocab": "model=null",
    }
    writes = True
    counts_whole_texts = True
    adapted_for = "SEQ_2_SEQ_LM"
    needs_fast_tokenizer = False

    def __init__(
        self,
        data: str | list[dict[str, Any]] = "numbers",
        source: str = "source",
        target: str = "target",
        prefix: str = "",
        held_out: float = 0.05,
        window: int = 256,
        unreadable: Unreadable = "stop",
        split_by: SplitBy = "rows",
        model: str | None = None,
        pretrained: bool = True,
        trust_remote_code: bool = False,
        layers: int = 2,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        vocab: int = 512,
        length: int = 256,
        target_length: int = 128,
        overlong: Overlong = "cut",
        label_smoothing: float = 0.0,
        answer: int | None = None,
        beams: int = 1,
        text_metrics: list[str] = [*DEFAULT],  # noqa: B006
        lora: LoRA = LoRA(),
    ) -> None:
        super().__init__(
            model, pretrained=pretrained, trust_remote_code=trust_remote_code, lora=lora
        )
        check_text_metrics(text_metrics)
        self.text_metrics = text_metrics
        self.columns = {"source": source, "target": target}
        self.prefix = prefix
        self.window = window
        self.label_smoothing = label_smoothing
        self.beams = beams
        self._shape = {"layers": layers, "heads": heads, "width": width, "dropout": dropout}
        self._use_lengths(length, target_length)
        self.answer = self.lengths[1] if answer is None else answer
        self._check_numbers()

        # Choose the tokenizer; without a model, train it on the training texts.
        sources = self._sources(data, held_out, unreadable, split_by)
        if self.name is None:
            trained = [(one.parts["train"], one.columns) for one in sources]
            content = [[rows_content(rows), dict(columns)] for rows, columns in trained]
            texts = chain.from_iterable(texts_in(*one) for one in trained)
            self.tokenizer = ending_tokenizer(texts, vocab, cache_key=content)
        else:
            check_encoder_decoder(self.name, trust_remote_code=trust_remote_code)
            self.tokenizer = self.known_tokenizer()
            check_tokenizer(self.name, self.tokenizer)

        # Tokenize all splits of all sources.
        samples = []
        for one in sources:
            splits = {}
            for split, rows in one.parts.items():
                splits[split] = self._samples(one, rows, overlong)
                self._note(split, splits[split].notes)
            samples.append(splits)
        self._sets = combined(sources, samples)
        self._data_notes = [*notes_of(sources), *self._data_notes]
        self.skipped_rows = skipped_rows(sources)
        self.notes = self._data_notes

    def _use_lengths(self, length: int, target_length: int) -> None:
        """Use these lengths; a default may be more than the model's positions."""
        lengths = []
        keys = ("length", "target_length")
        for key, own, default in zip(keys, (length, target_length), _LENGTHS, strict=True):
            if self.name is not None and own == default:
                own, notes = shorter_length(
                    self.name, own, key=key, trust_remote_code=self.trust_remote_code
                )
                self._data_notes += notes
            if own < 2:
                raise ValueError(f"task.{key} {own} must be at least 2 tokens")
            lengths.append(own)
        self.lengths = (lengths[0], lengths[1])

    def _check_numbers(self) -> None:
        """Raise ValueError if a number is out of range."""
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"task.label_smoothing {self.label_smoothing} must be at least 0 and below 1 "
                "(common: 0.1)"
            )
        if self.answer < 1:
            raise ValueError(f"task.answer {self.answer} must be at least 1 token")
        if self.beams < 1:
            raise ValueError(f"task.beams {self.beams} must be at least 1 (greedy)")

    def _sources(
        self,
        data: str | list[dict[str, Any]],
        held_out: float,
        unreadable: Unreadable,
        split_by: SplitBy,
    ) -> list[Source]:
        """Open the data sets that ``task.data`` names."""
        if data == "numbers":
            columns = {"source": "source", "target": "target"}
            parts = {split: PackagedRows(data, split) for split in SPLITS}
            return [Source(data, columns, parts=parts)]
        sources = named_sources(
            data, self.columns, unreadable=unreadable, split_by=split_by, remote=False
        )
        return [opened(source, held_out=held_out, window=self.window) for source in sources]

    def _samples(
        self, source: Source, rows: Any, overlong: Overlong, *, labelled: bool = True
    ) -> SourceTarget:
        """Return the samples of the rows of one split."""
        # The cache key names all that the tokens of a row depend on.
        key: list[Any] = [_CACHE_VERSION, tokenizer_key(self.tokenizer), self.prefix]
        key += [dict(source.columns), labelled]
        encode = partial(
            encoded_pair,
            columns=source.columns,
            tokenizer=self.tokenizer,
            prefix=self.prefix,
            labelled=labelled,
        )
        skip = source.skipped is not None and source.parts.keys() != {"all"}
        texts: Ragged = ragged(
            rows, encode, made_by=key, what=f"tokenizing {source.where}", skip=skip
        )
        content = {**rows.fingerprint(), "made by": key_of(key)}
        left_out = note_skipped(source, rows, texts.skipped)
        if left_out:
            content["skipped"] = key_of(left_out)
        ends = self.tokenizer.all_special_ids
        return SourceTarget(texts, self.lengths, overlong, ends=ends, content=content)

    def samples_of(self, data: str, *, labelled: bool) -> SourceTarget:
        local_only(data)
        # A row to predict may have a target.
        choices = [self.columns]
        if not labelled:
            choices.append({**self.columns, "target": ""})
        source = first_columns(
            Source(data, self.columns), choices, partial(whole, window=self.window)
        )
        # Each row is predicted.
        return self._samples(source, source.parts["all"], "cut", labelled=labelled)

    def collate(self, samples: list[Pair]) -> dict[str, Tensor]:
        return collated_pairs(samples, padding=self.tokenizer.pad_token_id)

    def bare_model(self) -> nn.Module:
        entries = len(self.tokenizer)
        if self.name is None:
            return t5_from_scratch(self._shape, entries)
        model, notes = load_model(
            self.name,
            entries=entries,
            length=self.lengths[0],
            length_key="length",
            pretrained=self.pretrained,
            trust_remote_code=self.trust_remote_code,
            lora=None if self.adapters is None else self.adapters.settings,
            kind="AutoModelForSeq2SeqLM",
        )
        longest = max(self.lengths[1], self.answer)
        check_sizes(model, self.name, entries=entries, length=longest, key="target_length")
        self.notes = [*self._data_notes, *notes]
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

        # Half-precision logits are too coarse for the loss.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        entropy = partial(
            F.cross_entropy,
            logits.flatten(0, 1),
            target.flatten(),
            reduction="none",
            ignore_index=IGNORE,
        )
        each = entropy()
        total = each.sum()
        if self.label_smoothing:
            # As transformers' LabelSmoother (Szegedy et al. 2016): the mean over all tokens.
            total = entropy(label_smoothing=self.label_smoothing).sum()
        outputs = {"loss": each.detach().view_as(target)}
        if not torch.is_grad_enabled():
            outputs["right"] = logits.argmax(-1) == target
        if model.training:
            outputs["padding"] = batch["padding"]
        return total, outputs

    def generate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return a text for each source: the most likely one of a greedy or beam search."""
        return generated_texts(
            model,
            batch["input"],
            batch["mask"],
            count=self.answer,
            beams=self.beams,
            end=self.tokenizer.eos_token_id,
            decode=self._answer,
        )

    def generated_metrics(self) -> Any:
        return text_metrics(self.text_metrics, near_ties=self.beams == 1)

    def update_generated(self, metrics: Any, batch: dict[str, Tensor], texts: list[str]) -> None:
        update_texts(metrics, batch, texts, references(batch, self._targets(batch["target"])))

    def _targets(self, target: Tensor) -> list[str]:
        """Return the targets of a batch, decoded."""
        texts = []
        for row in target.tolist():
            texts.append(self._answer([token for token in row if token != IGNORE]))
        return texts

    def predicted(self, batch: dict[str, Tensor], outputs: dict[str, Any]) -> dict[str, list[Any]]:
        """Return each source, the text that the model wrote, and the target.

        A sample with a target also has metrics.
        """
        sources = [self._answer(row) for row in batch["input"].tolist()]
        decoded = self._targets(batch["target"])
        targets = [text or None for text in references(batch, decoded)]
        metrics = super().predicted(batch, outputs)
        return {"source": sources, "answer": outputs["texts"], "target": targets, **metrics}

    def show(self, sample: Pair, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return source and target, and what the model wrote."""
        source, target = (self._answer(tokens.tolist()) for tokens in sample[:2])
        target = sample[2] or target
        shown = {"text": source, "target": target}
        if "texts" in outputs:
            shown |= {"prompt": source, "continuation": outputs["texts"]}
        return shown

    def save(self, model: nn.Module, folder: Path) -> None:
        self.save_model(model, folder, ends=[self.tokenizer.eos_token_id])
        self.tokenizer.save_pretrained(folder)

    def _answer(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
