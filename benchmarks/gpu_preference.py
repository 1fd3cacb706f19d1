"""One line of part speed of ``gpu_day.py``: preference optimization (DPO) beside TRL's DPOTrainer.

All loops train the same model from the same weights on the same pairs: texts in a file, and one
tokenizer. Each loop compares its token ids with those of the workload. A step has the same pairs in
all loops: oneloop packs them into one row, and TRL pads both sides of all of them to the longest
one, 29 % of its tokens.

oneloop's own packing would choose the pairs of a row by their lengths, and some rows would have one
pair more than others. Here the lengths of a step are drawn again until its 8 pairs fill 97 % of its
row. The rows are 98.7 % full. Its own packing fills 98.3 % of such rows with 20,000 pairs of these
lengths, 7.95 per row. TRL's padding hardly changes: it is 28 % without this condition.

The training is the same, too. In float32 on a CPU, 8 pairs per step, the first loss of all loops is
log 2, and the losses of 40 steps differ by at most 3e-6 (in bf16 by 2e-4). The line compares the
mean losses that the loops log for their first steps: a toy fails if they differ by more than 1e-4,
and with a GPU they are reported.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import record_function

from gpu_lines import Place, Result, line
from gpu_loops import at_step, by_oneloop
from gpu_pacer import LOG_EVERY, SKIPPED, Pacer, Setting
from gpu_rivals import shared_arguments
from gpu_speed import ON_GPU, llama_1b_workload
from gpu_trace import FORWARD
from gpu_turns import OURS, STEPS, Arm, beside, slug
from gpu_workloads import Repeated, Text
from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.language.sequences import Samples
from oneloop.tasks.preference import Preference

SPECIAL = ("<pad>", "<end>", "<unknown>")  # the first words of the tokenizer
END = SPECIAL.index("<end>")
BETA = 0.1
FULL = 0.97  # share of a row that its pairs fill, at least
ROUNDS = 4
EPOCHS = 100  # of the data set of TRL: no loop reaches its end
ADAM_BETA2 = 0.95  # as in the other loops
LOSS = "first_loss"  # file of TRL's loops
NEAR = 1e-4  # of losses in float32

Pair = tuple[list[int], list[int], list[int]]
"""token ids of a prompt, and of its better and its worse answer with the end token"""


@dataclass(frozen=True)
class RandomPairs:
    """Pairs of random tokens, distributed as words are (Zipf's law), and the model they train.

    Lengths are drawn uniformly, ends included.
    """

    name: str
    text: Text  # the shape of the model
    folder: Path  # gets the texts, the tokenizer and the model's config
    batches: int  # different ones; every loop gets them in the same order, over and over
    count: int  # pairs per step
    width: int  # input tokens of the row into which oneloop packs the pairs of a step
    prompt: tuple[int, int]  # tokens
    answer: tuple[int, int]  # tokens, with the end token
    compile: str = "regional"

    unit = "pairs"
    rows = 1  # per step of oneloop

    @property
    def per_step(self) -> int:
        """Pairs per step."""
        return self.count

    @cached_property
    def pairs(self) -> list[Pair]:
        """All pairs, in the order in which they are trained."""
        random = np.random.default_rng(0)
        low, high = zip(self.prompt, self.answer, self.answer)

        # Draw the lengths of each step until its pairs fill a row. The last token of each side is
        # only a target.
        lengths: list[Any] = []
        while len(lengths) < self.batches:
            drawn = random.integers(low, high, size=(self.count, 3), endpoint=True)
            inputs = drawn.sum() + drawn[:, 0].sum() - 2 * self.count
            if FULL * self.width <= inputs <= self.width:
                lengths.append(drawn)

        # Draw the tokens.
        first = len(SPECIAL)
        found: list[Pair] = []
        for of_pair in np.concatenate(lengths).tolist():
            drawn = random.zipf(1.2, sum(of_pair))
            tokens = np.minimum(drawn - 1 + first, self.text.vocabulary - 1)
            prompt, chosen, rejected = np.split(tokens, np.cumsum(of_pair)[:-1])
            chosen[-1] = rejected[-1] = END
            found.append((prompt.tolist(), chosen.tolist(), rejected.tolist()))
        return found

    @cached_property
    def texts(self) -> list[dict[str, str]]:
        """The pairs as rows. Tokenizers append the end token."""
        rows = []
        for prompt, chosen, rejected in self.pairs:
            words = {"prompt": prompt, "chosen": chosen[:-1], "rejected": rejected[:-1]}
            rows.append({name: " ".join(map(str, tokens)) for name, tokens in words.items()})
            # Both libraries tokenize a prompt and its answer as one text.
            for side in ("chosen", "rejected"):
                rows[-1][side] = " " + rows[-1][side]
        return rows

    @property
    def data(self) -> Path:
        """Folder of the texts."""
        return self.folder / "data"

    def write(self) -> None:
        """Write the texts, the tokenizer and the model's config, but no weights."""
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        self.data.mkdir(parents=True)
        # A split without validation rows would take them from the training rows.
        for split, rows in {"train": self.texts, "validation": self.texts[:1]}.items():
            lines = [json.dumps(row) + "\n" for row in rows]
            (self.data / f"{split}.jsonl").write_text("".join(lines))
        words = [*SPECIAL, *map(str, range(len(SPECIAL), self.text.vocabulary))]
        vocabulary = {word: number for number, word in enumerate(words)}
        pad, end, unknown = SPECIAL
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=pad, eos_token=end, unk_token=unknown
        ).save_pretrained(self.folder)
        # The import of the model's class can use CUDA, which no forked process could use then.
        self.text.config().save_pretrained(self.folder)

    def check(self, found: list[Pair]) -> None:
        """Raise RuntimeError if a loop has other token ids."""
        if found != self.pairs:
            raise RuntimeError("the token ids of this loop are not those of the workload")

    def build(self, device: torch.device) -> nn.Module:
        """Return the model, with the same weights in every loop."""
        torch.manual_seed(0)
        return self.text.build(device)

    @property
    def flops_per_unit(self) -> float:
        """Floating-point operations of training on one pair; attention counts as full.

        6 N for each token of both sides, 6 N of the output layer for each token of an answer, and
        12 L d T for each token of a side of T tokens. Only training counts: not the forward of the
        reference, not padding, and not the output layer at tokens of a prompt, which have no loss.
        """
        return self._flops_of_weights + self._flops_of_attention

    @property
    def causal_flops_per_unit(self) -> float:
        """The same with causal attention: half of it."""
        return self._flops_of_weights + self._flops_of_attention / 2

    @cached_property
    def sides(self) -> np.ndarray[Any, Any]:
        """Number of tokens of both sides of each pair, (pairs, 2)."""
        return np.array([[len(one[0]) + len(answer) for answer in one[1:]] for one in self.pairs])

    @property
    def _flops_of_weights(self) -> float:
        model = self.text.build(torch.device("meta"))
        linear = [one.weight.numel() for one in model.modules() if isinstance(one, nn.Linear)]
        head = model.get_output_embeddings().weight.numel()  # type: ignore[operator, union-attr]
        tokens = self.sides.sum(1).mean()
        answers = np.mean([len(chosen) + len(rejected) for _, chosen, rejected in self.pairs])
        return float(6 * (sum(linear) - head) * tokens + 6 * head * answers)

    @property
    def _flops_of_attention(self) -> float:
        return float(12 * self.text.layers * self.text.width * (self.sides**2).sum(1).mean())

    def padding(self) -> tuple[float, float]:
        """Return the share of padding in oneloop's rows, and in TRL's batches."""
        used = self.sides.sum() - 2 * len(self.sides)
        longest = self.sides.reshape(self.batches, -1).max(1)
        ours = 1 - used / (self.batches * self.width)
        return float(ours), float(1 - self.sides.sum() / (2 * self.count * longest.sum()))


