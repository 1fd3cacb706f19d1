"""Reward models: a number for each answer, learned from pairs of a chosen and a rejected one."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.basics.wide_sums import widest
from oneloop.tasks.language.answer_rows import NEEDS
from oneloop.tasks.language.attention import logits_of, near
from oneloop.tasks.language.conversations import encoded
from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.language.models import scratch_config
from oneloop.tasks.language.pair_rows import METRICS, PAIRS, PairSettings, PairTask, pair_outputs
from oneloop.tasks.language.pairs import encoded_pair
from oneloop.tasks.language.sequences import HEAD, Sample, Samples, filled
from oneloop.tasks.language.token_rows import Data
from oneloop.tasks.light_metrics import Means
from oneloop.tasks.model_limits import config_of, padding_token
from oneloop.tasks.rows.cached_arrays import remark
from oneloop.tasks.rows.rows import Row

_LABEL = "reward"  # name of the model's output
_SQUARE = "square"
ANSWERS = (("messages",), ("prompt", "completion"))
_SINGLE = {"messages": "messages", "completion": "completion"}
"""columns of rows with one answer, which ``oneloop predict`` reads besides pairs"""
_ANY_LENGTH = 1 << 30  # tokens


class Reward(PairTask):
    """A reward model: a larger number for the chosen than for the rejected answer of a prompt.

    The loss of a pair is that of Bradley and Terry (1952; Ouyang et al. 2022): -log s(chosen reward
    - rejected reward), where s is the logistic function. The weight of a sample is 1, its pair. The
    model is one of transformers for sequence classification, with one output: the reward is read at
    the last token of a text.

    Args:
        data: lessons (synthetic conversations with wrong answers); a file or folder of json lines,
            parquet or arrow; hf:NAME[:CONFIG][@REVISION]; or several, [{data: PATH, weight: 0.7},
            …]. See held_out.
        prompt: optional column of the prompts, texts or messages; without it, both answers are
            whole texts or conversations that begin equally.
        chosen: column of the better answers.
        rejected: column of the worse answers.
        margin: column of numbers that the loss subtracts from the difference of the rewards: how
            much better the chosen answer is (Touvron et al. 2023; empty: none).
        centering: coefficient of (chosen reward + rejected reward)^2 in the loss of a pair, which
            keeps rewards near 0 (Eisenstein et al. 2023; common: 0.01; 0: off).
    """

    # A model without an output layer over the vocabulary has no weights to tie.
    needs = NEEDS | {"margin": "data!=lessons"}
    del needs["tied"]
    adapted_for = "SEQ_CLS"
    head = "score"
    sample_weight = 1.0
    last_is_input = True

    def __init__(
        self,
        data: Data = "lessons",
        prompt: str = "prompt",
        chosen: str = "chosen",
        rejected: str = "rejected",
        margin: str = "",
        centering: float = 0.0,
        **settings: Any,
    ) -> None:
        if not 0 <= centering < math.inf:
            raise ValueError(
                f"task.centering {centering} must be a number of at least 0 (common: 0.01; 0: off)"
            )
        self.centering = centering
        columns = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": margin}
        super().__init__(
            data,
            columns | _SINGLE,
            PairSettings(fused_loss=False, router_loss="none", tied=None, **settings),
            packed=False,
            kinds=[(*kind, "margin") for kind in PAIRS],
            special={"pad_token": "<|pad|>"},
        )

        # Choose the token that fills up shorter texts.
        config = None
        if self.name is not None:
            config = config_of(self.name, trust_remote_code=self.settings.trust_remote_code)
        self.padding, note = _padding_of(self.tokenizer, config)
        self._data_notes += note

    def samples_of(self, data: str, *, labelled: bool) -> Samples:
        if labelled:
            return super().samples_of(data, labelled=True)
        # A row to predict is a pair, or has one answer.
        encode = partial(_pair_or_answer, length=self.length)
        return self._samples("data", *self.rows.tokens(data, [*PAIRS, *ANSWERS], encode))

    def bare_model(self) -> nn.Module:
        """Build or load a model with one output, which knows the padding."""
        if self.name is None:
            from transformers import AutoModelForSequenceClassification

            made = scratch_config(self.shape, entries=self.entries, begin=self.begin, end=self.end)
            made.id2label = {0: _LABEL}
            made.label2id = {_LABEL: 0}
            model: nn.Module = AutoModelForSequenceClassification.from_config(made)
        else:
            model = self.load(
                entries=self.entries,
                length=self.length,
                kind="AutoModelForSequenceClassification",
                classes=[_LABEL],
            )
        if not isinstance(getattr(model, self.head, None), nn.Linear):
            raise ValueError(
                f"task.model {self.name!r}: {type(model).__name__} has no linear layer {self.head} "
                "that reads the last token; give a causal language model, such as a Llama"
            )

        # The model finds the last token of a text by its padding token.
        config: Any = model.config
        config.pad_token_id = self.padding
        config.get_text_config().pad_token_id = self.padding
        config.architectures = [type(model).__name__]
        return model

    def adapted_model(self) -> nn.Module:
        model = super().adapted_model()
        # Adapters are in float32, and so is the head that is saved with them.
        if self.adapters is not None:
            model.get_submodule(self.head).register_forward_pre_hook(_in_dtype_of_weight)
        return model

    def model(self) -> nn.Module:
        model = super().model()
        if not self._masked:
            self._check_causal(model)
        return model

    def _check_causal(self, model: nn.Module) -> None:
        """Raise ValueError if padding after a text changes its reward."""
        parameter = next(model.parameters())
        if parameter.device.type == "meta":
            return
        text = [token for token in range(9) if token != self.padding][:8]
        tokens = torch.tensor([text], device=parameter.device)
        padded = F.pad(tokens, (0, 8), value=self.padding)
        tolerance = 1e-3 if parameter.dtype.itemsize > 2 else 0.05
        if not near(logits_of(model, padded), logits_of(model, tokens), tolerance):
            raise ValueError(
                f"task.model {self.name!r}: padding after a text changes its reward, so that "
                f"{type(model).__name__} is not causal; give a causal language model"
            )

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Return ``input``, (samples, 2 or 1, tokens), filled up on the right, and ``margin``."""
        sides = 2 if len(samples[0].documents[1]) else 1
        texts = []
        for sample in samples:
            texts += [token_ids(side) for side in sample.documents[:sides]]
        inputs = filled(texts, self.padding)
        bits = np.array([sample.number for sample in samples], np.int32)
        return {
            "input": inputs.view(len(samples), sides, -1),
            "margin": torch.from_numpy(bits.view(np.float32)),
            "padding": torch.tensor(1 - sum(map(len, texts)) / inputs.numel()),
        }

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["input"])))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        # Both answers of all pairs in one forward. Of a single answer, both rewards are its own.
        tokens = batch["input"]
        logits = model(**self._model_inputs({"input": tokens.flatten(0, 1)})).logits
        rewards = logits.to(torch.promote_types(logits.dtype, torch.float32))
        rewards = rewards.view(tokens.shape[:2])
        chosen = rewards[:, 0]
        rejected = rewards[:, -1]

        apart = chosen - rejected
        each = -F.logsigmoid(apart - batch["margin"].to(apart.dtype))
        if self.centering:
            each = each + self.centering * (chosen + rejected) ** 2
        values = {
            "reward_accuracy": (torch.sign(apart.detach()) + 1) / 2,  # 0.5 if both are equal
            "reward_margin": apart,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        mask = torch.ones_like(each, dtype=torch.bool)
        outputs = pair_outputs(batch, values, each, mask, training=model.training)
        return each.sum(), outputs

    def metrics(self) -> "RewardSums":  # type: ignore[override]
        return RewardSums()

    def predicted(
        self, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> dict[str, list[Any]]:
        """Return both rewards of each pair, or the reward of each answer."""
        if batch["input"].shape[1] == 1:
            return {"reward": outputs["chosen_reward"].tolist()}
        names = ("chosen_reward", "rejected_reward", "reward_margin")
        return {name: outputs[name].tolist() for name in names}


class RewardSums(Means):
    """Means of the metrics of pairs; mean and (population) standard deviation of all rewards."""

    def __init__(self) -> None:
        super().__init__({**METRICS, "reward_mean": None, "reward_std": None})
        self.names = [*METRICS, _SQUARE]

    def update(self, values: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        chosen, weight = values["chosen_reward"]
        rejected, _ = values["rejected_reward"]
        square = (widest(chosen) ** 2 + widest(rejected) ** 2) / 2
        super().update({**values, _SQUARE: (square, weight)})

    def compute(self) -> dict[str, float]:
        metrics = super().compute()
        mean = (metrics["chosen_reward"] + metrics["rejected_reward"]) / 2
        variance = metrics.pop(_SQUARE) - mean**2
        return {**metrics, "reward_mean": mean, "reward_std": math.sqrt(max(variance, 0.0))}


def _pair_or_answer(
    row: Row, columns: Mapping[str, str], *, length: int, **more: Any
) -> NDArray[np.int32]:
    """Return a row as a pair, cut to ``length`` tokens; of one answer the rejected side is empty.

    The other arguments, and the error, are those of :func:`encoded_pair`.
    """
    if columns["chosen"]:
        pair = encoded_pair(row, columns, **more, length=_ANY_LENGTH)
        sides = np.split(pair[HEAD:], [pair[0]])
    else:
        pair = np.zeros(HEAD, np.int32)
        sides = [encoded(row, columns, **more), pair[:0]]
    longest = max(map(len, sides))
    if longest > length:
        limit = f"task.length ({length:,} tokens)"
        remark(f"are longer than {limit}: only the beginnings have rewards", f"{longest:,} tokens")
    chosen, rejected = (side[:length] for side in sides)
    head = np.array([len(chosen), pair[1]], np.int32)
    return np.concatenate([head, chosen, rejected])


def _padding_of(tokenizer: Any, config: Any) -> tuple[int, list[str]]:
    """Return a padding token, and lines for the log; make it the tokenizer's.

    A text that ends with it has the reward of the tokens before, so it should not be the end token.

    Args:
        tokenizer: of transformers.
        config: the model's configuration; None: there is none.

    Raises:
        ValueError: the tokenizer has neither a padding token nor an end token.
    """
    special = tokenizer.added_tokens_decoder
    known = [tokenizer.pad_token_id]
    if config is not None:
        known.insert(0, padding_token(config, tokenizer))
    known += [number for number, token in special.items() if "pad" in token.content.lower()]
    known += [tokenizer.unk_token_id, tokenizer.eos_token_id]

    # Take the first one that ends no text, else the end token.
    numbers = [number for number in known if number is not None]
    numbers.sort(key=lambda number: number == tokenizer.eos_token_id)
    if not numbers:
        raise ValueError(
            "the tokenizer has no padding token and no end token; set pad_token in "
            "tokenizer_config.json"
        )
    padding = int(numbers[0])
    if padding != tokenizer.pad_token_id and padding in special:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)
    if padding != tokenizer.eos_token_id:
        return padding, []
    line = (
        f"the padding token {tokenizer.eos_token!r} is also the end token: rewards are read at the "
        "last token before it, as in transformers"
    )
    return padding, [line]


def _in_dtype_of_weight(module: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].to(module.weight.dtype),)
