"""A writing process whose storage hangs at the second save, on one rank."""

import os
import time

from oneloop.checkpoint import writer

write_tensors = writer.write_tensors


def stuck(draft, name, *given):
    if "00000020" in draft.path.name and os.environ["STUCK"] in name:
        time.sleep(600)
    return write_tensors(draft, name, *given)


writer.write_tensors = stuck

if __name__ == "__main__":
    writer.main()
