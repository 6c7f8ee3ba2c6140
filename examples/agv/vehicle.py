"""The other end of the bus: prints what a vehicle's controller would read.

python vehicle.py --can vcan0 [--stand-in /tmp/agv-can]
"""

from __future__ import annotations

import argparse
import select
import sys
from pathlib import Path

from can_bus import FRAME, NoBusError, open_receiver, unpack


def line(raw: bytes) -> str:
    """One frame as text."""
    frame = unpack(raw)
    if frame is None:
        return f"{raw.hex()} ignored: damaged, or not ours"
    speed = f"{frame.speed_cm_s:3d} cm/s, valid for {frame.valid_s:g} s"
    return f"{frame.counter:3d} {frame.action:<6} {speed}  by {frame.source}: {frame.why}"


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="print the commands on the bus")
    parser.add_argument("--can", help="interface, as can0")
    parser.add_argument("--stand-in", type=Path, help="path, where there is no CAN")
    arguments = parser.parse_args()
    try:
        sock, name = open_receiver(arguments.can, arguments.stand_in)
    except NoBusError as error:
        sys.exit(f"vehicle: {error}")
    print(f"vehicle: listens on {name}", flush=True)
    try:
        while True:
            select.select([sock], [], [])
            print(line(sock.recv(FRAME.size + 1)), flush=True)
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
