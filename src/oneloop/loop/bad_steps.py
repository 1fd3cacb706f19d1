"""What follows a bad step: skip it, rewind to the last checkpoint, or end the run."""

from oneloop.basics.exit_codes import Diverged
from oneloop.loop.evaluations import Evaluations
from oneloop.loop.parts import Parts
from oneloop.optim.bad_step_guard import Step
from oneloop.optim.bad_step_policy import BadSteps, Fault, Outcome
from oneloop.optim.clip import clear_gradients


class BadStepHandler:
    """Does what the recipe says about bad steps.

    Args:
        parts: of the run.
        evaluations: make up for an evaluation after a rewind.
    """

    def __init__(self, parts: Parts, evaluations: Evaluations) -> None:
        self._parts = parts
        self._evaluations = evaluations
        self.seen = BadSteps(parts.job.policy, parts.job.recipe.guard.patience)

    def handle(self, step: Step) -> Outcome:
        """Skip a bad step, which changed nothing; or restore the last checkpoint; or end the run.

        Raises:
            Diverged: the recipe's policy is to stop, or no checkpoint exists to rewind to.
        """
        parts = self._parts
        parts.steps.save_later()
        if step.fault is Fault.RESCALED:  # fp16: the next step has a smaller loss scale
            return Outcome.SKIPPED
        state = parts.state
        count = state.count
        say = parts.run.display.say

        # Decide, and report the samples of the step. The position is already after them.
        action, why = self.seen.answer(step.fault)
        number = count.step + 1
        after = count.position
        ids = parts.job.order[after - parts.job.layout.size : after][1].tolist()
        log = parts.run_log
        log.write(log.line(step=number, event=action, why=why, ids=ids))
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
        clear_gradients(state.model.parameters())
        parts.steps.begin_afresh()

        # Evaluate now, if a stop prevented the evaluation of the checkpoint's step.
        if count.evaluation_due:
            self._evaluations.validate()
        return Outcome.REWOUND
