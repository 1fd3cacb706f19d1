"""``oneloop prove``: does a layout train the same weights as one process?"""
