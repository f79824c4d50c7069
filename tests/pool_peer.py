"""A process that gives memory to the pool of a master, and nothing else: ``pool_peer.py ADDRESS BYTES``.

Prints a line when it is there, and ends when its input does.
"""

import sys

from mooncrate import mooncake

with mooncake.connect(sys.argv[1], segment_bytes=int(sys.argv[2])):
    print("ready", flush=True)
    sys.stdin.read()
