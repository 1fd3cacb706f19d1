"""Causal language modelling, from scratch or with a model of transformers and its tokenizer.

From scratch a GPT-2 or Llama is trained, on bytes or on a BPE that is trained first.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from oneloop.tasks.language.completions import end_of
from oneloop.tasks.language.generation import written
from oneloop.tasks.language.models import SCRATCH
from oneloop.tasks.language.raw_texts import Pack, RawTexts
from oneloop.tasks.language.sequences import IGNORE, Samples, cut_blocks
from oneloop.tasks.language.tokens import (
    END_OF_TEXT,
    byte_tokenizer,
    encode_bytes,
    encode_text,
    token_bytes,
    tokenizer_from,
)
from oneloop.tasks.rows.cached_arrays import Ragged
from oneloop.tasks.rows.open_data import Data
from oneloop.tasks.rows.text_files import STDLIB

_MAX_NEW_TOKENS = 48
_TEMPERATURE = 0.8


class CausalLM(RawTexts):
    """Text, predicted token by token; the weight of a sample is its number of target tokens.

    Args:
        data: stdlib (the source of Python's standard library); a file or folder of text, parquet,
            json lines, csv or arrow; hf:NAME[:CONFIG][@REVISION]; or several, [{data: PATH, weight:
            0.7}, …]. Splits come from the names of files, folders or hub splits (train, validation,
            test); see held_out.
        block: tokens per sample.
        tokenizer: bytes, or bpe (byte-level, trained on the training texts).
        vocab: vocabulary size of the bpe tokenizer from scratch.
        pack: concat (concatenate all texts and cut samples of block tokens; a text attends to
            earlier texts in its sample), packed (several texts per sample; none attends to
            another), or padded (one text per sample; the samples of a step have similar lengths).
            packed and padded split longer texts.
    """

    needs = SCRATCH | {
        "tokenizer": "model=null",
        "vocab": "model=null tokenizer=bpe",
        "dropout": "model=null architecture=gpt2",
        "split_by": "data!=stdlib",
    }

    def __init__(
        self,
        data: Data = STDLIB,
        block: int = 128,
        tokenizer: Literal["bytes", "bpe"] = "bytes",
        vocab: int = 4096,
        pack: Pack = "concat",
        **settings: Any,
    ) -> None:
        super().__init__(data, block=block, pack=pack, **settings)

        # Choose the tokenizer.
        if self.name is not None:
            self.tokenizer = self.known_tokenizer()
        elif tokenizer == "bytes":
            self.tokenizer = byte_tokenizer(eos_token=END_OF_TEXT)
        else:
            learned = self._learn_bpe(vocab, END_OF_TEXT)
            self.tokenizer = tokenizer_from(learned, eos_token=END_OF_TEXT)
        self.begin = self.end = end_of(self.tokenizer)
        self._token_bytes = torch.from_numpy(token_bytes(self.tokenizer))

        # Tokenize, and cut or pack.
        by_bytes = self.name is None and tokenizer == "bytes"
        self._tokenize(encode_bytes if by_bytes else partial(encode_text, self.tokenizer))

        # All concatenated samples have ``block`` targets.
        self.sample_weight = None
        if pack == "concat":
            self.sample_weight = float(self.block)
            self._data_notes.append(
                "texts are concatenated and cut: each text attends to the earlier ones in its "
                "sample; see task.pack"
            )
        self.notes = self._data_notes

    def _samples(self, tokens: Ragged, content: dict[str, Any], name: str) -> Samples:
        if self.pack == "concat":
            self._note(name, tokens.notes)
            return cut_blocks(tokens, self.block, whole=name == "train", content=content)
        return self._spanned(tokens, content, name, "split")

    @property
    def token_bytes(self) -> Tensor | None:
        return self._token_bytes if self._token_bytes.any() else None

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        """Return samples of at most ``block + 1`` tokens as one batch; padding is no target."""
        batch = super().collate(samples)
        if self.pack == "concat":
            del batch["padding"]
        return batch

    def generate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Continue the first half of each text at temperature 0.8, with a fixed seed."""
        prompt_lengths = ((batch["target"] != IGNORE).sum(1) // 2).clamp(min=1)
        generator = torch.Generator().manual_seed(0)

        def choose(logits: Tensor) -> Tensor:
            # Draw on the CPU, with one generator for all devices; a diverged model has NaN logits.
            finite = (logits / _TEMPERATURE).nan_to_num(nan=0.0, posinf=1e9, neginf=-1e9)
            probabilities = finite.softmax(-1).cpu()
            return torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(logits.device)

        # Prompts differ in length; the answers have the same one.
        prompts = [
            row[:length]
            for row, length in zip(batch["input"], prompt_lengths.tolist(), strict=True)
        ]
        count = max(1, min(_MAX_NEW_TOKENS, self.block // 2))
        return {
            "written": written(model, prompts, count, choose=choose),
            "prompt": prompt_lengths,
        }
