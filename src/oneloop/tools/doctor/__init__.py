"""``oneloop doctor``: can this host train, and several hosts together?"""
