"""Commands that answer a question before a long run: ``oneloop plan``, ``worth``, ``prove``."""
