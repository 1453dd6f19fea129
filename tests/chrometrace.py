"""Whether a Chrome trace is whole: what the tests of serial and of real rings share."""
import json
from itertools import pairwise


def check(folder, ranks, error):
    """Loads a trace: rows nest, times rise, and every arrow has both ends, the second not before the first by more than ``error``."""
    with open(f"{folder}/trace.json") as file:
        events = json.load(file)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} <= set("XMsf")
    assert len({event["pid"] for event in events}) == ranks
    assert all(event["dur"] >= 0 and event["ts"] >= -1e6 * error for event in slices)
    rows = {}
    for event in slices:
        rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        assert all(first[1] <= second[0] + 0.002 for first, second in pairwise(sorted(row)))
    starts, ends = ({event["id"]: event for event in events if event["ph"] == ph} for ph in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(event["ph"] == "s" for event in events)
    assert bool(starts) == (ranks > 1)
    for key, start in starts.items():
        assert ends[key]["pid"] != start["pid"]
        assert ends[key]["ts"] >= start["ts"] - 1e6 * error
        for arrow in (start, ends[key]):
            assert any(a <= arrow["ts"] < b for a, b in rows[arrow["pid"], arrow["tid"]])
    return starts
