"""Quiet start: imports TensorFlow without the notices that its C++ code prints meanwhile.

They come before its log is set up, so no level of `TF_CPP_MIN_LOG_LEVEL` keeps them out (TensorFlow 2.21).
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# Of information only; warnings and errors (W0000, E0000) are not among them.
NOTICE = re.compile(rb"I\d{4} |WARNING: All log messages before absl::InitializeLog\(\)")


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Holds back what is written to stderr, and writes it at the end of the `with`, but for such notices."""
    try:
        stderr = os.dup(2)
    except OSError:  # there is none
        yield
        return
    if sys.stderr is not None:
        sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            if sys.stderr is not None:
                sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            os.write(2, b"".join(line for line in held if not NOTICE.match(line)))
