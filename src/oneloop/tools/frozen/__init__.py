"""``oneloop frozen``: the stored outputs of references and teachers."""