# oneloop: its task, with the pairs of each step in one row, and a model that is drawn.


class PairsInOrder(Preference):
    """oneloop's preference optimization on :class:`RandomPairs`."""

    setting: Any  # set in the process of the loop: fit() needs a class without arguments
    progress: Any = None  # set by oneloop when training begins, after its checks

    def __init__(self) -> None:
        self.workload: RandomPairs = self.setting.workload
        super().__init__(
            str(self.workload.data),
            model=str(self.workload.folder),
            pretrained=False,
            length=self.workload.width // 2,
            overlong="drop",  # no pair is longer, and check() would notice it
            beta=BETA,
            store=str(self.setting.folder / "store"),
        )
        stored = self.samples["train"]
        found = []
        for number in range(0, len(stored.starts), 2):
            chosen, rejected = stored.document(number), stored.document(number + 1)
            start = int((chosen >= 0).argmax())  # complements are tokens of the prompt
            sides = [token_ids(side).tolist() for side in (chosen, rejected)]
            found.append((sides[0][:start], sides[0][start:], sides[1][start:]))
        self.workload.check(found)

    def _samples(self, split: str, pairs: Any, content: Any) -> Samples:
        samples = super()._samples(split, pairs, content)
        if split == "train":
            # Each row has the same number of pairs: those of a step, in their order.
            count = self.workload.count
            samples.members = np.arange(len(samples.lengths))
            samples.edges = np.append(0, samples.members[count - 1 :: count] + 1)
            samples.most = 2 * count
        return samples

    def train_set(self) -> Any:
        return Repeated(self.samples["train"], range(self.workload.batches))

    def eval_sets(self) -> dict[str, Any]:
        return {}

    def bare_model(self) -> nn.Module:
        # As weights from a file, they are on the CPU until oneloop has tested the model there.
        return self.workload.build(self.setting.device).cpu()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        at_step(self.progress, model)
        with record_function(FORWARD):
            return super().loss(model, batch)


