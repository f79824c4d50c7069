"""What a child process wrote to its standard output and error, kept for the one error message that needs its end."""

import os
import tempfile
from typing import Final

TAIL_BYTES = 4096
MAX_LINE_CHARS = 200


class ProcessLog:
    """An unnamed temporary file: a child writes to it, and it is gone with the last process that holds it."""

    def __init__(self) -> None:
        """Creates the file."""
        self._file: Final = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object

    def fileno(self) -> int:
        """Returns the descriptor, so that the log can be given to `subprocess.Popen`."""
        return self._file.fileno()

    def tail(self, num_lines: int = 2) -> str:
        """Returns the last lines that are not blank as one line, each of them shortened; empty if there are none."""
        size = os.fstat(self.fileno()).st_size
        # pread, because parent and child share one file position: seeking here would move the child's writes.
        text = os.pread(self.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
        lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        return " | ".join(line[:MAX_LINE_CHARS] for line in lines[-num_lines:])

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
