"""Rare work between steps: log, evaluate, handle bad steps; at the end, weights and summary."""

import gc
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from oneloop.basics import exit_codes
from oneloop.basics.heartbeats import BEATS, ENDING, EVALUATION
from oneloop.basics.launcher import HOST
from oneloop.checkpoint.store import Keep
from oneloop.data.step_batches import in_memory
from oneloop.ema import EMA
from oneloop.evaluation import evaluate_all
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.loop.counters import RunLog
from oneloop.loop.gradients import Gradients
from oneloop.loop.steps import Steps
from oneloop.loop.training_state import State
from oneloop.machine.replicas import check_replicas
from oneloop.machine.torch_settings import release_cache
from oneloop.measure.advice import Advice
from oneloop.measure.noise_scale import meaning
from oneloop.measure.profiling import Profiling
from oneloop.measure.stragglers import Stragglers
from oneloop.optim.bad_step_guard import Step
from oneloop.optim.bad_step_policy import BadSteps, Fault, Outcome
from oneloop.optim.clip import clear_gradients
from oneloop.run.final_weights import FinalWeights, load_task_state, write_final
from oneloop.show.examples import Examples


class Upkeep:
    """What a run does between steps, while no step is pending.

    All methods are collective: call them on every rank.

    Args:
        job: what the recipe describes.
        run: this process.
        state: what a checkpoint holds.
        run_log: metrics.jsonl, the trackers and the terminal.
        gradients: measure device time and noise scale of a log step.
        steps: load the micro-batches.
        emas: EMAs of the weights.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        state: State,
        run_log: RunLog,
        gradients: Gradients,
        steps: Steps,
        emas: Sequence[EMA],
    ) -> None:
        self._job = job
        self._run = run
        self._state = state
        self._run_log = run_log
        self._gradients = gradients
        self._steps = steps
        self._emas = emas
        self.bad = BadSteps(job.policy, job.recipe.guard.patience)

        # Advise more workers only if there are cores for them. Without a GPU, training uses all
        # cores. Data in memory needs no workers.
        cores = run.cores
        if run.device.type == "cpu" or in_memory(job.train_set):
            cores = 0
        self._workers = run.workers(job.recipe.machine.workers)
        self._advice = Advice(
            workers=self._workers,
            cores=cores,
            steps=job.steps,
            eval_every=job.intervals.every["eval"],
            save_every=job.intervals.every["save"],
        )
        self._stragglers = Stragglers(run.gathered(os.environ.get(HOST) or socket.gethostname()))

    def over(self) -> bool:
        """Return whether the run has reached its last step, or stops early (``stop.patience``)."""
        if self._state.count.step >= self._job.steps:
            return True
        return 0 < self._job.recipe.stop.patience <= self._state.best.since

    def work(self, due: Collection[str], lr: float, total: float) -> bool:
        """Do what is due after a step, except saving.

        Args:
            due: names of intervals: log, check, collect, eval.
            lr: learning rate of the step.
            total: weight of the step's global batch.

        Returns:
            False if a stop was requested before the evaluation was complete.
        """
        state = self._state
        if "log" in due:
            self._log(lr, total)
        if "check" in due:
            check_replicas(state.model, state.optimizer, step=state.count.step)
        if "collect" in due:
            gc.collect()
        state.meter.clock.mark("other")
        return "eval" not in due or self.validate()

    def _log(self, lr: float, total: float) -> None:
        job = self._job
        run = self._run
        state = self._state
        gradients = self._gradients

        # Read the meter (host sync, collective): metrics, and what each rank measured alone.
        wait = self._steps.data_wait()
        device_times = gradients.device_time.read() if run.ranks > 1 else (0.0, 0.0, 0.0)
        metrics = {
            "train/lr": lr,
            **state.meter.read([wait, *device_times, float(gradients.seen.others.drew)]),
            "train/epoch": state.count.samples / len(job.train_set),
        }
        clock = state.meter.clock
        state.count.measured(clock.spent())

        # What one rank draws, all ranks seed.
        if any(drew for *_, drew in state.meter.own):
            gradients.seed_others()

        # Report a rank that slows down the others.
        found = self._stragglers.judge(
            [times for *times, _ in state.meter.own],
            step_seconds=metrics.get("speed/step_seconds", 0.0),
            now=time.monotonic(),
        )
        for _, why in found:
            self._run_log.write(self._run_log.line(event="straggler", why=why))
            run.display.say(f"{why} (oneloop doctor)")

        # Add the noise scale. Reading it is collective.
        if job.noise_scale:
            state.noise.add(*gradients.noise(total), norm=metrics["train/grad_norm"])
            metrics |= state.noise.metrics()

        # With batch.grain, log hashes of all tensors: they show where two runs differ.
        remarks = self._advice(clock.overall)
        hashes = gradients.fingerprint(state.optimizer, self._emas)
        self._run_log.log(metrics, remarks, **hashes)

    def validate(self) -> bool:
        """Evaluate on the validation sets and compare with the best evaluation so far.

        Returns:
            False if a stop was requested before the evaluation was complete.
        """
        state = self._state
        job = self._job
        sets = {name: dataset for name, dataset in job.eval_sets.items() if name != "test"}
        if not sets:
            return True

        # Evaluate. If a stop prevents it, the checkpoint records that it is still due.
        state.count.evaluation_due = True
        if not self._evaluate(sets):
            return False
        state.count.evaluation_due = False

        # Judge the result, for early stopping, the best checkpoint and the plateau schedule.
        value = state.results[job.recipe.eval.metric]
        better = state.best.update(value, state.count.step)
        state.count.evaluated(better, patience=job.rate.patience)
        return True

    def _evaluate(self, sets: Mapping[str, Any], of: int | None = None) -> bool:
        """Evaluate weights and EMA weights; False if a stop was requested first.

        ``of``: the step that the weights are from, at the end of a run; None: the current step.
        """
        job = self._job
        run = self._run
        state = self._state
        config = job.recipe.eval

        # Collect examples of predictions, except of the test set alone.
        examples = None
        if sets.keys() - {"test"}:
            examples = Examples(fixed=config.samples, worst=config.samples)

        run.be_patient()
        state.checkpoints.poll()  # an evaluation may take long: the last save must not wait for it
        contents = self._gradients.checks.contents
        unchanged = nullcontext() if contents is None else contents.unchanged("an evaluation")
        with BEATS.phase(EVALUATION), unchanged:
            metrics = evaluate_all(
                job.task,
                state.model,
                sets,
                emas=self._emas,
                examples=examples,
                accelerator=run.accelerator,
                micro=config.micro or job.layout.each,
                workers=self._workers,
                dtype=job.dtype,
                seed=job.recipe.seed,
                exact=job.exact,
                interrupted=run.stop_wanted,
                window=job.layout.size,
                pinned=job.recipe.machine.pinned,
            )
        if metrics is None:
            return False
        self._run_log.evaluated(metrics, examples, of=of)

        # Release memory that was cached for shapes that only the evaluation has.
        if config.micro not in (None, job.layout.each):
            release_cache()
        state.meter.clock.mark("evaluate")
        return True

    def best_so_far(self) -> dict[str, Any]:
        """Return the best evaluation so far, as the manifest of a checkpoint records it."""
        best = self._state.best
        return {"metric": best.metric, "value": best.value, "step": best.step, "since": best.since}

    def kept(self) -> Keep:
        """Return which older checkpoints a save keeps."""
        save = self._job.recipe.save
        return Keep(
            newest=save.keep,
            every=self._job.intervals.forever,
            best=self._state.best.step if save.best else None,
        )

    def is_best(self) -> bool:
        """Return whether this step has the best evaluation so far, and the recipe saves it."""
        return self._job.recipe.save.best and self._state.best.step == self._state.count.step

    def bad_step(self, step: Step) -> Outcome:
        """Skip a bad step, which changed nothing; or restore the last checkpoint; or end the run.

        Raises:
            Diverged: the recipe says to stop, or there is no checkpoint to rewind to.
        """
        self._steps.save_later()
        if step.fault is Fault.RESCALED:  # fp16: the next step has a smaller loss scale
            return Outcome.SKIPPED
        state = self._state
        count = state.count
        say = self._run.display.say

        # Decide, and report the samples of the step. The position is already after them.
        action, why = self.bad.answer(step.fault)
        number = count.step + 1
        after = count.position
        ids = self._job.order[after - self._job.layout.size : after][1].tolist()
        self._run_log.write(self._run_log.line(step=number, event=action, why=why, ids=ids))
        say(f"step {number}: {why}: {action}; the samples are in metrics.jsonl")

        # Complete the last good checkpoint, whatever follows.
        state.checkpoints.finish()
        if action == "stop":
            raise exit_codes.Diverged(f"step {number}: {why}; the weights are those from before it")
        if action == "skip":
            return Outcome.SKIPPED

        # Rewind to the checkpoint, but continue after the bad samples: all samples since the
        # checkpoint are left out.
        if not state.resume(state.checkpoints, "auto", say=say):
            raise exit_codes.Diverged(f"step {number}: {why}; no checkpoint to rewind to")
        count.position = after
        clear_gradients(state.model.parameters())
        self._steps.begin_afresh()

        # Evaluate now, if a stop prevented the evaluation of the checkpoint's step.
        if count.evaluation_due:
            self.validate()
        return Outcome.REWOUND

    def profiling(self, folder: Path) -> Profiling:
        """Return the profiler for the steps in the recipe; it records on rank 0, to ``folder``."""
        run = self._run
        watch = self._job.recipe.watch

        def log(metrics: dict[str, float]) -> None:
            self._run_log.write(self._run_log.line(**metrics))

        if not run.main:
            return Profiling(folder, run.device)
        return Profiling(
            folder,
            run.device,
            profile=watch.profile,
            memory=watch.memory,
            say=run.display.say,
            log=log,
        )

    def final_weights(self, *, stopped: bool) -> FinalWeights:
        """Restore the weights of the best evaluation, if the recipe asks for them.

        The last weights stay if the checkpoint of the best ones is not intact. No save may be in
        progress.

        Args:
            stopped: whether a stop ended the run, which then keeps the last weights.

        Returns:
            Which weights the model has.
        """
        BEATS.enter(ENDING)
        self._run.be_patient()
        state = self._state
        recipe = self._job.recipe
        best = state.best
        step = state.count.step
        last = FinalWeights("last", step=step, end=step)
        if recipe.save.final != "best" or not best.step or stopped:
            return last

        # Load the weights of an earlier step, if its checkpoint is intact.
        if best.step != step:
            folder = state.checkpoints.whole(best.step, "final/ gets the last weights", state.needs)
            if folder is None:
                return last
            state.take(folder)
            load_task_state(self._job.task, folder)
        return FinalWeights(
            "best",
            step=best.step,
            end=step,
            metric=recipe.eval.metric,
            value=best.value,
        )

    def last_evaluation(self, final: FinalWeights) -> bool:
        """Evaluate on the test set; on all sets if the weights of an earlier step were restored.

        So the summary describes the weights in ``final/``.

        Returns:
            False if a stop was requested before the evaluation was complete.
        """
        sets = self._job.eval_sets
        if final.step == final.end:
            sets = {name: dataset for name, dataset in sets.items() if name == "test"}
        return not sets or self._evaluate(sets, of=final.step)

    def write_final(self, folder: Path, final: FinalWeights) -> None:
        """Write the weights and the EMA weights, which ``final`` describes, for inference."""
        write_final(folder, self._state.model, self._job.task, self._emas, about=final.as_json())

    def summary(self, final: FinalWeights, *, stopped: bool) -> dict[str, Any]:
        """Return the summary (summary.json) of a run that is done or stopped."""
        job = self._job
        state = self._state
        metric = job.recipe.eval.metric
        count = state.count
        best = state.best

        # Say why the run ended.
        code = exit_codes.DONE
        if stopped:
            reason = f"stopped by {self._run.stopping.by or 'a signal to another rank'}"
            code = exit_codes.STOPPED
        elif count.step < job.steps:
            reason = f"early stop: {metric} was best at step {best.step}"
        else:
            reason = "done"

        return {
            "exit_reason": reason,
            "exit_code": code,
            **count.as_metrics(job.unit),
            "passed_over": count.passed_over,
            "seconds": count.elapsed(),
            **state.results,
            "best": {"metric": metric, "value": best.value, "step": best.step},
            "final": final.as_json(),
            "noise_scale": meaning(state.noise.value, job.layout.size, job.no_noise_scale),
            "time": self._advice.sentence(state.meter.clock.overall()),
            "goodput": count.goodput(time.time()),
        }
