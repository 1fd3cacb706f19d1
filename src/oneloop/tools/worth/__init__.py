"""``oneloop worth``: what each technique gains."""
