"""What follows a bad step: skip it, rewind to the last checkpoint, or end the run."""

from oneloop.basics.exit_codes import Diverged
from oneloop.loop.steps import StepBatches
from oneloop.loop.training_state import State
from oneloop.optim.bad_step_guard import Step
from oneloop.optim.bad_step_policy import BadSteps, Fault, Outcome
from oneloop.optim.clip import clear_gradients


def handle(step: Step, state: State, batches: StepBatches, in_a_row: BadSteps) -> Outcome:
    """Skip a bad step, which changed nothing; or restore the last checkpoint; or end the run.

    Args:
        step: the bad step.
        state: of the run; a rewind restores it.
        batches: of the run; after a rewind they begin again.
        in_a_row: chooses the action, and counts bad steps.

    Raises:
        Diverged: the recipe's policy is to stop, or no checkpoint exists to rewind to.
    """
    batches.save_later()
    if step.fault is Fault.RESCALED:  # fp16: the next step has a smaller loss scale
        return Outcome.SKIPPED
    job = state.job
    count = state.count
    say = state.run.display.say

    # Decide, and report the samples of the step. The position is already after them.
    action, why = in_a_row.answer(step.fault)
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
    clear_gradients(state.model.parameters())
    batches.begin_afresh()
    return Outcome.REWOUND
