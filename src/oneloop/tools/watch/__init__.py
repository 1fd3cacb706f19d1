"""``oneloop watch``: charts of the metrics in the terminal, while runs train."""
