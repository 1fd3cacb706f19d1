"""Commands that run short trainings to answer a question: ``oneloop worth`` and ``oneloop
prove``."""
