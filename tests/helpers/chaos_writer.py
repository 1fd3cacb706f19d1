"""The writing process, with its actions recorded; chaos.py starts it in place of
oneloop.checkpoint.writer."""

from chaos import trace_writing
from oneloop.checkpoint import writer

trace_writing("background writing")
writer.main()
