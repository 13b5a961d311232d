"""How ranks of torch.distributed meet."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from ringdance.torch import groups


def test_ranks_that_start_again_agree_whatever_an_earlier_attempt_has_left() -> None:
    store, names = dist.HashStore(), set()
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            works = [pool.submit(groups._agreed, store, rank, 3) for rank in (1, 2, 0)]
            (name,) = {work.result(timeout=20) for work in works}
            names.add(name)
    assert len(names) == 3