def by_preference(setting: Setting, pacer: Pacer) -> None:
    """Train with oneloop, after its pass over the reference."""
    PairsInOrder.setting = setting
    by_oneloop(
        setting,
        pacer,
        PairsInOrder,
        machine={"check_every": 0},
        recipe={"schedule": {"name": "constant"}},
    )


# TRL.


def by_dpo_trainer(setting: Setting, pacer: Pacer, *, precompute: bool = False) -> None:
    """Train with TRL's DPOTrainer.

    Args:
        setting: what is trained, and where.
        pacer: of this process.
        precompute: compute the reference's log-probabilities before training; else a second model
            computes them in each step, which is TRL's default.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Paced(TrainerCallback):
        """Call the pacer at each step, and write the first loss that the trainer logs."""

        def on_step_begin(self, *given: Any, **more: Any) -> None:
            pacer.step()

        def on_log(self, args: Any, state: Any, *given: Any, logs: Any, **more: Any) -> None:
            if state.global_step == LOG_EVERY:
                (setting.folder / LOSS).write_text(str(logs["loss"]))

    workload: Any = setting.workload
    assert isinstance(workload, RandomPairs)
    model = workload.build(setting.device)
    # TRL would load its reference from the files of the policy, in the dtype of the policy.
    reference = None if precompute else workload.build(setting.device)
    others = {
        "per_device_train_batch_size": workload.count,
        "adam_beta2": ADAM_BETA2,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
    }
    arguments = DPOConfig(
        **(shared_arguments(setting) | others),
        beta=BETA,
        loss_type=["sigmoid"],
        max_length=None,  # TRL's default cuts at 1,024 tokens; no pair is cut here
        gradient_checkpointing=False,  # TRL's default is True; oneloop uses none here
        precompute_ref_log_probs=precompute,
    )
    trainer: Any = DPOTrainer(
        model=model,
        ref_model=reference,
        args=arguments,
        train_dataset=Dataset.from_list(workload.texts),
        processing_class=AutoTokenizer.from_pretrained(workload.folder),
        callbacks=[Paced()],
    )
    columns = [trainer.train_dataset[f"{name}_ids"] for name in ("prompt", "chosen", "rejected")]
    workload.check(list(zip(*columns)))

    # Repeat the pairs now, so that TRL tokenizes them, and asks the reference, only once.
    count = len(workload.pairs)
    order = [number % count for number in range(EPOCHS * count)]
    trainer.train_dataset = trainer.train_dataset.select(order)
    trainer.train()


# Each with its usual settings: oneloop compiles the blocks of a model, TRL compiles nothing.
TRL = "DPOTrainer"
ARMS = (
    Arm(OURS, by_preference),
    Arm(TRL, by_dpo_trainer, compiled=False, ours=False),
    Arm(
        f"{TRL}, precomputed", partial(by_dpo_trainer, precompute=True), compiled=False, ours=False
    ),
)


def preference_workload(place: Place) -> RandomPairs:
    """The shape of Llama 3.2 1B, and 8 pairs per step, of about 1,300 tokens in both sides."""
    text = llama_1b_workload(place)
    assert isinstance(text, Text)
    steps = 2 if place.toy else STEPS
    if place.toy:
        sizes: dict[str, Any] = {"count": 2, "width": 56, "prompt": (4, 8), "answer": (4, 12)}
    else:
        sizes = {"count": 8, "width": 10_496, "prompt": (200, 400), "answer": (100, 600)}
    return RandomPairs(
        "preference-1b",
        replace(text, length=sizes["width"]),
        place.folder / "pairs",
        # Each phase trains on all batches once, so that all of them train on the same ones.
        batches=SKIPPED + steps,
        **sizes,
    )


@line(
    "speed",
    name="preference-1b-rivals",
    seconds=240,
    numbers=["pairs_per_second", "control", "mfu", "oneloop_padding", "oneloop_first_loss"],
    on_gpu=ON_GPU,
    packages=["trl", "datasets"],
)
def preference_1b_rivals(place: Place) -> Result:
    """Full fine-tuning on pairs. The first steps come after oneloop's pass over the reference."""
    workload: Any = preference_workload(place)
    workload.write()
    steps = workload.batches - SKIPPED
    found = beside(workload, place, steps=steps, arms=ARMS, host=False, rounds=ROUNDS)
    ours, theirs = workload.padding()
    numbers = {**found.numbers, "oneloop_padding": ours, f"{TRL}_padding": theirs}

    # Compare the losses of the first steps.
    losses = first_losses(place)
    says = f"{found.says}; mean loss of the first {LOG_EVERY} steps:"
    for name, loss in losses.items():
        numbers[f"{slug(name)}_first_loss"] = loss
        says += f" {name} {loss:.4f},"
    if place.toy:
        differ = not max(losses.values()) - min(losses.values()) <= NEAR  # also for NaN
        if differ or len(losses) < len(ARMS):
            raise RuntimeError(f"a loop failed, or trains something else: {losses}; {found.says}")
    return Result(says.rstrip(","), numbers, found.tables)


def first_losses(place: Place) -> dict[str, float]:
    """Return the mean loss of the first steps, which each loop logs; without loops that failed."""
    losses = {OURS: math.nan}
    log = place.folder / slug(OURS) / "run" / "metrics.jsonl"
    for entry in map(json.loads, log.read_text().splitlines()):
        if entry.get("step") == LOG_EVERY and "train/loss" in entry:
            losses[OURS] = entry["train/loss"]
    for arm in ARMS[1:]:
        file = place.folder / slug(arm.name) / LOSS
        if file.exists():
            losses[arm.name] = float(file.read_text())
    return losses
