"""Rare work between steps: log, evaluate, handle bad steps; at the end, final weights and
summary."""

import gc
import os
import socket
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from oneloop.basics import exit_codes
from oneloop.basics.exit_codes import Diverged
from oneloop.basics.heartbeats import BEATS, ENDING, EVALUATION
from oneloop.basics.launcher import HOST
from oneloop.checkpoint.store import Keep
from oneloop.data.step_batches import in_memory
from oneloop.ema import EMA
from oneloop.evaluation import evaluate_all
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.machine.replicas import check_replicas
from oneloop.machine.torch_settings import release_cache
from oneloop.measure.advice import Advice
from oneloop.measure.noise_scale import meaning
from oneloop.measure.profiling import Profiling
from oneloop.measure.stragglers import Stragglers
from oneloop.optim.bad_step_guard import Step
from oneloop.optim.bad_step_policy import BadSteps, Fault, Outcome
from oneloop.optim.clip import clear_gradients
from oneloop.run.counters import RunLog
from oneloop.run.export import load_task_state, write_final
from oneloop.run.gradients import Gradients
from oneloop.run.steps import Steps
from oneloop.run.training_state import State
from oneloop.show.examples import Examples


class Upkeep:
    """What a run does between steps, while no step is pending. All methods are collective: call
    them on every rank."""

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
        self._job, self._run, self._state, self._run_log = job, run, state, run_log
        self._gradients, self._steps, self._emas = gradients, steps, emas
        self.bad = BadSteps(job.policy, job.recipe.guard.patience)
        every = job.intervals.every
        about = {"eval_every": every["eval"], "save_every": every["save"], "steps": job.steps}
        # a CPU's cores train
        cores = run.cores if run.device.type != "cpu" and not in_memory(job.train_set) else 0
        self._workers = run.workers(job.recipe.machine.workers)
        self._advice = Advice(workers=self._workers, cores=cores, **about)
        self._stragglers = Stragglers(run.gathered(os.environ.get(HOST) or socket.gethostname()))

    def over(self) -> bool:
        """Return whether the run has reached its last step, or stops early (``stop.patience``)."""
        state, job = self._state, self._job
        return state.count.step >= job.steps or 0 < job.recipe.stop.patience <= state.best.since

    def work(self, due: Collection[str], lr: float, total: float) -> bool:
        """Do what is ``due`` after a step, except saving; return False if a stop was requested
        before the evaluation.

        ``lr`` is the step's learning rate, ``total`` the weight of its global batch."""
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
        job, state, gradients = self._job, self._state, self._gradients
        epoch = state.count.samples / len(job.train_set)
        own = [
            self._steps.data_wait(),
            *(gradients.device_time.read() if self._run.ranks > 1 else (0.0, 0.0, 0.0)),
        ]
        metrics = {"train/lr": lr, **state.meter.read(own), "train/epoch": epoch}
        state.count.measured(state.meter.clock.spent())
        step_seconds = metrics.get("speed/step_seconds", 0.0)
        for _, why in self._stragglers.judge(
            state.meter.own, step_seconds=step_seconds, now=time.monotonic()
        ):
            self._run_log.write(self._run_log.line(event="straggler", why=why))
            self._run.display.say(f"{why} (oneloop doctor)")
        if job.noise_scale:
            state.noise.add(*gradients.noise(total), norm=metrics["train/grad_norm"])
            metrics |= state.noise.metrics()
        remarks = self._advice(state.meter.clock.overall)
        self._run_log.log(metrics, remarks, **gradients.fingerprint(state.optimizer, self._emas))

    def validate(self) -> bool:
        """Evaluate on the validation sets and judge the result; False if a stop was requested
        first."""
        state, job = self._state, self._job
        sets = {name: dataset for name, dataset in job.eval_sets.items() if name != "test"}
        if not sets:
            return True
        state.count.evaluation_due = True
        if not self._evaluate(sets):
            return False
        state.count.evaluation_due = False
        better = state.best.update(
            state.results[job.recipe.eval.best], state.count.step, higher_is_better=job.upward
        )
        state.count.evaluated(better, patience=job.rate.patience)
        return True

    def _evaluate(self, sets: dict[str, Any], of: int | None = None) -> bool:
        """Evaluate weights and EMA weights, at the end those ``of`` an earlier step; False if a
        stop was requested."""
        job, run, state, recipe = self._job, self._run, self._state, self._job.recipe
        examples = (
            Examples(fixed=recipe.eval.samples, worst=recipe.eval.samples)
            if sets.keys() - {"test"}
            else None
        )
        with BEATS.phase(EVALUATION):
            how: dict[str, Any] = {
                "micro": recipe.eval.micro or job.layout.each,
                "workers": self._workers,
            }
            how |= {
                "dtype": job.dtype,
                "seed": recipe.seed,
                "exact": job.exact,
                "interrupted": run.stop_wanted,
            }
            how["window"] = job.layout.size
            what = {"emas": self._emas, "examples": examples, "accelerator": run.accelerator}
            metrics = evaluate_all(job.task, state.model, sets, **what, **how)
        if metrics is None:
            return False
        self._run_log.evaluated(metrics, examples, of=of)
        if recipe.eval.micro not in (None, job.layout.each):
            release_cache()  # memory cached for shapes that only the evaluation has
        state.meter.clock.mark("evaluate")
        return True

    def kept(self) -> dict[str, Any]:
        """Arguments of :meth:`State.save`: what the manifest records, and which checkpoints
        stay."""
        recipe, best = self._job.recipe, self._state.best
        keep = Keep(
            recipe.save.keep, self._job.intervals.forever, best.step if recipe.save.best else None
        )
        return {"about": {"metric": recipe.eval.best, **best.state_dict()}, "keep": keep}

    def is_best(self) -> bool:
        """Return whether this step has the best evaluation so far, and the recipe saves it."""
        return self._job.recipe.save.best and self._state.best.step == self._state.count.step

    def bad_step(self, step: Step) -> Outcome:
        """Skip a bad step, which changed nothing; or restore the last checkpoint; or end the
        run."""
        self._steps.save_later()
        if step.fault is Fault.RESCALED:  # fp16: the next step has a smaller loss scale
            return Outcome.SKIPPED
        job, run, state, run_log = self._job, self._run, self._state, self._run_log
        count, say = state.count, run.display.say
        action, why = self.bad.answer(step.fault)
        # the position is after the samples of the bad step
        number, after = count.step + 1, count.position
        ids = job.order[after - job.layout.size : after][1].tolist()
        run_log.write(run_log.line(step=number, event=action, why=why, ids=ids))
        say(f"step {number}: {why}: {action}; the samples are in metrics.jsonl")
        state.checkpoints.finish()  # the last good checkpoint is sealed first
        if action == "stop":
            raise Diverged(f"step {number}: {why}; the weights are those from before it")
        if action == "skip":
            return Outcome.SKIPPED
        if not state.resume(state.checkpoints, "auto", say=say):
            raise Diverged(f"step {number}: {why}; no checkpoint to rewind to")
        count.position = after  # the samples since the checkpoint are not trained on
        clear_gradients(state.model.parameters())
        self._steps.begin_afresh()
        if count.evaluation_due:
            self.validate()
        return Outcome.REWOUND

    def profiling(self, folder: Path) -> Profiling:
        """Return the profiler for the steps in the recipe; it records on rank 0, to ``folder``."""
        watch, run_log, run = self._job.recipe.watch, self._run_log, self._run
        which = (
            {"profile": watch.profile, "memory": watch.memory}
            if run.main
            else dict.fromkeys(("profile", "memory"))
        )
        log = lambda metrics: run_log.write(run_log.line(**metrics))  # noqa: E731
        return Profiling(folder, run.device, **which, say=run.display.say, log=log)

    def final_weights(self, *, stopped: bool) -> dict[str, Any]:
        """Restore the weights of the best evaluation if the recipe asks for them and they are
        intact; return which weights the model has. No save may be in progress."""
        BEATS.enter(ENDING)
        state, recipe, best = self._state, self._job.recipe, self._state.best
        step, checkpoints = state.count.step, state.checkpoints
        wanted, folder = recipe.save.final == "best" and best.step and not stopped, None
        if wanted and best.step != step:
            folder = checkpoints.whole(best.step, "final/ gets the last weights", state.needs)
        if not wanted or (best.step != step and folder is None):
            return {"weights": "last", "step": step, "end": step}
        if folder is not None:
            state.take(folder)
            load_task_state(self._job.task, folder)
        return {
            "weights": "best",
            "step": best.step,
            "end": step,
            "metric": recipe.eval.best,
            "value": best.value,
        }

    def last_evaluation(self, final: dict[str, Any]) -> bool:
        """Evaluate on the test set; on all sets if the weights of an earlier step were restored, so
        that the summary describes the weights in ``final/``. False if a stop was requested
        first."""
        again = final["step"] != final["end"]
        sets = {name: part for name, part in self._job.eval_sets.items() if again or name == "test"}
        return not sets or self._evaluate(sets, of=final["step"])

    def write_final(self, folder: Path, final: dict[str, Any]) -> None:
        """Write the weights and the EMA weights, which ``final`` describes, for inference."""
        write_final(folder, self._state.model, self._job.task, self._emas, about=final)

    def summary(self, final: dict[str, Any], *, stopped: bool) -> dict[str, Any]:
        """Return the summary (summary.json) of a run that is done or stopped."""
        job, state, metric = self._job, self._state, self._job.recipe.eval.best
        count, best = state.count, state.best
        early = (
            f"early stop: {metric} was best at step {best.step}"
            if count.step < job.steps
            else "done"
        )
        return {
            "exit_reason": f"stopped by {self._run.stopping.by or 'a signal to another rank'}"
            if stopped
            else early,
            "exit_code": exit_codes.STOPPED if stopped else exit_codes.DONE,
            **count.as_metrics(job.unit),
            "passed_over": count.passed_over,
            "seconds": count.elapsed(),
            **state.results,
            "best": {"metric": metric, "value": best.value, "step": best.step},
            "final": final,
            "noise_scale": meaning(state.noise.value, job.layout.size, job.no_noise_scale),
            "time": self._advice.sentence(state.meter.clock.overall()),
            "goodput": count.goodput(time.time()),
        }
