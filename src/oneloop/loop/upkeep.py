"""Rare work between steps and at the end: log, evaluate, save, compare, react to bad steps."""

import gc
import os
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from oneloop.basics import exit_codes
from oneloop.basics.exit_codes import Diverged
from oneloop.basics.heartbeats import BEATS, ENDING
from oneloop.basics.launcher import HOST
from oneloop.basics.optimizer_tensors import optimizer_tensors
from oneloop.checkpoint.state_dict import model_tensors
from oneloop.checkpoint.store import Keep
from oneloop.checks.repeats import Checks
from oneloop.checks.replicas import check_replicas
from oneloop.data.skipped_rows import SKIPPED_ROWS
from oneloop.loop.evaluations import evaluate
from oneloop.loop.gradients import Gradients
from oneloop.loop.steps import StepBatches
from oneloop.loop.training_state import State
from oneloop.machine.torch_settings import scheduled_garbage
from oneloop.measure.profiling import Profiling
from oneloop.measure.stragglers import Stragglers, product_seconds
from oneloop.optim.bad_step_guard import Step
from oneloop.optim.bad_step_policy import BadSteps, Fault, Outcome
from oneloop.run.final_weights import load_task_state, write_final


class Upkeep:
    """What a run does between steps, while no step is pending; and at its end.

    All methods are collective: call them on every rank.

    Args:
        state: what a checkpoint holds.
        gradients: seeds and sums the gradients of a step.
        checks: compares what must not depend on the parallel layout.
        batches: loads the micro-batches of each step.
    """

    def __init__(
        self, state: State, gradients: Gradients, checks: Checks, batches: StepBatches
    ) -> None:
        job = state.job
        self._state = state
        self._gradients = gradients
        self._checks = checks
        self._batches = batches
        guard = job.recipe.guard
        self._bad_steps = BadSteps(guard.nonfinite, guard.patience)
        host = os.environ.get(HOST) or socket.gethostname()
        self._stragglers = Stragglers(state.run.gathered(host))

    @contextmanager
    def around_steps(self) -> Iterator[Profiling]:
        """Profile the steps that the recipe names, and let Python collect garbage only when due.

        Rank 0 records the profile. List the samples that are left out while they are read.
        """
        run = self._state.run
        folder = self._state.folder.path
        say = run.display.say
        skipped = folder / "skipped_rows" / f"rank-{run.rank}.jsonl"
        SKIPPED_ROWS.begin(skipped, say if run.main else None)
        watch = self._state.job.recipe.watch
        profiling = Profiling(
            folder / "profile",
            run.device,
            profile=watch.profile if run.main else None,
            memory=watch.memory if run.main else None,
            say=say,
        )
        with profiling, scheduled_garbage():
            yield profiling

    def over(self) -> bool:
        """Return whether the run has reached its last step, or stops early (``stop.patience``)."""
        state = self._state
        if state.count.step >= state.job.steps:
            return True
        return 0 < state.job.recipe.stop.patience <= state.best.since

    def judge(self, step: Step) -> Outcome:
        """Accept a step; react to a bad one as the recipe says: skip, rewind, or raise Diverged.

        Raises:
            Diverged: the recipe's policy is to stop, or no checkpoint exists to rewind to.
        """
        if step.fault is Fault.NONE:
            self._bad_steps.accepted()
            return Outcome.ACCEPTED

        # A bad step changed nothing.
        self._batches.save_later()
        if step.fault is Fault.RESCALED:  # fp16: the next step has a smaller loss scale
            return Outcome.SKIPPED
        state = self._state
        job = state.job
        count = state.count
        say = state.run.display.say

        # Decide, and report the samples of the step. The position is already after them.
        action, why = self._bad_steps.answer(step.fault)
        number = count.step + 1
        after = count.position
        ids = job.order[after - job.layout.size : after][1].tolist()
        state.write({"step": number, "event": action, "why": why, "ids": ids})
        say(f"step {number}: {why}: {action}; the samples are in metrics.jsonl")

        # Complete the last good checkpoint, whatever follows.
        state.checkpoints.finish()
        if action == "stop":
            raise Diverged(f"step {number}: {why}; the weights are those from before it")
        if action == "skip":
            return Outcome.SKIPPED

        # Rewind to the checkpoint, but continue after the bad samples: all samples since the
        # checkpoint are left out.
        if not state.resume(state.checkpoints, "auto", say=say):
            raise Diverged(f"step {number}: {why}; no checkpoint to rewind to")
        count.position = after
        self._gradients.clear()
        self._batches.begin_afresh()

        # Evaluate now, if a stop prevented the evaluation of the checkpoint's step.
        if count.evaluation_due:
            self.validate()
        return Outcome.REWOUND

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

    def validate(self) -> bool:
        """Evaluate on the validation sets and compare with the best evaluation so far.

        Return False if a stop was requested before the evaluation was complete.
        """
        state = self._state
        job = state.job
        count = state.count
        sets = {name: dataset for name, dataset in job.eval_sets.items() if name != "test"}
        if not sets:
            return True

        # Evaluate. If a stop prevents it, the checkpoint records that it is still due.
        count.evaluation_due = True
        if not evaluate(state, self._checks, sets):
            return False
        count.evaluation_due = False

        # Judge the result, for early stopping, the best checkpoint and the plateau schedule.
        state.best.update(count.results[job.recipe.eval.metric], count.step)
        count.evaluated(state.best.since, patience=job.rate.patience)
        return True

    def is_best(self) -> bool:
        """Return whether this step has the best evaluation so far, and the recipe saves it."""
        state = self._state
        return state.job.recipe.save.best and state.best.step == state.count.step

    def save(self) -> None:
        """Start a checkpoint, which waits at most for a copy."""
        state = self._state
        recipe = state.job.recipe.save
        state.write({"event": "save"})
        best = state.best.step if recipe.best else None
        keep = Keep(newest=recipe.keep, every=state.job.intervals.forever, best=best)
        about = state.best.state_dict()
        state.save(state.checkpoints, state.count.step, about=about, keep=keep)
        self._bad_steps.saved()
        state.meter.clock.mark("save")

    def end(self, *, stopped: bool) -> dict[str, Any]:
        """End a run that is done or stopped; return the summary (summary.json).

        Args:
            stopped: whether a stop ended the run. Its final weights are the last ones, and it is
                not evaluated.

        Raises:
            OSError: the run was stopped, and its last checkpoint could not be written.
        """
        state = self._state
        job = state.job
        count = state.count
        best = state.best

        # Wait for the last checkpoint, and write final/ (the best weights, if the recipe asks for
        # them).
        failed = state.checkpoints.finish()
        BEATS.enter(ENDING)
        final = self._final_weights(stopped=stopped)
        if not job.recipe.mirror:  # the folder closes them after the last uploads
            state.checkpoints.close()
        folder = state.folder.path / "final"
        write_final(folder, state.model, job.task, state.emas, about=final)

        # Evaluate on the test set; on all sets if the weights of an earlier step were restored, so
        # that the summary describes the weights in final/. A stop also ends this evaluation.
        sets = job.eval_sets
        if final["step"] == final["end"]:
            sets = {name: dataset for name, dataset in sets.items() if name == "test"}
        if sets and not stopped:
            stopped = not evaluate(state, self._checks, sets, of=final["step"])
        if failed and stopped:  # the run is not done, and cannot be resumed from where it was
            raise OSError("the run was stopped, but the last checkpoint could not be written")

        # Say why the run ended, and sum up.
        code = exit_codes.DONE
        if stopped:
            reason = f"stopped by {state.run.stopping.by or 'a signal to another rank'}"
            code = exit_codes.STOPPED
        elif count.step < job.steps:
            reason = f"early stop: {best.metric} was best at step {best.step}"
        else:
            reason = "done"
        return {
            "exit_reason": reason,
            "exit_code": code,
            **count.as_metrics(job.unit),
            "passed_over": count.position - count.samples,
            "seconds": count.elapsed(),
            **count.results,
            "best": {
                "metric": best.metric,
                "value": best.value,
                "step": best.step,
                "larger_is_better": best.upward,
            },
            "final": final,
        }

    def _final_weights(self, *, stopped: bool) -> dict[str, Any]:
        """Restore the weights of the best evaluation, if the recipe asks for them.

        The last weights stay if the checkpoint of the best ones is not intact.

        Returns:
            Which weights the model has, for summary.json and MANIFEST.json: ``weights`` (last or
            best), the ``step`` that they are from, the last step (``end``) and, of the best ones,
            ``metric`` and its ``value``.
        """
        state = self._state
        recipe = state.job.recipe
        best = state.best
        step = state.count.step
        last = {"weights": "last", "step": step, "end": step}
        if recipe.save.final != "best" or not best.step or stopped:
            return last

        # Load the weights of an earlier step, if its checkpoint is intact.
        if best.step != step:
            folder = state.checkpoints.whole(best.step, "final/ gets the last weights")
            if folder is None:
                return last
            state.take(folder)
            load_task_state(state.job.task, folder)
        return {
            "weights": "best",
            "step": best.step,
            "end": step,
            "metric": recipe.eval.metric,
            "value": best.value,
        }

    def _log(self, lr: float, total: float) -> None:
        """Write a log line: metrics, slow ranks, noise scale. Host sync.

        Args:
            lr: learning rate of the step.
            total: weight of the step's global batch.
        """
        state = self._state
        job = state.job
        run = state.run
        count = state.count

        # Read the meter. Host sync, collective.
        metrics = {
            "train/lr": lr,
            **state.meter.read(),
            "train/epoch": count.samples / len(job.train_set),
        }

        # Gather what each rank measures alone. A wait for data counts if it left the device idle.
        step_seconds = metrics.get("speed/step_seconds", 0.0)
        wait = min(self._batches.data_wait(), metrics["share/data"] * step_seconds)
        product = product_seconds(run.device) if run.ranks > 1 else 1.0
        times = run.gathered((wait, product))

        # Report a rank that slows down the others.
        now = time.monotonic()
        for why in self._stragglers.judge(times, step_seconds=step_seconds, now=now):
            state.write({"event": "straggler", "why": why})
            run.display.say(f"{why} (oneloop doctor)")

        # Add the noise scale. Reading it is collective.
        if job.noise_scale:
            parts = self._gradients.sensor.read(total, job.layout.size)
            state.noise.add(*parts, norm=metrics["train/grad_norm"])
            if state.noise.value is not None:
                metrics["train/noise_scale"] = state.noise.value

        # Log and print the metrics.
        count.results["train/loss"] = metrics["train/loss"]
        state.write({"time": count.elapsed(), **metrics, **self._hashes()})
        named = [f"train/{name}" for name in self._gradients.metrics]
        run.display.metrics(count.step, metrics, named)

    def _hashes(self) -> dict[str, str]:
        """With ``batch.grain``, return hashes of all tensors of a checkpoint.

        They show where two runs differ.
        """
        state = self._state
        run = state.run
        if not state.job.exact or not (run.main or run.sharded):
            return {}
        from oneloop.basics.tensor_hash import fingerprint

        tensors = model_tensors(state.model, frozen=False)
        tensors |= optimizer_tensors(state.model, state.optimizer)
        for ema in state.emas:
            tensors |= ema.tensors()
        return fingerprint(tensors)
