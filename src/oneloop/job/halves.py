"""Compare a batch with its halves before a run: loss and gradient must be sums over samples.

Modules that draw random numbers, and BatchNorm, are in eval mode for it. If possible, the model
runs with float64 copies of its weights, so that rounding hides no difference above 1e-9.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as hooks

from oneloop.basics.seeds import reseed
from oneloop.basics.tensors import reshard
from oneloop.job.build import Job
from oneloop.job.float64 import batch_in_float64, in_float64
from oneloop.job.restore import has_drawn, random_states, restored
from oneloop.job.trial_passes import Samples, gradients_of, make_batch, projections
from oneloop.launch.processes import Run
from oneloop.machine.blocks import BATCH_STATISTICS
from oneloop.tasks.protocol_checks import Contract, theirs

_TRIES = 3  # runs to find all modules that draw: one in eval mode may run others
AGREE = 1e-3  # relative distance of the losses with the weights and with their float64 copies
_NOISY = 10.0  # a distance may be this multiple of the control's


class Limits(NamedTuple):
    """Limits of a relative distance that counts as rounding."""

    least: float
    most: float  # even if the control differs more


# The error of float64 is about 1e-13 in deep models, and the start-up log promises 1e-6.
FLOAT64 = Limits(1e-9, 1e-6)
FLOAT32 = Limits(4e-6, 1e-3)  # 32 units of float32's last place
HALF = Limits(3e-2, 0.3)


class DrawWatch:
    """Find the modules that draw random numbers: the innermost one that runs when they are drawn.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.modules: set[nn.Module] = set()
        self.elsewhere = False  # whether other code has drawn, such as the loss
        self._device = device
        self._running: list[nn.Module] = []
        self._states: list[Any] = []

    def __enter__(self) -> "DrawWatch":
        self._states = random_states(self._device)
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._look()

    def _enter(self, module: nn.Module, *_: object) -> None:
        self._look()
        self._running.append(module)

    def _leave(self, *_: object) -> None:
        self._look()
        if self._running:
            self._running.pop()

    def _look(self) -> None:
        """Record who has drawn since the last call."""
        if not has_drawn(self._states, self._device):
            return
        self._states = random_states(self._device)
        if self._running:
            self.modules.add(self._running[-1])
        else:
            self.elsewhere = True


@contextmanager
def without_draws(
    model: nn.Module, device: torch.device, forward: Callable[..., object], *, draws: bool
) -> Iterator[str]:
    """Put BatchNorm and the modules that draw random numbers into eval mode in this context.

    If that is not enough, put all modules into eval mode.

    Args:
        model: bare, or sharded by FSDP2.
        device: of the model.
        forward: runs the model in the context ``watch``, which it gets, after it has set seeds.
        draws: whether it has drawn random numbers.

    Yields:
        The mode in words, or an empty text if all modules are in their mode of training.
    """
    modes = {module: module.training for module in model.modules()}
    for module in modes:
        if isinstance(module, BATCH_STATISTICS):
            module.training = False
    try:
        for _ in range(_TRIES):
            if not draws:
                break
            watch = DrawWatch(device)
            forward(watch=watch)
            draws = bool(watch.modules) or watch.elsewhere
            for module in watch.modules:
                module.training = False
            if watch.elsewhere:
                break
        if draws:
            model.eval()
            yield "in eval mode"
        elif any(module.training is not mode for module, mode in modes.items()):
            yield "with dropout and BatchNorm in eval mode"
        else:
            yield ""
    finally:
        for module, mode in modes.items():
            module.training = mode
        reshard(model)


@dataclass(frozen=True)
class HalfSums:
    """Loss and gradients of some samples."""

    loss: float
    gradients: dict[str, tuple[float, float]]  # see :func:`trial_passes.projections`
    draws: bool = False


class Distance(NamedTuple):
    """Relative distances of a batch from the sum of its parts."""

    loss: float
    gradient: float  # the largest one of all parameters

    def exceeds(self, limit: float) -> bool:
        return max(self) > limit


def distance(whole: HalfSums, parts: Sequence[HalfSums]) -> Distance:
    """Return how far loss and gradients of a batch are from the sums of its parts."""
    losses = [part.loss for part in parts]
    loss = _relative(whole.loss, losses, math.fsum(map(abs, losses)))

    # A gradient that is 0 but for rounding (biases of keys) is compared with all the others.
    noise = 1e-4 * math.fsum(size for _, size in whole.gradients.values())
    gradient = 0.0
    for name, (value, size) in whole.gradients.items():
        found = [part.gradients.get(name, (0.0, 0.0)) for part in parts]
        sizes = math.fsum(part_size for _, part_size in found)
        summed = [part_value for part_value, _ in found]
        gradient = max(gradient, _relative(value, summed, max(size, sizes) + noise))
    return Distance(loss, gradient)


