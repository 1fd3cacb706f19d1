"""What the loop asks of a task: its methods, their checks, losses over a whole batch, and
evaluation metrics."""
