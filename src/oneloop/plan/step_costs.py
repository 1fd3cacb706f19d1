"""The step of ``train.py`` under a ledger: on fake tensors, which have sizes but no memory, or on
real ones.

>>> costs = StepCosts(job, run, FakeTensorMode(allow_non_fake_inputs=True))
>>> costs.step().peak                             # bytes
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
import torch.nn.parallel.distributed as ddp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset

from oneloop.basics.tensors import local, reshard
from oneloop.data.batch_layout import BatchLayout
from oneloop.data.seeded_samples import Batches, SeededSamples
from oneloop.data.step_batches import Batch, Group, to_device
from oneloop.ema import EMA
from oneloop.evaluation import evaluate
from oneloop.job.build import Job
from oneloop.job.find_micro_batch import by_size
from oneloop.job.preflight import Preflight, metric_names
from oneloop.launch.processes import Run
from oneloop.machine.layout_checks import unit_groups
from oneloop.measure.meter import Meter
from oneloop.optim.bad_step_guard import Guard
from oneloop.plan.ledger import Collective, Ledger, module_names
from oneloop.run.gradients import Gradients
from oneloop.tasks.whole_batch import is_whole_batch
from oneloop.train import accept, accumulate, update

_WARM = 2  # steps before the measured ones: then the optimizer has its state, and DDP its buckets
SAMPLED = 256  # samples of unknown size that are loaded to find the largest


class Costs(NamedTuple):
    """What a step takes, or two micro-batches of the evaluation."""

    peak: int  # bytes
    # bytes at the peak by the owner of a tensor, else by the stage that allocated it
    kinds: dict[str, int]
    stage: str
    module: str
    operator: str
    collectives: list[tuple[Collective, int]]  # with the number of calls
    operations: dict[str, float]  # floating-point operations by stage


class StepCosts:
    """The parts of a run, built as ``train`` builds them, and its step on the largest samples of
    the data set.

    A step has at most two micro-batches, of which the first one counts for all others; with
    ``batch.grain`` it has all of them, since the sums in its tree need memory. Without ``mode``,
    tensors are real, and all ranks take part."""

    def __init__(self, job: Job, run: Run, mode: FakeTensorMode | None = None) -> None:
        layout, self._repeats = job.layout, 1
        if layout.accumulate > 2 and not job.exact and not is_whole_batch(job.task):
            self._repeats = layout.accumulate - 1
            job = replace(
                job, layout=BatchLayout(2 * run.ranks * layout.each, run.ranks, layout.each)
            )
        self.job, self.run, self._mode, self.ledger = job, run, mode, Ledger()
        self._laps: list[tuple[Counter[Collective], Counter[str]]] = []
        self.values = _RealValues(self.ledger)
        run.accelerator.gradient_accumulation_steps = job.layout.accumulate
        self._inputs = self._loaded(job, job.layout.each, job.layout.accumulate)
        with self._working():
            with self.ledger.stage("gradients"):  # DDP's buckets
                self.model = self._prepared()
            self._see(
                [local(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())]
            )
            self._parameters = [
                parameter for parameter in self.model.parameters() if parameter.requires_grad
            ]
            self.optimizer = job.make_optimizer(self.model)
            self.emas = [EMA(self.model, optimizer=self.optimizer, **ema) for ema in job.emas]
            with torch.no_grad():
                names = metric_names(job.task.loss(self.model, {**self._inputs[0][0]})[1])
            reshard(self.model)
            self._gradients = Gradients(
                job, run, self.model, self._parameters, Preflight(metrics=names)
            )
        about: dict[str, Any] = (
            {"leaf": job.layout.leaf, "leaves": job.layout.accumulate} if job.exact else {}
        )
        with self.ledger:  # it computes real indices
            self._meter = Meter(run.accelerator, self._parameters, metrics=names, **about)
        on_device = mode is None or all(group.get("fused") for group in self.optimizer.param_groups)
        # else the guard reads the window's value
        policy = job.policy if on_device else replace(job.policy, sigma=0.0)
        how: dict[str, Any] = {
            "device": run.device,
            "scaler": run.accelerator.scaler,
            "policy": policy,
        }
        self._guard = Guard(self.optimizer, **how, total=self._gradients.total)
        for number in range(_WARM):
            self._run_step()
            if mode is not None and not number and isinstance(self.model, DistributedDataParallel):
                with self._working(), self.ledger.stage("gradients"):
                    self.model.reducer._rebuild_buckets()  # else the forward would, as activations

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self._mode or nullcontext(), self.values if self._mode else nullcontext(), self.ledger:
            yield

    def _prepared(self) -> nn.Module:
        """Return the model as :meth:`Run.prepare` does; in fake mode its parameters need no
        memory."""
        job, run = self.job, self.run
        prepare = partial(run.prepare, blocks=job.built.blocks)
        if self._mode is None:
            return prepare(job.model)
        if run.sharded:
            with _disable_current_modes():
                model = prepare(job.model)
            _empty(model, self._mode)
            return model
        _empty(job.model, self._mode)
        # accelerate moves it to the device: torch cannot
        vars(job.model)["to"] = lambda *_, **__: job.model
        names = ("_verify_param_shape_across_processes", "_sync_module_states")
        skipped: Any = dict.fromkeys(names, lambda *_, **__: None)
        with patch.multiple(ddp, **skipped):
            model = prepare(job.model)
        del vars(job.model)["to"]
        return model

    def _loaded(self, job: Job, micro: int, number: int) -> list[tuple[Batch, float]]:
        """Return micro-batches of the largest samples, with their weights."""
        largest, samples = by_size(job, SAMPLED), SeededSamples(job.train_set, seed=job.recipe.seed)
        places = [(0, largest[position % len(largest)]) for position in range(micro * number)]
        load = Batches(samples, job.collate)
        batches = [load[places[start : start + micro]] for start in range(0, micro * number, micro)]
        if self._mode is None:  # fake tensors stay on the CPU, as the fake model does
            batches = [(to_device(batch, self.run.device), weight) for batch, weight in batches]
        self._see(batch for batch, _ in batches)
        return batches

    def _outside(self, make: Callable[..., Any], *given: Any) -> Any:
        """Call a function that reads values, and count the tensors that it returns."""
        with _disable_current_modes():
            made = make(*given)
        self._see([made])
        return made

    def _see(self, made: Iterable[Any]) -> None:
        with self.ledger.stage("inputs"):
            for tensor in tree_leaves([*made]):
                if isinstance(tensor, Tensor):
                    self.ledger.see(tensor.untyped_storage())

    def step(self) -> Costs:
        """Run one step three times, with all that a log step measures: find the peak, look at it,
        find its module."""
        return self._measured(self._run_step)

    def _measured(self, run: Callable[[], None]) -> Costs:
        found: dict[str, Any] = {}

        def look(ledger: Ledger) -> None:
            kinds = ledger.classify(self._owners())
            found.update(
                peak=ledger.size, kinds=kinds, stage=ledger.now(), operator=ledger.operator
            )

        with self.ledger.looking():
            run()
        event = self.ledger.peak_event
        with self.ledger.looking(event, look):
            run()
        laps, self._laps = self._laps, []
        entered = [""]
        with (
            module_names(self.model, entered),
            self.ledger.looking(event, lambda _: found.update(module=entered[-1])),
        ):
            run()  # apart from the second time, since hooks keep tensors alive
        repeats = [self._repeats] + [1] * (len(laps) - 1)
        calls, operations = Counter[Collective](), Counter[str]()
        for (lap_calls, lap_operations), times in zip(laps, repeats, strict=True):
            calls.update({call: number * times for call, number in lap_calls.items()})
            operations.update({stage: number * times for stage, number in lap_operations.items()})
        return Costs(**found, collectives=sorted(calls.items()), operations=dict(operations))

    def _run_step(self) -> None:
        job, ranks, guard = self.job, self.run.ranks, self._guard
        self._laps = []
        weights = [weight for _, weight in self._inputs]
        group = Group(self._each(), weights, apart=job.exact, total=sum(weights) * ranks)
        with self._working():
            with self.ledger.stage("forward"):
                sums = accumulate(
                    job, self.run, self._gradients, group, self._meter, position=0, measured=True
                )
            with self.ledger.stage("update"):
                if (step := guard.resolve()) is not None:
                    accept(step, self._meter, self.emas, job.layout.size)
                self._meter.before_update()
                how = {
                    "lr": job.recipe.optimizer.lr,
                    "clip": job.recipe.optimizer.clip,
                    "weight": group.total,
                }
                update(self._gradients, guard, sums, **how)
        self._lap()

    def _each(self) -> Iterator[Batch]:
        for number, (batch, _) in enumerate(self._inputs):
            if number:
                self.ledger.settle("gradients")
                self._lap()
            yield {**batch}

    def _lap(self) -> None:
        """End a micro-batch: count what it ran."""
        self._laps.append((Counter(self.ledger.collectives), Counter(self.ledger.operations)))
        self.ledger.collectives, self.ledger.operations = [], Counter()

    def evaluation(self) -> Costs | None:
        """Evaluate two micro-batches with the weights and with each EMA; None without an evaluation
        set."""
        job, run, recipe = self.job, self.run, self.job.recipe
        sets = [part for part in job.eval_sets.values() if len(part)]
        if not sets:
            return None
        micro = recipe.eval.micro or job.layout.each
        largest = by_size(replace(job, train_set=sets[0]), SAMPLED)
        indices = [largest[position % len(largest)] for position in range(3 * micro * run.ranks)]
        load, metrics = Batches.__getitem__, cast(Any, getattr(job.task, "metrics", None))
        loading = patch.object(Batches, "__getitem__", lambda *given: self._outside(load, *given))
        make = partial(self._outside, metrics)
        measuring: Any = (
            nullcontext() if metrics is None else patch.object(job.task, "metrics", make)
        )

        def pass_over() -> None:
            self._laps = []
            with self._working(), self.ledger.stage("evaluation"), loading, measuring:
                holding: list[Any] = [nullcontext, *(ema.swapped for ema in self.emas)]
                for held in holding:
                    interrupted = iter([False, False, True])
                    with held():
                        evaluate(
                            job.task,
                            self.model,
                            Subset(sets[0], indices),
                            accelerator=run.accelerator,
                            micro=micro,
                            dtype=job.dtype,
                            seed=recipe.seed,
                            exact=job.exact,
                            interrupted=lambda: next(interrupted),  # noqa: B023
                        )
            self._lap()

        return self._measured(pass_over)

    def _owners(self) -> dict[str, Sequence[Any]]:
        """Return the tensors of each kind."""
        model, units = (
            self.model,
            [unit for unit in self.model.modules() if isinstance(unit, FSDPModule)],
        )
        sharded = [
            one for unit in units for group in unit_groups(unit) for one in group.fsdp_params
        ]
        whole = [
            tensor
            for one in sharded
            if (tensor := getattr(one, "_unsharded_param", None)) is not None
        ]
        gathered = [*whole, *(tensor for one in sharded for tensor in one.all_gather_outputs)]
        parameters = [*model.parameters(), *(one.sharded_param for one in sharded)]
        gradients = [parameter.grad for parameter in (*parameters, *whole)]
        gradients += [one.unsharded_accumulated_grad for one in sharded]
        emas = [tensor for ema in self.emas for tensor in ema.tensors().values()]
        owners: dict[str, Sequence[Any]] = {
            "gathered parameters": gathered,
            "parameters": parameters,
        }
        owners |= {
            "EMA": emas,
            "optimizer": tree_leaves([*self.optimizer.state.values()]),
            "gradients": gradients,
        }
        return owners | {
            "buffers": [*model.buffers()],
            "inputs": tree_leaves([batch for batch, _ in self._inputs]),
        }

    def owned(self) -> dict[str, int]:
        """Return the bytes of each kind between two steps."""
        return self.ledger.classify(self._owners())


class _RealValues(TorchDispatchMode):
    """In fake mode, an operation on real tensors stays real, since the task may read its result: it
    depends on the data only. So do int32 tensors, which DDP's reducer reads. A value that an
    optimizer reads is 1; ``read``: it did."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self.read = ledger, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [value for value in tree_leaves([args, kwargs]) if isinstance(value, Tensor)]
        real = not any(isinstance(value, FakeTensor) or value.is_meta for value in values)
        if not values:
            real = (kwargs or {}).get("dtype") is torch.int32
        if (
            not real
            and func is torch.ops.aten._local_scalar_dense.default
            and self._ledger.now() == "update"
        ):
            self.read = True
            return 1.0
        with cast(Any, _disable_current_modes() if real else nullcontext()):
            return func(*args, **(kwargs or {}))


def _empty(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace parameters and buffers by fake ones of the same sizes; shared ones stay shared."""
    made: dict[int, Any] = {}

    def fake(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            with _disable_current_modes(), mode:
                new = torch.empty_like(tensor, device="cpu")
            made[id(tensor)] = (
                nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            )
        return made[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = fake(tensor)
