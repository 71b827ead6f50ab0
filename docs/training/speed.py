"""The speed of the trainer's runs that were made with `-p 1`: the median of images/s over the steps after the third.

    python docs/training/speed.py RUN...

In metrics.jsonl a step's images/s are the images of all ranks divided by the mean of the times that the ranks took for it.
"""

import json
import pathlib
import statistics
import sys

for run in map(pathlib.Path, sys.argv[1:]):
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ranks = next(event["ranks"] for event in events if event["kind"] == "start")
    speeds = [event["images_per_s"] for event in events if event["kind"] == "step"]
    print(f"{ranks} ranks: {statistics.median(speeds[3:]):.2f} images/s")
