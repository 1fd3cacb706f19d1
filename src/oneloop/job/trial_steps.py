"""Full training steps of a job on its largest samples, in a separate process."""

from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch

from oneloop.basics.seeds import reseed
from oneloop.data.batch_layout import BatchLayout
from oneloop.data.seeded_samples import Batches, SeededSamples
from oneloop.data.step_batches import Batch, transferred
from oneloop.ema import EMA
from oneloop.frozen.outputs import placeholder_outputs
from oneloop.job.build import Job, build_job
from oneloop.job.two_passes import TwoPasses
from oneloop.launch.processes import start
from oneloop.machine.micro_batch import Steps
from oneloop.machine.torch_settings import float32_products
from oneloop.optim.clip import clip_, global_norm
from oneloop.recipe.schema import Recipe
from oneloop.task_protocol.whole_batch import is_whole_batch

SAMPLED = 256  # samples of unknown size that are loaded to find the largest
_CONNECT = timedelta(seconds=60)  # the time that trial processes have to connect


@dataclass(frozen=True)
class Trial:
    """Full training steps of a recipe's job, run in a separate process."""

    recipe: Recipe

    def __call__(self) -> Steps:
        # Set up the process as for the run.
        machine = self.recipe.machine
        run = start(
            device=machine.device,
            sync_each_batch=machine.sync_each_batch,
            deterministic=machine.deterministic,
            connect=_CONNECT,
        )
        float32_products(machine.matmul, benchmark=machine.cudnn_benchmark)
        if run.device.type in ("cuda", "mps"):
            # Leave room for buffers of DDP and NCCL. An Apple GPU would use disk space.
            torch.get_device_module(run.device).set_per_process_memory_fraction(0.95)

        # Build the job, and find its largest samples.
        share = self.recipe.batch.size // run.ranks  # samples of a step on this process
        job = build_job(
            self.recipe,
            ranks=run.ranks,
            sharded=run.sharded,
            device=run.device.type,
            micro=max(1, share),
        )
        model = run.prepare(job.model, blocks=job.built.blocks)
        optimizer = job.make_optimizer(model)
        emas = [EMA(model, optimizer=optimizer, **ema) for ema in job.emas]
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        largest = by_size(job)

        @placeholder_outputs()
        def steps(micro: int) -> None:
            # Two micro-batches if possible, so that gradients are kept and accumulated. A loss over
            # the whole batch keeps the inputs of all micro-batches.
            accumulate = min(2, max(1, share // micro))
            whole = is_whole_batch(job.task)
            number = share // micro if whole else accumulate
            dataset = SeededSamples(job.train_set, seed=self.recipe.seed)
            samples = dataset.good([(0, largest[n % len(largest)]) for n in range(micro)])
            collated = [job.collate(samples) for _ in range(number)]
            batches = [*transferred((batch for batch, _ in collated), run.device, pinned=False)]

            # A loss over the whole batch makes its first pass.
            loss_of = job.task.loss
            if whole:
                again = replace(job, layout=BatchLayout(self.recipe.batch.size, run.ranks, micro))
                passes = TwoPasses(
                    again, run, model, lambda _: reseed(run.device, self.recipe.seed, others=True)
                )
                loss_of = passes.loss
                batches = passes.first(batches)

            # Accumulate gradients.
            run.accelerator.gradient_accumulation_steps = accumulate
            for batch, (_, weight) in zip(batches[:accumulate], collated, strict=False):
                with run.accelerator.accumulate(model):
                    loss, _ = loss_of(model, batch)
                    run.accelerator.backward(loss / max(weight, 1.0))

            # Update weights and EMA weights.
            norm = global_norm(parameters)
            clip_(parameters, self.recipe.optimizer.clip, norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for ema in emas:
                ema.update(micro)
            if run.device.type != "cpu":
                torch.accelerator.synchronize()

        return steps


def by_size(job: Job, most: int | None = None) -> list[int]:
    """Return indices of training samples, largest first; the first 4096 if all have one size.

    Args:
        job: its training set.
        most: largest number of samples that are loaded to know their sizes.
    """
    if job.collate.sample_weight is not None:
        return list(range(min(len(job.train_set), 4096)))

    # Texts know their lengths.
    lengths = getattr(job.train_set, "lengths", None)
    if lengths is not None:
        longest: list[int] = np.argsort(-lengths, kind="stable")[:4096].tolist()
        return longest

    sizes = loaded_sizes(job, most)
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)


@placeholder_outputs()
def loaded_sizes(job: Job, most: int | None = None) -> list[int]:
    """Return the elements of each of the first ``most`` training samples, which are loaded."""
    samples = SeededSamples(job.train_set, seed=job.recipe.seed)
    number = len(job.train_set)
    sizes = []
    for index in range(min(number, most or number)):
        batch, _ = job.collate([samples[0, index]])
        sizes.append(sum(value.numel() for value in batch.values() if torch.is_tensor(value)))
    return sizes


def largest_samples(job: Job, number: int) -> list[int]:
    """Return the indices of the largest training samples; repeat them if ``number`` is larger."""
    largest = by_size(job, SAMPLED)
    indices = []
    for position in range(number):
        indices.append(largest[position % len(largest)])
    return indices


def may_be_larger(job: Job) -> bool:
    """Return whether samples may be larger than all that were loaded to find the largest.

    Without lengths, only the first ones are loaded. If these are equal, so are the others.
    """
    has_lengths = hasattr(job.train_set, "lengths")
    if has_lengths or job.collate.sample_weight is not None:
        return False
    if len(job.train_set) <= SAMPLED:
        return False
    return len(set(loaded_sizes(job, SAMPLED))) > 1


@placeholder_outputs()
def largest_batches(job: Job) -> list[tuple[Batch, float]]:
    """Return the micro-batches of a step, of the largest samples, with their weights."""
    samples = SeededSamples(job.train_set, seed=job.recipe.seed)
    load = Batches(samples, job.collate)
    micro = job.layout.each
    indices = largest_samples(job, micro * job.layout.accumulate)
    batches = []
    for first in range(0, len(indices), micro):
        places = [(0, index) for index in indices[first : first + micro]]
        batches.append(load[places])
    return batches
