"""Masked language modelling, with a BERT from scratch or an encoder of transformers."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from oneloop.tasks.language.attention import check_apart, document_mask
from oneloop.tasks.language.lora_settings import LoRA
from oneloop.tasks.language.masked_tokens import MaskedTokens, Masks
from oneloop.tasks.language.models import scratch_config
from oneloop.tasks.language.raw_texts import Pack, RawTexts
from oneloop.tasks.language.sequences import IGNORE, Sample, Samples, cut_texts
from oneloop.tasks.language.tokens import MASK_SPECIAL, mask_tokenizer
from oneloop.tasks.model_limits import config_of, first_position, padding_token
from oneloop.tasks.rows.cached_arrays import Ragged
from oneloop.tasks.rows.open_data import Data
from oneloop.tasks.rows.text_files import STDLIB
from oneloop.tasks.unread_masks import leave_masks_unread


class MaskedLM(RawTexts):
    """Text in which masked tokens are predicted; the weight of a sample is their number.

    Args:
        data: stdlib (the source of Python's standard library); a file or folder of text, parquet,
            json lines, csv or arrow; hf:NAME[:CONFIG][@REVISION]; or several, [{data: PATH, weight:
            0.7}, …]. Splits come from the names of files, folders or hub splits (train, validation,
            test); see held_out.
        block: tokens per sample, with its special tokens.
        vocab: vocabulary size of a model from scratch (a byte-level BPE, trained on the training
            texts).
        share: probability that a token is predicted; at least one is in each sample.
        kept: share of the predicted tokens that the model sees unchanged.
        replaced: share of the predicted tokens that a random token replaces; a mask token replaces
            the others.
        whole_words: predict all tokens of a word, or none; share is that of the words.
        pack: concat (concatenate all texts, with separators, and cut samples of block tokens),
            packed (several texts per sample; none attends to another), or padded (one text per
            sample; the samples of a step have similar lengths). packed and padded split longer
            texts.
        model: a folder saved by transformers, or hf:ID[@REVISION], with its tokenizer (null: a BERT
            from scratch).
        dropout: dropout of embeddings, attention and residuals (of a model from scratch).
    """

    shows_likeliest = True
    ends_texts = False
    needs = dict.fromkeys(("vocab", "layers", "heads", "width", "dropout"), "model=null") | {
        "split_by": "data!=stdlib"
    }

    def __init__(
        self,
        data: Data = STDLIB,
        block: int = 128,
        vocab: int = 4096,
        share: float = 0.15,
        kept: float = 0.1,
        replaced: float = 0.1,
        whole_words: bool = False,
        pack: Pack = "concat",
        model: str | None = None,
        dropout: float = 0.0,
        **settings: Any,
    ) -> None:
        masks = Masks(share=share, kept=kept, replaced=replaced, whole_words=whole_words)
        # These settings of a language model are not those of an encoder.
        super().__init__(
            data,
            block=block,
            pack=pack,
            model=model,
            dropout=dropout,
            architecture="gpt2",
            kv_heads=None,
            mlp=None,
            tied=None,
            padded_vocab=0,
            fused_loss=False,
            router_loss="refuse",
            lora=LoRA(),
            **settings,
        )

        # Choose the tokenizer.
        if self.name is not None:
            config = _encoder_config(self.name, trust_remote_code=self.settings.trust_remote_code)
            self.tokenizer = self.known_tokenizer()
            padding = padding_token(config, self.tokenizer)
        else:
            self.tokenizer = mask_tokenizer(self._learn_bpe(vocab, *MASK_SPECIAL), self.block)
            padding = self.tokenizer.pad_token_id
        self.masked_tokens = MaskedTokens(self.tokenizer, masks, self.name)
        self._padding = self.masked_tokens.separator if padding is None else padding
        if self.block <= self.masked_tokens.around:
            raise ValueError(
                f"task.block {self.block} has no room for text next to the "
                f"{self.masked_tokens.around} special tokens; raise it"
            )

        # Tokenize, and cut or pack.
        self._tokenize(self.masked_tokens.encode)
        self.notes = self._data_notes

        # Set by ``model``: whether it takes masks of documents, and the number of a first position.
        self._takes_documents = True
        self._first_position = 0

    def _samples(self, tokens: Ragged, content: dict[str, Any], name: str) -> Samples:
        if not (tokens.values >= 0).any():
            raise ValueError(f"task.data: no text of the {name} split has a token to predict")
        if self.pack == "concat":
            self._note(name, tokens.notes)
            tokens = Ragged(tokens.values, np.array([len(tokens.values)]))

        # Cut them; masks are drawn whenever a sample is read.
        made = cut_texts(
            tokens,
            self.block,
            "split",
            special=self.masked_tokens.around,
            room=self.block if self.packed and name == "train" else 0,
            by_length=self.pack != "concat",
            content=content,
            draw=self.masked_tokens.draw,
        )
        if self.pack != "concat":
            self._note(name, made.notes)
        return made

    @property
    def entries(self) -> int:
        return self.masked_tokens.entries

    def bare_model(self) -> nn.Module:
        from transformers import AutoModelForMaskedLM

        if self.name is not None:
            return self.load(entries=self.entries, length=self.block, kind="AutoModelForMaskedLM")
        return AutoModelForMaskedLM.from_config(  # type: ignore[no-any-return]
            scratch_config(
                self.shape, entries=self.entries, padding=self._padding, architecture="bert"
            )
        )

    def model(self) -> nn.Module:
        model = self.bare_model()
        self._first_position = first_position(model)[0]
        if next(model.parameters()).device.type == "meta":
            return model

        # Run as many tokens as a sample has: attention to a window shows only in long rows.
        ordinary = self.masked_tokens.ordinary
        tokens = ordinary[torch.arange(self.block) % len(ordinary)]
        try:
            check_apart(model, tokens)
        except ValueError as error:
            if self.packed:
                raise ValueError(f"task.pack packed: {error}; use task.pack padded") from error
            self._takes_documents = False
            leave_masks_unread(model)
        return model

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Return samples as one batch.

        Args:
            samples: inputs and targets of their documents.

        Returns:
            ``input``, ``target``, ``position`` and ``document`` (its number in the row; -1 is
            padding) of each token, int64 of shape (samples, width), and the share of ``padding``.
        """
        rows = []
        for sample in samples:
            documents = []
            for number, document in enumerate(sample.documents):
                positions = torch.arange(document.shape[1])
                numbers = torch.full_like(positions, number)
                documents.append(torch.cat([document, torch.stack([positions, numbers])]))
            rows.append(torch.cat(documents, dim=1).T)
        table = pad_sequence(rows, batch_first=True, padding_value=-1)

        # All rows have the same width, unless the texts are padded.
        if self.pack == "concat" or samples[0].is_row:
            missing = self.block - table.shape[1]
            table = nn.functional.pad(table, (0, 0, 0, missing), value=-1)
        inputs, target, position, document = table.unbind(-1)
        is_padding = document < 0
        return {
            "input": inputs.masked_fill(is_padding, self._padding),
            "target": target.masked_fill(is_padding, IGNORE),
            "position": position.clamp(min=0),
            "document": document.contiguous(),
            "padding": is_padding.float().mean(),
        }

    def _model_inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        document = batch["document"]
        if not self._takes_documents:
            known = (document >= 0).long()
            return {"input_ids": batch["input"], "attention_mask": known}
        return {
            "input_ids": batch["input"],
            "attention_mask": document_mask(document),
            "position_ids": batch["position"] + self._first_position,
        }

    def show(self, sample: Sample, outputs: dict[str, Tensor]) -> dict[str, Any]:
        """Return a text with its masks, the tokens to predict, and the predicted ones."""
        inputs, target = sample.documents[0]
        places = (target != IGNORE).nonzero()
        targets = target[places].tolist()
        predictions = outputs["likeliest"].cpu()[places].tolist()
        return {
            "text": self.decode(inputs.tolist()),
            "target": " | ".join(map(self.decode, targets)),
            "prediction": " | ".join(map(self.decode, predictions)),
        }


def _encoder_config(name: str, *, trust_remote_code: bool) -> Any:
    """Return the configuration of a model. Raise ValueError if it has no head for masked tokens.

    Args:
        name: a folder saved by transformers, or ``hf:ID[@REVISION]``.
        trust_remote_code: run Python code stored with the weights.
    """
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    config = config_of(name, trust_remote_code=trust_remote_code)
    own_code = "AutoModelForMaskedLM" in (getattr(config, "auto_map", None) or {})
    if getattr(config, "is_decoder", False):
        raise ValueError(
            f"task.model {name!r} does not attend to later tokens, so it cannot predict masked "
            "ones; use an encoder (is_decoder false), or the task causal_lm"
        )
    known = own_code or type(config) in MODEL_FOR_MASKED_LM_MAPPING
    if not known or config.is_encoder_decoder:
        raise ValueError(
            f"task.model {name!r} is a {config.model_type} model; masked_lm needs an encoder with "
            "a head for masked tokens, such as BERT"
        )
    return config
