"""The report of gpu-check.sh: REPORT.md is for readers, REPORT.json for programs, REPORT.log has each command and its output."""

import datetime
import json
import os
import textwrap
from pathlib import Path

PASSED, FAILED, NOT_RUN, UNFINISHED, MET, NOT_MET = "passed", "FAILED", "NOT RUN", "UNFINISHED", "met", "NOT MET"
SIZES = [8, 64 << 10, 1 << 20, 64 << 20, 256 << 20]
LARGE = 256 << 20
# The end of an output in which a reason is looked for, and the longest reason in REPORT.md, in characters.
OUTPUT, REASON = 6000, 160


class Report:
    def __init__(self, out, kolo, order):
        """Goes on with the report at `out`, if there is one. `order` has the names of all parts."""
        self.out = out
        self.order = order
        # Folders of the machine, and what the report has in their place.
        self.folders = {}
        self.content = {"kolo": kolo, "date": "", "machine": {}, "parts": [], "figures": {}}
        if Path(f"{out}.json").is_file() and (text := Path(f"{out}.json").read_text()):
            self.content.update(json.loads(text))
        self.figures = self.content["figures"]
        self.kolo = self.content["kolo"]
        self.content["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")

    @property
    def machine(self):
        return self.content["machine"]

    @property
    def parts(self):
        return self.content["parts"]

    def begin(self, name, title):
        """Adds the entry of a part, in place of an earlier one and its figures."""
        for entry in [entry for entry in self.parts if entry["part"] == name]:
            self.parts.remove(entry)
            for figure in entry["figures"]:
                self.figures.pop(figure, None)
        entry = {"part": name, "name": title, "status": UNFINISHED, "why": "the check ended during this part", "seconds": 0}
        entry.update(tests=[], figures=[], output="")
        self.parts.append(entry)
        self.parts.sort(key=lambda entry: self.order.index(entry["part"]) if entry["part"] in self.order else len(self.order))
        self.write()
        return entry

    def write(self):
        """Leaves out the name of the machine and its folders, because only the device matters."""
        self.content["was_run"] = any(entry["status"] != NOT_RUN for entry in self.parts)
        self.content["seconds"] = round(sum(entry["seconds"] for entry in self.parts))
        self.content["goals"] = list(goals(self.figures))
        for ending, text in (("json", json.dumps(without_output(self.content), indent=2) + "\n"), ("md", self.table())):
            for folder, name in self.folders.items():
                text = text.replace(folder, name)
            # A check that is ended while it writes leaves the report that was there.
            Path(f"{self.out}.{ending}.new").write_text(text)
            os.replace(f"{self.out}.{ending}.new", f"{self.out}.{ending}")

    def table(self):
        machine = dict(self.machine)
        lines = [f"# GPU checks: {machine.pop('device', 'no GPU')}", ""]
        about = [self.content["date"], f"kolo {self.content['kolo']}", *(f"{name} {value}" for name, value in machine.items())]
        lines += [*textwrap.wrap(", ".join(about), 100), ""]
        if not self.content["was_run"] and self.parts:
            lines += [f"**NOTHING WAS RUN: {self.parts[0]['why']}.**", ""]
        rows = [[goal["what"], goal["goal"], goal["figure"] or "", goal["status"]] for goal in self.content["goals"]]
        lines += table([["goal", "wanted", "figure", ""], *rows])
        lines += self.medians()
        passed = "; ".join(part["name"] for part in self.parts if part["status"] == PASSED)
        if passed:
            lines += ["", *textwrap.wrap(f"Passed: {passed}.", 100, break_on_hyphens=False)]
        rows = [
            [part["name"], part["status"], part["seconds"], textwrap.shorten(part["why"], REASON, placeholder=" ...")]
            for part in self.parts
            if part["status"] != PASSED
        ]
        if rows:
            lines += ["", *table([["part", "", "seconds", "why"], *rows])]
        return "\n".join(lines) + "\n"

    def medians(self):
        medians = {}
        for key, figure in self.figures.items():
            if isinstance(figure, dict) and "in_place" in figure:
                medians[key] = {size: row["p50_us"] for size, row in figure["in_place"].items()}
            elif isinstance(figure, dict):
                medians[key] = figure
        rows = [[key, *(of.get(str(size), "") for size in SIZES)] for key, of in medians.items() if of]
        if not rows:
            return []
        head = ["", *map(size_name, SIZES)]
        return ["", "all_reduce in place, f32, medians in microseconds:", "", *table([head, *rows])]


def without_output(content):
    """Returns the content without what commands printed, which is in the log."""
    if isinstance(content, dict):
        return {key: without_output(of) for key, of in content.items() if key != "output"}
    if isinstance(content, list):
        return [without_output(of) for of in content]
    return content


# ---- The goals ----


def goals(figures):
    """Yields what is wanted on one GPU, each with its figure, if all that it needs was measured."""

    def kolo(key, size, of="p50_us"):
        return figures[key]["in_place"][str(size)][of]

    def of_bound(key, bytes_moved):
        bound = figures["device_copy_gbs"] / bytes_moved
        rate = kolo(key, LARGE, "algbw_gbs")
        return rate / bound, f"{rate / bound:.2f} ({rate:.0f} of {bound:.0f} GB/s)"

    def against_gloo(sizes):
        gloo = figures["gloo under PyTorch, 2 ranks"]
        times = min(gloo[str(size)] / kolo("kolo, 2 ranks", size) for size in sizes)
        return times, f"{times:.1f} times"

    def staged():
        share = figures["pinned_both_ways_us"] / kolo("kolo staged, 2 ranks", 64 << 20)
        return share, f"{share:.2f}"

    def errors():
        took = max(figures[f"a killed rank is named, {path}"] for path in ("direct", "staged", "host"))
        return -took, f"{took:.2f} s"

    large = [size for size in SIZES if size >= 1 << 20]
    for what, goal, least, figure in [
        # Each of two ranks reduces half of both buffers: every byte of a buffer is read once and
        # written once.
        (
            "all_reduce 256 MiB f32, registered, in place, 2 ranks, of the bound",
            ">= 0.7",
            0.7,
            lambda: of_bound("kolo registered, 2 ranks", 4),
        ),
        # As well, the buffer of the rank that does not launch the kernel is copied to its area and
        # back: each copy reads and writes.
        (
            "all_reduce 256 MiB, any device memory, 2 ranks, of the bound",
            ">= 0.8",
            0.8,
            lambda: of_bound("kolo, 2 ranks", 8),
        ),
        ("against Gloo on CUDA tensors, 1 MiB and up", ">= 20 times", 20, lambda: against_gloo(large)),
        ("host-staged path, 64 MiB, of one pinned copy each way", ">= 0.8", 0.8, staged),
        ("small messages, 8 B to 64 KiB, against Gloo on CUDA", ">= 3 times", 3, lambda: against_gloo([8, 64 << 10])),
        ("a killed rank is named, and the context stays usable", "< 1 s", -1, errors),
        ("compute-sanitizer, memcheck", "clean", 0, lambda: (-figures["memcheck"], "clean")),
    ]:
        try:
            value, text = figure()
        except (KeyError, ZeroDivisionError):
            yield {"what": what, "goal": goal, "figure": None, "status": NOT_RUN}
        else:
            yield {"what": what, "goal": goal, "figure": text, "status": MET if value >= least else NOT_MET}


def prose(text):
    """Returns text for Markdown, which takes words in angle brackets for tags of HTML."""
    return text.replace("<", "\\<")


def table(rows):
    rows = [[prose(str(cell)).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0]), *(f"| {' | '.join(row)} |" for row in rows[1:])]


def size_name(size):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"
