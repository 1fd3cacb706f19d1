"""oneloop's order of samples in transformers' ``Trainer``, for any number of processes."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from oneloop.data.loader import check_dataset
from oneloop.data.order import checked_order

_AT_ONCE = 4096  # samples


class TrainerSampler(Sampler[int]):
    """The samples of a whole run, for ``Trainer._get_train_sampler``.

    The samples of step ``k`` are ``order[k * batch_size : (k + 1) * batch_size]``, with any number
    of processes and any accumulation. They are a function of ``k``: the sampler has no state.

    >>> class MyTrainer(Trainer):
    ...     def _get_train_sampler(self, train_dataset=None):
    ...         return TrainerSampler(
    ...             train_dataset, batch_size=64, seed=0, steps=self.args.max_steps, trainer=self
    ...         )

    Trainer takes the whole run for one epoch of full steps, and a step may cross the end of an
    epoch of the data. (With its own sampler, an epoch may end with a smaller step.) It follows:

    - Set ``max_steps=steps``. With ``num_train_epochs=1``, Trainer trains the same steps, but logs
      a wrong ``train_samples_per_second``. A second epoch is an error.
    - ``eval_strategy="epoch"`` and ``save_strategy="epoch"`` act once, at the end. Use ``"steps"``.
    - The logged ``epoch`` is the share of the run: 1 at its end.

    A resumed Trainer skips the batches that were trained, which loads no samples. It therefore
    needs a sampler that begins at sample 0. If you set ``ignore_data_skip=True``, it skips nothing:
    give the step of the checkpoint as ``start``. (``epoch`` is then logged as the share since the
    resume.)

    The random numbers of an augmentation come from the generator of the process or data worker
    that loads the sample, so that they depend on the layout and change with a resume.

    Args:
        dataset: a map-style data set; :func:`oneloop.data.order.checked_order` decides its order.
        batch_size: samples of one optimizer step on all processes: ``per_device_train_batch_size``
            x ``gradient_accumulation_steps`` x number of processes. It must stay equal in a resume.
        seed: seed of the order.
        steps: optimizer steps of the run, those before ``start`` included.
        start: first step, only with ``ignore_data_skip=True``.
        trainer: the Trainer that trains. If given, its settings are checked, now and when it reads
            the first sample.

    Raises:
        TypeError: ``dataset`` is not a map-style data set.
        ValueError: ``batch_size``, ``steps`` or ``start`` is out of range, or the Trainer would
            train other samples.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int,
        steps: int,
        start: int = 0,
        trainer: Any = None,
    ) -> None:
        check_dataset("TrainerSampler", dataset)
        if batch_size < 1 or not 0 <= start <= steps or steps < 1:
            raise ValueError(
                "TrainerSampler requires batch_size and steps of at least 1, and a start from 0 to "
                f"steps; got batch_size {batch_size}, steps {steps}, start {start}"
            )
        if trainer is not None:
            _check(trainer, batch_size, steps)
        self.order = checked_order(dataset, seed=seed, batch=batch_size)
        self.batch_size = batch_size
        self.steps = steps
        self.start = start
        self.trainer = trainer

    def __len__(self) -> int:
        # Trainer computes the steps of the run from the length, also with a start.
        return self.steps * self.batch_size

    def __iter__(self) -> Iterator[int]:
        # Trainer has loaded the checkpoint when it reads the first sample.
        if self.trainer is not None:
            ignored = self.trainer.args.ignore_data_skip
            expected = self.trainer.state.global_step if ignored else 0
            if self.start != expected:
                raise ValueError(
                    f"TrainerSampler has start {self.start}, but Trainer requires {expected} with "
                    f"ignore_data_skip={ignored}; set start={expected}"
                )

        # Many samples at once: a resumed Trainer reads all indices before its step.
        for first in range(self.start * self.batch_size, len(self), _AT_ONCE):
            _, indices = self.order[first : min(first + _AT_ONCE, len(self))]
            yield from indices.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Reject a second epoch, which would train the same steps again.

        Trainer calls this before each of its epochs.

        Args:
            epoch: number of Trainer's epoch, from 0.

        Raises:
            ValueError: ``epoch`` is not 0.
        """
        if epoch:
            raise ValueError(
                f"Trainer begins its epoch {epoch}, but the {self.steps} steps of TrainerSampler "
                "are one epoch; set max_steps to the steps of the sampler, and batch_size to the "
                "samples of one step on all processes"
            )


def _check(trainer: Any, batch_size: int, steps: int) -> None:
    """Reject settings of a Trainer with which a step or a resume would have other samples."""
    args = trainer.args
    found = trainer.get_total_train_batch_size(args)
    if found != batch_size:
        raise ValueError(
            f"TrainerSampler has batch_size {batch_size}, but a step of Trainer has {found} "
            "samples; change per_device_train_batch_size or gradient_accumulation_steps, so that "
            "their product with the number of processes is batch_size"
        )

    planned = args.max_steps if args.max_steps > 0 else args.num_train_epochs * steps
    if planned > steps:
        raise ValueError(
            f"TrainerSampler has {steps} steps, but Trainer would train {planned:g}; set "
            f"max_steps={steps}"
        )

    config = args.accelerator_config
    in_order = getattr(args, "dataloader_in_order", True)  # older versions lack it
    if config.split_batches or config.dispatch_batches or not in_order:
        raise ValueError(
            "TrainerSampler does not work with split_batches, dispatch_batches or "
            "dataloader_in_order=False, because steps would have other samples; remove them"
        )