def _relative(whole: float, parts: Sequence[float], size: float) -> float:
    """Return the distance from the sum of the parts, relative to ``size``.

    It is 0 if a value is not finite.
    """
    if not all(map(math.isfinite, (whole, *parts))):
        return 0.0
    apart = abs(whole - math.fsum(parts))
    return apart / size if 0.0 < size < math.inf else apart


class Halves:
    """Compares the batch of the first samples with its halves.

    Args:
        contract: checks the task.
        job: what the recipe describes.
        run: this process.
        model: not wrapped by DDP.
        samples: at least two.
    """

    def __init__(
        self, contract: Contract, job: Job, run: Run, model: nn.Module, samples: Samples
    ) -> None:
        self._contract = contract
        self._job = job
        self._run = run
        self._model = model
        self._samples = samples
        self._wide = False  # whether the model has float64 copies of its weights

    def check(self, whole: HalfSums, limits: Limits, *, of: int) -> bool:
        """Return whether the gradient of the batch is the sum of those of its halves.

        Collective under FSDP2: call on every rank.

        Args:
            whole: of the first samples in training mode.
            limits: of the distance, unless the model can run in float64.
            of: number of these samples.

        Raises:
            BadInput: the loss of the batch is not the sum of the losses of its halves.
        """
        forward = partial(self._sums, self._samples)
        quiet = without_draws(self._model, self._run.device, forward, draws=whole.draws)
        with quiet as mode:
            if mode or of < len(self._samples):
                try:
                    whole = self._sums(self._samples)
                except torch.OutOfMemoryError:  # of more samples than a micro-batch has
                    return True
            if whole.draws:
                return True  # the samples of a half would get other random numbers
            with self._in_float64(whole, max(AGREE, limits.least)) as wide:
                if wide is not None:
                    whole, limits = wide, FLOAT64
                return self._compare(whole, limits, mode or "in training")

    @contextmanager
    def _in_float64(self, plain: HalfSums, limit: float) -> Iterator[HalfSums | None]:
        """Yield the sums of the samples in float64, or None if the model cannot run so.

        Args:
            plain: with the weights as they are.
            limit: of the relative distance of the losses.
        """
        wide: HalfSums | None = None
        with ExitStack() as stack:
            try:
                stack.enter_context(in_float64(self._model))
                self._wide = True
                wide = self._sums(self._samples)
                known = distance(plain, [wide]).loss <= limit and math.isfinite(wide.loss)
                trusted = known and wide.gradients.keys() == plain.gradients.keys()
            except Exception:  # an operation without float64, a constant in float32, no memory
                trusted = False
            if self._run.sharded:  # the passes over sharded weights are collective
                trusted = not self._run.any(not trusted)
            if not trusted:
                stack.close()
                self._wide = False
            yield wide if trusted else None
        self._wide = False

    def _compare(self, whole: HalfSums, limits: Limits, mode: str) -> bool:
        """Return whether the gradients add up. Raise BadInput if the losses do not."""
        middle = len(self._samples) // 2
        parts = [self._samples[:middle], self._samples[middle:]]
        halves = [self._sums(part) for part in parts]
        found = distance(whole, halves)
        if not self._any(found.exceeds(limits.least)):
            return True

        # The control: the same samples again, and in reverse order.
        again = self._sums(self._samples)
        repeated = distance(whole, [again])
        controls = [repeated, distance(again, [self._sums(self._samples[::-1])])]
        for part, half in zip(parts, halves, strict=True):
            controls.append(distance(half, [self._sums(part[::-1])]))
        loss, gradient = (
            max(limits.least, min(_NOISY * max(one), limits.most))
            for one in zip(*controls, strict=True)
        )

        # A model with a state of its own, which other checks report, has no such sums.
        if self._any(repeated.exceeds(limits.most)):
            return True
        if found.loss > loss:
            raise self._contract.wrong_sum(whole.loss, [half.loss for half in halves], mode)
        return not self._any(found.gradient > gradient)

    def _any(self, flag: bool) -> bool:
        """Return whether the flag is set; under FSDP2, on any rank, since each has its shard."""
        return self._run.any(flag) if self._run.sharded else flag

    def _sums(self, samples: Samples, *, watch: DrawWatch | None = None) -> HalfSums:
        """Run forward and backward over samples, with the same seeds each time.

        ``watch``: only find the modules that draw in the forward.
        """
        run = self._run
        with restored(self._model, run.device), torch.set_grad_enabled(watch is None):
            reseed(run.device, self._job.recipe.seed, 0, others=True)
            batch, _ = make_batch(self._contract, run, samples)
            if self._wide:
                batch = batch_in_float64(batch)
            before = random_states(run.device)
            with watch or nullcontext():
                loss, _ = self._contract.loss(self._model, batch)
            draws = has_drawn(before, run.device)
            found: dict[str, Any] = {}
            if watch is None:
                found = theirs(self._job.task, "loss", lambda: gradients_of(loss, self._model))
            return HalfSums(float(loss.detach()), projections(found), draws)
