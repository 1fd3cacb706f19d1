"""Check before a run that loss and gradient of a batch are the sums of those of its samples.

Modules that draw random numbers, and BatchNorm, are in eval mode for it. If possible, the model
runs with float64 copies of its weights, so that rounding hides no difference above 1e-9.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.seeds import has_drawn, random_states, reseed
from oneloop.basics.tensors import reshard
from oneloop.job.build import Job
from oneloop.job.float64 import batch_in_float64, in_float64
from oneloop.job.restore import restored
from oneloop.job.trial_passes import Wrapped, gradients_of, projections
from oneloop.job.trial_samples import Samples, make_batch
from oneloop.launch.processes import Run
from oneloop.machine.blocks import BATCH_STATISTICS
from oneloop.task_protocol.protocol_checks import Contract, theirs

_TRIES = 3  # runs to find all modules that draw: one in eval mode may run others
AGREE = 1e-3  # relative distance of the losses with the weights and with their float64 copies
_NOISY = 10.0  # a distance may be this multiple of the control's


class Limits(NamedTuple):
    """Limits of a relative distance that counts as rounding."""

    least: float
    most: float  # even if the control differs more

    def allow(self, noise: float) -> float:
        """Return the limit, by the largest distance of a control."""
        return max(self.least, min(_NOISY * noise, self.most))


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
    changed = False
    for module in modes:
        if isinstance(module, BATCH_STATISTICS) and module.training:
            module.training = False
            changed = True
    root = model.module if isinstance(model, Wrapped) else model
    with ExitStack() as stack:
        stack.callback(_restore_modes, model, modes)
        for _ in range(_TRIES):
            if not draws:
                break
            watch = DrawWatch(device)
            forward(watch=watch)
            draws = bool(watch.modules) or watch.elsewhere
            for module in watch.modules - {root}:
                module.training = False
            if root in watch.modules:
                stack.enter_context(_forward_in_eval(root))
            changed = changed or draws
            if watch.elsewhere:
                break
        if draws:
            model.eval()
            yield "in eval mode"
        else:
            yield "with dropout and BatchNorm in eval mode" if changed else ""


def _restore_modes(model: nn.Module, modes: Mapping[nn.Module, bool]) -> None:
    for module, mode in modes.items():
        module.training = mode
    reshard(model)


@contextmanager
def _forward_in_eval(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode within its forward only: the loss may ask for its mode."""
    mode = module.training

    def switch(training: bool, *_: object) -> None:
        module.training = training

    handles = [
        module.register_forward_pre_hook(partial(switch, False)),
        module.register_forward_hook(partial(switch, mode), always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class BatchSums:
    """Loss and gradients of some samples."""

    loss: float
    gradients: dict[str, tuple[float, float]]  # see :func:`trial_passes.projections`
    draws: bool = False


class Distance(NamedTuple):
    """Relative distances of a batch from the sum of its parts."""

    loss: float
    gradient: float  # the largest one of all parameters
    name: str  # of this parameter

    def exceeds(self, limit: float) -> bool:
        return max(self.loss, self.gradient) > limit


def distance(whole: BatchSums, parts: Sequence[BatchSums]) -> Distance:
    """Return how far loss and gradients of a batch are from the sums of its parts."""
    losses = [part.loss for part in parts]
    loss = _relative(whole.loss, losses, math.fsum(map(abs, losses)))

    # A gradient that is 0 but for rounding (biases of keys) is compared with all the others.
    noise = 1e-4 * math.fsum(size for _, size in whole.gradients.values())
    gradients = [(0.0, "")]
    for name, (value, size) in whole.gradients.items():
        found = [part.gradients.get(name, (0.0, 0.0)) for part in parts]
        sizes = math.fsum(part_size for _, part_size in found)
        summed = [part_value for part_value, _ in found]
        gradients.append((_relative(value, summed, max(size, sizes) + noise), name))
    return Distance(loss, *max(gradients))


def _relative(whole: float, parts: Sequence[float], size: float) -> float:
    """Return the distance from the sum of the parts, relative to ``size``.

    It is 0 if a value is not finite.
    """
    if not all(map(math.isfinite, (whole, *parts))):
        return 0.0
    apart = abs(whole - math.fsum(parts))
    return apart / size if 0.0 < size < math.inf else apart


class SampleSums:
    """Compares the batch of the first samples with each sample alone.

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
        self._comparable = True  # whether the batch can be divided

    def check(self, whole: BatchSums, limits: Limits, *, of: int) -> str:
        """Return the name of a parameter whose gradient is not the sum of those of the samples.

        Return an empty text if there is none.

        Collective under FSDP2: call on every rank.

        Args:
            whole: of the first samples in training mode.
            limits: of the distance, unless the model can run in float64.
            of: number of these samples.

        Raises:
            BadInput: the loss of the batch is not the sum of the losses of its samples.
        """
        everything = range(len(self._samples))
        forward = partial(self._sums, everything)
        quiet = without_draws(self._model, self._run.device, forward, draws=whole.draws)
        with quiet as mode:
            if mode or of < len(self._samples):
                try:
                    whole = self._sums(everything)
                except torch.OutOfMemoryError:  # of more samples than a micro-batch has
                    return ""
            if whole.draws:
                return ""  # a sample alone would get other random numbers
            with self._in_float64(whole, max(AGREE, limits.least)) as wide:
                if wide is not None:
                    whole, limits = wide, FLOAT64
                return self._compare(whole, limits, mode or "in training")

    @contextmanager
    def _in_float64(self, plain: BatchSums, limit: float) -> Iterator[BatchSums | None]:
        """Yield the sums of the samples in float64, or None if the model cannot run so.

        Args:
            plain: with the weights as they are.
            limit: of the relative distance of the losses.
        """
        wide: BatchSums | None = None
        with ExitStack() as stack:
            try:
                stack.enter_context(in_float64(self._model))
                self._wide = True
                wide = self._sums(range(len(self._samples)))
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

    def _compare(self, whole: BatchSums, limits: Limits, mode: str) -> str:
        """Return a parameter whose gradients do not add up. Raise BadInput if the losses do not."""
        parts, sums = self._alone()
        found = distance(whole, sums)
        if not self._comparable or not self._any(found.exceeds(limits.least)):
            return ""

        # The control: the same samples again, and in reverse order.
        everything = range(len(self._samples))
        again = self._sums(everything)
        repeated = distance(whole, [again])
        controls = [repeated, distance(again, [self._sums(everything[::-1])])]
        for part, one in zip(parts, sums, strict=True):
            controls.append(distance(one, [self._sums(part[::-1])]))
        loss = limits.allow(max(control.loss for control in controls))
        gradient = limits.allow(max(control.gradient for control in controls))

        # A model that keeps state has no such sums; other checks report it.
        if self._any(repeated.exceeds(limits.most)):
            return ""
        if found.loss > loss:
            raise self._contract.wrong_sum(whole.loss, [one.loss for one in sums], mode)
        name = found.name if found.gradient > gradient else ""
        return max(self._run.gathered(name)) if self._run.sharded else name

    def _alone(self) -> tuple[list[range], list[BatchSums]]:
        """Return the parts of the batch, and their sums: each sample alone, or else the halves."""
        number = len(self._samples)
        single = [range(at, at + 1) for at in range(number)]
        try:
            return single, [self._sums(part) for part in single]
        except BadInput:  # the loss needs several samples
            halves = [range(number // 2), range(number // 2, number)]
            return halves, [self._sums(part) for part in halves]

    def _any(self, flag: bool) -> bool:
        """Return whether the flag is set; under FSDP2, on any rank, since each has its shard."""
        return self._run.any(flag) if self._run.sharded else flag

    def _sums(self, places: range, *, watch: DrawWatch | None = None) -> BatchSums:
        """Run forward and backward over the samples at these places, with the same seeds each time.

        ``watch``: only find the modules that draw in the forward.
        """
        run = self._run
        with restored(self._model, run.device), torch.set_grad_enabled(watch is None):
            reseed(run.device, self._job.recipe.seed, 0, others=True)
            batch = self._batch(places)
            before = random_states(run.device)
            with watch or nullcontext():
                loss, _ = self._contract.loss(self._model, batch)
            draws = has_drawn(before, run.device)
            found: dict[str, Any] = {}
            if watch is None:
                found = theirs(self._job.task, "loss", lambda: gradients_of(loss, self._model))
            return BatchSums(float(loss.detach()), projections(found), draws)

    def _batch(self, places: range) -> dict[str, Any]:
        """Return the batch of the samples at these places."""
        batch, _ = make_batch(self._contract, self._run, [self._samples[at] for at in places])

        # If collate draws, take the rows of the whole batch, which has other random numbers.
        if self._contract.draws:
            reseed(self._run.device, self._job.recipe.seed, 0, others=True)
            whole, _ = make_batch(self._contract, self._run, self._samples)
            for name, value in batch.items():
                batch[name] = self._rows(whole[name], value, places)
        return batch_in_float64(batch) if self._wide else batch

    def _rows(self, whole: Any, part: Any, places: range) -> Any:
        """Return what belongs to the samples at these places, of a value of the whole batch."""
        is_tensor = isinstance(part, Tensor)
        if isinstance(part, list | tuple) or (is_tensor and part.ndim):
            if (len(whole), len(part)) == (len(self._samples), len(places)):
                return whole[[*places]] if is_tensor else [whole[at] for at in places]
            self._comparable = self._comparable and is_tensor and whole.shape == part.shape
        return whole
