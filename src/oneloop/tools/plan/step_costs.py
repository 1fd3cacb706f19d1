"""The step of ``train.py`` under a ledger: on fake tensors (sizes without memory) or real ones.

>>> costs = StepCosts(job, run, FakeTensorMode(allow_non_fake_inputs=True))
>>> costs.step().peak                             # bytes
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.parallel.distributed as ddp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset

from oneloop.basics.tensors import local, reshard, sharded_units
from oneloop.data.seeded_samples import Batches
from oneloop.data.step_batches import Batch, Group, to_device
from oneloop.ema import EMA
from oneloop.evaluation import evaluate
from oneloop.job.build import Job
from oneloop.job.preflight_result import Preflight, metric_names
from oneloop.launch.processes import Run
from oneloop.loop.gradients import Gradients
from oneloop.machine.fsdp2_units import unit_groups
from oneloop.measure.meter import Meter
from oneloop.optim.bad_step_guard import Guard
from oneloop.tools.plan.fake_mode import RealValues, empty, shortened
from oneloop.tools.plan.largest_samples import SAMPLED, batches_of, by_size
from oneloop.tools.plan.ledger import Calls, Costs, Ledger, module_names
from oneloop.train import accept, accumulate, update

_WARM = 2  # steps before the measured ones: then the optimizer has its state, and DDP its buckets


class StepCosts:
    """The parts of a run, and its step on the largest samples of the data set.

    The parts are built as ``train`` builds them. A step has at most two micro-batches, of which the
    first one counts for all others; with ``batch.grain`` it has all of them, since the sums in its
    tree need memory.

    Args:
        job: What the recipe builds.
        run: The processes.
        mode: Makes all tensors fake; None: they are real, and all ranks take part.
        largest: Indices of the largest samples; None: of the first ones.
        counted: Whether the ledger counts; if not, real steps run as in a run.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        mode: FakeTensorMode | None = None,
        *,
        largest: Sequence[int] | None = None,
        counted: bool = True,
    ) -> None:
        # Two micro-batches are enough: the first one counts for all but the last.
        job, self._repeats = shortened(job, run)
        self.job = job
        self.run = run
        self._mode = mode
        self.ledger = Ledger()
        self._counted = counted
        self.values = RealValues(self.ledger)
        self._laps: list[tuple[Counter[Calls], Counter[str]]] = []
        run.accelerator.gradient_accumulation_steps = job.layout.accumulate
        self._largest = largest or by_size(job, SAMPLED)
        self._inputs = self._loaded()

        # Build the model, the optimizer and EMAs.
        with self._working():
            with self.ledger.stage("gradients"):  # DDP's buckets
                self.model = self._prepared()
            self._see(map(local, (*self.model.parameters(), *self.model.buffers())))
            self._parameters = [
                parameter for parameter in self.model.parameters() if parameter.requires_grad
            ]
            self.optimizer = job.make_optimizer(self.model)
            self.emas = [
                EMA(self.model, settings, optimizer=self.optimizer) for settings in job.emas
            ]
            names = self._metric_names()
            reshard(self.model)
            self._gradients = Gradients(
                job,
                run,
                self.model,
                self._parameters,
                Preflight(metrics=names),
            )

        # Build the meter outside of fake mode: it computes real indices.
        with self._counting():
            self._meter = Meter(
                run.accelerator,
                self._parameters,
                metrics=names,
                leaves=job.layout.leaves(run.rank) if job.exact else (),
            )

        # A guard that reads the window's value on the host cannot be planned.
        sigma = job.recipe.guard.sigma
        on_device = all(group.get("fused") for group in self.optimizer.param_groups)
        if mode is not None and not on_device:
            sigma = 0.0
        self._guard = Guard(
            self.optimizer,
            device=run.device,
            scaler=run.accelerator.scaler,
            sigma=sigma,
            total=self._gradients.total,
        )

        # Warm up: create the optimizer's state.
        for number in range(_WARM):
            self._run_step()
            if mode is not None and not number and isinstance(self.model, DistributedDataParallel):
                # Else the next forward would rebuild DDP's buckets, and count them as activations.
                with self._working(), self.ledger.stage("gradients"):
                    self.model.reducer._rebuild_buckets()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Run operations in this context under the ledger, and in fake mode if it is on."""
        with ExitStack() as stack:
            if self._mode is not None:
                stack.enter_context(self._mode)
                stack.enter_context(self.values)
            stack.enter_context(self._counting())
            yield

    def _counting(self) -> AbstractContextManager[Any]:
        return self.ledger if self._counted else nullcontext()

    def _prepared(self) -> nn.Module:
        """Return the model as :meth:`Run.prepare` does; a fake one needs no memory."""
        given = self.job.model
        prepare = partial(self.run.prepare, blocks=self.job.built.blocks)
        if self._mode is None:
            return prepare(given)

        # FSDP2 shards tensors without memory; they become fake afterwards.
        if self.run.sharded:
            with _disable_current_modes():
                model = prepare(given)
            empty(model, self._mode)
            return model

        # DDP would compare the ranks, and accelerate would move the model to the device.
        empty(given, self._mode)
        vars(given)["to"] = lambda *_, **__: given
        with (
            patch.object(ddp, "_verify_param_shape_across_processes"),
            patch.object(ddp, "_sync_module_states"),
        ):
            model = prepare(given)
        del vars(given)["to"]
        return model

    def _metric_names(self) -> tuple[str, ...]:
        batch = {**self._inputs[0][0]}
        with torch.no_grad():
            _, outputs = self.job.task.loss(self.model, batch)
        return metric_names(outputs)

    def _loaded(self) -> list[tuple[Batch, float]]:
        """Return micro-batches of the largest samples, with their weights."""
        batches = batches_of(self.job, self._largest)
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

    def seconds(self) -> float:
        """Return the time per sample of this process: the median of three steps."""
        times = []
        for _ in range(3):
            began = time.perf_counter()
            self._run_step(measured=False)
            if self.run.device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - began)
        layout = self.job.layout
        return median(times) / (layout.each * layout.accumulate)

    def step(self) -> Costs:
        """Run one step three times, with all that a log step measures.

        The first one finds the peak, the second one looks at it, the third one finds its module."""
        return self._measured(self._run_step)

    def _measured(self, run: Callable[[], None]) -> Costs:
        # Find the event at which the peak is reached.
        with self.ledger.looking():
            run()
        event = self.ledger.peak_event

        # Look at the tensors that are alive at that event.
        found: list[Costs] = []

        def look(ledger: Ledger) -> None:
            found.append(
                Costs(
                    kinds=ledger.classify(self._owners()),
                    peak=ledger.size,
                    stage=ledger.now(),
                    module="",
                    operator=ledger.operator,
                    collectives=[],
                    operations={},
                )
            )

        with self.ledger.looking(event, look):
            run()
        costs = found[-1]
        laps = self._laps
        self._laps = []

        # Find the module in a run of its own, since hooks keep tensors alive.
        modules: list[str] = []
        entered = [""]
        looking = self.ledger.looking(event, lambda _: modules.append(entered[-1]))
        with module_names(self.model, entered), looking:
            run()
        costs.module = modules[-1]

        # The first micro-batch counts for all but the last one.
        collectives = Counter[Calls]()
        operations = Counter[str]()
        times = self._repeats
        for lap_calls, lap_operations in laps:
            for call, number in lap_calls.items():
                collectives[call] += number * times
            for stage, number in lap_operations.items():
                operations[stage] += number * times
            times = 1
        for call, number in sorted(collectives.items()):
            costs.collectives.append(replace(call, calls=number, wire=call.wire * number))
        costs.operations = dict(operations)
        return costs

    def _run_step(self, *, measured: bool = True) -> None:
        # Call the functions of the page itself, on the same micro-batches every time.
        job = self.job
        guard = self._guard
        self._laps = []
        weights = [weight for _, weight in self._inputs]
        total = sum(weights) * self.run.ranks
        group = Group(self._each(), weights, apart=job.exact, total=total)
        with self._working():
            with self.ledger.stage("forward"):
                accumulate(
                    self.run,
                    self._gradients,
                    group,
                    self._meter,
                    position=0,
                    measured=measured,
                )
            with self.ledger.stage("update"):
                step = guard.resolve()
                if step is not None:
                    accept(step, self._meter, self.emas, job.layout.size)
                self._meter.before_update(measured=measured)
                update(
                    self._gradients,
                    guard,
                    lr=job.recipe.optimizer.lr,
                    clip=job.recipe.optimizer.clip,
                    weight=group.total,
                )
        self._lap()

    def _each(self) -> Iterator[Batch]:
        """Yield the micro-batches of a step; each one starts a lap."""
        for number, (batch, _) in enumerate(self._inputs):
            if number:
                self.ledger.settle("gradients")
                self._lap()
            yield {**batch}

    def _lap(self) -> None:
        """End a micro-batch: count what it ran."""
        self._laps.append((Counter(self.ledger.collectives), Counter(self.ledger.operations)))
        self.ledger.collectives = []
        self.ledger.operations = Counter()

    def evaluation(self) -> Costs | None:
        """Evaluate two micro-batches with the weights and with each EMA.

        Return None without an evaluation set."""
        job = self.job
        run = self.run
        sets = [part for part in job.eval_sets.values() if len(part)]
        if not sets:
            return None
        micro = job.recipe.eval.micro or job.layout.each
        largest = by_size(replace(job, train_set=sets[0]), SAMPLED)
        indices = np.resize(largest, 3 * micro * run.ranks).tolist()

        # Batches and the task's metrics are real, also in fake mode.
        load = Batches.__getitem__
        loading = patch.object(Batches, "__getitem__", lambda *given: self._outside(load, *given))
        metrics = getattr(job.task, "metrics", None)
        measuring: Any = nullcontext()
        if metrics is not None:
            measuring = patch.object(job.task, "metrics", partial(self._outside, metrics))

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
                            seed=job.recipe.seed,
                            exact=job.exact,
                            interrupted=lambda: next(interrupted),  # noqa: B023
                        )
            self._lap()

        return self._measured(pass_over)

    def _owners(self) -> dict[str, Sequence[Any]]:
        """Return the tensors of each kind; of two kinds, a tensor counts for the first one."""
        # FSDP2 holds whole parameters and gradients beside the model's own shards.
        gathered: list[Any] = []
        parameters: list[Any] = [*self.model.parameters()]
        accumulated: list[Any] = []
        whole = []
        for unit in sharded_units(self.model):
            for group in unit_groups(unit):
                for one in group.fsdp_params:
                    tensor = getattr(one, "_unsharded_param", None)
                    if tensor is not None:
                        whole.append(tensor)
                    gathered += one.all_gather_outputs
                    parameters.append(one.sharded_param)
                    accumulated.append(one.unsharded_accumulated_grad)
        gradients = [parameter.grad for parameter in (*parameters, *whole)]

        emas = [tensor for ema in self.emas for tensor in ema.tensors().values()]
        return {
            "gathered parameters": [*whole, *gathered],
            "parameters": parameters,
            "EMA": emas,
            "optimizer": tree_leaves([*self.optimizer.state.values()]),
            "gradients": [*gradients, *accumulated],
            "buffers": [*self.model.buffers()],
            "inputs": tree_leaves([batch for batch, _ in self._inputs]),
        }

    def owned(self) -> dict[str, int]:
        """Return the bytes of each kind between two steps."""
        return self.ledger.classify(self._owners())
