"""Prints the speed of the trainer's runs with `-p 1`: the median images/s of the steps after the third.

    python docs/training/speed.py RUN...

In metrics.jsonl, the images/s of a step are the images of all ranks divided by the mean time that the
ranks took for the step.
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
