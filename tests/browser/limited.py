"""Train for some seconds, limited by what the first argument names."""

import sys
import time

import numpy as np

import ringdance.numpy as hvd

hvd.init()
kind, seconds = sys.argv[1], float(sys.argv[2])
gradient = np.ones(8_000_000 if kind == "communication" else 1000, np.float32)
end = time.monotonic() + seconds
step = 0
while True:
    if kind == "input":
        time.sleep(0.02)
    elif kind == "skew":
        time.sleep(0.03 if hvd.rank() == 1 else 0.005)
    elif kind == "computation":
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            np.sin(gradient)
    hvd.allreduce(gradient, name="gradient", out=gradient)
    hvd.mark_step()
    step += 1
    if step % 10 == 0 and hvd.allreduce(np.array(time.monotonic() > end, np.int32), op=hvd.Max, name="end"):
        break
