"""The writing process, with what it does written down; started in place of oneloop.checkpoint.writer by chaos.py."""

from chaos import trace_writing
from oneloop.checkpoint import writer

trace_writing("background writing")
writer.main()
