"""Answers before or beside a run, by driving the loop itself: what each technique is worth."""
