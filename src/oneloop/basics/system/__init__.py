"""The room that knows the operating system: processes, memory and signals.

No other file of oneloop asks which system runs it, or uses what only some systems have. On Linux
the answers come from the kernel's files, which takes microseconds; psutil answers on other systems.
"""
