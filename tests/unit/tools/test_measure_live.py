"""The measurement of the live view: its two loads do the same, and one of them is watched."""

import measure_core
import measure_live
from quire.procs.messages import Watched
from quire.procs.wire import FROM_CORE


def test_frames_come_as_often_as_told_and_nobody_watches_the_other() -> None:
    case = measure_core.Case(num_running=4, depth=2, churn=True)
    plain, watched = measure_core._Load(case), measure_live._Watched(case, 5)
    plain.warm_up()
    for _ in range(20):
        measure_live._step(plain)
        measure_live._step(watched.load)
        watched.after_step()
    assert plain.core.recorder is None and watched.load.core.recorder is not None
    frames = [FROM_CORE.decode(data) for data in watched.frames]
    assert len(frames) == 4 == len(watched.frame_us)
    steps = [len(one.frame.engines[0].steps) for one in frames if isinstance(one, Watched)]
    assert steps == [5] * 4


def test_a_row_has_every_number() -> None:
    row = measure_live.measure(False, 20)
    assert row["frames/s"] <= 10 and row["frame KB"] > 1 and {"HTTP, 0", "HTTP, 1", "HTTP, 10"} <= set(row)
