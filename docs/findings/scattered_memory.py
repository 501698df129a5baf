"""The same work takes longer in pages from all over the memory than in pages that lie side by side.

    python docs/findings/scattered_memory.py

It needs 4 GiB. It takes 3 GiB, and with them what is scattered already, and then two areas of 64 MiB: one whose pages
are neighbours, and one whose pages lie 192 KiB apart on average, at random, as a process gets them that starts on a
machine that has been busy. Both consist of ordinary pages: for the program nothing differs but where they are.
"""

import mmap
import random
import statistics
import sys
import time

import torch

HELD, SIZE, PAGE = 3 * 2**30, 2**26, mmap.PAGESIZE
NUM_ELEMENTS = 200_000


def area(size: int) -> mmap.mmap:
    """Returns memory of ordinary pages, all of which are there."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[::PAGE] = bytes(size // PAGE)
    return memory


held = area(HELD)
neighbours = area(SIZE)
apart = HELD // (SIZE // PAGE)
chance = random.Random(0)  # pages at equal distances would share lines of the caches
for start in range(0, HELD, apart):
    held.madvise(mmap.MADV_DONTNEED, start + PAGE * chance.randrange(apart // PAGE), PAGE)
scattered = area(SIZE)

torch.set_num_threads(1)
vectors = [torch.frombuffer(memory, dtype=torch.float32) for memory in (neighbours, scattered)]
chosen = torch.randperm(SIZE // 4, generator=torch.Generator().manual_seed(0))[:NUM_ELEMENTS]
seconds: list[list[float]] = [[], []]
for _ in range(60):
    for vector, times in zip(vectors, seconds, strict=True):  # in turn, so that both see the same machine
        began = time.perf_counter()
        vector[chosen].sum()
        times.append(time.perf_counter() - began)
side_by_side, all_over = (1e3 * statistics.median(times) for times in seconds)
print(f"{NUM_ELEMENTS:,} elements of neighbouring pages: {side_by_side:.2f} ms, of scattered ones: {all_over:.2f} ms")
as_described = all_over > 1.1 * side_by_side
print("as described" if as_described else "changed: expected more than 1.1 times as long")
sys.exit(not as_described)
